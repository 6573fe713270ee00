// The CSR of edges, and that of its transpose, in one launch of few blocks that wait for each other: where there are so few
// edges that launches take longer than all their work. The arrays are those of build.cu, bit by bit.
#include "engine/common.cuh"
#include "engine/build.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int DIGIT = 8;  // bits that a pass of the sort goes by, at most: a thread for each value

// Where the arrays of one CSR lie, in bytes from the beginning of its memory, and the most there can be of each; as in
// ops/engine/build.py. Keys have at most so many bits.
struct Layout {
    long long start, indptr, indices, perm, inverse, scale, square, long_rows, slot, cut, n_starts;
    int n_slots, n_cuts, bits, unused;
};

// The arrays themselves.
template <typename Index> struct Half {
    Counts* counts;
    Place<Index>* start;
    Index *indptr, *indices, *perm, *long_rows;
    float* inverse;
    int *slot, *cut;
    long long* words;
    Report* report;
    long long n_rows, n_starts;
    int n_slots, n_cuts, bits;

    __device__ Half(const Layout& at, char* begin, long long n_rows, Report* report, long long* words)
        : counts((Counts*)begin), start((Place<Index>*)(begin + at.start)), indptr((Index*)(begin + at.indptr)),
          indices((Index*)(begin + at.indices)), perm((Index*)(begin + at.perm)),
          long_rows((Index*)(begin + at.long_rows)), inverse((float*)(begin + at.inverse)),
          slot((int*)(begin + at.slot)), cut((int*)(begin + at.cut)), words(words), report(report), n_rows(n_rows),
          n_starts(at.n_starts), n_slots(at.n_slots), n_cuts(at.n_cuts), bits(at.bits) {}
};

struct Pairs {
    int *keys, *values;
};

struct Shared {
    int counts[THREADS];           // of each digit, then where its next entry goes
    int of_warps[WARPS][THREADS];  // likewise, of each warp
    long long sums[WARPS];
    int borders[WARPS];
};

// All blocks of the launch, and the part [begin, end) of the entries that this one owns. `progress` has the latest step of
// each block. Steps only grow from launch to launch: words that an earlier launch left are below every step of this one.
struct Blocks {
    volatile long long* progress;
    long long step;
    int begin, end;

    // Waits for all blocks; what they have written before, this one reads behind it.
    __device__ void wait() {
        ++step;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            progress[blockIdx.x] = step;
        }
        for (int b = threadIdx.x; b < gridDim.x; b += THREADS)
            while (progress[b] < step) {}
        __threadfence();
        __syncthreads();
    }
};

// The sum of the values of the threads before this one, and of all.
__device__ inline long long sum_before(Shared& shared, long long value, long long& all) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    long long upto = value;
    for (int step = 1; step < WARP; step *= 2) {
        const long long other = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == WARP - 1) shared.sums[warp] = upto;
    __syncthreads();
    long long before = 0;
    all = 0;
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += shared.sums[w];
        all += shared.sums[w];
    }
    __syncthreads();
    return before + upto - value;
}

