"""What the tests of samples share: sizes, rows whose lengths the strides divide, and a product."""

from functools import cache

import numpy as np
from op_cases import rows_of

from sparsefmt.ops.engine.memory import Scalar
from sparsefmt.ops.sampling import cpu as sampling_cpu
from sparsefmt.ops.sampling import cuda as sampling_cuda

STRATEGIES = ["bucket", "fastrand", "random"]
SAMPLES = [1, 3, 8, 16, 50, 1000]
#: Multiples of 577 and of its successors, and lengths about the sizes of pieces and batches.
PRIMES = [577, 577 * 587, 0, 577 * 2, 578, 576, 0, 7, 8, 9, 1025, 3000, 1]


@cache
def prime_rows(dtype, index_dtype):
    return rows_of(PRIMES, 211, dtype, index_dtype)


def sddmm_sampled(xp, A, X, Y, width, out, *, row_scale=None, col_scale=None, mean=False,
                  rescale=False, strategy="bucket", seed=0):  # fmt: skip
    """What gradients of values are made by; no operation of its own."""
    room = sampling_cpu if xp is np else sampling_cuda
    options = Scalar(seed), width, strategy, mean, rescale
    room.spmm_sampled_da(A, Y, X, row_scale, col_scale, *options, out=out)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()  # before the scales go
