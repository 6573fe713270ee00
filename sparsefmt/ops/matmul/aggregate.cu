#include "engine/common.cuh"
#include "engine/rows.cuh"

// WEIGHTS. SCALED: by what is given of data, row_scale and col_scale.
constexpr int UNWEIGHTED = 0, WEIGHTED = 1, SCALED = 2;

// Resident blocks: as many as leave each thread the registers for its loads in flight; for float32 those that a wave of
// formats/chunks.py has, at the price of 32 bytes spilled: 5 take 1.2x the time where there is one wave, and 1.05x on reddit.
template <typename T, int VEC> constexpr int RESIDENT = VEC * sizeof(T) < 16 ? 6 : sizeof(T) == 4 ? 7 : 4;

// The number of an entry, whatever is given for a permutation.
template <typename Index> __device__ inline Index within(Index place, long long nnz) {
    return min(max(place, Index(0)), Index(nnz - 1));
}

// Rows of dX[j, :] = c[j] * sum_e a[e] * r[i] * dY[i, :] + self[j] * dY[j, :], and what each has beside its sum.
template <typename T> struct Result {
    using Sum = accumulator<T>;
    const T* grad;
    const Sum *col_scale, *self;
    T* dX;
    unsigned stride;  // bytes between rows of grad
    int feat;

    template <int VEC> __device__ void put(Sum (&sum)[VEC], long long row, int f) const {
        if (col_scale) {
            const Sum factor = read(col_scale + row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] *= factor;
        }
        if (self) {
            const Sum factor = read(self + row);
            const auto own = read((const Pack<T, VEC>*)((const char*)(grad + f) + at(row, stride)));
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += factor * load(own, v);
        }
        store_pack<VEC>(dX + row * feat + f, sum);
    }
};

