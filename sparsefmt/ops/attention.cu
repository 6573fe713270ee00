#include "common.cuh"

// A team is a sub-warp of LANES lanes or, beyond 32, the whole block. A lane has HELD values of a row in
// registers, and as many loads in flight: a tile.
template <int LANES> constexpr int HELD_BY = LANES <= 8 ? 8 : 16;
template <int LANES> constexpr int SOFTMAX_THREADS = LANES <= WARP ? 128 : LANES;

template <typename Sum> __device__ inline Sum lowest() { return -Sum(__int_as_float(0x7f800000)); }
template <typename Sum> __device__ inline Sum larger(Sum a, Sum b) { return a > b || a != a ? a : b; }

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
template <int LANES, bool SIDE_BY_SIDE, typename T> struct Row {
    using Sum = accumulator<T>;
    static constexpr int HELD = HELD_BY<LANES>;
    long long n;
    int step, lane, heads;
    int loads;  // of that lane of this warp which holds most: no lane issues more, where rows are short
    Sum* shared;

    // Place k of a tile; from one pointer and a constant where heads lie side by side.
    template <typename P> __device__ P* at(P* s, long long tile, int k) const {
        return SIDE_BY_SIDE ? s + (tile + lane) + k * LANES : s + (tile + lane + k * LANES) * step;
    }
    __device__ bool has(long long tile, int k) const { return k * LANES < (int)min(n - tile - lane, 1LL << 30); }
    __device__ bool one_tile() const { return n <= LANES * HELD; }
    __device__ void load(const T* s, long long tile, Sum fill, Sum (&held)[HELD]) const {
#pragma unroll
        for (int k = 0; k < HELD && k < loads; ++k) {
            held[k] = fill;
            if (has(tile, k)) held[k] = ::load(*at(s, tile, k));
        }
    }
    __device__ void store(T* s, long long tile, const Sum (&held)[HELD]) const {
#pragma unroll
        for (int k = 0; k < HELD && k < loads; ++k) {
            if (has(tile, k)) ::store(at(s, tile, k), held[k]);
        }
    }
    template <bool MAX> __device__ Sum total(Sum x) const { return over_team<LANES, MAX>(x, heads, shared); }
};

// p = exp(s - max) / sum of exp(s - max); NaN where all s are -inf, as everywhere. A row that does not fit
// one tile of registers is read again from the caches, its maximum and sum kept up as it goes.
template <int LANES, bool SIDE_BY_SIDE, typename T>
__device__ inline void softmax_row(const Row<LANES, SIDE_BY_SIDE, T>& row, const T* s, T* p) {
    using Sum = accumulator<T>;
    constexpr int HELD = HELD_BY<LANES>;
    Sum held[HELD], top = lowest<Sum>(), sum = 0;
    for (long long tile = 0; tile < row.n || tile == 0; tile += LANES * HELD) {
        row.load(s, tile, lowest<Sum>(), held);
        Sum higher = top;
#pragma unroll
        for (int k = 0; k < HELD && k < row.loads; ++k) higher = larger(higher, held[k]);
        if (row.one_tile()) higher = row.template total<true>(higher);
        if (row.one_tile() || higher > lowest<Sum>() || higher != higher) {
            sum *= exp(top - higher);
#pragma unroll
            for (int k = 0; k < HELD && k < row.loads; ++k) sum += held[k] = exp(held[k] - higher);
        }
        top = higher;
    }
    if (row.one_tile()) {
        const Sum factor = 1 / row.template total<false>(sum);
#pragma unroll
        for (int k = 0; k < HELD && k < row.loads; ++k) held[k] *= factor;
        row.store(p, 0, held);
        return;
    }
    const Sum all = row.template total<true>(top);
    sum = top > lowest<Sum>() || top != top ? sum * exp(top - all) : Sum(0);
    const Sum factor = 1 / row.template total<false>(sum);
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        row.load(s, tile, lowest<Sum>(), held);
#pragma unroll
        for (int k = 0; k < HELD && k < row.loads; ++k) held[k] = exp(held[k] - all) * factor;
        row.store(p, tile, held);
    }
}

// The gradient: ds = p * (g - sum of p * g).
template <int LANES, bool SIDE_BY_SIDE, typename T>
__device__ inline void softmax_backward_row(const Row<LANES, SIDE_BY_SIDE, T>& row, const T* p, const T* g, T* ds) {
    using Sum = accumulator<T>;
    constexpr int HELD = HELD_BY<LANES>;
    Sum held_p[HELD], held_g[HELD], sum = 0;
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        row.load(p, tile, 0, held_p);
        row.load(g, tile, 0, held_g);
#pragma unroll
        for (int k = 0; k < HELD && k < row.loads; ++k) sum += held_p[k] * held_g[k];
    }
    sum = row.template total<false>(sum);
    for (long long tile = 0; tile < row.n; tile += LANES * HELD) {
        if (!row.one_tile()) row.load(p, tile, 0, held_p), row.load(g, tile, 0, held_g);
#pragma unroll
        for (int k = 0; k < HELD && k < row.loads; ++k) held_g[k] = held_p[k] * (held_g[k] - sum);
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
    constexpr int THREADS = SOFTMAX_THREADS<LANES>;
    __shared__ accumulator<T> shared[THREADS];
    const auto work = [&](auto lanes, long long i, bool own) {
        constexpr int TEAM = decltype(lanes)::value;
        const long long begin = indptr[i], first = begin * heads + blockIdx.y;
        // Without a row, a sub-warp goes along for the shuffles.
        const long long n = own ? (indptr[i + 1] - begin) * together : 0;
        int longest_here = min(n, 1LL << 30);
        for (int lane = WARP / 2; lane > 0; lane /= 2) longest_here = max(longest_here, __shfl_xor_sync(FULL_WARP, longest_here, lane));
        const int loads = TEAM > 8 ? HELD_BY<TEAM> : (longest_here + TEAM - 1) / TEAM;
        const Row<TEAM, SIDE_BY_SIDE, T> row{n, heads, (int)threadIdx.x % TEAM, together, loads, shared};
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
    const bool fits = LANES >= WARP || length * together <= LANES * HELD_BY<LANES>;
    work(Constant<LANES>(), mine, own && fits);
    if (LANES >= WARP) return;
    // Rows of more than a tile of a sub-warp, by the whole warp one after another: 1.9x on products.
    for (unsigned left = __ballot_sync(FULL_WARP, own && !fits && threadIdx.x % LANES == 0); left; left &= left - 1)
        work(Constant<LANES < WARP ? WARP : LANES>(), __shfl_sync(FULL_WARP, mine, __ffs(left) - 1), true);
}
