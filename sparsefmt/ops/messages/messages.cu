#include "engine/common.cuh"
#include "engine/rows.cuh"

// KIND: what an entry (i, j) adds to the sum of its row, or writes to its own place, of o, the row of O for i, g, that
// of G for j, and w, its own row of E. The gradients walk the transpose, so that g is of dY and o of X.
constexpr int MUL = 0, ADD = 1, RELU_ADD = 2, COPY = 3;          // adds g w; g + w; max(g + w, 0); w
constexpr int MUL_GRAD = 4, ADD_GRAD = 5, RELU_GRAD = 6;         // adds and writes g w, g o; g, g; g where o + w > 0, the same
constexpr int TIMES = 7, PLUS = 8, OWN = 9;                      // writes o g; o + g; o
constexpr int ANY = 10;                                          // which of them the launch says
constexpr int MEAN = 1, MINUS = 2;                               // flags; MINUS: o - g

__device__ constexpr bool gathers(int kind) { return kind != COPY && kind != OWN; }
__device__ constexpr bool reads(int kind) { return kind <= MUL_GRAD || kind == RELU_GRAD; }
__device__ constexpr bool owns(int kind) { return kind == MUL_GRAD || kind >= RELU_GRAD; }
__device__ constexpr bool sums(int kind) { return kind <= RELU_GRAD; }
__device__ constexpr bool writes(int kind) { return kind >= MUL_GRAD; }
__device__ constexpr bool scales(int kind) { return kind >= MUL_GRAD && kind <= RELU_GRAD; }

// Resident blocks: as many as leave each thread the registers for its loads in flight.
template <typename Index, int KIND>
constexpr int RESIDENT = (KIND == ANY || (gathers(KIND) && reads(KIND)) ? 4 : KIND == ADD_GRAD ? 5 : 6)
    - (sizeof(Index) == 8 && (writes(KIND) || !gathers(KIND)));

// Entries of a piece whose rows are in flight together.
constexpr int GROUP = PIECE;

// What is read once, the L2 gives up first: it is for rows of G.
template <typename V> __device__ inline V read_once(const V* p) {
    const auto word = __ldcs((const typename Word<sizeof(V)>::type*)p);
    return *(const V*)&word;
}

// What the lanes of a sub-warp hold for entry j of a piece, of which each has some.
template <int LANES, int BATCH, typename V> __device__ inline V of(const V (&held)[BATCH], int j) {
    return __shfl_sync(FULL_WARP, held[j % BATCH], j / BATCH, LANES);
}

// Y[i, :] = sum of what the entries of row i add, or their mean, and out[e, :] = what entry e writes: none of Y and out
// where they are not given. Entry k has the row perm[k] of E and out, or k. `scale` multiplies the g of gradients, or o.
// The work is cut as in spmm.cu: a sub-warp owns a slice of LANES * VEC features, and all rows that a piece of its
// entries reads of G and E are in flight together.
template <typename T, typename Index, int LANES, int VEC, int KIND>
__global__ void __launch_bounds__(ROW_THREADS, (RESIDENT<Index, KIND>))
message_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
             const int* __restrict__ slot, const Index* __restrict__ perm, const accumulator<T>* __restrict__ scale,
             const T* __restrict__ G, const T* __restrict__ E, const T* __restrict__ O, T* __restrict__ Y,
             T* __restrict__ out, accumulator<T>* carry, long long nnz, unsigned g_stride, unsigned e_stride,
             unsigned o_stride, unsigned blocks, int feat, int any, int flags) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    using Partial = Part<Sum, VEC, 1, false>;
    using Kept = Shared<Partial, Sum, Index, LANES>;
    constexpr int SUBWARPS = ROW_THREADS / LANES, SHARE = CHUNKS / SUBWARPS, BATCH = LANES < PIECE ? PIECE / LANES : 1;
    const int kind = KIND == ANY ? any : KIND;
    __shared__ Kept shared;

    const unsigned block = blockIdx.x % blocks, slice = blockIdx.x / blocks;
    const int subwarp = threadIdx.x / LANES, lane = threadIdx.x % LANES, f = (slice * LANES + lane) * VEC;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + subwarp * SHARE, SHARE, nnz);
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row], active = f < feat;
    const char* const gathered = kept((const char*)(G + (active ? f : 0)));
    const char* const entries = kept((const char*)(E + (active ? f : 0)));
    const char* const rows = (const char*)(O + (active ? f : 0));
    char* const written = out && active ? (char*)(out + f) : nullptr;
    const unsigned out_stride = feat * sizeof(T);
    const auto put = [&](Partial& sum, Index row, long long length) {
        if (!active || !Y) return;
        const Sum factor = flags & MEAN ? Sum(1) / (Sum)max(length, 1LL) : Sum(1);
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum.v[0][v] *= factor;
        store_pack<VEC>(Y + (long long)row * feat + f, sum.v[0]);
    };

    Index cols[BATCH], places[BATCH];
    Vector next_row = {};
    Sum next_scale = 1;
    const auto fetch = [&]() {
        if (owns(kind)) {
            const Index row = at_work.more() ? first_row + at_work.row : 0;  // behind the last one there may be none
            next_row = read((const Vector*)(rows + at(row, o_stride)));
            if (!scales(kind) && scale) next_scale = read(scale + row);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const Index entry = at_work.entry((lane * BATCH + b) % PIECE);
            if (gathers(kind)) cols[b] = read(indices + entry);
            places[b] = perm ? read(perm + entry) : entry;
        }
    };
    Partial sum;
    sum.clear();
    int row_begin = 0;
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        Vector g[GROUP] = {}, w[GROUP] = {};  // ANY may load neither
        Index from[BATCH], to[BATCH];
        Sum weight[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            from[b] = cols[b], to[b] = places[b];
            weight[b] = scales(kind) && scale ? read(scale + cols[b]) : Sum(1);
        }
        const auto load_from = [&](int first) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                if (reads(kind)) w[j] = read_once((const Vector*)(entries + at(of<LANES>(to, first + j), e_stride)));
                if (gathers(kind)) g[j] = read((const Vector*)(gathered + at(of<LANES>(from, first + j), g_stride)));
            }
        };
        load_from(0);
        const int count = at_work.count(), row = at_work.row, pos = at_work.pos;
        const bool row_ends = at_work.row_ends();
        const Vector own_row = next_row;
        const Sum own_scale = next_scale;
        at_work.next();
        fetch();  // of the next piece, while the loads of this one are under way
        const auto take = [&](int j, bool wanted) {
            const Sum by = scales(kind) ? of<LANES>(weight, j) : Sum(1);
            const Index place = writes(kind) ? of<LANES>(to, j) : 0;
            if (!wanted) return;
            Vector word;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                const Sum x = by * load(g[j % GROUP], v), e = load(w[j % GROUP], v), o = load(own_row, v);
                Sum more = 0, found = 0;
                if (kind == MUL || kind == MUL_GRAD) more = x * e;
                if (kind == ADD || kind == RELU_ADD) more = x + e;
                if (kind == RELU_ADD) more = larger(more, Sum(0));
                if (kind == COPY) more = e;
                if (kind == ADD_GRAD) more = found = x;
                if (kind == RELU_GRAD) more = found = o + e <= 0 ? Sum(0) : x;  // NaN lets it through, as torch does
                if (kind == MUL_GRAD) found = x * o;
                if (kind == TIMES) found = own_scale * o * x;
                if (kind == PLUS) found = flags & MINUS ? o - x : o + x;
                if (kind == OWN) found = own_scale * o;
                if (sums(kind)) sum.v[0][v] += more;
                if (writes(kind)) store(&word.v[v], found);
            }
            if (writes(kind) && written) store_once((Vector*)(written + at(place, out_stride)), word);
        };
        const bool full = __all_sync(FULL_WARP, count == PIECE);
