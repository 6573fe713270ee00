"""MaxK against a sort of each row."""

import ml_dtypes
import numpy as np
import pytest

import sparsefmt
from sparsefmt.ops import maxk

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def oracle(row, k):
    """Columns of the k largest, NaN first, ties to the lowest column."""
    keys = [(0 if v != v else 1, 0.0 if v != v else -v, c) for c, v in enumerate(row.tolist())]
    return sorted(column for _, _, column in sorted(keys)[:k])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("feat", "k"), [(1, 1), (7, 3), (33, 33), (257, 8), (300, 299)])
def test_keeps_the_k_largest_of_each_row(xp, dtype, feat, k):
    X = np.random.default_rng(0).integers(-9, 9, (20, feat)).astype(dtype)
    X[:5, :3] = np.array([np.nan, np.inf, -np.inf])[: min(feat, 3)]
    X[6] = -0.0
    S = maxk(xp.asarray(X), k)
    S.check()
    S = S.to("cpu")
    assert S.indices.tolist() == [oracle(row, k) for row in X]
    assert np.array_equal(S.data, np.take_along_axis(X, S.indices.astype(int), 1), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 4), (1, 65536), (2, 65537)])
def test_columns_take_the_smallest_dtype(xp, shape):
    S = maxk(xp.zeros(shape, np.float32), 3)
    assert S.index_dtype == (
        np.uint8 if shape[1] < 257 else np.uint16 if shape[0] == 1 else np.int32
    )
    assert S.to("cpu").indices.tolist() == [[0, 1, 2]] * shape[0]


@pytest.mark.parametrize(
    ("X", "k", "error", "text"),
    [
        (np.zeros(3), 1, sparsefmt.ShapeError, r"X has shape \(3,\): give a 2-D array"),
        (np.zeros((3, 4), int), 1, sparsefmt.DtypeError, "X.dtype is int64"),
        (np.zeros((3, 4)), 0, sparsefmt.ShapeError, "k is 0 but a row has 4 features"),
        (np.zeros((3, 4)), -1, sparsefmt.ShapeError, "k is -1"),
        (np.zeros((3, 4)), 5, sparsefmt.ShapeError, "k lies between 1 and 4"),
        (np.zeros((3, 0)), 1, sparsefmt.ShapeError, "a row has 0 features"),
        (np.zeros((3, 4)), 1.5, sparsefmt.DtypeError, "k is 1.5: give an integer"),
    ],
)
def test_bad_input_is_refused(X, k, error, text):
    with pytest.raises(error, match=text):
        maxk(X, k)
