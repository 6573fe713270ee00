#include "engine/common.cuh"

// REDUCE. SUM: every row factor is 1. OWN_SUM: to which a part of the row's own is added. CHOSEN_SUM: of those values whose
// place in arg names their entry.
constexpr int SUM = 0, SCALED_SUM = 1, OWN_SUM = 2, CHOSEN_SUM = 3, EXTREME = 4, EXTREME_ARG = 5;
// WEIGHTS. SCALED: by col_scale, with or without data. INDIRECT: of what is given, data by perm. HEADS: likewise, data with
// a value for each head, which has its own features.
constexpr int UNWEIGHTED = 0, DIRECT = 1, SCALED = 2, INDIRECT = 3, HEADS = 4;
constexpr int MEAN = 1, MIN = 2, ONE_MORE = 4, SHARED = 8;  // flags; SHARED: all heads have the same features of X

constexpr int SPMM_THREADS = 128;  // 1.05x over 256, 1.08x over 64 on graphs of 1 to 5 M entries (H200)

// Resident blocks: as many as leave each thread the registers for its loads in flight. T is that of X.
template <typename T, typename Index, int VEC, int REDUCE, int WEIGHTS>
constexpr int RESIDENT = REDUCE == CHOSEN_SUM ? 3 : REDUCE == EXTREME_ARG ? 4
    : (sizeof(T) * VEC < 16 ? 8 : 7) - (WEIGHTS == HEADS ? sizeof(Index) == 8 ? 3 : 2 : 0);

// Whether x is to replace the best so far: NaN beats all, and of equal values the first stays.
template <typename Sum> __device__ inline bool beats(Sum x, Sum best) {
    return !(x <= best) && best == best;
}

// What has been reduced of VEC features of one row: a sum, or the largest value and its entry.
template <typename Sum, typename Index, int VEC, int REDUCE> struct Reduced {
    Sum v[VEC];
    alignas(REDUCE == EXTREME_ARG ? sizeof(Index) * VEC : sizeof(Index)) Index arg[REDUCE == EXTREME_ARG ? VEC : 1];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            v[i] = REDUCE < EXTREME ? Sum(0) : lowest<Sum>();
            if (REDUCE == EXTREME_ARG) arg[i] = -1;
        }
    }
    __device__ void add(int i, Sum x, Index entry) {
        if (REDUCE < EXTREME) v[i] += x;
        if (REDUCE == EXTREME) v[i] = larger(x, v[i]);
        if (REDUCE == EXTREME_ARG && (beats(x, v[i]) || arg[i] < 0)) v[i] = x, arg[i] = entry;
    }
    __device__ void add_partial(const Sum* values, const Index* args) {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if (REDUCE != EXTREME_ARG || args[i] >= 0) add(i, values[i], REDUCE == EXTREME_ARG ? args[i] : 0);
    }
    __device__ void keep_partial(Sum* values, Index* args) const {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            values[i] = v[i];
            if (REDUCE == EXTREME_ARG) args[i] = arg[i];
        }
    }
};

// What a row of the result has of its own: factors[i] * rows[i, :] + bias, without factors rows[i, :], and with ONE_MORE
// (1 + factors[0]) * rows[i, :]. Without ONE_MORE a row whose factor is 0 is not read. `stride` is in bytes.
template <typename T> struct Own {
    using Sum = accumulator<T>;
    const T* rows;
    const Sum* factors;
    const T* bias;
    unsigned stride;

    template <typename Index, int VEC> __device__ void add(Sum (&sum)[VEC], Index row, int f, bool one_more) const {
        const Sum factor = !factors ? Sum(1) : one_more ? 1 + read(factors) : read(factors + row);
        if (one_more || factor != 0) {
            const auto x = read((const Pack<T, VEC>*)((const char*)(rows + f) + at(row, stride)));
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += factor * load(x, v);
        }
        if (!bias) return;
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] += load(read(bias + f + v));
    }
};

