"""Both methods of aggregation give the same sums, from any format."""

import numpy as np
import pytest
from op_cases import DTYPES, FORMATS, KINDS, features, matrix, name_of, put

from sparsefmt import ops
from sparsefmt.testing import assert_close, error_bound, spmm_oracle


@pytest.mark.parametrize("method", ["auto", "gas", "gar"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("format", FORMATS)
def test_every_method_sums_every_format(xp, format, dtype, method):
    A = matrix("power law", dtype, np.int32).asformat(format)
    for width in (0, 1, 20):
        X = features(A.n_cols, width, dtype)
        Y = ops.aggregate(put(xp, A), put(xp, X), method=method)
        assert_close(Y, spmm_oracle(A, X), bound=error_bound(A, X))
        assert Y.dtype == X.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["gas", "gar"])
def test_every_kind_of_graph(xp, method, kind):
    A = matrix(kind, None, np.int64)
    X = features(A.n_cols, 6, np.float32)
    Y = ops.aggregate(put(xp, A), put(xp, X), method=method)
    assert_close(Y, spmm_oracle(A, X), bound=error_bound(A, X))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=name_of)
def test_scattering_sums_in_float32(xp, dtype):
    """4096 ones: adding in float16 or bfloat16 stops at 2048 or 256."""
    A = matrix("star", None, np.int32)
    ones = xp.ones((A.n_cols, 3), dtype) * 16
    found = ops.aggregate(put(xp, A), ones, method="gas")
    assert found[0].tolist() == ops.aggregate(put(xp, A), ones, method="gar")[0].tolist()
    assert float(found[0, 0]) == 400 * 16
