#include "engine/common.cuh"
#include "engine/rows.cuh"

// What scores are made of. Those of sources and targets (n, heads), of entries (nnz, heads) and of virtual loops (n, heads),
// or none; what a negative sum is multiplied with. The virtual loop of row i is entry loops + i, and stored loops
// are left out; where there are none `loops` is negative. An entry is dropped where its random word is below `drop`; those that
// stay are multiplied with `kept`.
template <typename Sum> struct Scores {
    const Sum *el, *er, *edges, *loop_edges;
    const unsigned long long* seed_at;  // replaces the seed
    unsigned long long seed;
    long long loops;
    Sum slope, kept;
    unsigned drop;

    __device__ Sum leaky(Sum z) const { return z > 0 ? z : slope * z; }
    __device__ unsigned long long seed_now() const { return seed_at ? *seed_at : seed; }
};

// What has been summed of VEC features of one row of the result: with positive scores, and with negative ones, of
// which all weights are negative. `top` is the largest score so far, `all` and `positive` are a lane's own sums.
template <typename Sum, int VEC, bool TOPS> struct Sums {
    static constexpr int SIZE = 2 * VEC + 3;
    Sum plus[VEC], minus[VEC], top, all, positive;

    __device__ void clear() {
#pragma unroll
        for (int v = 0; v < VEC; ++v) plus[v] = minus[v] = 0;
        top = lowest<Sum>(), all = positive = 0;
    }
    __device__ void scale(Sum by) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) plus[v] *= by, minus[v] *= by;
        all *= by, positive *= by;
    }
    // A value whose weight bears the sign of its score.
    template <typename T> __device__ void add(Sum weight, const Pack<T, VEC>& x) {
        const Sum positive = max(weight, Sum(0)), negative = min(weight, Sum(0));
#pragma unroll
        for (int v = 0; v < VEC; ++v) plus[v] += positive * load(x, v), minus[v] += negative * load(x, v);
    }
    // Sums with another top are brought to the larger of both.
    __device__ void add(const Sums& other) {
        Sum by = 1;
        if (TOPS) {
            if (other.top == lowest<Sum>()) return;  // nothing
            const Sum higher = larger(top, other.top);
            scale(power(top - higher));
            by = power(other.top - higher), top = higher;
        }
#pragma unroll
        for (int v = 0; v < VEC; ++v) plus[v] += by * other.plus[v], minus[v] += by * other.minus[v];
        all += by * other.all, positive += by * other.positive;
    }
    // Values `step` apart.
    __device__ void keep(Sum* to, int step) const {
        int i = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) to[i++ * step] = plus[v], to[i++ * step] = minus[v];
        to[i++ * step] = top, to[i++ * step] = all, to[i * step] = positive;
    }
    __device__ void get(const Sum* from, int step) {
        int i = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) plus[v] = from[i++ * step], minus[v] = from[i++ * step];
        top = from[i++ * step], all = from[i++ * step], positive = from[i * step];
    }
};