// Where the rows of the result go, and what is done to a whole row.
template <typename T, typename Index, int VEC, int REDUCE> struct Result {
    using Sum = accumulator<T>;
    T* Y;
    Index* arg;
    const Sum* row_scale;
    int feat, flags;
    Own<T> own;

    __device__ Sum scale(Index row) const { return row_scale ? read(row_scale + row) : Sum(1); }
    __device__ void put(Reduced<Sum, Index, VEC, REDUCE>& sum, Index row, int f, long long length, Sum factor) const {
        if (REDUCE != SUM) {
            if (flags & MEAN) factor /= (Sum)max(length, 1LL);
            if (flags & MIN) factor = -factor;
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const bool nothing = length == 0 || (REDUCE == CHOSEN_SUM && sum.v[i] == 0);
                sum.v[i] = nothing ? Sum(0) : sum.v[i] * factor;  // also where the factor is infinite
            }
        }
        if (REDUCE == OWN_SUM) own.add(sum.v, row, f, flags & ONE_MORE);
        const long long place = (long long)row * feat + f;
        store_pack<VEC>(Y + place, sum.v);
        if (REDUCE == EXTREME_ARG) *(Pack<Index, VEC>*)(arg + place) = *(const Pack<Index, VEC>*)sum.arg;
    }
};

// Columns and weights of a piece: a lane fetches those of entry `lane` (4 lanes: of two entries) one piece
// ahead, and the sub-warp reads them by shuffles; weights, which are wanted late, through shared memory where
// registers allow: 1.01 to 1.04x (H200).
template <typename T, typename Index, int LANES, int WEIGHTS> struct Entries {
    using Sum = accumulator<T>;
    static constexpr int BATCH = LANES < PIECE ? PIECE / LANES : 1, QUAD = 16 / sizeof(Sum);
    static constexpr bool BY_SHARED = WEIGHTS == DIRECT && LANES == PIECE && sizeof(T) == 4;
    const Index *indices, *perm;
    const T* data;  // with heads, of the lane's own
    const Sum* col_scale;
    Sum* shared;  // PIECE of this sub-warp
    unsigned heads;
    Index cols[BATCH], places[BATCH];
    T values[BATCH], of_head[WEIGHTS == HEADS ? PIECE : 1];
    Sum weights[BATCH];
    Pack<Sum, QUAD> quad;

    __device__ void fetch(const Pieces<Index>& at_work, int lane) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const Index entry = at_work.entry(b * LANES + lane);
            cols[b] = read(indices + entry);
            if (WEIGHTS == DIRECT || (WEIGHTS == SCALED && data)) values[b] = read(data + entry);
            if (WEIGHTS >= INDIRECT) places[b] = perm ? read(perm + entry) : entry;
        }
    }
    __device__ void fetch_of_head(int j) {
        if (WEIGHTS == HEADS) of_head[j] = read((const T*)((const char*)data + at(of(places, j), heads * sizeof(T))));
    }
    __device__ void weigh(Sum sign) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            weights[b] = sign;
            if (WEIGHTS == DIRECT || (WEIGHTS == SCALED && data)) weights[b] *= load(values[b]);
            if (WEIGHTS == INDIRECT && data) weights[b] *= load(data[places[b]]);
            if (WEIGHTS >= SCALED && col_scale) weights[b] *= col_scale[cols[b]];
        }
        if (!BY_SHARED) return;
        __syncwarp();  // those of the piece before have been read
        shared[threadIdx.x % LANES] = weights[0];
        __syncwarp();
    }
    // In the order j = 0, 1, ...
    __device__ Sum weight(int j) {
        if (WEIGHTS == HEADS) return of(weights, j) * load(of_head[j]);
        if (!BY_SHARED) return of(weights, j);
        if (j % QUAD == 0) quad = *(const Pack<Sum, QUAD>*)(shared + j);
        return quad.v[j % QUAD];
    }
    template <typename V> __device__ static V of(const V (&held)[BATCH], int j) {
        return __shfl_sync(FULL_WARP, held[j / LANES], j % LANES, LANES);
    }
};

