"""Condensed tiles on the CPU: SpMM and SDDMM over the windows of an SGT, without a CSR.

A piece of work is some windows and owns their rows, so that nothing is atomic.  Its entries are
unpacked to rows and columns, a run at a time.  The rows of a window stay in the cache while its
entries come column by column, so that a row of features is fetched once a window.
"""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.sgt import SGT
from ..cbsr.cpu import scaled_row
from ..engine.lanes import add_product, lanes, load, prefetch, store, width_of
from ..engine.loops import AHEAD, NARROW, by_tiles, dot, inlined, parallel, rows_of, writing
from ..engine.small import flat, values_of
from ..matmul.cpu import weight_of

#: Entries unpacked at a time: 16 KiB beside the rows of a window.  1.04x over 256, as fast as 4096.
RUN = 1024


def spmm(
    A: SGT, X: Array, *, values: Array, row_scale: Array, col_scale: Array, reduce: str, out: Array,
    **_: Any,
) -> Array:  # fmt: skip
    """Compute ``out[i] = r[i] * sum of a[e] c[j] X[j]`` of the entries of row i, or their mean."""
    out = np.empty((A.n_rows, X.shape[1]), X.dtype) if out is None else out
    scales = values_of(row_scale, X), values_of(col_scale, X)
    weights = A.order, values_of(values, X)
    with writing(out) as (Y, pieces):
        _spmm(*_windows(A), weights, flat(X), scales, flat(Y), reduce == "mean", pieces)
    return out


def sddmm(A: SGT, X: Array, Y: Array, *_: Any, out: Array | None = None, **__: Any) -> Array:
    """Compute ``out[order[e], h] = <X[i, h], Y[j, h]>``: (n, heads, feat) twice to (nnz, heads)."""
    out = np.empty((A.nnz, *X.shape[1:-1]), X.dtype) if out is None else out
    shape = X.shape[1:] if X.ndim == 3 else (1, X.shape[1])
    x, y = flat(X), flat(Y)
    with writing(out) as (products, pieces):
        _sddmm(*_windows(A), A.order, x, y, shape, products.reshape(-1), pieces)
    return out


def _windows(A: SGT) -> tuple[Any, Any]:
    """Return first entry, first tile and rows of the windows; the tiles and their width, flat."""
    height, width = A.tile
    windows = A.tile_ptr[A.window_ptr], A.window_ptr, height, A.n_rows
    return windows, (A.tile_ptr, A.columns.reshape(-1), A.slots, width)


@inlined
def _unpack(
    windows: Array, tiles: Array, start: Any, stop: Any, at: Any, rows: Array, cols: Array
) -> Any:
    """Unpack rows and columns of the entries from ``start`` to ``stop``.

    ``at`` is a window and a tile at or before those of ``start``; returns those of ``stop - 1``.
    """
    _, first_tile, height, _ = windows
    tile_ptr, columns, slots, width = tiles
    # Exact for every slot below 65 536.  1.08x over a division for each entry, at 32 features.
    reciprocal = (np.int64(1) << 32) // width + 1
    w, t = at
    e = start
    while e < stop:
        while tile_ptr[t + 1] <= e:
            t += 1
        while first_tile[w + 1] <= t:
            w += 1
        end = min(stop, np.int64(tile_ptr[t + 1]))
        for k in range(e, end):
            slot = np.int64(slots[k])
            row = slot * reciprocal >> 32
            rows[k - start] = w * height + row
            cols[k - start] = columns[t * width + slot - row * width]
        e = end
    return w, t


@inlined
def _add_tile(zero: Any, f: int, width: int, entries: Any, args: Any) -> None:
    """Add ``a[e] c[j] X[j]`` to ``Y[i]``, ``width`` features from ``f`` of ``entries``."""
    first, count = entries
    rows, cols, A, X, col_scale, Y = args
    order, data = A
    X, stride = X
    Y, feat = Y
    for k in range(count):
        prefetch(zero, X, cols[min(k + AHEAD, count - 1)] * stride + f)
        i, j, e = rows[k], cols[k], order[first + k]
        weight = weight_of(data, col_scale, e, j, X.dtype.type(1))
        sums = load(zero, Y, i * feat + f, width)
        sums = add_product(sums, weight, load(zero, X, j * stride + f, width))
        store(sums, Y, i * feat + f, width)


