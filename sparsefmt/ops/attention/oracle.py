"""Oracles of attention: float64 over a list of entries, and bounds of the error of kernels.

Nothing here calls a conversion or a kernel, so that nothing here shares their bugs.  Features are
(n, heads, feat) or (n, feat), scores (n, heads) or (n,).  Options are those of ``ops.gat``, and
``loop_edges``, scores of the loops of ``self_loops``; of ``attend`` those of ``ops.gatv2`` where
there is an ``att``, else of ``ops.dot_attention``, whose values are the keys if left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.oracle import float64, stored_entries
from ..matmul.oracle import precision_of

#: Of queries, keys, values, ``att`` and edges' scores; None for what is not given.
Gradients = tuple[Array, Array, Array | None, Array | None, Array]
#: Of the bounds: rounding of the single steps that are not counted one by one, such as exp.
_STEPS = 6


def philox(seed: int, counter: Array, stream: Array) -> Array:
    """Return the first word of each counter by Philox4x32-10 (Salmon et al., SC'11)."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    counter, c = np.broadcast_arrays(*(np.asarray(a, np.uint64) for a in (counter, stream)))
    a, b, d = counter & low, counter >> half, np.zeros_like(counter)
    keys = seed % 2**32, seed % 2**64 // 2**32
    for turn in range(10):
        k0, k1 = (
            np.uint64((key + turn * step) % 2**32)
            for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)
        )
        p, q = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (q >> half) ^ b ^ k0, q & low, (p >> half) ^ d ^ k1, p & low
    return a


def dropout_mask(numbers: Array, heads: int, *, dropout: float, seed: int) -> Array:
    """Return ``M`` of these entries, (entries, heads): 0 or ``1 / (1 - dropout)``."""
    words = philox(seed, numbers[:, None], np.arange(heads)[None, :])
    below = round(dropout * 2**32)
    return np.where(words < np.uint64(below), 0.0, 1 / (1 - dropout) if below else 1.0)


def gat_oracle(A: Format, H: Array, el: Array, er: Array, **options: Any) -> Array:
    """Compute ``ops.gat``, in float64.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 2], [0, 1], shape=(2, 2))
    >>> H, zero = np.array([[1.0], [3.0]]), np.zeros(2)
    >>> gat_oracle(A, H, zero, zero).tolist()
    [[2.0], [0.0]]
    >>> gat_oracle(A, H, zero, zero, self_loops=True).tolist()
    [[2.0], [3.0]]
    """
    w = _gat_weights(A, el, er, like=H, **options)
    return _result(w, A.n_rows, _headed(H)[w.col]).reshape(A.n_rows, *H.shape[1:])


def gat_bound(A: Format, H: Array, el: Array, er: Array, *, factor: float = 2, **opt: Any) -> Array:
    """Return how far ``ops.gat``, computed in the dtype of ``H``, may lie from the oracle.

    ``factor * sum_e M (EP + (deg + 6) eps P + eps_H P) |H|`` and ``deg`` times the least normal
    number: EP is the error of an attention, eps the spacing of the type of sums, eps_H of results.
    """
    w = _gat_weights(A, el, er, like=H, **opt)
    error = _result_error(w, A.n_rows, np.abs(_headed(H))[w.col], precision_of(H.dtype))
    return factor * error.reshape(A.n_rows, *H.shape[1:])


def gat_attention_oracle(A: Format, el: Array, er: Array, **options: Any) -> Array:
    """Compute ``ops.gat_attention``, in float64."""
    w = _gat_weights(A, el, er, like=el, **options)
    return _placed(A, w, w.P, el.shape[1:])


def gat_attention_bound(
    A: Format, el: Array, er: Array, *, factor: float = 2, **options: Any
) -> Array:
    """Return how far attentions, computed in the dtype of the scores, may lie from the oracle.

    ``factor * p * (eps * (deg + 6 + d + D) + E)`` with d and D as for ``edge_softmax``, E the
    rounding of the score and of the row's mean score; and ``factor`` times the least normal number.
    """
    w = _gat_weights(A, el, er, like=el, **options)
    return factor * _placed(A, w, w.error, el.shape[1:])


