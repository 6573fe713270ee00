"""MaxK and the products with row-balanced features on NumPy arrays: loops, and functions on them.

In loops ``S`` is (columns, values, k) and ``places`` (columns, k), their arrays flat.  Offsets into
features are unsigned, so that numba does not ask whether one counts from the end.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.cbsr import column_dtype
from ...formats.compressed import CSR
from ...formats.primitives import SHORT
from ..engine.lanes import lanes, prefetch, width_of
from ..engine.loops import (
    AHEAD,
    INLINED,
    NARROW,
    Int,
    Loop,
    inlined,
    move_block,
    not_inlined,
    parallel,
    rows_of,
    writing,
)
from ..engine.memory import rows_apart
from ..engine.small import factors_at_entries, flat, packed, values_of
from ..matmul.cpu import weight_of
from . import cpu_maxk

#: Entries of a long row whose sums are moved at a time, as dense rows.
_BLOCK = 128
#: May add in any order, always the same: 1.2x by vector gathers.
reordered: Callable[[Loop], Loop] = numba.njit(**INLINED, fastmath={"reassoc", "contract", "nsz"})


@inlined
def _prefetch_row(a: Array, j: Int, k: Int) -> None:
    """Ask for row ``j`` of ``k`` values."""
    for t in range(0, k, width_of(lanes(a, NARROW, 0))):
        prefetch(lanes(a, NARROW, 0), a, j * k + t)


@inlined
def scaled_row(Y: Array, at: Int, feat: Int, divisor: Any, factor: Any) -> None:
    """Divide a row of sums, then multiply it."""
    for f in range(at, at + feat):
        Y[f] = Y[f] / divisor * factor


@inlined
def _add_entries(Y: Array, at: Int, A: Any, S: Any, col_scale: Array, first: Int, end: Int) -> None:
    """Add products of some entries of a row to ``Y`` from ``at`` on."""
    indices, data = A
    columns, values, k = S
    last, unit = len(indices) - 1, values.dtype.type(1)
    for e in range(first, end):
        ahead = np.int64(indices[min(e + AHEAD, last)])
        _prefetch_row(columns, ahead, k)
        _prefetch_row(values, ahead, k)
        j = np.int64(indices[e])
        weight = weight_of(data, col_scale, e, j, unit)
        for t in range(np.uint64(j * k), np.uint64((j + 1) * k)):
            Y[at + np.uint64(columns[t])] += weight * values[t]


@not_inlined
def _add_blocks(
    Y: Any, at: Int, A: Any, S: Any, col_scale: Array, first: Int, end: Int, totals: Array
) -> None:
    """Add products of the entries of a long row to ``Y``, 0 before, block by block."""
    Y, feat = Y
    for e in range(first, end, _BLOCK):
        until = min(e + _BLOCK, end)
        _add_entries(Y, at, A, S, col_scale, e, until)
        move_block(Y, at, feat, totals, Y.dtype.type(1), until == end)


@parallel
def products_of_rows(
    indptr: Array, A: Any, S: Any, scales: Array, Y: Array, mean: Any, pieces: Int
) -> None:
    """Multiply a CSR, ``A``, by a CBSR, ``S``, into dense rows: ``Y`` is (flat, feat)."""
    values, (row_scale, col_scale) = S[1], scales
    dense, (Y, feat) = Y, Y
    unit = values.dtype.type(1)
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        totals = np.zeros(2 * feat, values.dtype)
        for i in range(start, stop):
            first, end, at = np.int64(indptr[i]), np.int64(indptr[i + 1]), np.uint64(i * feat)
            Y[i * feat : (i + 1) * feat] = 0
            if end - first > SHORT:
                _add_blocks(dense, at, A, S, col_scale, first, end, totals)
            else:
                _add_entries(Y, at, A, S, col_scale, first, end)
            if end > first and (mean or len(row_scale)):
                divisor = values.dtype.type(end - first if mean else 1)
                factor = row_scale[i] if len(row_scale) else unit
                scaled_row(Y, at, np.uint64(feat), divisor, factor)


@parallel
def products_at_places(
    indptr: Array,
    T: Array,
    data: Array,
    places: Array,
    grad: Array,
    scales: Array,
    out: Array,
    pieces: Int,
) -> None:
    """Compute the transposed product at ``places``; ``T`` is (indices, perm) of the transpose."""
    indices, perm = T
    columns, k = places
    grad, stride = grad
    row_scale, col_scale = scales
    last, unit = len(indices) - 1, grad.dtype.type(1)
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        totals = np.zeros(2 * k, grad.dtype)
        for j in range(start, stop):
            out[j * k : (j + 1) * k] = 0
            first, end = np.int64(indptr[j]), np.int64(indptr[j + 1])
            until = first + _BLOCK - 1 if end - first > SHORT else np.int64(-1)
            for e in range(first, end):
                i, ahead = np.int64(indices[e]), min(e + AHEAD, last)
                if len(data):
                    prefetch(lanes(data, NARROW, 0), data, np.int64(perm[ahead]))
                at, there = np.uint64(i * stride), np.uint64(np.int64(indices[ahead]) * stride)
                weight = weight_of(data, row_scale, perm[e], i, unit)
                for t in range(np.uint64(j * k), np.uint64((j + 1) * k)):
                    f = np.uint64(columns[t])  # prefetching whole rows instead: up to 4x slower
                    prefetch(lanes(grad, NARROW, 0), grad, there + f)
                    out[t] += weight * grad[at + f]
                if e == until:
                    move_block(out, j * k, k, totals, unit, e == end - 1)
                    until = min(until + _BLOCK, end - 1)
            if len(col_scale) and indptr[j + 1] > indptr[j]:
                scaled_row(out, np.uint64(j * k), np.uint64(k), unit, col_scale[j])


@reordered
def _dot(X: Array, at: Int, columns: Array, values: Array, start: Int, stop: Int) -> Any:
    result = X.dtype.type(0)
    for t in range(start, stop):
        result += X[at + np.uint64(columns[t])] * values[t]
    return result


@parallel
def products_at_entries(
    indptr: Array, indices: Array, X: Array, S: Any, out: Array, pieces: Int
) -> None:
    """Compute ``out[e] = <X[i], S[j]>``; ``X`` is (flat, row stride)."""
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
def scattered_rows(S: Any, Y: Array, n_rows: Int, pieces: Int) -> None:
    """Write what ``S`` stores, and 0 elsewhere; ``Y`` is (flat, feat)."""
    columns, values, k = S
    Y, feat = Y
    for piece in numba.prange(pieces):
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            at = np.uint64(i * feat)
            Y[i * feat : (i + 1) * feat] = 0
            for t in range(np.uint64(i * k), np.uint64((i + 1) * k)):
                Y[at + np.uint64(columns[t])] = values[t]


@parallel
def gathered_rows(X: Array, S: Any, n_rows: Int, pieces: Int) -> None:
    """Take the values of ``S`` from ``X``, which is (flat, row stride)."""
    columns, values, k = S
    X, stride = X
    for piece in numba.prange(pieces):
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            at = np.uint64(i * stride)
            for t in range(np.uint64(i * k), np.uint64((i + 1) * k)):
                values[t] = X[at + np.uint64(columns[t])]


def maxk(_: None, x: Array, k: int) -> tuple[Array, Array]:
    """Find columns and values of the ``k`` largest of each row: (n, feat) to (n, k) twice."""
    columns, data = np.empty((len(x), k), column_dtype(x.shape[1])), np.empty((len(x), k), x.dtype)
    infinity = _bits(np.array(np.inf, x.dtype))[()]
    S = columns.reshape(-1), _bits(data).reshape(-1)
    with writing(np.empty(0)) as (_, pieces):  # all results are integers
        cpu_maxk.maxk(_flat_bits(x), infinity, x.shape, S, pieces)
    return columns, data


def cbsr_to_dense(_: None, columns: Array, data: Array, feat: int) -> Array:
    """Compute ``out[i, columns[i, t]] = data[i, t]``, and 0 elsewhere; values of any kind."""
    out = np.empty((len(columns), feat), data.dtype)
    S = columns.reshape(-1), _bits(np.ascontiguousarray(data)).reshape(-1), columns.shape[1]
    with writing(np.empty(0)) as (_, pieces):
        scattered_rows(S, _flat_bits(out), len(out), pieces)
    return out


def dense_to_cbsr(_: None, x: Array, columns: Array) -> Array:
    """Compute ``out[i, t] = x[i, columns[i, t]]``; values of any kind."""
    out = np.empty(columns.shape, x.dtype)
    S = columns.reshape(-1), _bits(out).reshape(-1), columns.shape[1]
    with writing(np.empty(0)) as (_, pieces):
        gathered_rows(_flat_bits(x), S, len(x), pieces)
    return out


def spgemm(
    A: CSR, columns: Array, data: Array, feat: int, values: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[i] = r[i] * reduce of a[e] * c[j] * S[j]`` over the entries of row i."""
    out = np.empty((A.n_rows, feat), data.dtype) if out is None else out
    structure = A.indices, values_of(values, data)
    scales = values_of(row_scale, data), values_of(col_scale, data)
    with writing(out) as (Y, pieces):
        S, mean = _balanced(columns, data), reduce == "mean"
        products_of_rows(A.indptr, structure, S, scales, flat(Y), mean, pieces)
    return out


