"""Kernels that make the words which ``_condense`` sorts, and take them apart.

A chunk's windows and entries are those from ``first_window`` and ``first`` on.
"""

from .arrays import elementwise
from .primitives import SEGMENT_OF

#: Find where the entries of each window begin, and the end.
bounds = elementwise(
    "raw I indptr, int64 n_rows, int64 height",
    "I bound",
    "bound = indptr[min(i * height, n_rows)]",
    "sparsefmt_bounds_of_windows",
)

#: Pack (window, column, place) of the entries from ``first`` on, with those ``bounds``.
pack = elementwise(
    "C column, raw I bounds, int64 n_windows, int64 first, int32 column_bits, int32 place_bits",
    "uint64 word",
    """
    const long long e = first + i, window = segment_of(&bounds[0], 0, n_windows, e);
    word = (unsigned long long)window << column_bits | (unsigned long long)column;
    word = word << place_bits | (unsigned long long)(e - bounds[window]);
    """,
    "sparsefmt_pack_words",
    preamble=SEGMENT_OF,
)

#: Write 0, then for each entry 1 if it is the first of its window and column, else 0.
differs = elementwise(
    "raw uint64 words, int32 place_bits",
    "I new_pair",
    "new_pair = i == 1 || (i > 1 && words[i - 1] >> place_bits != words[i - 2] >> place_bits)",
    "sparsefmt_new_pairs",
)

#: Write 0, then the number of tiles of each window; ``seen`` as for ``unpack``.
tiles = elementwise(
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
unpack = elementwise(
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
    preamble=SEGMENT_OF,
)
