#include "common.cuh"
#include "cbsr.cuh"

// Sums of WIDTH neighbours in one request, where the device has it: the way to the L2 is what limits sspmm.
template <int WIDTH, typename Sum> __device__ inline void add_to(Sum* y, const Sum (&x)[WIDTH]) {
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(Sum) == 4 && WIDTH == 4) {
        asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "l"(y), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) atomicAdd(y + i, x[i]);
}

// 16 bytes to shared memory, in the background where the device can.
__device__ inline void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(int4*)to = __ldg((const int4*)from);
#endif
}
__device__ inline void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the copies since the last end have come.
__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncwarp();
}

// Rows of X as a warp comes to them: this one and the next are in shared memory, if it has room.
template <typename T, typename Index, bool ON_CHIP> struct Held {
    const T* X;
    T* buffers;
    long long stride;
    int feat, rows;  // with entries here, from the first on
    bool aligned;
    Index first;
    const T* row;

    __device__ void bring(int r) {
        const T* from = X + (first + r) * stride;
        T* to = buffers + r % 2 * feat;
        constexpr int VEC = 16 / sizeof(T);
        const int lane = threadIdx.x % WARP;
        if (r < rows && aligned)
            for (int f = lane * VEC; f < feat; f += WARP * VEC) copy_16(to + f, from + f);
        else if (r < rows)
            for (int f = lane; f < feat; f += WARP) to[f] = from[f];
        copies_end();
    }
    __device__ void begin() {
        row = ON_CHIP ? buffers : X + first * stride;
        if (ON_CHIP) bring(0), bring(1), wait_for_copies();
    }
    __device__ void go_to(int r) {
        row = ON_CHIP ? buffers + r % 2 * feat : X + (first + min(r, rows - 1)) * stride;
        if (!ON_CHIP) return;
        __syncwarp();  // the row before has been read
        bring(r + 1), wait_for_copies();
    }
};

// The entries e = (i, j) of A, with the row i of X on chip (MaxK-GNN, section 4.2). SAMPLED 0: the outer product,
// dS[j, t] += a[e] * r[i] * c[j] * X[i, columns[j, t]]. Atomics: not deterministic. A block owns CHUNKS chunks and one
// slice of places, so that what is added to stays in the L2. SAMPLED 1: the gradient of the entries,
// dA[e] = r[i] * c[j] * sum_t X[i, columns[j, t]] * values[j, t].
template <typename T, typename Index, typename Column, int LANES, int PLACES, int BATCH, int ON_CHIP, int SAMPLED>
__global__ void __launch_bounds__(CBSR_THREADS, 8)
sspmm_csr_outer(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                const Place<Index>* __restrict__ start, const T* __restrict__ data,
                const accumulator<T>* __restrict__ col_scale, const accumulator<T>* __restrict__ row_scale,
                const Column* __restrict__ columns, const T* __restrict__ values, const T* __restrict__ X,
                accumulator<T>* dS, T* dA, long long x_stride, unsigned blocks, int k, int slice, int feat, int flags) {
    using Sum = accumulator<T>;
    constexpr int STREAMS = WARP / LANES, STEP = LANES * PLACES;
    constexpr int WORD = PLACES * sizeof(T) <= 16 ? PLACES : 16 / sizeof(T);
    const unsigned block = blockIdx.x % blocks;
    const int t_first = blockIdx.x / blocks * slice, t_last = min(k, t_first + slice);
    const int warp = threadIdx.x / WARP, wl = threadIdx.x % WARP, stream = wl / LANES, lane = wl % LANES;
    Rows<Index> at_work(indptr, start + (long long)block * CHUNKS + warp * CBSR_OWN);
    const Index first_row = at_work.from.row;
    const long long first_entry = at_work.from.entry;
    if (at_work.total == 0) return;
    Window<T, Index> entries{indices, data, col_scale, first_entry, (long long)at_work.to.entry - 1};
    entries.begin();
    T* buffers = (T*)dynamic_shared + warp * 2 * feat;
    const int rows = at_work.rows + (at_work.to.entry > indptr[at_work.to.row]);
    Held<T, Index, ON_CHIP> held{X, buffers, x_stride, feat, rows, bool(flags & ALIGNED), first_row};
    held.begin();
    Sum factor = row_scale ? row_scale[first_row] : Sum(1);

    const int t0 = t_first + lane * PLACES;
    struct Group {
        Places<Column, PLACES, PLACES> c;
        Index col;
        Sum weight;
    };
    const auto place = [&](const Group& group, int t) { return at(group.col, k) + (t < t_last ? t : t_first); };
    const auto ask = [&](int g) {
        Group group;
        const int source = g % LANES * STREAMS + stream;
        group.col = __shfl_sync(FULL_WARP, entries.col, source);
        group.c.load_from(columns + place(group, t0));
        group.weight = __shfl_sync(FULL_WARP, entries.weight, source);
        return group;
    };
    // Entry number e, if it is of the row at work.
    const auto take = [&](Group& group, int e) {
        Sum dot = 0;
        if (at_work.has(e))
#pragma unroll 1
            for (int t = t0; t < t_last; t += STEP) {
                if (t > t0) group.c.load_from(columns + place(group, t));
                Sum x[PLACES];
#pragma unroll
                for (int i = 0; i < PLACES; ++i) x[i] = load(held.row[group.c[i]]);
                if (SAMPLED) {
                    Places<T, PLACES, WORD> v;
                    v.load_from(values + place(group, t));
#pragma unroll
                    for (int i = 0; i < PLACES; ++i) dot += x[i] * load(v[i]);
                } else {
#pragma unroll
                    for (int i = 0; i < PLACES; ++i) x[i] *= group.weight * factor;
                    add_to(dS + place(group, t), x);
                }
            }
        if (!SAMPLED) return;
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) dot += __shfl_xor_sync(FULL_WARP, dot, step);
        if (lane == 0 && at_work.has(e)) store(dA + first_entry + e, dot * group.weight * factor);
    };

    int g = 0;
    do {
        Group groups[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) groups[b] = ask(g + b);
        if (at_work.all_before((g + BATCH) * STREAMS)) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) take(groups[b], (g + b) * STREAMS + stream);
        } else {
#pragma unroll 1
            for (int b = 0; b < BATCH; ++b) {
                const int first = (g + b) * STREAMS;
                Group group = BATCH == 1 ? groups[0] : ask(g + b);
                take(group, first + stream);
                while (at_work.ends_by(min(first + STREAMS, at_work.total))) {
                    at_work.next();
                    held.go_to(at_work.row);
                    if (row_scale && at_work.row < rows) factor = row_scale[first_row + at_work.row];
                    if (t_last - t_first > STEP) group.c.load_from(columns + place(group, t0));
                    take(group, first + stream);
                }
            }
        }
        g += BATCH;
        if (g % LANES == 0) entries.step(g / LANES);
    } while (g * STREAMS < at_work.total);
}

// Sums in float32, to what they are the gradient of.
template <typename T> __global__ void narrowed(const float* __restrict__ sums, T* __restrict__ out, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += step) store(out + i, sums[i]);
}
