"""Sparse graph translation: CSR into condensed tiles, and a tile's entries back to coordinates.

A window's entries are contiguous in CSR, so the sort by (window, column, place) runs over one chunk
of windows after another, in bounded memory.  The three share one 64-bit word, which is sorted in
place; places count from the window's first entry, so that they need few bits.  On a GPU one kernel
makes the words and one takes them apart (``_condense_kernels``).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import condense_kernels as kernels
from . import primitives
from .arrays import Array, is_cupy, namespace, on_device_of, to_device
from .compressed import CSR
from .sgt import PADDING, SGT, slot_dtype

#: Entries sorted at a time, unless one window has more: 128 MiB of words, and as much to sort them.
CHUNK_ENTRIES = 1 << 24


@dataclass(frozen=True, eq=False)
class _Words:
    """How (window, column, place) share 64 bits."""

    columns: Array  #: (nnz,) column of each entry, or its rank among the columns in use
    distinct: Array | None  #: (n_distinct,) the columns in use, if ``columns`` holds ranks
    column_bits: int
    place_bits: int

    @property
    def windows(self) -> int:
        """How many windows can be told apart."""
        bits = 64 - self.column_bits - self.place_bits
        return 1 << min(bits, 62) if bits >= 0 else 0


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Windows whose entries are sorted together."""

    A: CSR
    tile: tuple[int, int]
    layout: _Words
    windows: slice
    entries: slice
    bounds: Array  #: (n_windows + 1,) where the entries of each begin, and the end


def condense(A: CSR, tile: tuple[int, int]) -> SGT:
    """``A`` in condensed tiles (TC-GNN, section 3, algorithm 1)."""
    xp = namespace(A.indptr)
    bounds = _bounds(A, tile[0])
    layout, chunks = _cut(A, bounds)
    slots = xp.empty(A.nnz, slot_dtype(tile))
    order = xp.empty(A.nnz, A.index_dtype)
    window_ptrs, tile_ptrs, columns = [], [], []
    tiles = 0
    for windows, entries in chunks:
        within = bounds[windows.start : windows.stop + 1]
        chunk = _Chunk(A, tile, layout, windows, entries, within)
        words = _pack(chunk)
        words.sort()
        window_ptr, tile_ptr, piece = _unpack(chunk, words, slots[entries], order[entries])
        window_ptrs.append(window_ptr + tiles if tiles else window_ptr)
        tile_ptrs.append(tile_ptr)
        columns.append(piece)
        tiles += len(piece)
    found = SGT._trusted(
        window_ptr=_chained(window_ptrs),
        columns=columns[0] if len(columns) == 1 else xp.concatenate(columns),
        tile_ptr=_chained(tile_ptrs),
        slots=slots,
        order=order,
        data=A.data,
        shape=A.shape,
        tile=tile,
    )
    found._built().ask("csr", lambda: A._replace(data=None))
    return found