// Sorts pairs by the lowest `bits` of their keys, stably; gives where they are then. `counts` has THREADS for each block.
__device__ inline Pairs sorted(Blocks& blocks, Shared& shared, Pairs from, Pairs to, int* counts, int bits) {
    const int passes = bits > DIGIT ? (bits + DIGIT - 1) / DIGIT : 1, width = (bits + passes - 1) / passes;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, mine = blockIdx.x * THREADS + threadIdx.x;
    for (int pass = 0; pass < passes; ++pass) {
        const auto digit_of = [&](int key) { return key >> pass * width & ((1 << width) - 1); };
        shared.counts[threadIdx.x] = 0;
        __syncthreads();
        for (int e = blocks.begin + threadIdx.x; e < blocks.end; e += THREADS)
            atomicAdd(&shared.counts[digit_of(from.keys[e])], 1);
        __syncthreads();
        counts[mine] = shared.counts[threadIdx.x];
        blocks.wait();
        long long before = 0, total = 0, all;
        for (int b = 0; b < gridDim.x; ++b) {
            const int count = counts[b * THREADS + threadIdx.x];
            total += count;
            if (b < blockIdx.x) before += count;
        }
        before += sum_before(shared, total, all);
        shared.counts[threadIdx.x] = before;
        for (int begin = blocks.begin; begin < blocks.end; begin += THREADS) {  // a tile of one entry a thread
            for (int w = 0; w < WARPS; ++w) shared.of_warps[w][threadIdx.x] = 0;
            __syncthreads();
            const int e = begin + threadIdx.x;
            const bool there = e < blocks.end;
            const int key = there ? from.keys[e] : 0, digit = there ? digit_of(key) : THREADS;
            const unsigned alike = __match_any_sync(FULL_WARP, digit);
            const int rank = __popc(alike & ((1u << lane) - 1));
            if (there && rank == 0) shared.of_warps[warp][digit] = __popc(alike);
            __syncthreads();
            int next = shared.counts[threadIdx.x];
            for (int w = 0; w < WARPS; ++w) {
                const int count = shared.of_warps[w][threadIdx.x];
                shared.of_warps[w][threadIdx.x] = next;
                next += count;
            }
            shared.counts[threadIdx.x] = next;
            __syncthreads();
            if (there) {
                const int place = shared.of_warps[warp][digit] + rank;
                to.keys[place] = key, to.values[place] = from.values[e];
            }
            __syncthreads();
        }
        blocks.wait();
        const Pairs other = from;
        from = to, to = other;
    }
    return from;
}

// Adds up the words of rows from `begin` to `end`; `sum` is that of those before.
template <typename Index>
__device__ inline void add_up(Shared& shared, const Half<Index>& half, long long begin, long long end, long long sum) {
    for (long long from = begin; from < end; from += THREADS) {
        const long long i = from + threadIdx.x;
        const long long word = i < end ? half.words[i] : 0;
        long long all;
        const long long before = sum_before(shared, word, all);
        if (i < end) half.words[i] = sum + before + word;
        sum += all;
    }
}

