// Condensed tiles on chip: what the kernels of sgt.cu, and some of it those of sddmm_sgt.cu, are made of.
constexpr int SLAB = 16;   // columns that are multiplied at a time
// SCALED: by col_scale, with or without values. BAKED: of well filled slabs, whose values are those of all cells.
constexpr int UNWEIGHTED = 0, DIRECT = 1, SCALED = 2, BAKED = 3;

// One item of work: slabs [first, last) of a window; sums go to part `slot`, or to Y if that is negative.
template <typename Index> struct alignas(4 * sizeof(Index)) Item { Index window, first, last, slot; };

// Condensed tiles as _split.Split has them. Which lane of a warp has which cell of 16 x 16: with g = lane / 4 and
// t = lane % 4 the rows g and g + 8, the columns 2t, 2t + 1, 2t + 8, 2t + 9, as both operands of a product have it.
template <typename T, typename Index> struct Tiles {
    const Index* columns;           // SLAB of each slab
    const unsigned char* masks;     // bytes for each slab, lane and tile: which of the lane's cells hold an entry. Of two
                                    // tiles, one above the other, the first has the even columns, 4 bits a tile, the
                                    // second the odd ones; of a tile that is alone one has both
    const Index* starts;            // first entry of each slab and tile
    const unsigned short* cells;    // of each entry in its slab
    const T* values;                // of each entry; BAKED: of each slab, cell by cell as `Cell::place` has them
};
struct Cell {
    unsigned at;  // tile, lane (5 bits), column + 8, row + 8, column + 1 (a bit each)

    __device__ int row() const { return (at >> 8) * 16 + (at >> 1 & 1) * 8 + (at >> 5 & 7); }
    __device__ int column() const { return (at >> 2 & 1) * 8 + (at >> 3 & 3) * 2 + (at & 1); }
    // Where it lies on chip: what a lane loads at once, 16 bytes, lies behind that of the lane before.
    template <typename T> __device__ unsigned place() const {
        return sizeof(T) == 2 ? at : (at & ~0xffu) | (at & 4) << 5 | (at >> 3 & 31) << 2 | (at & 3);
    }
};

// How the warps of a block share HEIGHT rows times FEAT features.
template <int HEIGHT, int FEAT> struct Cut {
    static constexpr int TILES = HEIGHT / 16;                // of 16 x 16 cells, one above the other
    static constexpr int WARPS_N = FEAT == 32 ? 1 : HEIGHT == 16 ? FEAT / 32 : 2;
    static constexpr int TALL = HEIGHT == 128 || (HEIGHT == 64 && WARPS_N > 1) ? 2 : 1;  // tiles of a warp
    static constexpr int WARPS_M = TILES / TALL;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int WIDE = FEAT / WARPS_N;              // features of a warp
};

// Blocks on a multiprocessor, at least: where there are 8, threads have 64 registers, too few for float32 in two parts.
template <typename T, int HEIGHT, int FEAT>
constexpr int RESIDENT = Cut<HEIGHT, FEAT>::THREADS != 128 ? 1 : sizeof(T) == 4 ? 7 : 8;

template <typename T> constexpr unsigned ONE = 0x3f80;  // of bfloat16
template <> constexpr unsigned ONE<__half> = 0x3c00;

// The cells of a lane in a slab, of TALL tiles, as operands: word[m][2 h + l] has row g + 8 l, columns 2t + 8 h and the
// next. Of float32 values it has the leads, and `rest` what is left.
template <typename T, int TALL> struct Operand {
    static constexpr int WORDS = 4;
    unsigned word[TALL][WORDS], rest[TALL][WORDS];

    // Of the two bytes of a pair of tiles; of the byte of a tile that is alone. A mask and a product a word: they run on
    // different pipes.
    __device__ void unpack(unsigned bits, int tile, bool alone) {
        if (alone) bits = (bits & 0xf) | (bits & 0xf0) << 4;
        else if (TALL == 1) bits >>= tile % 2 * 4;
        const unsigned spread = __byte_perm(bits, 0, 0x4140);
#pragma unroll
        for (int m = 0; m < TALL; ++m)
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const int bit = i + m * 4;
                word[m][i] = (spread & 0x10001u << bit) * (ONE<T> >> bit);
            }
    }
    // From tiles that have values in all cells: those of the matrix, or both parts of them already.
    __device__ void load(const T* tiles, int lane, bool split) {
        constexpr int EACH = 16 / sizeof(T);
#pragma unroll
        for (int m = 0; m < TALL; ++m) {
            unsigned cells[32 / EACH];
#pragma unroll
            for (int i = 0; i < 8 / EACH; ++i)
                *(uint4*)&cells[i * 4] = *(const uint4*)(tiles + m * 256 + (i * WARP + lane) * EACH);
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                if constexpr (sizeof(T) == 2) {
                    word[m][i] = cells[i];
                } else if (split) {
                    word[m][i] = __byte_perm(cells[2 * i], cells[2 * i + 1], 0x7632);
                    rest[m][i] = __byte_perm(cells[2 * i], cells[2 * i + 1], 0x5410);
                } else {
                    const float *pair = (const float*)cells + 2 * i;
                    const auto both = LeadAndRest::of(pair[0], pair[1]);
                    word[m][i] = both.lead, rest[m][i] = both.rest;
                }
            }
        }
    }
};

