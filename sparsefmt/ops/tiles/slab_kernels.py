"""Kernels that put entries of an SGT into slabs; ``slabs`` says what for, and in NumPy how.

``row``, ``column`` and ``k`` are counted within the window, the tile and the slab.
"""

from ...formats.arrays import elementwise
from .cells import CUDA, SLAB

#: Most entries that a column may have to hold: 1 to this are tried.
MOST = 4
#: Threads of a block, which has one window.
THREADS = 512

#: Sums over the lanes up to this one, which ask together.
_LANES = """
template <typename N> __device__ N inclusive_sum(N sum, unsigned lane, unsigned lanes) {
    for (unsigned step = 1; step < lanes; step *= 2) {
        const N before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
    }
    return sum;
}
"""
#: Sums over the threads before this one, and over all of the block, which ask together.
_THREADS = f"""
template <typename N> __device__ N sum_before(N number, unsigned thread, N& all) {{
    __shared__ N of_warp[{THREADS // 32}];
    const N sum = inclusive_sum(number, thread % 32, 32);
    if (thread % 32 == 31) of_warp[thread / 32] = sum;
    __syncthreads();
    N before = sum - number;
    all = 0;
    for (unsigned warp = 0; warp < {THREADS // 32}; ++warp) {{
        if (warp < thread / 32) before += of_warp[warp];
        all += of_warp[warp];
    }}
    __syncthreads();  // all have read what the next sum writes to
    return before;
}}
"""