// The forward product. O[i, h, :] = sum_e P[e, h] H[j, h, :], where P is the softmax of leaky(el[j, h] + er[i, h] + edges[e, h])
// over the entries of row i; `plus` is the part of it whose scores are positive, `stats` what the gradient asks of P. With
// `bias`, (heads, feat), O has that added in every row, `plus` has not.
template <typename T, int LANES, int VEC> struct Forward {
    static constexpr bool TOPS = true;
    using Sum = accumulator<T>;
    using Part = Sums<Sum, VEC, TOPS>;
    Scores<Sum> scores;
    T *out, *plus;
    const T* bias;
    Pack<Sum, 4>* stats;  // (n_rows, heads): the largest score, the sum of exponentials, share of positive scores, nothing
    int heads, feat;

    using Of = Sum;  // what scores have of a row, and of an entry
    using At = Sum;
    __device__ Of row(long long item) const { return scores.er[item]; }
    __device__ At entry(long long item) const { return read(scores.el + item); }
    __device__ static Sum score(Of of, At at) { return of + at; }

    // The virtual loop, after all other entries of its row.
    template <typename X> __device__ void add_loop(Part& sum, Sum z, At, bool stays, const X& x) const {
        const Sum s = scores.leaky(z), top = larger(s, sum.top);
        if (top != sum.top) sum.scale(power(sum.top - top));
        sum.top = top;
        const Sum p = top == lowest<Sum>() ? Sum(0) : power(s - top);
        if (threadIdx.x % LANES % PIECE == 0) sum.all += p, sum.positive += z > 0 ? p : Sum(0);
        sum.add(!stays ? Sum(0) : z > 0 ? p : -p, x);
    }
    // A row of which all scores are -infinity is NaN, one without entries 0. `indptr` is not given if it has some.
    template <bool BIAS, typename Index>
    __device__ void put(const Part& part, const Index* indptr, Index i, int head, int f, int slice, bool active) const {
        const Sum all = over_lanes<LANES>(part.all, PIECE), positive = over_lanes<LANES>(part.positive, PIECE);
        Sum factor = scores.kept / all;
        if (all == 0) factor = indptr && indptr[i] == indptr[i + 1] ? Sum(0) : lowest<Sum>() * 0;
        const long long place = (i * (long long)heads + head) * feat + f;
        Sum v[VEC], p[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) p[k] = part.plus[k] * factor, v[k] = p[k] - part.minus[k] * factor;
        if (BIAS && bias) {
            // Written so since other forms took registers, and with them a block of each multiprocessor (sm_90).
            const int column = active ? (int)(place - i * (long long)heads * feat) : 0;
            const Pack<T, VEC> b = read((const Pack<T, VEC>*)(bias + column));
#pragma unroll
            for (int k = 0; k < VEC; ++k) v[k] += load(b, k);
        }
        if (active) store_pack<VEC>(out + place, v);
        if (plus && active) store_pack<VEC>(plus + place, p);
        if (!stats || slice || threadIdx.x % LANES) return;
        stats[i * (long long)heads + head] = {part.top, all, all == 0 ? Sum(0) : positive / all, Sum(0)};
    }
};

// The gradients that sources have, over the transposed structure: dH[j, h, :] = sum_e P[e, h] dO[i, h, :], and
// del[j, h] = sum_e leaky'(.) P[e, h] (<dO[i, h, :], H[j, h, :]> - D[i, h]). P is made of what the sum had as forward took it: of
// the logarithm of that, large scores would be off by their own rounding.
template <typename T, int LANES, int VEC> struct Backward {
    static constexpr bool TOPS = false;
    using Sum = accumulator<T>;
    using Part = Sums<Sum, VEC, TOPS>;
    Scores<Sum> scores;
    using At = Pack<Sum, 4>;
    const At* stats;  // (n_targets, heads): er, the largest score, D, 1 / sum of exponentials
    const T* H;
    T* out;
    Sum* del;  // (n_rows, heads, slices)
    int heads, feat, slices;

    using Of = Sum;
    __device__ Of row(long long item) const { return scores.el[item]; }
    __device__ At entry(long long item) const { return stats[item]; }
    __device__ static Sum score(Of of, const At& at) { return of + at.v[0]; }

    // The weight of an entry of score z, which `all` takes in; of those that stay, what `put` multiplies with `kept`.
    __device__ Sum weigh(Sum& all, Sum z, const At& at, bool there, bool stays) const {
        Sum p = power(scores.leaky(z) - at.v[1]) * at.v[3];
        if (!there) p = 0;
        all += (z > 0 ? p : scores.slope * p) * (there ? at.v[2] : Sum(0));
        return !stays ? Sum(0) : z > 0 ? p : -p;
    }
    template <typename X> __device__ void add_loop(Part& sum, Sum z, const At& at, bool stays, const X& x) const {
        Sum all = 0;
        sum.add(weigh(all, z, at, true, stays), x);
        if (threadIdx.x % LANES % PIECE == 0) sum.all += all;
    }
    template <bool BIAS, typename Index>
    __device__ void put(const Part& part, const Index*, Index j, int head, int f, int slice, bool active) const {
        const long long place = (j * (long long)heads + head) * feat + f;
        Sum v[VEC], dot = 0;
        Pack<T, VEC> h = {};
        if (active) h = read((const Pack<T, VEC>*)(H + place));
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            v[k] = (part.plus[k] - part.minus[k]) * scores.kept;
            dot += load(h, k) * (part.plus[k] - scores.slope * part.minus[k]);
        }
        if (active) store_pack<VEC>(out + place, v);
        dot = over_lanes<LANES>(dot, LANES) * scores.kept;
        const Sum all = slice == 0 ? over_lanes<LANES>(part.all, PIECE) : Sum(0);
        if (threadIdx.x % LANES == 0) del[(j * (long long)heads + head) * slices + slice] = dot - all;
    }
};