// What sub-warps of a block hold of rows that they share: the last row of each, which it leaves open, and its
// first row if that was begun before.
template <typename Sum, typename Index, int LANES, int VEC, int REDUCE> struct Shared {
    static constexpr int SUBWARPS = SPMM_THREADS / LANES, ARGS = REDUCE == EXTREME_ARG ? SUBWARPS : 1;
    using Part = Reduced<Sum, Index, VEC, REDUCE>;
    Sum open_values[SUBWARPS][LANES * VEC], head_values[SUBWARPS][LANES * VEC];
    Index open_args[ARGS][LANES * VEC], head_args[ARGS][LANES * VEC];
    Index open_row[SUBWARPS];

    __device__ static int own(int subwarp) { return REDUCE == EXTREME_ARG ? subwarp : 0; }
    __device__ void keep_head(const Part& sum, int subwarp, int at) {
        sum.keep_partial(&head_values[subwarp][at], &head_args[own(subwarp)][at]);
    }
    __device__ void keep_open(const Part& sum, int subwarp, int at, Index row) {
        sum.keep_partial(&open_values[subwarp][at], &open_args[own(subwarp)][at]);
        if (at == 0) open_row[subwarp] = row;
    }
    // Of the sub-warps up to `last` that left this row open, in their order.
    __device__ void add_open(Part& sum, Index row, int last, int at) const {
        int k = last + 1;
        while (k > 0 && open_row[k - 1] == row) --k;
#pragma unroll 1
        for (; k <= last; ++k) sum.add_partial(&open_values[k][at], &open_args[own(k)][at]);
    }
    // The first row of a sub-warp, which others before it began.
    __device__ void put_together(Part& sum, Index row, int subwarp, int at) const {
        sum.clear();
        add_open(sum, row, subwarp - 1, at);
        sum.add_partial(&head_values[subwarp][at], &head_args[own(subwarp)][at]);
    }
};

// Partial results of rows that are cut between blocks: for the s-th such border, of the entries in the
// block before it (side 0) and, where the row ends in the block behind it, of those (side 1).
template <typename Sum, typename Index> struct Carry {
    Sum* values;
    Index* args;
    int feat;

    __device__ long long at(int s, int side, int f) const { return (2LL * s + side) * feat + f; }
    template <typename Part> __device__ void keep(const Part& sum, int s, int side, int f) const {
        sum.keep_partial(values + at(s, side, f), args + at(s, side, f));
    }
    template <typename Part> __device__ void add(Part& sum, int s, int side, int f) const {
        sum.add_partial(values + at(s, side, f), args + at(s, side, f));
    }
};

