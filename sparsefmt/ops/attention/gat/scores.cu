#include "engine/common.cuh"
#include "engine/rows.cuh"

// el[i, h] = <H[i, h, :], source[h, :]> and er[i, h] = <H[i, h, :], target[h, :]>. A sub-warp of LANES lanes owns a row and head.
template <typename T, int LANES, int VEC>
__global__ void __launch_bounds__(ROW_THREADS)
gat_scores(const T* __restrict__ H, const T* __restrict__ source, const T* __restrict__ target,
           accumulator<T>* __restrict__ el, accumulator<T>* __restrict__ er, long long items, int heads, int feat) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    const long long item = (blockIdx.x * (long long)ROW_THREADS + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    if (item >= items) return;
    const long long of_head = item % heads * feat;
    Sum left = 0, right = 0;
    for (int f = lane * VEC; f < feat; f += LANES * VEC) {
        const Vector h = read((const Vector*)(H + item * feat + f));
        const Vector a = read((const Vector*)(source + of_head + f)), b = read((const Vector*)(target + of_head + f));
#pragma unroll
        for (int v = 0; v < VEC; ++v) left += load(h, v) * load(a, v), right += load(h, v) * load(b, v);
    }
    left = over_lanes<LANES>(left, LANES), right = over_lanes<LANES>(right, LANES);
    if (lane == 0) el[item] = left, er[item] = right;
}

// out[i, h, :] = grad[i, h, :] + del[i, h] source[h, :] + der[i, h] target[h, :], where `out` may be `grad` itself and `del` comes
// in `slices` parts; and of equal shares of the rows, partial[share, 0, h, :] = sum_i del[i, h] H[i, h, :], partial[share, 1, h, :]
// with der and, where `result` is given, the gradient dO of the layer's result, partial[share, 2, h, :] = sum_i dO[i, h, :].
// A block owns a share and LANES * VEC features, of whatever heads; LANES lanes have a row.
template <typename T, int LANES, int VEC>
__global__ void __launch_bounds__(ROW_THREADS)
gat_scores_backward(const T* __restrict__ H, const T* grad, const accumulator<T>* __restrict__ del,
                    const accumulator<T>* __restrict__ der, const T* __restrict__ source, const T* __restrict__ target,
                    const T* __restrict__ result, T* out, accumulator<T>* __restrict__ partial, long long n, int shares,
                    int heads, int feat, int slices) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    constexpr int ROWS = ROW_THREADS / LANES, BATCH = 4;
    __shared__ Sum sums[3 * VEC][ROW_THREADS];

    const int share = blockIdx.x % shares, lane = threadIdx.x % LANES, parts = result ? 3 : 2;
    const long long width = (long long)heads * feat, first_column = blockIdx.x / shares * (long long)(LANES * VEC);
    const long long column = first_column + lane * VEC, each = (n + shares - 1) / shares;
    const long long begin = min(share * each, n), end = min(begin + each, n);
    Sum total[3 * VEC] = {};
    if (column < width) {
        const int head = column / feat;
        const Vector a = read((const Vector*)(source + column)), b = read((const Vector*)(target + column));
        for (long long first = begin + threadIdx.x / LANES; first < end; first += ROWS * BATCH) {
            Vector h[BATCH] = {}, g[BATCH] = {};
            Sum left[BATCH] = {}, right[BATCH] = {};
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const long long row = first + k * ROWS;
                if (row >= end) continue;
                h[k] = read((const Vector*)(H + row * width + column)), g[k] = *(const Vector*)(grad + row * width + column);
                right[k] = read(der + row * heads + head);
            }
            for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
                for (int k = 0; k < BATCH; ++k) {
                    const long long row = first + k * ROWS;
                    if (row < end) left[k] += read(del + (row * heads + head) * slices + slice);
                }
            }
#pragma unroll
            for (int k = 0; k < BATCH; ++k) {
                const long long row = first + k * ROWS;
                if (row >= end) continue;
                Vector word;
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    store(&word.v[v], load(g[k], v) + left[k] * load(a, v) + right[k] * load(b, v));
                    total[v] += left[k] * load(h[k], v), total[VEC + v] += right[k] * load(h[k], v);
                }
                *(Vector*)(out + row * width + column) = word;
            }
        }
        for (long long first = result ? begin + threadIdx.x / LANES : end; first < end; first += ROWS * BATCH) {
            Vector r[BATCH] = {};
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
                if (first + k * ROWS < end) r[k] = read((const Vector*)(result + (first + k * ROWS) * width + column));
#pragma unroll
            for (int k = 0; k < BATCH; ++k)
#pragma unroll
                for (int v = 0; v < VEC; ++v) total[2 * VEC + v] += load(r[k], v);
        }
    }
#pragma unroll
    for (int k = 0; k < 3 * VEC; ++k) sums[k][threadIdx.x] = total[k];
    __syncthreads();
    for (int i = threadIdx.x; i < parts * VEC * LANES; i += ROW_THREADS) {
        const int k = i / LANES, of = i % LANES;
        const long long to = first_column + of * VEC + k % VEC;
        if (to >= width) continue;
        Sum all = 0;
        for (int row = 0; row < ROWS; ++row) all += sums[k][row * LANES + of];
        partial[((long long)parts * share + k / VEC) * width + to] = all;
    }
}
