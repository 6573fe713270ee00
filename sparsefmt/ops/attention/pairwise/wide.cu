#include "engine/common.cuh"
#include "engine/rows.cuh"
#include "attention/pairwise/pairwise.cuh"

// What attend_rows of attend.cu computes, for rows of any width. A warp goes through all features of its entries for
// their scores, N entries at a time, and then, with what they weigh, through those of its own slice of PACKS packs a
// lane: it reads these twice, the second time from the L1. A block owns CHUNKS chunks, one head and slice. Its sums are
// kept as of two arrays on the way to sources; whether scores are additive, `att` says.
template <typename T, typename Index, int VEC, int PACKS, int WAY>
__global__ void __launch_bounds__(ROW_THREADS)
attend_wide_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices, const Place<Index>* __restrict__ start,
                 const int* __restrict__ slot, const Index* __restrict__ perm, const __grid_constant__ Attention<T> A,
                 accumulator<T>* carry, long long nnz, unsigned stride, unsigned blocks) {
    using Sum = accumulator<T>;
    using Vector = Pack<T, VEC>;
    using Partial = Part<Sum, VEC * PACKS, WAY == SOURCES ? 2 : 1, WAY == FORWARD>;
    using Kept = Shared<Partial, Sum, Index, WARP>;
    constexpr int N = 4, TEAMS = ROW_THREADS / WARP, OWN = CHUNKS / TEAMS, STEP = WARP * VEC;
    __shared__ Kept shared;

    const unsigned block = blockIdx.x % blocks, part_of = blockIdx.x / blocks;
    const int slices = (A.feat - 1) / (STEP * PACKS) + 1, head = part_of / slices, slice = part_of % slices;
    const int team = threadIdx.x / WARP, lane = threadIdx.x % WARP, own = lane % N, f = slice * (STEP * PACKS) + lane * VEC;
    Pieces<Index> at_work(indptr, start, (long long)block * CHUNKS + team * OWN, OWN, max(nnz, 1LL));
    const Index first_row = at_work.from.row, open = at_work.to.row;
    const bool began_earlier = at_work.from.entry > indptr[first_row], additive = A.att;
    const long long here = (long long)head * A.feat;
    const T* const rows = (WAY == SOURCES ? A.keys : A.queries) + here;
    const T* const more_rows = (WAY == SOURCES ? A.values : A.grad) + here;
    const char* const gathered = (const char*)((WAY == SOURCES ? A.queries : A.keys) + here);
    const char* const second = (const char*)((WAY == SOURCES ? A.grad : A.values) + here);
    const unsigned long long seed = A.seed_now();
    const Score<Sum, 1, DOT> products = {};
    Score<Sum, 1, ADDITIVE> sums;
    sums.slope = A.slope;

    Partial sum;
    sum.clear();
    Sum datt[WAY == TARGETS ? VEC * PACKS : 1] = {};
    for (; at_work.more(); at_work.next()) {
        const int count = at_work.count(), row = at_work.row;
        const bool row_ends = at_work.row_ends();
        const Index i = first_row + row, entry = at_work.entry(lane % PIECE);
        const Index cols = read(indices + entry), numbers = WAY == SOURCES && perm ? read(perm + entry) : entry;
        const long long own_place = at(i, stride);
        // After the pieces' entries the row's loop, where it has one.
#pragma unroll 1
        for (int part = 0; part < PIECE + N; part += N) {
            const bool loop = part == PIECE;
            if (loop ? !(row_ends && A.loops) : part >= count) continue;
            const Index col = loop ? i : __shfl_sync(FULL_WARP, cols, part + own, PIECE);
            const long long number = loop ? nnz + i : (long long)__shfl_sync(FULL_WARP, numbers, part + own, PIECE);
            const bool stored = !loop && part + own < count, there = loop ? own == 0 : stored && !(A.loops && col == i);
            const bool stays = A.stays(seed, number, head);
            const long long place = number * A.heads + head;
            const Sum edge = A.edges && stored ? read(A.edges + place) : Sum(0);
            Pack<Sum, 4> stats = {};
            if (WAY != FORWARD) stats = A.stats[(WAY == SOURCES ? col : i) * (long long)A.heads + head];
            long long at_entry[N];
#pragma unroll
            for (int j = 0; j < N; ++j) at_entry[j] = at(__shfl_sync(FULL_WARP, col, j), stride);

            Sum scores[N] = {}, dots[N] = {}, score[1], dot[1] = {0};
#pragma unroll 1
            for (int g = lane * VEC; g < A.feat; g += STEP) {
                const Vector q = read((const Vector*)((const char*)(rows + g) + own_place));
                Vector more, x[N], y[N];
                if (WAY != FORWARD) more = read((const Vector*)((const char*)(more_rows + g) + own_place));
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    x[j] = read((const Vector*)(gathered + at_entry[j] + g * sizeof(T)));
                    if (WAY != FORWARD) y[j] = read((const Vector*)(second + at_entry[j] + g * sizeof(T)));
                }
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    sums.att[0] = additive ? A.att[here + g + v] : Sum(0);
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        const Sum key = load(x[j], v);
                        scores[j] += additive ? sums.of(load(q, v), key, 0) : products.of(load(q, v), key, 0);
                        if (WAY != FORWARD) dots[j] += load(more, v) * load(y[j], v);
                    }
                }
            }
            totals<WARP>(scores, score);
            if (WAY != FORWARD) totals<WARP>(dots, dot);
            score[0] = A.scaled(score[0], edge);
            Sum weight, ds = 0;
            if constexpr (WAY == FORWARD) {
                Sum top = there ? score[0] : lowest<Sum>();
#pragma unroll
                for (int step = N / 2; step > 0; step /= 2) top = larger(__shfl_xor_sync(FULL_WARP, top, step), top);
                top = larger(sum.top, top);
                if (top != sum.top) sum.scale(power(sum.top - top));
                sum.top = top;
                const Sum p = there && top != lowest<Sum>() ? power(score[0] - top) : Sum(0);
                if (lane < N) sum.all += p;
                weight = stays ? p : Sum(0);
            } else {
                A.weigh(score[0], dot[0], stats, there, stays, weight, ds);
                if (WAY == TARGETS && A.dedges && stored && lane < N && slice == 0) A.dedges[place] = ds;
                ds *= A.scale;
            }
            Sum w[N], d[N];
