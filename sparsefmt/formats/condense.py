"""Sparse graph translation of a CSR into condensed tiles, and coordinates of their entries.

A window's entries are contiguous in CSR, so the sort by (window, column, place) runs over one chunk
of windows after another, in bounded memory.  The three share one 64-bit word, which is sorted in
place; places count from the window's first entry, so that they need few bits.  On a GPU one kernel
makes the words and one takes them apart; on the CPU that goes by parts of a
chunk, of which one window may have many: beside its words, nothing has 4 bytes an entry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import primitives
from .arrays import Array, elementwise, is_cupy, namespace, to_device
from .compressed import CSR
from .sgt import PADDING, SGT, slot_dtype

#: Entries that a GPU sorts at a time, unless one window has more: 128 MiB of words, and as much to
#: sort them.
CHUNK_ENTRIES = 1 << 24
#: Windows, and entries, that the CPU looks at together; it sorts more only if one window has more.
#: Caches hold them: 1 M entries take 28 ms, and 44 ms all at once.
PART_ENTRIES = 1 << 17


@dataclass(frozen=True, eq=False)
class _Words:
    """The layout of (window, column, place) in a word of 64 bits."""

    distinct: Array | None  #: (n_distinct,) the columns in use, if words hold their ranks
    column_bits: int
    place_bits: int

    @property
    def windows(self) -> int:
        """Return the number of windows that a word can number."""
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
    """Convert a CSR to an SGT of condensed tiles (TC-GNN, section 3, algorithm 1)."""
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
    sgt = SGT._trusted(
        window_ptr=_chained(window_ptrs),
        columns=columns[0] if len(columns) == 1 else xp.concatenate(columns),
        tile_ptr=_chained(tile_ptrs),
        slots=slots,
        order=order,
        data=A.data,
        shape=A.shape,
        tile=tile,
    )
    sgt._built().ask("csr", lambda: A._replace(data=None))
    return sgt


def _bounds(A: CSR, height: int) -> Array:
    """Return where the entries of each window begin, and the end: (n_windows + 1,)."""
    if is_cupy(A.indptr):
        return _bounds_kernel()(A.indptr, A.n_rows, height, size=-(-A.n_rows // height) + 1)
    return np.append(A.indptr[:-1:height], A.indptr[-1:])


def _chained(pointers: list[Array]) -> Array:
    """Join pointer arrays, each of which ends where the next begins."""
    *front, last = pointers
    if not front:
        return last
    return namespace(last).concatenate([*(ptr[:-1] for ptr in front), last])


def _cut(A: CSR, bounds: Array) -> tuple[_Words, Iterable[tuple[slice, slice]]]:
    """Choose the layout of words, and slices of windows and of entries to sort together.

    Few entries are one chunk, whatever the windows hold: bounds stay on the GPU.
    """
    n_windows = len(bounds) - 1
    windows, entries = n_windows, CHUNK_ENTRIES
    if not is_cupy(bounds):
        windows = entries = PART_ENTRIES
    layout = _Words(None, primitives.bits_for(A.n_cols), primitives.bits_for(A.nnz))
    if n_windows <= min(layout.windows, windows) and A.nnz <= entries:
        return layout, [(slice(0, n_windows), slice(0, A.nnz))]
    limits = to_device(bounds, "cpu")  # synchronize!
    layout = _layout(A, int(np.diff(limits).max(initial=0)))
    return layout, _chunks(limits, min(layout.windows, windows), entries)


def _layout(A: CSR, window_entries: int) -> _Words:
    """Choose the layout of words for ``window_entries`` in a window: ranks for wide columns."""
    place_bits = primitives.bits_for(window_entries)
    column_bits = primitives.bits_for(A.n_cols)
    if column_bits + place_bits <= 60:
        return _Words(None, column_bits, place_bits)
    xp = namespace(A.indices)
    columns, new = xp.sort(A.indices), xp.ones(A.nnz, bool)
    new[1:] = columns[1:] != columns[:-1]  # without a table as in NumPy's ``unique``
    distinct = columns[new]  # synchronize!
    column_bits = primitives.bits_for(len(distinct))
    if column_bits + place_bits > 64:
        raise UnsupportedError(
            f"a window of {window_entries} entries over {len(distinct)} columns has no 64-bit key: "
            "use tiles of fewer rows."
        )
    return _Words(distinct, column_bits, place_bits)


def _chunks(
    limits: Array, windows_per_chunk: int, entries_per_chunk: int
) -> Iterator[tuple[slice, slice]]:
    """Yield slices of windows and entries, near ``windows_per_chunk`` and ``entries_per_chunk``."""
    n_windows = len(limits) - 1
    targets = np.arange(0, limits[-1], entries_per_chunk, dtype=limits.dtype)
    by_entries = np.searchsorted(limits, targets, side="right") - 1
    inner = np.union1d(by_entries, np.arange(0, n_windows, windows_per_chunk))
    cuts = [0, *inner[inner > 0].tolist(), n_windows]
    for start, stop in pairwise(cuts):
        yield slice(start, stop), slice(int(limits[start]), int(limits[stop]))


def _pack(chunk: _Chunk) -> Array:
    """Pack (window, column, place) of a chunk's entries into words, in their order."""
    bounds, first = chunk.bounds, chunk.entries.start
    bits = chunk.layout.column_bits, chunk.layout.place_bits
    if is_cupy(bounds):
        columns = _packed_columns(chunk, chunk.entries)
        words: Array = _pack_kernel()(columns, bounds, len(bounds) - 1, first, *bits)
        return words
    words = np.empty(chunk.entries.stop - first, np.uint64)
    for part in primitives.parts(chunk.entries, PART_ENTRIES):
        window = primitives.expand_part(bounds, part)
        places = np.arange(part.start, part.stop) - bounds[window]
        piece = words[part.start - first : part.stop - first]
        piece[:] = window
        for field, width in zip((_packed_columns(chunk, part), places), bits, strict=True):
            piece <<= np.uint64(width)
            piece |= field.astype(np.uint64)
    return words


