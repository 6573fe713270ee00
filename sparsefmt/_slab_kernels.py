"""Kernels that put entries of an SGT into slabs; ``_slabs`` says what for, and in NumPy how.

``row``, ``column`` and ``k`` are counted within the window, the tile and the slab.
"""

from functools import cache
from typing import Any

from ._cells import CUDA, SLAB

#: Most entries that a column may have to hold: 1 to this are tried.
MOST = 4
#: Threads that share the tiles of a window; each walks through whole tiles, which stay in the L1.
THREADS = 256


@cache
def count() -> Any:
    """Entries of each column, where they begin, and the ``figures`` of every ``step``-th window.

    ``size`` is ``THREADS`` for each of those windows.  Of entries in one cell the first counts.
    """
    import cupy

    return cupy.ElementwiseKernel(
        "raw I window_ptr, raw I tile_ptr, raw S slots, int64 n_windows, uint32 width, int64 step, "
        "bool keep",
        "raw I begins, raw uint8 counts, raw uint64 figures",
        f"""
        const long long w = i / {THREADS} * step, last = window_ptr[w + 1];
        unsigned long long found[{MOST + 1}] = {{}};
        for (long long t = window_ptr[w] + i % {THREADS}; t < last; t += {THREADS}) {{
            I e = tile_ptr[t];
            const I end = tile_ptr[t + 1];
            for (unsigned k = 0; k < width; ++k) {{
                const I begin = e;
                unsigned held = 0, before = ~0u;
                for (; e < end && slots[e] % width == k; ++e) {{
                    held += slots[e] != before;
                    before = slots[e];
                }}
                for (unsigned m = 1; m < {MOST}; ++m) found[m - 1] += held == m;
                if (held >= {MOST}) ++found[{MOST - 1}], found[{MOST}] += held;
                if (!keep) continue;
                begins[t * width + k] = begin;
                counts[t * width + k] = held;
            }}
            if (keep && t + 1 == window_ptr[n_windows]) begins[(t + 1) * width] = end;
        }}
        for (unsigned m = 0; m <= {MOST}; ++m)
            if (found[m]) atomicAdd(&figures[i / {THREADS} * {MOST + 1} + m], found[m]);
        """,
        "sparsefmt_count_columns",
    )


@cache
def kept() -> Any:
    """Columns of each tile that are taken."""
    import cupy

    return cupy.ElementwiseKernel(
        "I window, raw uint8 least, raw uint8 counts, uint32 width",
        "int64 taken",
        """
        taken = 0;
        for (unsigned k = 0; k < width; ++k) taken += counts[i * width + k] >= least[window];
        """,
        "sparsefmt_kept_columns",
    )


@cache
def place() -> Any:
    """Which columns a slab has: those of the matrix, and where they lie in the tiles.

    ``ranks`` are the columns taken before each tile.  Behind the last column of a window that one
    again, and -1 for where it lies.
    """
    import cupy

    return cupy.ElementwiseKernel(
        "I window, raw I window_ptr, raw int64 slab_ptr, raw uint8 least, raw uint8 counts, "
        "raw int64 ranks, raw I tiles, uint32 width",
        "raw I columns, raw int64 sources",
        f"""
        const long long first = ranks[window_ptr[window]];
        const long long number = ranks[window_ptr[window + 1]] - first;  // taken of the window
        const long long begin = slab_ptr[window] * {SLAB};
        long long rank = ranks[i] - first;
        for (unsigned k = 0; k < width; ++k) {{
            const long long source = i * width + k;
            if (counts[source] < least[window]) continue;
            long long at = begin + rank;
            columns[at] = tiles[source];
            sources[at] = source;
            if (++rank < number) continue;
            while (++at % {SLAB}) {{
                columns[at] = tiles[source];
                sources[at] = -1;
            }}
        }}
        """,
        "sparsefmt_place_columns",
    )


@cache
def entries() -> Any:
    """Entries of each slab."""
    import cupy

    return cupy.ElementwiseKernel(
        "raw int64 sources, raw uint8 counts",
        "I number",
        f"""
        number = 0;
        for (int k = 0; k < {SLAB}; ++k) {{
            const long long source = sources[i * {SLAB} + k];
            if (source >= 0) number += counts[source];
        }}
        """,
        "sparsefmt_entries_of_slabs",
    )


