#include "engine/common.cuh"

constexpr int LANES = 8;  // of a sub-warp: one for each entry of a piece
constexpr int SDDMM_THREADS = 128, SUBWARPS = SDDMM_THREADS / LANES, OWN = CHUNKS / SUBWARPS;
static_assert(LANES == PIECE, "a lane stores one entry of a piece");

// The sum over the lanes of a sub-warp of partial[lane]: 7 shuffles for 8 sums.
template <typename Sum> __device__ inline Sum total_of_own_entry(Sum (&partial)[PIECE]) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int step = PIECE / 2; step > 0; step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int j = 0; j < step; ++j) {
            const Sum kept = upper ? partial[j + step] : partial[j], sent = upper ? partial[j] : partial[j + step];
            partial[j] = kept + __shfl_xor_sync(FULL_WARP, sent, step, LANES);
        }
    }
    return partial[0];
}

// s[e, h] = r[i] * c[j] * sum_f X[i, h, f] * Y[j, h, f] at the entries e = (i, j), over the features
// [from, to) of each head; added to what s holds if those are not the first. With `perm` s[perm[e], h].
// A sub-warp owns chunks of entries and one head, and takes a piece at a time: one row of X stays in
// registers while the rows of Y of all its entries are in flight. Every s[e, h] is written by one lane.
template <typename T, typename Index, int VEC>
__global__ void __launch_bounds__(SDDMM_THREADS, VEC * sizeof(T) < 16 ? 8 : 7)
sddmm_csr_balanced(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                   const Place<Index>* __restrict__ start, const T* __restrict__ X, const T* __restrict__ Y,
                   const accumulator<T>* __restrict__ row_scale, const accumulator<T>* __restrict__ col_scale,
                   const Index* __restrict__ perm, T* __restrict__ s, long long nnz, unsigned x_stride,
                   unsigned y_stride, unsigned blocks, int heads, int feat, int from, int to) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    const unsigned block = blockIdx.x % blocks, head = blockIdx.x / blocks;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + subwarp * OWN, OWN, nnz);
    const T *x_head = X + (long long)head * feat, *y_head = Y + (long long)head * feat;

    Index own_col = read(indices + at_work.entry(lane));
    while (__any_sync(FULL_WARP, at_work.more())) {
        const int count = at_work.count();
        // A sub-warp that is done goes along for the shuffles, with any row.
        const Index row = at_work.more() ? at_work.from.row + at_work.row : 0;
        const Index entry = at_work.entry(lane), col = own_col, place = perm ? read(perm + entry) : entry;
        Index cols[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) cols[j] = __shfl_sync(FULL_WARP, own_col, j, LANES);
        at_work.next();
        own_col = read(indices + at_work.entry(lane));

        Sum partial[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) partial[j] = 0;
        for (int slice = from; slice < to; slice += LANES * VEC) {
            const int f = min(slice + lane * VEC, to - VEC);
            const char *x_slice = (const char*)(x_head + f), *y_slice = kept((const char*)(y_head + f));
            const Vector x = read((const Vector*)(x_slice + at(row, x_stride)));
            Vector y[PIECE];
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
                y[j] = read((const Vector*)(y_slice + at(cols[j], y_stride)));
            if (slice + lane * VEC >= to) continue;
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
#pragma unroll
                for (int v = 0; v < VEC; ++v) partial[j] += load(x, v) * load(y[j], v);
        }
        Sum total = total_of_own_entry(partial);
        if (lane >= count) continue;
        if (row_scale) total *= row_scale[row];
        if (col_scale) total *= col_scale[col];
        T* const to = s + place * (long long)heads + head;
        store(to, from > 0 ? load(*to) + total : total);
    }
}

// dA[e] = r[i] * c[j] * sum_f [arg[i, f] == e] * grad[i, f] * X[j, f] at the entries e = (i, j): the gradient
// of the values of A where only the largest (or smallest) of each row and feature counts. Cut as above.
template <typename T, typename Index>
__global__ void __launch_bounds__(SDDMM_THREADS)
spmm_arg_da(const Index* __restrict__ indptr, const Index* __restrict__ indices,
            const Place<Index>* __restrict__ start, const Index* __restrict__ arg, const T* __restrict__ grad,
            const T* __restrict__ X, const accumulator<T>* __restrict__ row_scale,
            const accumulator<T>* __restrict__ col_scale, T* __restrict__ dA, long long nnz,
            unsigned x_stride, int feat) {
    using Sum = accumulator<T>;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Pieces<Index> at_work(indptr, start, (long long)blockIdx.x * CHUNKS + subwarp * OWN, OWN, nnz);
    for (; __any_sync(FULL_WARP, at_work.more()); at_work.next()) {
        const int count = at_work.count();
        const Index row = at_work.from.row + at_work.row;
        const Index first = at_work.from.entry + at_work.pos;
        Sum partial[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) partial[j] = 0;
        for (int f = lane; f < feat && count > 0; f += LANES) {
            const long long place = row * (long long)feat + f;
            const Index winner = arg[place] - first;
            if (winner < 0 || winner >= count) continue;
            const T* x = (const T*)((const char*)X + at(indices[first + winner], x_stride));
            const Sum product = load(grad[place]) * load(x[f]);
#pragma unroll
            for (int j = 0; j < PIECE; ++j) partial[j] += j == winner ? product : Sum(0);
        }
        Sum total = total_of_own_entry(partial);
        if (lane >= count) continue;
        if (row_scale) total *= row_scale[row];
        if (col_scale) total *= col_scale[indices[first + lane]];
        store(dA + first + lane, total);
    }
}
