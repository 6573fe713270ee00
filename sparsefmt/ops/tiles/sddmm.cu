#include "engine/common.cuh"
#include "engine/copies.cuh"
#include "tiles/mma.cuh"
#include "tiles/tiles.cuh"

// Flags. Of features that take several launches: sums go on from `parts`; they go there. Blocks of all heads of an item
// are neighbours, else those of all items of a head.
constexpr int ADD = 1, KEEP = 2, TOGETHER = 4;

// How a block shares HEIGHT rows of X times a slab of columns, over ROW bytes of features. A warp has TALL tiles of 16
// rows, 8 columns of each slab, and one of DEEP parts of the features.
template <int HEIGHT, int ROW> struct Block {
    static constexpr int TILES = HEIGHT / 16, TALL = TILES < 4 ? 1 : 2, DEEP = TALL * ROW > 512 ? 2 : 1;
    static constexpr int OWN = ROW / 64 / DEEP;              // times 64 bytes of a warp
    static constexpr int WARPS_M = TILES / TALL, THREADS = WARPS_M * 2 * DEEP * WARP;
    static constexpr int RESIDENT = (OWN * TALL > 4 ? 512 : 768) / THREADS;  // blocks that registers have room for
    static constexpr int SLABS = ROW > 256 || HEIGHT == 16 ? 1 : 2, COLUMNS = SLABS * SLAB;  // of a step
    static constexpr int CELLS = HEIGHT * SLAB, SUMS = SLABS * CELLS;
    static constexpr int STAGES = 3;                         // one is read, the others are on their way
    static constexpr int SHARED = STAGES * COLUMNS * ROW + 2 * DEEP * SUMS * 4;
};

// Rows of Y on chip, of the columns of a step in each stage. A thread copies 16 bytes of every STEP-th row. In odd rows
// the halves of each 128 bytes change places: lanes that load together, of two rows, find banks of their own.
template <typename Index, typename B, int ROW> struct Gather {
    static constexpr int CHUNKS = ROW / 16, STEP = B::THREADS / CHUNKS, COPIES = B::COLUMNS / STEP;
    static_assert(B::COLUMNS % STEP == 0 && STEP % 2 == 0, "the rows of a thread are all even or all odd");
    struct Columns { Index at[COPIES]; };
    char* to;
    const char* from;
    const Index* columns;  // of the step to look up next, from this thread's first row on
    unsigned stride;
    int left;              // of them, in the item

    __device__ Gather(char* stages, const char* Y, const Index* columns, int slabs, int bytes, unsigned stride)
        : stride(stride) {
        const int first = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        to = stages + first * ROW + (chunk ^ (first & 1) << 2) * 16;
        from = kept(Y + chunk * 16);
        this->columns = columns + first;
        left = slabs * SLAB - first;
        if (chunk * 16 < bytes) return;
        left = 0;  // zeros, for good, where no feature is
        for (int i = 0; i < B::STAGES * COPIES; ++i) *(int4*)(to + i * STEP * ROW) = make_int4(0, 0, 0, 0);
    }
    __device__ Columns look_up() {
        Columns found;
#pragma unroll
        for (int i = 0; i < COPIES; ++i)
            if (i * STEP < left) found.at[i] = read(columns + i * STEP);
        columns += B::COLUMNS, left -= B::COLUMNS;
        return found;
    }
    // What was looked up `before` steps ago.
    __device__ void fetch(int stage, const Columns& found, int before) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            if (i * STEP >= left + before * B::COLUMNS) break;
            copy_16(to + stage * (B::COLUMNS * ROW) + i * STEP * ROW, from + at(found.at[i], stride));
        }
    }
};

