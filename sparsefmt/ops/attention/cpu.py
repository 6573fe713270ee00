"""Graph attention on NumPy arrays: the same arguments and results as on a GPU."""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.cpu import packed, wide, writing
from ..engine.structure import transposed
from . import cpu_gat
from .cpu_gat import Dropping, Rows, Scores, Sizes
from .operands import Forward, GatArguments, heads_and_feat, shape_of, sums_dtype


def gat(A: CSR, bias: Array | None, *arguments: Any, out: Array | None = None, **_: Any) -> Array:
    """``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, as ``ops.gat``.

    The others are ``GatArguments``, here and in the gradients.
    """
    given = GatArguments(*arguments)
    out = np.empty((A.n_rows, *given.h.shape[1:]), given.h.dtype) if out is None else out
    found: Array = _forward(A, bias, given, out=out, train=False).out
    return found


def gat_with_statistics(A: CSR, bias: Array | None, *arguments: Any) -> Forward:
    """``gat``, and what its gradient needs."""
    given = GatArguments(*arguments)
    out, plus, statistics = _forward(A, bias, given)
    return Forward(_rounded(out, given.h), _rounded(plus, given.h), statistics)


def _forward(
    A: CSR, bias: Array | None, given: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """The product in ``out``, or as sums run; with ``train`` what backward needs too."""
    h, kind = given.h, _type_of_sums(given.h)
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


def gat_backward(
    A: CSR, T: CSR | None, perm: Array | None, grad: Array, out: Array | None, plus: Array | None,
    statistics: Array | None, of_edges: bool, *arguments: Any, **_: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of ``h, el, er, loop_edges, edges``, empty where not given or not wanted.

    What is not given of the forward pass and of the transpose is made anew.
    """
    given, found = GatArguments(*arguments), Forward(out, plus, statistics)
    if statistics is None:
        found = _forward(A, None, given)
    transpose = transposed(A) if T is None else (T, perm)
    return _gradients(A, transpose, grad, found, of_edges, given)


def gat_of_vectors_backward(
    A: CSR, T: CSR, perm: Array, grad: Array, out: Array, plus: Array, statistics: Array,
    of_edges: bool, source: Array, target: Array, bias: Array | None, *arguments: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Gradients of ``h``, of ``source, target, bias`` in one array, ``loop_edges`` and ``edges``.

    Vectors and bias are as ``gat_scores`` and ``gat`` had them.
    """
    given = GatArguments(*arguments)
    if bias is not None:
        out = wide(out) - wide(bias).reshape(given.h.shape[1:])
    found = Forward(out, plus, statistics)
    dh, d_el, d_er, *others = _gradients(A, (T, perm), grad, found, of_edges, given)
    dh, d_vectors = _through_scores(given.h, dh, d_el, d_er, source, target)
    if bias is not None:
        d_bias = np.ones(len(grad), d_el.dtype) @ wide(grad).reshape(len(grad), source.size)
        d_vectors = np.concatenate([d_vectors, d_bias.reshape(1, *source.shape)])
    return dh, d_vectors, *others


def _gradients(
    A: CSR, transpose: tuple[CSR, Any], grad: Array, found: Forward, of_edges: bool,
    given: GatArguments,
) -> tuple[Array, ...]:  # fmt: skip
    h, edges, loop_edges = given.h, given.edges, given.loop_edges
    kind, (T, perm), X, g = _type_of_sums(h), transpose, packed(h), packed(grad)
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
    """``P[e, k]`` before dropout, 0 at loops that are left out."""
    out = np.empty((A.nnz, *el.shape[1:]), _type_of_sums(el)) if out is None else out
    h = np.empty((*el.shape, 0) if el.ndim == 2 else (len(el), 1, 0), el.dtype)
    given = GatArguments(h, el, er, edges, slope=slope, loops=loops)
    with writing(out) as (P, pieces):
        scores, sizes, _, narrow_slope = _shared(A, given)
        of_entries = P.reshape(-1), pieces
        cpu_gat.attention(A.indptr, A.indices, scores, sizes, narrow_slope, loops, *of_entries)
    return out


def gat_scores(A: None, h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    both = _by_head(h) @ _vectors(h, source, target).transpose(0, 2, 1)
    el, er = (np.ascontiguousarray(both[..., k].T).reshape(h.shape[:-1]) for k in range(2))
    return el, er


def _through_scores(
    h: Array, dh: Array, d_el: Array, d_er: Array, source: Array, target: Array
) -> tuple[Array, Array]:
    """``dh`` with what the scores add to it, and the gradients of both vectors."""
    heads, feat = heads_and_feat(h)
    scores = np.stack([d.reshape(len(h), heads).T for d in (d_el, d_er)], axis=1)
    d_vectors = (scores @ _by_head(h)).transpose(1, 0, 2).reshape(2, *source.shape)
    added = scores.transpose(0, 2, 1) @ _vectors(h, source, target)
    found = wide(dh).reshape(len(h), heads, feat) + added.transpose(1, 0, 2)
    return _rounded(found.reshape(h.shape), h), np.ascontiguousarray(d_vectors)


def _by_head(h: Array) -> Array:
    """(heads, n, feat), as sums run."""
    return wide(h).reshape(len(h), *heads_and_feat(h)).transpose(1, 0, 2)


def _vectors(h: Array, source: Array, target: Array) -> Array:
    """(heads, 2, feat), as sums run."""
    return np.stack([wide(v).reshape(heads_and_feat(h)) for v in (source, target)], axis=1)


def _type_of_sums(x: Array) -> Any:
    return np.dtype(sums_dtype(x)).type


def _rounded(values: Array, like: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(like.dtype, copy=False)


def _shared(A: CSR, given: GatArguments) -> tuple[Scores, Sizes, Dropping, Any]:
    """Arguments that all loops over rows take: scores, sizes, dropout and the slope."""
    kind = _type_of_sums(given.h)
    scores = given.el, given.er, given.edges, given.loop_edges
    flat = (np.empty(0, kind) if a is None else packed(a) for a in scores)
    longest = int(np.diff(A.indptr).max(initial=0)) + bool(given.loops)
    dropping = dropping_of(given.dropout, given.seed, kind)
    sizes = Sizes(*heads_and_feat(given.h), longest)
    return Scores(*flat), sizes, dropping, narrow(kind, given.slope)


def dropping_of(share: float, seed: Any, kind: Any) -> Dropping:
    """Drop that share by a seed, None for none; ``kind`` is the type that sums run in."""
    below = min(round(share * 2**32), 2**32 - 1)
    number = 0 if seed is None else int(np.asarray(seed).item())
    scale = kind(1 / (1 - share) if below else 1)
    return Dropping(np.uint64(number % 2**64), np.uint64(below), scale)


def narrow(kind: Any, value: float) -> Any:
    """Convert to the type that sums run in, to infinity where it holds no such number."""
    with np.errstate(over="ignore"):
        return kind(value)
