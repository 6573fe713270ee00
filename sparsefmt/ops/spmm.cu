#include "common.cuh"

// A block of SPMM_THREADS threads is cut into sub-warps of LANES lanes. Work is counted in items: a
// row's entries and one more for its end, so that neither hubs nor empty rows unbalance it.
constexpr int SPMM_THREADS = 256;
constexpr int ITEMS = 4096;  // 128 a sub-warp of 8: 1.03x over 64 and over 256 on H200, feat 64 to 256

// Resident blocks that leave each thread the registers for its loads in flight.
template <typename T, int LANES>
constexpr int RESIDENT = LANES == WARP ? 2 : sizeof(T) == 2 ? 3 : 4;

// The first row r in [0, n_rows] with indptr[r] + r >= item; a whole warp searches, 32 ways a step.
template <typename Index>
__device__ inline long long first_row_from(const Index* indptr, long long n_rows, long long item) {
    long long low = 0, high = n_rows;
    while (low < high) {
        const long long step = (high - low + WARP - 1) / WARP;
        const long long probe = low + threadIdx.x % WARP * step;
        const bool before = probe < high && (long long)indptr[probe] + probe < item;
        const int hits = __popc(__ballot_sync(FULL_WARP, before));
        if (hits == 0) break;
        high = min(high, low + hits * step);
        low += (hits - 1) * step + 1;
    }
    return low;
}

