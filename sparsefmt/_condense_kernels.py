"""Kernels that make the words which ``_condense`` sorts, and take them apart."""

from functools import cache
from typing import Any

from ._primitives import SEGMENT_OF


@cache
def pack() -> Any:
    """Words of (window, column, place) of the entries from ``first`` on, with those ``bounds``."""
    import cupy

    return cupy.ElementwiseKernel(
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


@cache
def differs() -> Any:
    """1 for each first entry of a window and column, else 0."""
    import cupy

    return cupy.ElementwiseKernel(
        "raw uint64 words, int32 place_bits",
        "I new_pair",
        "new_pair = i == 0 || words[i] >> place_bits != words[i - 1] >> place_bits",
        "sparsefmt_new_pairs",
    )


@cache
def tiles() -> Any:
    """How many tiles the columns of each window fill; ``seen`` as for ``unpack``."""
    import cupy

    return cupy.ElementwiseKernel(
        "I begin, I end, raw I seen, int64 first, uint32 width",
        "I number",
        "number = ((long long)seen[end - first] - seen[begin - first] + (width - 1)) / width",
        "sparsefmt_tiles_of_windows",
    )


@cache
def unpack() -> Any:
    """Where entries lie in tiles, from sorted words; and for each first of a column, the column.

    ``seen`` are the pairs of window and column before each entry, and of all.
    """
    import cupy

    return cupy.ElementwiseKernel(
        "raw uint64 words, raw I seen, raw I indptr, raw I window_ptr, raw I distinct, bool ranks, "
        "int64 n_rows, int64 first_window, int64 first, int64 height, uint32 width, "
        "int32 column_bits, int32 place_bits",
        "raw S slots, raw I order, raw I columns, raw I tile_ptr",
        """
        const unsigned long long pair = words[i] >> place_bits;
        const unsigned long long place = words[i] & ((1ull << place_bits) - 1);
        const long long window = pair >> column_bits, row = (first_window + window) * height;
        const long long begin = indptr[row], e = begin + place;
        const I rank = seen[i + 1] - 1 - seen[begin - first];  // of the column, in the window
        const I tile = window_ptr[window] + rank / (I)width;
        const unsigned k = rank % (I)width;
        slots[i] = segment_of(&indptr[row], 0, min(height, n_rows - row), e) * width + k;
        order[i] = e;
        if (seen[i + 1] != seen[i]) {
            const long long column = pair & ((1ull << column_bits) - 1);
            columns[(long long)tile * width + k] = ranks ? distinct[column] : (I)column;
            if (k == 0) tile_ptr[tile] = first + i;
        }
        """,
        "sparsefmt_unpack_words",
        preamble=SEGMENT_OF,
    )