template <typename T, int LANES, int VEC, bool BACKWARD> struct Way_ { using type = Forward<T, LANES, VEC>; };
template <typename T, int LANES, int VEC> struct Way_<T, LANES, VEC, true> { using type = Backward<T, LANES, VEC>; };

enum Extra { NOTHING, ANYTHING, ONLY_BIAS };

// A block owns CHUNKS chunks, and MATES heads side by side with one slice of their features each. A team is a sub-warp for
// each of those heads: what they gather lies side by side. EXTRA is what there may be: scores of entries, virtual loops and a
// bias, or only that, or nothing (a bias that is only asked for at run time made it up to 1.19x slower: H200, 8 heads of 8).
// X, whose rows are `stride` bytes apart, is of the type In, narrower than T where it has been rounded for its bytes.
template <typename T, typename Index, typename In, int LANES, int VEC, int MATES, bool BACKWARD, bool DROPPED, int EXTRA>
__global__ void __launch_bounds__(ROW_THREADS)
gat_balanced(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
             const int* __restrict__ slot, const Index* __restrict__ perm, const In* __restrict__ X,
             const __grid_constant__ typename Way_<T, LANES, VEC, BACKWARD>::type way,
             accumulator<T>* carry, long long nnz, unsigned stride, unsigned blocks, int slices) {
    using Way = typename Way_<T, LANES, VEC, BACKWARD>::type;
    using Sum = accumulator<T>;
    using Part = typename Way::Part;
    using Of = typename Way::Of;
    using At = typename Way::At;
    using Vector = Pack<In, VEC>;
    constexpr int TEAM = LANES * MATES, TEAMS = ROW_THREADS / TEAM, OWN = CHUNKS / TEAMS, BATCH = LANES < PIECE ? PIECE / LANES : 1;
    using Kept = Shared<Part, Sum, Index, TEAM>;
    __shared__ Kept shared;

    const unsigned block = blockIdx.x % blocks, part_of = blockIdx.x / blocks;
    const int team = threadIdx.x / TEAM, own = threadIdx.x % TEAM, lane = threadIdx.x % LANES;
    const int head = part_of / slices * MATES + own / LANES, slice = part_of % slices;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + team * OWN, OWN, nnz);
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row];
    const int f = (slice * LANES + lane) * VEC;
    const bool active = f < way.feat;
    const char* x_slice = kept((const char*)(X + ((long long)head * way.feat + (active ? f : 0))));

    const unsigned long long seed = DROPPED ? way.scores.seed_now() : 0;
    const bool loops = EXTRA == ANYTHING && way.scores.loops >= 0, edges = EXTRA == ANYTHING && way.scores.edges;
    const auto stays = [&](long long number) { return !DROPPED || philox(seed, number, head) >= way.scores.drop; };

    Index cols[BATCH], numbers[BATCH];
    Of of_next;
    const auto fetch = [&]() {
        // A team that is done goes along for the shuffles, with any row.
        of_next = way.row((at_work.more() ? first_row + at_work.row : 0) * (long long)way.heads + head);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const Index entry = at_work.entry((b * LANES + lane) % PIECE);
            cols[b] = read(indices + entry);
            if (DROPPED || EXTRA == ANYTHING) numbers[b] = perm ? read(perm + entry) : entry;
        }
    };
    Part sum;
    sum.clear();
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        Vector x[PIECE];
#pragma unroll
        for (int j = 0; j < PIECE; ++j)
            x[j] = read((const Vector*)(x_slice + at(__shfl_sync(FULL_WARP, cols[j / LANES], j % LANES, LANES), stride)));
        // After the gathers are on their way: what follows waits for the end of the row.
        const int count = at_work.count(), row = at_work.row;
        const bool row_ends = at_work.row_ends();
        Vector loop_x = {};
        At loop_at = {};
        Sum of_loop = 0;
        if (loops && row_ends) {
            const long long item = (first_row + row) * (long long)way.heads + head;
            loop_x = read((const Vector*)(x_slice + at((Index)(first_row + row), stride)));
            loop_at = way.entry(item);
            if (way.scores.loop_edges) of_loop = read(way.scores.loop_edges + item);
        }
        At ats[BATCH];
        Sum of_edge[BATCH], weight[BATCH];
        bool there[BATCH], staying[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            ats[b] = way.entry(cols[b] * (long long)way.heads + head);
            of_edge[b] = edges ? read(way.scores.edges + (numbers[b] * (long long)way.heads + head)) : Sum(0);
            there[b] = (b * LANES + lane) % PIECE < count && !(loops && cols[b] == first_row + row);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) staying[b] = stays(numbers[b]);
        const Of of = of_next;
        at_work.next();
        fetch();
        if constexpr (BACKWARD) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                weight[b] = way.weigh(sum.all, way.score(of, ats[b]) + of_edge[b], ats[b], there[b], staying[b]);
        } else {
            Sum top = lowest<Sum>(), scores[BATCH];
            bool positive[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const Sum z = way.score(of, ats[b]) + of_edge[b];
                positive[b] = z > 0;
                scores[b] = there[b] ? way.scores.leaky(z) : lowest<Sum>();
                top = larger(scores[b], top);
            }
#pragma unroll
            for (int step = min(LANES, PIECE) / 2; step > 0; step /= 2) top = larger(__shfl_xor_sync(FULL_WARP, top, step), top);
            top = larger(sum.top, top);
            if (__any_sync(FULL_WARP, top != sum.top)) sum.scale(sum.top == top ? Sum(1) : power(sum.top - top));
            sum.top = top;
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const Sum p = top == lowest<Sum>() ? Sum(0) : power(scores[b] - top);
                sum.all += p;
                if (positive[b]) sum.positive += p;
                weight[b] = !staying[b] ? Sum(0) : positive[b] ? p : -p;
            }
        }