// Where the entries of a step are: a thread looks up EACH of them a step ahead, what is beyond that when its sum is there.
// Nothing that was loaded is touched before it is used, so that no step waits for the memory.
template <typename Index, typename B> struct Entries {
    static constexpr int EACH = 2;
    const Index *starts, *perm;       // of the item
    const unsigned short* cells;
    int slabs;
    Index base;
    int begin, middle, end = 0;       // of the step; the second slab's from the middle on
    Index next;                       // of the next one, the middle in even lanes and the end in odd ones
    unsigned cell[EACH];
    Index place[EACH];

    __device__ Entries(const Index* starts, const unsigned short* cells, const Index* perm, long long first, int slabs)
        : starts(starts + first * B::TILES), slabs(slabs) {
        base = read(this->starts);
        this->cells = cells + base, this->perm = perm + base;
        look_up(0);
    }
    __device__ void look_up(int step) {
        next = read(starts + min(step * B::SLABS + 1 + (int)threadIdx.x % 2, slabs) * B::TILES);
    }
    __device__ void get(int e, unsigned& cell, Index& place) const { cell = __ldg(cells + e), place = read(perm + e); }
    __device__ unsigned in_step(int e, unsigned cell) const { return B::SLABS > 1 && e >= middle ? cell + B::CELLS : cell; }
    __device__ void fetch(int step) {
        begin = end;
        middle = __shfl_sync(FULL_WARP, next, 0) - base;
        end = B::SLABS == 1 ? middle : __shfl_sync(FULL_WARP, next, 1) - base;
        look_up(step + 1);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int e = begin + (int)threadIdx.x + i * B::THREADS;
            if (e < end) get(e, cell[i], place[i]);
        }
    }
    // Each of them: f(number in the item, cell, place in CSR order).
    template <typename F> __device__ void each(F&& f) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int e = begin + (int)threadIdx.x + i * B::THREADS;
            if (e < end) f(e, in_step(e, cell[i]), place[i]);
        }
#pragma unroll 2
        for (int e = begin + (int)threadIdx.x + EACH * B::THREADS; e < end; e += B::THREADS) {
            unsigned its_cell;
            Index its_place;
            get(e, its_cell, its_place);
            f(e, in_step(e, its_cell), its_place);
        }
    }
};

// As the product reads them.
template <typename T> __device__ inline uint4 operand(uint4 v) {
    if constexpr (sizeof(T) == 4) {
        v.x = tf32(__uint_as_float(v.x)), v.y = tf32(__uint_as_float(v.y));
        v.z = tf32(__uint_as_float(v.z)), v.w = tf32(__uint_as_float(v.w));
    }
    return v;
}

// s[perm[e], h] = r[i] * c[j] * sum_f X[i, h, f] * Y[j, h, f] at the entries e = (i, j) of condensed tiles (TC-GNN,
// section 4.3), on tensor cores; of at most ROW bytes of features, from `from` on.
// A block owns one item, HEIGHT rows of X, and one head. The rows of X stay in registers; those of Y are gathered for some
// slabs of 16 columns at a time, the next ones meanwhile. The sums of all cells go to shared memory, and from there those
// of entries to their places, a step later. A sum may run over features in any order that X and Y share: a lane has 16
// bytes of a row where the operands of two products would have 8 here and there.
template <typename T, typename Index, int HEIGHT, int ROW, bool MORE>
__global__ void __launch_bounds__(Block<HEIGHT, ROW>::THREADS, Block<HEIGHT, ROW>::RESIDENT)
sddmm_sgt_mma(const Item<Index>* __restrict__ items, const Index* __restrict__ columns, const Index* __restrict__ starts,
              const unsigned short* __restrict__ cells, const Index* __restrict__ perm, const T* __restrict__ X,
              const T* __restrict__ Y, const float* __restrict__ row_scale, const float* __restrict__ col_scale,
              T* __restrict__ s, float* __restrict__ parts, long long n_rows, long long taken, unsigned x_stride,
              unsigned y_stride, unsigned n_items, int heads, int feat, int from, int flags) {
    using B = Block<HEIGHT, ROW>;
    constexpr int SLABS = B::SLABS, STAGES = B::STAGES, TALL = B::TALL, OWN = B::OWN;
    extern __shared__ int4 dynamic[];
    char* const stages = kept_shared((char*)dynamic);
    float* const sums = (float*)(stages + STAGES * B::COLUMNS * ROW);

    const Item<Index> item = items[flags & TOGETHER ? blockIdx.x / heads : blockIdx.x % n_items];
    const int head = flags & TOGETHER ? blockIdx.x % heads : blockIdx.x / n_items;
    const int slabs = item.last - item.first, steps = (slabs + SLABS - 1) / SLABS;
    if (!slabs) return;
    const int bytes = min(feat - from, ROW / (int)sizeof(T)) * (int)sizeof(T);
    const long long skipped = (long long)head * feat + from, top = (long long)item.window * HEIGHT;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int wn = warp % 2, wm = warp / 2 % B::WARPS_M, part = warp / 2 / B::WARPS_M;

    columns += item.first * (long long)SLAB;
    Gather<Index, B, ROW> rows(stages, (const char*)(Y + skipped), columns, slabs, bytes, y_stride);
    typename Gather<Index, B, ROW>::Columns next[STAGES];
#pragma unroll
    for (int step = 0; step < STAGES; ++step) next[step] = rows.look_up();
    Entries<Index, B> entries(starts, cells, perm, item.first, slabs);
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        rows.fetch(step, next[step], STAGES - step);
        copies_end();
    }
    typename Gather<Index, B, ROW>::Columns ahead = next[STAGES - 1];

    unsigned x[OWN][TALL][2][4];
