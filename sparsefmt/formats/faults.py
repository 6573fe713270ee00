"""Kernels of the full checks on a GPU, for the lowest place of each kind of fault.

The kernels only find places; ``checks`` says what they mean.
"""

from typing import Any

import numpy as np

from .._caches import cache
from .arrays import elementwise, namespace, on_device_of

CLEAN = int(np.iinfo(np.int64).max)


def lowest(count: int, *launches: tuple[str, int, tuple[Any, ...]]) -> tuple[int, ...]:
    """Return the lowest place of each of ``count`` kinds of fault after all launches, -1 for none.

    A launch is ``(kernel, size, arguments)``.  However many there are, the host waits once.
    """
    array = launches[0][2][0]
    with on_device_of(array):
        faults = namespace(array).full(count, CLEAN, np.int64)
        for kernel, size, arguments in launches:
            if size:
                _kernel(kernel)(*arguments, faults, size=size)
    return tuple(-1 if place == CLEAN else place for place in faults.tolist())  # synchronize!


@cache
def _kernel(name: str) -> Any:
    """Compile a kernel; keep it for all later checks."""
    return elementwise(*_KERNELS[name], f"sparsefmt_check_{name}", _PREAMBLE)()


_PREAMBLE = """
__device__ inline void fault(long long& lowest, long long place) { atomicMin(&lowest, place); }

template <typename Pointers, typename Faults>
__device__ inline void check_pointer(
        const Pointers& ptr, long long count, long long last, long long i, Faults& faults,
        int kind) {
    if (i >= count) return;
    long long here = ptr[i];
    if (i == 0 && here != 0) fault(faults[kind], 0);
    if (i + 1 < count && ptr[i + 1] < here) fault(faults[kind + 1], i);
    if (i + 1 == count && here != last) fault(faults[kind + 2], 0);
}

// The last segment that begins at or before the entry; in [0, count) whatever ptr holds.
template <typename Pointers>
__device__ inline long long segment_of(const Pointers& ptr, long long count, long long entry) {
    long long low = 0, high = count;
    while (high - low > 1) {
        long long middle = (low + high) >> 1;
        if (ptr[middle] <= entry) low = middle; else high = middle;
    }
    return low;
}
"""

#: Name -> (inputs, outputs, body); ``i`` is the place.
_KERNELS = {
    "in_range": (
        "raw M minor, int64 n_minor",
        "raw int64 faults",
        """
        long long index = minor[i];
        if (index < 0 || index >= n_minor) fault(faults[0], i);
        """,
    ),
    "coordinates": (
        "raw I row, raw I col, int64 n_rows, int64 n_cols",
        "raw int64 faults",
        """
        long long r = row[i], c = col[i];
        if (r < 0 || r >= n_rows) fault(faults[0], i);
        if (c < 0 || c >= n_cols) fault(faults[1], i);
        """,
    ),
    "compressed": (
        "raw I indptr, raw I minor, int64 n_ptr, int64 nnz, int64 n_minor",
        "raw int64 faults",
        """
        check_pointer(indptr, n_ptr, nnz, i, faults, 0);
        if (i < nnz) {
            long long index = minor[i];
            if (index < 0 || index >= n_minor) fault(faults[3], i);
        }
        """,
    ),
    "balanced": (
        "raw M indices, int64 k, int64 n_cols",
        "raw int64 faults",
        """
        long long column = indices[i];
        if (column < 0 || column >= n_cols) fault(faults[0], i);
        if (i % k != 0 && column <= (long long)indices[i - 1]) fault(faults[1], i);
        """,
    ),
    # Faults 0..12 of check_tiles, and the row of each entry into ``rows``, in CSR order.
    "tiles": (
        "raw I window_ptr, raw I columns, raw I tile_ptr, raw S slots, raw I order, "
        "int64 n_windows, int64 n_tiles, int64 nnz, int64 n_rows, int64 n_cols, "
        "int64 height, int64 width",
        "raw I rows, raw int64 faults",
        """
        check_pointer(window_ptr, n_windows + 1, n_tiles, i, faults, 0);
        check_pointer(tile_ptr, n_tiles + 1, nnz, i, faults, 3);
        if (i < n_tiles * width) {
            long long column = columns[i], before = i == 0 ? -1 : (long long)columns[i - 1];
            if (column < -1 || column >= n_cols) fault(faults[6], i);
            bool opens_tile = i % width == 0;
            if (column < 0) {
                if (opens_tile) fault(faults[7], i);
            } else if (i > 0 && (before < 0 || column <= before)) {
                long long tile = i / width;
                bool opens_window = opens_tile && n_windows > 0
                    && window_ptr[segment_of(window_ptr, n_windows, tile)] == tile;
                if (!opens_window) fault(faults[7], i);
            }
        }
        if (i < nnz) {
            long long slot = slots[i], place = order[i];
            if (slot >= height * width) fault(faults[8], i);
            if (place < 0 || place >= nnz) fault(faults[9], i);
            if (slot < height * width && n_tiles > 0 && n_windows > 0) {
                long long tile = segment_of(tile_ptr, n_tiles, i);
                long long row = segment_of(window_ptr, n_windows, tile) * height + slot / width;
                if (columns[tile * width + slot % width] < 0) fault(faults[10], i);
                if (row >= n_rows) fault(faults[11], i);
                if (i + 1 < nnz && i + 1 < tile_ptr[tile + 1]) {
                    long long step = (long long)slots[i + 1] % width - slot % width;
                    if (step < 0 || (step == 0 && order[i + 1] <= place)) fault(faults[12], i);
                }
                if (place >= 0 && place < nnz && row < n_rows) rows[place] = row;
            }
        }
        """,
    ),
    # Faults 13 and 14: every place filled, rows ascending.
    "tiles_order": (
        "raw I rows, int64 nnz",
        "raw int64 faults",
        """
        long long row = rows[i];
        if (row < 0) fault(faults[13], i);
        else if (i + 1 < nnz && rows[i + 1] >= 0 && rows[i + 1] < row) fault(faults[14], i);
        """,
    ),
}
