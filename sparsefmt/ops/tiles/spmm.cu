#include "engine/common.cuh"
#include "engine/copies.cuh"
#include "tiles/mma.cuh"
#include "tiles/tiles.cuh"

constexpr int ADD = 1;     // flag: the rows have sums in Y already

// The sum that an element of the result has on CUDA cores, where implicit zeros times Inf or NaN add nothing.
template <typename T, typename Index>
__device__ __noinline__ float exact(const Tiles<T, Index>& A, long long first, long long last, int tiles, bool baked, int row,
                                    const T* x, unsigned stride, const float* col_scale) {
    float sum = 0;
    for (long long slab = first; slab < last; ++slab)
        for (Index e = A.starts[slab * tiles + row / 16]; e < A.starts[slab * tiles + row / 16 + 1]; ++e) {
            const Cell cell{A.cells[e]};
            if (cell.row() != row) continue;
            const Index column = A.columns[slab * SLAB + cell.column()];
            const long long place = baked ? slab * tiles * 256 + cell.template place<T>() : e;
            float weight = A.values ? load(A.values[place]) : 1;
            if (col_scale) weight *= col_scale[column];
            sum += weight * load(*(const T*)((const char*)x + at(column, stride)));
        }
    return sum;
}

// Y[i, :] (+)= r[i] * sum_e a[e] * c[col[e]] * X[col[e], :] over the entries of condensed tiles (TC-GNN, section 4.2),
// on tensor cores. A block owns one item, HEIGHT rows, and one slice of FEAT features. It gathers the rows of X of some
// slabs of 16 columns at a time, the next ones meanwhile, and every row serves all rows of the window. A warp makes
// the operand of A of bits, 8 a lane and tile, or reads it where the block has put the values.
template <typename T, typename Index, int HEIGHT, int FEAT, int WEIGHTS>
__global__ void __launch_bounds__(Cut<HEIGHT, FEAT>::THREADS, RESIDENT<T, HEIGHT, FEAT>)
spmm_sgt_mma(const Item<Index>* __restrict__ items, const __grid_constant__ Tiles<T, Index> A, const float* __restrict__ col_scale,
             const float* __restrict__ row_scale, const T* __restrict__ X, T* __restrict__ Y,
             float* __restrict__ parts, long long n_rows, unsigned stride, unsigned n_items, int feat, int flags) {
    constexpr bool WEIGHTED = WEIGHTS != UNWEIGHTED;
    using C = Cut<HEIGHT, FEAT>;
    using D = Depth<T, WEIGHTED>;
    using X_ = Rows<T, Index, FEAT, C::THREADS, D::SLABS, D::STAGES>;
    using Guided = Guide<T, Index, C::TILES, WEIGHTED>;
    using Valued = Values<T, Index, HEIGHT, D::SLABS, D::STAGES, C::THREADS, WEIGHTS>;
    constexpr int SLABS = D::SLABS, STAGES = D::STAGES, TALL = C::TALL, TIMES = C::WIDE / 8;
    extern __shared__ int4 dynamic[];
    char* const on_chip = kept_shared((char*)dynamic);

    const Item<Index> item = items[blockIdx.x % n_items];
    const int slice = blockIdx.x / n_items, slabs = item.last - item.first, steps = (slabs + SLABS - 1) / SLABS;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int wm = warp / C::WARPS_N, wn = warp % C::WARPS_N;
    X_ rows(on_chip, X, slice * FEAT, feat, stride);
    Guided guide(rows.stages + STAGES, A, item.first, slabs);
    Valued values(A, col_scale, item.first, slabs, &guide.rings + 1);

    float sums[TALL][TIMES][4] = {};
    guide.fetch(0);
    guide.fetch(Guided::BATCH);
    copies_end();
    if (WEIGHTED) values.fetch(0);
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        rows.fetch(step, guide);
        if (WEIGHTED) values.copy(step);
        copies_end();
    }
    if (WEIGHTED) values.begin_with();

    const auto multiply = [&](const Operand<T, TALL>& a, const typename X_::Stage& from, int s) {
        if constexpr (sizeof(T) == 4) {
            // X as the first operand: 16 features, 4 g + {0, 1} or 4 g + {2, 3}, times 8 rows of A.
#pragma unroll
            for (int j = 0; j < TIMES; j += 4) {
                const int chunk = X_::place(2 * t, wn * (C::WIDE / 4) + j * 2 + g);  // the other rows' too
                const float* const here = (const float*)&from.x[(s * SLAB + 2 * t) * X_::CHUNKS + chunk];
                float x[4][4];  // of the columns 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
                for (int i = 0; i < 4; ++i) *(float4*)x[i] = *(const float4*)(here + (i / 2 * 8 + i % 2) * FEAT);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    unsigned lead[4], rest[4];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const auto both = LeadAndRest::of(x[k / 2 * 2][2 * i + k % 2], x[k / 2 * 2 + 1][2 * i + k % 2]);
                        lead[k] = both.lead, rest[k] = both.rest;
                    }
                    const auto add = [&](const unsigned (&features)[4], const unsigned (&cells)[TALL][4]) {
#pragma unroll
                        for (int m = 0; m < TALL; ++m)
#pragma unroll
                            for (int low = 0; low < 2; ++low)
                                multiply_add(sums[m][j + 2 * i + low], features, cells[m][low], cells[m][2 + low],
                                             __nv_bfloat16());
                    };
                    add(rest, a.word);
                    if (WEIGHTED) add(lead, a.rest);
                    add(lead, a.word);
                }
            }
        } else {
#pragma unroll
            for (int j = 0; j < TIMES; j += 2) {
                unsigned x[4];
                const int row = lane % 16, chunk = X_::place(row, wn * (C::WIDE / 8) + j + lane / 16);
                load_transposed(x, &from.x[(s * SLAB + row) * X_::CHUNKS + chunk]);
#pragma unroll
                for (int m = 0; m < TALL; ++m) {
                    multiply_add(sums[m][j], a.word[m], x[0], x[1], T());
                    multiply_add(sums[m][j + 1], a.word[m], x[2], x[3], T());
                }
            }
        }
    };

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        rows.fetch(step + STAGES - 1, guide);
        if (WEIGHTED) values.copy(step + STAGES - 1);
        if (step * SLABS % Guided::BATCH == 0) guide.fetch(step * SLABS + 2 * Guided::BATCH);
        copies_end();
        if (WEIGHTED) values.go_on(step);
        const auto& from = rows.of(step);
