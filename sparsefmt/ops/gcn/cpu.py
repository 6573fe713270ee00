"""GCN's normalisation on NumPy arrays: compiled loops, and the functions around them.

Degrees and their gradients add up in float64, in the order of the entries.
"""

import numba
import numpy as np

from ...formats import primitives
from ...formats.arrays import Array
from ...formats.compressed import COO, CSR
from ..engine.loops import parallel, rows_of, writing
from ..engine.small import values_of

#: Compiled for one thread: entries in any order add to any vertex.
serial = numba.njit(cache=True, nogil=True)


def gcn_norm_coo(
    A: COO, values: Array | None, loops: bool, *, structure: Array | None = None,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[e] = s[i] a[e] s[j]``, then with loops the values of theirs; ``s = d^-1/2``.

    ``structure``, rows and columns of the result, is filled too where loops are added.
    """
    out, a = _result(A, values, loops, out)
    with writing(out) as (result, pieces):
        degree, has_loop = np.zeros(A.n_rows), np.zeros(A.n_rows, np.bool_)
        _degrees(A.row, A.col, a, degree, has_loop)
        scale, own = _scales(degree, has_loop, loops)
        _scaled(A.row, A.col, a, scale, result, pieces)
        if loops:
            result[A.nnz :] = own
    if loops and structure is not None:
        for result, indices in zip(structure, (A.row, A.col), strict=True):
            result[: A.nnz], result[A.nnz :] = indices, np.arange(A.n_rows)
    return out


def gcn_norm_csr(
    A: CSR, values: Array | None, loops: bool, *, structure: Array | None = None,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``gcn_norm_coo`` for a CSR, the loop of a row behind its entries."""
    out, a = _result(A, values, loops, out)
    filled = structure if loops else None
    columns = np.empty(0, A.index_dtype) if filled is None else filled[1]
    with writing(out) as (result, pieces):
        degree, has_loop = np.empty(A.n_rows), np.empty(A.n_rows, np.bool_)
        _row_degrees(A.indptr, A.indices, a, degree, has_loop, pieces)
        scale, own = _scales(degree, has_loop, loops)
        vertices = scale, own if loops else own[:0]
        _rows_scaled(A.indptr, A.indices, a, vertices, columns, result, pieces)
    if filled is not None:
        np.add(A.indptr, np.arange(A.n_rows + 1), out=filled[0], casting="same_kind")
    return out


def gcn_norm_backward(
    A: COO | CSR, values: Array | None, grad: Array, loops: bool, *, out: Array | None = None
) -> Array:
    """Compute the gradient of the values, in the order of the entries of ``A``."""
    if out is None:
        out = np.empty(A.nnz, grad.dtype)
    a, g, n = values_of(values, out), values_of(grad, out), A.n_rows
    if isinstance(A, CSR):
        row, col, ends = primitives.expand(A.indptr, A.nnz), A.indices, A.indptr[1:]
        indptr = A.indptr if loops else np.empty(0, row.dtype)
    else:
        row, col, ends = A.row, A.col, np.full(n, A.nnz)
        indptr = np.empty(0, row.dtype)
    with writing(out) as (result, pieces), np.errstate(over="ignore", invalid="ignore"):
        degree, has_loop = np.zeros(n), np.zeros(n, np.bool_)
        _degrees(row, col, a, degree, has_loop)
        scale, _ = _scales(degree, has_loop, loops)
        slope = np.zeros(n)
        if loops:
            slope += np.where(has_loop, 0, 2 * scale * g[np.arange(n) + ends.astype(np.int64)])
        _slopes(row, col, indptr, a, g, scale, slope)
        _gradient(row, col, indptr, g, scale, slope * scale**2 / 2, result, pieces)
    return out


def _result(
    A: COO | CSR, values: Array | None, loops: bool, out: Array | None
) -> tuple[Array, Array]:
    """Return memory for the result, and the values as the loops take them."""
    if out is None:
        dtype = np.float32 if values is None else values.dtype
        out = np.empty(A.nnz + A.n_rows * loops, dtype)
    return out, values_of(values, out)


def _scales(degree: Array, has_loop: Array, loops: bool) -> tuple[Array, Array]:
    """Compute scales ``d^-1/2``, 0 where d is not positive, and the values of the loops."""
    if loops:
        degree = degree + ~has_loop
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(degree <= 0, 0, 1 / np.sqrt(degree))
    return scale, np.where(has_loop, 0, scale * scale)


@serial
def _degrees(row: Array, col: Array, data: Array, degree: Array, has_loop: Array) -> None:
    for e in range(len(row)):
        i = row[e]
        degree[i] += np.float64(data[e]) if len(data) else 1.0
        if col[e] == i:
            has_loop[i] = True


@parallel
def _row_degrees(
    indptr: Array, indices: Array, data: Array, degree: Array, has_loop: Array, pieces: int
) -> None:
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        for i in range(first, last):
            total, has = 0.0, False
            for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
                total += np.float64(data[e]) if len(data) else 1.0
                has |= indices[e] == i
            degree[i], has_loop[i] = total, has


@parallel
def _scaled(row: Array, col: Array, data: Array, scale: Array, out: Array, pieces: int) -> None:
    for piece in numba.prange(pieces):
        size = np.int64(len(row))
        for e in range(piece * size // pieces, (piece + 1) * size // pieces):
            a = np.float64(data[e]) if len(data) else 1.0
            out[e] = scale[row[e]] * a * scale[col[e]]


@parallel
def _rows_scaled(
    indptr: Array, indices: Array, data: Array, vertices: Array, columns: Array, out: Array,
    pieces: int,
) -> None:  # fmt: skip
    scale, own = vertices
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        for i in range(first, last):
            shift = i if len(own) else 0
            start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
            for e in range(start, stop):
                a = np.float64(data[e]) if len(data) else 1.0
                out[e + shift] = scale[i] * a * scale[indices[e]]
                if len(columns):
                    columns[e + shift] = indices[e]
            if len(own):
                out[stop + shift] = own[i]
            if len(columns):
                columns[stop + shift] = i


@serial
def _slopes(
    row: Array, col: Array, indptr: Array, data: Array, grad: Array, scale: Array, slope: Array
) -> None:
    """Add up ``slope[k]``, the gradient of ``scale[k]``; it holds the loops' part already."""
    for e in range(len(row)):
        i, j = row[e], col[e]
        g = np.float64(grad[e + i if len(indptr) else e])
        q = g * data[e] if len(data) else g
        slope[i] += q * scale[j]
        slope[j] += q * scale[i]


@parallel
def _gradient(
    row: Array, col: Array, indptr: Array, grad: Array, scale: Array, halves: Array, out: Array,
    pieces: int,
) -> None:  # fmt: skip
    for piece in numba.prange(pieces):
        size = np.int64(len(row))
        for e in range(piece * size // pieces, (piece + 1) * size // pieces):
            i = row[e]
            g = grad[e + i if len(indptr) else e]
            out[e] = scale[i] * (g * scale[col[e]] - halves[i])
