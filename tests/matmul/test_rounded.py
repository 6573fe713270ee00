"""Products of float32 features that may be rounded to bfloat16, against a loop in float64."""

import numpy as np
import pytest
from op_cases import (
    put,
    rows_of,
)

from sparsefmt import ops
from sparsefmt.ops.matmul import cuda as matmul_cuda

F32 = np.dtype(np.float32)


@pytest.mark.gpu
def test_special_values_stay_special():
    import cupy

    A = rows_of([1, 1, 1, 1], 4, None, np.int32)
    X = np.array([[np.inf], [np.nan], [-np.inf], [-0.0]], F32)
    found = matmul_cuda.spmm_rounded(put(cupy, A), cupy.asarray(X)).get()
    np.testing.assert_array_equal(found, X[A.indices])


@pytest.mark.gpu
def test_a_permission_is_taken_where_it_pays():
    import cupy

    many = rows_of([8] * 30, 30, F32, np.int32)
    few = rows_of([1] * 30, 30, F32, np.int32)

    def kernel(A, width=64, **options):
        return ops.explain("spmm", put(cupy, A), cupy.ones((30, width), F32), **options)

    assert kernel(many, precision="bf16").chosen.name == "spmm_csr_rounded"
    for found, reason in (
        (kernel(few, precision="bf16"), "a row is gathered less than 8 times on average"),
        (kernel(many, 63, precision="bf16"), "rows have less than 64 features"),
        (kernel(many, precision="bf16", reduce="max"), "a max is one of the features as they are"),
        (kernel(many), 'allow bfloat16 with precision="bf16"'),
        (kernel(many, precision="tf32"), 'allow bfloat16 with precision="bf16"'),
    ):
        assert found.chosen.name == "spmm_csr_balanced"
        assert reason in str(found)
