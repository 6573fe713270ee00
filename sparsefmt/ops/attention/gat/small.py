"""Small graph attention on NumPy arrays: NumPy's loops for scores, SciPy's for sums, one thread.

Scores and weights are (heads, nnz).  As in the compiled loops sums are split by the sign of the
score, so that gradients of scores need no product of each entry.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ....formats.primitives import add_product, add_transposed_product
from ...engine import small
from ...engine.small import wide
from .. import score
from ..score import Dropping, Forward, GatArguments, heads_and_feat, heads_of, shape_of

#: Work on the score of an entry, in multiply-adds of features.
_SCORE = 16
#: Values of gathered features at a time.
_PART = 1 << 19


def reasons_against(A: CSR, heads: int, feat: int) -> list[str]:
    """List the reasons against small attention of ``heads`` heads with ``feat`` features."""
    work = (A.nnz + A.n_rows) * heads * (feat + _SCORE)
    return small.reasons_against(work, small.MOST_OF_ATTENTION)


def philox(seed: Array, counter: Array, stream: Array) -> Array:
    """Compute the first word of each counter by Philox4x32-10 (SC'11), in loops as well."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = np.uint64(counter) & low, np.uint64(counter) >> half
    c, d = np.uint64(stream), np.uint64(0)
    k0, k1 = np.uint64(seed) & low, np.uint64(seed) >> half
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (q >> half) ^ b ^ k0, q & low
        c, d = (p >> half) ^ d ^ k1, p & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return a


class Twin(NamedTuple):
    """Kernels of GAT made of four functions.

    ``forward`` returns a ``Forward`` as sums run, ``gradients`` those of ``h, el, er, loop_edges,
    edges``, and ``through_scores`` adds to ``dh`` and returns the gradients of both vectors, too.
    """

    forward: Callable[..., Forward]
    gradients: Callable[..., tuple[Array, ...]]
    through_scores: Callable[..., tuple[Array, Array]]
    attention: Callable[..., None]

    def gat(
        self, A: CSR, *arguments: Any, bias: Array | None = None, out: Array | None = None, **_: Any
    ) -> Array:
        """Compute ``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, of ``GatArguments``."""
        args = GatArguments(*arguments)
        out = np.empty((A.n_rows, *args.h.shape[1:]), args.h.dtype) if out is None else out
        result: Array = self.forward(A, bias, args, out=out, train=False).out
        return result

    def gat_with_statistics(self, A: CSR, *arguments: Any, bias: Array | None = None) -> Forward:
        """Compute ``gat``, and what its gradient needs."""
        args = GatArguments(*arguments)
        out, plus, statistics = self.forward(A, bias, args)
        return Forward(rounded(out, args.h), rounded(plus, args.h), statistics)

    def gat_attention(
        self, A: CSR, el: Array, er: Array, edges: Array | None, slope: float, loops: bool, *,
        out: Array | None = None,
    ) -> Array:  # fmt: skip
        """Compute ``P[e, k]`` before dropout, 0 at loops that are left out."""
        out = np.empty((A.nnz, *el.shape[1:]), type_of_sums(el)) if out is None else out
        h = np.empty((*el.shape, 0) if el.ndim == 2 else (len(el), 1, 0), el.dtype)
        self.attention(A, GatArguments(h, el, er, edges, slope=slope, loops=loops), out)
        return out

    def gat_of_vectors(
        self, A: CSR, h: Array, source: Array, target: Array, bias: Array | None, *more: Any
    ) -> Array:
        """Compute ``gat`` of scores of vectors; arguments and results as on a GPU."""
        args = _with_scores(h, source, target, *more)
        return self.gat(A, *args, bias=bias).reshape(h.shape)

    def gat_of_vectors_with_statistics(
        self, A: CSR, h: Array, source: Array, target: Array, bias: Array | None, *more: Any
    ) -> tuple[Array, Array, Array]:
        """Compute ``gat_of_vectors``, and what its gradient needs."""
        args = _with_scores(h, source, target, *more)
        out, plus, statistics = self.gat_with_statistics(A, *args, bias=bias)
        of_rows = np.concatenate([part.reshape(-1) for part in (statistics, args.el, args.er)])
        return out.reshape(h.shape), plus.reshape(h.shape), of_rows

    def gat_backward(
        self, A: CSR, T: CSR | None, perm: Array | None, grad: Array, out: Array | None,
        plus: Array | None, statistics: Array | None, of_edges: bool, *arguments: Any, **_: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Compute gradients of ``h, el, er, loop_edges, edges``, as on a GPU."""
        args, saved = GatArguments(*arguments), Forward(out, plus, statistics)
        if statistics is None:
            saved = self.forward(A, None, args)
        return self.gradients(A, (T, perm), grad, saved, of_edges, args)

    def gat_of_vectors_backward(
        self, A: CSR, T: CSR, perm: Array, grad: Array, out: Array, plus: Array, of_rows: Array,
        of_edges: bool, *inputs: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Compute gradients of ``h``, of vectors and bias in one, ``loop_edges``, ``edges``."""
        h, source, target, bias, *more = inputs
        n, (heads, feat) = len(h), heads_of(source)
        features, grad, out, plus = (a.reshape(n, heads, feat) for a in (h, grad, out, plus))
        statistics, el, er = np.split(of_rows, [4 * n * heads, 5 * n * heads])
        args = GatArguments(features, el.reshape(n, heads), er.reshape(n, heads), *more)
        if bias is not None:
            out = wide(out) - wide(bias).reshape(heads, feat)
        saved = Forward(out, plus, statistics.reshape(n, heads, 4))
        dh, d_el, d_er, *d_scores = self.gradients(A, (T, perm), grad, saved, of_edges, args)
        dh, d_vectors = self.through_scores(features, dh, d_el, d_er, source, target)
        if bias is not None:
            d_bias = np.ones(n, d_el.dtype) @ wide(grad).reshape(n, source.size)
            d_vectors = np.concatenate([d_vectors, d_bias.reshape(1, *source.shape)])
        return dh.reshape(h.shape), d_vectors, *d_scores


def _with_scores(h: Array, source: Array, target: Array, *more: Any) -> GatArguments:
    """Return the arguments of ``gat`` with the scores ``<h, source>`` and ``<h, target>``."""
    h = h.reshape(len(h), *heads_of(source))
    scores = _gat_scores
    if small.reasons_against(2 * h.size):
        from .loops import gat_scores as scores
    return GatArguments(h, *scores(h, source, target), *more)


def by_head(h: Array) -> Array:
    """Return features as (heads, n, feat), as sums run."""
    return wide(h).reshape(len(h), *heads_and_feat(h)).transpose(1, 0, 2)


def type_of_sums(x: Array) -> Any:
    """Return the type in which sums of such features run."""
    return np.dtype(score.sums_dtype(x)).type


def rounded(values: Array, like: Array) -> Array:
    """Round to the dtype of an array."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(like.dtype, copy=False)


def dropping_of(share: float, seed: Array | int | None, kind: Any) -> Dropping:
    """Drop that share by a seed, None for none; ``kind`` is the type that sums run in."""
    below = min(round(share * 2**32), 2**32 - 1)
    number = 0 if seed is None else int(np.asarray(seed).item())
    scale = kind(1 / (1 - share) if below else 1)
    return Dropping(np.uint64(number % 2**64), np.uint64(below), scale)


def narrow(kind: Any, value: float) -> Any:
    """Convert to the type that sums run in, to infinity where it holds no such number."""
    with np.errstate(over="ignore"):
        return kind(value)


# Small attention


class _Entries(NamedTuple):
    """The entries that count, row by row, and behind them the virtual loops, if there are any."""

    stored: CSR  #: without the loops that virtual ones replace
    places: Array | slice  #: of the stored ones among all
    rows: Array  #: of each entry and loop
    cols: Array


def _entries(A: CSR, loops: bool) -> _Entries:
    """List the entries of ``A`` that count, with virtual loops or without."""
    rows, cols = small.rows_of(A), A.indices
    if not loops:
        return _Entries(A, slice(None), rows, cols)
    stays = cols != rows
    places = np.flatnonzero(stays)
    if len(places) < A.nnz:
        ends = np.concatenate([[0], np.cumsum(stays)])
        arrays = {"indptr": ends[A.indptr].astype(A.indptr.dtype), "indices": cols[places]}
        A, rows = CSR._trusted(**arrays, data=None, shape=A.shape), rows[places]
    vertices = np.arange(A.n_rows, dtype=cols.dtype)
    joined = (np.concatenate([ends, vertices]) for ends in (rows, A.indices))
    return _Entries(A, places, *joined)


def _scores(e: _Entries, args: GatArguments) -> tuple[Array, Array]:
    """Compute all scores, (heads, entries), and whether each is positive before the leaky part."""
    el, er, edges, loop_edges = [_headed(a, args.h) for a in args[1:5]]
    z, stored = np.take(el, e.cols, axis=1), e.stored.nnz
    z += np.take(er, e.rows, axis=1)
    if edges is not None:
        z[:, :stored] += edges[:, e.places]
    if loop_edges is not None and args.loops:
        z[:, stored:] += loop_edges
    return _leaky(z, narrow(z.dtype.type, args.slope)), z > 0


def _leaky(z: Array, slope: Any) -> Array:
    """Return ``z`` where positive, else ``slope * z``: 10x over ``np.where``."""
    if not np.isfinite(slope):  # which times 0 is NaN
        return np.where(z > 0, z, slope * z)
    result: Array = np.minimum(z, 0)
    result *= slope
    result += np.maximum(z, 0)
    return result


def _headed(a: Array | None, h: Array) -> Array:
    """Return scores as (heads, n), contiguous; None for None."""
    if a is None:
        return None
    return np.ascontiguousarray(wide(a).reshape(len(a), heads_and_feat(h)[0]).T)


@small.quietly
def _forward(
    A: CSR, bias: Array | None, args: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """Compute the product in ``out``, or as sums run; with ``train`` what backward needs too."""
    h, kind, e = args.h, type_of_sums(args.h), _entries(A, args.loops)
    values, positive = _scores(e, args)
    w, top, total = _powers(e, values)
    dropping = dropping_of(args.dropout, args.seed, kind)
    X, plus = np.ascontiguousarray(by_head(h)), np.empty(0, kind)
    statistics = plus
    if train:
        shares = np.where(total == 0, 0, _row_sums(e, w * positive) / total)
        statistics = np.stack([top, total, shares, np.zeros_like(top)], axis=2)
        statistics = np.ascontiguousarray(statistics.transpose(1, 0, 2))
    w = _dropped(A.nnz, e, w, dropping)
    factor = np.where(total == 0, 0, dropping.scale / total)[:, :, None]
    shape = A.n_rows, *h.shape[1:]
    product = _by_rows(_products(e, w, X) * factor, shape)
    if train:
        plus = _by_rows(_products(e, w * positive, X) * factor, shape)
    if bias is not None:
        product = product + wide(bias).reshape(h.shape[1:])
    if out is None:
        return Forward(product, plus, statistics)
    out[...] = product
    return Forward(out, plus, statistics)


def _powers(e: _Entries, values: Array) -> tuple[Array, Array, Array]:
    """Raise e to each score less the largest of its row; return those and the powers' sums, too."""
    stored = e.stored.nnz
    top = small.reduce_rows(np.maximum, e.stored, values[:, :stored], -np.inf)
    if len(e.rows) > stored:
        top = np.maximum(top, values[:, stored:])
    powers = np.exp(values - top[:, e.rows])
    return powers, top, _row_sums(e, powers)


def _products(e: _Entries, w: Array, X: Array, *, transposed: bool = False) -> Array:
    """Sum ``w X[j]`` over the entries of each row i, or ``w X[i]`` of each column; by head."""
    A, stored = e[0], e[0].nnz
    add = add_transposed_product if transposed else add_product
    more: Any = small.long_columns_of(A) if transposed else small.blocks_of(A)
    sums = np.zeros((len(X), A.shape[1 if transposed else 0], X.shape[2]), X.dtype)
    if sums.size:
        for weights, x, of_head in zip(w, X, sums, strict=True):
            add(A.shape, (A.indptr, A.indices, weights[:stored]), x, of_head, more)
    return sums + w[:, stored:, None] * X if len(e.rows) > stored else sums


def _by_rows(sums: Array, shape: tuple[int, ...]) -> Array:
    """Return (heads, n, feat) in the layout of the features."""
    return np.ascontiguousarray(sums.transpose(1, 0, 2)).reshape(shape)


def _row_sums(e: _Entries, w: Array) -> Array:
    """Sum the weights of each row: (heads, n_rows)."""
    ones = small.ones(len(w) * e.stored.n_cols, w.dtype)
    return _products(e, w, ones.reshape(len(w), e.stored.n_cols, 1))[:, :, 0]


def _dropped(nnz: int, e: _Entries, w: Array, dropping: Dropping) -> Array:
    """Return weights with 0 for entries that are dropped; those of loops count from ``nnz`` on."""
    if dropping.below == 0:
        return w
    numbers = np.arange(nnz + len(e.rows) - e.stored.nnz, dtype=np.uint64)
    numbers = np.concatenate([numbers[:nnz][e.places], numbers[nnz:]])
    stays = np.empty(w.shape, np.bool_)
    for part in small.parts(len(numbers), 1, 1 << 14):  # temporaries that a cache holds
        for h, row in enumerate(stays):
            row[part] = philox(dropping.seed, numbers[part], h) >= dropping.below
    return w * stays


@small.quietly
def _gradients(
    A: CSR, _: Any, grad: Array, saved: Forward, of_edges: bool, args: GatArguments
) -> tuple[Array, ...]:
    """Compute ``dH[j, h] = sum of M P[e, h] dO[i, h]`` over columns, and gradients of scores."""
    h, kind = args.h, type_of_sums(args.h)
    if not h.size:  # of no features, or no vertices: all are 0
        of_entries = [args.loop_edges, args.edges if of_edges else None]
        zeros = [np.zeros(a.shape, kind) for a in (args.el, args.er)]
        return (
            np.zeros(h.shape, h.dtype),
            *zeros,
            *(np.zeros(shape_of(a), kind) for a in of_entries),
        )
    e, slope = _entries(A, args.loops), narrow(kind, args.slope)
    dropping = dropping_of(args.dropout, args.seed, kind)
    X, g = (np.ascontiguousarray(by_head(a)) for a in (h, grad))
    out, plus = (by_head(a) for a in (saved.out, saved.plus))
    top, total, share = (saved.statistics[..., k].T for k in range(3))
    inverse = np.where(total == 0, 0, 1 / total)
    D = _dots_of_rows(g, out)
    d_er = (1 - slope) * (_dots_of_rows(g, plus) - D * share)
    values, positive = _scores(e, args)
    P = np.exp(values - top[:, e.rows]) * inverse[:, e.rows]
    w = _dropped(A.nnz, e, P, dropping) * dropping.scale
    slopes = np.where(positive, kind(1), slope)
    dh = _products(e, w, g, transposed=True)
    d_el = _dots_of_rows(X, _products(e, w * slopes, g, transposed=True))
    d_el -= _products(e, P * slopes, D[:, :, None], transposed=True)[:, :, 0]
    d_loops, d_edges = np.zeros(shape_of(args.loop_edges), kind), np.zeros(0, kind)
    if args.edges is not None and of_edges:
        d_edges = np.zeros(args.edges.shape, kind)
    if d_edges.size or (d_loops.size and args.loops):
        dz = (slopes * (w * _dots(e, g, X) - P * D[:, e.rows])).T
        if d_edges.size:
            d_edges.reshape(A.nnz, len(X))[e.places] = dz[: e.stored.nnz]
        if d_loops.size and args.loops:
            d_loops[...] = dz[e.stored.nnz :].reshape(d_loops.shape)
    shaped = d_el.T.reshape(args.el.shape), d_er.T.reshape(args.er.shape)
    return rounded(_by_rows(dh, h.shape), h), *map(np.ascontiguousarray, shaped), d_loops, d_edges


def _dots_of_rows(left: Array, right: Array) -> Array:
    """Compute dot products of features, (heads, n)."""
    dots: Array = np.einsum("hnf,hnf->hn", left, right)
    return dots


def _dots(e: _Entries, g: Array, X: Array) -> Array:
    """Compute ``<dO[i, h], H[j, h]>`` of each entry and loop: (heads, entries)."""
    dots = np.empty((len(X), len(e.rows)), X.dtype)
    for part in small.parts(len(e.rows), len(X) * X.shape[2], _PART):
        np.einsum("hef,hef->he", g[:, e.rows[part]], X[:, e.cols[part]], out=dots[:, part])
    return dots


@small.quietly
def _attention(A: CSR, args: GatArguments, out: Array) -> None:
    """Write ``P[e, k]``, 0 at loops that are left out."""
    e = _entries(A, args.loops)
    w, _, total = _powers(e, _scores(e, args)[0])
    stored, out[...] = e.stored.nnz, 0
    by_entries = out.reshape(A.nnz, len(w))
    by_entries[e.places] = (w[:, :stored] / total[:, e.rows[:stored]]).T


@small.quietly
def _gat_scores(h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """Compute ``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    both = by_head(h) @ _vectors(h, source, target).transpose(0, 2, 1)
    el, er = (np.ascontiguousarray(both[..., k].T).reshape(h.shape[:-1]) for k in range(2))
    return el, er


def _through_scores(
    h: Array, dh: Array, d_el: Array, d_er: Array, source: Array, target: Array
) -> tuple[Array, Array]:
    """Add to ``dh`` what scores add to it; compute the gradients of both vectors."""
    heads, feat = heads_and_feat(h)
    scores = np.stack([d.reshape(len(h), heads).T for d in (d_el, d_er)], axis=1)
    d_vectors = (scores @ by_head(h)).transpose(1, 0, 2).reshape(2, *source.shape)
    added = scores.transpose(0, 2, 1) @ _vectors(h, source, target)
    result = wide(dh).reshape(len(h), heads, feat) + added.transpose(1, 0, 2)
    return rounded(result.reshape(h.shape), h), np.ascontiguousarray(d_vectors)


def _vectors(h: Array, source: Array, target: Array) -> Array:
    """Stack both vectors as (heads, 2, feat), 2-byte floats as float32."""
    return np.stack([wide(v).reshape(heads_and_feat(h)) for v in (source, target)], axis=1)


_twin = Twin(_forward, _gradients, _through_scores, _attention)
gat, gat_attention, gat_backward = _twin.gat, _twin.gat_attention, _twin.gat_backward
gat_with_statistics = _twin.gat_with_statistics
gat_of_vectors, gat_of_vectors_backward = _twin.gat_of_vectors, _twin.gat_of_vectors_backward
gat_of_vectors_with_statistics = _twin.gat_of_vectors_with_statistics
