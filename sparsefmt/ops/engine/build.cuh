// What both ways to build a CSR of edges share: checked ids, the word of a row, and the cut of the rows into chunks as
// formats/chunks.py makes it. Memory is laid out for the most blocks that rows of so many entries can need; those
// beyond are empty.
#include "engine/degrees.cuh"

constexpr int PIECES = 8, LONG_ROW = 2048;  // as in formats/chunks.py
// A word of a row, for one scan: its pieces in the low bits, and above them whether it is long.
constexpr int LONG_BIT = 40;
constexpr long long PIECES_MASK = (1LL << LONG_BIT) - 1;

// What the host reads without a wait, in its own memory; `done` is written last.
struct Report {
    long long done, fault, blocks, cuts, longs, longest, moved, loops;
};
// What the kernels find for it: entries of the longest row; whether an entry is not at its edge's place, or a loop.
struct Counts {
    unsigned long long longest;
    int moved, loops;
};

// An id that exists: a wrong one names vertex 0, so that nothing reads or writes foreign memory before it is reported.
template <typename Index> __device__ inline Index within(Index id, long long n) { return id < 0 || id >= n ? Index(0) : id; }

// The first place whose key is not below `key`.
template <typename Key> __device__ inline long long first_of(const Key* keys, long long nnz, long long key) {
    long long low = 0, high = nnz;
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (keys[middle] < key) low = middle + 1; else high = middle;
    }
    return low;
}

// Writes what thread `k` owns of a row: where it begins, one over its entries, and its word. `keys` are sorted.
template <typename Index, typename Key>
__device__ inline void write_row(const Key* keys, Index* indptr, float* inverse, long long* words, Counts* counts,
                                 long long nnz, long long n_rows, long long k) {
    const long long begin = first_of(keys, nnz, k);
    indptr[k] = begin;
    if (k == 0) words[0] = 0;
    if (k == n_rows) return;
    const unsigned long long length = first_of(keys, nnz, k + 1) - begin;
    words[k + 1] = (length > PIECE ? (length + PIECE - 1) / PIECE : 1) | (length > LONG_ROW ? 1LL << LONG_BIT : 0);
    inverse[k] = 1.0 / (length > 1 ? length : 1);
    if (length > *(volatile unsigned long long*)&counts->longest) atomicMax(&counts->longest, length);
}

// How many blocks rows of so many pieces are cut into: as formats/chunks.py counts them.
__device__ inline long long block_count(long long total, int wave) {
    const long long waves = rint((double)total / ((double)PIECES * CHUNKS * wave));
    return max(min(max(waves, 1LL) * wave, total / (2 * CHUNKS)), 1LL);
}

// Pieces before a row, and its number among the long ones.
__device__ inline long long pieces_before(const long long* words, long long row) { return words[row] & PIECES_MASK; }
__device__ inline long long longs_before(const long long* words, long long row) { return words[row] >> LONG_BIT; }

// Where chunk c begins; `words` are added up.
template <typename Index>
__device__ inline Place<Index> chunk_start(const Index* indptr, const long long* words, long long n_rows, int wave,
                                           long long c) {
    const auto row_behind = [&](long long piece) {  // the first that begins behind it
        long long low = 0, high = n_rows + 1;
        while (low < high) {
            const long long middle = (low + high) >> 1;
            if (pieces_before(words, middle) > piece) high = middle; else low = middle + 1;
        }
        return low;
    };
    const long long total = pieces_before(words, n_rows), blocks = block_count(total, wave), block = c / CHUNKS;
    const auto border = [&](long long at) {
        const long long nominal = at * total / blocks;
        const long long following = pieces_before(words, row_behind(nominal - 1));
        return following - nominal > LONG_ROW / PIECE ? nominal : following;
    };
    long long piece = total;
    if (block < blocks) {
        const long long from = border(block), to = border(block + 1);
        const long long share = (to - from + CHUNKS - 1) / CHUNKS;
        piece = min(from + share * (c % CHUNKS), to);
    }
    const long long row = row_behind(piece) - 1;
    return {Index(row), Index(indptr[row] + (piece - pieces_before(words, row)) * PIECE)};
}

// slot[b] numbers the borders of blocks that cut a row, -1 elsewhere; cut[s] is the block behind the s-th of them, and
// behind the last one a block that is empty. A whole block of WARPS warps, whose threads own a border each at a time;
// it ends the report. The arrays are not __restrict__: this block, or one before it, may just have written them.
template <int WARPS, typename Index>
__device__ inline void number_borders(int (&of_warps)[WARPS], const Index* indptr, const long long* words,
                                      const Place<Index>* start, int* slot, int* cut, const Counts* counts,
                                      volatile Report* report, long long n_rows, int n_slots, int n_cuts, int wave) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int found = 0;
    for (int begin = 0; begin < n_slots; begin += WARPS * WARP) {
        const int b = begin + threadIdx.x;
        bool cuts = false;
        if (b < n_slots) {
            const Place<Index> at = start[(long long)b * CHUNKS];
            cuts = at.entry > indptr[at.row];
        }
        const unsigned of_warp = __ballot_sync(FULL_WARP, cuts);
        if (lane == 0) of_warps[warp] = __popc(of_warp);
        __syncthreads();
        int before = found;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += of_warps[w];
            found += of_warps[w];
        }
        const int number = before + __popc(of_warp & ((1u << lane) - 1));
        if (b < n_slots) slot[b] = cuts ? number : -1;
        if (cuts) cut[number] = b;
        __syncthreads();
    }
    for (int s = found + threadIdx.x; s < n_cuts; s += WARPS * WARP) cut[s] = n_slots - 1;
    __syncthreads();  // other streams read all of it once it is done
    if (threadIdx.x) return;
    report->blocks = block_count(pieces_before(words, n_rows), wave);
    report->cuts = found, report->longs = longs_before(words, n_rows);
    report->longest = counts->longest, report->moved = counts->moved, report->loops = counts->loops;
    __threadfence_system();
    report->done = 1;
}
