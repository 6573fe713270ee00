"""Graph attention on NumPy arrays by compiled loops: the same arguments and results as on a GPU."""

from typing import Any

import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ...engine.loops import writing
from ...engine.small import packed, wide
from ...engine.structure import transposed
from ..score import Forward, GatArguments, heads_and_feat, shape_of
from . import loops as cpu_gat
from .loops import Rows, Scores, Sizes
from .small import Dropping, Twin, dropping_of, narrow, rounded, type_of_sums

#: Rows of a share of the sums of vectors' gradients, at least, and shares at most.
_ROWS, _MOST_SHARES = 1024, 64


def _forward(
    A: CSR, bias: Array | None, given: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """Compute the product in ``out``, or as sums run; with ``train`` what backward needs too."""
    h, kind = given.h, type_of_sums(given.h)
    if out is None:
        out = np.empty((A.n_rows, *h.shape[1:]), kind)
    plus = np.empty(out.shape if train else 0, kind)
    statistics = np.empty((A.n_rows, heads_and_feat(h)[0], 4) if train else 0, kind)
    inputs = _shared(A, given)
    if out.size or train:
        with writing(out) as (Y, pieces):
            cpu_gat.forward(
                *(A.indptr, A.indices, packed(h), *inputs, given.loops),
                *(Y.reshape(-1), plus.reshape(-1), statistics.reshape(-1), pieces),
            )
            if bias is not None:
                Y += wide(bias).reshape(h.shape[1:])
    return Forward(out, plus, statistics)


def _gradients(
    A: CSR, transpose: tuple[CSR | None, Any], grad: Array, found: Forward, of_edges: bool,
    given: GatArguments,
) -> tuple[Array, ...]:  # fmt: skip
    h, edges, loop_edges = given.h, given.edges, given.loop_edges
    kind, X, g = type_of_sums(h), packed(h), packed(grad)
    T, perm = transposed(A) if transpose[0] is None else (transpose[0], transpose[1])
    shapes = given.el.shape, given.er.shape, shape_of(loop_edges), shape_of(edges, of_edges)
    dh, stats = np.empty(h.shape, h.dtype), np.empty(3 * given.er.size, kind)
    d_el, d_er, d_loops, d_edges = results = [np.empty(shape, kind) for shape in shapes]
    shared, of_rows = _shared(T, given), (packed(a) for a in found)
    slope, loops = narrow(kind, given.slope), given.loops
    with writing(dh) as (result, pieces):
        out, plus, forward = of_rows
        of_targets = stats, d_er.reshape(-1), pieces
        cpu_gat.statistics(out, plus, g, forward, slope, h.shape[-1], *of_targets)
        of_sources = result.reshape(-1), d_el.reshape(-1), pieces
        cpu_gat.backward(Rows(T.indptr, T.indices, perm), g, X, *shared, loops, stats, *of_sources)
        if edges is not None and of_edges:
            of_edges_ = stats, d_edges.reshape(-1), pieces
            cpu_gat.edge_gradient(A.indptr, A.indices, g, X, *shared, loops, *of_edges_)
        if loop_edges is not None and loops:
            of_loops = stats, d_loops.reshape(-1), pieces
            cpu_gat.loop_gradient(np.int64(A.nnz), g, X, *shared, *of_loops)
        else:
            d_loops[...] = 0
    return dh, *results


def gat_attention(
    A: CSR, el: Array, er: Array, edges: Array | None, slope: float, loops: bool, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``P[e, k]`` before dropout, 0 at loops that are left out."""
    out = np.empty((A.nnz, *el.shape[1:]), type_of_sums(el)) if out is None else out
    h = np.empty((*el.shape, 0) if el.ndim == 2 else (len(el), 1, 0), el.dtype)
    given = GatArguments(h, el, er, edges, slope=slope, loops=loops)
    with writing(out) as (P, pieces):
        scores, sizes, _, narrow_slope = _shared(A, given)
        of_entries = P.reshape(-1), pieces
        cpu_gat.attention(A.indptr, A.indices, scores, sizes, narrow_slope, loops, *of_entries)
    return out


def gat_scores(h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """Compute ``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    el, er = (np.empty(h.shape[:-1], type_of_sums(h)) for _ in range(2))
    if h.size:
        given = packed(h), packed(source), packed(target), *heads_and_feat(h)
        with writing(el) as (_, pieces):
            cpu_gat.scores_of_vectors(*given, el.reshape(-1), er.reshape(-1), pieces)
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
            cpu_gat.through_scores(packed(h), scores, vectors, *of_rows)
    return rounded(found.reshape(h.shape), h), sums.sum(0)


def _shared(A: CSR, given: GatArguments) -> tuple[Scores, Sizes, Dropping, Any]:
    """Return arguments of all loops over rows: scores, sizes, dropout and the slope."""
    kind = type_of_sums(given.h)
    scores = given.el, given.er, given.edges, given.loop_edges
    flat = (np.empty(0, kind) if a is None else packed(a) for a in scores)
    longest = int(np.diff(A.indptr).max(initial=0)) + bool(given.loops)
    dropping = dropping_of(given.dropout, given.seed, kind)
    sizes = Sizes(*heads_and_feat(given.h), longest)
    return Scores(*flat), sizes, dropping, narrow(kind, given.slope)


_twin = Twin(_forward, _gradients, _through_scores)
gat, gat_with_statistics, gat_backward = _twin.gat, _twin.gat_with_statistics, _twin.gat_backward
gat_of_vectors, gat_of_vectors_backward = _twin.gat_of_vectors, _twin.gat_of_vectors_backward
gat_of_vectors_with_statistics = _twin.gat_of_vectors_with_statistics
