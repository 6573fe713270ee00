"""What the tests of samples share: sizes, rows whose lengths the strides divide, and a product."""

from functools import cache

import numpy as np
from op_cases import rows_of

from sparsefmt.ops.engine.choose import pointer, row_stride
from sparsefmt.ops.matmul import cuda as matmul_cuda
from sparsefmt.ops.sampling import cpu as sampling_cpu
from sparsefmt.ops.sampling import cuda as sampling_cuda

STRATEGIES = ["bucket", "fastrand", "random"]
SAMPLES = [1, 3, 8, 16, 50, 1000]
#: Multiples of 577 and of its successors, and lengths about the sizes of pieces and batches.
PRIMES = [577, 577 * 587, 0, 577 * 2, 578, 576, 0, 7, 8, 9, 1025, 3000, 1]


@cache
def prime_rows(dtype, index_dtype):
    return rows_of(PRIMES, 211, dtype, index_dtype)


def host(a):
    return a if isinstance(a, np.ndarray) else a.get()


def sddmm_sampled(xp, A, X, Y, width, out, *, row_scale=None, col_scale=None, mean=False,
                  rescale=False, strategy="bucket", seed=0):  # fmt: skip
    """What gradients of values are made by; no operation of its own."""
    scales = row_scale, col_scale
    if xp is np:
        how = {"strategy": strategy, "seed": seed, "mean": mean, "rescale": rescale}
        arrays = (A.indptr, A.indices, X, Y, *scales, out)
        sampling_cpu.sddmm_sampled(*arrays, width=width, **how)
        return
    wide = [None if a is None else a.astype(np.promote_types(a.dtype, np.float32)) for a in scales]
    sampling_cuda.sddmm_sampled(
        sampling_cuda.bare_structure(A),
        str(X.dtype),
        sampling_cuda.Sampling(width, strategy, seed),
        feat=X.shape[1],
        ldx=row_stride(X),
        ldy=row_stride(Y),
        X=pointer(X),
        Y=pointer(Y),
        row_scale=pointer(wide[0]),
        col_scale=pointer(wide[1]),
        flags=mean * sampling_cuda.MEAN | rescale * sampling_cuda.RESCALE,
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )
    xp.cuda.get_current_stream().synchronize()  # before the scales go
