// Row-balanced features to dense ones, and back. Values are moved as integers of their size.
#include "engine/common.cuh"

__device__ inline long long thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline long long threads() { return (long long)gridDim.x * blockDim.x; }

// out[i, :] = 0, but out[i, columns[i, t]] = values[i, t]. A warp owns a row: while it is in the L2 the zeros are
// overwritten, so that memory is written once. 16 bytes a store where rows are aligned to them.
template <typename Value, typename Column>
__global__ void cbsr_to_dense(const Value* __restrict__ values, const Column* __restrict__ columns, Value* out,
                              long long n_rows, int feat, int k, int aligned) {
    const int lane = threadIdx.x % WARP;
    for (long long row = thread() / WARP; row < n_rows; row += threads() / WARP) {
        Value* y = out + row * feat;
        constexpr int VEC = 16 / sizeof(Value);
        const int packed = aligned ? feat / VEC : 0;
        for (int f = lane; f < packed; f += WARP) ((int4*)y)[f] = make_int4(0, 0, 0, 0);
        for (int f = packed * VEC + lane; f < feat; f += WARP) y[f] = 0;
        __syncwarp();  // orders the stores of its lanes
        for (int t = lane; t < k; t += WARP) y[columns[row * k + t]] = values[row * k + t];
    }
}

// out[i, t] = X[i, columns[i, t] - first] for the columns among the `width` from `first` on, which X has. A thread owns
// one of the n results.
template <typename Value, typename Column>
__global__ void dense_to_cbsr(const Value* __restrict__ X, const Column* __restrict__ columns, Value* out,
                              long long n, long long stride, int k, int first, int width) {
    for (long long e = thread(); e < n; e += threads()) {
        const unsigned column = (unsigned)columns[e] - first;
        if (column < (unsigned)width) out[e] = X[e / k * stride + column];
    }
}
