#include "engine/common.cuh"
#include "cbsr/cbsr.cuh"

// Where an accumulator of feature f lies. The features are cut into 2^log parts: of ascending columns, lane i has
// mostly those of part i. Parts lie in banks of their own, and so do streams.
struct Cells {
    int part, log;  // log2 of the features of a part, and of the parts
    unsigned low;   // mask of the former

    __device__ Cells(int log_window, int log) : part(log_window - log), log(log), low((1u << part) - 1) {}
    // Of uint8 columns four at a time.
    template <typename Column> __device__ unsigned of(unsigned f) const {
        constexpr unsigned each = sizeof(Column) == 1 ? 0x01010101 : 1;
        return (f & low * each) << log | (f >> part & ((1u << log) - 1) * each);
    }
    __device__ int feature(int cell) const { return cell >> log | (cell & (1 << log) - 1) << part; }
};

// The accumulators of a warp: `window` cells of STREAMS sums, which begin anew when they are taken; and the row that
// was begun before this warp.
template <typename Sum, int STREAMS> struct Sums {
    static constexpr int QUAD = STREAMS * sizeof(Sum) < 16 ? STREAMS : 16 / sizeof(Sum);
    Sum *cells, *head;
    int window;

    __device__ static int size(int window) { return window * (STREAMS + 1); }
    __device__ Sums(int warp, int window) : cells((Sum*)dynamic_shared + warp * size(window)), window(window) {
        head = cells + window * STREAMS;
        for (int i = threadIdx.x % WARP; i < window * STREAMS; i += WARP) cells[i] = 0;
        __syncwarp();
    }
    // Of two quads every other four lanes take the second first, so that all banks are busy.
    __device__ Sum taken(int cell) {
        constexpr int SWAP = STREAMS / QUAD == 2 ? QUAD : 0;
        Sum sum = 0;
#pragma unroll
        for (int s = 0; s < STREAMS; s += QUAD) {
            auto& quad = *(Pack<Sum, QUAD>*)(cells + cell * STREAMS + (s ^ (threadIdx.x / 4 % 2 * SWAP)));
            const Pack<Sum, QUAD> sums = quad;
            quad = Pack<Sum, QUAD>{};
#pragma unroll
            for (int i = 0; i < QUAD; ++i) sum += sums.v[i];
        }
        return sum;
    }
    // The open row at last: one sum a cell, behind each other.
    __device__ void close() {
        for (int cell = threadIdx.x % WARP; cell < window; cell += WARP) {
            const Sum sum = taken(cell);
            __syncwarp();
            cells[cell] = sum;
        }
    }
};

// Blocks that leave a thread the registers for its places under way.
template <typename Sum, int BATCH> constexpr int RESIDENT = BATCH > 1 || sizeof(Sum) > 4 ? 5 : 7;

