// What kernels share that sum up rows of a CSR in parts of several values, cut as in spmm.cu; and the softmax of rows.
constexpr int ROW_THREADS = 128;

__device__ inline float power(float x) { return __expf(x); }
__device__ inline double power(double x) { return exp(x); }
__device__ inline float logarithm(float x) { return __logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Philox4x32-10 (Salmon et al., SC'11): the first of the four words that a counter gives.
__device__ inline unsigned philox(unsigned long long seed, unsigned long long counter, unsigned stream) {
    unsigned a = counter, b = counter >> 32, c = stream, d = 0, k0 = seed, k1 = seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p = 0xD2511F53ull * a, q = 0xCD9E8D57ull * c;
        a = (unsigned)(q >> 32) ^ b ^ k0, b = q, c = (unsigned)(p >> 32) ^ d ^ k1, d = p;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    return a;
}

// The sum over `count` lanes of a sub-warp, all of which come here.
template <int LANES, typename Sum> __device__ inline Sum over_lanes(Sum x, int count) {
    const unsigned mask = LANES == WARP ? FULL_WARP : ((1u << LANES % WARP) - 1) << (threadIdx.x % WARP / LANES * LANES);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        if (step < count) x += __shfl_xor_sync(mask, x, step, LANES);
    return x;
}

// What has been summed of one row and head; with TOPS relative to the largest score so far, and a lane's own sum of weights.
template <typename Sum, int VEC, int ARRAYS, bool TOPS> struct Part {
    static constexpr int SIZE = ARRAYS * VEC + 2 * TOPS;
    Sum v[ARRAYS][VEC], top, all;

    __device__ void clear() {
#pragma unroll
        for (int a = 0; a < ARRAYS; ++a)
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[a][i] = 0;
        top = lowest<Sum>(), all = 0;
    }
    __device__ void scale(Sum by) {
#pragma unroll
        for (int a = 0; a < ARRAYS; ++a)
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[a][i] *= by;
        all *= by;
    }
    __device__ void add(const Part& other) {
        Sum by = 1;
        if (TOPS) {
            if (other.top == lowest<Sum>()) return;  // nothing
            const Sum higher = larger(top, other.top);
            scale(power(top - higher));
            by = power(other.top - higher), top = higher;
            all += by * other.all;
        }
#pragma unroll
        for (int a = 0; a < ARRAYS; ++a)
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[a][i] += by * other.v[a][i];
    }
    __device__ void keep(Sum* to, int step) const {
#pragma unroll
        for (int i = 0; i < ARRAYS * VEC; ++i) to[i * step] = v[i / VEC][i % VEC];
        if (TOPS) to[ARRAYS * VEC * step] = top, to[(ARRAYS * VEC + 1) * step] = all;
    }
    __device__ void get(const Sum* from, int step) {
#pragma unroll
        for (int i = 0; i < ARRAYS * VEC; ++i) v[i / VEC][i % VEC] = from[i * step];
        if (TOPS) top = from[ARRAYS * VEC * step], all = from[(ARRAYS * VEC + 1) * step];
    }
};

// The sums over the lanes of a sub-warp of all partial[j]: a lane gets those of its own BATCH entries.
template <int LANES, int BATCH, int N, typename Sum> __device__ inline void totals(Sum (&partial)[N], Sum (&own)[BATCH]) {
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int step = min(LANES, N) / 2, half = N / 2; step > 0; step /= 2, half /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int j = 0; j < half; ++j) {
            const Sum kept = upper ? partial[j + half] : partial[j], sent = upper ? partial[j] : partial[j + half];
            partial[j] = kept + __shfl_xor_sync(FULL_WARP, sent, step, LANES);
        }
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
        own[b] = partial[b];
#pragma unroll
        for (int step = N; step < LANES; step *= 2) own[b] += __shfl_xor_sync(FULL_WARP, own[b], step, LANES);
    }
}

// What sub-warps of a block hold of rows that they share, as in spmm.cu: the last row of each, and its first.
template <typename Part, typename Sum, typename Index, int LANES> struct Shared {
    static constexpr int SUBWARPS = ROW_THREADS / LANES;
    Sum open[SUBWARPS][Part::SIZE * LANES], head[SUBWARPS][Part::SIZE * LANES];
    Index open_row[SUBWARPS];

    __device__ void add_open(Part& sum, Index row, int last, int lane) const {
        int k = last + 1;
        while (k > 0 && open_row[k - 1] == row) --k;
#pragma unroll 1
        for (; k <= last; ++k) add(sum, &open[k][lane], LANES);
    }
    __device__ static void add(Part& sum, const Sum* from, int step) {
        Part other;
        other.get(from, step);
        sum.add(other);
    }
};
