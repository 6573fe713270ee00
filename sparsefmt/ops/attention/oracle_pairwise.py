"""Slow and obvious: attention between rows in float64 over a list of entries, and its exactness.

Nothing here calls a conversion or a kernel, so that nothing here shares their bugs.  Options are
those of ``ops.gatv2`` where there is an ``att``, else those of ``ops.dot_attention``; queries
belong to targets ("right") and keys to sources ("left"), and without values these are the keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.oracle import float64
from ..matmul.oracle import precision_of
from .oracle import (
    _STEPS,
    Weights,
    _entries,
    _headed,
    _own_scores,
    _placed,
    _result,
    _result_error,
    _softmax,
    _summed,
    dropout_mask,
)

#: Of queries, keys, values, ``att`` and edges' scores; None for what is not given.
Gradients = tuple[Array, Array, Array | None, Array | None, Array]


def attend_oracle(
    A: Format, queries: Array, keys: Array, values: Any = None, att: Any = None, **options: Any
) -> Array:
    """What ``ops.gatv2`` or ``ops.dot_attention`` computes, in float64.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 2], [0, 1], shape=(2, 2))
    >>> zero, V = np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> attend_oracle(A, zero, zero, V).tolist()
    [[2.0], [0.0]]
    """
    w = _weights(A, queries, keys, values, att, **options)
    return _result(w, A.n_rows, w.values).reshape(A.n_rows, *keys.shape[1:])


def attend_bound(
    A: Format, queries: Array, keys: Array, values: Any = None, att: Any = None, *,
    factor: float = 2.0, **options: Any,
) -> Array:  # fmt: skip
    """How far it may lie from the oracle, if computed in the dtype of the keys.

    ``factor * sum_e M (EP + (deg + 6) eps P + eps_V P) |V|`` and ``deg`` times the least normal
    number: EP is the error of an attention, eps the spacing of the type of sums, eps_V of results.
    """
    w = _weights(A, queries, keys, values, att, **options)
    error = _result_error(w, A.n_rows, np.abs(w.values), w.rough)
    return factor * error.reshape(A.n_rows, *keys.shape[1:])


def attend_backward_oracle(
    A: Format, queries: Array, keys: Array, values: Any, att: Any, grad: Array, **options: Any
) -> Gradients:
    """The gradients, in float64; those of edges' scores whether there are any or not."""
    w = _weights(A, queries, keys, values, att, **options)
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
    """How far the gradients may lie from the oracle.

    Of every product the error of each factor times the sizes of the others, sums of n terms
    ``n eps`` of their size more, and the rounding of results; ``<dO, O>`` has what ``O`` has been
    off by.  Where rounding may decide the sign under a ``leaky``, both slopes are right.
    """
    w = _weights(A, queries, keys, values, att, **options)
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
    found = _shaped(A, w, (queries, keys, values, att), dq, dk, dv, of_att, edges)
    return tuple(None if a is None else factor * a for a in found)  # type: ignore[return-value]


# Entries


@dataclass
class _PairWeights(Weights):
    later_error: Array  #: of P from the logarithm of the row's sum
    values: Array  #: (entries, heads, feat), as all that follow: of the entries' sources
    by_query: Array  #: derivatives of the scores
    by_key: Array
    by_att: Array
    att_error: Array  #: of the last
    flipped: Array  #: of the others, where rounding may decide a sign
    rough: tuple[float, float]  #: of the features' dtype: spacing, least magnitude


def _weights(
    A: Format, queries: Array, keys: Array, values: Any, att: Any, *, edge_scores: Any = None,
    negative_slope: float = 0.2, scale: float | None = None, dropout: float = 0.0, seed: int = 0,
    self_loops: bool = False,
) -> _PairWeights:  # fmt: skip
    row, col, number = _entries(A, self_loops)
    q, k = _headed(queries)[row], _headed(keys)[col]
    heads, feat = q.shape[1:]
    eps, least = precision_of(np.float32 if keys.dtype.itemsize == 2 else keys.dtype)
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
    P, error, later = _softmax(row, A.n_rows, terms.sum(axis=2) + own, off, (eps, least))
    M = dropout_mask(number, heads, dropout=dropout, seed=seed)
    held = _headed(keys if values is None else values)[col]
    entries = row, col, number, np.bincount(row, minlength=A.n_rows)
    of_scores = later, held, *derivatives, precision_of(keys.dtype)
    return _PairWeights(*entries, P, M, error, eps, *of_scores)


def _shaped(
    A: Format, w: Weights, given: tuple[Any, ...], dq: Array, dk: Array, dv: Array, datt: Array,
    ds: Array,
) -> Gradients:  # fmt: skip
    """As the arguments are; of values that are keys with those of the keys."""
    queries, keys, values, att = given
    return (
        dq.reshape(queries.shape),
        (dk if values is not None else dk + dv).reshape(keys.shape),
        None if values is None else dv.reshape(values.shape),
        None if att is None else datt.reshape(att.shape),
        _placed(A, w, ds[:, :, 0], keys.shape[1:-1]),
    )
