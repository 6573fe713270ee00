"""Oracles of attention: float64 over a list of entries, and bounds of the error of kernels.

Nothing here calls a conversion or a kernel, so that nothing here shares their bugs.  Features are
(n, heads, feat) or (n, feat), scores (n, heads) or (n,).  Options are those of ``ops.gat``, and
``loop_edges``, scores of the loops of ``self_loops``; of ``attend`` those of ``ops.gatv2`` where
there is an ``att``, else of ``ops.dot_attention``, whose values are the keys if left out.
"""

from collections.abc import Sequence
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
    w = _gat_weights(A, el, er, H, **options)
    return _result(w, w.values).reshape(A.n_rows, *H.shape[1:])


def gat_bound(A: Format, H: Array, el: Array, er: Array, *, factor: float = 2, **opt: Any) -> Array:
    """Return how far ``ops.gat``, computed in the dtype of ``H``, may lie from the oracle.

    ``factor * sum_e M (EP + (deg + 6) eps P + eps_H P) |H|`` and ``deg`` times the least normal
    number: EP is the error of an attention, eps the spacing of the type of sums, eps_H of results.
    """
    error = _result_error(_gat_weights(A, el, er, H, **opt))
    return factor * error.reshape(A.n_rows, *H.shape[1:])


def gat_attention_oracle(A: Format, el: Array, er: Array, **options: Any) -> Array:
    """Compute ``ops.gat_attention``, in float64."""
    w = _gat_weights(A, el, er, **options)
    return _placed(A, w, w.P)[0].reshape(A.nnz, *el.shape[1:])


def gat_attention_bound(
    A: Format, el: Array, er: Array, *, factor: float = 2, **options: Any
) -> Array:
    """Return how far attentions, computed in the dtype of the scores, may lie from the oracle.

    ``factor * p * (eps * (deg + 6 + d + D) + E)`` with d and D as for ``edge_softmax``, E the
    rounding of the score and of the row's mean score; and ``factor`` times the least normal number.
    """
    w = _gat_weights(A, el, er, **options)
    return factor * _placed(A, w, w.error)[0].reshape(A.nnz, *el.shape[1:])


