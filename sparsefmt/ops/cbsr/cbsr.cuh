// Shared by the products with row-balanced features S: k places of each row, their columns ascending.
// In spgemm.cu and sddmm_cbsr.cu a warp goes through the entries of A that its chunks hold, STREAMS at a time whatever
// their rows: LANES threads read an entry's row of S. BATCH such groups are under way together. Where a row of A ends
// within a group, the group is gone through once for each row.
constexpr int CBSR_THREADS = 128, CBSR_WARPS = CBSR_THREADS / WARP;
constexpr int CBSR_OWN = CHUNKS / CBSR_WARPS;  // chunks of a warp
constexpr int MEAN = 1, ALIGNED = 2;           // flags

extern __shared__ int4 dynamic_shared[];

// What the L2 gives up first.
template <typename V> __device__ inline V streamed(const V* p) {
    const auto word = __ldcs((const typename Word<sizeof(V)>::type*)p);
    return *(const V*)&word;
}

// COUNT values side by side, in words of WORD.
template <typename V, int COUNT, int WORD> struct Places {
    using Bits = typename Word<WORD * sizeof(V)>::type;
    static constexpr int EACH = 4 / sizeof(V);  // in 32 bits
    Bits words[COUNT / WORD];

    // Of `room` places that exist the last stands for what lies behind it.
    __device__ void load_from(const V* row, int room = COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT / WORD; ++i) words[i] = __ldg((const Bits*)(row + min(i * WORD, room - 1)));
    }
    __device__ V operator[](int i) const {
        const Bits word = words[i / WORD];
        return ((const V*)&word)[i % WORD];
    }
    // The 32 bits that hold place i, or fewer of a shorter word.
    __device__ unsigned bits(int i) const {
        const Bits word = words[i / WORD];
        if constexpr (sizeof(Bits) == 1) return (unsigned char)word;
        else if constexpr (sizeof(Bits) == 2) return (unsigned short)word;
        else return ((const unsigned*)&word)[i % WORD / EACH];
    }
};

// The entries of a warp, 32 at a time: a lane holds one of these and has asked for one of the next. Behind
// the last entry it takes that one again, so that all that it loads exists.
template <typename T, typename Index> struct Entries {
    using Sum = accumulator<T>;
    const Index* indices;
    const T* data;
    const Sum* col_scale;
    long long first, last;  // entries
    Index col, next_col;
    Sum weight;  // a[e] * c[col]
    T next_value;

    __device__ void fetch(int turn) {
        const long long e = min(first + turn * WARP + threadIdx.x % WARP, last);
        next_col = streamed(indices + e);
        if (data) next_value = streamed((const Pack<T, 1>*)(data + e)).v[0];
    }
    __device__ void step(int turn) {
        col = next_col, weight = load(next_value);
        if (col_scale) weight *= read((const Pack<Sum, 1>*)(col_scale + col)).v[0];
        fetch(turn + 1);
    }
    __device__ void begin() {
        store(&next_value, Sum(1));
        fetch(0), step(0);
    }
};

// The row that a warp is in; rows and entries are counted from the warp's first.
template <typename Index> struct Rows {
    const Index* indptr;
    Place<Index> from, to;
    int rows, total;      // rows that end here, the row behind them stays open; entries
    int row, begin, end;  // the row, and those of its entries that are here
    Index ahead;          // the end of the next row

    __device__ Rows(const Index* indptr, const Place<Index>* start)
        : indptr(indptr), from(start[0]), to(start[CBSR_OWN]) {
        rows = to.row - from.row, total = to.entry - from.entry;
        row = begin = 0;
        end = rows > 0 ? indptr[from.row + 1] - from.entry : total;
        load_ahead();
    }
    __device__ void load_ahead() { ahead = read(indptr + (from.row + min(row + 2, rows))); }
    __device__ bool has(int entry) const { return begin <= entry && entry < end; }
    __device__ bool ends_by(int entry) const { return row < rows && end <= entry; }
    // Nothing but entries of the row up to, and not at, an end.
    __device__ bool all_before(int entry) const { return entry < end && entry <= total; }
    __device__ void next() {
        ++row;
        begin = end;
        end = row < rows ? (int)(ahead - from.entry) : total;
        load_ahead();
    }
};
