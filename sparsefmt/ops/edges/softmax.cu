#include "engine/common.cuh"

// A team is a sub-warp of LANES lanes or, beyond 32, the whole block. A lane has HELD values of a row in
// registers, and as many loads in flight: a tile.
template <int LANES> constexpr int SOFTMAX_THREADS = LANES <= WARP ? 128 : LANES;

// e^x. In float32 off by 2 + 1.2 |x| units in the last place: the rounding of x alone costs |x|.
__device__ inline float power(float x) { return __expf(x); }
__device__ inline double power(double x) { return exp(x); }

// Sum or maximum over those lanes of a team whose number is the same modulo `heads`, a power of 2.
template <int LANES, bool MAX, typename Sum>
__device__ inline Sum over_team(Sum x, int heads, Sum* shared) {
    const auto merge = [](Sum a, Sum b) { return MAX ? larger(a, b) : a + b; };
#pragma unroll
    for (int step = min(LANES, WARP) / 2; step > 0; step /= 2)
        if (step >= heads) x = merge(x, __shfl_xor_sync(FULL_WARP, x, step));
    if (LANES <= WARP) return x;
    __syncthreads();  // what the call before left has been read
    shared[threadIdx.x] = x;
    __syncthreads();
    x = shared[threadIdx.x % WARP];
    for (int other = WARP; other < LANES; other += WARP) x = merge(x, shared[other + threadIdx.x % WARP]);
    return x;
}

// A row as one lane sees it: n values, of which the lane has every LANES-th; heads side by side, or
// else one head's values `step` apart.
template <int LANES, int HELD, bool SIDE_BY_SIDE, typename T> struct Row {
    using Sum = accumulator<T>;
    long long n;
    int step, lane, heads;
    Sum* shared;

    // Place k of a tile; from one pointer and a constant where heads lie side by side.
    template <typename P> __device__ P* at(P* s, long long tile, int k) const {
        return SIDE_BY_SIDE ? s + (tile + lane) + k * LANES : s + (tile + lane + k * LANES) * step;
    }
    __device__ bool has(long long tile, int k) const { return k * LANES < (int)min(n - tile - lane, 1LL << 30); }
    __device__ bool one_tile() const { return n <= LANES * HELD; }
    __device__ void load(const T* s, long long tile, Sum fill, Sum (&held)[HELD]) const {
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            held[k] = fill;
            if (has(tile, k)) held[k] = ::load(*at(s, tile, k));
        }
    }
    __device__ void store(T* s, long long tile, const Sum (&held)[HELD]) const {
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if (has(tile, k)) ::store(at(s, tile, k), held[k]);
        }
    }
    template <bool MAX> __device__ Sum total(Sum x) const { return over_team<LANES, MAX>(x, heads, shared); }
};

// p = exp(s - max) / sum of exp(s - max); NaN where all s are -inf, as everywhere. A row that does not fit
// one tile of registers is read again from the caches, its maximum and sum kept up as it goes.
template <int LANES, int HELD, bool SIDE_BY_SIDE, typename T>
__device__ inline void softmax_row(const Row<LANES, HELD, SIDE_BY_SIDE, T>& row, const T* s, T* p) {
    using Sum = accumulator<T>;
    Sum held[HELD], top = lowest<Sum>(), sum = 0;
    for (long long tile = 0; tile < row.n || tile == 0; tile += LANES * HELD) {
        row.load(s, tile, lowest<Sum>(), held);
        Sum higher = top;
#pragma unroll
        for (int k = 0; k < HELD; ++k) higher = larger(higher, held[k]);
        if (row.one_tile()) higher = row.template total<true>(higher);
        if (row.one_tile() || higher > lowest<Sum>() || higher != higher) {
            sum *= power(top - higher);
#pragma unroll
            for (int k = 0; k < HELD; ++k) sum += held[k] = power(held[k] - higher);
        }
        top = higher;
    }
    if (row.one_tile()) {
        const Sum factor = 1 / row.template total<false>(sum);
#pragma unroll
        for (int k = 0; k < HELD; ++k) held[k] *= factor;
        row.store(p, 0, held);
        return;
    }
    const Sum all = row.template total<true>(top);
    sum = top > lowest<Sum>() || top != top ? sum * power(top - all) : Sum(0);
    const Sum factor = 1 / row.template total<false>(sum);
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        row.load(s, tile, lowest<Sum>(), held);
#pragma unroll
        for (int k = 0; k < HELD; ++k) held[k] = power(held[k] - all) * factor;
        row.store(p, tile, held);
    }
}

