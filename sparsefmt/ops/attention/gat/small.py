"""Small graph attention on NumPy arrays: NumPy's loops for scores, SciPy's for sums, one thread.

Scores and weights are (heads, nnz).  As in the compiled loops sums are split by the sign of the
score, so that gradients of scores need no product of each entry.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ....formats.sparsetools import add_product, add_transposed_product
from ...engine import small
from ...engine.cpu_arrays import wide
from ..score import Forward, GatArguments, heads_and_feat, shape_of
from .twin import Dropping, Twin, by_head, dropping_of, narrow, rounded, type_of_sums

#: Work on the score of an entry, in multiply-adds of features.
_SCORE = 16
#: Values of gathered features at a time.
_PART = 1 << 19


def refuses(A: Any, bias: Any, h: Array, *_: Any, **__: Any) -> list[str]:
    """List the reasons against a small ``gat``."""
    return _reasons(A, h)


def refuses_gradients(A: Any, T: Any, perm: Any, grad: Array, *_: Any, **__: Any) -> list[str]:
    """List the reasons against small gradients of ``gat``."""
    return _reasons(A, grad)


def refuses_attention(A: Any, el: Array, *_: Any, **__: Any) -> list[str]:
    """List the reasons against small weights of ``gat``."""
    return _reasons(A, el[..., None])


def _reasons(A: Any, h: Array) -> list[str]:
    heads, feat = heads_and_feat(h)
    work = (A.nnz + A.n_rows) * heads * (feat + _SCORE)
    return small.reasons_against(work, small.MOST_OF_ATTENTION)


def refuses_scores(_: None, h: Array, *__: Any) -> list[str]:
    """List the reasons against small scores of vectors, whose work is in both of them."""
    return small.reasons_against(2 * h.size)


class _Values(NamedTuple):
    """A value of each entry, (heads, nnz), and of each virtual loop, (heads, n), or none."""

    entries: Array
    loops: Array | None

    def each(self, function: Callable[..., Any], *others: "_Values") -> "_Values":
        """Call the function with the values of entries, and with those of loops."""
        entries = function(self.entries, *(other.entries for other in others))
        if self.loops is None:
            return _Values(entries, None)
        return _Values(entries, function(self.loops, *(other.loops for other in others)))

    def times(self, others: "_Values") -> "_Values":
        """Multiply each with another one."""
        return self.each(np.multiply, others)


class _Scores(NamedTuple):
    """What makes the weights of entries and virtual loops."""

    values: _Values  #: after the leaky part
    positive: _Values  #: whether a score is
    rows: Array  #: of each entry
    stored: Array | None  #: which entries are loops that virtual ones replace

    def powers(self, top: Array) -> _Values:
        """Raise e to each score less one of its row, (heads, n_rows)."""
        loops = self.values.loops
        entries = np.exp(self.values.entries - top[:, self.rows])
        return _Values(entries, None if loops is None else np.exp(loops - top))

    def slopes(self, slope: Any) -> _Values:
        """Tell by how much a score grows with what the leaky part takes."""
        return self.positive.each(lambda positive: np.where(positive, type(slope)(1), slope))


def _scores(A: CSR, given: GatArguments) -> _Scores:
    """Compute all scores; -inf at stored loops beside virtual ones."""
    kind, rows = type_of_sums(given.h), small.rows_of(A)
    slope = narrow(kind, given.slope)
    el, er = (_headed(a, given.h) for a in (given.el, given.er))
    z = np.take(el, A.indices, axis=1)
    z += np.take(er, rows, axis=1)
    if given.edges is not None:
        z += _headed(given.edges, given.h)
    own = stored = None
    if given.loops:
        own, stored = el + er, A.indices == rows
        if given.loop_edges is not None:
            own += _headed(given.loop_edges, given.h)
    both = _Values(z, own)
    values = both.each(lambda z: _leaky(z, slope))
    if stored is not None:
        values.entries[:, stored] = -np.inf
    return _Scores(values, both.each(lambda z: z > 0), rows, stored)


def _leaky(z: Array, slope: Any) -> Array:
    """``z`` where positive, else ``slope * z``: 10x over ``np.where``."""
    if not np.isfinite(slope):  # which times 0 is NaN
        return np.where(z > 0, z, slope * z)
    found: Array = np.minimum(z, 0)
    found *= slope
    found += np.maximum(z, 0)
    return found


def _headed(a: Array, h: Array) -> Array:
    """(heads, n), contiguous."""
    return np.ascontiguousarray(wide(a).reshape(len(a), heads_and_feat(h)[0]).T)


@small.quietly
def _forward(
    A: CSR, bias: Array | None, given: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """The product in ``out``, or as sums run; with ``train`` what backward needs too."""
    h, kind = given.h, type_of_sums(given.h)
    s, dropping = _scores(A, given), dropping_of(given.dropout, given.seed, kind)
    top, X = _tops(A, s), np.ascontiguousarray(by_head(h))
    w = s.powers(top)
    whole = _row_sums(A, w)
    plus = statistics = np.empty(0, kind)
    if train:
        shares = np.where(whole == 0, 0, _row_sums(A, w.times(s.positive)) / whole)
        statistics = np.zeros((*top.T.shape, 4), kind)
        for k, of_rows in enumerate((top, whole, shares)):
            statistics[..., k] = of_rows.T
    w = _dropped(A, w, dropping)
    factor = np.where(whole == 0, 0, dropping.scale / whole)[:, :, None]
    shape = A.n_rows, *h.shape[1:]
    found = _in_place(_products(A, w, X) * factor, shape)
    if train:
        plus = _in_place(_products(A, w.times(s.positive), X) * factor, shape)
    if bias is not None:
        found = found + wide(bias).reshape(h.shape[1:])
    if out is None:
        return Forward(found, plus, statistics)
    out[...] = found
    return Forward(out, plus, statistics)


def _tops(A: CSR, s: _Scores) -> Array:
    """Find the largest score of each row: (heads, n_rows)."""
    entries, loops = s.values
    top = small.reduce_rows(np.maximum, A, entries, -np.inf)
    return top if loops is None else np.maximum(top, loops)


def _products(A: CSR, w: _Values, X: Array, *, transposed: bool = False) -> Array:
    """Sum ``w X[j]`` over the entries of each row i, or ``w X[i]`` of each column; by head.

    Stored loops beside virtual ones are left out: their 0 would make NaN of Inf.
    """
    add = add_transposed_product if transposed else add_product
    found = np.zeros((len(X), A.shape[1 if transposed else 0], X.shape[2]), X.dtype)
    indptr, indices, entries = A.indptr, A.indices, w.entries
    stays = None if w.loops is None else indices != small.rows_of(A)
    if stays is not None and not stays.all():
        ends = np.concatenate([[0], np.cumsum(stays)])
        indptr, indices = ends[indptr].astype(indptr.dtype), indices[stays]
        entries = np.ascontiguousarray(entries[:, stays])
    if found.size:
        for weights, x, sums in zip(entries, X, found, strict=True):
            add(A.shape, (indptr, indices, weights), x, sums)
    return found if w.loops is None else found + w.loops[:, :, None] * X


def _row_sums(A: CSR, w: _Values) -> Array:
    """Sum the weights of each row: (heads, n_rows)."""
    ones = small.ones(len(w.entries) * A.n_cols, w.entries.dtype)
    return _products(A, w, ones.reshape(len(w.entries), A.n_cols, 1))[:, :, 0]


def _in_place(by_heads: Array, shape: tuple[int, ...]) -> Array:
    """(heads, n, feat) as the features are."""
    return np.ascontiguousarray(by_heads.transpose(1, 0, 2)).reshape(shape)


def _dropped(A: CSR, w: _Values, dropping: Dropping) -> _Values:
    """Set the weights of entries and of virtual loops that are dropped to 0."""
    if dropping.below == 0:
        return w
    entries, loops = w
    entries = entries * _stays(dropping, 0, entries.shape)
    return _Values(entries, None if loops is None else loops * _stays(dropping, A.nnz, loops.shape))


def _stays(dropping: Dropping, first: int, shape: tuple[int, ...]) -> Array:
    """Tell which entries stay, those numbered from ``first`` on, head by head."""
    found = np.empty(shape, np.bool_)
    for part in small.parts(shape[1], 1, 1 << 14):  # temporaries that a cache holds
        numbers = np.arange(first + part.start, first + part.stop, dtype=np.uint64)
        for h, row in enumerate(found):
            row[part] = _philox(dropping.seed, numbers, h) >= dropping.below
    return found


def _philox(seed: Any, counter: Array, stream: int) -> Array:
    """Philox4x32-10 (Salmon et al., SC'11): the first of the four words that a counter gives."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = counter & low, counter >> half
    c, d = np.full_like(counter, stream), np.zeros_like(counter)
    k0, k1 = int(seed) & 0xFFFFFFFF, int(seed) >> 32
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (q >> half) ^ b ^ np.uint64(k0), q & low
        c, d = (p >> half) ^ d ^ np.uint64(k1), p & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a


@small.quietly
def _gradients(
    A: CSR, _: Any, grad: Array, found: Forward, of_edges: bool, given: GatArguments
) -> tuple[Array, ...]:
    """Over the columns ``dH[j, h] = sum of M P[e, h] dO[i, h]``, and the gradients of scores."""
    h, kind = given.h, type_of_sums(given.h)
    slope, dropping = narrow(kind, given.slope), dropping_of(given.dropout, given.seed, kind)
    X, g = (np.ascontiguousarray(by_head(a)) for a in (h, grad))
    out, plus = (by_head(a) for a in (found.out, found.plus))
    top, whole, share = (found.statistics[..., k].T for k in range(3))
    inverse = np.where(whole == 0, 0, 1 / whole)
    D = _dots_of_rows(g, out)
    d_er = (1 - slope) * (_dots_of_rows(g, plus) - D * share)
    s = _scores(A, given)
    P = s.powers(top).times(_Values(inverse[:, s.rows], inverse))
    w = _dropped(A, P, dropping).each(lambda w: w * dropping.scale)
    slopes = s.slopes(slope)
    dh = _products(A, w, g, transposed=True)
    d_el = _dots_of_rows(X, _products(A, w.times(slopes), g, transposed=True))
    d_el -= _products(A, P.times(slopes), D[:, :, None], transposed=True)[:, :, 0]
    of_edges_, of_loops = (
        np.zeros(shape_of(scores, wanted), kind)
        for scores, wanted in ((given.edges, of_edges), (given.loop_edges, True))
    )
    if given.edges is not None and of_edges:
        dz = w.entries * _dots(A, s.rows, g, X) - P.entries * D[:, s.rows]
        if s.stored is not None:
            dz[:, s.stored] = 0
        of_edges_[...] = (slopes.entries * dz).T.reshape(of_edges_.shape)
    if given.loop_edges is not None and P.loops is not None:
        dz = w.loops * _dots_of_rows(g, X) - P.loops * D
        of_loops[...] = (slopes.loops * dz).T.reshape(of_loops.shape)
    shaped = d_el.T.reshape(given.el.shape), d_er.T.reshape(given.er.shape)
    d_scores = tuple(np.ascontiguousarray(a) for a in shaped)
    return rounded(_in_place(dh, h.shape), h), *d_scores, of_loops, of_edges_


def _dots_of_rows(left: Array, right: Array) -> Array:
    """Dot products of features, (heads, n)."""
    found: Array = np.einsum("hnf,hnf->hn", left, right)
    return found


def _dots(A: CSR, rows: Array, g: Array, X: Array) -> Array:
    """``<dO[i, h], H[j, h]>`` of each entry: (heads, nnz)."""
    found = np.empty((len(X), A.nnz), X.dtype)
    for part in small.parts(A.nnz, len(X) * X.shape[2], _PART):
        left, right = g[:, rows[part]], X[:, A.indices[part]]
        np.einsum("hef,hef->he", left, right, out=found[:, part])
    return found


@small.quietly
def gat_attention(
    A: CSR, el: Array, er: Array, edges: Array | None, slope: float, loops: bool, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """``P[e, k]`` before dropout, 0 at loops that are left out."""
    out = np.empty((A.nnz, *el.shape[1:]), type_of_sums(el)) if out is None else out
    h = np.empty((*el.shape, 0) if el.ndim == 2 else (len(el), 1, 0), el.dtype)
    s = _scores(A, GatArguments(h, el, er, edges, slope=slope, loops=loops))
    w = s.powers(_tops(A, s))
    out[...] = (w.entries / _row_sums(A, w)[:, s.rows]).T.reshape(out.shape)
    return out


@small.quietly
def gat_scores(_: None, h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    both = by_head(h) @ _vectors(h, source, target).transpose(0, 2, 1)
    el, er = (np.ascontiguousarray(both[..., k].T).reshape(h.shape[:-1]) for k in range(2))
    return el, er


def _through_scores(
    h: Array, dh: Array, d_el: Array, d_er: Array, source: Array, target: Array
) -> tuple[Array, Array]:
    heads, feat = heads_and_feat(h)
    scores = np.stack([d.reshape(len(h), heads).T for d in (d_el, d_er)], axis=1)
    d_vectors = (scores @ by_head(h)).transpose(1, 0, 2).reshape(2, *source.shape)
    added = scores.transpose(0, 2, 1) @ _vectors(h, source, target)
    found = wide(dh).reshape(len(h), heads, feat) + added.transpose(1, 0, 2)
    return rounded(found.reshape(h.shape), h), np.ascontiguousarray(d_vectors)


def _vectors(h: Array, source: Array, target: Array) -> Array:
    """(heads, 2, feat), as sums run."""
    return np.stack([wide(v).reshape(heads_and_feat(h)) for v in (source, target)], axis=1)


_twin = Twin(_forward, _gradients, _through_scores)
gat, gat_with_statistics = _twin.gat, _twin.gat_with_statistics
gat_backward, gat_of_vectors_backward = _twin.gat_backward, _twin.gat_of_vectors_backward
