// Warp-level matrix products on tensor cores, by inline PTX: mma.h needs headers that pip's CUDA does not carry.
// Nothing here is launched on a device below 8.0, for which it compiles to nothing.
// D (16 x 8) += A (16 x K) B (K x 8) in float32; K is 8 for tf32, 16 for 2-byte values. With g = lane / 4 and
// t = lane % 4 a lane has of D the rows g (d[0], d[1]) and g + 8 (d[2], d[3]), the columns 2t and 2t + 1.
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// To the nearest of tf32's numbers, ties away from zero: half a unit in its last place is added, and what is behind
// that place the product does not read. As cvt.rna.tf32, whose test for Inf and NaN costs a scarcer instruction.
__device__ inline unsigned tf32(float x) {
    return __float_as_uint(fmaf(__uint_as_float(__float_as_uint(x) & 0xff800000), 0x1p-11f, x));
}

// Two values as a pair of bfloat16, the first in the low half.
__device__ inline unsigned pair(float low, float high) {
    unsigned both = 0;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

// Float32 as the sum of two bfloat16: of 24 bits they keep 16 or more. Two values, as pairs of both parts.
struct LeadAndRest {
    unsigned lead, rest;

    __device__ static LeadAndRest of(float a, float b) {
        const unsigned lead = pair(a, b);
        return {lead, pair(a - __uint_as_float(lead << 16), b - __uint_as_float(lead & 0xffff0000))};
    }
};

// The same of one value in one word, of which the lead is the high half.
__device__ inline unsigned lead_over_rest(float x) {
    const unsigned lead = pair(0, x);
    return lead | pair(x - __uint_as_float(lead), 0);
}

// Four 8 x 8 matrices of 2-byte values, transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_transposed(unsigned (&b)[4], const void* row) {
#if __CUDA_ARCH__ >= 800
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
#endif
}