// The gradients of Y = diag(r) A diag(c) X + diag(self) X in one pass over the transposed structure (fuseGNN, algorithms
// 2 and 3): each row of dY that an entry gathers serves dX, as above, and dA[e] = r[i] * c[j] * <dY[i, :], X[j, :]>, of
// the features [from, from + LANES * VEC). Dot products of earlier features are in `dots`, in the order of the transposed
// structure; the LAST launch writes dA, by perm, or `dots` again where dA is not given. The work is cut as in spmm.cu.
template <typename T, typename Index, int LANES, int VEC, int WEIGHTS>
__global__ void __launch_bounds__(ROW_THREADS, (RESIDENT<T, VEC>))
aggregate_backward(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                   const Place<Index>* __restrict__ start, const int* __restrict__ slot,
                   const Index* __restrict__ perm, const T* __restrict__ data,
                   const accumulator<T>* __restrict__ row_scale, const accumulator<T>* __restrict__ col_scale,
                   const accumulator<T>* __restrict__ self, const T* __restrict__ X, const T* __restrict__ grad,
                   T* __restrict__ dX, T* __restrict__ dA, accumulator<T>* __restrict__ dots, accumulator<T>* carry,
                   long long nnz, unsigned x_stride, unsigned stride, int feat, int from, int last) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    constexpr int SUBWARPS = ROW_THREADS / LANES, OWN = CHUNKS / SUBWARPS, BATCH = LANES < PIECE ? PIECE / LANES : 1;
    using Partial = Part<Sum, VEC, 1, false>;
    using Kept = Shared<Partial, Sum, Index, LANES>;
    __shared__ Kept shared;

    const unsigned block = blockIdx.x;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES, f = from + lane * VEC;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + subwarp * OWN, OWN, nnz);
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row], active = f < feat;
    const char* const gathered = kept((const char*)(grad + (active ? f : 0)));
    const char* const rows = (const char*)(X + (active ? f : 0));
    const Result<T> result{grad, WEIGHTS == SCALED ? col_scale : nullptr, self, dX, stride, feat};
    const auto put = [&](Partial& sum, Index row) { if (active) result.put(sum.v[0], row, f); };

    Index cols[BATCH], places[BATCH];
    Vector next_row = {};
    const auto fetch = [&]() {
        const Index row = at_work.more() ? first_row + at_work.row : 0;  // behind the last one there may be none
        if (active) next_row = read((const Vector*)(rows + at(row, x_stride)));
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const Index entry = at_work.entry((lane * BATCH + b) % PIECE);
            cols[b] = read(indices + entry);
            if (WEIGHTS != UNWEIGHTED || last) places[b] = perm ? within(read(perm + entry), nnz) : entry;
        }
    };
    Partial sum;
    sum.clear();
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        T value[BATCH];  // by perm, so anywhere: asked for first
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
            if (WEIGHTS == WEIGHTED || (WEIGHTS == SCALED && data)) value[b] = data[places[b]];
        Vector y[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            y[j] = read((const Vector*)(gathered + at(__shfl_sync(FULL_WARP, cols[j % BATCH], j / BATCH, LANES), stride)));
        const int count = at_work.count(), row = at_work.row;
        Sum weight[BATCH], factor[BATCH], before[BATCH], total[BATCH], partial[PIECE];
        Index entries[BATCH], to[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            entries[b] = at_work.entry((lane * BATCH + b) % PIECE), to[b] = places[b];
            before[b] = from > 0 ? dots[entries[b]] : Sum(0);
            factor[b] = WEIGHTS == SCALED && row_scale ? read(row_scale + cols[b]) : Sum(1);
            weight[b] = factor[b];
            if (WEIGHTS == WEIGHTED || (WEIGHTS == SCALED && data)) weight[b] *= load(value[b]);
        }
        const bool row_ends = at_work.row_ends();
        const Vector own_row = next_row;
        at_work.next();
        fetch();  // of the next piece, while the loads of this one are under way
        const auto accumulate = [&](int j, bool wanted) {
            const Sum w = WEIGHTS == UNWEIGHTED ? Sum(1) : __shfl_sync(FULL_WARP, weight[j % BATCH], j / BATCH, LANES);
            partial[j] = 0;
            if (!wanted) return;  // behind the last entry 0 times Inf would not be 0
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                const Sum value = load(y[j], v);
                sum.v[0][v] += WEIGHTS == UNWEIGHTED ? value : w * value;
                partial[j] += load(own_row, v) * value;
            }
        };
        if (__all_sync(FULL_WARP, count == PIECE)) {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, true);
        } else {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, j < count);
        }
#pragma unroll
        for (int j = 0; j < PIECE; ++j) partial[j] = active ? partial[j] : Sum(0);
        totals<LANES>(partial, total);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int j = lane * BATCH + b;
            if (j >= count || j >= PIECE) continue;
            Sum all = total[b] + before[b];
            if (WEIGHTS == SCALED && last) all *= col_scale ? factor[b] * read(col_scale + first_row + row) : factor[b];
            if (!last || !dA) {
                __stcs(dots + entries[b], all);
                continue;
            }
            Pack<T, 1> word;
            store(&word.v[0], all);
            store_once((Pack<T, 1>*)(dA + to[b]), word);
        }
        if (row_ends) {
            if (row == 0 && began_earlier) sum.keep(&shared.head[subwarp][lane], LANES);
            else put(sum, first_row + row);
            sum.clear();
        }
    }
    sum.keep(&shared.open[subwarp][lane], LANES);
    if (lane == 0) shared.open_row[subwarp] = open;
    __syncthreads();
    const auto carried = [&](int s, int side) { return carry + (2LL * s + side) * (LANES * VEC) + lane; };
    if (at_work.rows > 0 && began_earlier) {
        sum.clear();
        shared.add_open(sum, first_row, subwarp - 1, lane);
        Kept::add(sum, &shared.head[subwarp][lane], LANES);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) sum.keep(carried(slot[block], 1), LANES);
        else put(sum, first_row);
    }
    if (subwarp == SUBWARPS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, open, subwarp, lane);
        sum.keep(carried(slot[block + 1], 0), LANES);
    }
}