def gat_backward_oracle(
    A: Format, H: Array, el: Array, er: Array, grad: Array, *,
    gathered: tuple[Array, Array] | None = None, **options: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute ``dH, del, der, dedge_scores`` of ``ops.gat_backward``, and scores of loops.

    ``gathered`` are ``H`` and ``grad`` as forward and the sums over columns gather them, where they
    are rounded for it.
    """
    w = _gat_weights(A, el, er, like=H, **options)
    near_H, near_grad = gathered or (H, grad)
    X, g = _headed(H)[w.col], _headed(grad)[w.row]
    near_X, near_g = _headed(near_H)[w.col], _headed(near_grad)[w.row]
    D = (g * _result(w, A.n_rows, near_X)[w.row]).sum(axis=2)

    def dz(g: Array, X: Array) -> Array:
        return w.derivative * w.P * (w.M * (g * X).sum(axis=2) - D)

    of_entries = dz(g, X)
    return (
        _summed(w.col, A.n_cols, w.shares * near_g).reshape(H.shape),
        _summed(w.col, A.n_cols, dz(near_g, X)).reshape(el.shape),
        _summed(w.row, A.n_rows, dz(g, near_X)).reshape(er.shape),
        _placed(A, w, of_entries, el.shape[1:]),
        _of_loops(A, w, of_entries, er),
    )


def gat_backward_bound(
    A: Format, H: Array, el: Array, er: Array, grad: Array, *, factor: float = 2, **options: Any
) -> tuple[Array, ...]:
    """Return how far the gradients, computed in these dtypes, may lie from the oracle.

    Of every product the error of each factor times the sizes of the others, sums of n terms
    ``n eps`` of their size more; ``<dO, O>`` has what ``O`` has been off by.  Where rounding may
    decide the sign of a score, both slopes are right.
    """
    w = _gat_weights(A, el, er, like=H, **options)
    X, g = np.abs(_headed(H))[w.col], np.abs(_headed(grad))[w.row]
    eps, (rough, least), feat = w.eps, precision_of(H.dtype), X.shape[2]
    O_error = factor * _result_error(w, A.n_rows, X, (rough, least))
    D = (g * _result(w, A.n_rows, X)[w.row]).sum(axis=2)
    D_error = (g * O_error[w.row]).sum(axis=2) + (feat + _STEPS) * eps * D
    dot = (g * X).sum(axis=2)
    dot_error = (rough + (feat + _STEPS) * eps) * dot + feat * least
    size = w.M * dot + D
    slope, flipped = np.abs(w.derivative), w.doubtful * abs(1 - w.slope)
    each = slope * (w.error * size + w.P * (w.M * dot_error + D_error + _STEPS * eps * size))
    each += flipped * w.P * size
    # Targets take what has a positive score from sums made forward, and D for the whole row.
    degree = w.degree[w.row][:, None]
    by_row = abs(1 - w.slope) * (w.P * D_error + (w.error + (degree + _STEPS) * eps * w.P) * size)
    dH = _summed(w.col, A.n_cols, (w.M * w.error)[:, :, None] * g)
    in_column = np.bincount(w.col, minlength=A.n_cols)[:, None]
    dH_size = _summed(w.col, A.n_cols, w.shares * g)
    dH += ((in_column + _STEPS) * eps + rough)[:, :, None] * dH_size
    dH += (in_column * least)[:, :, None]
    sum_size = _summed(w.col, A.n_cols, slope * w.P * size)
    dell = _summed(w.col, A.n_cols, each) + (in_column + feat) * eps * sum_size
    # What the oracle itself is off by: at a slope of 1 nothing else is.
    own = (degree + feat + _STEPS) * float(np.finfo(np.float64).eps) * slope * w.P * size
    der = _summed(w.row, A.n_rows, by_row + own + flipped * w.P * size)
    scores = dell.reshape(el.shape), der.reshape(er.shape), _placed(A, w, each, el.shape[1:])
    results = *scores, _of_loops(A, w, each, er)
    exact = gat_backward_oracle(A, H, el, er, grad, **options)[1:]
    rounding, tiny = precision_of(el.dtype)
    pairs = zip(results, exact, strict=True)
    bounds = (factor * a + rounding * np.abs(b) + tiny for a, b in pairs)
    return factor * dH.reshape(H.shape), *bounds


def attend_oracle(
    A: Format, queries: Array, keys: Array, values: Any = None, att: Any = None, **options: Any
) -> Array:
    """Compute ``ops.gatv2`` or ``ops.dot_attention``, in float64.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 2], [0, 1], shape=(2, 2))
    >>> zero, V = np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> attend_oracle(A, zero, zero, V).tolist()
    [[2.0], [0.0]]
    """
    w = _pair_weights(A, queries, keys, values, att, **options)
    return _result(w, A.n_rows, w.values).reshape(A.n_rows, *keys.shape[1:])


def attend_bound(
    A: Format, queries: Array, keys: Array, values: Any = None, att: Any = None, *,
    factor: float = 2.0, **options: Any,
) -> Array:  # fmt: skip
    """Return how far it may lie from the oracle, as ``gat_bound``, in the dtype of the keys."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    error = _result_error(w, A.n_rows, np.abs(w.values), w.rough)
    return factor * error.reshape(A.n_rows, *keys.shape[1:])


