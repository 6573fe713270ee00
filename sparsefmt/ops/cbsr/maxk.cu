#include "engine/common.cuh"

// MaxK without a sort. Values become levels, integers below LEVELS: of two values the larger never has the higher
// level. A search by bits finds the level of the k-th largest value. If not all values of that level are among the
// k largest, they alone are spread over the levels, by their bits, and of equal values by their columns, and so on.
// A level is kept as the half BASE + level, two in a register. So all sums and differences are exact, and
// sat(limit - level), two at a time on the floating-point units, is 1 for levels below the limit and 0 for others.
constexpr int LEVELS = 1024, BASE = 1024;
constexpr unsigned BASE_BITS = 0x6400;  // the half BASE; adding to it counts, as its last place is 1
constexpr int GROUP = 8;                // columns that a thread has side by side
constexpr int KEPT = 32;                // values of a thread that registers hold; more are read again
constexpr int ALIGNED = 1, FEW = 2;     // flags: rows of X, to 16 bytes; k <= 2 for each lane that has columns

template <int LANES> constexpr int MAXK_THREADS = LANES <= WARP ? 128 : LANES;
// Resident threads that leave each of them the registers for its values.
template <int HELD>
constexpr int RESIDENT = HELD <= 8 ? 1536 : HELD <= 16 ? 1024 : HELD <= KEPT ? 512 : 1024;

// x += that of the lane `step` below, if there is one in the sub-warp: the shuffle itself knows.
__device__ inline void add_from_below(unsigned& x, int step, int width) {
    asm volatile("{ .reg .pred p; .reg .u32 y; shfl.sync.up.b32 y|p, %0, %1, %2, -1; @p add.u32 %0, %0, y; }"
                 : "+r"(x) : "r"(step), "r"((WARP - width) << 8));
}

__device__ inline unsigned warp_sum(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_WARP, x);
#else
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
#endif
}
__device__ inline unsigned warp_max(unsigned x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL_WARP, x);
#else
    for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
    return x;
#endif
}

// The LANES threads that have a row together: a sub-warp, a warp or a block.
template <int LANES> struct Team {
    static constexpr int WIDTH = LANES < WARP ? LANES : WARP, WARPS = LANES / WIDTH;
    unsigned (&shared)[2][WARP];  // by turns, so that one barrier is enough
    int lane = threadIdx.x % LANES, turn = 0;

    // What the warps of a block say, in as many lanes; 0 in the others.
    __device__ unsigned from_warps(unsigned x) {
        turn ^= 1;
        if (lane % WARP == 0) shared[turn][lane / WARP] = x;
        __syncthreads();
        return lane % WARP < WARPS ? shared[turn][lane % WARP] : 0;
    }
    // Less than 2^LANES: the sub-warps of a warp have a field of one word each.
    __device__ unsigned sum(unsigned x) {
        if constexpr (LANES < WARP) {
            const int field = threadIdx.x % WARP / LANES * LANES;
            return warp_sum(x << field) >> field & ((1u << LANES) - 1);
        }
        x = warp_sum(x);
        return LANES > WARP ? warp_sum(from_warps(x)) : x;
    }
    __device__ unsigned largest(unsigned x) {
        if constexpr (LANES < WARP) {
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(FULL_WARP, x, step));
            return x;
        }
        x = warp_max(x);
        return LANES > WARP ? warp_max(from_warps(x)) : x;
    }
    __device__ unsigned long long largest(unsigned long long x) {
        const unsigned high = largest((unsigned)(x >> 32));
        return (unsigned long long)high << 32 | largest(x >> 32 == high ? (unsigned)x : 0u);
    }
    template <typename Key> __device__ Key smallest(Key x) { return ~largest(~x); }
    // The sum over the lanes before this one; that over all is added to `total`.
    __device__ unsigned before(unsigned x, unsigned& total) {
        unsigned upto = x;
#pragma unroll
        for (int step = 1; step < WIDTH; step *= 2) add_from_below(upto, step, WIDTH);
        const unsigned own = __shfl_sync(FULL_WARP, upto, WIDTH - 1, WIDTH);
        const unsigned of_warps = LANES > WARP ? from_warps(own) : 0;
        total += LANES > WARP ? warp_sum(of_warps) : own;
        if (LANES > WARP) upto += warp_sum(lane % WARP < lane / WARP ? of_warps : 0);
        return upto - x;
    }
    __device__ bool all(bool x) const { return LANES >= WARP ? x : __all_sync(FULL_WARP, x); }
    __device__ void meet() const {
        if (LANES > WARP) __syncthreads();
        else __syncwarp();
    }
};

