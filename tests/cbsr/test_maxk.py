"""MaxK against a sort of each row by integers in the order of the values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import DTYPES, far_apart, name_of

import sparsefmt
from sparsefmt.ops import maxk
from sparsefmt.ops.cbsr.cuda import INFINITY, columns_by_sorting
from sparsefmt.testing import value_dtypes

#: Around what a team of threads holds on a GPU, and what a word of columns holds on a CPU.
WIDTHS = [1, 7, 8, 9, 64, 65, 100, 128, 129, 255, 256, 257, 512, 1000, 1024]
WIDE = [1025, 4096, 4097, 16385, 65535, 65536]


def integers(X):
    """The values as signed integers of their size."""
    return X.view(f"i{X.itemsize}")


def oracle(X, k):
    """Columns of the k largest of each row, ascending: NaN first, ties to the lowest column."""
    bits, limits = integers(X), np.iinfo(integers(X).dtype)
    keys = np.where(bits < 0, limits.min - bits, bits)  # -0 becomes 0
    with np.errstate(invalid="ignore"):
        keys[np.isnan(X.astype(np.float64))] = limits.max
    return np.sort(np.argsort(~keys, axis=1, kind="stable")[:, :k], axis=1)


def assert_largest(S, X, k):
    """``S`` is the MaxK of ``X``, bit for bit."""
    S.check()
    S, columns = S.to("cpu"), oracle(X, k)
    assert S.shape == X.shape
    assert S.k == k
    assert np.array_equal(S.indices, columns)
    assert np.array_equal(integers(S.data), np.take_along_axis(integers(X), columns, axis=1))


def _anywhere(rng, shape, dtype):
    bits = np.iinfo(f"u{np.dtype(dtype).itemsize}")
    return rng.integers(0, bits.max, shape, bits.dtype, endpoint=True).view(dtype)


def _neighbours(rng, shape, dtype):
    one = np.ones(1, dtype)
    return (integers(one) + rng.integers(0, 4, shape).astype(integers(one).dtype)).view(dtype)


def _subnormal(rng, shape, dtype):
    X = rng.integers(0, 50, shape).astype(f"i{np.dtype(dtype).itemsize}").view(dtype)
    return np.where(rng.random(shape) < 0.5, X, -X)


def _special(rng, shape, dtype):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]).astype(dtype)
    X = rng.standard_normal(shape).astype(dtype)
    return np.where(rng.random(shape) < rng.random((shape[0], 1)), rng.choice(values, shape), X)


#: Rows that a search goes wrong on.
KINDS = {
    "normal": lambda rng, shape, dtype: rng.standard_normal(shape),
    "rectified": lambda rng, shape, dtype: np.maximum(rng.standard_normal(shape), 0),
    "ties": lambda rng, shape, dtype: rng.integers(-2, 3, shape),
    "all equal": lambda rng, shape, dtype: np.full(shape, -1.5),
    "zeros": lambda rng, shape, dtype: rng.choice([0.0, -0.0], shape),
    "not finite": lambda rng, shape, dtype: rng.choice([np.nan, np.inf, -np.inf], shape),
    "one large": lambda rng, shape, dtype: np.where(
        np.arange(shape[1]) == shape[1] // 2, 3e4, rng.standard_normal(shape)
    ),
    "ascending": lambda rng, shape, dtype: np.tile(np.arange(shape[1]), (shape[0], 1)),
    "any bits": _anywhere,
    "neighbours": _neighbours,
    "subnormal": _subnormal,
    "special": _special,
    "spread": lambda rng, shape, dtype: (
        rng.choice([-1, 1], shape) * np.exp(9 * rng.standard_normal(shape))
    ),
}


def rows(kind, n_rows, feat, dtype, *, seed=0):
    with np.errstate(invalid="ignore", over="ignore"):
        return KINDS[kind](np.random.default_rng(seed), (n_rows, feat), dtype).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_the_k_largest_of_each_row_stay(xp, kind, dtype):
    for feat in WIDTHS:
        for k in sorted({1, min(8, feat), feat // 2 or 1, feat}):
            X = rows(kind, 6, feat, dtype, seed=feat)
            assert_largest(maxk(xp.asarray(X), k), X, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("feat", WIDE)
def test_rows_may_be_wide(xp, feat, dtype):
    for kind in ("normal", "ties", "special", "any bits"):
        X = rows(kind, 2, feat, dtype)
        for k in (1, 32, feat // 2, feat):
            assert_largest(maxk(xp.asarray(X), k), X, k)


@given(
    dtype=value_dtypes(),
    kind=st.sampled_from(sorted(KINDS)),
    n_rows=st.integers(0, 20),
    feat=st.integers(1, 300),
    data=st.data(),
)
def test_any_row_and_any_k(xp, dtype, kind, n_rows, feat, data):
    X = rows(kind, n_rows, feat, dtype, seed=data.draw(st.integers(0, 2**32 - 1)))
    k = data.draw(st.integers(1, feat))
    gap, shift = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    assert_largest(maxk(far_apart(xp, X, gap=gap, shift=shift), k), X, k)


LAYOUTS = {
    "fortran": lambda xp, X: xp.asfortranarray(X),
    "rows reversed": lambda xp, X: X[::-1],
    "every other column": lambda xp, X: X[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_copied(xp, layout):
    X = rows("normal", 8, 50, np.float32)
    there, here = LAYOUTS[layout](xp, xp.asarray(X)), LAYOUTS[layout](np, X)
    assert_largest(maxk(there, 9), here, 9)


def test_dense_again_keeps_the_k_largest_and_zeros_the_rest(xp):
    X = rows("normal", 30, 50, np.float32)
    dense = maxk(xp.asarray(X), 7).toarray()
    kept = np.zeros(X.shape, bool)
    np.put_along_axis(kept, oracle(X, 7), True, axis=1)
    assert np.array_equal(dense if xp is np else dense.get(), np.where(kept, X, 0))


@pytest.mark.parametrize("shape", [(0, 4), (1, 65536), (2, 65537)])
def test_columns_take_the_smallest_dtype(xp, shape):
    S = maxk(xp.zeros(shape, np.float32), 3)
    assert S.index_dtype == (
        np.uint8 if shape[1] < 257 else np.uint16 if shape[0] == 1 else np.int32
    )
    assert S.to("cpu").indices.tolist() == [[0, 1, 2]] * shape[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_sort_of_rows_too_wide_for_the_kernels_agrees(xp, dtype):
    for kind in KINDS:
        X = rows(kind, 5, 70, dtype)
        there = xp.asarray(X)
        columns = columns_by_sorting(integers(there), INFINITY[np.dtype(dtype).name], 9)
        data = xp.take_along_axis(integers(there), columns, axis=1).view(dtype)
        S = sparsefmt.CBSR._trusted(indices=columns.astype(np.uint8), data=data, shape=X.shape)
        assert_largest(S, X, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_devices_agree_on_many_rows(dtype):
    cupy = pytest.importorskip("cupy")
    for feat, k in [(64, 16), (128, 32), (256, 32), (512, 100), (1024, 64), (3000, 5)]:
        X = rows("normal", 20_001, feat, dtype, seed=feat)
        assert maxk(cupy.asarray(X), k).to("cpu") == maxk(X, k)


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