def attend_backward_oracle(
    A: Format, queries: Array, keys: Array, values: Any, att: Any, grad: Array, **options: Any
) -> Gradients:
    """Compute the gradients, in float64; those of edges' scores whether there are any or not."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    g = _headed(grad)[w.row]
    D = (g * _result(w, A.n_rows, w.values)[w.row]).sum(axis=2)
    ds = (w.P * (w.M * (g * w.values).sum(axis=2) - D))[:, :, None]
    dq, dk = _summed(w.row, A.n_rows, ds * w.by_query), _summed(w.col, A.n_cols, ds * w.by_key)
    dv = _summed(w.col, A.n_cols, w.shares * g)
    return _shaped(A, w, (queries, keys, values, att), dq, dk, dv, (ds * w.by_att).sum(axis=0), ds)


def attend_backward_bound(
    A: Format, queries: Array, keys: Array, values: Any, att: Any, grad: Array, *,
    factor: float = 2.0, **options: Any,
) -> Gradients:  # fmt: skip
    """Return how far the gradients may lie from the oracle, as ``gat_backward_bound`` does."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    g, eps = np.abs(_headed(grad))[w.row], w.eps
    steps = (g.shape[2] + _STEPS) * eps
    sizes = np.abs(w.values)
    D = (g * _result(w, A.n_rows, sizes)[w.row]).sum(axis=2)
    D_error = (g * factor * _result_error(w, A.n_rows, sizes, w.rough)[w.row]).sum(axis=2)
    dot = w.M * (g * sizes).sum(axis=2)
    off = w.later_error * (dot + D) + w.P * (D_error + 2 * steps * (dot + D))
    ds, off = (w.P * (dot + D))[:, :, None], off[:, :, None]

    def summed(place: Array, rows: int, sizes: Array, errors: Array) -> Array:
        count = np.bincount(place, minlength=rows)[:, None, None]
        rounding = ((count + _STEPS) * eps + w.rough[0]) * _summed(place, rows, sizes)
        return _summed(place, rows, errors) + rounding + count * w.rough[1]

    by_query, by_key, by_att = np.abs(w.by_query), np.abs(w.by_key), np.abs(w.by_att)
    shares, flipped = w.shares * g, ds * w.flipped
    dq = summed(w.row, A.n_rows, ds * by_query, off * by_query + flipped)
    dk = summed(w.col, A.n_cols, ds * by_key, off * by_key + flipped)
    dv = summed(w.col, A.n_cols, shares, (w.M * w.later_error)[:, :, None] * g)
    rounding = (len(w.row) + _STEPS) * eps + w.rough[0]
    of_att = ((off + rounding * ds) * by_att + ds * w.att_error).sum(axis=0) + w.rough[1]
    edges = off + w.rough[0] * ds + w.rough[1]
    bounds = _shaped(A, w, (queries, keys, values, att), dq, dk, dv, of_att, edges)
    return tuple(None if a is None else factor * a for a in bounds)  # type: ignore[return-value]


# Entries


@dataclass
class Weights:
    """Entries, virtual loops last, and their weights in each head."""

    row: Array
    col: Array
    number: Array  #: in CSR order; nnz + i for a virtual loop
    degree: Array  #: of each row
    P: Array
    error: Array  #: of P as the forward pass has it
    later_error: Array  #: of P from the logarithm of the row's sum
    M: Array
    eps: float  #: spacing of the type in which sums run

    @property
    def shares(self) -> Array:
        """Factors of the entries' features: weights after dropout."""
        return (self.M * self.P)[:, :, None]


