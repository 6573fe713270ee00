// Shared by every kernel: the type that sums run in, conversions to and from storage, the cut of the work.
#include <cuda_fp16.h>
#include <cuda_bf16.h>

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffff;

// Sums of 2-byte floats run in float32.
template <typename T> struct Accumulator { using type = T; };
template <> struct Accumulator<__half> { using type = float; };
template <> struct Accumulator<__nv_bfloat16> { using type = float; };
template <typename T> using accumulator = typename Accumulator<T>::type;

__device__ inline float load(__half x) { return __half2float(x); }
__device__ inline float load(__nv_bfloat16 x) { return __uint_as_float((unsigned)__bfloat16_as_ushort(x) << 16); }
__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }

__device__ inline void store(__half* y, float x) { *y = __float2half_rn(x); }
__device__ inline void store(__nv_bfloat16* y, float x) { *y = __float2bfloat16_rn(x); }
__device__ inline void store(float* y, float x) { *y = x; }
__device__ inline void store(double* y, double x) { *y = x; }

template <typename Sum> __device__ inline Sum lowest() { return -Sum(__int_as_float(0x7f800000)); }

// The larger, NaN before all; of equal ones b.
template <typename Sum> __device__ inline Sum larger(Sum a, Sum b) {
#if __CUDA_ARCH__ >= 800
    if constexpr (sizeof(Sum) == 4) {
        asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
        return a;
    }
#endif
    return a > b || a != a ? a : b;
}

// VEC values that load and store as one word; aligned as such.
template <typename T, int VEC> struct alignas(sizeof(T) * VEC) Pack { T v[VEC]; };

// Value i of a pack. Of the two bfloat16 in a word one is a shift away and one a mask.
template <typename T, int VEC> __device__ inline accumulator<T> load(const Pack<T, VEC>& x, int i) {
    return load(x.v[i]);
}
template <int VEC> __device__ inline float load(const Pack<__nv_bfloat16, VEC>& x, int i) {
    if constexpr (VEC == 1) return load(x.v[0]);
    const unsigned word = ((const unsigned*)&x)[i / 2];
    return __uint_as_float(i % 2 ? word & 0xffff0000 : word << 16);
}

template <int VALUE> struct Constant { static constexpr int value = VALUE; };

// A pointer that stays in registers: else the compiler adds it up anew for every load.
template <typename T> __device__ inline T* kept(T* p) {
    asm("" : "+l"(p));
    return p;
}

// The same in shared memory, whose addresses have 32 bits.
template <typename T> __device__ inline T* kept_shared(T* p) {
    unsigned address = __cvta_generic_to_shared(p);
    asm("" : "+r"(address));
    return (T*)__cvta_shared_to_generic(address);
}

// Words of 1 to 16 bytes, what is longer by several. What is written once, the L2 gives up first.
template <int BYTES> struct Word;
template <> struct Word<1> { using type = char; };
template <> struct Word<2> { using type = short; };
template <> struct Word<4> { using type = int; };
template <> struct Word<8> { using type = int2; };
template <> struct Word<16> { using type = int4; };

template <typename V> __device__ inline V read(const V* p) {
    if constexpr (sizeof(V) <= 16) {
        const auto word = __ldg((const typename Word<sizeof(V)>::type*)p);
        return *(const V*)&word;
    } else {
        V value;
#pragma unroll
        for (int i = 0; i < sizeof(V) / 16; ++i) ((int4*)&value)[i] = __ldg((const int4*)p + i);
        return value;
    }
}
template <typename V> __device__ inline void store_once(V* p, const V& value) {
    using W = typename Word<sizeof(V) < 16 ? sizeof(V) : 16>::type;
#pragma unroll
    for (int i = 0; i < sizeof(V) / sizeof(W); ++i) __stcs((W*)p + i, ((const W*)&value)[i]);
}

template <int VEC, typename T, typename Sum>
__device__ inline void store_pack(T* y, const Sum* sum) {
    Pack<T, VEC> word;
#pragma unroll
    for (int v = 0; v < VEC; ++v) store(&word.v[v], sum[v]);
    store_once((Pack<T, VEC>*)y, word);
}

// Bytes from the beginning of X to a row of it; one instruction where indices have 32 bits.
__device__ inline long long at(int row, unsigned stride) { return (unsigned)row * (unsigned long long)stride; }
__device__ inline long long at(long long row, unsigned stride) { return row * stride; }

// The work of a kernel over CSR is cut as formats/chunks.py says: into pieces of at most PIECE entries of
// one row (an empty row has one piece); CHUNKS chunks of equally many pieces make a block. Chunk c begins
// in row start[c].row at entry start[c].entry.
constexpr int PIECE = 8;
constexpr int CHUNKS = 32;
template <typename Index> struct alignas(2 * sizeof(Index)) Place { Index row, entry; };

// What a sub-warp of LANES lanes goes through: the pieces of the chunks from place start[chunk] to
// start[chunk + own]. Rows and entries are counted from `from`, so that they fit 32 bits.
template <typename Index> struct Pieces {
    const Index* indptr;
    Place<Index> from, to;
    Index base;            // of entries, to fetch from; where there are none, any that exists
    int rows, stop;        // rows that end here, the row behind them stays open; entries
    int row, pos, end;     // the piece is entries [pos, pos + count()) of row `row`, which ends at `end`
    Index ahead;           // the end of the next row, loaded a piece before it is needed

    __device__ Pieces(const Index* indptr, const Place<Index>* start, long long chunk, int own, long long nnz)
        : indptr(indptr), from(start[chunk]), to(start[chunk + own]) {
        base = min((long long)from.entry, nnz - 1);
        rows = to.row - from.row, stop = to.entry - from.entry;
        row = pos = 0;
        end = rows > 0 ? indptr[from.row + 1] - from.entry : stop;
        load_ahead();
    }
    __device__ void load_ahead() { ahead = read(indptr + (from.row + min(row + 2, rows))); }
    __device__ bool more() const { return row < rows || pos < end; }
    __device__ int count() const { return min(PIECE, end - pos); }
    // Behind the last entry of its piece a lane takes that one again, so that all that it loads exists.
    __device__ Index entry(int j) const { return base + min(pos + j, max(min(pos + PIECE, end) - 1, 0)); }
    __device__ bool row_ends() const { return row < rows && pos + count() == end; }
    __device__ void next() {
        const bool ends = row_ends();
        pos += count();
        row += ends;
        end = !ends ? end : row < rows ? (int)(ahead - from.entry) : stop;
        load_ahead();
    }
};
