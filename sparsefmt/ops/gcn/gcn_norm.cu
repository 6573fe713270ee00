// The symmetric normalisation of GCN, b[e] = s[i] a[e] s[j] with s = d^-1/2, and its backward. d[i] is the sum of the
// row's values, plus 1 for a vertex without a loop where loops are added (`has_loop` is given).
#include "engine/common.cuh"
#include "engine/degrees.cuh"

__device__ inline long long thread() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline long long threads() { return (long long)gridDim.x * blockDim.x; }

// What degrees add up in: values in float32 at least, entries without values as integers, exactly.
template <typename T, typename Index, bool WEIGHTED> struct Degree { using type = accumulator<T>; };
template <typename T> struct Degree<T, int, false> { using type = unsigned; };
template <typename T> struct Degree<T, long long, false> { using type = unsigned long long; };

// d^-1/2, and 0 where d <= 0.
template <typename Sum> __device__ inline Sum scale_of(Sum d) { return d <= 0 ? Sum(0) : rsqrt(d); }

template <typename Sum, typename D, typename Index>
__device__ inline Sum scale_at(const D* degree, const unsigned char* has_loop, Index vertex) {
    return scale_of(Sum(degree[vertex]) + Sum(has_loop && !has_loop[vertex]));
}

// totals[key] += value, of each lane with a key that is not negative. The lanes of a run of equal keys add up first,
// since atomics at one place wait for each other: a COO may be sorted by rows. The whole warp calls it.
template <bool COUNTS, typename Total, typename Index>
__device__ inline void add_runs(Total* totals, Index key, Total value) {
    const int lane = threadIdx.x % WARP;
    const Index before = __shfl_up_sync(FULL_WARP, key, 1);
    const bool first = lane == 0 || before != key;
    const unsigned firsts = __ballot_sync(FULL_WARP, first);
    const unsigned above = firsts >> lane >> 1;
    const int rest = above ? __ffs(above) : WARP - lane;  // lanes to the end of the run, this one included
    if constexpr (COUNTS) {
        value = rest;
    } else if (firsts != FULL_WARP) {
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const Total other = __shfl_down_sync(FULL_WARP, value, step);
            if (step < rest) value += other;
        }
    }
    if (first && key >= 0) atomicAdd(totals + key, value);
}

// degree[i] += a[e], and has_loop[i] = 1 for a loop; both zeroed before. A thread has an entry at a time.
template <typename T, typename Index, bool WEIGHTED>
__global__ void gcn_degrees(const Index* __restrict__ row, const Index* __restrict__ col, const T* __restrict__ data,
                            typename Degree<T, Index, WEIGHTED>::type* degree, unsigned char* has_loop,
                            long long nnz) {
    for (long long e = thread(); e - threadIdx.x % WARP < nnz; e += threads()) {
        const bool here = e < nnz;
        const Index i = here ? row[e] : Index(-1);
        if (here && has_loop && col[e] == i) has_loop[i] = 1;
        using D = typename Degree<T, Index, WEIGHTED>::type;
        if constexpr (WEIGHTED) add_runs<false>(degree, i, here ? load(data[e]) : D(0));
        else add_runs<true>(degree, i, D(0));
    }
}

// out[e] = s[i] a[e] s[j], then the n loops, 0 for a vertex that has one; with them row and col are copied.
template <typename T, typename Index, bool WEIGHTED>
__global__ void gcn_scaled(const Index* __restrict__ row, const Index* __restrict__ col, const T* __restrict__ data,
                           const typename Degree<T, Index, WEIGHTED>::type* __restrict__ degree,
                           const unsigned char* __restrict__ has_loop, Index* out_row, Index* out_col, T* out,
                           long long nnz, long long n) {
    using Sum = accumulator<T>;
    const long long end = nnz + (has_loop ? n : 0);
    for (long long e = thread(); e < end; e += threads()) {
        const bool loop = e >= nnz;
        const Index i = loop ? Index(e - nnz) : row[e], j = loop ? i : col[e];
        const Sum s = scale_at<Sum>(degree, has_loop, i);
        if (loop) {
            store(out + e, has_loop[i] ? Sum(0) : s * s);
        } else {
            const Sum a = WEIGHTED ? load(data[e]) : Sum(1);
            store(out + e, s * a * scale_at<Sum>(degree, has_loop, j));
        }
        if (has_loop) {
            out_row[e] = i;
            out_col[e] = j;
        }
    }
}

