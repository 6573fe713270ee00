#include "engine/common.cuh"
#include "engine/rows.cuh"
#include "attention/pairwise/pairwise.cuh"

// Blocks that each multiprocessor has registers for, where compilers would take more (some of 2 bytes 255).
__device__ constexpr int row_blocks(int size, int way, int score, bool one, bool extra) {
    if (size == 2) return 3;
    const bool some = way == SOURCES ? extra || !one : way == TARGETS && extra == (score == DOT);
    return size == 4 && some ? 5 : 0;
}

// Attention whose scores are of whole rows. FORWARD: O[i] = sum_e P[e] V[j], P the softmax over row i of the scores of
// Q[i] and K[j]. SOURCES, over the transposed structure: dV[j] and dK[j], where K is V their sum. TARGETS: dQ[i], and of
// ADDITIVE scores the gradient of att. A block owns CHUNKS chunks and MATES heads, each of which a sub-warp has all
// features of. EXTRA: there may be dropout, scores of edges, and loops. Where there are `moves`, the structure is that of
// some columns: indptr counts their entries, and entry e of row i is e + moves[i] of the `nnz` of `whole`.
template <typename T, typename Index, int LANES, int VEC, int MATES, int WAY, int SCORE, bool ONE, bool EXTRA>
__global__ void __launch_bounds__(ROW_THREADS, row_blocks(sizeof(T), WAY, SCORE, ONE, EXTRA))
attend_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
            const int* __restrict__ slot, const Index* __restrict__ perm, const Index* __restrict__ whole,
            const Index* __restrict__ moves, const __grid_constant__ Attention<T> A, accumulator<T>* carry,
            long long entries, long long nnz, unsigned stride, unsigned blocks) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    constexpr bool TWO = WAY == SOURCES || !ONE;  // gathered: the second is values, or gradients
    constexpr int N = TWO ? 4 : PIECE;  // entries at a time: more would take too many registers
    constexpr int BATCH = LANES < N ? N / LANES : 1, HELD = LANES < PIECE ? PIECE / LANES : 1;  // entries of a lane
    constexpr int TEAM = LANES * MATES, TEAMS = ROW_THREADS / TEAM, OWN = CHUNKS / TEAMS;
    using Partial = Part<Sum, VEC, WAY == SOURCES && !ONE ? 2 : 1, WAY == FORWARD>;
    using Kept = Shared<Partial, Sum, Index, TEAM>;
    __shared__ Kept shared;

    const unsigned block = blockIdx.x % blocks;
    const int team = threadIdx.x / TEAM, own = threadIdx.x % TEAM, lane = threadIdx.x % LANES, f = lane * VEC;
    const int head = blockIdx.x / blocks * MATES + own / LANES;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + team * OWN, OWN, EXTRA ? max(entries, 1LL) : entries);
    const Index first_row = at_work.from.row;
    const auto has_entries = [&]() { return at_work.to.entry > indptr[at_work.to.row]; };  // the row that stays open
    const bool opens = WAY == FORWARD || has_entries();  // asked for where it takes fewer registers
    const bool began_earlier = at_work.from.entry > indptr[first_row], active = f < A.feat;
    const long long here = (long long)head * A.feat + (active ? f : 0);
    const T* const rows = (WAY == SOURCES ? A.keys : A.queries) + here;
    const T* const more_rows = (WAY == SOURCES ? A.values : A.grad) + here;
    const char* const gathered = kept((const char*)((WAY == SOURCES ? A.queries : A.keys) + here));
    const char* const second = kept((const char*)((WAY == SOURCES ? A.grad : A.values) + here));
    const long long pitch = (long long)A.heads * A.feat;
    const unsigned long long seed = EXTRA ? A.seed_now() : 0;

    if (own == 0) shared.open_row[team] = at_work.to.row;
    Score<Sum, VEC, SCORE> score;
    score.slope = A.slope;