def _packed_columns(chunk: _Chunk, part: slice) -> Array:
    """Return the columns of some entries as words hold them, maybe as ranks."""
    columns, distinct = chunk.A.indices[part], chunk.layout.distinct
    return columns if distinct is None else namespace(columns).searchsorted(distinct, columns)


def _unpack(chunk: _Chunk, words: Array, slots: Array, order: Array) -> tuple[Array, ...]:
    """Return ``window_ptr, tile_ptr, columns`` of sorted words; write slots and order."""
    xp, dtype, width = namespace(words), chunk.bounds.dtype, chunk.tile[1]
    if is_cupy(words):  # ``seen`` counts pairs of window and column before each entry, and all
        fill, bounds = _fill_on_gpu, chunk.bounds
        seen = xp.empty(len(words) + 1, dtype)
        _differs_kernel()(words, chunk.layout.place_bits, seen)
        primitives.sum_up(seen)
        tiles = _tiles_kernel()(bounds, seen, chunk.entries.start, width, size=len(bounds))
        window_ptr = primitives.sum_up(tiles)
    else:
        fill, seen = _fill, _seen(chunk, words)
        window_ptr = primitives.offsets(-(-np.diff(seen) // width), seen.dtype)
    n_tiles = int(window_ptr[-1])  # synchronize!
    columns = xp.empty(n_tiles * width, dtype)
    tile_ptr = xp.empty(n_tiles + 1, dtype)
    fill(chunk, words, seen, window_ptr, (slots, order, columns, tile_ptr))
    return window_ptr, tile_ptr, columns.reshape(n_tiles, width)


def _seen(chunk: _Chunk, words: Array) -> Array:
    """Count the distinct columns of the windows before each window: (n_windows + 1,)."""
    seen = np.zeros_like(chunk.bounds)
    for part, before in _seen_by_parts(chunk, words):
        ends = np.array([part.start, part.stop], seen.dtype)
        low, high = np.searchsorted(chunk.bounds, ends, side="right")
        seen[low:high] = before[chunk.bounds[low:high] - part.start]
    return seen


def _seen_by_parts(chunk: _Chunk, words: Array) -> Iterator[tuple[slice, Array]]:
    """Yield parts, with the number of pairs (window, column) before each of their entries."""
    last, total = None, 0
    for part in primitives.parts(chunk.entries, PART_ENTRIES):
        within = slice(part.start - chunk.entries.start, part.stop - chunk.entries.start)
        pairs = words[within] >> np.uint64(chunk.layout.place_bits)
        seen = np.empty(len(pairs) + 1, chunk.bounds.dtype)
        seen[0], seen[1], seen[2:] = total, pairs[0] != last, pairs[1:] != pairs[:-1]
        yield part, primitives.sum_up(seen)
        last, total = pairs[-1], seen[-1]


def _fill(
    chunk: _Chunk, words: Array, seen: Array, window_ptr: Array, into: tuple[Array, ...]
) -> None:
    """Write ``slots, order, columns, tile_ptr`` from sorted words."""
    slots, order, columns, tile_ptr = into
    columns[:], tile_ptr[-1] = PADDING, chunk.entries.stop
    layout, width, first = chunk.layout, chunk.tile[1], chunk.entries.start
    cells = _first_cells(chunk, slots.dtype)
    for part, before in _seen_by_parts(chunk, words):
        within = slice(part.start - first, part.stop - first)
        window = primitives.expand_part(chunk.bounds, part)
        place = (words[within] & np.uint64((1 << layout.place_bits) - 1)).astype(order.dtype)
        place += chunk.bounds[window]
        order[within] = place
        place -= first
        rank = before[1:] - 1 - seen[window]  # of the column, in the window
        slots[within] = cells[place] + (rank % width).astype(slots.dtype)
        new = np.flatnonzero(before[1:] != before[:-1])
        rank, tile = rank[new], window_ptr[window[new]] + rank[new] // width
        column = words[within][new] >> np.uint64(layout.place_bits)
        column &= np.uint64((1 << layout.column_bits) - 1)
        at = tile.astype(np.int64) * width + rank % width  # padding: maybe more than entries
        columns[at] = column if layout.distinct is None else layout.distinct[column]
        heads = rank % width == 0
        tile_ptr[tile[heads]] = new[heads] + part.start


def _first_cells(chunk: _Chunk, dtype: np.dtype[Any]) -> Array:
    """Return the number of the first cell of each entry's row in a tile, by place."""
    height, width = chunk.tile
    cells = np.empty(chunk.entries.stop - chunk.entries.start, dtype)
    for part in primitives.parts(chunk.entries, PART_ENTRIES):
        row = primitives.expand_part(chunk.A.indptr, part)
        cells[part.start - chunk.entries.start : part.stop - chunk.entries.start] = (
            row % height * width
        )
    return cells


def _fill_on_gpu(
    chunk: _Chunk, words: Array, seen: Array, window_ptr: Array, into: tuple[Array, ...]
) -> None:
    A, layout = chunk.A, chunk.layout
    distinct = A.indices if layout.distinct is None else layout.distinct
    _unpack_kernel()(
        *(words, seen, A.indptr, window_ptr, distinct, layout.distinct is not None),
        *(A.n_rows, len(words), len(into[-1]) - 1, chunk.windows.start, chunk.entries.start),
        *(*chunk.tile, layout.column_bits, layout.place_bits, *into),
        size=len(words) + 1,
    )


def sgt_coordinates(A: SGT) -> Iterator[tuple[slice, slice, Array, Array]]:
    """Yield rows and columns of an SGT's entries, in tile order; on a GPU all together.

    Yields rows and entries as slices, the row of each entry, counted from the first of these rows,
    and its column, -1 in padding.
    """
    if is_cupy(A.order):
        tile = primitives.expand(A.tile_ptr, A.nnz)
        window = primitives.expand(A.window_ptr, A.tile_count)[tile]
        yield slice(0, A.n_rows), slice(0, A.nnz), *_coordinates(A, slice(None), tile, window)
        return
    step = -(-PART_ENTRIES // A.tile[0])
    for first in range(0, A.n_windows, step):
        last = min(first + step, A.n_windows)
        rows = slice(first * A.tile[0], min(last * A.tile[0], A.n_rows))
        begin, end = (int(A.tile_ptr[A.window_ptr[window_index]]) for window_index in (first, last))
        for part in primitives.parts(slice(begin, end), PART_ENTRIES):
            tile = primitives.expand_part(A.tile_ptr, part)
            tiles = slice(int(tile[0]), int(tile[-1]) + 1)
            window = primitives.expand_part(A.window_ptr, tiles)[tile - tiles.start] - first
            yield rows, part, *_coordinates(A, part, tile, window)


def _coordinates(A: SGT, part: slice, tile: Array, window: Array) -> tuple[Array, Array]:
    height, width = A.tile
    slots = A.slots[part].astype(np.int32)  # width may lie beyond the dtype of slots
    col = A.columns.ravel()[tile.astype(np.int64) * width + slots % width]
    return window * height + slots // width, col


# Kernels; a chunk's windows and entries are those from ``first_window`` and ``first`` on.

#: Write where the entries of each window begin, and the end.
_bounds_kernel = elementwise(
    "raw I indptr, int64 n_rows, int64 height",
    "I bound",
    "bound = indptr[min(i * height, n_rows)]",
    "sparsefmt_bounds_of_windows",
)

#: Pack (window, column, place) of the entries from ``first`` on, with those ``bounds``.
_pack_kernel = elementwise(
    "C column, raw I bounds, int64 n_windows, int64 first, int32 column_bits, int32 place_bits",
    "uint64 word",
    """
    const long long e = first + i, window = segment_of(&bounds[0], 0, n_windows, e);
    word = (unsigned long long)window << column_bits | (unsigned long long)column;
    word = word << place_bits | (unsigned long long)(e - bounds[window]);
    """,
    "sparsefmt_pack_words",
    preamble=primitives.SEGMENT_OF,
)

#: Write 0, then for each entry 1 if it is the first of its window and column, else 0.
_differs_kernel = elementwise(
    "raw uint64 words, int32 place_bits",
    "I new_pair",
    "new_pair = i == 1 || (i > 1 && words[i - 1] >> place_bits != words[i - 2] >> place_bits)",
    "sparsefmt_new_pairs",
)

#: Write 0, then the number of tiles of each window; ``seen`` as for ``_unpack_kernel``.
_tiles_kernel = elementwise(
    "raw I bounds, raw I seen, int64 first, uint32 width",
    "I number",
    """
    number = 0;
    if (i) {
        const long long columns = seen[bounds[i] - first] - seen[bounds[i - 1] - first];
        number = (columns + (width - 1)) / width;
    }
    """,
    "sparsefmt_tiles_of_windows",
)

#: Write slots and order of the entries, columns and begins of the tiles, from sorted words.
#:
#: ``seen`` counts the pairs of window and column before each entry, and all of them.  ``size`` is
#: one more than there are entries: the last thread writes where the tiles end.
_unpack_kernel = elementwise(
    "raw uint64 words, raw I seen, raw I indptr, raw I window_ptr, raw I distinct, bool ranks, "
    "int64 n_rows, int64 n_entries, int64 n_tiles, int64 first_window, int64 first, "
    "int64 height, uint32 width, int32 column_bits, int32 place_bits",
    "raw S slots, raw I order, raw I columns, raw I tile_ptr",
    """
    if (i == n_entries) {
        tile_ptr[n_tiles] = first + i;
        continue;
    }
    const unsigned long long pair = words[i] >> place_bits;
    const unsigned long long place = words[i] & ((1ull << place_bits) - 1);
    const long long window = pair >> column_bits, row = (first_window + window) * height;
    const long long rows = min(height, n_rows - row), begin = indptr[row], e = begin + place;
    const I rank = seen[i + 1] - 1 - seen[begin - first];  // of the column, in the window
    const long long tile = window_ptr[window] + rank / (I)width;
    unsigned k = rank % (I)width;
    slots[i] = segment_of(&indptr[row], 0, rows, e) * width + k;
    order[i] = e;
    if (seen[i + 1] != seen[i]) {
        const long long column = pair & ((1ull << column_bits) - 1);
        columns[tile * width + k] = ranks ? distinct[column] : (I)column;
        if (k == 0) tile_ptr[tile] = first + i;
    }
    if (first + i + 1 == indptr[row + rows])  // the window ends: padding
        while (++k < width) columns[tile * width + k] = -1;
    """,
    "sparsefmt_unpack_words",
    preamble=primitives.SEGMENT_OF,
)