// Unsigned integers in the order of the values; -0 is 0, and all NaN are the largest. For float32 adding 0 sees to
// both, in PTX because -ftz would drop subnormal values.
__device__ inline unsigned key(float x) {
    asm("add.rn.f32 %0, %0, 0f00000000;" : "+f"(x));
    const int bits = __float_as_int(x);
    return bits ^ (bits >> 31 | 0x80000000);
}
__device__ inline unsigned long long key(double x) {
    const long long bits = __double_as_longlong(x + 0.0);
    return x != x ? ~0ULL : bits ^ (bits >> 63 | 1ULL << 63);
}
__device__ inline float value_of(unsigned key) { return __uint_as_float(key ^ (~((int)key >> 31) | 0x80000000)); }

__device__ inline int width(unsigned x) { return WARP - __clz(x); }
__device__ inline int width(unsigned long long x) { return 2 * WARP - __clzll(x); }

// A row of X as one thread sees it: in each of its groups GROUP columns, with -inf for those that do not exist.
template <typename T, int LANES> struct Part {
    using Value = accumulator<T>;
    const T* x;
    int feat, aligned;

    __device__ static int column(int group) { return (group * LANES + threadIdx.x % LANES) * GROUP; }
    __device__ void load(int group, Value* v) const {
        constexpr int VEC = 16 / sizeof(T);
        const int first = column(group);
        Pack<T, VEC> packs[GROUP / VEC];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) store(&packs[i / VEC].v[i % VEC], lowest<Value>());
        if (aligned) {
#pragma unroll
            for (int i = 0; i < GROUP; i += VEC)
                if (first + i < feat) packs[i / VEC] = read((const Pack<T, VEC>*)(x + first + i));
        } else {
#pragma unroll
            for (int i = 0; i < GROUP; ++i)
                if (first + i < feat) packs[i / VEC].v[i % VEC] = x[first + i];
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) v[i] = ::load(packs[i / VEC], i % VEC);
    }
};

// The k largest values of a row, and one thread's levels of its HELD columns.
template <typename T, int LANES, int HELD> struct Selection {
    using Value = accumulator<T>;
    using Key = decltype(key(Value()));
    static constexpr int GROUPS = HELD / GROUP;
    Part<T, LANES> row;
    Team<LANES> team;
    int k;
    __half2 levels[HELD / 2];
    __half2 limit;  // twice the lowest that k levels lie below
    bool found;     // no more than k do
    bool equal;     // all values of the level that is refined

    __device__ __half level(int i) const { return i % 2 ? __high2half(levels[i / 2]) : __low2half(levels[i / 2]); }

    // How many levels of these groups lie below a limit. A count times the least half is that count, as bits.
    __device__ unsigned below(__half2 limit, int first = 0, int last = GROUPS) const {
        const __half2 least = __halves2half2(__ushort_as_half(1), __ushort_as_half(0));
        __half2 sum = __hsub2_sat(limit, levels[first * GROUP / 2]);
#pragma unroll
        for (int i = first * GROUP / 2 + 1; i < last * GROUP / 2; ++i)
            sum = __hadd2(sum, __hsub2_sat(limit, levels[i]));
        sum = __hmul2(__hadd2(__low2half2(sum), __high2half2(sum)), least);
        return *(const unsigned*)&sum;
    }
    __device__ void search() {
        limit = __float2half2_rn(BASE + LEVELS);
        found = false;
#pragma unroll (HELD > KEPT ? 1 : 10)
        for (int step = LEVELS / 2; step > 0; step /= 2) {
            const __half2 lower = __hsub2(limit, __float2half2_rn(step));
            const int count = team.sum(below(lower));
            if (count >= k) limit = lower;
            found |= count == k;
            if (team.all(found)) break;
        }
    }

    // Levels in proportion to the distance from the largest value. They end, where k is small, at the smallest of the
    // lanes' largest values, which as many values reach as there are lanes. Values that are infinite, NaN, very large
    // or very small only make levels few: as sat(NaN) is 0, none is higher than that of a smaller value.
    __device__ void spread(bool few) {
        constexpr int KEEP = HELD <= KEPT ? GROUP : 0;  // from the values of one group to those of the next
        Value held[KEEP ? HELD : GROUP];
        float high = lowest<float>(), low = -high;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            Value* x = held + g * KEEP;
            row.load(g, x);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) high = fmaxf(high, x[i]);
            if (few) continue;
#pragma unroll
            for (int i = 0; i < GROUP; ++i) low = fminf(low, x[i] > lowest<Value>() ? x[i] : -lowest<Value>());
        }
        if (few && row.column(0) < row.feat) low = high;
        high = value_of(team.largest(key(high)));
        const float scale = __fdividef(1, high - value_of(team.smallest(key(low))));
        const __half2 base = __float2half2_rn(BASE), most = __float2half2_rn(LEVELS - 2);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            if (!KEEP) row.load(g, held);