// Y[i, :] = r[i] * sum_e a[e] * c[col[e]] * S[col[e], :], or the mean (MaxK-GNN, section 4.1).
// A lane reads PLACES places side by side, in one word if VECTOR. The output row is in shared memory: a block owns
// CHUNKS chunks and a window of features, each stream has sums of its own. Rows that warps or blocks share are put
// together as in spmm_csr_balanced: nothing is atomic.
template <typename T, typename Index, typename Column, int LANES, int PLACES, int VECTOR, int BATCH>
__global__ void __launch_bounds__(CBSR_THREADS, RESIDENT<accumulator<T>, BATCH>)
spgemm_csr_cbsr(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                const Place<Index>* __restrict__ start, const int* __restrict__ slot,
                const T* __restrict__ data,
                const accumulator<T>* __restrict__ col_scale, const accumulator<T>* __restrict__ row_scale,
                const Column* __restrict__ columns, const T* __restrict__ values, T* __restrict__ Y,
                accumulator<T>* __restrict__ carry, long long nnz, unsigned blocks, int k, int feat, int log_window,
                int log_parts, int flags) {
    using Sum = accumulator<T>;
    constexpr int STREAMS = WARP / LANES;
    constexpr int WORD = !VECTOR ? 1 : PLACES * sizeof(T) <= 16 ? PLACES : 16 / sizeof(T);
    __shared__ Index open_row[CBSR_WARPS];
    const unsigned block = blockIdx.x % blocks;
    const int window = 1 << log_window, origin = blockIdx.x / blocks * window;
    const int warp = threadIdx.x / WARP, wl = threadIdx.x % WARP, stream = wl / LANES, lane = wl % LANES;
    Rows<Index> at_work(indptr, start + (long long)block * CHUNKS + warp * CBSR_OWN);
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row];
    const long long first_entry = min((long long)at_work.from.entry, nnz - 1);  // one that exists, if none is here
    const long long last_entry = max(first_entry, (long long)at_work.to.entry - 1);
    Entries<T, Index> entries{indices, data, col_scale, first_entry, last_entry};
    entries.begin();
    Sums<Sum, STREAMS> sums(warp, window);
    const Cells cells(log_window, log_parts);

    // Of a row of S a lane has `share` places from t0 on, PLACES at a time.
    const int share = (k + LANES * PLACES - 1) / (LANES * PLACES) * PLACES, t0 = lane * share;
    const T* lane_values = kept(values + (t0 < k ? t0 : 0));
    const Column* lane_columns = kept(columns + (t0 < k ? t0 : 0));
    const unsigned own = __cvta_generic_to_shared(kept_shared(sums.cells + stream));
    struct Group {
        Places<T, PLACES, WORD> v;
        Places<Column, PLACES, VECTOR ? PLACES : 1> c;
        Index col;
        Sum weight;
    };
    const auto read_places = [&](Group& group, int t) {
        const long long place = at(group.col, k) + (t < k ? t - t0 : 0);
        const int room = VECTOR ? PLACES : t < k ? k - t : t0 < k ? k - t0 : k;
        group.v.load_from(lane_values + place, room);
        group.c.load_from(lane_columns + place, room);
    };
    const auto ask = [&](int g) {
        Group group;
        const int source = g % LANES * STREAMS + stream;
        group.col = __shfl_sync(FULL_WARP, entries.col, source);
        read_places(group, t0);
        group.weight = __shfl_sync(FULL_WARP, entries.weight, source);
        return group;
    };
    const auto add = [&](const Group& group, int t) {
        Sum *cell[PLACES], sum[PLACES];
        bool wanted[PLACES];
        unsigned packed = 0;
#pragma unroll
        for (int i = 0; i < PLACES; ++i) {
            unsigned number;
            wanted[i] = VECTOR || t + i < k;  // the first is
            if (VECTOR && sizeof(Column) == 1) {
                if (i % 4 == 0) packed = cells.of<Column>(group.c.bits(i));
                number = __byte_perm(packed, 0, 0x4440 | i % 4);
            } else {
                const unsigned f = (unsigned)group.c[i] - origin;
                wanted[i] = wanted[i] && f < (unsigned)window;
                number = cells.of<int>(f);
            }
            cell[i] = (Sum*)__cvta_shared_to_generic(own + number * (unsigned)(STREAMS * sizeof(Sum)));
        }
#pragma unroll
        for (int i = 0; i < PLACES; ++i)
            if (wanted[i]) sum[i] = *cell[i];
#pragma unroll
        for (int i = 0; i < PLACES; ++i)
            if (wanted[i]) *cell[i] = sum[i] + group.weight * load(group.v[i]);
    };
    const auto end_row = [&]() {
        const Index row = first_row + at_work.row;
        if (at_work.row == 0 && began_earlier) {
            for (int cell = wl; cell < window; cell += WARP) sums.head[cell] = sums.taken(cell);
        } else {
            const int length = at_work.end - at_work.begin;
            Sum factor = row_scale && length > 0 ? row_scale[row] : Sum(1);  // an empty row is 0
            if (flags & MEAN) factor /= (Sum)max(length, 1);
            T* y = Y + (long long)row * feat + origin;
#pragma unroll 2
            for (int cell = wl; cell < window; cell += WARP) {
                const Sum sum = sums.taken(cell);
                const int f = cells.feature(cell);
                const Sum scaled = sum * factor;
                if (f < feat - origin) store_pack<1>(y + f, &scaled);
            }
        }
        __syncwarp();
        at_work.next();
    };

    int g = 0;
    do {
        Group groups[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) groups[b] = ask(g + b);
        if (share == PLACES && at_work.all_before((g + BATCH) * STREAMS)) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (t0 < k) add(groups[b], t0);
                __syncwarp();
            }
        } else {
#pragma unroll 1
            for (int b = 0; b < BATCH; ++b) {
                const int first = (g + b) * STREAMS;
                Group group = BATCH == 1 ? groups[0] : ask(g + b);
                while (true) {
                    if (at_work.has(first + stream))
#pragma unroll 1
                        for (int t = t0;; read_places(group, t)) {
                            if (t < k) add(group, t);
                            t += PLACES;
                            if (t >= t0 + share) break;
                        }
                    __syncwarp();
                    if (!at_work.ends_by(min(first + STREAMS, at_work.total))) break;
                    end_row();
                    if (share > PLACES) read_places(group, t0);
                }
            }
        }
        g += BATCH;
        if (g % LANES == 0) entries.step(g / LANES);
    } while (g * STREAMS < at_work.total);

    sums.close();
    if (wl == 0) open_row[warp] = open;
    __syncthreads();
    // Of the warps up to `last` that left this row open, in their order.
    const auto opened = [&](Index row, int last, int cell) {
        Sum sum = 0;
        int w = last + 1;
        while (w > 0 && open_row[w - 1] == row) --w;
        for (; w <= last; ++w) sum += ((Sum*)dynamic_shared)[w * sums.size(window) + cell];
        return sum;
    };
    if (at_work.rows > 0 && began_earlier) {
        const bool carried = slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row;
        Sum factor = row_scale ? row_scale[first_row] : Sum(1);
        if (flags & MEAN) factor /= (Sum)(indptr[first_row + 1] - indptr[first_row]);
        for (int cell = wl; cell < window; cell += WARP) {
            const Sum sum = opened(first_row, warp - 1, cell) + sums.head[cell];
            const int f = cells.feature(cell) + origin;
            if (f >= feat) continue;
            if (carried) carry[(2LL * slot[block] + 1) * feat + f] = sum;
            else store(Y + (long long)first_row * feat + f, sum * factor);
        }
    }
    if (warp == CBSR_WARPS - 1 && slot[block + 1] >= 0)
        for (int cell = wl; cell < window; cell += WARP) {
            const int f = cells.feature(cell) + origin;
            if (f < feat) carry[2LL * slot[block + 1] * feat + f] = opened(open, warp, cell);
        }
}