#pragma unroll
    for (int v = 0; v < VEC; ++v) score.att[v] = SCORE == ADDITIVE && active ? A.att[here + v] : Sum(0);
    Index cols[HELD], numbers[HELD];
    Vector next_row = {}, next_more = {};
    Pack<Sum, 4> next_stats = {};
    const auto fetch = [&]() {
        const Index row = at_work.more() ? first_row + at_work.row : 0;
        if (active) next_row = read((const Vector*)(rows + row * pitch));
        if (WAY != FORWARD && active) next_more = read((const Vector*)(more_rows + row * pitch));
        if (WAY == TARGETS) next_stats = A.stats[row * (long long)A.heads + head];
#pragma unroll
        for (int b = 0; b < HELD; ++b) {
            Index entry = at_work.entry((b * LANES + lane) % PIECE);
            if (moves) entry = min(max(entry + read(moves + row), Index(0)), Index(nnz - 1));  // of an empty row
            cols[b] = read(indices + entry);
            if (EXTRA) numbers[b] = WAY == SOURCES && perm ? read(perm + entry) : entry;
        }
    };
    const auto of_entry = [&](const Index (&held)[HELD], int j) {  // in the same instruction for all lanes
        if constexpr (HELD == 1) return __shfl_sync(FULL_WARP, held[0], j, LANES);
        const Index low = __shfl_sync(FULL_WARP, held[0], j % LANES, LANES);
        const Index high = __shfl_sync(FULL_WARP, held[HELD - 1], j % LANES, LANES);
        return j < LANES ? low : high;
    };
    Partial sum;
    sum.clear();
    Sum datt[VEC] = {};
    const auto add = [&](const Vector& x, const Vector& y, const Sum (&q)[VEC], Sum w, Sum ds, bool some) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Sum value = load(x, v), other = TWO ? load(y, v) : value;
            if (WAY == FORWARD) sum.v[0][v] += w * other;
            if (WAY == SOURCES) sum.v[0][v] += w * other, sum.v[!ONE][v] += ds * score.by_key(value, q[v], v);
            if (WAY == TARGETS) sum.v[0][v] += ds * score.by_key(value, q[v], v);
            if (WAY == TARGETS && SCORE == ADDITIVE && some) datt[v] += ds * score.by_att(q[v], value);
        }
    };
    // The entry (i, i) behind those of row i, by the lanes of one sub-warp.
    const auto add_loop = [&](Index i, const Vector& own_more, const Pack<Sum, 4>& own_stats, const Sum (&q)[VEC]) {
        const auto place = at(i, stride);
        const Vector x = read((const Vector*)(gathered + place)), y = TWO ? read((const Vector*)(second + place)) : x;
        const long long item = i * (long long)A.heads + head;
        Sum s = 0, dot = 0, w, ds = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            s += score.of(q[v], active ? load(x, v) : Sum(0), v);
            if (WAY != FORWARD) dot += active ? load(own_more, v) * load(y, v) : Sum(0);
        }
        s = A.scaled(over_lanes<LANES>(s, LANES), 0);
        const bool stays = A.stays(seed, nnz + i, head);
        if constexpr (WAY == FORWARD) {
            w = raise(sum, s, lane == 0);
            if (!stays) w = 0;
        } else {
            dot = over_lanes<LANES>(dot, LANES);
            A.weigh(s, dot, WAY == SOURCES ? A.stats[item] : own_stats, true, stays, w, ds);
            ds *= A.scale;
        }
        add(x, y, q, w, ds, true);
    };
    fetch();
    while (__any_sync(FULL_WARP, at_work.more())) {
        const Vector own_row = next_row, own_more = next_more;
        const Pack<Sum, 4> own_stats = next_stats;
        const int count = at_work.count(), row = at_work.row;
        const bool row_ends = at_work.row_ends();
        Sum q[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) q[v] = load(own_row, v);
#pragma unroll
        for (int part = 0; part < PIECE; part += N) {
            Vector x[N], y[TWO ? N : 1];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const auto place = at(of_entry(cols, part + j), stride);
                x[j] = read((const Vector*)(gathered + place));
                if (TWO) y[j] = read((const Vector*)(second + place));
            }
            Pack<Sum, 4> stats[BATCH];
            bool stays[BATCH], there[BATCH];
            Sum edge[BATCH];
            long long place[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int j = part + (lane * BATCH + b) % N;
                stats[b] = own_stats, stays[b] = true, there[b] = j < count, edge[b] = 0;
                if (WAY == SOURCES) stats[b] = A.stats[of_entry(cols, j) * (long long)A.heads + head];
                if (!EXTRA) continue;
                const Index number = of_entry(numbers, j);
                stays[b] = A.stays(seed, number, head), place[b] = number * (long long)A.heads + head;
                if (A.edges) edge[b] = read(A.edges + place[b]);
                if (A.loops) there[b] &= of_entry(cols, j) != first_row + row;
            }
            if (part + N == PIECE) {
                at_work.next();
                fetch();
            }
            Sum partial[N], scores[BATCH], weight[BATCH], grads[BATCH];
#pragma unroll
            for (int j = 0; j < N; ++j) {
                partial[j] = 0;
#pragma unroll
                for (int v = 0; v < VEC; ++v) partial[j] += score.of(q[v], active ? load(x[j], v) : Sum(0), v);
            }
            totals<LANES>(partial, scores);
            if (WAY != FORWARD) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    partial[j] = 0;
#pragma unroll
                    for (int v = 0; v < VEC; ++v)
                        partial[j] += active ? load(own_more, v) * (TWO ? load(y[j], v) : load(x[j], v)) : Sum(0);
                }
                totals<LANES>(partial, grads);
            }
            if (WAY == FORWARD) {
                Sum top = lowest<Sum>();
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    scores[b] = there[b] ? A.scaled(scores[b], edge[b]) : lowest<Sum>();
                    top = larger(scores[b], top);
                }
