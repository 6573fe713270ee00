#include "engine/common.cuh"
#include "cbsr/cbsr.cuh"
#include "engine/copies.cuh"

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
        if (r < rows) copy_row(buffers + r % 2 * feat, X + (first + r) * stride, feat, aligned);
        copies_end();
    }
    __device__ void wait() {
        wait_for_copies<1>();
        __syncwarp();
    }
    __device__ void begin() {
        row = ON_CHIP ? buffers : X + first * stride;
        if (ON_CHIP) bring(0), bring(1), wait();
    }
    __device__ void go_to(int r) {
        row = ON_CHIP ? buffers + r % 2 * feat : X + (first + min(r, rows - 1)) * stride;
        if (!ON_CHIP) return;
        __syncwarp();  // the row before has been read
        bring(r + 1), wait();
    }
};

// The gradient of the entries e = (i, j) of A, with the row i of X on chip:
// dA[e] = r[i] * c[j] * sum_t X[i, columns[j, t]] * values[j, t].
template <typename T, typename Index, typename Column, int LANES, int PLACES, int BATCH, int ON_CHIP>
__global__ void __launch_bounds__(CBSR_THREADS, 8)
sddmm_csr_cbsr(const Index* __restrict__ indptr, const Index* __restrict__ indices,
               const Place<Index>* __restrict__ start, const accumulator<T>* __restrict__ col_scale,
               const accumulator<T>* __restrict__ row_scale, const Column* __restrict__ columns,
               const T* __restrict__ values, const T* __restrict__ X, T* dA, long long x_stride, int k, int feat,
               int flags) {
    using Sum = accumulator<T>;
    constexpr int STREAMS = WARP / LANES, STEP = LANES * PLACES;
    constexpr int WORD = PLACES * sizeof(T) <= 16 ? PLACES : 16 / sizeof(T);
    const int warp = threadIdx.x / WARP, wl = threadIdx.x % WARP, stream = wl / LANES, lane = wl % LANES;
    Rows<Index> at_work(indptr, start + (long long)blockIdx.x * CHUNKS + warp * CBSR_OWN);
    const Index first_row = at_work.from.row;
    const long long first_entry = at_work.from.entry;
    if (at_work.total == 0) return;
    Entries<T, Index> entries{indices, nullptr, col_scale, first_entry, (long long)at_work.to.entry - 1};
    entries.begin();
    T* buffers = (T*)dynamic_shared + warp * 2 * feat;
    const int rows = at_work.rows + (at_work.to.entry > indptr[at_work.to.row]);
    Held<T, Index, ON_CHIP> held{X, buffers, x_stride, feat, rows, bool(flags & ALIGNED), first_row};
    held.begin();
    Sum factor = row_scale ? row_scale[first_row] : Sum(1);

    const int t0 = lane * PLACES;
    struct Group {
        Places<Column, PLACES, PLACES> c;
        Index col;
        Sum weight;
    };
    const auto place = [&](const Group& group, int t) { return at(group.col, k) + (t < k ? t : 0); };
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
            for (int t = t0; t < k; t += STEP) {
                if (t > t0) group.c.load_from(columns + place(group, t));
                Sum x[PLACES];
#pragma unroll
                for (int i = 0; i < PLACES; ++i) x[i] = load(held.row[group.c[i]]);
                Places<T, PLACES, WORD> v;
                v.load_from(values + place(group, t));
#pragma unroll
                for (int i = 0; i < PLACES; ++i) dot += x[i] * load(v[i]);
            }
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
                    if (k > STEP) group.c.load_from(columns + place(group, t0));
                    take(group, first + stream);
                }
            }
        }
        g += BATCH;
        if (g % LANES == 0) entries.step(g / LANES);
    } while (g * STREAMS < at_work.total);
}