def gat_backward_oracle(
    A: Format, H: Array, el: Array, er: Array, grad: Array, *,
    gathered: tuple[Array, Array] | None = None, **options: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute ``dH, del, der, dedge_scores`` of ``ops.gat_backward``, and scores of loops.

    ``gathered`` are ``H`` and ``grad`` as forward and the sums over columns gather them, where they
    are rounded for it.
    """
    w = _gat_weights(A, el, er, H, **options)
    der, dell, dH, _, dscores = _gradients(A, w, grad, gathered)
    likes = (dH, H), (dell, el), (der, er)
    edges, loops = _placed(A, w, dscores * w.by_key[:, :, 0])
    of_arrays = (gradient.reshape(like.shape) for gradient, like in likes)
    return *of_arrays, edges.reshape(A.nnz, *el.shape[1:]), loops.reshape(er.shape)


def gat_backward_bound(
    A: Format, H: Array, el: Array, er: Array, grad: Array, *, factor: float = 2, **options: Any
) -> tuple[Array, ...]:
    """Return how far the gradients, computed in these dtypes, may lie from the oracle.

    Of every product the error of each factor times the sizes of the others, sums of n terms
    ``n eps`` of their size more; ``<dO, O>`` has what ``O`` has been off by.  Where rounding may
    decide the sign of a score, both slopes are right.
    """
    w = _gat_weights(A, el, er, H, **options)
    X, g = np.abs(w.values), np.abs(_headed(grad))[w.row]
    eps, (rough, least), feat = w.eps, w.rough, X.shape[2]
    D = (g * _result(w, X)[w.row]).sum(axis=2)
    D_error = (g * factor * _result_error(w)[w.row]).sum(axis=2) + (feat + _STEPS) * eps * D
    dot = (g * X).sum(axis=2)
    dot_error = (rough + (feat + _STEPS) * eps) * dot + feat * least
    size = w.M * dot + D
    slope, flipped = np.abs(w.by_key[:, :, 0]), w.flipped[:, :, 0]
    each = slope * (w.error * size + w.P * (w.M * dot_error + D_error + _STEPS * eps * size))
    each += flipped * w.P * size
    # Targets take what has a positive score from sums made forward, and D for the whole row.
    degree = w.degree[w.row][:, None]
    by_row = w.steeper * (w.P * D_error + (w.error + (degree + _STEPS) * eps * w.P) * size)
    dH = _sum_error(w, w.col, A.n_cols, w.shares * g, (w.M * w.error)[:, :, None] * g)
    in_column = np.bincount(w.col, minlength=A.n_cols)[:, None]
    sum_size = _summed(w.col, A.n_cols, slope * w.P * size)
    dell = _summed(w.col, A.n_cols, each) + (in_column + feat) * eps * sum_size
    # What the oracle itself is off by: at a slope of 1 nothing else is.
    own = (degree + feat + _STEPS) * float(np.finfo(np.float64).eps) * slope * w.P * size
    der = _summed(w.row, A.n_rows, by_row + own + flipped * w.P * size)
    exact = gat_backward_oracle(A, H, el, er, grad, **options)[1:]
    rounding, tiny = precision_of(el.dtype)
    pairs = zip((dell, der, *_placed(A, w, each)), exact, strict=True)
    bounds = (factor * a.reshape(b.shape) + rounding * np.abs(b) + tiny for a, b in pairs)
    return factor * dH.reshape(H.shape), *bounds


def attend_oracle(
    A: Format, queries: Array, keys: Array, values: Array | None = None, att: Array | None = None,
    **options: Any,
) -> Array:  # fmt: skip
    """Compute ``ops.gatv2`` or ``ops.dot_attention``, in float64."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    return _result(w, w.values).reshape(A.n_rows, *keys.shape[1:])


def attend_bound(
    A: Format, queries: Array, keys: Array, values: Array | None = None, att: Array | None = None,
    *, factor: float = 2.0, **options: Any,
) -> Array:  # fmt: skip
    """Return how far it may lie from the oracle, as ``gat_bound``, in the dtype of the keys."""
    error = _result_error(_pair_weights(A, queries, keys, values, att, **options))
    return factor * error.reshape(A.n_rows, *keys.shape[1:])


def attend_backward_oracle(
    A: Format, queries: Array, keys: Array, values: Array | None, att: Array | None, grad: Array,
    **options: Any,
) -> Gradients:  # fmt: skip
    """Compute the gradients, in float64; those of edges' scores whether there are any or not."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    return _shaped(A, w, (queries, keys, values, att), *_gradients(A, w, grad))


def attend_backward_bound(
    A: Format, queries: Array, keys: Array, values: Array | None, att: Array | None, grad: Array, *,
    factor: float = 2.0, **options: Any,
) -> Gradients:  # fmt: skip
    """Return how far the gradients may lie from the oracle, as ``gat_backward_bound`` does."""
    w = _pair_weights(A, queries, keys, values, att, **options)
    g, sizes = np.abs(_headed(grad))[w.row], np.abs(w.values)
    D = (g * _result(w, sizes)[w.row]).sum(axis=2)
    D_error = (g * factor * _result_error(w)[w.row]).sum(axis=2)
    size = w.M * (g * sizes).sum(axis=2) + D
    of_dots = D_error + 2 * (g.shape[2] + _STEPS) * w.eps * size
    ds = (w.P * size)[:, :, None]
    off = (w.later_error * size + w.P * of_dots)[:, :, None]
    by_query, by_key, by_att = np.abs(w.by_query), np.abs(w.by_key), np.abs(w.by_att)
    of_values, flipped = (w.M * w.later_error)[:, :, None] * g, ds * w.flipped
    dq = _sum_error(w, w.row, A.n_rows, ds * by_query, off * by_query + flipped)
    dk = _sum_error(w, w.col, A.n_cols, ds * by_key, off * by_key + flipped)
    dv = _sum_error(w, w.col, A.n_cols, w.shares * g, of_values)
    rounding = (len(w.row) + _STEPS) * w.eps + w.rough[0]
    of_att = ((off + rounding * ds) * by_att + ds * w.att_error).sum(axis=0) + w.rough[1]
    edges = (off + w.rough[0] * ds + w.rough[1])[:, :, 0]
    bounds = _shaped(A, w, (queries, keys, values, att), dq, dk, dv, of_att, edges)
    return tuple(None if a is None else factor * a for a in bounds)  # type: ignore[return-value]


def _gradients(
    A: Format, w: "Weights", grad: Array, gathered: tuple[Array, Array] | None = None
) -> tuple[Array, ...]:
    """Compute the gradients of queries, keys, values, ``att``, and scores of entries."""
    g = near_g = _headed(grad)[w.row]
    X = near_X = w.values
    if gathered is not None:
        near_X, near_g = _headed(gathered[0])[w.col], _headed(gathered[1])[w.row]
    D = (g * _result(w, near_X)[w.row]).sum(axis=2)

    def ds(g: Array, X: Array) -> Array:
        return (w.P * (w.M * (g * X).sum(axis=2) - D))[:, :, None]

    return (
        _summed(w.row, A.n_rows, ds(g, near_X) * w.by_query),
        _summed(w.col, A.n_cols, ds(near_g, X) * w.by_key),
        _summed(w.col, A.n_cols, w.shares * near_g),
        (ds(g, X) * w.by_att).sum(axis=0),
        ds(g, X)[:, :, 0],
    )


# Entries


@dataclass
class Weights:
    """Entries, virtual loops last, their weights in each head, and derivatives of their scores."""

    row: Array
    col: Array
    number: Array  #: in CSR order; nnz + i for a virtual loop
    degree: Array  #: of each row
    P: Array
    error: Array  #: of P as the forward pass has it
    later_error: Array  #: of P from the logarithm of the row's sum
    M: Array
    eps: float  #: spacing of the type in which sums run
    values: Array  #: (entries, heads, feat): of the entries' sources; derivatives as well
    rough: tuple[float, float]  #: of their dtype: spacing, least magnitude
    by_query: Array  #: of GAT with a feature of 1: by the targets' scores
    by_key: Array
    by_att: Array
    att_error: Array  #: of ``by_att``
    flipped: Array  #: of ``by_query`` and ``by_key``, where rounding may decide a sign
    steeper: float  #: by how much the slopes of both signs differ

    @property
    def shares(self) -> Array:
        """Return factors of the entries' features, (entries, heads, 1): weights after dropout."""
        return (self.M * self.P)[:, :, None]


def _gat_weights(
    A: Format, el: Array, er: Array, H: Array | None = None, **options: Any
) -> Weights:
    """Compute the weights of scores of both ends; without ``H`` values are these."""
    heads = el.shape[1] if el.ndim == 2 else 1
    left, right = (float64(a).reshape(len(a), heads, 1) for a in (el, er))
    values, like = (left, el) if H is None else (_headed(H), H)
    return _weights(A, (right, left, values), None, like, of_ends=True, **options)


def _pair_weights(
    A: Format, queries: Array, keys: Array, values: Array | None, att: Array | None, **options: Any
) -> Weights:
    """Compute the weights of scores of features of both ends."""
    features = [_headed(a) for a in (queries, keys, keys if values is None else values)]
    return _weights(A, features, att, keys, **options)


def _weights(
    A: Format, features: Sequence[Array], att: Array | None, like: Array, *, of_ends: bool = False,
    edge_scores: Array | None = None, loop_edges: Array | None = None, negative_slope: float = 0.2,
    scale: float | None = None, dropout: float = 0.0, seed: int = 0, self_loops: bool = False,
) -> Weights:  # fmt: skip
    """Compute the weights of entries from queries, keys and values; sums run as for ``like``.

    Scores are additive with ``att``, and, where they are ``of_ends``, leaky with the edges'.
    """
    row, col, number = _entries(A, self_loops)
    q, k, values = features[0][row], features[1][col], features[2][col]
    heads, feat = q.shape[1:]
    eps, tiny = precision_of(np.float32 if like.dtype.itemsize == 2 else like.dtype)
    own = np.zeros((A.nnz + A.n_rows, heads))  # edge scores of all entries and virtual loops
    for part, scores in ((own[: A.nnz], edge_scores), (own[A.nnz :], loop_edges)):
        if scores is not None:
            part[...] = float64(scores).reshape(part.shape)
    own, none = own[number][:, :, None], np.zeros((1, heads, feat))
    steeper, steepest = abs(1 - negative_slope), max(1.0, abs(negative_slope))
    with np.errstate(invalid="ignore"):  # infinite scores, and NaN
        if of_ends or att is not None:
            vector = none + 1 if att is None else float64(att).reshape(1, heads, feat)
            inside = own if of_ends else 0 * own
            z, size = k + q + inside, np.abs(k) + np.abs(q) + np.abs(inside)
            slopes, doubtful = np.where(z > 0, 1.0, negative_slope), np.abs(z) <= 2 * eps * size
            by, sizes = vector * slopes, np.abs(vector) * steepest * size
            terms, derivatives = by * z, (by, by, slopes * z)
            errors = 2 * eps * steepest * size, doubtful * steeper * np.abs(vector)
        else:
            factor = 1 / np.sqrt(feat or 1) if scale is None else scale
            terms, sizes = factor * q * k, np.abs(factor * q * k)
            derivatives, errors = (factor * k, factor * q, none), (none, none)
        if of_ends:
            s, off = terms[:, :, 0], 2 * eps * sizes[:, :, 0]
        else:
            s, own = terms.sum(axis=2) + own[:, :, 0], np.abs(own[:, :, 0])
            off = (feat + _STEPS) * eps * (sizes.sum(axis=2) + own)
        weights = _softmax(A.n_rows, row, s, off, (eps, tiny))
    M = dropout_mask(number, heads, dropout=dropout, seed=seed)
    of_values = values, precision_of(like.dtype)
    return Weights(row, col, number, *weights, M, eps, *of_values, *derivatives, *errors, steeper)


def _entries(A: Format, self_loops: bool) -> tuple[Array, Array, Array]:
    """Return row, column and number of each entry that counts."""
    stored = [(row, col) for row, col, _ in stored_entries(A)]
    counted = [(*e, n) for n, e in enumerate(stored) if not (self_loops and e[0] == e[1])]
    counted += [(i, i, A.nnz + i) for i in range(A.n_rows) if self_loops]
    row, col, number = np.array(counted, np.int64).reshape(-1, 3).T
    return row, col, number


def _softmax(
    n_rows: int, row: Array, s: Array, off: Array, eps: tuple[float, float]
) -> tuple[Array, Array, Array, Array]:
    """Compute degrees, P and two errors of P from scores that are ``off`` by so much.

    P is the softmax over each row; it has one error, and another if made by the logarithm of the
    row's sum.
    """
    degrees = np.bincount(row, minlength=n_rows)
    top = np.full((n_rows, s.shape[1]), -np.inf)
    np.maximum.at(top, row, s)
    with np.errstate(invalid="ignore", divide="ignore"):
        far = top[row] - s
        powers = np.exp(-far)
        total = _summed(row, n_rows, powers)
        P = powers / total[row]
        weighed = np.where(P > 0, P * far, 0)
        logarithm = np.abs(top) + np.log(total)
        steps = P * (degrees[row][:, None] + _STEPS) + weighed
        steps += P * _summed(row, n_rows, weighed)[row]
        later = steps + weighed + P * 2 * logarithm[row]
        off = P * (off + _summed(row, n_rows, P * off)[row])
        return degrees, P, eps[0] * steps + eps[1] + off, eps[0] * later + eps[1] + off


# Sums


def _result(w: Weights, values: Array) -> Array:
    """Sum the weighted ``values`` of each row's entries."""
    return _summed(w.row, len(w.degree), w.shares * values)


def _result_error(w: Weights) -> Array:
    """Bound the error of ``_result`` of the entries' values."""
    sizes = np.abs(w.values)
    errors = (w.M * w.error)[:, :, None] * sizes
    return _sum_error(w, w.row, len(w.degree), w.shares * sizes, errors)


def _sum_error(w: Weights, place: Array, rows: int, sizes: Array, errors: Array) -> Array:
    """Bound the error of sums over places of terms of these sizes, which have these errors."""
    count = np.bincount(place, minlength=rows)[:, None, None]
    rounding = ((count + _STEPS) * w.eps + w.rough[0]) * _summed(place, rows, sizes)
    return _summed(place, rows, errors) + rounding + count * w.rough[1]


def _summed(place: Array, rows: int, values: Array) -> Array:
    """Add up the values of each place."""
    sums = np.zeros((rows, *values.shape[1:]))
    np.add.at(sums, place, values)
    return sums


def _placed(A: Format, w: Weights, values: Array) -> tuple[Array, Array]:
    """Return values of all stored entries, and of virtual loops; 0 where they do not count."""
    placed = np.zeros((A.nnz + A.n_rows, values.shape[1]))
    placed[w.number] = values
    return placed[: A.nnz], placed[A.nnz :]


def _headed(X: Array) -> Array:
    """Return features in float64, with an axis for heads."""
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
        _placed(A, w, ds)[0].reshape(A.nnz, *keys.shape[1:-1]),
    )