#pragma unroll
            for (int j = 0; j < N; ++j) w[j] = __shfl_sync(FULL_WARP, weight, j), d[j] = __shfl_sync(FULL_WARP, ds, j);
#pragma unroll
            for (int pack = 0; pack < PACKS; ++pack) {
                const int g = f + pack * STEP;
                if (g >= A.feat) break;
                Vector q = {}, x[N], y[N];
                if (WAY != FORWARD) q = read((const Vector*)((const char*)(rows + g) + own_place));
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (WAY != FORWARD) x[j] = read((const Vector*)(gathered + at_entry[j] + g * sizeof(T)));
                    if (WAY != TARGETS) y[j] = read((const Vector*)(second + at_entry[j] + g * sizeof(T)));
                }
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
                    sums.att[0] = additive && WAY != FORWARD ? A.att[here + g + v] : Sum(0);
                    const int k = pack * VEC + v;
#pragma unroll
                    for (int j = 0; j < N; ++j) {
                        if (WAY != TARGETS) sum.v[0][k] += w[j] * load(y[j], v);
                        if (WAY == FORWARD) continue;
                        const Sum value = load(x[j], v), own_value = load(q, v);
                        const Sum by = additive ? sums.by_key(value, own_value, 0) : products.by_key(value, own_value, 0);
                        sum.v[WAY == SOURCES][k] += d[j] * by;
                        if (WAY == TARGETS && additive) datt[k] += d[j] * sums.by_att(own_value, value);
                    }
                }
            }
        }
        if (row_ends) {
            if (row == 0 && began_earlier) sum.keep(&shared.head[team][lane], WARP);
            else put<WARP, VEC, PACKS>(A, sum, indptr, (long long)i, head, f);
            sum.clear();
        }
    }
    sum.keep(&shared.open[team][lane], WARP);
    if (lane == 0) shared.open_row[team] = open;
    __syncthreads();
    const auto carried = [&](int s, int side) {
        return carry + (((2LL * s + side) * A.heads + head) * slices + slice) * (Partial::SIZE * WARP) + lane;
    };
    if (at_work.rows > 0 && began_earlier) {
        sum.clear();
        shared.add_open(sum, first_row, team - 1, lane);
        Kept::add(sum, &shared.head[team][lane], WARP);
        if (slot[block] >= 0 && start[(long long)block * CHUNKS].row == first_row) sum.keep(carried(slot[block], 1), WARP);
        else put<WARP, VEC, PACKS>(A, sum, indptr, (long long)first_row, head, f);
    }
    if (team == TEAMS - 1 && slot[block + 1] >= 0) {
        sum.clear();
        shared.add_open(sum, open, team, lane);
        sum.keep(carried(slot[block + 1], 0), WARP);
    }
    if (WAY == TARGETS && additive) {
        __syncthreads();
        Sum* const of_all = &shared.open[0][0];  // (TEAMS, PACKS, WARP, VEC)
#pragma unroll
        for (int k = 0; k < VEC * PACKS; ++k) of_all[team * STEP * PACKS + k / VEC * STEP + lane * VEC + k % VEC] = datt[k];
        __syncthreads();
        for (int k = threadIdx.x; k < STEP * PACKS && slice * (STEP * PACKS) + k < A.feat; k += ROW_THREADS) {
            Sum all = 0;
            for (int s = 0; s < TEAMS; ++s) all += of_all[s * STEP * PACKS + k];
            A.datt[((long long)block * A.heads + head) * A.feat + slice * (STEP * PACKS) + k] = all;
        }
    }
}