// The gradient: ds = p * (g - sum of p * g).
template <int LANES, int HELD, bool SIDE_BY_SIDE, typename T>
__device__ inline void softmax_backward_row(const Row<LANES, HELD, SIDE_BY_SIDE, T>& row, const T* p, const T* g, T* ds) {
    using Sum = accumulator<T>;
    Sum held_p[HELD], held_g[HELD], sum = 0;
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        row.load(p, tile, 0, held_p);
        row.load(g, tile, 0, held_g);
#pragma unroll
        for (int k = 0; k < HELD; ++k) sum += held_p[k] * held_g[k];
    }
    sum = row.template total<false>(sum);
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        if (!row.one_tile()) row.load(p, tile, 0, held_p), row.load(g, tile, 0, held_g);
#pragma unroll
        for (int k = 0; k < HELD; ++k) held_g[k] = held_p[k] * (held_g[k] - sum);
        row.store(ds, tile, held_g);
    }
}

// Softmax over the entries of each row, for each head, or its gradient. A team owns one row; the first
// n_long blocks own one row each of more than `longest` entries, which no sub-warp takes.
// Where `together` heads (a power of 2) lie side by side they are one stream of values, of which a lane
// meets only its own head; other numbers of heads go one by one, blockIdx.y.
template <typename T, typename Index, int LANES, bool SIDE_BY_SIDE, bool BACKWARD>
__global__ void __launch_bounds__(SOFTMAX_THREADS<LANES>, (BACKWARD || sizeof(T) == 8 ? 512 : 1280) / SOFTMAX_THREADS<LANES>)
edge_softmax_rows(const Index* __restrict__ indptr, const Index* __restrict__ long_rows, const T* __restrict__ s,
                  const T* __restrict__ grad, T* __restrict__ out, long long n_rows, int n_long,
                  long long longest, int heads, int together) {
    constexpr int THREADS = SOFTMAX_THREADS<LANES>, HELD = 16;
    __shared__ accumulator<T> shared[THREADS];
    const auto work = [&](auto lanes, long long i, bool own) {
        constexpr int TEAM = decltype(lanes)::value;
        const long long begin = indptr[i], first = begin * heads + blockIdx.y;
        // Without a row, a sub-warp goes along for the shuffles.
        const long long n = own ? (indptr[i + 1] - begin) * together : 0;
        const Row<TEAM, HELD, SIDE_BY_SIDE, T> row{n, heads, (int)threadIdx.x % TEAM, together, shared};
        if (BACKWARD) softmax_backward_row(row, s + first, grad + first, out + first);
        else softmax_row(row, s + first, out + first);
    };
    if (blockIdx.x < n_long) {
        work(Constant<THREADS>(), long_rows[blockIdx.x], true);
        return;
    }
    const long long team = (blockIdx.x - (long long)n_long) * (THREADS / LANES) + threadIdx.x / LANES;
    const long long mine = min(team, n_rows - 1), length = indptr[mine + 1] - indptr[mine];
    const bool own = team < n_rows && (LANES == THREADS || length <= longest);
    const bool fits = LANES >= WARP || length * together <= LANES * HELD;
    work(Constant<LANES>(), mine, own && fits);
    if (LANES >= WARP) return;
    // Rows of more than a tile of a sub-warp, by the whole warp one after another: 1.9x on products.
    for (unsigned left = __ballot_sync(FULL_WARP, own && !fits && threadIdx.x % LANES == 0); left; left &= left - 1)
        work(Constant<LANES < WARP ? WARP : LANES>(), __shfl_sync(FULL_WARP, mine, __ffs(left) - 1), true);
}