// Y[i, :] = r[i] * sum_e a[e] * c[col[e]] * X[col[e], :] over the entries e of row i; or their mean, or
// the largest (MIN: smallest) of them, and its entry; or the sum of those that arg, of X's shape, names. A sum or mean may
// get a part of its own. With `heads` the features of each are side by side, and each has a value of its own.
// A block owns CHUNKS chunks and one slice of LANES * VEC features: 64 to 256 bytes of a row of X, so that
// the active slice of X stays in the L2. A sub-warp owns 32 / sub-warps chunks and takes a piece at a time:
// all loads of a piece are in flight together, and the row ends of the sub-warps of a warp fall into
// the same instructions, whatever the degrees.
// A row that several sub-warps share is put together by the one that ends it, in their order, a row that
// several blocks share by spmm_csr_cut_rows: nothing is atomic and Y needs no zeroing.
// X is of the type In, narrower than T where it has been rounded for its bytes.
template <typename T, typename Index, typename In, int LANES, int VEC, int REDUCE, int WEIGHTS>
__global__ void __launch_bounds__(SPMM_THREADS, (RESIDENT<In, Index, VEC, REDUCE, WEIGHTS>))
spmm_csr_balanced(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                  const Place<Index>* __restrict__ start, const int* __restrict__ slot,
                  const T* __restrict__ data, const Index* __restrict__ perm,
                  const accumulator<T>* __restrict__ col_scale, const accumulator<T>* __restrict__ row_scale,
                  const In* __restrict__ X, T* __restrict__ Y, Index* __restrict__ arg,
                  accumulator<T>* carry_values, Index* carry_args, const T* __restrict__ own_rows,
                  const accumulator<T>* __restrict__ own_factors, const T* __restrict__ bias, long long nnz,
                  unsigned stride, unsigned blocks, int feat, int flags, unsigned own_stride, int heads) {
    constexpr int SUBWARPS = SPMM_THREADS / LANES;
    constexpr int OWN = CHUNKS / SUBWARPS;  // chunks of a sub-warp
    using Sum = accumulator<T>;
    using Vector = Pack<In, VEC>;
    __shared__ Shared<Sum, Index, LANES, VEC, REDUCE> shared;
    __shared__ alignas(16) Sum weights[SUBWARPS][PIECE];

    const unsigned block = blockIdx.x % blocks, slice = blockIdx.x / blocks;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + subwarp * OWN, OWN, nnz);
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row];
    const int f = (slice * LANES + lane) * VEC;
    const bool active = f < feat;
    const int width = WEIGHTS == HEADS ? feat / heads : feat, head = active ? f / width : 0;
    const char* x_slice = kept((const char*)(X + (active ? WEIGHTS == HEADS && flags & SHARED ? f % width : f : 0)));
    const char* arg_slice = (const char*)(arg + (active ? f : 0));
    const Own<T> own{own_rows, own_factors, bias, own_stride};
    const Result<T, Index, VEC, REDUCE> result{Y, arg, row_scale, feat, flags, own};
    const Sum sign = REDUCE >= EXTREME && flags & MIN ? -1 : 1;

    const T* own_data = WEIGHTS == HEADS ? data + head : data;
    Entries<T, Index, LANES, WEIGHTS> entries{indices, perm, own_data, col_scale, weights[subwarp], (unsigned)heads};
    Sum next_factor = 1;
    const auto fetch = [&]() {
        if (REDUCE != SUM && at_work.row < at_work.rows) next_factor = result.scale(first_row + at_work.row);
        entries.fetch(at_work, lane);
    };
    Reduced<Sum, Index, VEC, REDUCE> sum;
    sum.clear();
    int row_begin = 0;
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        Vector x[PIECE];
        Pack<Index, VEC> chosen[REDUCE == CHOSEN_SUM ? PIECE : 1];
        Index places[REDUCE == CHOSEN_SUM ? PIECE : 1];
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            const Index col = entries.of(entries.cols, j);
            x[j] = read((const Vector*)(x_slice + at(col, stride)));
            entries.fetch_of_head(j);
            if (REDUCE != CHOSEN_SUM) continue;
            chosen[j] = *(const Pack<Index, VEC>*)(arg_slice + at(col, feat * sizeof(Index)));
            places[j] = entries.of(entries.places, j);
        }
        entries.weigh(sign);
        const int count = at_work.count(), row = at_work.row, pos = at_work.pos;
        const bool row_ends = at_work.row_ends();
        const Sum factor = next_factor;
        at_work.next();
        fetch();  // of the next piece, while the loads of this one are under way
        const auto accumulate = [&](int j, bool wanted) {
            const Sum weight = WEIGHTS ? entries.weight(j) : sign;
            if (!wanted) return;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                const Sum value = load(x[j], v);
                if (REDUCE == CHOSEN_SUM && chosen[j].v[v] != places[j]) continue;
                sum.add(v, WEIGHTS || REDUCE >= EXTREME ? weight * value : value, at_work.from.entry + pos + j);
            }
        };
        if (__all_sync(FULL_WARP, count == PIECE)) {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, true);
        } else {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) accumulate(j, j < count);
        }
        if (row_ends) {
            if (row == 0 && began_earlier) shared.keep_head(sum, subwarp, lane * VEC);
            else if (active) result.put(sum, first_row + row, f, pos + count - row_begin, factor);
            sum.clear();
            row_begin = pos + count;
        }
    }

    shared.keep_open(sum, subwarp, lane * VEC, open);
    __syncthreads();
    if (!active) return;
    const Carry<Sum, Index> carry{carry_values, carry_args, feat};
    if (at_work.rows > 0 && began_earlier) {
        shared.put_together(sum, first_row, subwarp, lane * VEC);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) carry.keep(sum, slot[block], 1, f);
        else result.put(sum, first_row, f, indptr[first_row + 1] - indptr[first_row], result.scale(first_row));
    }
    if (subwarp == SUBWARPS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, open, subwarp, lane * VEC);
        carry.keep(sum, slot[block + 1], 0, f);
    }
}