// The rows of dX that borders between blocks cut, as in spmm.cu: a thread owns one border and one of lanes * vec features.
template <typename T, typename Index>
__global__ void __launch_bounds__(ROW_THREADS)
aggregate_cut_rows(const Place<Index>* __restrict__ start, const int* __restrict__ cut,
                   const accumulator<T>* __restrict__ col_scale, const accumulator<T>* __restrict__ self,
                   const T* __restrict__ grad, T* __restrict__ dX, const accumulator<T>* __restrict__ carry,
                   unsigned stride, int cuts, int feat, int from, int lanes, int vec) {
    const int width = lanes * vec;
    const long long item = blockIdx.x * (long long)ROW_THREADS + threadIdx.x;
    const int s = item / width, k = item % width, f = from + k % lanes * vec + k / lanes;
    if (s >= cuts || f >= feat) return;
    const auto row_at = [&](long long block) { return start[block * CHUNKS].row; };
    const Index row = row_at(cut[s]);
    if (row_at(cut[s] + 1LL) == row) return;
    int first = s;
    while (first > 0 && row_at(cut[first - 1]) == row) --first;
    accumulator<T> sum[1] = {0};
    for (int i = first; i <= s; ++i) sum[0] += carry[2LL * i * width + k];
    sum[0] += carry[(2LL * s + 1) * width + k];
    Result<T>{grad, col_scale, self, dX, stride, feat}.put(sum, (long long)row, f);
}

// dself[j] = <dY[j, :], X[j, :]>; where there are no entries dX[j, :] = self[j] * dY[j, :] too. 8 lanes own a row.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
aggregate_self(const T* __restrict__ X, const T* __restrict__ grad, const accumulator<T>* __restrict__ self,
               T* __restrict__ dX, accumulator<T>* __restrict__ dself, long long n_rows, unsigned x_stride,
               unsigned stride, int feat) {
    using Sum = accumulator<T>;
    constexpr int LANES = 8;
    const long long row = (blockIdx.x * (long long)ROW_THREADS + threadIdx.x) / LANES;
    if (row >= n_rows) return;
    const T* const x = (const T*)((const char*)X + row * x_stride);
    const T* const y = (const T*)((const char*)grad + row * stride);
    Sum sum = 0;
    for (int f = threadIdx.x % LANES; f < feat; f += LANES) {
        sum += load(y[f]) * load(x[f]);
        if (dX) store(dX + row * feat + f, self[row] * load(y[f]));
    }
    sum = over_lanes<LANES>(sum, LANES);
    if (threadIdx.x % LANES == 0) dself[row] = sum;
}

// Values in the order of the transposed structure, out[e] = values[perm[e]], or back, out[perm[e]] = values[e]; by the
// inverse permutation that is the former too, which takes 0.4 of the time: what is written in part goes to memory as
// whole sectors. What lies together in one order lies some 10^5 entries apart in the other: threads that run at the same
// time find it in the L2.
template <typename From, typename To, typename Index, bool BACK>
__global__ void __launch_bounds__(ROW_THREADS)
permuted(const Index* __restrict__ perm, const From* __restrict__ values, To* __restrict__ out, long long nnz) {
    constexpr int EACH = 8;
    const long long first = blockIdx.x * (long long)(ROW_THREADS * EACH) + threadIdx.x;
    Index place[EACH];
    From value[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const long long e = min(first + k * ROW_THREADS, nnz - 1);
        place[k] = within(read(perm + e), nnz);
        if (BACK) value[k] = values[e];
    }
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (!BACK) value[k] = values[place[k]];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const long long e = first + k * ROW_THREADS;
        if (e < nnz) store(out + (BACK ? (long long)place[k] : e), load(value[k]));
    }
}