// Both halves, or with `count` 1 the rows alone. `scratch` has two words for each block, one for each row and column and
// two more, then five ints for each edge and THREADS for each block. A block owns `share` edges. The layouts, `share` and
// the grid may be those of a few more rows, columns and edges than there are.
template <typename Index>
__global__ void __launch_bounds__(THREADS)
build_small(const Index* __restrict__ target, const Index* __restrict__ source, char* of_rows, Report* report,
            char* of_columns, Report* other_report, long long* scratch, long long* progress,
            long long step, long long n_rows, long long n_cols, int nnz, int share, const __grid_constant__ Layout at,
            const __grid_constant__ Layout other, int wave, int count) {
    __shared__ Shared shared;
    long long* const sums = scratch;
    long long* const words = sums + 2 * gridDim.x;
    int* const room = (int*)(words + n_rows + n_cols + 2);
    const Half<Index> rows(at, of_rows, n_rows, report, words);
    const Half<Index> columns(other, of_columns, n_cols, other_report, words + n_rows + 1);
    const int begin = min((long long)blockIdx.x * share, (long long)nnz), end = min((long long)begin + share, (long long)nnz);
    Blocks blocks{progress, step, begin, end};
    Pairs first{room, room + nnz}, second{room + 2LL * nnz, room + 3LL * nnz};
    int* const row_of_entry = room + 4LL * nnz;
    float *const scale = (float*)(of_rows + at.scale), *const square = (float*)(of_rows + at.square);
    int* const own = (int*)square;  // 1 less the loops of each row, until its factors are written
    int* const counts = room + 5LL * nnz;
    const long long thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;

    if (thread == 0) *rows.counts = {0, 0, 0};
    if (thread == 0 && count > 1) *columns.counts = {0, 0, 0};
    for (long long i = thread; i < rows.n_rows; i += threads) own[i] = 1;
    for (int e = begin + threadIdx.x; e < end; e += THREADS) {
        const Index id = target[e], key = within(id, rows.n_rows);
        if (key != id) ((volatile Report*)rows.report)->fault = 2LL * e + 2;
        else if (within(source[e], columns.n_rows) != source[e]) ((volatile Report*)rows.report)->fault = 2LL * e + 1;
        first.keys[e] = key, first.values[e] = e;
    }
    __syncthreads();
    first = sorted(blocks, shared, first, second, counts, rows.bits);
    second = first.keys == room ? second : Pairs{room, room + nnz};
    for (int k = begin + threadIdx.x; k < end; k += THREADS) {
        const int e = first.values[k], row = first.keys[k];
        const Index column = within(source[e], columns.n_rows);
        rows.indices[k] = column, rows.perm[k] = e, row_of_entry[k] = row;
        if (e != k) rows.counts->moved = 1;
        if (column == row) rows.counts->loops = 1, atomicSub(&own[row], 1);
        first.keys[k] = column, first.values[k] = k;  // of the transpose, whose edges these entries are
    }
    blocks.wait();
    for (long long i = thread; i <= rows.n_rows; i += threads)
        write_row(row_of_entry, rows.indptr, rows.inverse, rows.words, rows.counts, nnz, rows.n_rows, i);
    if (count > 1) {
        second = sorted(blocks, shared, first, second, counts, columns.bits);
        for (int k = begin + threadIdx.x; k < end; k += THREADS) {
            const int e = second.values[k];
            columns.indices[k] = row_of_entry[e], columns.perm[k] = e;
            if (e != k) columns.counts->moved = 1;
            if (row_of_entry[e] == second.keys[k]) columns.counts->loops = 1;
        }
        for (long long i = thread; i <= columns.n_rows; i += threads)
            write_row(second.keys, columns.indptr, columns.inverse, columns.words, columns.counts, nnz, columns.n_rows, i);
    }
    blocks.wait();

    for (int h = 0; h < count; ++h) {
        const Half<Index>& half = h ? columns : rows;
        const long long part = (half.n_rows + gridDim.x) / gridDim.x, from = min(blockIdx.x * part, half.n_rows + 1);
        long long sum = 0, all;
        for (long long i = from + threadIdx.x; i < min(from + part, half.n_rows + 1); i += THREADS) sum += half.words[i];
        sum_before(shared, sum, all);
        if (threadIdx.x == 0) sums[h * gridDim.x + blockIdx.x] = all;
    }
    blocks.wait();
    for (int h = 0; h < count; ++h) {
        const Half<Index>& half = h ? columns : rows;
        const long long part = (half.n_rows + gridDim.x) / gridDim.x, from = min(blockIdx.x * part, half.n_rows + 1);
        long long sum = 0;
        for (int b = 0; b < blockIdx.x; ++b) sum += sums[h * gridDim.x + b];
        add_up(shared, half, from, min(from + part, half.n_rows + 1), sum);
    }
    blocks.wait();
    for (int h = 0; h < count; ++h) {
        const Half<Index>& half = h ? columns : rows;
        for (long long i = thread; i < half.n_rows; i += threads) {
            if (h == 0) write_unit_scales(scale, square, i, half.indptr[i + 1] - half.indptr[i], own[i]);
            if (longs_before(half.words, i) != longs_before(half.words, i + 1)) half.long_rows[longs_before(half.words, i)] = i;
        }
        for (long long c = thread; c < half.n_starts; c += threads)
            half.start[c] = chunk_start(half.indptr, half.words, half.n_rows, wave, c);
    }
    blocks.wait();
    for (int h = 0; h < count; ++h) {
        const Half<Index>& half = h ? columns : rows;
        if (blockIdx.x == h % gridDim.x)
            number_borders(shared.borders, half.indptr, half.words, half.start, half.slot, half.cut, half.counts,
                           half.report, half.n_rows, half.n_slots, half.n_cuts, wave);
    }
}