#pragma unroll
        for (int s = 0; s < SLABS; ++s) {
            const int slab = step * SLABS + s;
            if (SLABS > 1 && slab >= slabs) break;
            Operand<T, TALL> a;
            if (WEIGHTED) {
                a.load(values.of(step, s) + wm * TALL * 256, lane, WEIGHTS != BAKED);
            } else {
                const int tile = wm * TALL, place = slab % Guided::RING * Guided::BITS + lane * C::TILES + (tile & ~1);
                using Bits = typename Word<C::TILES == 1 ? 1 : 2>::type;
                a.unpack(*(const Bits*)(guide.rings.masks + place), tile, C::TILES == 1);
            }
            multiply(a, from, s);
        }
    }

    // Of tile m VEC neighbouring features of one row at a time: of the sums of products j and, in float32, j + 2.
    constexpr bool FULL = sizeof(T) == 4;
    constexpr int VEC = FULL ? 4 : 2, PACKS = TIMES * 8 / VEC / 2;
    const int first = slice * FEAT + wn * C::WIDE;
    const auto each = [&](int m, auto&& f) {
#pragma unroll
        for (int low = 0; low < 2; ++low)
#pragma unroll
            for (int odd = 0; odd < (FULL ? 2 : 1); ++odd)
#pragma unroll
                for (int j = 0; j < TIMES; j += FULL ? 4 : 1) {
                    const int row = (wm * TALL + m) * 16 + low * 8;
                    if constexpr (FULL) {
                        const auto &a = sums[m][j + low], &b = sums[m][j + 2 + low];
                        float v[4] = {a[odd], a[odd + 2], b[odd], b[odd + 2]};
                        f(row + 2 * t + odd, first + j * 8 + 4 * g, v);
                    } else {
                        float v[2] = {sums[m][j][2 * low], sums[m][j][2 * low + 1]};
                        f(row + g, first + j * 8 + 2 * t, v);
                    }
                }
    };
    const long long top = (long long)item.window * HEIGHT, pitch = (feat + FEAT - 1) / FEAT * (long long)FEAT;
    float zero = 0;  // unless a sum is Inf or NaN
#pragma unroll
    for (int m = 0; m < TALL; ++m)
