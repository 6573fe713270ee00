// Rows of features to shared memory, in the background where the device can.
__device__ inline void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *(int4*)to = __ldg((const int4*)from);
#endif
}
// A row of features to shared memory, by a warp.
template <typename T> __device__ inline void copy_row(T* to, const T* from, int feat, bool aligned) {
    constexpr int VEC = 16 / sizeof(T);
    const int lane = threadIdx.x % WARP;
    if (aligned)
        for (int f = lane * VEC; f < feat; f += WARP * VEC) copy_16(to + f, from + f);
    else
        for (int f = lane; f < feat; f += WARP) to[f] = from[f];
}
__device__ inline void copies_end() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// All but the copies since the last PENDING ends have come; other threads' after a barrier.
template <int PENDING> __device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}
