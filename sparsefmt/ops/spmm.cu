#include "common.cuh"

// Y[i, :] = sum_e a[e] * X[col[e], :] over the entries e of row i.
// A warp owns one row and one slab of 32 features; warps stride over all (row, slab) pairs, slabs
// of a row side by side. Every Y[i, f] is stored once: deterministic, and Y needs no zeroing.
template <typename T, typename Index, bool WEIGHTED>
__global__ void spmm_csr_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                              const T* __restrict__ data, const T* __restrict__ X,
                              T* __restrict__ Y, long long n_rows, long long feat) {
    const int lane = threadIdx.x % WARP;
    const long long slabs = (feat + WARP - 1) / WARP;
    for (long long item = warp_index(); item < n_rows * slabs; item += warp_count()) {
        const long long row = item / slabs;
        const long long f = item % slabs * WARP + lane;
        if (f >= feat) continue;
        accumulator<T> sum = 0;
        const Index stop = indptr[row + 1];
#pragma unroll 4
        for (Index e = indptr[row]; e < stop; ++e) {
            const accumulator<T> x = load(X[indices[e] * feat + f]);
            sum += WEIGHTED ? load(data[e]) * x : x;
        }
        store(&Y[row * feat + f], sum);
    }
}

// Y[row[e], :] += a[e] * X[col[e], :] for every entry e, in any order (fuseGNN's GAS). Y holds zeros
// before. A warp owns one entry and one slab of 32 features. Atomics: not deterministic.
template <typename T, typename Index, bool WEIGHTED>
__global__ void spmm_coo_atomic(const Index* __restrict__ rows, const Index* __restrict__ cols,
                                const T* __restrict__ data, const T* __restrict__ X,
                                T* __restrict__ Y, long long nnz, long long feat) {
    const int lane = threadIdx.x % WARP;
    const long long slabs = (feat + WARP - 1) / WARP;
    for (long long item = warp_index(); item < nnz * slabs; item += warp_count()) {
        const long long e = item / slabs;
        const long long f = item % slabs * WARP + lane;
        if (f >= feat) continue;
        const T x = X[cols[e] * feat + f];
        atomicAdd(&Y[rows[e] * feat + f], WEIGHTED ? data[e] * x : x);
    }
}
