"""Both gradients of an aggregation on NumPy arrays, in one pass over the transpose."""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.lanes import add_product, lanes, load, prefetch, product, store, total
from ..engine.loops import (
    AHEAD,
    NARROW,
    Inputs,
    Int,
    Run,
    by_blocks,
    by_tiles,
    dot,
    inlined,
    parallel,
    rows_of,
    writing,
)
from ..engine.small import flat, values_of


def aggregate_backward(
    A: CSR, x: Array, grad: Array, values: Array, perm: Array, row_scale: Array, col_scale: Array,
    *, self_weight: Array | None = None, inverse: Array | None = None,
    out: tuple[Array, Array] | None = None, dself: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute gradients of a product in its features and values, as in ``cuda_aggregate``."""
    dx, da = out or (np.empty((A.n_rows, x.shape[1]), x.dtype), np.empty(A.nnz, x.dtype))
    args = values, row_scale, col_scale, self_weight
    weights = tuple(values_of(a, x) for a in args)
    T = A.indices, np.empty(0, A.indices.dtype) if perm is None else perm
    wide = da if da.itemsize >= 4 else np.empty(da.shape, np.float32)
    own = np.empty(0, wide.dtype) if dself is None else dself
    with writing(dx) as (sums, pieces):
        features = flat(x), flat(grad)
        _backward(A.indptr, T, weights, *features, flat(sums), wide, own, pieces)
    if wide is not da:
        with np.errstate(over="ignore", under="ignore"):
            da[...] = wide
    return dx, da


@by_blocks
def _block(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up the gradient of X for some entries of a column, and write that of their values."""
    (indices, perm), data, row_scale, grad, dA, own, column, f, count = args
    grad, ldg = grad
    line, unit = lanes(dA, NARROW, 0), grad.dtype.type(1)
    sums, end = zero, len(indices) - 1
    for k in range(first, last):
        ahead = min(k + AHEAD, end)
        prefetch(zero, grad, np.int64(indices[ahead]) * ldg + f)
        e = np.int64(k)
        if len(perm):
            e = np.int64(perm[k])
            prefetch(line, dA, np.int64(perm[ahead]))
        i = np.int64(indices[k])
        factor = row_scale[i] if len(row_scale) else unit
        weight = data[e] * factor if len(data) else factor
        row = load(zero, grad, i * ldg + f, count)
        sums = add_product(sums, weight, row)
        dot = total(product(own, row)) * (factor * column)
        dA[e] = dot if f == 0 else dA[e] + dot
    return sums


@inlined
def _tile(zero: Any, f: int, count: int, row: Any, args: Any) -> None:
    """Compute both gradients of column ``j`` for ``count`` features from ``f`` on."""
    j, span = row
    T, values, X, grad, out, dA = args
    data, row_scale, col_scale, self_weight = values
    out, feat = out
    own = load(zero, X[0], j * X[1] + f, count)
    column = col_scale[j] if len(col_scale) else X[0].dtype.type(1)
    sums = _block(zero, *span, (T, data, row_scale, grad, dA, own, column, f, count))
    if len(col_scale):
        sums = product(sums, column)
    if len(self_weight):
        sums = add_product(sums, self_weight[j], load(zero, grad[0], j * grad[1] + f, count))
    store(sums, out, j * feat + f, count)


@parallel
def _backward(
    indptr: Array, T: Array, values: Array, X: Array, grad: Array, out: Array, dA: Array,
    dself: Array, pieces: int,
) -> None:  # fmt: skip
    """Compute both gradients; ``X``, ``grad`` and ``out`` are (flat, row stride)."""
    feat = out[1]
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        if feat == 0:
            dA[indptr[start] : indptr[stop]] = 0
        args = T, values, X, grad, out, dA
        for j in range(start, stop):
            span = np.int64(indptr[j]), np.int64(indptr[j + 1])
            if len(dself):
                dself[j] = dot(X[0], j * X[1], grad[0], j * grad[1], feat)
            by_tiles(_tile, X[0], feat, (j, span), args)