// Y[i, :] = sum_e a[e] * X[col[e], :] over the entries e of row i; fewer than 2^31 entries.
// A block owns the rows that begin in its share of the items, and one slice of LANES * VEC features:
// 128 bytes of a row of X, so that the active slice of X stays in the L2. Its items are split equally
// among its sub-warps, across row ends: each has UNROLL loads of X in flight whatever the degrees.
// A row that several sub-warps share is summed by the one that ends it, in their order: every
// Y[i, f] is stored once, without atomics, and Y needs no zeroing.
template <typename T, typename Index, int LANES, int VEC, bool WEIGHTED>
__global__ void __launch_bounds__(SPMM_THREADS, RESIDENT<T, LANES>)
spmm_csr_balanced(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                  const T* __restrict__ data, const T* __restrict__ X, T* __restrict__ Y,
                  long long n_rows, long long nnz, int feat) {
    constexpr int SUBWARPS = SPMM_THREADS / LANES;
    constexpr int UNROLL = LANES < 8 ? 8 : LANES;
    constexpr int BATCH = UNROLL / LANES;  // indices that a lane fetches at a time
    constexpr int NEVER = 0x7fffffff;
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    __shared__ long long rows_from[2];
    __shared__ int ends[ITEMS + 1];  // entries of the block up to the end of each of its rows
    __shared__ Sum open_sums[SUBWARPS][LANES * VEC];  // of the row that a sub-warp leaves unfinished

    const unsigned blocks = (nnz + n_rows + ITEMS - 1) / ITEMS;
    const unsigned block = blockIdx.x % blocks, slice = blockIdx.x / blocks;
    if (threadIdx.x < 2 * WARP) {
        const int side = threadIdx.x / WARP;
        const long long row = first_row_from(indptr, n_rows, (block + side) * (long long)ITEMS);
        if (threadIdx.x % WARP == 0) rows_from[side] = row;
    }
    __syncthreads();
    const long long first_row = rows_from[0];
    const int rows = rows_from[1] - first_row;
    if (rows == 0) return;  // the same for the whole block
    const Index base = indptr[first_row];
    for (int k = threadIdx.x; k < rows; k += SPMM_THREADS)
        ends[k] = indptr[first_row + k + 1] - base;
    __syncthreads();

    // Items [from, to) of the block are those of this sub-warp: entries [start, stop) and the ends of
    // rows [first, last).
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned entries = ends[rows - 1], items = entries + rows;
    const unsigned share = (items + SUBWARPS - 1) / SUBWARPS;
    const unsigned from = min(subwarp * share, items), to = min(from + share, items);
    const auto rows_ended_before = [&](unsigned item) {
        int low = 0, high = rows;
        while (low < high) {
            const int middle = (low + high) >> 1;
            if ((unsigned)ends[middle] + middle < item) low = middle + 1; else high = middle;
        }
        return low;
    };
    const int first = rows_ended_before(from), last = rows_ended_before(to);
    const int start = from - first, stop = to - last;
    const int first_begins = first == 0 ? 0 : ends[first - 1];
    const bool began_earlier = first < last && first_begins < start;

    const int f = slice * LANES * VEC + lane * VEC;
    const bool active = f < feat;
    Sum sum[VEC], head[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] = 0;
    int row = first, end = first < last ? ends[first] : NEVER;
    bool keep = began_earlier;  // the first row's sum waits for those of earlier sub-warps
    T* y = Y + (first_row + first) * feat + f;
    const auto end_row = [&]() {
        if (keep) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) head[v] = sum[v];
            keep = false;
        } else if (active) {
            store_pack<VEC>(y, sum);
        }
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] = 0;
        ++row;
        y += feat;
        end = row < last ? ends[row] : NEVER;
    };
    if (entries > 0) {
        // Every lane of the warp makes the same trips, so that shuffles see the whole warp; beyond
        // its entries a sub-warp reads its last one again and adds nothing.
        const int limit = max(stop - 1, 0);
        const T* x_slice = X + (active ? f : 0);
        const Index* block_indices = indices + base;
        const T* block_data = data + (WEIGHTED ? base : 0);
        Index cols[BATCH];
        T values[BATCH], a[BATCH];
        const auto fetch = [&](int e) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int place = min(e + b * LANES + lane, limit);
                cols[b] = block_indices[place];
                if (WEIGHTED) values[b] = block_data[place];
            }
        };
        fetch(start);
        for (int trip = 0; trip < share; trip += UNROLL) {
            const int e = start + trip;
            Vector x[UNROLL];
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const Index col = __shfl_sync(FULL_WARP, cols[j / LANES], j % LANES, LANES);
                x[j] = *(const Vector*)(x_slice + (long long)col * feat);
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) a[b] = values[b];
            fetch(e + UNROLL);
            const auto weight_of = [&](int j) -> Sum {
                if (!WEIGHTED) return 1;
                return load(__shfl_sync(FULL_WARP, a[j / LANES], j % LANES, LANES));
            };
            const auto add = [&](int j, Sum weight) {
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    const Sum value = load(x[j].v[v]);
                    sum[v] += WEIGHTED ? weight * value : value;
                }
            };
            // No row ends in this batch of any sub-warp: 1.4x in float16 and 1.1x in float32 where
            // rows are long (H200).
            if (__all_sync(FULL_WARP, e + UNROLL <= min(stop, end))) {
#pragma unroll
                for (int j = 0; j < UNROLL; ++j) add(j, weight_of(j));
                continue;
            }
#pragma unroll
            for (int j = 0; j < UNROLL; ++j) {
                const Sum weight = weight_of(j);
                while (e + j == end) end_row();
                if (e + j < stop) add(j, weight);
            }
        }
    }
    while (row < last) end_row();
#pragma unroll
    for (int v = 0; v < VEC; ++v) open_sums[subwarp][lane * VEC + v] = sum[v];
    __syncthreads();
    if (began_earlier && active) {
        Sum total[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) total[v] = 0;
        for (int k = ((unsigned)first_begins + first) / share; k < subwarp; ++k)
#pragma unroll
            for (int v = 0; v < VEC; ++v) total[v] += open_sums[k][lane * VEC + v];
#pragma unroll
        for (int v = 0; v < VEC; ++v) total[v] += head[v];
        store_pack<VEC>(Y + (first_row + first) * feat + f, total);
    }
}

// Y[i, :] = sum_e a[e] * X[col[e], :] over the entries e of row i.
// For any size. A warp owns one row and one slab of 32 features; warps stride over all (row, slab) pairs, slabs
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