// The rows that borders between blocks cut: cut[s] is the block behind the s-th border. A warp owns one
// border and one slab of 32 features, and works if the row ends behind it.
template <typename T, typename Index, int REDUCE>
__global__ void spmm_csr_cut_rows(const Index* __restrict__ indptr, const Place<Index>* __restrict__ start,
                                  const int* __restrict__ cut, const accumulator<T>* __restrict__ row_scale,
                                  T* __restrict__ Y, Index* __restrict__ arg,
                                  accumulator<T>* carry_values, Index* carry_args,
                                  const T* __restrict__ own_rows, const accumulator<T>* __restrict__ own_factors,
                                  const T* __restrict__ bias, int cuts, int feat, int flags, unsigned own_stride) {
    using Sum = accumulator<T>;
    const int slabs = (feat + WARP - 1) / WARP;
    const long long item = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / WARP;
    const int s = item / slabs, f = item % slabs * WARP + threadIdx.x % WARP;
    if (s >= cuts || f >= feat) return;
    const auto row_at = [&](long long block) { return start[block * CHUNKS].row; };
    const Index row = row_at(cut[s]);
    if (row_at(cut[s] + 1LL) == row) return;
    int first = s;
    while (first > 0 && row_at(cut[first - 1]) == row) --first;
    const Carry<Sum, Index> carry{carry_values, carry_args, feat};
    Reduced<Sum, Index, 1, REDUCE> sum;
    sum.clear();
    for (int k = first; k <= s; ++k) carry.add(sum, k, 0, f);
    carry.add(sum, s, 1, f);
    const Own<T> own{own_rows, own_factors, bias, own_stride};
    const Result<T, Index, 1, REDUCE> result{Y, arg, row_scale, feat, flags, own};
    result.put(sum, row, f, (long long)indptr[row + 1] - indptr[row], result.scale(row));
}

// Y = X rounded to In, in rows of whole words of 16 bytes, each of which a thread writes; 0 behind the features.
template <typename T, typename In>
__global__ void round_rows(const T* __restrict__ X, In* Y, long long words, long long stride, int words_of_row, int feat) {
    constexpr int VEC = 16 / sizeof(In);
    const long long word = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (word >= words) return;
    const int f = word % words_of_row * VEC;
    const T* x = X + word / words_of_row * stride + f;
    Pack<In, VEC> y;
#pragma unroll
    for (int v = 0; v < VEC; ++v) store(&y.v[v], f + v < feat ? read(x + v) : T(0));
    ((Pack<In, VEC>*)Y)[word] = y;
}