@dataclass
class _GatWeights(Weights):
    derivative: Array
    slope: float
    doubtful: Array  #: where rounding may decide the sign of the score


@dataclass
class _PairWeights(Weights):
    values: Array  #: (entries, heads, feat), as all that follow: of the entries' sources
    by_query: Array  #: derivatives of the scores
    by_key: Array
    by_att: Array
    att_error: Array  #: of the last
    flipped: Array  #: of the others, where rounding may decide a sign
    rough: tuple[float, float]  #: of the features' dtype: spacing, least magnitude


def _gat_weights(
    A: Format, el: Array, er: Array, *, like: Array, edge_scores: Array | None = None,
    negative_slope: float = 0.2, dropout: float = 0.0, seed: int = 0, self_loops: bool = False,
    loop_edges: Array | None = None,
) -> _GatWeights:  # fmt: skip
    row, col, number = entries = _entries(A, self_loops)
    heads = el.shape[1] if el.ndim == 2 else 1
    left, right = (float64(a).reshape(len(a), heads) for a in (el, er))
    own = _own_scores(A, heads, edge_scores, loop_edges)[number]
    eps = _precision_of_sums(like)
    size = np.abs(left[col]) + np.abs(right[row]) + np.abs(own)
    with np.errstate(invalid="ignore"):  # infinite scores, and NaN
        z = left[col] + right[row] + own
        derivative = np.where(z > 0, 1.0, negative_slope)
        off = 2 * eps[0] * size * max(1.0, abs(negative_slope))
        weights = _weights(A, entries, z * derivative, off, eps, dropout, seed)
    doubtful = np.abs(z) <= 2 * eps[0] * size
    of_gat = derivative, negative_slope, doubtful
    return _GatWeights(*(*weights, *of_gat))


def _pair_weights(
    A: Format, queries: Array, keys: Array, values: Any, att: Any, *, edge_scores: Any = None,
    negative_slope: float = 0.2, scale: float | None = None, dropout: float = 0.0, seed: int = 0,
    self_loops: bool = False,
) -> _PairWeights:  # fmt: skip
    row, col, number = entries = _entries(A, self_loops)
    q, k = _headed(queries)[row], _headed(keys)[col]
    heads, feat = q.shape[1:]
    eps, least = _precision_of_sums(keys)
    none = np.zeros((1, heads, feat))
    if att is None:
        factor = 1 / np.sqrt(feat or 1) if scale is None else scale
        terms, sizes = factor * q * k, np.abs(factor * q * k)
        derivatives = factor * k, factor * q, none, none, none
    else:
        vector, z, size = float64(att).reshape(1, heads, feat), q + k, np.abs(q) + np.abs(k)
        slopes, steepest = np.where(z > 0, 1.0, negative_slope), max(1.0, abs(negative_slope))
        terms, sizes = vector * slopes * z, np.abs(vector) * steepest * size
        doubtful = (np.abs(z) <= 2 * eps * size) * abs(1 - negative_slope)
        by, flipped = vector * slopes, doubtful * np.abs(vector)
        derivatives = by, by, slopes * z, 2 * eps * steepest * size, flipped
    own = _own_scores(A, heads, edge_scores)[number]
    off = (feat + _STEPS) * eps * (sizes.sum(axis=2) + np.abs(own))
    scores = terms.sum(axis=2) + own
    weights = _weights(A, entries, scores, off, (eps, least), dropout, seed)
    weighed = _headed(keys if values is None else values)[col]
    of_pairs = weighed, *derivatives, precision_of(keys.dtype)
    return _PairWeights(*(*weights, *of_pairs))


def _entries(A: Format, self_loops: bool) -> tuple[Array, Array, Array]:
    """Return row, column and number of each entry that counts."""
    stored = [(row, col) for row, col, _ in stored_entries(A)]
    kept = [(*e, n) for n, e in enumerate(stored) if not (self_loops and e[0] == e[1])]
    kept += [(i, i, A.nnz + i) for i in range(A.n_rows) if self_loops]
    row, col, number = np.array(kept, np.int64).reshape(-1, 3).T
    return row, col, number