@cache
def fill() -> Any:
    """What a slab holds, and which entries of the matrix that takes (one bit each).

    A warp has one slab.  It goes through the entries of its columns twice: it counts those of each
    tile of 16 rows, whose lane keeps the number, and then knows where each entry goes.  ``begin``
    is the first entry of each slab, and the end.
    """
    import cupy

    return cupy.ElementwiseKernel(
        "raw int64 sources, raw I begins, raw S slots, raw I order, raw I begin, "
        "int64 n_slabs, uint32 width, uint32 tiles, bool mark",
        "raw uint32 masks, raw I starts, raw uint16 cells, raw I perm, raw uint32 taken",
        """
        const long long slab = i / 32;
        const unsigned lane = i % 32;
        const Columns<I> columns(sources, begins, slab, lane);
        unsigned number = 0;
        for (I first = 0; first < columns.total; first += 32) {
            const Entry<I> entry(columns, first + lane, slots, width);
            for (unsigned tile = 0; tile < tiles; ++tile)
                number += __popc(__ballot_sync(~0u, entry.is_in(tile))) * (lane == tile);
        }
        unsigned next = inclusive_sum(number, lane, tiles) - number;  // place in the slab
        if (lane < tiles) starts[slab * tiles + lane] = begin[slab] + next;
        if (i == 0) starts[n_slabs * tiles] = begin[n_slabs];
        for (I first = 0; first < columns.total; first += 32) {
            const Entry<I> entry(columns, first + lane, slots, width);
            long long at = begin[slab];
            for (unsigned tile = 0; tile < tiles; ++tile) {
                const unsigned here = __ballot_sync(~0u, entry.is_in(tile));
                const unsigned base = __shfl_sync(~0u, next, tile);
                if (entry.is_in(tile)) at += base + __popc(here & ((1u << lane) - 1));
                if (lane == tile) next += __popc(here);
            }
            if (!entry.counts) continue;
            const long long e = order[entry.at];
            cells[at] = cell_of(entry.row, entry.k);
            perm[at] = e;
            set_bit(masks, slab * tiles * 256 + mask_bit_of(entry.row, entry.k, tiles));
            if (mark) set_bit(taken, e);
        }
        """,
        "sparsefmt_fill_slabs",
        preamble=CUDA + _WALK,
    )


#: The entries of a slab's columns, numbered column by column.
_WALK = f"""
template <typename N> __device__ N inclusive_sum(N sum, unsigned lane, unsigned lanes) {{
    for (unsigned step = 1; step < lanes; step *= 2) {{
        const N before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }}
    return sum;
}}
// Lane k has column k.
template <typename I> struct Columns {{
    I begin, start, end;  // where its entries lie, the number of the first and behind the last
    I total;

    template <typename Sources, typename Begins>
    __device__ Columns(const Sources& sources, const Begins& begins, long long slab, unsigned lane)
        : begin(0) {{
        const long long source = lane < {SLAB} ? sources[slab * {SLAB} + lane] : -1;
        I length = 0;
        if (source >= 0) begin = begins[source], length = begins[source + 1] - begin;
        end = inclusive_sum(length, lane, {SLAB});
        start = end - length;
        total = __shfl_sync(~0u, end, {SLAB - 1});
    }}
}};
// All lanes ask together.
template <typename I> struct Entry {{
    I at;
    unsigned k, row;
    bool counts;  // there is one of that number, the first in its cell

    template <typename Slots>
    __device__ Entry(const Columns<I>& columns, I number, const Slots& slots, unsigned width)
        : k(0), row(0) {{
        for (unsigned step = {SLAB // 2}; step; step /= 2)
            if (__shfl_sync(~0u, columns.end, k + step - 1) <= number) k += step;
        const I start = __shfl_sync(~0u, columns.start, k);
        at = __shfl_sync(~0u, columns.begin, k) + (number - start);
        counts = number < columns.total;
        if (!counts) return;
        row = slots[at] / width;
        counts = number == start || slots[at] != slots[at - 1];
    }}
    __device__ bool is_in(unsigned tile) const {{ return counts && row / 16 == tile; }}
}};
template <typename Words> __device__ void set_bit(Words& words, long long bit) {{
    atomicOr(&words[bit / 32], 1u << bit % 32);
}}
"""


#: Entries of the matrix before ``e`` that are not taken, from what 32 each have before them.
_LEFT = """
template <typename Taken, typename Before>
__device__ long long left_before(const Taken& taken, const Before& before, long long e) {
    return before[e / 32] + __popc(~taken[e / 32] & ((1u << e % 32) - 1));
}
"""


@cache
def left() -> Any:
    """Entries of 32 that are not taken."""
    import cupy

    return cupy.ElementwiseKernel(
        "uint32 taken", "int64 number", "number = __popc(~taken)", "sparsefmt_left_entries"
    )


@cache
def compact() -> Any:
    """Columns and places of the entries that are not taken."""
    import cupy

    return cupy.ElementwiseKernel(
        "I column, raw uint32 taken, raw int64 before",
        "raw I indices, raw I perm",
        """
        if (!(taken[i / 32] >> i % 32 & 1)) {
            const long long at = left_before(taken, before, i);
            indices[at] = column;
            perm[at] = i;
        }
        """,
        "sparsefmt_compact",
        preamble=_LEFT,
    )


@cache
def rank() -> Any:
    """Pointers among the entries that are not taken."""
    import cupy

    return cupy.ElementwiseKernel(
        "I e, raw uint32 taken, raw int64 before",
        "I place",
        "place = left_before(taken, before, e)",
        "sparsefmt_rank",
        preamble=_LEFT,
    )