// How much of the work of a block is on chip or on its way there.
template <typename T, bool WEIGHTED> struct Depth {
    static constexpr int SLABS = WEIGHTED && sizeof(T) == 4 ? 1 : 2;           // of a step
    static constexpr int STAGES = !WEIGHTED && sizeof(T) == 4 ? 3 : 4;         // one is read, the others are on their way
};

// What tells where operands lie, in rings of RING slabs: fetched BATCH slabs at a time, more than a batch ahead.
template <typename T, typename Index, int TILES, bool WEIGHTED> struct Guide {
    static constexpr int BATCH = 8, RING = 4 * BATCH, BITS = WEIGHTED ? 0 : WARP * TILES;
    struct alignas(16) Rings {
        Index columns[RING * SLAB];
        unsigned char masks[RING * BITS + 1];
    };
    Rings& rings;
    const Index* columns;  // of the item
    const unsigned char* masks;
    int slabs;

    __device__ Guide(void* shared, const Tiles<T, Index>& A, long long first, int slabs)
        : rings(*(Rings*)shared), columns(A.columns + first * SLAB), masks(A.masks + first * WARP * TILES),
          slabs(slabs) {}
    // The slabs from `begin`, a multiple of BATCH, on.
    __device__ void fetch(int begin) {
        const int count = min(BATCH, slabs - begin), at = begin % RING;
        const char* from = (const char*)(columns + begin * SLAB);
#pragma unroll 1
        for (int i = threadIdx.x * 16; i < count * (int)(SLAB * sizeof(Index)); i += blockDim.x * 16)
            copy_16((char*)(rings.columns + at * SLAB) + i, from + i);
#pragma unroll 1
        for (int i = threadIdx.x * 16; i < count * BITS; i += blockDim.x * 16)
            copy_16(rings.masks + at * BITS + i, masks + (long long)begin * BITS + i);
    }
    __device__ Index column(int place) const { return rings.columns[place % (RING * SLAB)]; }
};

// Rows of X on chip, behind one another. Chunks of 16 bytes change places in a row, so that lanes that load together find
// banks of their own. Padding would do that too, but rows that begin within a line of shared memory are fetched in more
// pieces: 1.5 times the bytes from the L2 (H200).
template <typename T, typename Index, int FEAT, int THREADS, int SLABS, int STAGES> struct Rows {
    static constexpr int COLUMNS = SLABS * SLAB;
    static constexpr int VEC = 16 / sizeof(T), CHUNKS = FEAT / VEC, STEP = THREADS / CHUNKS;
    struct Stage { int4 x[COLUMNS * CHUNKS]; };
    Stage* stages;
    const char* x;
    unsigned stride;
    int first, chunk;  // this thread's row and place in it; its rows are STEP apart

    __device__ Rows(void* shared, const T* X, int first_feature, int feat, unsigned stride)
        : stages((Stage*)shared), stride(stride), first(threadIdx.x / CHUNKS), chunk(threadIdx.x % CHUNKS) {
        const int f = first_feature + chunk * VEC;
        x = kept((const char*)(X + (f < feat ? f : 0)));
    }
    __device__ static int place(int row, int chunk) {
        return chunk ^ (CHUNKS == 4 ? row >> 1 & 3 : sizeof(T) == 4 ? row & 6 : row & 7);
    }
    template <typename Guide> __device__ void fetch(int step, const Guide& guide) {
        int4* const to = stages[step % STAGES].x + first * CHUNKS;
#pragma unroll
        for (int k = 0; k < COLUMNS; k += STEP) {
            const int at_column = step * COLUMNS + k + first;
            if (at_column < guide.slabs * SLAB && (COLUMNS % STEP == 0 || k + first < COLUMNS))
                copy_16(to + k * CHUNKS + place(k + first, chunk), x + at(guide.column(at_column), stride));
        }
    }
    __device__ const Stage& of(int step) const { return stages[step % STAGES]; }
};

