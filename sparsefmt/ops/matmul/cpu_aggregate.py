"""The numba twin of ``aggregate_backward``: both gradients in one pass over the transpose."""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ..engine import cpu
from ..engine.lanes import add_product, lanes, load, prefetch, product, store, total, width_of
from ..engine.loops import AHEAD, MIDDLE, NARROW, WIDE, WIDEST, inlined, parallel, rows_of


def aggregate_backward(
    t_indptr: Array,
    t_indices: Array,
    perm: Array | None,
    data: Array | None,
    X: Array,
    grad: Array,
    row_scale: Array | None,
    col_scale: Array | None,
    self_weight: Array | None,
    dX: Array,
    dA: Array,
    dself: Array | None,
) -> None:
    """``dX[j] = c[j] sum of a[e] r[i] grad[i] + self[j] grad[j]``, ``dA[e] = r c <grad[i], X[j]>``.

    ``t_indptr, t_indices`` is the transposed structure; ``perm`` its entries' numbers in the order
    of ``data`` and ``dA``, where they are not their own.  Scales, ``self_weight`` and
    ``dself[j] = <grad[j], X[j]>``, which goes with it, have the dtype that sums run in.
    """
    none = np.empty(0, t_indices.dtype)
    values = [cpu.values_of(one, X) for one in (data, row_scale, col_scale, self_weight)]
    T = t_indices, none if perm is None else perm
    wide = dA if dA.itemsize >= 4 else np.empty(dA.shape, np.float32)
    own = np.empty(0, wide.dtype) if dself is None else dself
    with cpu.writing(dX) as (out, pieces):
        flat = cpu.flat(X), cpu.flat(grad)
        _backward(t_indptr, T, tuple(values), *flat, cpu.flat(out), wide, own, pieces)
    if wide is not dA:
        with np.errstate(over="ignore", under="ignore"):
            dA[...] = wide


@inlined
def _tile(
    zero: Any, T: Any, values: Any, X: Any, grad: Any, out: Any, dA: Any, j: Any, span: Any, f: Any,
    count: Any,
) -> Any:  # fmt: skip
    """Features from ``f`` on, as many as ``count``; returns where the next tile begins."""
    indices, perm = T
    data, row_scale, col_scale, self_weight = values
    X, ldx = X
    grad, ldg = grad
    out, feat = out
    line, one = lanes(dA, NARROW, 0), X.dtype.type(1)
    own, sums, last = load(zero, X, j * ldx + f, count), zero, len(indices) - 1
    column = col_scale[j] if len(col_scale) else one
    for k in range(*span):
        ahead = min(k + AHEAD, last)
        prefetch(zero, grad, np.int64(indices[ahead]) * ldg + f)
        e = np.int64(k)
        if len(perm):
            e = np.int64(perm[k])
            prefetch(line, dA, np.int64(perm[ahead]))
        i = np.int64(indices[k])
        factor = row_scale[i] if len(row_scale) else one
        weight = data[e] * factor if len(data) else factor
        row = load(zero, grad, i * ldg + f, count)
        sums = add_product(sums, weight, row)
        dot = total(product(own, row)) * (factor * column)
        dA[e] = dot if f == 0 else dA[e] + dot
    if len(col_scale):
        sums = product(sums, column)
    if len(self_weight):
        sums = add_product(sums, self_weight[j], load(zero, grad, j * ldg + f, count))
    store(sums, out, j * feat + f, count)
    return f + count


@inlined
def _dot(X: Any, at: Any, Y: Any, there: Any, feat: Any) -> Any:
    zero = lanes(X, NARROW, 0)
    step, sums = width_of(zero), zero
    for f in range(0, feat, step):
        count = min(step, feat - f)
        sums = add_product(sums, load(zero, X, at + f, count), load(zero, Y, there + f, count))
    return total(sums)


@parallel
def _backward(
    indptr: Any, T: Any, values: Any, X: Any, grad: Any, out: Any, dA: Any, dself: Any, pieces: Any
) -> None:
    """``X``, ``grad`` and ``out`` are (flat, row stride)."""
    feat = out[1]
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        if feat == 0:
            dA[indptr[start] : indptr[stop]] = 0
        for j in range(start, stop):
            span, f = (np.int64(indptr[j]), np.int64(indptr[j + 1])), 0
            if len(dself):
                dself[j] = _dot(X[0], j * X[1], grad[0], j * grad[1], feat)
            whole = lanes(X[0], WIDEST, 0)
            while feat - f >= width_of(whole):
                f = _tile(whole, T, values, X, grad, out, dA, j, span, f, width_of(whole))
            half = lanes(X[0], WIDE, 0)
            if feat - f >= width_of(half):
                f = _tile(half, T, values, X, grad, out, dA, j, span, f, width_of(half))
            quarter = lanes(X[0], MIDDLE, 0)
            if feat - f >= width_of(quarter):
                f = _tile(quarter, T, values, X, grad, out, dA, j, span, f, width_of(quarter))
            while f < feat:
                rest = lanes(X[0], NARROW, 0)
                count = min(width_of(rest), feat - f)
                f = _tile(rest, T, values, X, grad, out, dA, j, span, f, count)
