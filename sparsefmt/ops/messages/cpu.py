"""Sums of messages with features of their entries on NumPy arrays, gradients, and combinations."""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine import small
from ..engine.lanes import add_product, greater, load, prefetch, product, store, where
from ..engine.loops import (
    AHEAD,
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
from .cuda import COMBINATIONS, GRADIENTS, SUMS

_MUL, _ADD, _RELU_ADD, _COPY = SUMS.values()
_MUL_GRAD, _ADD_GRAD, _RELU_GRAD = GRADIENTS.values()
_TIMES, _PLUS, _, _OWN = COMBINATIONS.values()


@by_blocks
def _messages(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up the messages of some entries for ``count`` features from ``f`` on."""
    indices, perm, (X, ldx), (E, lde), kind, f, count = args
    sums, end = zero, len(indices) - 1
    for k in range(first, last):
        ahead, e = min(k + AHEAD, end), np.int64(k)
        if len(perm):
            e = np.int64(perm[k])
            prefetch(zero, E, np.int64(perm[ahead]) * lde + f)
        w = load(zero, E, e * lde + f, count)
        if kind == _COPY:
            sums = add_product(sums, 1, w)
            continue
        prefetch(zero, X, np.int64(indices[ahead]) * ldx + f)
        x = load(zero, X, np.int64(indices[k]) * ldx + f, count)
        if kind == _MUL:
            sums = add_product(sums, x, w)
        else:
            message = add_product(x, 1, w)
            if kind == _RELU_ADD:
                message = where(greater(message, zero), message, zero)
            sums = add_product(sums, 1, message)
    return sums


@inlined
def _sum(zero: Any, f: int, count: int, row: Any, args: Any) -> None:
    """Add up the messages of row ``i`` for ``count`` features from ``f`` on."""
    i, start, stop, kind, factor = row
    indices, perm, X, E, out = args
    out, feat = out
    sums = _messages(zero, start, stop, (indices, perm, X, E, kind, f, count))
    store(product(sums, factor), out, i * feat + f, count)


@parallel
def _sums_of_rows(
    indptr: Array, T: Array, X: Array, E: Array, out: Array, kind: Any, mean: bool, pieces: int
) -> None:
    """Reduce the messages of each row; ``X``, ``E`` and ``out`` are (flat, row stride)."""
    unit = E[0].dtype.type(1)
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        args = T[0], T[1], X, E, out
        for i in range(first, last):
            start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
            factor = unit / E[0].dtype.type(max(stop - start, 1)) if mean else unit
            by_tiles(_sum, E[0], out[1], (i, start, stop, kind, factor), args)


@by_blocks
def _gradient(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up the gradient of a column's features, and write that of some of its entries."""
    (indices, perm), scale, (E, lde), (grad, ldg), dE, feat, own, kind, wanted, f, count = args
    sums, end, factor = zero, len(indices) - 1, grad.dtype.type(1)
    for k in range(first, last):
        ahead, e = min(k + AHEAD, end), np.int64(k)
        prefetch(zero, grad, np.int64(indices[ahead]) * ldg + f)
        if len(perm):
            e = np.int64(perm[k])
        i = np.int64(indices[k])
        g = load(zero, grad, i * ldg + f, count)
        if len(scale):
            factor = scale[i]
            g = product(g, factor)
        message, result = g, g
        if kind != _ADD_GRAD:
            if len(perm):
                prefetch(zero, E, np.int64(perm[ahead]) * lde + f)
            w = load(zero, E, e * lde + f, count)
            if kind == _MUL_GRAD:
                message, result = product(g, w), product(g, own)
            else:  # NaN lets the gradient through, as torch does
                message = where(greater(add_product(own, 1, w), zero), g, zero)
                result = message
        sums = add_product(sums, 1, message)
        if wanted:
            store(result, dE, e * feat + f, count)
    return sums


@inlined
def _gradients(zero: Any, f: int, count: int, row: Any, args: Any) -> None:
    """Compute both gradients of column ``j`` for ``count`` features from ``f`` on."""
    j, start, stop, kind, wanted = row
    T, scale, X, E, grad, dX, dE = args
    X, ldx = X
    dX, feat = dX
    own = zero if kind == _ADD_GRAD else load(zero, X, j * ldx + f, count)
    more = T, scale, E, grad, dE, feat, own, kind, wanted, f, count
    store(_gradient(zero, start, stop, more), dX, j * feat + f, count)


@parallel
def _gradients_of_columns(
    indptr: Array, T: Array, scale: Array, X: Array, E: Array, grad: Array, dX: Array, dE: Array,
    kind: Any, wanted: bool, pieces: int,
) -> None:  # fmt: skip
    """Compute both gradients; features are (flat, row stride), ``dE`` is flat."""
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        args = T, scale, X, E, grad, dX, dE
        for j in range(first, last):
            start, stop = np.int64(indptr[j]), np.int64(indptr[j + 1])
            by_tiles(_gradients, grad[0], dX[1], (j, start, stop, kind, wanted), args)


@inlined
def _combination(zero: Any, f: int, count: int, row: Any, args: Any) -> None:
    """Combine row ``i`` with those of its columns for ``count`` features from ``f`` on."""
    i, start, stop, kind, sign, factor = row
    indices, perm, left, right, out = args
    left, ldl = left
    right, ldr = right
    out, feat = out
    own, last = load(zero, left, i * ldl + f, count), len(indices) - 1
    if kind != _PLUS:
        own = product(own, factor)
    for k in range(start, stop):
        e = np.int64(k)
        if len(perm):
            e = np.int64(perm[k])
        result = own
        if kind != _OWN:
            prefetch(zero, right, np.int64(indices[min(k + AHEAD, last)]) * ldr + f)
            value = load(zero, right, np.int64(indices[k]) * ldr + f, count)
            result = product(own, value) if kind == _TIMES else add_product(own, sign, value)
        store(result, out, e * feat + f, count)


@parallel
def _combinations(
    indptr: Array, T: Array, scale: Array, left: Array, right: Array, out: Array, kind: Any,
    sign: float, pieces: int,
) -> None:  # fmt: skip
    """Compute ``left[i] op right[j]`` for each entry, where ``kind`` and ``sign`` say the op.

    Features are (flat, row stride), ``T`` is the columns and places of entries; ``scale`` is one
    factor of ``left`` for each row, or empty, and no sum or difference reads it.
    """
    unit = left[0].dtype.type(1)
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        args = T[0], T[1], left, right, out
        for i in range(first, last):
            start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
            factor = scale[i] if len(scale) else unit
            by_tiles(_combination, left[0], out[1], (i, start, stop, kind, sign, factor), args)


def _numbered(A: CSR, perm: Array | None) -> tuple[Array, Array]:
    """Return the columns and the numbers of entries, none where they are their own places."""
    return A.indices, np.empty(0, A.indices.dtype) if perm is None else perm


def _or_nothing(a: Array | None, like: Array) -> tuple[Array, int]:
    """Return the memory of features, an empty one where there are none."""
    return small.flat(np.empty((0, 0), like.dtype) if a is None else a)


def message_aggregate(
    A: CSR, x: Array | None, edges: Array, perm: Array | None, message: str, reduce: str, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[i] = reduce of m(x[j], edges[perm[e]])`` over the entries of row i."""
    out = np.empty((A.n_rows, edges.shape[1]), edges.dtype) if out is None else out
    args = _or_nothing(None if message == "copy_edge" else x, edges), small.flat(edges)
    with writing(out) as (sums, pieces):
        to, kind = (sums.reshape(-1), out.shape[1]), SUMS[message]
        _sums_of_rows(A.indptr, _numbered(A, perm), *args, to, kind, reduce == "mean", pieces)
    return out


def message_aggregate_backward(
    A: CSR, x: Array | None, edges: Array | None, grad: Array, perm: Array | None,
    scale: Array | None, message: str, wanted: bool, *, out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute the gradients in features and, if ``wanted``, of entries: of 0 rows if not."""
    feat, dtype = grad.shape[1], grad.dtype
    shapes = (A.n_rows, feat), (A.nnz if wanted else 0, feat)
    dX, dE = out or (np.empty(shapes[0], dtype), np.empty(shapes[1], dtype))
    x, edges = (None, None) if message == "add" else (x, edges)
    features = _or_nothing(x, grad), _or_nothing(edges, grad), small.flat(grad)
    wide = dE if dE.itemsize >= 4 else np.empty(dE.shape, np.float32)
    with writing(dX) as (sums, pieces):
        to, T = (sums.reshape(-1), feat), _numbered(A, perm)
        args = T, small.values_of(scale, grad), *features, to, wide.reshape(-1)
        _gradients_of_columns(A.indptr, *args, GRADIENTS[message], wanted, pieces)
    if wide is not dE:
        with np.errstate(over="ignore", under="ignore"):
            dE[...] = wide
    return dX, dE


def edge_combine(
    A: CSR, left: Array, right: Array | None, perm: Array | None, scale: Array | None, op: str, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[perm[e]] = scale[i] left[i] op right[j]`` for each entry, or ``left`` alone."""
    out = np.empty((A.nnz, left.shape[1]), left.dtype) if out is None else out
    features = small.flat(left), _or_nothing(None if op == "left" else right, left)
    with writing(out) as (result, pieces):
        to, T = (result.reshape(-1), left.shape[1]), _numbered(A, perm)
        args = T, small.values_of(scale, left), *features, to
        _combinations(A.indptr, *args, COMBINATIONS[op], -1 if op == "sub" else 1, pieces)
    return out
