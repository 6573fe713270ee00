"""Products of feature rows at stored entries against a loop over them in float64."""

import numpy as np
import pytest
from laws.cases import NAMED
from laws.checks import check
from op_cases import DTYPES, features, matrix, name_of, put, rows_of

from sparsefmt import ops


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (4, 16), (8, 1), (3, 33), (5, 0), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_heads(xp, dtype, shape):
    case = NAMED["sddmm of heads"].with_heads(shape[:1])
    A = case.matrix(dtype, index_dtype=np.int64)
    check(xp, case, A, case.arguments(A, dtype, feat=shape[1]))


def test_values_of_the_matrix_are_not_read(xp):
    A = matrix("power law", np.float32, np.int32).tocsr()
    X, Y = (put(xp, features(n, 8, np.float64)) for n in A.shape)  # not even of the same dtype
    bad = A.with_data(np.full(A.nnz, np.nan, np.float32))
    found = ops.sddmm(put(xp, bad), X, Y)
    assert bool((found == ops.sddmm(put(xp, A.with_data(None)), X, Y)).all())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_stays_in_the_entries_of_its_row(xp, bad):
    A = rows_of(np.arange(20), 7, None, np.int32)
    X, Y = (features(n, 12, np.float32) for n in A.shape)
    X[5, 3], Y[2, 11] = bad, bad
    check(xp, NAMED["sddmm"], A, {"X": X, "Y": Y})
