"""Compiled loops of the products with row-balanced features: ``k`` places of each row, scattered.

``S`` is (columns, values, k) and ``places`` (columns, k), their arrays flat.  Offsets into features
are unsigned, so that numba does not ask whether one counts from the end.
"""

from typing import Any

import numba
import numpy as np

from ..engine.lanes import lanes, prefetch, width_of
from ..engine.loops import AHEAD, NARROW, inlined, parallel, rows_of
from ..matmul.cpu import weight_of

#: May add in any order, always the same: 1.2x by vector gathers.
reordered = numba.njit(forceinline=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})


@inlined
def _prefetch_row(a: Any, j: Any, k: Any) -> None:
    """Ask for row ``j`` of ``k`` values."""
    for t in range(0, k, width_of(lanes(a, NARROW, 0))):
        prefetch(lanes(a, NARROW, 0), a, j * k + t)


@inlined
def _scaled_row(Y: Any, at: Any, feat: Any, divisor: Any, factor: Any) -> None:
    for f in range(at, at + feat):
        Y[f] = Y[f] / divisor * factor


@parallel
def spgemm(indptr: Any, A: Any, S: Any, scales: Any, Y: Any, mean: Any, pieces: Any) -> None:
    """Sum or mean; ``A`` is (indices, data), ``Y`` (flat, feat): a row of it stays in the L1."""
    indices, data = A
    columns, values, k = S
    row_scale, col_scale = scales
    Y, feat = Y
    last, one = len(indices) - 1, values.dtype.type(1)
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for i in range(start, stop):
            first, end, at = np.int64(indptr[i]), np.int64(indptr[i + 1]), np.uint64(i * feat)
            Y[i * feat : (i + 1) * feat] = 0
            for e in range(first, end):
                ahead = np.int64(indices[min(e + AHEAD, last)])
                _prefetch_row(columns, ahead, k)
                _prefetch_row(values, ahead, k)
                j = np.int64(indices[e])
                weight = weight_of(data, col_scale, e, j, one)
                for t in range(np.uint64(j * k), np.uint64((j + 1) * k)):
                    Y[at + np.uint64(columns[t])] += weight * values[t]
            if end > first and (mean or len(row_scale)):
                divisor = values.dtype.type(end - first if mean else 1)
                factor = row_scale[i] if len(row_scale) else one
                _scaled_row(Y, at, np.uint64(feat), divisor, factor)


@parallel
def sspmm(
    indptr: Any, T: Any, data: Any, places: Any, grad: Any, scales: Any, out: Any, pieces: Any
) -> None:
    """The transposed product at ``places`` only; ``T`` is (indices, perm) of the transpose."""
    indices, perm = T
    columns, k = places
    grad, stride = grad
    row_scale, col_scale = scales
    last, one = len(indices) - 1, grad.dtype.type(1)
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for j in range(start, stop):
            out[j * k : (j + 1) * k] = 0
            for e in range(np.int64(indptr[j]), np.int64(indptr[j + 1])):
                i, ahead = np.int64(indices[e]), min(e + AHEAD, last)
                if len(data):
                    prefetch(lanes(data, NARROW, 0), data, np.int64(perm[ahead]))
                at, there = np.uint64(i * stride), np.uint64(np.int64(indices[ahead]) * stride)
                weight = weight_of(data, row_scale, perm[e], i, one)
                for t in range(np.uint64(j * k), np.uint64((j + 1) * k)):
                    f = np.uint64(columns[t])  # prefetching whole rows instead: up to 4x slower
                    prefetch(lanes(grad, NARROW, 0), grad, there + f)
                    out[t] += weight * grad[at + f]
            if len(col_scale) and indptr[j + 1] > indptr[j]:
                _scaled_row(out, np.uint64(j * k), np.uint64(k), one, col_scale[j])


@reordered
def _dot(X: Any, at: Any, columns: Any, values: Any, start: Any, stop: Any) -> Any:
    found = X.dtype.type(0)
    for t in range(start, stop):
        found += X[at + np.uint64(columns[t])] * values[t]
    return found


@parallel
def sddmm(indptr: Any, indices: Any, X: Any, S: Any, out: Any, pieces: Any) -> None:
    """``out[e] = <X[i], S[j]>``; ``X`` is (flat, row stride)."""
    columns, values, k = S
    X, stride = X
    last = len(indices) - 1
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for i in range(start, stop):
            for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
                ahead, j = np.int64(indices[min(e + AHEAD, last)]), np.int64(indices[e])
                _prefetch_row(columns, ahead, k)
                _prefetch_row(values, ahead, k)
                span = np.uint64(j * k), np.uint64((j + 1) * k)
                out[e] = _dot(X, np.uint64(i * stride), columns, values, *span)


@parallel
def to_dense(S: Any, Y: Any, n_rows: Any, pieces: Any) -> None:
    """What ``S`` stores, and 0 elsewhere; ``Y`` is (flat, feat)."""
    columns, values, k = S
    Y, feat = Y
    for piece in numba.prange(pieces):
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            at = np.uint64(i * feat)
            Y[i * feat : (i + 1) * feat] = 0
            for t in range(np.uint64(i * k), np.uint64((i + 1) * k)):
                Y[at + np.uint64(columns[t])] = values[t]


@parallel
def from_dense(X: Any, S: Any, n_rows: Any, pieces: Any) -> None:
    """The values of ``S`` from ``X``, which is (flat, row stride)."""
    columns, values, k = S
    X, stride = X
    for piece in numba.prange(pieces):
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            at = np.uint64(i * stride)
            for t in range(np.uint64(i * k), np.uint64((i + 1) * k)):
                values[t] = X[at + np.uint64(columns[t])]