#pragma unroll
        for (int i = 0; i < TIMES * 4; ++i) zero = fmaf(sums[m][i / 4][i % 4], 0.f, zero);
    if (__syncthreads_or(zero != 0)) {
        // By way of the chip: where every sum has a call of its own, there are 25 registers fewer for all else.
        constexpr int TILES = HEIGHT == 128 ? 1 : TALL, EACH = TIMES * 4;
        static_assert(TILES * EACH * C::THREADS * sizeof(float) <= STAGES * sizeof(typename X_::Stage), "it has room");
        float* const own = (float*)on_chip + threadIdx.x;
#pragma unroll
        for (int m = 0; m < TALL; m += TILES) {
#pragma unroll
            for (int i = 0; i < TILES * EACH; ++i) own[i * C::THREADS] = sums[m + i / EACH][i % EACH / 4][i % 4];
#pragma unroll 1
            for (int i = 0; i < TILES * EACH; ++i) {
                const int j = i % EACH / 4, d = i % 4, half = FULL ? j % 2 : d / 2;
                const int row = (wm * TALL + m + i / EACH) * 16 + half * 8 + (FULL ? 2 * t + d % 2 : g);
                const int f = first + (FULL ? j / 4 * 32 + 4 * g + j / 2 % 2 * 2 + d / 2 : j * 8 + 2 * t + d % 2);
                float& sum = own[i * C::THREADS];
                if (!(fabsf(sum) <= 3.4e38f) && f < feat && top + row < n_rows)
                    sum = exact(A, item.first, item.last, C::TILES, WEIGHTS == BAKED, row, X + f, stride, col_scale);
            }
#pragma unroll
            for (int i = 0; i < TILES * EACH; ++i) sums[m + i / EACH][i % EACH / 4][i % 4] = own[i * C::THREADS];
        }
    }
    if (item.slot >= 0) {
        float* const to = parts + item.slot * (long long)HEIGHT * pitch;
#pragma unroll
        for (int m = 0; m < TALL; ++m)
            each(m, [&](int row, int f, float (&v)[VEC]) { store_pack<VEC>(to + row * pitch + f, v); });
        return;
    }
    T* const to = Y + top * feat;
    const int rows_left = min((long long)HEIGHT, n_rows - top);
    const auto place = [&](int row, int f) { return to + (long long)row * feat + f; };
    if (feat % VEC || (size_t)Y % (VEC * sizeof(T))) {
#pragma unroll
        for (int m = 0; m < TALL; ++m)
            each(m, [&](int row, int f, float (&v)[VEC]) {
                if (row >= rows_left) return;
                const float factor = row_scale ? row_scale[top + row] : 1;
                for (int i = 0; i < VEC; ++i)
                    if (f + i < feat) store(place(row, f + i), v[i] * factor + (flags & ADD ? load(*place(row, f + i)) : 0));
            });
    } else if (!row_scale && !(flags & ADD)) {
#pragma unroll
        for (int m = 0; m < TALL; ++m)
            each(m, [&](int row, int f, float (&v)[VEC]) {
                if (row < rows_left && f < feat) store_pack<VEC>(place(row, f), v);
            });
    } else {
#pragma unroll
        for (int m = 0; m < TALL; ++m) {
            Pack<T, VEC> before[PACKS] = {};  // read together: each alone would wait for memory
            int pack = 0;
            each(m, [&](int row, int f, float (&)[VEC]) {
                if (flags & ADD && row < rows_left && f < feat) before[pack] = *(const Pack<T, VEC>*)place(row, f);
                ++pack;
            });
            pack = 0;
            each(m, [&](int row, int f, float (&v)[VEC]) {
                const auto& added = before[pack++];
                if (row >= rows_left || f >= feat) return;
                const float factor = row_scale ? row_scale[top + row] : 1;
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[i] = v[i] * factor + load(added.v[i]);
                store_pack<VEC>(place(row, f), v);
            });
        }
    }
}

// Windows whose slabs several blocks took: the sum of their parts, in order. A warp owns one row and 32 features.
template <typename T, typename Index>
__global__ void spmm_sgt_parts(const Item<Index>* __restrict__ cuts, const float* __restrict__ parts,
                               const float* __restrict__ row_scale, T* __restrict__ Y, long long n_rows,
                               long long pitch, int n_cuts, int height, int feat, int flags) {
    const int slabs = (feat + WARP - 1) / WARP;
    const long long item = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / WARP;
    const int f = item % slabs * WARP + threadIdx.x % WARP;
    const long long line = item / slabs;
    const int cut = line / height, row = line % height;
    if (cut >= n_cuts || f >= feat) return;
    const Item<Index> at_work = cuts[cut];  // its parts are [first, last)
    const long long i = (long long)at_work.window * height + row;
    if (i >= n_rows) return;
    float sum = 0;
    for (long long p = at_work.first; p < at_work.last; ++p) sum += parts[(p * height + row) * pitch + f];
    if (row_scale) sum *= row_scale[i];
    T* y = Y + i * feat + f;
    store(y, flags & ADD ? load(*y) + sum : sum);
}
