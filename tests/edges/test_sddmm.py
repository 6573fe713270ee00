"""Products of feature rows at stored entries against a loop over them in float64."""

import numpy as np
import pytest
from op_cases import (
    DTYPES,
    features,
    in_data_order,
    intact,
    matrix,
    name_of,
    poisoned,
    put,
    rows_of,
)

from sparsefmt import ops
from sparsefmt.testing import assert_close, sddmm_bound, sddmm_oracle


def check(xp, A, X, Y, place=put):
    """Into poisoned memory: every element right, no guard touched."""
    out, buffer = poisoned(xp, (A.nnz, *X.shape[1:-1]), X.dtype)
    assert ops.sddmm(put(xp, A), place(xp, X), place(xp, Y), out=out) is out
    B = in_data_order(A)
    assert_close(out, sddmm_oracle(B, X, Y), bound=sddmm_bound(B, X, Y))
    assert intact(xp, buffer)


def both(A, width, dtype):
    return features(A.n_rows, width, dtype), features(A.n_cols, width, dtype, seed=2)


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (4, 16), (8, 1), (3, 33), (5, 0), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_heads(xp, dtype, shape):
    A = matrix("power law", None, np.int64).tocsr()
    check(xp, A, *both(A, shape, dtype))


def test_values_of_the_matrix_are_not_read(xp):
    A = matrix("power law", np.float32, np.int32).tocsr()
    X, Y = (put(xp, a) for a in both(A, 8, np.float64))  # not even of the same dtype
    bad = A.with_data(np.full(A.nnz, np.nan, np.float32))
    found = ops.sddmm(put(xp, bad), X, Y)
    assert bool((found == ops.sddmm(put(xp, A.with_data(None)), X, Y)).all())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_stays_in_the_entries_of_its_row(xp, bad):
    A = rows_of(np.arange(20), 7, None, np.int32)
    X, Y = both(A, 12, np.float32)
    X[5, 3], Y[2, 11] = bad, bad
    check(xp, A, X, Y)
