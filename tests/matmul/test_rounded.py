"""Products of float32 features that may be rounded to bfloat16, against a loop in float64."""

import numpy as np
import pytest
from op_cases import put, rows_of

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
def test_a_maximum_is_not_rounded():
    import cupy

    A, X = put(cupy, rows_of([8] * 30, 30, F32, np.int32)), cupy.ones((30, 64), F32)
    found = ops.explain("spmm", A, X, precision="bf16", reduce="max")
    assert found.chosen.name == "spmm_csr_balanced"
    assert "a max is one of the features as they are" in str(found)
