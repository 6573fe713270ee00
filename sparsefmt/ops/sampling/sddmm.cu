#include "engine/common.cuh"
#include "engine/rows.cuh"
#include "sampling/rows.cuh"
#include "sampling/spmm.cuh"

// s[e] = r[i] * c[j] * sum_f X[i, f] * Y[j, f] at the sampled entries e = (i, j), with the factors of spmm_sampled: the
// gradient of the values of A. Cut as there, but a sub-warp goes through all features of a piece.
template <typename T, typename Index, int VEC, int STRATEGY>
__global__ void __launch_bounds__(ROW_THREADS, 7)
sddmm_sampled(const Index* __restrict__ indptr, const Index* __restrict__ indices,
              const accumulator<T>* __restrict__ row_scale, const accumulator<T>* __restrict__ col_scale,
              const T* __restrict__ X, const T* __restrict__ Y, T* __restrict__ s,
              const long long* __restrict__ seed_at, unsigned long long seed, long long n_rows, unsigned x_stride, unsigned y_stride,
              int width, int rows, int feat, int flags) {
    constexpr int LANES = PIECE, SUBWARPS = ROW_THREADS / LANES;
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    __shared__ BlockRows<Index> block_rows;

    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (seed_at) seed = *seed_at;
    const RowShape<Index> shape{indptr, nullptr, n_rows, rows, width, 0};
    Work<Index, STRATEGY, false> at_work(block_rows, shape, blockIdx.x, subwarp, SUBWARPS, seed);
    const RowFactor<Sum> factor_of{row_scale, flags};

    Index next_entry = 0, next_col = 0;  // any that exist: an empty row has none
    const auto fetch = [&]() {
        if (at_work.taken) next_entry = at_work.entry(lane), next_col = read(indices + next_entry);
    };
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        const int count = at_work.count();
        const Index entry = next_entry, col = next_col;
        const long long row = at_work.first_row + at_work.row;
        const Sum factor = count > 0 ? factor_of(row, at_work.length, at_work.taken) : Sum(0);
        const char* x_row = (const char*)X + (count > 0 ? at(row, x_stride) : 0);
        at_work.next();
        fetch();

        Sum partial[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) partial[j] = 0;
        for (int slice = 0; slice < feat; slice += LANES * VEC) {
            const int f = min(slice + lane * VEC, feat - VEC);
            const Vector x = read((const Vector*)(x_row + f * sizeof(T)));
            const char* y_slice = kept((const char*)(Y + f));
            Vector y[PIECE];
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
                y[j] = read((const Vector*)(y_slice + at(__shfl_sync(FULL_WARP, col, j, LANES), y_stride)));
            if (slice + lane * VEC >= feat) continue;
#pragma unroll
            for (int j = 0; j < PIECE; ++j)
#pragma unroll
                for (int v = 0; v < VEC; ++v) partial[j] += load(x, v) * load(y[j], v);
        }
        Sum total[1];
        totals<LANES>(partial, total);
        if (lane >= count) continue;
        if (col_scale) total[0] *= col_scale[col];
        store(s + entry, total[0] * factor);
    }
}