#pragma unroll
    for (int m = 0; m < TALL; ++m) {
        uint4 word[2][OWN];
#pragma unroll
        for (int low = 0; low < 2; ++low) {
            const Index row = min(top + (wm * TALL + m) * 16 + low * 8 + g, n_rows - 1);
            const char* const here = (const char*)(X + skipped) + at(row, x_stride);
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                const int place = (part * OWN + k) * 64 + t * 16;
                word[low][k] = operand<T>(place < bytes ? __ldg((const uint4*)(here + place)) : make_uint4(0, 0, 0, 0));
            }
        }
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const uint4 a = word[0][k], b = word[1][k];
            x[k][m][0][0] = a.x, x[k][m][0][1] = b.x, x[k][m][0][2] = a.y, x[k][m][0][3] = b.y;
            x[k][m][1][0] = a.z, x[k][m][1][1] = b.z, x[k][m][1][2] = a.w, x[k][m][1][3] = b.w;
        }
    }

    const int here = (wn * 8 + g) * ROW + part * OWN * 64 + (g & 1) * 64 + t * 16;
    float* const own_sums = sums + part * B::SUMS + wm * TALL * 256 + wn * 128 + lane * 4;
    const auto multiply = [&](int stage, int step) {
        const char* const rows = stages + stage * (B::COLUMNS * ROW);
        float sum[SLABS][TALL][4] = {};
#pragma unroll
        for (int k = 0; k < OWN; ++k)
#pragma unroll
            for (int i = 0; i < SLABS; ++i) {
                const char* const place = rows + (here ^ (k & 1) * 64) + (k & ~1) * 64 + i * (SLAB * ROW);
                const uint4 y = operand<T>(*(const uint4*)place);
#pragma unroll
                for (int m = 0; m < TALL; ++m) {
                    multiply_add(sum[i][m], x[k][m][0], y.x, y.y, T());
                    multiply_add(sum[i][m], x[k][m][1], y.z, y.w, T());
                }
            }
#pragma unroll
        for (int i = 0; i < SLABS; ++i)
#pragma unroll
            for (int m = 0; m < TALL; ++m)
                *(float4*)(own_sums + step % 2 * (B::DEEP * B::SUMS) + i * B::CELLS + m * 256) =
                    make_float4(sum[i][m][0], sum[i][m][1], sum[i][m][2], sum[i][m][3]);
    };

    s += head;
    if (MORE && parts) parts += head * taken + entries.base;
    const unsigned pitch = heads * sizeof(T);
    const auto put = [&](int step) {
        entries.each([&](int e, unsigned cell, Index place) {
            const float* const sum = sums + step % 2 * (B::DEEP * B::SUMS) + Cell{cell}.template place<float>();
            float total = B::DEEP == 1 ? sum[0] : sum[0] + sum[B::SUMS];
            if (MORE) {
                const int slab = step * SLABS + cell / B::CELLS;
                if (flags & ADD) total += parts[e];
                if (flags & KEEP) {
                    parts[e] = total;
                    return;
                }
                if (row_scale) total *= row_scale[top + Cell{cell % B::CELLS}.row()];
                if (col_scale) total *= col_scale[columns[slab * SLAB + Cell{cell}.column()]];
            }
            store((T*)((char*)s + at(place, pitch)), total);
        });
    };

    int stage = 0, free = STAGES - 1;  // of this step, and of what was read the step before
#pragma unroll 1
    for (int step = 0;; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        rows.fetch(free, ahead, 1);
        copies_end();
        ahead = rows.look_up();
        if (step > 0) put(step - 1);
        if (step == steps) break;
        entries.fetch(step);
        multiply(stage, step);
        free = stage, stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}
