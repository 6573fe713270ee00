// GCN's factors of row i, whose `length` entries count 1 each: d^-1/2 and own / d, where d = length + own. `own` is 1 less
// the loops among the entries: one loop counts, stored or not.
template <typename T>
__device__ inline void write_unit_scales(T* scale, T* square, long long i, long long length, long long own) {
    const double s = rsqrt(double(length + own));
    scale[i] = s, square[i] = own * s * s;
}