#pragma unroll
                for (int step = min(LANES, N / BATCH) / 2; step > 0; step /= 2)
                    top = larger(__shfl_xor_sync(FULL_WARP, top, step), top);
                top = larger(sum.top, top);
                if (__any_sync(FULL_WARP, top != sum.top)) sum.scale(sum.top == top ? Sum(1) : power(sum.top - top));
                sum.top = top;
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const Sum p = top == lowest<Sum>() ? Sum(0) : power(scores[b] - top);
                    if (lane * BATCH < N) sum.all += p;
                    weight[b] = stays[b] ? p : Sum(0);
                }
            } else {
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const int j = lane * BATCH + b;
                    A.weigh(A.scaled(scores[b], edge[b]), grads[b], stats[b], there[b], stays[b], weight[b], grads[b]);
                    if (EXTRA && WAY == TARGETS && A.dedges && j < N && part + j < count)
                        A.dedges[place[b]] = grads[b];
                    grads[b] *= A.scale;
                }
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                const Sum w = WAY == TARGETS ? Sum(0) : __shfl_sync(FULL_WARP, weight[j % BATCH], j / BATCH, LANES);
                const Sum ds = WAY == FORWARD ? Sum(0) : __shfl_sync(FULL_WARP, grads[j % BATCH], j / BATCH, LANES);
                add(x[j], y[TWO ? j : 0], q, w, ds, count > 0);
            }
        }
        if (row_ends) {
            if (count == 0) sum.clear();  // what was read is another row's, and may be infinite
            if (EXTRA && A.loops && !A.later) add_loop(first_row + row, own_more, own_stats, q);
            if (row == 0 && began_earlier) sum.keep(&shared.head[team][own], TEAM);
            else put<LANES, VEC, 1>(A, sum, whole, (long long)first_row + row, head, f);
            sum.clear();
        }
    }
    if (!(WAY == FORWARD ? has_entries() : opens)) sum.clear();  // likewise
    sum.keep(&shared.open[team][own], TEAM);
    __syncthreads();
    const auto carried = [&](int s, int side) {
        return carry + ((2LL * s + side) * A.heads + head) * (Partial::SIZE * LANES) + lane;
    };
    if (at_work.rows > 0 && began_earlier) {
        sum.clear();
        shared.add_open(sum, first_row, team - 1, own);
        Kept::add(sum, &shared.head[team][own], TEAM);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) sum.keep(carried(slot[block], 1), LANES);
        else put<LANES, VEC, 1>(A, sum, whole, (long long)first_row, head, f);
    }
    if (team == TEAMS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, shared.open_row[team], team, own);
        sum.keep(carried(slot[block + 1], 0), LANES);
    }
    if (WAY == TARGETS && SCORE == ADDITIVE) {
        __syncthreads();
        Sum* const of_all = &shared.open[0][0];  // (TEAMS, TEAM * VEC)
#pragma unroll
        for (int v = 0; v < VEC; ++v) of_all[(team * TEAM + own) * VEC + v] = datt[v];
        __syncthreads();
        for (int i = threadIdx.x; i < TEAM * VEC; i += ROW_THREADS) {
            const int mate = i / (LANES * VEC), feature = i % (LANES * VEC);
            if (feature >= A.feat) continue;
            Sum all = 0;
            for (int s = 0; s < TEAMS; ++s) all += of_all[s * TEAM * VEC + i];
            A.datt[((long long)block * A.heads + blockIdx.x / blocks * MATES + mate) * A.feat + feature] = all;
        }
    }
}