#: The entries of a slab's columns, numbered column by column.
_WALK = f"""
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

#: Count the entries of each column, and find the ``figures`` of every ``step``-th window.
#:
#: A block has one of those windows, a thread one column at a time, whose entries it searches in
#: the tile.  Of entries in one cell the first counts.
count = elementwise(
    "raw I window_ptr, raw I tile_ptr, raw S slots, int64 n_windows, uint32 width, int64 step, "
    "bool keep",
    "raw I begins, raw uint8 counts, raw int64 figures",
    f"""
    const unsigned thread = i % {THREADS};
    const long long w = i / {THREADS} * step, last = window_ptr[w + 1];
    long long found[{MOST + 1}] = {{}};
    unsigned k = thread % width;
    for (long long t = window_ptr[w] + thread / width; t < last; t += {THREADS} / width) {{
        I begin = tile_ptr[t], end = tile_ptr[t + 1];
        for (I high = end; begin < high;) {{  // to the first entry of column k or behind
            const I middle = begin + (high - begin) / 2;
            if (slots[middle] % width < k) begin = middle + 1; else high = middle;
        }}
        unsigned held = 0;
        for (I e = begin; e < end && slots[e] % width == k; ++e)
            held += e == begin || slots[e] != slots[e - 1];
        for (unsigned m = 1; m < {MOST}; ++m) found[m - 1] += held == m;
        if (held >= {MOST}) ++found[{MOST - 1}], found[{MOST}] += held;
        if (keep) {{
            begins[t * width + k] = begin;
            counts[t * width + k] = held;
        }}
        k += {THREADS} % width;
        if (k >= width) k -= width, ++t;
    }}
    for (unsigned m = 0; m <= {MOST}; ++m) {{
        long long all;
        sum_before(found[m], thread, all);
        if (thread == 0) figures[i / {THREADS} * {MOST + 1} + m] = all;
    }}
    const long long tiles = window_ptr[n_windows];
    if (keep && i == 0) begins[tiles * width] = tile_ptr[tiles];
    """,
    "sparsefmt_count_columns",
    preamble=_LANES + _THREADS,
)

#: Choose the columns of a slab: those of the matrix, and where they lie in the tiles.
#:
#: A block has one window, a thread one tile at a time.  Places behind a window's last column repeat
#: it, with -1 for where it lies.  ``starts``, which has ``tiles`` places for each slab, gets the
#: first entry of each slab, and the end.
place = elementwise(
    "raw I window_ptr, raw int64 slab_ptr, raw int64 entry_ptr, raw uint8 least, "
    "raw uint8 counts, raw I columns_of_tiles, int64 n_windows, uint32 width, uint32 tiles",
    "raw I columns, raw int64 sources, raw I starts",
    f"""
    const long long w = i / {THREADS}, last = window_ptr[w + 1], end = entry_ptr[w + 1];
    const unsigned thread = i % {THREADS}, enough = least[w];
    long long first_place = slab_ptr[w] * {SLAB}, first_entry = entry_ptr[w];
    for (long long t = window_ptr[w]; t < last && first_entry < end; t += {THREADS}) {{
        const long long source = (t + thread) * width;
        const unsigned n_columns = t + thread < last ? width : 0;
        unsigned long long taken = 0, all;  // columns, and in the upper half their entries
        for (unsigned k = 0; k < n_columns; ++k) {{
            const unsigned long long held = counts[source + k];
            if (held >= enough) taken += held << 32 | 1;
        }}
        const unsigned long long before = sum_before(taken, thread, all);
        long long at = first_place + (unsigned)before, entry = first_entry + (before >> 32);
        for (unsigned k = 0; k < n_columns; ++k) {{
            const unsigned held = counts[source + k];
            if (held < enough) continue;
            if (at % {SLAB} == 0) starts[at / {SLAB} * tiles] = entry;
            columns[at] = columns_of_tiles[source + k];
            sources[at] = source + k;
            entry += held;
            for (++at; entry == end && at % {SLAB}; ++at) {{
                columns[at] = columns_of_tiles[source + k];
                sources[at] = -1;
            }}
        }}
        first_place += (unsigned)all;
        first_entry += all >> 32;
    }}
    if (i == 0) starts[slab_ptr[n_windows] * tiles] = entry_ptr[n_windows];
    """,
    "sparsefmt_place_columns",
    preamble=_LANES + _THREADS,
)

#: Fill a slab, and mark the entries of the matrix that it takes (one bit each).
#:
#: A warp fills one slab, whose entries begin at ``starts``.  It reads them twice: to count those of
#: each tile of 16 rows, a lane for each tile, and then to put each in its place.
fill = elementwise(
    "raw int64 sources, raw I begins, raw S slots, raw I order, uint32 width, uint32 tiles, "
    "bool mark",
    "raw uint32 masks, raw I starts, raw uint16 cells, raw I perm, raw uint32 taken",
    """
    const long long slab = i / 32, begin = starts[slab * tiles];
    const unsigned lane = i % 32;
    const Columns<I> columns(sources, begins, slab, lane);
    for (unsigned word = lane; word < tiles * 8; word += 32) masks[slab * tiles * 8 + word] = 0;
    __syncwarp();
    unsigned number = 0;
    for (I first = 0; first < columns.total; first += 32) {
        const Entry<I> entry(columns, first + lane, slots, width);
        for (unsigned tile = 0; tile < tiles; ++tile)
            number += __popc(__ballot_sync(~0u, entry.is_in(tile))) * (lane == tile);
    }
    unsigned next = inclusive_sum(number, lane, tiles) - number;  // place in the slab
    if (lane < tiles) starts[slab * tiles + lane] = begin + next;
    for (I first = 0; first < columns.total; first += 32) {
        const Entry<I> entry(columns, first + lane, slots, width);
        long long at = begin;
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
    preamble=CUDA + _LANES + _WALK,
)

#: Entries of the matrix before ``e`` that are not taken, from what 32 each have before them.
_LEFT = """
template <typename Taken, typename Before>
__device__ long long left_before(const Taken& taken, const Before& before, long long e) {
    return before[e / 32] + __popc(~taken[e / 32] & ((1u << e % 32) - 1));
}
"""

#: Give 0, and then how many of 32 entries are not taken.
left = elementwise(
    "raw uint32 taken",
    "int64 number",
    "number = i ? __popc(~taken[i - 1]) : 0",
    "sparsefmt_left_entries",
)

#: Gather columns and places of the entries that are not taken.
compact = elementwise(
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

#: Count pointers among the entries that are not taken.
rank = elementwise(
    "I e, raw uint32 taken, raw int64 before",
    "I place",
    "place = left_before(taken, before, e)",
    "sparsefmt_rank",
    preamble=_LEFT,
)