#pragma unroll
        for (int first = 0; first < PIECE; first += GROUP) {
            if (first > 0) load_from(first);
            if (full) {
#pragma unroll
                for (int j = first; j < first + GROUP; ++j) take(j, true);
            } else {
#pragma unroll
                for (int j = first; j < first + GROUP; ++j) take(j, j < count);
            }
        }
        if (sums(kind) && row_ends) {
            if (row == 0 && began_earlier) sum.keep(&shared.head[subwarp][lane], LANES);
            else put(sum, first_row + row, pos + count - row_begin);
            sum.clear();
            row_begin = pos + count;
        }
    }
    if (!sums(kind)) return;
    sum.keep(&shared.open[subwarp][lane], LANES);
    if (lane == 0) shared.open_row[subwarp] = open;
    __syncthreads();
    const int width = gridDim.x / blocks * (LANES * VEC);
    const auto carried = [&](int s, int side) { return carry + (2LL * s + side) * width + slice * (LANES * VEC) + lane; };
    if (at_work.rows > 0 && began_earlier) {
        sum.clear();
        shared.add_open(sum, first_row, subwarp - 1, lane);
        Kept::add(sum, &shared.head[subwarp][lane], LANES);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) sum.keep(carried(slot[block], 1), LANES);
        else put(sum, first_row, indptr[first_row + 1] - indptr[first_row]);
    }
    if (subwarp == SUBWARPS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, open, subwarp, lane);
        sum.keep(carried(slot[block + 1], 0), LANES);
    }
}

// The rows that borders between blocks cut, as in spmm.cu: a thread owns one border and one of the features, `width` of
// them in slices of lanes * vec.
template <typename T, typename Index>
__global__ void __launch_bounds__(ROW_THREADS)
message_cut_rows(const Index* __restrict__ indptr, const Place<Index>* __restrict__ start, const int* __restrict__ cut,
                 T* __restrict__ Y, const accumulator<T>* __restrict__ carry, int cuts, int feat, int width, int lanes,
                 int vec, int flags) {
    const long long item = blockIdx.x * (long long)ROW_THREADS + threadIdx.x;
    const int s = item / width, k = item % width, in_slice = k % (lanes * vec);
    const int f = k - in_slice + in_slice % lanes * vec + in_slice / lanes;
    if (s >= cuts || f >= feat) return;
    const auto row_at = [&](long long block) { return start[block * CHUNKS].row; };
    const Index row = row_at(cut[s]);
    if (row_at(cut[s] + 1LL) == row) return;
    int first = s;
    while (first > 0 && row_at(cut[first - 1]) == row) --first;
    accumulator<T> sum = 0;
    for (int i = first; i <= s; ++i) sum += carry[2LL * i * width + k];
    sum += carry[(2LL * s + 1) * width + k];
    if (flags & MEAN) sum *= accumulator<T>(1) / (accumulator<T>)(indptr[row + 1] - indptr[row]);
    store(Y + (long long)row * feat + f, sum);
}
