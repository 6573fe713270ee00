// What kernels share that go through a sample of each row of a CSR.
constexpr int MEAN = 1, RESCALE = 2;  // flags

constexpr int BLOCK_ROWS = 2 * ROW_THREADS;  // most rows of a block

// The rows of a block and the pieces of PIECE entries that are sampled of them; an empty row has one piece.
template <typename Index> struct BlockRows {
    Index begin[BLOCK_ROWS + 1];  // first entry of each row
    int first[BLOCK_ROWS + 1];    // first piece of each row
    int sums[ROW_THREADS / WARP];

    // A thread takes two rows, and gets through to the end.
    __device__ void fill(const Index* indptr, long long first_row, int rows, int width) {
        const int t = threadIdx.x, lane = t % WARP;
        Index ends[3];
#pragma unroll
        for (int k = 0; k < 3; ++k) ends[k] = indptr[first_row + min(2 * t + k, rows)];
        const auto pieces_of = [&](int k) {
            const int taken = min((long long)(ends[k + 1] - ends[k]), (long long)width);
            return 2 * t + k < rows ? max(taken / PIECE + (taken % PIECE > 0), 1) : 0;
        };
        const int early = pieces_of(0), own = early + pieces_of(1);
        int before = own;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(FULL_WARP, before, step);
            if (lane >= step) before += other;
        }
        if (lane == WARP - 1) sums[t / WARP] = before;
        __syncthreads();
        for (int warp = 0; warp < t / WARP; ++warp) before += sums[warp];
        begin[2 * t] = ends[0], first[2 * t] = before - own;
        begin[2 * t + 1] = ends[1], first[2 * t + 1] = before - own + early;
        if (t == ROW_THREADS - 1) begin[BLOCK_ROWS] = ends[2], first[BLOCK_ROWS] = before;
        __syncthreads();
    }
    __device__ int pieces() const { return first[BLOCK_ROWS]; }
    // The last row that begins at a piece or before it.
    __device__ int row_of(int piece, int rows) const {
        int low = 0, high = rows;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first[middle] <= piece) low = middle;
            else high = middle;
        }
        return low;
    }
};

// How the rows are cut: in blocks of `rows`, or as the chunks of the CSR say, none of whose blocks cuts a row.
template <typename Index> struct RowShape {
    const Index* indptr;
    const Place<Index>* start;
    long long n_rows;
    int rows, width, room;
};

// What a sub-warp goes through, a piece at a time; all in order of rows.
template <typename Index, int STRATEGY, bool CHUNKED> struct Work;

// An equal share of the pieces of its block.
template <typename Index, int STRATEGY> struct Work<Index, STRATEGY, false> {
    const BlockRows<Index>& rows;
    Sample<STRATEGY> sample;
    long long first_row;
    int width, room;
    int row, pos, left;     // the piece begins at the pos-th sampled entry of the row; pieces to go
    Index begin, gathered;  // of the row: its first entry, and where its sample is gathered
    unsigned length, taken;  // entries of the row, and how many of them are sampled

    // Every thread of the block comes here.
    __device__ Work(BlockRows<Index>& rows, const RowShape<Index>& shape, unsigned block, int subwarp, int subwarps,
                    unsigned long long seed)
        : rows(rows), sample(seed), first_row((long long)block * shape.rows), width(shape.width), room(shape.room) {
        const int count = min((long long)shape.rows, shape.n_rows - first_row);
        rows.fill(shape.indptr, first_row, count, width);
        const int pieces = rows.pieces(), share = (pieces + subwarps - 1) / subwarps;
        const int piece = min(subwarp * share, pieces - 1);
        left = max(min(share, pieces - subwarp * share), 0);
        row = rows.row_of(piece, count);
        pos = (piece - rows.first[row]) * PIECE;
        look();
    }
    __device__ void look() {
        const int known = min(row, BLOCK_ROWS - 1);
        begin = rows.begin[known];
        gathered = room ? Index((first_row + known) * room) : begin;
        length = rows.begin[known + 1] - begin, taken = min(length, (unsigned)width);
        sample.of_row(first_row + row, length, taken);
    }
    __device__ unsigned length_of(int row) const { return rows.begin[row + 1] - rows.begin[row]; }
    __device__ bool began_earlier() const { return pos > 0; }
    __device__ bool more() const { return left > 0; }
    __device__ int count() const { return left > 0 ? min(PIECE, (int)taken - pos) : 0; }
    __device__ bool row_ends() const { return left > 0 && pos + count() == taken; }
    // Behind the last entry of its piece a lane takes that one again, so that all that it loads exists.
    __device__ Index entry(int j) const {
        const unsigned k = min(pos + min(j, PIECE - 1), (int)taken - 1);
        return (STRATEGY == BUCKET ? gathered : begin) + sample.place(k);
    }
    __device__ void next() {
        const bool ends = row_ends();
        --left;
        row += ends;
        pos = ends ? 0 : pos + PIECE;
        if (STRATEGY == BUCKET || (ends && left > 0)) look();
    }
};