def _own_scores(A: Format, heads: int, of_entries: Any, of_loops: Any = None) -> Array:
    """Return the edge scores of all entries, then of all virtual loops; 0 where none are given."""
    own = np.zeros((A.nnz + A.n_rows, heads))
    if of_entries is not None:
        own[: A.nnz] = float64(of_entries).reshape(A.nnz, heads)
    if of_loops is not None:
        own[A.nnz :] = float64(of_loops).reshape(A.n_rows, heads)
    return own


def _precision_of_sums(x: Array) -> tuple[float, float]:
    return precision_of(np.float32 if x.dtype.itemsize == 2 else x.dtype)


def _weights(
    A: Format, entries: tuple[Array, Array, Array], s: Array, off: Array, eps: tuple[float, float],
    dropout: float, seed: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Compute the fields of ``Weights``, of entries with scores ``s`` that are ``off`` by so much.

    P is the softmax over each row; it has one error, and another if made by the logarithm of the
    row's sum.
    """
    row, _, number = entries
    n_rows, heads = A.n_rows, s.shape[1]
    degrees = np.bincount(row, minlength=n_rows)
    top = np.full((n_rows, heads), -np.inf)
    np.maximum.at(top, row, s)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = top[row] - s
        powers = np.exp(-far)
        whole = _summed(row, n_rows, powers)
        P = powers / whole[row]
        weighed = np.where(P > 0, P * far, 0)
        logarithm = np.abs(top) + np.log(whole)
        steps = P * (degrees[row][:, None] + _STEPS) + weighed
        steps += P * _summed(row, n_rows, weighed)[row]
        later = steps + weighed + P * 2 * logarithm[row]
        off = P * (off + _summed(row, n_rows, P * off)[row])
        errors = eps[0] * steps + eps[1] + off, eps[0] * later + eps[1] + off
    M = dropout_mask(number, heads, dropout=dropout, seed=seed)
    return *entries, degrees, P, *errors, M, eps[0]


# Sums


def _result(w: Weights, n_rows: int, values: Array) -> Array:
    """Sum the weighted ``values`` of each row's entries."""
    return _summed(w.row, n_rows, w.shares * values)


def _result_error(w: Weights, n_rows: int, sizes: Array, rough: tuple[float, float]) -> Array:
    """Bound the error of ``_result`` for values of these magnitudes.

    ``rough`` are the spacing and the least magnitude of their dtype.
    """
    degree = w.degree[w.row][:, None]
    each = w.M * (w.error + ((degree + _STEPS) * w.eps + rough[0]) * w.P)
    lost = (w.degree * rough[1])[:, None, None]
    return _summed(w.row, n_rows, each[:, :, None] * sizes) + lost


def _summed(place: Array, rows: int, values: Array) -> Array:
    sums = np.zeros((rows, *values.shape[1:]))
    np.add.at(sums, place, values)
    return sums


def _placed(A: Format, w: Weights, values: Array, heads: tuple[int, ...]) -> Array:
    """Return the values of the stored entries, 0 where they do not count."""
    placed = np.zeros((A.nnz + A.n_rows, values.shape[1]))
    placed[w.number] = values
    return placed[: A.nnz].reshape(A.nnz, *heads)


def _of_loops(A: Format, w: Weights, values: Array, like: Array) -> Array:
    """Return the values of the virtual loops, which are last; 0 without them."""
    placed, virtual = np.zeros((A.n_rows, values.shape[1])), w.number >= A.nnz
    placed[w.row[virtual]] = values[virtual]
    return placed.reshape(like.shape)


def _headed(X: Array) -> Array:
    X = float64(X)
    return X if X.ndim == 3 else X[:, None]


def _shaped(
    A: Format, w: Weights, arguments: tuple[Any, ...], dq: Array, dk: Array, dv: Array, datt: Array,
    ds: Array,
) -> Gradients:  # fmt: skip
    """Shape gradients as the arguments; of values that are keys with those of the keys."""
    queries, keys, values, att = arguments
    return (
        dq.reshape(queries.shape),
        (dk if values is not None else dk + dv).reshape(keys.shape),
        None if values is None else dv.reshape(values.shape),
        None if att is None else datt.reshape(att.shape),
        _placed(A, w, ds[:, :, 0], keys.shape[1:-1]),
    )
