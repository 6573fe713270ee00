"""Sparse graph translation: CSR into condensed tiles, and a tile's entries back to coordinates.

A window's entries are contiguous in CSR, so the sort by (window, column, place) runs over one chunk
of windows after another, in bounded memory.  The three share one 64-bit word, which is sorted in
place; places count from the window's first entry, so that they need few bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import _primitives as primitives
from ._arrays import Array, namespace, on_device_of
from .compressed import CSR
from .errors import UnsupportedError
from .sgt import PADDING, SGT, slot_dtype

#: Entries sorted at a time, unless one window has more: 64 MiB of words.
CHUNK_ENTRIES = 1 << 23


@dataclass(frozen=True)
class _Words:
    """How (window, column, place) share 64 bits."""

    columns: Array  #: (nnz,) column of each entry, or its rank among the columns in use
    distinct: Array | None  #: (n_distinct,) the columns in use, if ``columns`` holds ranks
    column_bits: int
    place_bits: int

    @property
    def windows(self) -> int:
        """How many windows can be told apart."""
        return 1 << min(64 - self.column_bits - self.place_bits, 62)


def condense(A: CSR, tile: tuple[int, int]) -> SGT:
    """``A`` in condensed tiles (TC-GNN, section 3, algorithm 1)."""
    xp = namespace(A.indptr)
    n_windows = -(-A.n_rows // tile[0])
    rows = xp.minimum(xp.arange(n_windows + 1, dtype=np.int64) * tile[0], A.n_rows)
    bounds = A.indptr[rows]  # the entries of window w: bounds[w] .. bounds[w + 1]
    words = _layout(A, int(xp.diff(bounds).max()) if n_windows else 0)  # synchronize!
    slots = xp.empty(A.nnz, slot_dtype(tile))
    order = xp.empty(A.nnz, A.index_dtype)
    tiles = [xp.zeros(0, A.index_dtype)]
    columns = [xp.zeros((0, tile[1]), A.index_dtype)]
    starts = [xp.zeros(0, A.index_dtype)]
    for windows, entries in _chunks(bounds, words.windows):
        chunk = _condense_chunk(A, tile, windows, entries, words)
        slots[entries], order[entries] = chunk[:2]
        for pieces, piece in zip((tiles, columns, starts), chunk[2:], strict=True):
            pieces.append(piece)
    starts.append(xp.full(1, A.nnz, A.index_dtype))
    return SGT._trusted(
        window_ptr=primitives.offsets(xp.concatenate(tiles), A.index_dtype),
        columns=xp.concatenate(columns),
        tile_ptr=xp.concatenate(starts),
        slots=slots,
        order=order,
        data=A.data,
        shape=A.shape,
        tile=tile,
    )


def _layout(A: CSR, window_entries: int) -> _Words:
    place_bits = primitives.bits_for(window_entries)
    column_bits = primitives.bits_for(A.n_cols)
    if column_bits + place_bits <= 60:
        return _Words(A.indices, None, column_bits, place_bits)
    xp = namespace(A.indices)
    distinct, ranks = xp.unique(A.indices, return_inverse=True)  # synchronize!
    column_bits = primitives.bits_for(len(distinct))
    if column_bits + place_bits > 64:
        raise UnsupportedError(
            f"a window of {window_entries} entries over {len(distinct)} columns has no 64-bit key: "
            "use tiles of fewer rows."
        )
    return _Words(ranks, distinct, column_bits, place_bits)


def _chunks(bounds: Array, windows_per_chunk: int) -> Iterator[tuple[slice, slice]]:
    """Slices of windows, and of their entries, of at most ``CHUNK_ENTRIES`` where possible."""
    xp = namespace(bounds)
    n_windows, nnz = len(bounds) - 1, int(bounds[-1])  # synchronize!
    targets = xp.arange(0, nnz, CHUNK_ENTRIES, dtype=bounds.dtype)
    by_entries = xp.searchsorted(bounds, targets, side="right") - 1
    cuts = xp.concatenate([by_entries, xp.arange(0, n_windows, windows_per_chunk)])
    cuts = xp.unique(xp.append(cuts, n_windows))  # synchronize!
    entries = bounds[cuts].tolist()  # synchronize!
    cuts = cuts.tolist()
    for i in range(len(cuts) - 1):
        yield slice(cuts[i], cuts[i + 1]), slice(entries[i], entries[i + 1])


def _condense_chunk(
    A: CSR, tile: tuple[int, int], windows: slice, entries: slice, layout: _Words
) -> tuple[Array, ...]:
    """``slots, order, tiles of each window, columns, tile starts`` of a run of windows."""
    xp = namespace(A.indptr)
    height, width = tile
    nnz = entries.stop - entries.start
    ptr = A.indptr[windows.start * height : windows.stop * height + 1] - entries.start
    row = primitives.expand(ptr, nnz)
    window = row // height
    first = ptr[:-1:height]  # first entry of each window
    words, place_bits = window.astype(np.uint64), np.uint64(layout.place_bits)
    words <<= np.uint64(layout.column_bits)
    words |= layout.columns[entries].astype(np.uint64)
    words <<= place_bits
    words |= (xp.arange(nnz, dtype=ptr.dtype) - first[window]).astype(np.uint64)
    words.sort()
    place = (words & np.uint64((1 << layout.place_bits) - 1)).astype(ptr.dtype)
    place += first[window]  # windows are contiguous, before the sort and after it
    words >>= place_bits

    new = xp.ones(nnz, bool)
    xp.not_equal(words[1:], words[:-1], out=new[1:])
    seen = primitives.offsets(new, ptr.dtype)  # distinct (window, column) pairs before each entry
    distinct = xp.diff(seen[xp.append(first, ptr[-1:])])
    tiles = -(-distinct // width)
    window_ptr = primitives.offsets(tiles, ptr.dtype)
    n_tiles = int(window_ptr[-1])  # synchronize!
    wide = ptr.dtype if (n_tiles + 1) * width <= np.iinfo(ptr.dtype).max else np.int64
    condensed = (window_ptr.astype(wide) * width)[window]  # with padding, more than entries
    condensed += seen[1:] - 1 - seen[first[window]]
    columns = xp.full(n_tiles * width, PADDING, ptr.dtype)
    column = words & np.uint64((1 << layout.column_bits) - 1)
    columns[condensed] = column if layout.distinct is None else layout.distinct[column]
    starts = primitives.pointers(condensed, n_tiles, ptr.dtype, step=width)[:-1] + entries.start
    slots = (row[place] - window * height) * width + condensed % width
    return slots, place + entries.start, tiles, columns.reshape(n_tiles, width), starts


def sgt_coordinates(A: SGT) -> tuple[Array, Array]:
    """Row and column of each entry, in tile order; column -1 where padding was named."""
    height, width = A.tile
    with on_device_of(A.order):
        tile = primitives.expand(A.tile_ptr, A.nnz)
        window = primitives.expand(A.window_ptr, A.tile_count)[tile]
        slots = A.slots.astype(np.int32)  # width may lie beyond the dtype of slots
        col = A.columns.ravel()[tile.astype(np.int64) * width + slots % width]
        return window * height + slots // width, col