// The rows that borders between blocks cut, of attend_wide.cu too: a thread owns one border, head and feature.
template <typename T, typename Index>
__global__ void __launch_bounds__(ROW_THREADS)
attend_cut_rows(const Place<Index>* __restrict__ start, const int* __restrict__ cut, const __grid_constant__ Attention<T> A,
                const accumulator<T>* __restrict__ carry, int cuts, int lanes, int vec, int packs, int arrays, int tops) {
    using Sum = accumulator<T>;
    const long long thread = blockIdx.x * (long long)ROW_THREADS + threadIdx.x, pitch = (long long)A.heads * A.feat;
    const int s = thread / pitch, head = thread % pitch / A.feat, f = thread % A.feat;
    if (s >= cuts) return;
    const auto row_at = [&](long long block) { return start[block * CHUNKS].row; };
    const Index row = row_at(cut[s]);
    if (row_at(cut[s] + 1LL) == row) return;
    int first = s;
    while (first > 0 && row_at(cut[first - 1]) == row) --first;
    const int step = lanes * vec, slices = (A.feat - 1) / (step * packs) + 1, in_slice = f % (step * packs);
    const int lane = in_slice % step / vec, own = in_slice / step * vec + f % vec, values = packs * vec;
    Sum top = lowest<Sum>(), all = 0, sum[2] = {0, 0};
    // Makes room for sums that are relative to another largest score, and tells what to multiply them with.
    const auto raised = [&](Sum other, Sum found) -> Sum {
        if (!tops) return 1;
        if (other == lowest<Sum>()) return 0;  // nothing
        const Sum higher = larger(top, other), less = power(top - higher), by = power(other - higher);
        top = higher, sum[0] *= less, all = all * less + by * found;
        return by;
    };
    const auto add = [&](int k, int side) {
        const long long part = ((2LL * k + side) * A.heads + head) * slices + f / (step * packs);
        const Sum* const from = carry + part * ((arrays * values + 2 * tops) * lanes);
        Sum found = 0;
        for (int l = 0; l < lanes && tops; ++l) found += from[(values + 1) * lanes + l];
        const Sum by = raised(tops ? from[values * lanes] : Sum(0), found);
        if (by == 0) return;
        for (int a = 0; a < arrays; ++a) sum[a] += by * from[(a * values + own) * lanes + lane];
    };
    for (int k = first; k <= s; ++k) add(k, 0);
    add(s, 1);
    const long long item = row * (long long)A.heads + head, at = item * A.feat + f;
    if (A.earlier) {
        const Sum by = tops ? raised(A.before[item].v[0], A.before[item].v[1]) : Sum(1);
        for (int a = 0; a < arrays && by != 0; ++a) sum[a] += by * (a ? A.other_part : A.part)[at];
    }
    const Sum inverse = all == 0 ? lowest<Sum>() * 0 : 1 / all, factor = tops && !A.later ? A.kept * inverse : Sum(1);
    if (tops && A.statistics && f == 0) A.statistics[item] = {top, A.later ? all : inverse};
    if (A.summed) sum[0] += sum[1];
    for (int a = 0; a < arrays - A.summed; ++a) {
        if (A.later) (a ? A.other_part : A.part)[at] = sum[a];
        else store((a ? A.other : A.out) + at, sum[a] * factor);
    }
}

// What the gradient reads of each row and head: what forward wrote, and D = <dO, O>. A sub-warp of 8 lanes owns one of these.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
attend_stats(const T* __restrict__ O, const T* __restrict__ grad, const Pack<accumulator<T>, 2>* __restrict__ statistics,
             Pack<accumulator<T>, 4>* __restrict__ stats, long long items, int feat) {
    constexpr int LANES = 8;
    const long long item = (blockIdx.x * (long long)ROW_THREADS + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    if (item >= items) return;
    accumulator<T> all = 0;
    for (int f = lane; f < feat; f += LANES) all += load(grad[item * feat + f]) * load(O[item * feat + f]);
    all = over_lanes<LANES>(all, LANES);
    if (lane) return;
    const Pack<accumulator<T>, 2> of = statistics[item];
    stats[item] = {of.v[0], of.v[1], all, 0};
}
