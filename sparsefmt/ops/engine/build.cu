// The CSR of edges in any order, and the cut of its rows, where the host knows no more than the numbers of edges and
// vertices. Between the first kernel and the second somebody sorts the keys, stably, and between the second and the
// third somebody adds up the words of the rows.
#include "engine/common.cuh"
#include "engine/build.cuh"

constexpr int BORDER_THREADS = 1024;  // of the one block that numbers borders
__device__ inline long long thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }

// keys[e] = major[e], the row of edge e; wrong ids, of `minor` too where it is given, are reported: 2 e + 1 names
// minor[e], 2 e + 2 major[e], and of several any one. own[i] is 1, where it is given: row i has no loop yet. A thread owns
// an edge, and a row.
template <typename Index, typename Key>
__global__ void edge_keys(const Index* __restrict__ major, const Index* __restrict__ minor, Key* __restrict__ keys,
                          int* __restrict__ own, Counts* counts, volatile Report* report, long long nnz,
                          long long n_major, long long n_minor) {
    const long long e = thread();
    if (e == 0) *counts = {0, 0, 0};
    if (own && e < n_major) own[e] = 1;
    if (e >= nnz) return;
    const Index id = major[e], other = minor ? minor[e] : Index(0);
    const Index key = within(id, n_major);
    if (key != id) report->fault = 2 * e + 2;
    else if (within(other, n_minor) != other) report->fault = 2 * e + 1;
    keys[e] = key;
}

// The row of an entry: the last one that begins no later.
template <typename Index> __device__ inline Index row_of(const Index* indptr, long long n_rows, long long entry) {
    long long low = 0, high = n_rows;
    while (high - low > 1) {
        const long long middle = (low + high) >> 1;
        if (indptr[middle] <= entry) low = middle; else high = middle;
    }
    return low;
}

// From sorted keys and the places that they had: indptr, the columns in CSR order, perm[k] = the edge of entry k, one over
// the entries of each row, own[i] less the loops of row i, and the words of the rows. `minor` are the ids of the edges' other ends or, TRANSPOSED, the
// indptr of a CSR with n_minor rows, whose rows they are. A thread owns an entry, and a row.
template <typename Index, typename Key, bool TRANSPOSED>
__global__ void edge_rows(const Key* __restrict__ keys, const long long* __restrict__ order,
                          const Index* __restrict__ minor, Index* __restrict__ indptr, Index* __restrict__ indices,
                          Index* __restrict__ perm, float* __restrict__ inverse, int* __restrict__ own,
                          long long* __restrict__ words, Counts* counts, long long nnz, long long n_rows,
                          long long n_minor) {
    const long long k = thread();
    if (k < nnz) {
        const long long e = order[k];
        const Index column = TRANSPOSED ? row_of(minor, n_minor, e) : within(minor[e], n_minor);
        perm[k] = e;
        indices[k] = column;
        if (e != k) counts->moved = 1;
        if (column == keys[k]) {
            counts->loops = 1;
            if (own) atomicSub(&own[column], 1);
        }
    }
    if (k <= n_rows) write_row(keys, indptr, inverse, words, counts, nnz, n_rows, k);
}

// start[c] is the row and entry where chunk c begins; long_rows are the long ones. `words` are added up. Where they are
// given, `scale` and `square` get GCN's factors; until then `square` has `own`. A thread owns a chunk, and a row.
template <typename Index>
__global__ void chunk_starts(const Index* __restrict__ indptr, const long long* __restrict__ words,
                             Place<Index>* __restrict__ start, Index* __restrict__ long_rows,
                             float* __restrict__ scale, float* __restrict__ square, long long n_rows,
                             long long n_starts, int wave) {
    const long long c = thread();
    if (scale && c < n_rows) write_unit_scales(scale, square, c, indptr[c + 1] - indptr[c], ((const int*)square)[c]);
    if (c < n_rows && longs_before(words, c) != longs_before(words, c + 1)) long_rows[longs_before(words, c)] = c;
    if (c < n_starts) start[c] = chunk_start(indptr, words, n_rows, wave, c);
}

// The numbers of the borders, by one block; it ends the report.
template <typename Index>
__global__ void __launch_bounds__(BORDER_THREADS)
chunk_borders(const Index* indptr, const long long* words, const Place<Index>* start, int* slot, int* cut,
              const Counts* counts, volatile Report* report, long long n_rows, int n_slots, int n_cuts, int wave) {
    __shared__ int of_warps[BORDER_THREADS / WARP];
    number_borders(of_warps, indptr, words, start, slot, cut, counts, report, n_rows, n_slots, n_cuts, wave);
}

// Tells the host that the stream has come so far.
template <typename Index> __global__ void reached(volatile Report* report) {
    __threadfence_system();
    report->done = 1;
}
