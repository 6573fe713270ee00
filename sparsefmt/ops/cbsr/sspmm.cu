#include "engine/common.cuh"
#include "cbsr/cbsr.cuh"
#include "engine/copies.cuh"

// Adds WIDTH neighbours, if `valid`: in one request where the device has it.
template <int WIDTH, typename Sum> __device__ inline void add_to(Sum* y, const Sum (&x)[WIDTH], bool valid) {
#if __CUDA_ARCH__ >= 900
    if constexpr (sizeof(Sum) == 4 && WIDTH == 4) {
        asm volatile("{ .reg .pred valid; setp.ne.b32 valid, %5, 0;\n\t"
                     "@valid red.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }"
                     :: "l"(y), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"((int)valid) : "memory");
        return;
    }
#endif
    if (valid)
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) atomicAdd(y + i, x[i]);
}

// An entry as _windows.Windows has it: row of the window and column of the part in one word.
struct Entry {
    static constexpr unsigned NONE = 0xffffffff, ROW_BITS = 8;
    unsigned word;
    __device__ bool exists() const { return word != NONE; }
    __device__ unsigned row() const { return exists() ? word % (1 << ROW_BITS) : 0; }
    __device__ unsigned column() const { return exists() ? word >> ROW_BITS : 0; }
    __device__ bool same_column(Entry other) const { return (word ^ other.word) >> ROW_BITS == 0; }
};
template <typename Index> struct alignas(2 * sizeof(Index)) Piece { Index first, bucket; };

// The rows of one window and their factors, in shared memory.
template <typename T, typename Index> struct Held {
    T* rows;
    accumulator<T>* factors;

    __device__ Held(int height, int feat) : rows((T*)dynamic_shared) {
        const unsigned unit = sizeof(accumulator<T>), size = height * feat * sizeof(T);
        factors = (accumulator<T>*)((char*)dynamic_shared + (size + unit - 1) / unit * unit);
    }
    // Asks for them: they are there after a wait and a barrier.
    __device__ void bring(const Index* order, int count, const T* X, long long stride, const accumulator<T>* row_scale,
                          int feat, bool aligned) {
        const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll 1
        for (int i = threadIdx.x / WARP; i < count; i += warps) {
            const long long row = order[i];
            copy_row(rows + i * feat, X + row * stride, feat, aligned);
            if (row_scale && lane == 0) factors[i] = row_scale[row];
        }
        copies_end();
    }
};

// dS[j, t] += a[e] * r[i] * c[j] * X[i, columns[j, t]] over the entries e = (i, j): the outer product with rows of X on
// chip (MaxK-GNN, section 4.2). A block has the rows of one window there, and takes a piece of their entries, in order
// of columns, so that neighbours of one column are added up before they leave. Atomics: not deterministic.
// LANES threads take an entry, PLACES each; RUN entries behind one another are theirs, the rows of S of BATCH of them
// on their way together. A block owns LANES * PLACES of the k places. X is of the type In, narrower than T where it has
// been rounded for its bytes.
template <typename T, typename Index, typename Column, typename In, int LANES, int PLACES>
__global__ void __launch_bounds__(1024)
sspmm_csr_windows(const Piece<Index>* __restrict__ pieces, const Index* __restrict__ order,
                  const unsigned* __restrict__ words, const Index* __restrict__ perm, const T* __restrict__ data,
                  const accumulator<T>* __restrict__ col_scale, const accumulator<T>* __restrict__ row_scale,
                  const Column* __restrict__ columns, const In* __restrict__ X, accumulator<T>* dS, long long x_stride,
                  long long n_rows, long long n_windows, long long part_size, int n_pieces, int height, int k, int feat,
                  int flags) {
    using Sum = accumulator<T>;
    constexpr int STREAMS = WARP / LANES, RUN = LANES < 8 ? 8 : LANES < 16 ? 16 : LANES, EACH = RUN / LANES;
    constexpr int BATCH = LANES == WARP || sizeof(Sum) == 8 || sizeof(Column) == 4 ? 4 : 8;  // more would spill
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, wl = threadIdx.x % WARP;
    const int stream = wl / LANES, lane = wl % LANES;
    const Piece<Index> piece = pieces[blockIdx.x % n_pieces];
    const int size = pieces[blockIdx.x % n_pieces + 1].first - piece.first;
    const int t = (blockIdx.x / n_pieces * LANES + lane) * PLACES;
    const bool live = t < k;

    Held<In, Index> held(height, feat);
    const long long first_row = piece.bucket % n_windows * height;
    const int count = min((long long)height, n_rows - first_row);
    held.bring(order + first_row, count, X, x_stride, row_scale, feat, flags & ALIGNED);

    const long long first_column = piece.bucket / n_windows * part_size;
    const Column* const my_columns = columns + first_column * k + (live ? t : 0);
    Sum* const my_sums = dS + first_column * k + (live ? t : 0);
    const unsigned long long columns_bytes = k * sizeof(Column), sums_bytes = k * sizeof(Sum);
    Entry entries[EACH];
    T values[EACH];
    int base = warp * WARP * EACH;
    const auto fetch = [&]() {
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int e = base + stream * RUN + j * LANES + lane;
            entries[j].word = e < size ? streamed(words + piece.first + e) : Entry::NONE;
            store(&values[j], Sum(1));
            if (data && e < size) values[j] = data[streamed(perm + piece.first + e)];
        }
    };
    fetch();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll 1
    while (base < size) {
        Sum weights[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            weights[j] = load(values[j]);
            if (row_scale && entries[j].exists()) weights[j] *= held.factors[entries[j].row()];
            if (col_scale && entries[j].exists()) weights[j] *= col_scale[first_column + entries[j].column()];
        }
        Entry at_work{Entry::NONE};
        Sum sums[PLACES] = {};
        const auto leave = [&](bool ends) {
            Sum* y = (Sum*)((char*)my_sums + at_work.column() * sums_bytes);
            add_to(y, sums, ends && live && at_work.exists());
        };
#pragma unroll
        for (int first = 0; first < RUN; first += BATCH) {
            Entry entry[BATCH];
            Places<Column, PLACES, PLACES> c[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int n = first + b;
                entry[b].word = __shfl_sync(FULL_WARP, entries[n / LANES].word, n % LANES, LANES);
                c[b].load_from((const Column*)((const char*)my_columns + entry[b].column() * columns_bytes));
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int n = first + b;
                const Sum weight = __shfl_sync(FULL_WARP, weights[n / LANES], n % LANES, LANES);
                const In* row = held.rows + entry[b].row() * feat;
                const bool other = !entry[b].same_column(at_work);
                leave(other);
                at_work = entry[b];
#pragma unroll
                for (int i = 0; i < PLACES; ++i) sums[i] = (other ? 0 : sums[i]) + weight * load(row[c[b][i]]);
            }
        }
        leave(true);
        base += warps * WARP * EACH;
        fetch();
    }
}

// Sums in float32, to what they are the gradient of.
template <typename T> __global__ void narrowed(const float* __restrict__ sums, T* __restrict__ out, long long n) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += step) store(out + i, sums[i]);
}