def _bounds(A: CSR, height: int) -> Array:
    """(n_windows + 1,) where the entries of each window begin, and the end."""
    if is_cupy(A.indptr):
        return kernels.bounds()(A.indptr, A.n_rows, height, size=-(-A.n_rows // height) + 1)
    return np.append(A.indptr[:-1:height], A.indptr[-1:])


def _chained(pointers: list[Array]) -> Array:
    """Pointers that each end where the next begin."""
    *others, last = pointers
    if not others:
        return last
    return namespace(last).concatenate([*(one[:-1] for one in others), last])


def _cut(A: CSR, bounds: Array) -> tuple[_Words, Iterable[tuple[slice, slice]]]:
    """What words are like, and slices of windows, and of their entries, to sort together.

    Few entries are one chunk, whatever the windows hold: nobody has to look.
    """
    n_windows = len(bounds) - 1
    layout = _Words(A.indices, None, primitives.bits_for(A.n_cols), primitives.bits_for(A.nnz))
    if A.nnz <= CHUNK_ENTRIES and n_windows <= layout.windows:
        return layout, [(slice(0, n_windows), slice(0, A.nnz))]
    limits = to_device(bounds, "cpu")  # synchronize!
    layout = _layout(A, int(np.diff(limits).max(initial=0)))
    return layout, _chunks(limits, layout.windows)


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


def _chunks(limits: Array, windows_per_chunk: int) -> Iterator[tuple[slice, slice]]:
    """Slices of windows, and of their entries, of at most ``CHUNK_ENTRIES`` where possible."""
    n_windows = len(limits) - 1
    targets = np.arange(0, limits[-1], CHUNK_ENTRIES, dtype=limits.dtype)
    by_entries = np.searchsorted(limits, targets, side="right") - 1
    inner = np.union1d(by_entries, np.arange(0, n_windows, windows_per_chunk))
    cuts = [0, *inner[inner > 0].tolist(), n_windows]
    for start, stop in pairwise(cuts):
        yield slice(start, stop), slice(int(limits[start]), int(limits[stop]))


def _pack(chunk: _Chunk) -> Array:
    """(window, column, place) of each entry; windows count from the first of the chunk."""
    columns, bounds = chunk.layout.columns[chunk.entries], chunk.bounds
    first, bits = chunk.entries.start, (chunk.layout.column_bits, chunk.layout.place_bits)
    if is_cupy(columns):
        words: Array = kernels.pack()(columns, bounds, len(bounds) - 1, first, *bits)
        return words
    window = primitives.expand(bounds, len(columns))
    places = np.arange(first, first + len(columns)) - bounds[window]
    words = window.astype(np.uint64)
    for part, width in zip((columns, places), bits, strict=True):
        words <<= np.uint64(width)
        words |= part.astype(np.uint64)
    return words


def _unpack(chunk: _Chunk, words: Array, slots: Array, order: Array) -> tuple[Array, ...]:
    """``window_ptr, tile_ptr, columns`` from sorted words; fills slots and order."""
    xp, dtype, width = namespace(words), chunk.bounds.dtype, chunk.tile[1]
    seen = _distinct(words, chunk.layout.place_bits, dtype)
    window_ptr = _window_ptr(chunk, seen)
    n_tiles = int(window_ptr[-1])  # synchronize!
    columns = xp.empty(n_tiles * width, dtype)
    tile_ptr = xp.empty(n_tiles + 1, dtype)
    fill = _fill_with_kernel if is_cupy(words) else _fill
    fill(chunk, words, seen, window_ptr, (slots, order, columns, tile_ptr))
    return window_ptr, tile_ptr, columns.reshape(n_tiles, width)


def _distinct(words: Array, place_bits: int, dtype: Any) -> Array:
    """(nnz + 1,) distinct pairs of window and column before each entry, and of all."""
    seen = namespace(words).empty(len(words) + 1, dtype)
    if is_cupy(words):
        kernels.differs()(words, place_bits, seen)
    else:
        pairs = words >> np.uint64(place_bits)
        seen[0], seen[1:2] = 0, 1
        seen[2:] = pairs[1:] != pairs[:-1]
    return primitives.sum_up(seen)


def _window_ptr(chunk: _Chunk, seen: Array) -> Array:
    bounds, first, width = chunk.bounds, chunk.entries.start, chunk.tile[1]
    if is_cupy(seen):
        tiles = kernels.tiles()(bounds, seen, first, width, size=len(bounds))
        return primitives.sum_up(tiles)
    return primitives.offsets(-(-np.diff(seen[bounds - first]) // width), seen.dtype)


def _fill(
    chunk: _Chunk, words: Array, seen: Array, window_ptr: Array, into: tuple[Array, ...]
) -> None:
    """``slots, order, columns, tile_ptr`` of sorted words."""
    slots, order, columns, tile_ptr = into
    columns[:], tile_ptr[-1] = PADDING, chunk.entries.stop
    layout, (height, width), first = chunk.layout, chunk.tile, chunk.entries.start
    rows = slice(chunk.windows.start * height, chunk.windows.stop * height + 1)
    row = primitives.expand(chunk.A.indptr[rows], len(words))
    window = row // height  # windows are contiguous, before the sort and after it
    place = (words & np.uint64((1 << layout.place_bits) - 1)).astype(order.dtype)
    order[:] = place + chunk.bounds[window]
    rank = seen[1:] - 1 - seen[chunk.bounds[window] - first]  # of the column, in the window
    slots[:] = (row[order - first] - window * height) * width + rank % width
    new = np.flatnonzero(seen[1:] != seen[:-1])
    rank, tile = rank[new], window_ptr[window[new]] + rank[new] // width
    column = words[new] >> np.uint64(layout.place_bits)
    column &= np.uint64((1 << layout.column_bits) - 1)
    at = tile.astype(np.int64) * width + rank % width  # with padding there may be more than entries
    columns[at] = column if layout.distinct is None else layout.distinct[column]
    tile_ptr[:-1] = new[rank % width == 0] + first


def _fill_with_kernel(
    chunk: _Chunk, words: Array, seen: Array, window_ptr: Array, into: tuple[Array, ...]
) -> None:
    A, layout = chunk.A, chunk.layout
    distinct = A.indices if layout.distinct is None else layout.distinct
    kernels.unpack()(
        *(words, seen, A.indptr, window_ptr, distinct, layout.distinct is not None),
        *(A.n_rows, len(words), len(into[-1]) - 1, chunk.windows.start, chunk.entries.start),
        *(*chunk.tile, layout.column_bits, layout.place_bits, *into),
        size=len(words) + 1,
    )


def sgt_coordinates(A: SGT) -> tuple[Array, Array]:
    """Row and column of each entry, in tile order; column -1 where padding was named."""
    height, width = A.tile
    with on_device_of(A.order):
        tile = primitives.expand(A.tile_ptr, A.nnz)
        window = primitives.expand(A.window_ptr, A.tile_count)[tile]
        slots = A.slots.astype(np.int32)  # width may lie beyond the dtype of slots
        col = A.columns.ravel()[tile.astype(np.int64) * width + slots % width]
        return window * height + slots // width, col