#pragma unroll
        for (int j = 0; j < PIECE; ++j) sum.add(__shfl_sync(FULL_WARP, weight[j / LANES], j % LANES, LANES), x[j]);
        if (row_ends) {
            if (count == 0) sum.clear();  // what was read is another row's, and may be infinite
            const Index i = first_row + row;
            if (loops) way.add_loop(sum, way.score(of, loop_at) + of_loop, loop_at, stays(way.scores.loops + i), loop_x);
            if (row == 0 && began_earlier) sum.keep(&shared.head[team][own], TEAM);
            else way.template put<EXTRA != NOTHING>(sum, indptr, i, head, f, slice, active);
            sum.clear();
        }
    }
    if (at_work.to.entry == indptr[open]) sum.clear();  // likewise
    sum.keep(&shared.open[team][own], TEAM);
    if (own == 0) shared.open_row[team] = open;
    __syncthreads();
    const auto carried = [&](int s, int side) {
        return carry + (((2LL * s + side) * way.heads + head) * slices + slice) * (Part::SIZE * LANES) + lane;
    };
    if (at_work.rows > 0 && began_earlier) {
        sum.clear();
        shared.add_open(sum, first_row, team - 1, own);
        Kept::add(sum, &shared.head[team][own], TEAM);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) sum.keep(carried(slot[block], 1), LANES);
        else way.template put<EXTRA != NOTHING>(sum, indptr, first_row, head, f, slice, active);
    }
    if (team == TEAMS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, open, team, own);
        sum.keep(carried(slot[block + 1], 0), LANES);
    }
}

