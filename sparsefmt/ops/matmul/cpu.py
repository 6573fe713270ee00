"""SpMM on NumPy arrays: rows summed or compared in vector registers, tile by tile of features.

Compiled loops take flat arrays, empty for a missing one, so that each is compiled once per value
and index dtype; offsets are 64-bit whatever the index dtype.  The functions around them follow.
"""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.lanes import (
    add_product,
    divided,
    equal,
    greater,
    lanes,
    lanes_beside,
    load,
    prefetch,
    product,
    store,
    where,
    width_of,
)
from ..engine.loops import (
    AHEAD,
    NARROW,
    WIDE,
    Inputs,
    Int,
    Run,
    by_blocks,
    by_tiles,
    inlined,
    parallel,
    rows_of,
    writing,
)
from ..engine.small import flat, values_of
from .cuda import shape_of_heads


@inlined
def weight_of(data: Array, scale: Array, e: int, j: np.int64, unit: float) -> Any:
    """Compute ``a[e] c[j]``; ``unit`` where neither is given."""
    weight = unit
    if len(data):
        weight = data[e]
    if len(scale):
        weight = weight * scale[j]
    return weight


@by_blocks
def _row_sum(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Compute ``sum of a[e] c[j] X[j, f:f + count]`` over the entries of a block."""
    A, X, col_scale, f, count = args
    indices, data = A
    X, stride = X
    sums, end = zero, np.uint64(len(indices) - 1)
    for e in range(np.uint64(first), np.uint64(last)):  # which no index counts from the end
        ahead = np.int64(indices[min(e + np.uint64(AHEAD), end)])
        prefetch(zero, X, ahead * stride + f)
        j = np.int64(indices[e])
        weight = weight_of(data, col_scale, e, j, X.dtype.type(1))
        sums = add_product(sums, weight, load(zero, X, j * stride + f, count))
    return sums


@inlined
def sum_tile(zero: Any, f: int, count: int, row: Any, args: Any) -> None:
    """Reduce ``count`` features of row ``i`` from ``f`` on, and multiply them by its share."""
    i, span, share = row
    A, X, scales, Y, mean = args
    Y, feat = Y
    row_scale, col_scale = scales
    sums = _row_sum(zero, *span, (A, X, col_scale, f, count))
    if span[1] > span[0]:
        if mean:
            sums = divided(sums, span[1] - span[0])
        if len(row_scale):
            sums = product(sums, row_scale[i])
        sums = product(sums, share)
    store(sums, Y, i * feat + f, count)


@parallel
def spmm_sum(
    indptr: Array, A: Array, X: Array, scales: Array, Y: Array, mean: bool, pieces: int
) -> None:
    """Reduce by sum or mean; ``A`` is (indices, data), ``X`` and ``Y`` are (flat, row stride)."""
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        args, x, feat = (A, X, scales, Y, mean), X[0], Y[1]
        for i in range(start, stop):
            span = np.int64(indptr[i]), np.int64(indptr[i + 1])
            by_tiles(sum_tile, x, feat, (i, span, 1), args)


@parallel
def spmm_heads(
    indptr: Array, A: Array, X: Array, scales: Array, Y: Array, mean: bool, heads: int, apart: int,
    pieces: int,
) -> None:  # fmt: skip
    """Reduce as ``spmm_sum``, with values of each head; heads begin ``apart`` values apart in X.

    ``A`` is (indices, flat values, heads side by side).
    """
    indices, data = A
    X, stride = X
    Y, feat = Y
    width = feat // heads
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for h in range(heads):
            of_head = indices, data[h::heads]
            args = of_head, (X[h * apart :], stride), scales, (Y[h * width :], feat), mean
            for i in range(start, stop):
                span = np.int64(indptr[i]), np.int64(indptr[i + 1])
                by_tiles(sum_tile, X, width, (i, span, 1), args)


@inlined
def _best_tile(
    zero: Any, A: Array, X: Array, scales: Array, Y: Array, arg: Array, i: int, span: Array, f: int,
    sign: float, keep: bool,
) -> Any:  # fmt: skip
    """Find the largest of ``sign a[e] c[j] X[j, f]``; returns where the next tile begins."""
    indices, data = A
    X, stride = X
    Y, feat = Y
    row_scale, col_scale = scales
    count, unit = min(width_of(zero), feat - f), X.dtype.type(1)
    best, winner = zero, lanes_beside(zero, arg, -1)
    start, stop = span
    if stop > start:
        j = np.int64(indices[start])
        weight = sign * weight_of(data, col_scale, start, j, unit)
        best = product(load(zero, X, j * stride + f, count), weight)
        winner = lanes_beside(zero, arg, start)
    for e in range(start + 1, stop):
        prefetch(zero, X, np.int64(indices[min(e + AHEAD, len(indices) - 1)]) * stride + f)
        j = np.int64(indices[e])
        weight = sign * weight_of(data, col_scale, e, j, unit)
        run = product(load(zero, X, j * stride + f, count), weight)
        wins = greater(run, best)
        best = where(wins, run, best)
        if keep:
            winner = where(wins, lanes_beside(zero, arg, e), winner)
    if stop > start:
        best = product(best, sign)
        if len(row_scale):
            best = product(best, row_scale[i])
    store(best, Y, i * feat + f, count)
    if keep:
        store(winner, arg, i * feat + f, count)
    return f + count


@parallel
def spmm_best(
    indptr: Array, A: Array, X: Array, scales: Array, Y: Array, arg: Array, sign: float, pieces: int
) -> None:
    """Reduce by max (sign 1) or min (sign -1), and say in ``arg``, unless empty, who won."""
    feat, keep = Y[1], len(arg) > 0
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for i in range(start, stop):
            span, f = (np.int64(indptr[i]), np.int64(indptr[i + 1])), 0
            if keep:
                while f < feat:
                    zero = lanes(X[0], WIDE, 0)
                    f = _best_tile(zero, A, X, scales, Y, arg, i, span, f, sign, True)
            else:
                while feat - f >= width_of(lanes(X[0], WIDE, 0)):
                    zero = lanes(X[0], WIDE, 0)
                    f = _best_tile(zero, A, X, scales, Y, arg, i, span, f, sign, False)
                while f < feat:
                    low = lanes(X[0], NARROW, 0)
                    f = _best_tile(low, A, X, scales, Y, arg, i, span, f, sign, False)


@by_blocks
def _share_of_winners(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up the gradients that row ``j`` of X gets from the entries that won."""
    (indices, perm), data, grad, arg, scales, j, f, count, feat = args
    grad, stride = grad
    row_scale, col_scale = scales
    sums = zero
    for k in range(first, last):
        i, e = np.int64(indices[k]), perm[k]
        weight = weight_of(data, row_scale, e, i, grad.dtype.type(1))
        if len(col_scale):
            weight = weight * col_scale[j]
        won = equal(load(lanes_beside(zero, arg, 0), arg, i * feat + f, count), e)
        share = product(load(zero, grad, i * stride + f, count), weight)
        sums = add_product(sums, 1, where(won, share, zero))
    return sums


@parallel
def arg_dx(
    indptr: Array, T: Array, data: Array, grad: Array, arg: Array, scales: Array, out: Array,
    pieces: int,
) -> None:  # fmt: skip
    """Compute the gradient of X; ``T`` is (indices, perm) of the transposed structure."""
    step = width_of(lanes(grad[0], NARROW, 0))
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        dx, feat = out
        for j in range(start, stop):
            span = np.int64(indptr[j]), np.int64(indptr[j + 1])
            for f in range(0, feat, step):
                zero, count = lanes(grad[0], NARROW, 0), min(step, feat - f)
                args = T, data, grad, arg, scales, j, f, count, feat
                store(_share_of_winners(zero, *span, args), dx, j * feat + f, count)


@parallel
def arg_da(
    indptr: Array, indices: Array, X: Array, grad: Array, arg: Array, scales: Array, out: Array,
    pieces: int,
) -> None:  # fmt: skip
    """Compute the gradient of the edge values; ``arg`` is (flat, feat)."""
    X, stride = X
    grad, grad_stride = grad
    arg, feat = arg
    row_scale, col_scale = scales
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for i in range(start, stop):
            out[indptr[i] : indptr[i + 1]] = 0
            for f in range(feat):
                e = arg[i * feat + f]
                if indptr[i] <= e < indptr[i + 1]:  # of this row, whatever the caller gave
                    j = np.int64(indices[e])
                    share = grad[i * grad_stride + f] * X[j * stride + f]
                    if len(row_scale):
                        share = share * row_scale[i]
                    if len(col_scale):
                        share = share * col_scale[j]
                    out[e] += share


# The functions around the loops


def spmm(
    A: CSR, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *,
    out: Array | None = None, arg: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Compute ``out[i] = r[i] * reduce of a[e] c[j] x[j]`` over the entries of row i.

    Arguments are those of ``cuda.spmm``; ``arg`` may have any integer dtype.
    """
    of_heads = values is not None and values.ndim == 2
    if out is None:
        shape = shape_of_heads(A, x, values) if of_heads else (A.n_rows, x.shape[1])
        out = np.empty(shape, x.dtype)
    if not out.size:
        return out
    if values is not None and perm is not None:
        values = values[perm]
    entries = A.indices, values_of(values, x).reshape(-1)
    scales = values_of(row_scale, x), values_of(col_scale, x)
    with writing(out) as (sums, pieces):
        X, Y = flat(x), flat(sums)
        if of_heads:
            heads, apart = out.shape[1], x.shape[-1] * (x.ndim == 3)
            mean = reduce == "mean"
            spmm_heads(A.indptr, entries, X, scales, Y, mean, heads, apart, pieces)
        elif reduce in ("sum", "mean"):
            spmm_sum(A.indptr, entries, X, scales, Y, reduce == "mean", pieces)
        else:
            winners = np.empty(0, A.indices.dtype) if arg is None else arg.reshape(-1)
            sign = sums.dtype.type(1 if reduce == "max" else -1)
            spmm_best(A.indptr, entries, X, scales, Y, winners, sign, pieces)
    return out


def spmm_arg(
    A: CSR, x: Array, values: Array, row_scale: Array, col_scale: Array, reduce: str
) -> tuple[Array, Array]:
    """Compute the maximum or minimum of ``spmm``, and the entries that win it."""
    arg = np.empty((A.n_rows, x.shape[1]), A.index_dtype)
    return spmm(A, x, values, None, row_scale, col_scale, reduce, arg=arg), arg


def spmm_arg_dx(
    A: CSR, perm: Array, grad: Array, arg: Array, values: Array, row_scale: Array, col_scale: Array
) -> Array:
    """Compute the gradient of ``spmm_arg`` in the features, as in ``cuda``: winners have it."""
    out = np.empty((A.n_rows, grad.shape[1]), grad.dtype)
    if not out.size:
        return out
    factors = values, row_scale, col_scale
    data, rows, cols = (values_of(factor, grad) for factor in factors)
    entries, winners, scales = (A.indices, perm), arg.reshape(-1), (rows, cols)
    with writing(out) as (dx, pieces):
        arg_dx(A.indptr, entries, data, flat(grad), winners, scales, flat(dx), pieces)
    return out


def spmm_arg_da(
    A: CSR, x: Array, grad: Array, arg: Array, row_scale: Array, col_scale: Array
) -> Array:
    """Compute the gradient of ``spmm_arg`` in the values: each result's goes to the winner."""
    out = np.empty(A.nnz, x.dtype)
    if not out.size:
        return out
    scales = values_of(row_scale, x), values_of(col_scale, x)
    X, dY, winners = flat(x), flat(grad), flat(arg)
    with writing(out) as (da, pieces):
        arg_da(A.indptr, A.indices, X, dY, winners, scales, da, pieces)
    return out