def sspmm(
    T: CSR, columns: Array, grad: Array, values: Array | None, perm: Array, r: Any, c: Any
) -> Array:
    """Compute ``out[j, t] = c[j] * sum of a[e] * r[i] * grad[i, columns[j, t]]`` over entries.

    ``T`` is the transposed structure; ``perm`` its entries' numbers in the order of the values.
    """
    out = np.empty(columns.shape, grad.dtype)
    places = columns.reshape(-1), columns.shape[1]
    scales = values_of(r, grad), values_of(c, grad)
    with writing(out) as (dS, pieces):
        a, flat_grad, flat_dS = values_of(values, grad), flat(grad), dS.reshape(-1)
        structure = T.indices, perm
        products_at_places(T.indptr, structure, a, places, flat_grad, scales, flat_dS, pieces)
    return out


def sspmm_outer(
    A: CSR, columns: Array, grad: Array, values: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, *,
    transposed: CSR | None = None, perm: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Compute ``sspmm`` with the transpose that is given, or made for this call."""
    if transposed is None or perm is None:
        T, perm = A.tocsc_with_perm()
        transposed = T.T
    return sspmm(transposed, columns, grad, values, perm, row_scale, col_scale)


def sddmm_cbsr(
    A: CSR, x: Array, columns: Array, data: Array, row_scale: Array | None = None,
    col_scale: Array | None = None, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[e] = r[i] c[j] sum over t of x[i, columns[j, t]] * data[j, t]``."""
    scaled = row_scale is not None or col_scale is not None
    out = np.empty(A.nnz, x.dtype) if out is None else out
    with writing(out) as (products, pieces):
        S = _balanced(columns, data)
        products_at_entries(A.indptr, A.indices, flat(x), S, products, pieces)
        if scaled:  # before anything is rounded to 2 bytes
            products *= factors_at_entries(A, products.dtype, row_scale, col_scale)
    return out


def _balanced(columns: Array, data: Array) -> tuple[Array, Array, int]:
    """Return columns and values of (m, k), flat, and k."""
    return columns.reshape(-1), packed(data), columns.shape[1]


def _bits(a: Array) -> Array:
    """View values as the unsigned integers that hold them: numba has no 2-byte floats."""
    return a.view(np.dtype(f"u{a.itemsize}"))


def _flat_bits(a: Array) -> tuple[Array, int]:
    """Make the bits flat: the array, and its row stride."""
    a = a if rows_apart(a) else a.copy()
    stride = a.shape[1] if a.flags.c_contiguous else a.strides[0] // a.itemsize
    size = (len(a) - 1) * stride + a.shape[1] if len(a) else 0
    return np.lib.stride_tricks.as_strided(_bits(a), (size,), (a.itemsize,)), stride
