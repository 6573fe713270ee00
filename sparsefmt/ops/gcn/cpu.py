"""The numba twins of the normalisation of GCN; as those of ``cpu``, they check nothing.

Degrees and their gradients add up in float64, in the order of the entries.
"""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ..engine.cpu import values_of, wide, writing
from ..engine.loops import parallel, rows_of

#: On one thread: entries in any order add to any vertex.
serial = numba.njit(cache=True, nogil=True)


def gcn_norm_coo(
    row: Array, col: Array, data: Array | None, n: int, out: Array, *, loops: bool
) -> None:
    """``out[e] = s[i] a[e] s[j]``, then with loops the values of theirs; ``s = d^-1/2``."""
    values = values_of(data, out)
    with writing(out) as (result, pieces):
        degree, has_loop = np.zeros(n), np.zeros(n, np.bool_)
        _degrees(row, col, values, degree, has_loop)
        scale, own = _scales(degree, has_loop, loops)
        _scaled(row, col, values, scale, result, pieces)
        if loops:
            result[len(row) :] = own


def gcn_norm_csr(
    indptr: Array,
    indices: Array,
    data: Array | None,
    out: Array,
    *,
    loops: bool,
    columns: Array | None = None,
) -> None:
    """The same for a CSR, the loop of a row behind its entries; ``columns`` takes all indices."""
    n, values = len(indptr) - 1, values_of(data, out)
    places = np.empty(0, indices.dtype) if columns is None else columns
    with writing(out) as (result, pieces):
        degree, has_loop = np.empty(n), np.empty(n, np.bool_)
        _row_degrees(indptr, indices, values, degree, has_loop, pieces)
        scale, own = _scales(degree, has_loop, loops)
        vertices = scale, own if loops else own[:0]
        _rows_scaled(indptr, indices, values, vertices, places, result, pieces)


def gcn_norm_backward(
    row: Array,
    col: Array,
    indptr: Array | None,
    data: Array | None,
    n: int,
    grad: Array,
    out: Array,
    *,
    loops: bool,
) -> None:
    """The gradient of the values, of a CSR too if its ``indptr`` is given beside its rows."""
    values, g = values_of(data, out), wide(grad)
    behind = indptr if indptr is not None and loops else np.empty(0, row.dtype)
    with writing(out) as (result, pieces), np.errstate(over="ignore", invalid="ignore"):
        degree, has_loop = np.zeros(n), np.zeros(n, np.bool_)
        _degrees(row, col, values, degree, has_loop)
        scale, _ = _scales(degree, has_loop, loops)
        slope = np.zeros(n)
        if loops:
            at = np.arange(n) + (len(row) if indptr is None else indptr[1:].astype(np.int64))
            slope += np.where(has_loop, 0, 2 * scale * g[at])
        _slopes(row, col, behind, values, g, scale, slope)
        _gradient(row, col, behind, g, scale, slope * scale**2 / 2, result, pieces)


def _scales(degree: Array, has_loop: Array, loops: bool) -> tuple[Array, Array]:
    """``d^-1/2``, 0 where d is not positive, and the values of the loops."""
    if loops:
        degree = degree + ~has_loop
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(degree <= 0, 0, 1 / np.sqrt(degree))
    return scale, np.where(has_loop, 0, scale * scale)


@serial
def _degrees(row: Any, col: Any, data: Any, degree: Any, has_loop: Any) -> None:
    for e in range(len(row)):
        i = row[e]
        degree[i] += np.float64(data[e]) if len(data) else 1.0
        if col[e] == i:
            has_loop[i] = True


@parallel
def _row_degrees(
    indptr: Any, indices: Any, data: Any, degree: Any, has_loop: Any, pieces: Any
) -> None:
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        for i in range(first, last):
            total, found = 0.0, False
            for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
                total += np.float64(data[e]) if len(data) else 1.0
                found |= indices[e] == i
            degree[i], has_loop[i] = total, found


@parallel
def _scaled(row: Any, col: Any, data: Any, scale: Any, out: Any, pieces: Any) -> None:
    for piece in numba.prange(pieces):
        size = np.int64(len(row))
        for e in range(piece * size // pieces, (piece + 1) * size // pieces):
            a = np.float64(data[e]) if len(data) else 1.0
            out[e] = scale[row[e]] * a * scale[col[e]]


@parallel
def _rows_scaled(
    indptr: Any, indices: Any, data: Any, vertices: Any, columns: Any, out: Any, pieces: Any
) -> None:
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
def _slopes(row: Any, col: Any, indptr: Any, data: Any, grad: Any, scale: Any, slope: Any) -> None:
    """``slope[k]``: the gradient of ``scale[k]``, of which it holds the loops' part."""
    for e in range(len(row)):
        i, j = row[e], col[e]
        g = np.float64(grad[e + i if len(indptr) else e])
        q = g * data[e] if len(data) else g
        slope[i] += q * scale[j]
        slope[j] += q * scale[i]


@parallel
def _gradient(
    row: Any, col: Any, indptr: Any, grad: Any, scale: Any, halves: Any, out: Any, pieces: Any
) -> None:
    for piece in numba.prange(pieces):
        size = np.int64(len(row))
        for e in range(piece * size // pieces, (piece + 1) * size // pieces):
            i = row[e]
            g = grad[e + i if len(indptr) else e]
            out[e] = scale[i] * (g * scale[col[e]] - halves[i])
