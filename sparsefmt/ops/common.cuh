// Shared by every kernel: the type that sums run in, and conversions to and from storage.
#include <cuda_fp16.h>
#include <cuda_bf16.h>

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffff;

// Sums of 2-byte floats run in float32.
template <typename T> struct Accumulator { using type = T; };
template <> struct Accumulator<__half> { using type = float; };
template <> struct Accumulator<__nv_bfloat16> { using type = float; };
template <typename T> using accumulator = typename Accumulator<T>::type;

__device__ inline float load(__half x) { return __half2float(x); }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float load(float x) { return x; }
__device__ inline double load(double x) { return x; }

__device__ inline void store(__half* y, float x) { *y = __float2half_rn(x); }
__device__ inline void store(__nv_bfloat16* y, float x) { *y = __float2bfloat16_rn(x); }
__device__ inline void store(float* y, float x) { *y = x; }
__device__ inline void store(double* y, double x) { *y = x; }

// Work item of this warp, and the stride to its next one; 64 bits at any grid.
__device__ inline long long warp_index() {
    return (blockIdx.x * (long long)blockDim.x + threadIdx.x) / WARP;
}
__device__ inline long long warp_count() { return gridDim.x * (long long)blockDim.x / WARP; }

// VEC values that load and store as one word; aligned as such.
template <typename T, int VEC> struct alignas(sizeof(T) * VEC) Pack { T v[VEC]; };

template <int VEC, typename T, typename Sum>
__device__ inline void store_pack(T* y, const Sum (&sum)[VEC]) {
    Pack<T, VEC> word;
#pragma unroll
    for (int v = 0; v < VEC; ++v) store(&word.v[v], sum[v]);
    *(Pack<T, VEC>*)y = word;
}
