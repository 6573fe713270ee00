// Which entries of a row are sampled. Of a row of `length` entries, of which `taken` are wanted, place(k) is the
// place in the row of the k-th, k = 0 .. taken - 1: all different, and k itself where all are wanted.
constexpr int BUCKET = 0, FASTRAND = 1, RANDOM = 2;

// A bijection of 64 bits that mixes them well (Steele, Lea and Flood, OOPSLA'14).
__device__ inline unsigned long long mixed(unsigned long long z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
__device__ inline unsigned mixed(unsigned x, unsigned key) {
    x = (x ^ key) * 0x85EBCA6Bu;
    return (x ^ x >> 15) * 0xC2B2AE35u;
}

template <int STRATEGY> struct Sample;

// The first entries.
template <> struct Sample<BUCKET> {
    __device__ Sample(unsigned long long seed) {}
    __device__ void of_row(long long row, unsigned length, unsigned taken) {}
    __device__ unsigned place(unsigned k) const { return k; }
};

// k * 577 modulo the length (ES-SpMM, equation 2); by the next prime if that divides it, and so on: four that all
// divide it are beyond any length.
template <> struct Sample<FASTRAND> {
    unsigned length, prime, inverse;
    bool all;

    __device__ Sample(unsigned long long seed) {}
    __device__ void of_row(long long row, unsigned length, unsigned taken) {
        this->length = length, all = taken == length;
        if (all) return;
        prime = length % 577 ? 577 : length % 587 ? 587 : length % 593 ? 593 : 599;
        inverse = 0xFFFFFFFFu / length;
    }
    __device__ unsigned place(unsigned k) const {
        if (all) return k;
        const unsigned long long product = (unsigned long long)k * prime;
        if (product >> 32) return product % length;
        const unsigned x = product;
        const unsigned rest = x - __umulhi(x, inverse) * length;  // less than two lengths
        return min(rest, rest - length);
    }
};

// A permutation of 0 .. length - 1 that seed and row choose: rounds of a Feistel network over pairs of a number below
// 2^shift and one below `high`, about the root of the length each; a pair beyond the length goes through it again.
// So many rounds that chi-square of the distance of two places found nothing in 2 * 10^6 rows, of 27 lengths to 1024.
template <> struct Sample<RANDOM> {
    unsigned long long seed;
    unsigned length, keys[2], high;
    int shift, rounds;

    __device__ Sample(unsigned long long seed) : seed(mixed(seed)) {}
    __device__ void of_row(long long row, unsigned length, unsigned taken) {
        this->length = length, rounds = 0;
        if (taken == length) return;
        const unsigned long long key = mixed(seed + (row + 1) * 0x9E3779B97F4A7C15ull);
        keys[0] = key, keys[1] = key >> 32;
        shift = (32 - __clz(length - 1)) / 2;
        high = (length + (1u << shift) - 1) >> shift;
        rounds = length < 12 ? 14 : length < 64 ? 8 : length < 600 ? 6 : 4;
    }
    __device__ unsigned place(unsigned k) const {
        if (!rounds) return k;
        unsigned low = k & ((1u << shift) - 1), up = k >> shift;
        do {
            unsigned a = keys[0], b = keys[1];
            for (int round = 0; round < rounds; ++round) {
                up += __umulhi(mixed(low, a), high);
                up = min(up, up - high);
                low ^= (unsigned long long)mixed(up, b) << shift >> 32;
                a += 0x9E3779B9u, b += 0xBB67AE85u;
            }
        } while ((up << shift | low) >= length);
        return up << shift | low;
    }
};
