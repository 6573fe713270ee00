"""Graph attention on NumPy arrays by compiled loops: the same arguments and results as on a GPU."""

from typing import Any

import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ...engine.cpu import writing
from ...engine.cpu_arrays import packed, wide
from ...engine.structure import transposed
from ..score import Forward, GatArguments, heads_and_feat, shape_of
from . import loops
from .loops import Rows, Scores, Sizes
from .small import Dropping, Twin, dropping_of, narrow, rounded, type_of_sums

#: Rows of a share of the sums of vectors' gradients, at least, and shares at most.
_ROWS, _MOST_SHARES = 1024, 64


def _forward(
    A: CSR, bias: Array | None, args: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """Compute the product in ``out``, or as sums run; with ``train`` what backward needs too."""
    h, kind = args.h, type_of_sums(args.h)
    if out is None:
        out = np.empty((A.n_rows, *h.shape[1:]), kind)
    plus = np.empty(out.shape if train else 0, kind)
    statistics = np.empty((A.n_rows, heads_and_feat(h)[0], 4) if train else 0, kind)
    if out.size or train:
        with writing(out) as (Y, pieces):
            results = Y.reshape(-1), plus.reshape(-1), statistics.reshape(-1), np.empty(0, kind)
            rows = A.indptr, A.indices, packed(h), *_shared(A, args), args.loops
            loops.forward(*rows, *results, pieces)
            if bias is not None:
                Y += wide(bias).reshape(h.shape[1:])
    return Forward(out, plus, statistics)


def _gradients(
    A: CSR, transpose: tuple[CSR | None, Any], grad: Array, saved: Forward, of_edges: bool,
    args: GatArguments,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute gradients of the features and of all scores, over columns and then over rows."""
    h, has_loops = args.h, args.loops
    kind, X, g = type_of_sums(h), packed(h), packed(grad)
    T, perm = transposed(A) if transpose[0] is None else (transpose[0], transpose[1])
    terms = (args.el, True), (args.er, True), (args.loop_edges, True), (args.edges, of_edges)
    dh, stats = np.empty(h.shape, h.dtype), np.empty(3 * args.er.size, kind)
    results = [np.empty(shape_of(term, wanted), kind) for term, wanted in terms]
    d_el, d_er, d_loops, d_edges = (a.reshape(-1) for a in results)
    (out, plus, forward), shared = (packed(a) for a in saved), _shared(T, args)
    slope = shared[-1]
    if not has_loops:
        d_loops[...] = 0
        d_loops = d_loops[:0]
    with writing(dh) as (result, pieces):
        loops.statistics(out, plus, g, forward, slope, h.shape[-1], stats, d_er, pieces)
        columns, of_columns = Rows(T.indptr, T.indices, perm), (result.reshape(-1), d_el, pieces)
        loops.backward(columns, g, X, *shared, has_loops, stats, *of_columns)
        if len(d_edges) or len(d_loops):
            of_rows = stats, d_edges, d_loops, pieces
            loops.edge_gradient(A.indptr, A.indices, g, X, *shared, has_loops, *of_rows)
    return dh, *results


def _attention(A: CSR, args: GatArguments, out: Array) -> None:
    """Write ``P[e, k]``, 0 at loops that are left out."""
    none = np.empty(0, out.dtype)
    with writing(out) as (P, pieces):
        rows = A.indptr, A.indices, none, *_shared(A, args), args.loops
        loops.forward(*rows, none, none, none, P.reshape(-1), pieces)


def gat_scores(h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """Compute ``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    el, er = (np.empty(h.shape[:-1], type_of_sums(h)) for _ in range(2))
    if h.size:
        args = packed(h), packed(source), packed(target), *heads_and_feat(h)
        with writing(el) as (_, pieces):
            loops.scores_of_vectors(*args, el.reshape(-1), er.reshape(-1), pieces)
    else:
        el[...] = er[...] = 0
    return el, er


def _through_scores(
    h: Array, dh: Array, d_el: Array, d_er: Array, source: Array, target: Array
) -> tuple[Array, Array]:
    scores, vectors = (packed(d_el), packed(d_er)), (packed(source), packed(target))
    shares = min(-(-len(h) // _ROWS), _MOST_SHARES)  # whatever the number of threads
    sums, found = np.zeros((shares, 2, *source.shape), d_el.dtype), packed(dh)
    if h.size:
        of_rows = *heads_and_feat(h), found, sums.reshape(-1), shares
        with writing(dh):
            loops.through_scores(packed(h), scores, vectors, *of_rows)
    return rounded(found.reshape(h.shape), h), sums.sum(0)


def _shared(A: CSR, args: GatArguments) -> tuple[Scores, Sizes, Dropping, Any]:
    """Return arguments of all loops over rows: scores, sizes, dropout and the slope."""
    kind = type_of_sums(args.h)
    scores = args.el, args.er, args.edges, args.loop_edges
    flat = (np.empty(0, kind) if a is None else packed(a) for a in scores)
    longest = int(np.diff(A.indptr).max(initial=0)) + bool(args.loops)
    dropping = dropping_of(args.dropout, args.seed, kind)
    sizes = Sizes(*heads_and_feat(args.h), longest)
    return Scores(*flat), sizes, dropping, narrow(kind, args.slope)


_twin = Twin(_forward, _gradients, _through_scores, _attention)
gat, gat_attention, gat_backward = _twin.gat, _twin.gat_attention, _twin.gat_backward
gat_with_statistics = _twin.gat_with_statistics
gat_of_vectors, gat_of_vectors_backward = _twin.gat_of_vectors, _twin.gat_of_vectors_backward
gat_of_vectors_with_statistics = _twin.gat_of_vectors_with_statistics
