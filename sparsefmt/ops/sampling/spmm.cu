#include "engine/common.cuh"
#include "engine/rows.cuh"
#include "sampling/rows.cuh"
#include "sampling/spmm.cuh"

// WEIGHTS. SCALED: by what is given of data, by perm, and col_scale.
constexpr int UNWEIGHTED = 0, DIRECT = 1, SCALED = 2;
constexpr int BY_ROWS = 0, STAGING = 1, BY_CHUNKS = 2;  // VARIANT

// What sub-warps of a block hold of rows that they share: its first row, while it is at work, then the last one, which
// it leaves open.
template <typename Part, typename Sum, typename Index, int LANES> struct Parts {
    static constexpr int SUBWARPS = ROW_THREADS / LANES;
    Sum held[SUBWARPS][Part::SIZE * LANES];
    Index open_row[SUBWARPS];

    // Every thread of the block comes here, and gets its own first row for the last one.
    __device__ void leave_open(Part& sum, int subwarp, int lane, Index row) {
        Part head;
        head.get(&held[subwarp][lane], LANES);
        sum.keep(&held[subwarp][lane], LANES);
        sum = head;
        if (lane == 0) open_row[subwarp] = row;
        __syncthreads();
    }
    // Adds what the sub-warps before left open, in their order.
    __device__ void put_together(Part& head, Index row, int subwarp, int lane) const {
        int k = subwarp;
        while (k > 0 && open_row[k - 1] == row) --k;
        Part sum;
        sum.clear();
#pragma unroll 1
        for (; k < subwarp; ++k) {
            Part other;
            other.get(&held[k][lane], LANES);
            sum.add(other);
        }
        sum.add(head);
        head = sum;
    }
};

// Y[i, :] = r[i] * sum_e a[e] * c[col[e]] * X[col[e], :] over the sampled entries e of row i, with MEAN divided by
// their number, with RESCALE times how many the row has for each of them.
// A block owns rows and one slice of LANES * VEC features; its sub-warps share the pieces of the rows equally.
// STAGING: the block also gathers columns and values of its sample, those of row i from i * room on, or from the first
// entry of the row on where room is 0; for the other slices BUCKET reads them there.
// All loads of a piece are in flight together, and row ends fall into the same instructions for the sub-warps of a
// warp. A row that several share is put together by the one that ends it, in their order: nothing is atomic.
template <typename T, typename Index, int LANES, int VEC, int STRATEGY, int WEIGHTS, int VARIANT>
__global__ void __launch_bounds__(ROW_THREADS, 7)
spmm_sampled(const Index* __restrict__ indptr, const Index* __restrict__ indices,
             const Place<Index>* __restrict__ start, const T* __restrict__ data, const Index* __restrict__ perm,
             const accumulator<T>* __restrict__ row_scale, const accumulator<T>* __restrict__ col_scale, const T* __restrict__ X, T* __restrict__ Y,
             Index* __restrict__ to_cols, T* __restrict__ to_values, const long long* __restrict__ seed_at,
             unsigned long long seed, long long n_rows, unsigned stride, unsigned blocks, int first_slice, int width,
             int room, int rows, int feat, int flags) {
    constexpr int SUBWARPS = ROW_THREADS / LANES, BATCH = LANES < PIECE ? PIECE / LANES : 1;
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    using Part = ::Part<Sum, VEC, 1, false>;
    __shared__ Parts<Part, Sum, Index, LANES> parts;
    __shared__ BlockRows<Index> block_rows;

    const unsigned block = blockIdx.x % blocks, slice = first_slice + blockIdx.x / blocks;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (seed_at) seed = *seed_at;
    const RowShape<Index> shape{indptr, start, n_rows, rows, width, room};
    Work<Index, STRATEGY, VARIANT == BY_CHUNKS> at_work(block_rows, shape, block, subwarp, SUBWARPS, seed);
    const long long first_row = at_work.first_row;
    const int f = (slice * LANES + lane) * VEC;
    const bool active = f < feat;
    const char* x_slice = kept((const char*)(X + (active ? f : 0)));
    const RowFactor<Sum> factor_of{row_scale, flags};
    const int head_row = at_work.row;
    bool began_earlier = at_work.began_earlier(), shares_head = false;

    Index cols[BATCH], places[BATCH];
    T values[BATCH];
    Sum weights[BATCH];
    const auto fetch = [&]() {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            cols[b] = places[b] = 0;  // any that exist: an empty row has none
            if (!at_work.taken) continue;
            const Index entry = at_work.entry(b * LANES + lane % PIECE);
            cols[b] = read(indices + entry);
            if (WEIGHTS == DIRECT) values[b] = read(data + entry);
            if (WEIGHTS == SCALED) places[b] = perm ? read(perm + entry) : entry;
        }
    };
    Part sum;
    sum.clear();
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        Vector x[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            const Index col = __shfl_sync(FULL_WARP, cols[j / LANES], j % LANES, LANES);
            x[j] = read((const Vector*)(x_slice + at(col, stride)));
        }
        const int count = at_work.count(), row = at_work.row;
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (WEIGHTS == SCALED && data) values[b] = data[places[b]];
            weights[b] = WEIGHTS == DIRECT || (WEIGHTS == SCALED && data) ? load(values[b]) : Sum(1);
            if (WEIGHTS == SCALED && col_scale) weights[b] *= col_scale[cols[b]];
            if constexpr (VARIANT == STAGING) {
                const Index place = at_work.gathered + at_work.pos + b * LANES + lane;
                if (b * LANES + lane >= count) continue;
                to_cols[place] = cols[b];
                if (WEIGHTS && to_values) to_values[place] = values[b];
            }
        }
        const unsigned length = at_work.length, taken = at_work.taken;
        const bool row_ends = at_work.row_ends();
        at_work.next();
        fetch();  // of the next piece, while the loads of this one are under way
        const auto accumulate = [&](int j, bool wanted) {
            const Sum weight = WEIGHTS ? __shfl_sync(FULL_WARP, weights[j / LANES], j % LANES, LANES) : Sum(1);
            if (!wanted) return;
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum.v[0][v] += WEIGHTS ? weight * load(x[j], v) : load(x[j], v);
        };
        if (__all_sync(FULL_WARP, count == PIECE)) {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, true);
        } else {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, j < count);
        }
        if (row_ends) {
            if (began_earlier) {
                sum.keep(&parts.held[subwarp][lane], LANES);
                shares_head = true;
            } else if (active) {
                sum.scale(taken ? factor_of(first_row + row, length, taken) : Sum(0));
                store_pack<VEC>(Y + (first_row + row) * feat + f, sum.v[0]);
            }
            began_earlier = false;
            sum.clear();
        }
    }

    parts.leave_open(sum, subwarp, lane, first_row + at_work.row);
    if (!active || !shares_head) return;
    parts.put_together(sum, first_row + head_row, subwarp, lane);
    const unsigned length = at_work.length_of(head_row);
    sum.scale(factor_of(first_row + head_row, length, min(length, (unsigned)width)));
    store_pack<VEC>(Y + (first_row + head_row) * feat + f, sum.v[0]);
}