@inlined
def _finish(Y: Array, row_scale: Array, degree: Array, top: int, mean: bool) -> None:
    """Divide and scale the rows from ``top`` on that have entries."""
    Y, feat = Y
    one = Y.dtype.type(1)
    for k in range(len(degree)):
        if degree[k]:
            divisor = Y.dtype.type(degree[k]) if mean else one
            factor = row_scale[top + k] if len(row_scale) else one
            scaled_row(Y, np.uint64((top + k) * feat), np.uint64(feat), divisor, factor)


@parallel
def _spmm(
    windows: Array, tiles: Array, A: Array, X: Array, scales: Array, Y: Array, mean: bool,
    pieces: int,
) -> None:  # fmt: skip
    """Sum or mean; ``A`` is (order, data), ``X`` and ``Y`` are (flat, row stride)."""
    starts, first_tile, height, n_rows = windows
    row_scale, col_scale = scales
    feat, finish = Y[1], mean or len(row_scale) > 0
    for piece in numba.prange(pieces):
        w, last = rows_of(starts, piece, pieces)
        top, bottom = min(w * height, n_rows), min(last * height, n_rows)
        Y[0][top * feat : bottom * feat] = 0
        degree = np.zeros(bottom - top if finish else 0, np.int64)
        rows, cols = np.empty(RUN, np.int64), np.empty(RUN, np.int64)
        args = rows, cols, A, X, col_scale, Y
        at, stop = (w, np.int64(first_tile[w])), np.int64(starts[last])
        for first in range(np.int64(starts[w]), stop, RUN):
            count = min(np.int64(RUN), stop - first)
            at = _unpack(windows, tiles, first, first + count, at, rows, cols)
            by_tiles(_add_tile, X[0], feat, (first, count), args)
            if finish:
                for k in range(count):
                    degree[rows[k] - top] += 1
        _finish(Y, row_scale, degree, top, mean)


@inlined
def _dots(
    count: Any, rows: Array, cols: Array, first: int, order: Array, X: Array, Y: Array, shape: Any,
    out: Array,
) -> None:  # fmt: skip
    """Write the dot products of ``count`` entries; ``shape`` is (heads, feat)."""
    X, ldx = X
    Y, ldy = Y
    heads, feat = shape
    line = width_of(lanes(Y, NARROW, 0))
    for k in range(count):
        ahead = cols[min(k + AHEAD, count - 1)] * ldy
        for f in range(0, heads * feat, line):
            prefetch(lanes(Y, NARROW, 0), Y, ahead + f)
        i, j, e = rows[k] * ldx, cols[k] * ldy, np.int64(order[first + k]) * heads
        for h in range(heads):
            out[e + h] = dot(X, i + h * feat, Y, j + h * feat, feat)


@parallel
def _sddmm(
    windows: Array, tiles: Array, order: Array, X: Array, Y: Array, shape: Any, out: Array,
    pieces: int,
) -> None:  # fmt: skip
    """Compute ``out[order[e], h] = <X[i, h], Y[j, h]>``; ``X`` and ``Y`` are (flat, row stride)."""
    starts, first_tile, _, _ = windows
    for piece in numba.prange(pieces):
        w, last = rows_of(starts, piece, pieces)
        rows, cols = np.empty(RUN, np.int64), np.empty(RUN, np.int64)
        at, stop = (w, np.int64(first_tile[w])), np.int64(starts[last])
        for first in range(np.int64(starts[w]), stop, RUN):
            count = min(np.int64(RUN), stop - first)
            at = _unpack(windows, tiles, first, first + count, at, rows, cols)
            _dots(count, rows, cols, first, order, X, Y, shape, out)