// Adds VEC sums to those at y, which is aligned as they are together, up to 16 bytes.
template <int VEC, typename Sum> __device__ inline void add_atomically(Sum* y, const Sum (&sum)[VEC]) {
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(Sum) == 4 && VEC % 2 == 0) {
#pragma unroll
        for (int v = 0; v < VEC; v += VEC < 4 ? 2 : 4) {
            if constexpr (VEC < 4)
                asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(y + v), "f"(sum[v]), "f"(sum[v + 1]) : "memory");
            else
                asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(y + v), "f"(sum[v]),
                             "f"(sum[v + 1]), "f"(sum[v + 2]), "f"(sum[v + 3]) : "memory");
        }
    } else
#endif
#pragma unroll
    for (int v = 0; v < VEC; ++v) atomicAdd(y + v, sum[v]);
}

constexpr int RUN = 4 * PIECE;  // consecutive entries of a sub-warp

// Y[row[e], :] += a[e] * c[col[e]] * r[row[e]] * X[col[e], :] for every entry e, in any order (fuseGNN's
// GAS). A sub-warp owns a run of entries and LANES * VEC features, and adds up while the row stays the same
// before it adds to Y: a COO in order of rows costs few atomics. Not deterministic.
template <typename T, typename Index, int LANES, int VEC>
__global__ void __launch_bounds__(SPMM_THREADS)
spmm_coo_atomic(const Index* __restrict__ rows, const Index* __restrict__ cols, const T* __restrict__ data,
                const accumulator<T>* __restrict__ row_scale, const accumulator<T>* __restrict__ col_scale,
                const T* __restrict__ X, accumulator<T>* Y, long long nnz, unsigned stride, unsigned blocks, int feat) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    constexpr int BATCH = LANES < PIECE ? PIECE / LANES : 1;
    const unsigned block = blockIdx.x % blocks, slice = blockIdx.x / blocks;
    const int lane = threadIdx.x % LANES, f = (slice * LANES + lane) * VEC;
    const bool active = f < feat;
    const char* x_slice = kept((const char*)(X + (active ? f : 0)));
    const long long first = (block * (long long)(SPMM_THREADS / LANES) + threadIdx.x / LANES) * RUN;
    const int stop = max(min(nnz - first, (long long)RUN), 0LL);

    Index next_rows[BATCH], next_cols[BATCH];
    Sum next_weights[BATCH];
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {  // behind the last entry that one again
            const long long entry = min(first + begin + (lane * BATCH + b) % PIECE, nnz - 1);
            next_rows[b] = read(rows + entry), next_cols[b] = read(cols + entry);
            next_weights[b] = data ? load(read(data + entry)) : Sum(1);
        }
    };
    Index row = -1;
    Sum sum[VEC];
    const auto flush = [&]() {
        if (row >= 0 && active) add_atomically<VEC>(Y + row * (long long)feat + f, sum);
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] = 0;
    };
    flush();
    fetch(0);
    for (int begin = 0; __any_sync(FULL_WARP, begin < stop); begin += PIECE) {
        Index held[BATCH];
        Sum weight[BATCH];
        Vector x[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            x[j] = read((const Vector*)(x_slice + at(__shfl_sync(FULL_WARP, next_cols[j % BATCH], j / BATCH, LANES), stride)));
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            held[b] = next_rows[b], weight[b] = next_weights[b];
            if (row_scale) weight[b] *= read(row_scale + next_rows[b]);
            if (col_scale) weight[b] *= read(col_scale + next_cols[b]);
        }
        fetch(begin + PIECE);
#pragma unroll
        for (int j = 0; j < PIECE; ++j) {
            const Index own = __shfl_sync(FULL_WARP, held[j % BATCH], j / BATCH, LANES);
            const Sum w = __shfl_sync(FULL_WARP, weight[j % BATCH], j / BATCH, LANES);
            if (begin + j >= stop) continue;
            if (own != row) flush();
            row = own;
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += w * load(x[j], v);
        }
    }
    flush();
}
