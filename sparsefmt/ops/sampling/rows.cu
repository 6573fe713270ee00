#include "engine/common.cuh"
#include "sampling/rows.cuh"

constexpr int SAMPLE_LANES = 8;  // that choose from a row together

// Column, entry and row of every sampled entry: of row i from to[i] on; without `to` from i * room on, or from the
// first entry of the row on where room is 0, with n_cols for a column in the places that stay free.
template <typename Index, int STRATEGY>
__global__ void sample_rows(const Index* __restrict__ indptr, const Index* __restrict__ indices,
                            const Index* __restrict__ to, Index* __restrict__ cols, Index* __restrict__ entries,
                            Index* __restrict__ own_rows, const long long* __restrict__ seed_at,
                            unsigned long long seed, long long n_rows, long long n_cols, int width, int room) {
    const int lane = threadIdx.x % SAMPLE_LANES;
    const long long step = (long long)gridDim.x * blockDim.x / SAMPLE_LANES;
    Sample<STRATEGY> sample(seed_at ? *seed_at : seed);
    for (long long row = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / SAMPLE_LANES; row < n_rows; row += step) {
        const Index begin = indptr[row];
        const unsigned length = indptr[row + 1] - begin, taken = min(length, (unsigned)width);
        const unsigned places = to ? taken : room ? room : length;
        const long long at = to ? (long long)to[row] : room ? row * room : (long long)begin;
        sample.of_row(row, length, taken);
        for (unsigned k = lane; k < places; k += SAMPLE_LANES) {
            const Index entry = k < taken ? begin + sample.place(k) : 0;
            cols[at + k] = k < taken ? indices[entry] : (Index)n_cols;
            entries[at + k] = entry;
            if (own_rows) own_rows[at + k] = row;
        }
    }
}