// A tile is rows side by side in shared memory, cut into parts of at most PART entries, of which a lane has
// one for one head. PART is odd: lanes that walk through their parts meet different banks.
constexpr int PART = 15;
constexpr int TILE_THREADS = 128;
// Blocks that a multiprocessor is to have room for: what a lane holds leaves registers for so many.
template <typename Sum, int HEADS, bool BACKWARD>
constexpr int TILE_BLOCKS = sizeof(Sum) == 8 ? (BACKWARD ? 4 : 6) : HEADS == 0 ? 6 : BACKWARD ? 7 : 12;

// A number that is compared anew: else the compiler keeps all 15 predicates in registers.
__device__ inline int kept(int n) {
    asm volatile("" : "+r"(n));
    return n;
}

template <typename Sum> struct Tile {
    Sum *values, *own;        // of the tile; of the lane's part, `heads` apart
    int there, mine;          // for so many k values[lane + k * WARP] exists, and own[k * heads]
    int heads, number, last;  // the part is the number-th of its row; the lane that has the row's last

    // Sum or maximum over the parts of the row.
    template <bool MAX> __device__ Sum over_row(Sum x) const {
#pragma unroll
        for (int step = 1; step < WARP && step * heads < WARP; step *= 2) {
            const Sum other = __shfl_up_sync(FULL_WARP, x, step * heads);
            if (number >= step) x = MAX ? max(x, other) : x + other;
        }
        return __shfl_sync(FULL_WARP, x, last);
    }
};

// The tile of the first rows of a warp, one row a lane, up to entry `stop`. A row has entries [begin, end)
// and `own` parts, `upto` with those of the rows before it; entries are counted from the first row's.
template <typename Sum>
__device__ inline Tile<Sum> tile_of(Sum* values, int begin, int end, int stop, int own, int upto, int heads) {
    const int lane = threadIdx.x % WARP, part = lane / heads;
    int row = 0;  // of the lane's part: the first whose parts end behind it
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2)
        if (__shfl_sync(FULL_WARP, upto, row + step - 1) <= part) row += step;
    const int behind = __shfl_sync(FULL_WARP, upto, row);
    const int number = part - behind + __shfl_sync(FULL_WARP, own, row);
    const int at = __shfl_sync(FULL_WARP, begin, row) + number * PART;
    const int count = min(__shfl_sync(FULL_WARP, end, row), stop) - at;  // none behind the last part
    // Not as bits: ptxas 13.0 to 13.5 tested bit 6 for bit 14 in one of these kernels.
    const int there = (stop * heads + WARP - 1 - lane) / WARP, mine = min(max(count, 0), PART);
    return {values, values + at * heads + lane % heads, there, mine, heads, number, lane + (behind - 1 - part) * heads};
}

template <typename T, typename Sum>
__device__ inline void softmax_tile(const Tile<Sum>& tile, const T* s, T* p) {
    const int lane = threadIdx.x % WARP;
    Sum held[PART], top = lowest<Sum>(), sum = 0;
#pragma unroll
    for (int k = 0; k < PART; ++k) {
        held[k] = 0;
        if (k < tile.there) held[k] = load(s[lane + k * WARP]);
    }
#pragma unroll
    for (int k = 0; k < PART; ++k) tile.values[lane + k * WARP] = held[k];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PART; ++k) {
        held[k] = lowest<Sum>();
        if (k < tile.mine) held[k] = tile.own[k * tile.heads];
        top = max(top, held[k]);  // passes over NaN, which comes into the sum
    }
    top = tile.template over_row<true>(top);
#pragma unroll
    for (int k = 0; k < PART; ++k) sum += held[k] = power(held[k] - top);
    const Sum factor = 1 / tile.template over_row<false>(sum);
#pragma unroll
    for (int k = 0; k < PART; ++k)
        if (k < tile.mine) tile.own[k * tile.heads] = held[k] * factor;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PART; ++k)
        if (k < tile.there) store(p + lane + k * WARP, tile.values[lane + k * WARP]);
    __syncwarp();
}