#pragma unroll
            for (int i = 0; i < GROUP; i += 2) {
                const Value* x = held + g * KEEP + i;
                const float one = __saturatef((high - (float)x[0]) * scale);
                const float other = __saturatef((high - (float)x[1]) * scale);
                levels[(g * GROUP + i) / 2] = __hfma2(__floats2half2_rn(one, other), most, base);
            }
        }
    }

    // What tells values of one level apart, for every value.
    template <typename F> __device__ void each_code(F f) const {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            Value x[GROUP];
            row.load(g, x);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) f(g * GROUP + i, equal ? ~(Key)(row.column(g) + i) : key(x[i]));
        }
    }
    // The last level below the limit, not all of whose values are wanted, is spread over levels from 1 on: lower
    // levels become 0, higher ones the last.
    __device__ void refine() {
        row.x = kept(row.x);  // else the values loaded at first would stay in registers
        const __half split = __hsub(__low2half(limit), __float2half_rn(1));
        Key top = 0, bottom = ~top;
        each_code([&](int i, Key code) {
            if (__heq(level(i), split)) top = max(top, code), bottom = min(bottom, code);
        });
        top = team.largest(top);
        bottom = team.smallest(bottom);
        if (top == bottom) equal = true, top = ~(Key)0, bottom = ~(Key)row.feat;
        const int shift = max(width(top - bottom) - 9, 0);  // 2^9 levels
        each_code([&](int i, Key code) {
            unsigned fresh = 1 + (top - code >> shift);
            if (__hlt(level(i), split)) fresh = 0;
            if (__hgt(level(i), split)) fresh = LEVELS - 1;
            const __half half = __ushort_as_half(BASE_BITS + fresh);
            const __half2 pair = levels[i / 2];
            levels[i / 2] = i % 2 ? __halves2half2(__low2half(pair), half) : __halves2half2(half, __high2half(pair));
        });
    }

    // Columns ascend. Where there is room, they gather in shared memory, so that whole lines are written.
    template <typename Column> __device__ void write(Column* stage, T* values, Column* columns) {
        Column* list = LANES <= WARP ? stage : columns;
        unsigned rank = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            Column* next = list + rank;
            next += team.before(below(limit, g, g + 1), rank);
            if (LANES <= WARP) next = kept_shared(next);
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const bool chosen = __hlt(level(g * GROUP + i), __low2half(limit));
                if (chosen) *next = row.column(g) + i;
                next += chosen;
            }
        }
        team.meet();
#pragma unroll 1
        for (int i = team.lane; i < k; i += LANES) {
            const Column column = list[i];
            if (LANES <= WARP) columns[i] = column;
            values[i] = read(row.x + column);
        }
    }
};

// The k largest values of each row of X and their columns, ascending. NaN counts as the largest value, -0 as 0, and of
// equal values the lowest columns are taken. A team of LANES threads owns a row and a thread HELD of its columns.
template <typename T, typename Column, int LANES, int HELD>
__global__ void __launch_bounds__(MAXK_THREADS<LANES>, RESIDENT<HELD> / MAXK_THREADS<LANES>)
maxk_rows(const T* __restrict__ X, T* __restrict__ values, Column* __restrict__ columns, int n_rows,
          unsigned stride, int feat, int k, int flags) {
    constexpr int TEAMS = MAXK_THREADS<LANES> / LANES;
    __shared__ unsigned shared[2][WARP];
    __shared__ Column stage[LANES <= WARP ? TEAMS : 1][LANES <= WARP ? LANES * HELD : 1];
    const int team = threadIdx.x / LANES;
    const int row = min((int)blockIdx.x * TEAMS + team, n_rows - 1);  // teams behind the last row do that one again
    const T* x = (const T*)((const char*)X + at(row, stride));
    Selection<T, LANES, HELD> selection{{x, feat, flags & ALIGNED}, {shared}, k};
    selection.spread(flags & FEW);
    selection.search();
    while (!selection.team.all(selection.found)) selection.refine(), selection.search();
    const long long first = (long long)row * k;
    selection.write(stage[team], values + first, columns + first);
}