// The rows that borders between blocks cut, as in spmm.cu: a sub-warp owns one border, head and slice.
template <typename T, typename Index, int LANES, int VEC, bool BACKWARD>
__global__ void __launch_bounds__(ROW_THREADS)
gat_cut_rows(const Place<Index>* __restrict__ start, const int* __restrict__ cut,
             const __grid_constant__ typename Way_<T, LANES, VEC, BACKWARD>::type way,
             const accumulator<T>* carry, int cuts, int slices) {
    using Way = typename Way_<T, LANES, VEC, BACKWARD>::type;
    using Part = typename Way::Part;
    using Kept = Shared<Part, accumulator<T>, Index, LANES>;
    const int parts = way.heads * slices, lane = threadIdx.x % LANES;
    const long long item = (blockIdx.x * (long long)ROW_THREADS + threadIdx.x) / LANES;
    const int s = item / parts, part_of = item % parts;
    if (s >= cuts) return;
    const auto row_at = [&](long long block) { return start[block * CHUNKS].row; };
    const Index row = row_at(cut[s]);
    if (row_at(cut[s] + 1LL) == row) return;
    int first = s;
    while (first > 0 && row_at(cut[first - 1]) == row) --first;
    const auto carried = [&](int k, int side) { return carry + ((2LL * k + side) * parts + part_of) * (Part::SIZE * LANES) + lane; };
    Part sum;
    sum.clear();
    for (int k = first; k <= s; ++k) Kept::add(sum, carried(k, 0), LANES);
    Kept::add(sum, carried(s, 1), LANES);
    const int slice = part_of % slices, f = (slice * LANES + lane) * VEC;
    way.template put<true>(sum, (const Index*)nullptr, row, part_of / slices, f, slice, f < way.feat);
}

// What the gradient needs of each row and head, from dO, O and the part of O with positive scores: the statistics that
// entries read, and der[i, h] = sum_e leaky'(.) P[e, h] (<dO[i, h, :], H[j, h, :]> - D[i, h]), of which the softmax makes
// (1 - slope) times the sum over positive scores. D is <dO, O - bias>. With `dloop` also the gradient of the virtual loops'
// scores, which is the summand of i = j. A sub-warp of 8 lanes owns a row and head.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
gat_stats(const T* __restrict__ O, const T* __restrict__ plus, const T* __restrict__ bias,
          const T* __restrict__ grad, const T* __restrict__ H, const __grid_constant__ Scores<accumulator<T>> scores,
          const Pack<accumulator<T>, 4>* __restrict__ forward, Pack<accumulator<T>, 4>* __restrict__ stats,
          accumulator<T>* __restrict__ der, accumulator<T>* __restrict__ dloop, long long items, int heads, int feat) {
    using Sum = accumulator<T>;
    constexpr int LANES = 8;
    const long long item = (blockIdx.x * (long long)ROW_THREADS + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    if (item >= items) return;
    const long long of_head = item % heads * feat;
    Sum all = 0, positive = 0, own = 0;
    for (int f = lane; f < feat; f += LANES) {
        const long long at = item * feat + f;
        const Sum g = load(grad[at]), o = load(O[at]);
        all += g * (bias ? o - load(bias[of_head + f]) : o), positive += g * load(plus[at]);
        if (dloop) own += g * load(H[at]);
    }
    all = over_lanes<LANES>(all, LANES), positive = over_lanes<LANES>(positive, LANES);
    if (dloop) own = over_lanes<LANES>(own, LANES);
    if (lane) return;
    const Sum right = scores.er[item];
    const Pack<Sum, 4> of = forward[item];  // the largest score, the sum of exponentials, share of positive scores
    const Sum inverse = 1 / of.v[1];
    stats[item] = {right, of.v[0], all, inverse};
    der[item] = (1 - scores.slope) * (positive - all * of.v[2]);
    if (!dloop) return;
    const Sum z = scores.el[item] + right + (scores.loop_edges ? scores.loop_edges[item] : Sum(0));
    const Sum p = power(scores.leaky(z) - of.v[0]) * inverse;
    const bool stays = !scores.drop || philox(scores.seed_now(), scores.loops + item / heads, item % heads) >= scores.drop;
    dloop[item] = (z > 0 ? p : scores.slope * p) * ((stays ? scores.kept * own : Sum(0)) - all);
}