// The tiles of a block with their values, dense on chip. All threads share in putting entries into tiles of zeros, those
// of the step after this one, while those of the step before become zeros again. Entries are fetched another step ahead,
// EACH of them by a thread; what is beyond that is fetched when it is put.
template <typename T, typename Index, int HEIGHT, int SLABS, int STAGES, int THREADS, int WEIGHTS> struct Values {
    static constexpr int TILES = HEIGHT / 16, CELLS = HEIGHT * SLAB, STEP = SLABS * CELLS;
    static constexpr int BUFFERS = 3, SIZE = BUFFERS * STEP, EACH = 2;
    const Tiles<T, Index>& A;
    const float* col_scale;
    const Index *starts, *columns;  // of the item
    int slabs;
    T* cells;
    Index begin, next_middle, next_end;  // entries of a step, and of the next
    int count, middle;                   // from the middle on they are of the second slab
    unsigned cell[EACH];
    T value[EACH];

    __device__ Values(const Tiles<T, Index>& A, const float* col_scale, long long first, int slabs, void* shared)
        : A(A), col_scale(col_scale), starts(A.starts + first * TILES), columns(A.columns + first * SLAB), slabs(slabs),
          cells((T*)shared), count(0) {
        if (WEIGHTS == UNWEIGHTED) return;
        begin = starts[0];
        look_ahead(0);
        for (int i = threadIdx.x * 16; i < SIZE * (int)sizeof(T); i += THREADS * 16)
            *(int4*)((char*)cells + i) = make_int4(0, 0, 0, 0);
    }
    __device__ void look_ahead(int step) {
        if (SLABS == 2) next_middle = starts[min(step * SLABS + 1, slabs) * TILES];
        next_end = starts[min(step * SLABS + SLABS, slabs) * TILES];
    }
    // Of the step fetched last, EACH from that place on.
    __device__ void get(int place, int step) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int at = place + i * THREADS;
            if (at >= count) break;
            cell[i] = read(A.cells + (begin + at));
            if (SLABS == 2 && at >= middle) cell[i] += CELLS;
            store(&value[i], 1.f);
            if (WEIGHTS == DIRECT || A.values) value[i] = read(A.values + (begin + at));
            if (WEIGHTS == SCALED) {
                const int slab = step * SLABS + cell[i] / CELLS;
                store(&value[i], load(value[i]) * col_scale[columns[slab * SLAB + Cell{cell[i]}.column()]]);
            }
        }
    }
    // Steps follow one another.
    __device__ void fetch(int step) {
        begin += count;
        if (SLABS == 2) middle = next_middle - begin;
        count = next_end - begin;
        get(threadIdx.x, step);
        look_ahead(step + 1);
    }
    __device__ void put(int step) {
        T* const to = cells + step % BUFFERS * STEP;
#pragma unroll 1
        for (int place = threadIdx.x;;) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (place + i * THREADS >= count) break;
                T* const here = to + Cell{cell[i]}.template place<T>();
                if constexpr (sizeof(T) == 4) *(unsigned*)here = lead_over_rest(value[i]);
                else *here = value[i];
            }
            place += EACH * THREADS;
            if (place >= count) break;
            get(place, step);
        }
    }
    __device__ void clear(int step) {
        char* const to = (char*)(cells + step % BUFFERS * STEP);
#pragma unroll
        for (int i = 0; i < STEP * (int)sizeof(T); i += THREADS * 16)
            if (STEP * sizeof(T) % (THREADS * 16) == 0 || i + threadIdx.x * 16 < STEP * sizeof(T))
                *(int4*)(to + i + threadIdx.x * 16) = make_int4(0, 0, 0, 0);
    }
    __device__ void copy(int) {}
    __device__ void begin_with() {
        Values first = *this;
        fetch(1);
        first.put(0);
    }
    __device__ void go_on(int step) {
        put(step + 1);
        clear(step + 2);
        fetch(step + 2);
    }
    __device__ const T* of(int step, int slab) const { return cells + step % BUFFERS * STEP + slab * CELLS; }
};

// The same where all cells have values: copied as they are, together with the rows of X.
template <typename T, typename Index, int HEIGHT, int SLABS, int STAGES, int THREADS>
struct Values<T, Index, HEIGHT, SLABS, STAGES, THREADS, BAKED> {
    static constexpr int CELLS = HEIGHT * SLAB, STEP = SLABS * CELLS, SIZE = STAGES * STEP;
    const char* values;  // of the item
    int slabs;
    T* cells;

    __device__ Values(const Tiles<T, Index>& A, const float*, long long first, int slabs, void* shared)
        : values((const char*)(A.values + first * CELLS)), slabs(slabs), cells((T*)shared) {}
    __device__ void copy(int step) {
        const int bytes = min(SLABS, slabs - step * SLABS) * CELLS * (int)sizeof(T);
        const char* const from = values + (long long)step * STEP * sizeof(T);
        for (int i = threadIdx.x * 16; i < bytes; i += THREADS * 16)
            copy_16((char*)(cells + step % STAGES * STEP) + i, from + i);
    }
    __device__ void fetch(int) {}
    __device__ void begin_with() {}
    __device__ void go_on(int) {}
    __device__ const T* of(int step, int slab) const { return cells + step % STAGES * STEP + slab * CELLS; }
};
