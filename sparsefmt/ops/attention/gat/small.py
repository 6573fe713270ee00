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
from ..score import Forward, GatArguments, heads_and_feat, heads_of, shape_of, sums_dtype

#: Work on the score of an entry, in multiply-adds of features.
_SCORE = 16
#: Values of gathered features at a time.
_PART = 1 << 19


def reasons_against(A: Any, heads: int, feat: int) -> list[str]:
    """List the reasons against small attention of so many heads and features of each."""
    work = (A.nnz + A.n_rows) * heads * (feat + _SCORE)
    return small.reasons_against(work, small.MOST_OF_ATTENTION)


def philox(seed: Array, counter: Array, stream: Array) -> Array:
    """Compute the first word of each counter by Philox4x32-10 (Salmon et al., SC'11).

    Compiled loops have this function too, for numbers.
    """
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


class Dropping(NamedTuple):
    """Which entries are dropped: those whose random word is below ``below``."""

    seed: Any
    below: Any
    scale: Any  #: of the others


class Twin(NamedTuple):
    """Kernels of GAT made of four functions.

    ``forward(A, bias, arguments, out=None, train=True)`` returns a ``Forward`` as sums run, without
    what only backward needs unless ``train``.  ``gradients(A, (T, perm), grad, forward, of_edges,
    arguments)`` returns those of ``h, el, er, loop_edges, edges``; T and perm may be None.
    ``through_scores(h, dh, d_el, d_er, source, target)`` returns ``dh`` with what scores add to it,
    and the gradients of both vectors.  ``attention(A, arguments, out)`` writes the weights.
    """

    forward: Callable[..., Forward]
    gradients: Callable[..., tuple[Array, ...]]
    through_scores: Callable[..., tuple[Array, Array]]
    attention: Callable[..., None]

    def gat(
        self, A: CSR, bias: Array | None, *arguments: Any, out: Array | None = None, **_: Any
    ) -> Array:
        """Compute ``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, as ``ops.gat``.

        The others are ``GatArguments``, here and in the gradients.
        """
        a = GatArguments(*arguments)
        out = np.empty((A.n_rows, *a.h.shape[1:]), a.h.dtype) if out is None else out
        result: Array = self.forward(A, bias, a, out=out, train=False).out
        return result

    def gat_with_statistics(self, A: CSR, bias: Array | None, *arguments: Any) -> Forward:
        """Compute ``gat``, and what its gradient needs."""
        a = GatArguments(*arguments)
        out, plus, statistics = self.forward(A, bias, a)
        return Forward(rounded(out, a.h), rounded(plus, a.h), statistics)

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
        return self.gat(A, bias, *_with_scores(h, source, target, *more)).reshape(h.shape)

    def gat_of_vectors_with_statistics(
        self, A: CSR, h: Array, source: Array, target: Array, bias: Array | None, *more: Any
    ) -> tuple[Array, Array, Array]:
        """Compute ``gat_of_vectors``, and what its gradient needs."""
        a = _with_scores(h, source, target, *more)
        out, plus, statistics = self.gat_with_statistics(A, bias, *a)
        kept = np.concatenate([part.reshape(-1) for part in (statistics, a.el, a.er)])
        return out.reshape(h.shape), plus.reshape(h.shape), kept

    def gat_backward(
        self, A: CSR, T: CSR | None, perm: Array | None, grad: Array, out: Array | None,
        plus: Array | None, statistics: Array | None, of_edges: bool, *arguments: Any, **_: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Compute gradients of ``h, el, er, loop_edges, edges``, empty where none are wanted.

        What is not given of the forward pass and of the transpose is made anew.
        """
        a, saved = GatArguments(*arguments), Forward(out, plus, statistics)
        if statistics is None:
            saved = self.forward(A, None, a)
        return self.gradients(A, (T, perm), grad, saved, of_edges, a)

    def gat_of_vectors_backward(
        self, A: CSR, T: CSR, perm: Array, grad: Array, out: Array, plus: Array, kept: Array,
        of_edges: bool, *args: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Compute gradients of ``h``, of vectors and bias in one, ``loop_edges``, ``edges``."""
        h, source, target, bias, *more = args
        n, (heads, feat) = len(h), heads_of(source)
        features, grad, out, plus = (a.reshape(n, heads, feat) for a in (h, grad, out, plus))
        statistics, el, er = np.split(kept, [4 * n * heads, 5 * n * heads])
        a = GatArguments(features, el.reshape(n, heads), er.reshape(n, heads), *more)
        if bias is not None:
            out = wide(out) - wide(bias).reshape(heads, feat)
        saved = Forward(out, plus, statistics.reshape(n, heads, 4))
        dh, d_el, d_er, *others = self.gradients(A, (T, perm), grad, saved, of_edges, a)
        dh, d_vectors = self.through_scores(features, dh, d_el, d_er, source, target)
        if bias is not None:
            d_bias = np.ones(n, d_el.dtype) @ wide(grad).reshape(n, source.size)
            d_vectors = np.concatenate([d_vectors, d_bias.reshape(1, *source.shape)])
        return dh.reshape(h.shape), d_vectors, *others


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
    return np.dtype(sums_dtype(x)).type


def rounded(values: Array, like: Array) -> Array:
    """Round to the dtype of an array."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(like.dtype, copy=False)


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


# Small attention


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
        """Return the slopes of the leaky part at each score."""
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
    """Return ``z`` where positive, else ``slope * z``: 10x over ``np.where``."""
    if not np.isfinite(slope):  # which times 0 is NaN
        return np.where(z > 0, z, slope * z)
    found: Array = np.minimum(z, 0)
    found *= slope
    found += np.maximum(z, 0)
    return found


def _headed(a: Array, h: Array) -> Array:
    """Return scores as (heads, n), contiguous."""
    return np.ascontiguousarray(wide(a).reshape(len(a), heads_and_feat(h)[0]).T)


@small.quietly
def _forward(
    A: CSR, bias: Array | None, given: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """Compute the product in ``out``, or as sums run; with ``train`` what backward needs too."""
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
    """Return the largest score of each row: (heads, n_rows)."""
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
    """Return (heads, n, feat) in the layout of the features."""
    return np.ascontiguousarray(by_heads.transpose(1, 0, 2)).reshape(shape)


def _dropped(A: CSR, w: _Values, dropping: Dropping) -> _Values:
    """Return weights with 0 for entries and virtual loops that are dropped."""
    if dropping.below == 0:
        return w
    entries, loops = w
    entries = entries * _stays(dropping, 0, entries.shape)
    return _Values(entries, None if loops is None else loops * _stays(dropping, A.nnz, loops.shape))


def _stays(dropping: Dropping, first: int, shape: tuple[int, ...]) -> Array:
    """Return True for each entry that stays, numbered from ``first`` on, by head."""
    result = np.empty(shape, np.bool_)
    for part in small.parts(shape[1], 1, 1 << 14):  # temporaries that a cache holds
        numbers = np.arange(first + part.start, first + part.stop, dtype=np.uint64)
        for h, row in enumerate(result):
            row[part] = philox(dropping.seed, numbers, h) >= dropping.below
    return result


@small.quietly
def _gradients(
    A: CSR, _: Any, grad: Array, found: Forward, of_edges: bool, given: GatArguments
) -> tuple[Array, ...]:
    """Compute ``dH[j, h] = sum of M P[e, h] dO[i, h]`` over columns, and gradients of scores."""
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
    """Compute dot products of features, (heads, n)."""
    found: Array = np.einsum("hnf,hnf->hn", left, right)
    return found


def _dots(A: CSR, rows: Array, g: Array, X: Array) -> Array:
    """Compute ``<dO[i, h], H[j, h]>`` of each entry: (heads, nnz)."""
    found = np.empty((len(X), A.nnz), X.dtype)
    for part in small.parts(A.nnz, len(X) * X.shape[2], _PART):
        left, right = g[:, rows[part]], X[:, A.indices[part]]
        np.einsum("hef,hef->he", left, right, out=found[:, part])
    return found


@small.quietly
def _attention(A: CSR, args: GatArguments, out: Array) -> None:
    """Write ``P[e, k]``, 0 at loops that are left out."""
    s = _scores(A, args)
    w = s.powers(_tops(A, s))
    out[...] = (w.entries / _row_sums(A, w)[:, s.rows]).T.reshape(out.shape)


@small.quietly
def _gat_scores(h: Array, source: Array, target: Array) -> tuple[Array, Array]:
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
    """Stack both vectors as (heads, 2, feat), as sums run."""
    return np.stack([wide(v).reshape(heads_and_feat(h)) for v in (source, target)], axis=1)


_twin = Twin(_forward, _gradients, _through_scores, _attention)
gat, gat_attention, gat_backward = _twin.gat, _twin.gat_attention, _twin.gat_backward
gat_with_statistics = _twin.gat_with_statistics
gat_of_vectors, gat_of_vectors_backward = _twin.gat_of_vectors, _twin.gat_of_vectors_backward
gat_of_vectors_with_statistics = _twin.gat_of_vectors_with_statistics