// Its chunks, without what lies behind the samples of their rows: where few rows are sampled. What a sample needs of its
// row is computed for every piece of those that are, and takes no registers of the others.
template <typename Index, int STRATEGY> struct Work<Index, STRATEGY, true> {
    const Index* indptr;
    unsigned long long seed;
    Index first_row, base;  // entries count from base
    int width, rows, stop;  // rows that end here; entries
    int known;              // rows whose ends are known
    int row, pos, last, begin, end, ahead;  // of the row, which may begin before; the end of the next one
    unsigned length, taken;

    __device__ Work(BlockRows<Index>&, const RowShape<Index>& shape, unsigned block, int subwarp, int subwarps,
                    unsigned long long seed)
        : indptr(shape.indptr), seed(seed), width(shape.width), row(0) {
        const int own = CHUNKS / subwarps;
        const Place<Index>* const chunk = shape.start + (long long)block * CHUNKS + subwarp * own;
        const Place<Index> from = chunk[0], to = chunk[own];
        first_row = from.row, base = from.entry, rows = to.row - from.row, stop = to.entry - base;
        known = min((long long)rows + 1, shape.n_rows - first_row);
        begin = indptr[first_row] - base;  // no row is long
        end = indptr[first_row + min(1, known)] - base;
        pos = 0;
        look();
    }
    // The sample that is taken here ends at `last`; the open row goes on behind the last entry.
    __device__ void look() {
        length = end - begin, taken = min(length, (unsigned)width);
        last = max(min(begin + (int)taken, row < rows ? end : stop), pos);
        ahead = read(indptr + first_row + min(row + 2, known)) - base;
    }
    __device__ unsigned length_of(int row) const { return indptr[first_row + row + 1] - indptr[first_row + row]; }
    __device__ bool began_earlier() const { return begin < 0; }
    __device__ bool more() const { return row < rows || pos < last; }
    __device__ int count() const { return min(PIECE, last - pos); }
    __device__ bool row_ends() const { return row < rows && pos + PIECE >= last; }
    __device__ Index entry(int j) const {
        const int k = min(pos + min(j, PIECE - 1), begin + (int)taken - 1);
        if (STRATEGY == BUCKET || taken == length) return base + k;
        Sample<STRATEGY> sample(seed);
        sample.of_row(first_row + row, length, taken);
        return base + begin + (int)sample.place(k - begin);
    }
    __device__ void next() {
        const bool ends = row_ends();
        row += ends;
        begin = ends ? end : begin;
        pos = ends ? end : min(pos + PIECE, last);
        end = ends ? ahead : end;
        look();
    }
};

// The factor of a row of the result: `taken` of its `length` entries were sampled.
template <typename Sum> struct RowFactor {
    const Sum* row_scale;
    int flags;

    __device__ Sum operator()(long long row, unsigned length, unsigned taken) const {
        Sum factor = row_scale ? read(row_scale + row) : Sum(1);
        if (flags & MEAN) factor /= (Sum)max(taken, 1u);
        if (flags & RESCALE) factor *= (Sum)length / (Sum)max(taken, 1u);
        return factor;
    }
};