// The row of a CSR that a thread has a part in, -1 for none: a block has a long one, TEAM lanes each of the others.
constexpr int TEAM = 8;
struct Owned {
    long long row, begin, end;
    int lane, lanes;
};
template <typename Index>
__device__ inline Owned owned_row(const Index* indptr, const Index* long_rows, long long n_rows, int n_long,
                                  int long_row) {
    const bool whole = blockIdx.x < n_long;
    const long long team = ((long long)blockIdx.x - n_long) * (blockDim.x / TEAM) + threadIdx.x / TEAM;
    const Owned none{-1, 0, 0, 0, TEAM};
    Owned own{team, 0, 0, (int)threadIdx.x % TEAM, TEAM};
    if (whole) own = {(long long)long_rows[blockIdx.x], 0, 0, (int)threadIdx.x, (int)blockDim.x};
    if (own.row >= n_rows) return none;
    own.begin = indptr[own.row], own.end = indptr[own.row + 1];
    return !whole && n_long && own.end - own.begin > long_row ? none : own;
}

// scale[i] = s[i] and has_loop[i] of each row of a CSR, in a fixed order of entries.
template <typename T, typename Index>
__global__ void gcn_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                         const T* __restrict__ data, const Index* __restrict__ long_rows, accumulator<T>* scale,
                         unsigned char* has_loop, long long n_rows, int n_long, int long_row) {
    using Sum = accumulator<T>;
    __shared__ Sum sums[WARP];
    const Owned own = owned_row(indptr, long_rows, n_rows, n_long, long_row);
    Sum sum = 0;
    int loop = 0;
#pragma unroll 4
    for (long long e = own.begin + own.lane; e < own.end; e += own.lanes) {
        if (data) sum += load(data[e]);
        if (has_loop) loop |= indices[e] == own.row;
    }
    const bool whole = own.lanes > TEAM;  // the same in all of a block
    for (int step = (whole ? WARP : TEAM) / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if (whole) {
        loop = __syncthreads_or(loop);
        if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = sum;
        __syncthreads();
        sum = 0;
        for (int warp = 0; warp < blockDim.x / WARP; ++warp) sum += sums[warp];
    } else {
        for (int step = TEAM / 2; step > 0; step /= 2) loop |= __shfl_xor_sync(FULL_WARP, loop, step);
    }
    if (own.lane || own.row < 0) return;
    if (!data) sum = Sum(own.end - own.begin);
    if (has_loop) has_loop[own.row] = loop;
    scale[own.row] = scale_of(sum + Sum(has_loop && !loop));
}

// s[i] and own[i] s[i]^2 of the rows of a CSR whose entries count 1 each, computed in double; own[i] is 1 for a row
// without a loop, 0 for one with a loop, and takes all but one of several away. A warp owns a row.
template <typename T, typename Index>
__global__ void gcn_unit_scales(const Index* __restrict__ indptr, const Index* __restrict__ indices, T* scale,
                                T* square, long long n_rows) {
    const long long i = thread() / WARP;
    if (i >= n_rows) return;
    const long long begin = indptr[i], end = indptr[i + 1];
    long long own = threadIdx.x % WARP == 0;
#pragma unroll 4
    for (long long e = begin + threadIdx.x % WARP; e < end; e += WARP) own -= indices[e] == i;
    for (int lanes = WARP / 2; lanes; lanes /= 2) own += __shfl_xor_sync(FULL_WARP, own, lanes);
    if (threadIdx.x % WARP) return;
    write_unit_scales(scale, square, i, end - begin, own);
}

// As gcn_scaled; the loop of a row comes behind its entries. Without loops, or places for indices, only values are
// written.
template <typename T, typename Index>
__global__ void gcn_rows_scaled(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                                const T* __restrict__ data, const Index* __restrict__ long_rows,
                                const accumulator<T>* __restrict__ scale, const unsigned char* __restrict__ has_loop,
                                Index* out_indptr, Index* out_indices, T* out, long long n_rows, int n_long,
                                int long_row) {
    using Sum = accumulator<T>;
    const Owned own = owned_row(indptr, long_rows, n_rows, n_long, long_row);
    if (own.row < 0) return;
    const Sum s = scale[own.row];
    const long long shift = has_loop ? own.row : 0;
    const bool indexed = has_loop && out_indices;
#pragma unroll 4
    for (long long e = own.begin + own.lane; e < own.end; e += own.lanes) {
        const Index j = indices[e];
        store(out + e + shift, s * (data ? load(data[e]) : Sum(1)) * scale[j]);
        if (indexed) out_indices[e + shift] = j;
    }
    if (!has_loop || own.lane) return;
    store(out + own.end + shift, has_loop[own.row] ? Sum(0) : s * s);
    if (!indexed) return;
    out_indptr[own.row] = own.begin + shift;
    if (own.row == n_rows - 1) out_indptr[n_rows] = own.end + n_rows;
    out_indices[own.end + shift] = own.row;
}

// slope[k] = the gradient of s[k], zeroed before: the sum of g a s[j] over row k, of g a s[i] over column k, and 2 s g
// of the loop that was added. `indptr` is given for a CSR, in whose result a loop lies behind each row.
template <typename T, typename Index, bool WEIGHTED>
__global__ void gcn_slopes(const Index* __restrict__ row, const Index* __restrict__ col,
                           const Index* __restrict__ indptr, const T* __restrict__ data, const T* __restrict__ grad,
                           const typename Degree<T, Index, WEIGHTED>::type* __restrict__ degree,
                           const unsigned char* __restrict__ has_loop, accumulator<T>* slope, long long nnz,
                           long long n) {
    using Sum = accumulator<T>;
    for (long long e = thread(); e - threadIdx.x % WARP < nnz; e += threads()) {
        Index i = -1;
        Sum part = 0;
        if (e < nnz) {
            i = row[e];
            const Index j = col[e];
            const Sum g = load(grad[indptr && has_loop ? e + i : e]);
            const Sum q = WEIGHTED ? g * load(data[e]) : g;
            part = q * scale_at<Sum>(degree, has_loop, j);
            atomicAdd(slope + j, q * scale_at<Sum>(degree, has_loop, i));
        }
        add_runs<false>(slope, i, part);
    }
    if (!has_loop) return;
    for (long long v = thread(); v < n; v += threads()) {
        if (has_loop[v]) continue;
        const Sum g = load(grad[indptr ? (long long)indptr[v + 1] + v : nnz + v]);
        atomicAdd(slope + v, 2 * g * scale_at<Sum>(degree, has_loop, Index(v)));
    }
}

// out[e] = g s[i] s[j] - slope[i] s[i]^3 / 2: the value itself, and its part in the degree.
template <typename T, typename Index, bool WEIGHTED>
__global__ void gcn_gradient(const Index* __restrict__ row, const Index* __restrict__ col,
                             const Index* __restrict__ indptr, const T* __restrict__ grad,
                             const typename Degree<T, Index, WEIGHTED>::type* __restrict__ degree,
                             const unsigned char* __restrict__ has_loop, const accumulator<T>* __restrict__ slope,
                             T* out, long long nnz) {
    using Sum = accumulator<T>;
    for (long long e = thread(); e < nnz; e += threads()) {
        const Index i = row[e];
        const Sum s = scale_at<Sum>(degree, has_loop, i), other = scale_at<Sum>(degree, has_loop, col[e]);
        const Sum g = load(grad[indptr && has_loop ? e + i : e]);
        store(out + e, s * (g * other - slope[i] * s * s / 2));
    }
}
