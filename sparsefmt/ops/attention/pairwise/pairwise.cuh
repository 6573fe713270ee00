// Attention whose scores are of whole rows: what its kernels share. They include common.cuh and rows.cuh before.
constexpr int FORWARD = 0, SOURCES = 1, TARGETS = 2;  // WAY
constexpr int DOT = 0, ADDITIVE = 1;                  // SCORE

// What an entry's score is made of, f by f: the products of query and key, or att times leaky(query + key).
template <typename Sum, int VEC, int SCORE> struct Score {
    Sum att[VEC], slope;

    __device__ Sum of(Sum query, Sum key, int v) const {
        if (SCORE == DOT) return query * key;
        const Sum z = query + key;
        return att[v] * (z > 0 ? z : slope * z);
    }
    // Its derivative by the key; by the query where they are exchanged.
    __device__ Sum by_key(Sum query, Sum key, int v) const {
        if (SCORE == DOT) return query;
        return query + key > 0 ? att[v] : slope * att[v];
    }
    __device__ Sum by_att(Sum query, Sum key) const {
        const Sum z = query + key;
        return z > 0 ? z : slope * z;
    }
};

// Arrays of one launch: (n, heads, feat), and statistics (targets, heads). What is `later` added to is not divided by the
// sum of exponentials yet, and `statistics` has that sum in the place of its inverse. With `loops` stored entries (i, i) are left
// out, and each row has one behind its own entries, which counts as entry nnz + i.
template <typename T> struct Attention {
    using Sum = accumulator<T>;
    const T *queries, *keys, *values, *grad;
    const Sum* att;              // (heads, feat)
    const Pack<Sum, 4>* stats;   // the largest score, 1 / sum of exponentials relative to it, D, 0; not of FORWARD
    const Sum* edges;            // (nnz, heads), added to scores
    T *out, *other;              // O; of SOURCES dV, dK (or only the former, of both); of TARGETS dQ
    Sum *part, *other_part;      // of both, what launches over some of the columns leave to one another
    Pack<Sum, 2>* statistics;    // of FORWARD, where it is: the first two of those
    Sum* datt;                   // of TARGETS and ADDITIVE scores: (blocks, heads, feat)
    Sum* dedges;                 // (nnz, heads)
    const unsigned long long* seed_at;  // where it is, that seed
    const Pack<Sum, 2>* before;         // of FORWARD and `earlier`: the largest scores and sums of exponentials so far
    unsigned long long seed;
    Sum slope, scale, kept;
    unsigned drop;               // an entry is dropped where its random word is below it, else multiplied with `kept`
    int heads, feat, loops, summed;  // `summed`: both arrays go to `out`
    int earlier, later;              // launches over other columns: add to what is there; and leave it to be added to

    __device__ unsigned long long seed_now() const { return seed_at ? *seed_at : seed; }
    __device__ bool stays(unsigned long long seed, long long entry, int head) const {
        return !drop || philox(seed, entry, head) >= drop;
    }
    // Rounded before the largest is subtracted, on both ways: else a large one would differ from itself.
    __device__ Sum scaled(Sum score, Sum edge) const { return fma(score, scale, edge); }
    // On the way back, from an entry's score and <dO, V>: what it weighs, and the gradient of its score.
    __device__ void weigh(Sum score, Sum dot, const Pack<Sum, 4>& stats, bool there, bool stays, Sum& weight,
                          Sum& ds) const {
        const Sum p = there ? power(score - stats.v[0]) * stats.v[1] : Sum(0);
        weight = stays ? p * kept : Sum(0);
        ds = there ? weight * dot - p * stats.v[2] : Sum(0);
    }
};

// One more score: sums that were relative to the largest so far become so to the new one. A lane alone counts it.
template <typename Part, typename Sum> __device__ inline Sum raise(Part& sum, Sum score, bool counts) {
    const Sum top = larger(sum.top, score);
    if (top != sum.top) sum.scale(power(sum.top - top));
    sum.top = top;
    const Sum p = top == lowest<Sum>() ? Sum(0) : power(score - top);
    if (counts) sum.all += p;
    return p;
}

// Adds what launches over other columns have left of a row.
template <typename T, typename Sum, int VEC, int ARRAYS, bool TOPS>
__device__ inline void add_earlier(const Attention<T>& A, Part<Sum, VEC, ARRAYS, TOPS>& part, long long item, int f) {
    Part<Sum, VEC, ARRAYS, TOPS> so_far;
    so_far.clear();
#pragma unroll
    for (int a = 0; a < ARRAYS; ++a) {
        if (f >= A.feat) break;
        const auto word = *(const Pack<Sum, VEC>*)((a ? A.other_part : A.part) + item * A.feat + f);
#pragma unroll
        for (int i = 0; i < VEC; ++i) so_far.v[a][i] = word.v[i];
    }
    if (TOPS) so_far.top = A.before[item].v[0], so_far.all = f == 0 ? A.before[item].v[1] : Sum(0);
    part.add(so_far);
}

// A whole row of the result: of each array PACKS packs of a lane, LANES * VEC apart. Rows without entries are 0, those
// whose scores all are -infinity NaN.
template <int LANES, int VEC, int PACKS, typename T, typename Index, typename Sum, int ARRAYS, bool TOPS>
__device__ inline void put(const Attention<T>& A, Part<Sum, VEC * PACKS, ARRAYS, TOPS>& part, const Index* indptr,
                           long long row, int head, int f) {
    const long long item = row * A.heads + head;
    if constexpr (PACKS == 1) {
        if (A.earlier) add_earlier(A, part, item, f);
    }
    Sum factor = 1;
    if (TOPS) {
        const Sum all = over_lanes<LANES>(part.all, LANES);
        Sum inverse = 1 / all;
        if (all == 0) inverse = !A.loops && indptr[row] == indptr[row + 1] ? Sum(0) : lowest<Sum>() * 0;
        if (!A.later) factor = A.kept * inverse;
        if (A.statistics && f == 0) A.statistics[item] = {part.top, A.later ? all : inverse};
    }
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
        const int at = f + pack * (LANES * VEC);
        if (at >= A.feat) break;
#pragma unroll
        for (int a = 0; a < ARRAYS; ++a) {
            if (PACKS > 1 && a && A.summed) break;
            Sum v[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                v[i] = part.v[a][pack * VEC + i] * factor;
                if (PACKS > 1 && A.summed) v[i] += part.v[ARRAYS - 1][pack * VEC + i];
            }
            if (PACKS == 1 && A.later) store_pack<VEC>((a ? A.other_part : A.part) + item * A.feat + at, v);
            else store_pack<VEC>((a ? A.other : A.out) + item * A.feat + at, v);
        }
    }
}