template <typename T, typename Sum>
__device__ inline void softmax_backward_tile(const Tile<Sum>& tile, const T* p, const T* g, T* ds) {
    const int lane = threadIdx.x % WARP;
    Sum held_p[PART], held_g[PART], sum = 0;
#pragma unroll
    for (int k = 0; k < PART; ++k) {
        held_p[k] = held_g[k] = 0;
        if (k < tile.there) held_p[k] = load(p[lane + k * WARP]), held_g[k] = load(g[lane + k * WARP]);
    }
#pragma unroll
    for (int k = 0; k < PART; ++k) tile.values[lane + k * WARP] = held_p[k] * held_g[k];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PART; ++k)
        if (k < tile.mine) sum += tile.own[k * tile.heads];
    sum = tile.template over_row<false>(sum);
    const int mine = kept(tile.mine), there = kept(tile.there);
#pragma unroll
    for (int k = 0; k < PART; ++k)
        if (k < mine) tile.own[k * tile.heads] = sum;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PART; ++k)
        if (k < there) store(ds + lane + k * WARP, held_p[k] * (held_g[k] - tile.values[lane + k * WARP]));
    __syncwarp();
}

// The same for short rows, all heads at once; HEADS is 0 where they are known at run time only.
// A warp owns `share` rows and takes as many of them at a time as make a tile. A row of more parts than a
// tile has it takes as a team, and the first n_long blocks own one row each of more than `longest` entries.
template <typename T, typename Index, int HEADS, bool BACKWARD>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS<accumulator<T>, HEADS, BACKWARD>)
edge_softmax_tiles(const Index* __restrict__ indptr, const Index* __restrict__ long_rows, const T* __restrict__ s,
                   const T* __restrict__ grad, T* __restrict__ out, long long n_rows, int n_long,
                   long long longest, int heads, int share) {
    __shared__ accumulator<T> shared[TILE_THREADS * PART];
    if (HEADS) heads = HEADS;
    const auto whole = [&](auto lanes, Index from, Index to) {
        constexpr int TEAM = decltype(lanes)::value, TOGETHER = HEADS ? HEADS : 1;
        constexpr int HELD = BACKWARD || HEADS == 0 || sizeof(T) == 8 ? 8 : 16;
        for (int head = 0; head < heads; head += TOGETHER) {
            const long long first = (long long)from * heads + head, n = (long long)(to - from) * TOGETHER;
            const Row<TEAM, HELD, HEADS != 0, T> row{n, heads, (int)threadIdx.x % TEAM, TOGETHER, shared};
            if (BACKWARD) softmax_backward_row(row, s + first, grad + first, out + first);
            else softmax_row(row, s + first, out + first);
        }
    };
    if (blockIdx.x < n_long) {
        const Index* row = indptr + long_rows[blockIdx.x];
        whole(Constant<TILE_THREADS>(), row[0], row[1]);
        return;
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, parts = WARP / heads;
    const long long first = ((blockIdx.x - (long long)n_long) * (TILE_THREADS / WARP) + warp) * share;
    const Index* row = indptr + min(first, n_rows);
    int left = min((long long)share, n_rows - min(first, n_rows));
    Index begin = row[min(lane, left)], end = row[min(lane + 1, left)];
    while (left > 0) {
        const int own = min((int)(min((long long)(end - begin), 1LL << 20) + PART - 1) / PART, parts + 1);
        int upto = own;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, upto, step);
            if (lane >= step) upto += other;
        }
        const int taken = __popc(__ballot_sync(FULL_WARP, upto <= parts)), next = max(taken, 1);
        const Index from = __shfl_sync(FULL_WARP, begin, 0), to = __shfl_sync(FULL_WARP, end, next - 1);
        const int own_begin = min((long long)(begin - from), 1LL << 20);
        const int own_end = min((long long)(end - from), 1LL << 20);
        row += next, left -= next;
        begin = row[min(lane, left)], end = row[min(lane + 1, left)];  // there when they are needed
        if (!taken) {
            if (to - from <= longest) whole(Constant<WARP>(), from, to);
            continue;
        }
        const auto tile = tile_of(shared + warp * WARP * PART, own_begin, own_end, to - from, own, upto, heads);
        const long long place = (long long)from * heads;
        if (BACKWARD) softmax_backward_tile(tile, s + place, grad + place, out + place);
        else softmax_tile(tile, s + place, out + place);
    }
}
