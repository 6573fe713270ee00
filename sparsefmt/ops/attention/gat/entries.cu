#include "engine/common.cuh"
#include "engine/rows.cuh"

constexpr int LANES = 8;  // of a sub-warp
constexpr int SUBWARPS = ROW_THREADS / LANES, OWN = CHUNKS / SUBWARPS;

// Calls of(row, col, entry, head) for all entries and heads. A sub-warp owns chunks of entries; its lanes take those
// of a piece with all heads in the order of memory.
template <typename Index, typename Of>
__device__ inline void for_entries(const Index* indptr, const Index* indices, const Place<Index>* start, long long nnz, int heads, const Of& of) {
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Pieces<Index> at_work(indptr, start, (long long)blockIdx.x * CHUNKS + subwarp * OWN, OWN, nnz);
    for (; at_work.more(); at_work.next()) {
        const Index row = at_work.from.row + at_work.row, first = at_work.from.entry + at_work.pos;
        int j = lane / heads, head = lane % heads;
        while (j < at_work.count()) {
            of(row, read(indices + (first + j)), first + j, head);
            j += LANES / heads, head += LANES % heads;
            if (head >= heads) head -= heads, ++j;
        }
    }
}

// P[e, h] = exp(leaky(el[j, h] + er[i, h] + edges[e, h]) - forward[i, h, 0]) / forward[i, h, 1] at the entries e = (i, j): the
// weights before dropout. With `loops`, where gat_balanced adds loops of its own, 0 at stored ones.
template <typename Sum, typename Index>
__global__ void __launch_bounds__(ROW_THREADS)
gat_attention(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
              const Sum* __restrict__ el, const Sum* __restrict__ er, const Sum* __restrict__ edges,
              const Pack<Sum, 4>* __restrict__ forward, Sum* __restrict__ out, long long nnz, int heads, int loops, Sum slope) {
    for_entries(indptr, indices, start, nnz, heads, [&](Index row, Index col, Index entry, int head) {
        const long long place = entry * (long long)heads + head, item = row * (long long)heads + head;
        Sum z = el[col * (long long)heads + head] + er[item];
        if (edges) z += edges[place];
        const Sum s = z > 0 ? z : slope * z;
        const Pack<Sum, 4> of = forward[item];  // the largest score, the sum of exponentials
        out[place] = loops && row == col ? Sum(0) : power(s - of.v[0]) / of.v[1];
    });
}

// dE[e, h] = leaky'(z) P[e, h] (M[e, h] dots[e, h] - D[i, h]) at the entries e = (i, j), where dots[e, h] is <dO[i, h], H[j, h]>.
template <typename T, typename Index>
__global__ void __launch_bounds__(ROW_THREADS)
gat_edge_gradient(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
                  const accumulator<T>* __restrict__ el, const accumulator<T>* __restrict__ edges,
                  const Pack<accumulator<T>, 4>* __restrict__ stats, const T* __restrict__ dots,
                  accumulator<T>* __restrict__ out, const unsigned long long* __restrict__ seed_at, unsigned long long seed,
                  long long nnz, int heads, int loops, accumulator<T> slope, accumulator<T> kept, unsigned drop) {
    using Sum = accumulator<T>;
    if (seed_at) seed = *seed_at;
    for_entries(indptr, indices, start, nnz, heads, [&](Index row, Index col, Index entry, int head) {
        const long long place = entry * (long long)heads + head;
        const Pack<Sum, 4> of = stats[row * (long long)heads + head];  // er, the largest score, D, 1 / sum of exponentials
        Sum z = el[col * (long long)heads + head] + of.v[0];
        if (edges) z += edges[place];
        const Sum s = z > 0 ? z : slope * z;
        const Sum p = power(s - of.v[1]) * of.v[3];
        const bool stays = !drop || philox(seed, entry, head) >= drop;
        const Sum change = (stays ? kept * load(dots[place]) : Sum(0)) - of.v[2];
        out[place] = loops && row == col ? Sum(0) : (z > 0 ? p : slope * p) * change;
    });
}
