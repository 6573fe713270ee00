"""Products over the tiles of an SGT on the CPU, without a CSR, against loops in float64."""

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import (
    LONG_ROWS,
    ROW_LENGTHS,
    features,
    intact,
    long_rows,
    poisoned,
    put,
    quick_oracle,
    rows_of,
)

import sparsefmt
from sparsefmt.ops.matmul import cpu as matmul_cpu
from sparsefmt.ops.tiles import cpu as tiles_cpu
from sparsefmt.testing import (
    assert_close,
    error_bound,
    feature_widths,
    sddmm_bound,
    sddmm_oracle,
    sgt,
    spmm_oracle,
    value_dtypes,
)
from sparsefmt.testing import features as drawn_features

pytestmark = pytest.mark.usefixtures("one_thread")

F32, F64 = np.float32, np.float64
#: Of one cell, one row, one column, no power of two, and with cells numbered in two bytes.
TILES = [(16, 8), (8, 8), (16, 16), (1, 1), (3, 5), (1, 300), (300, 1), (64, 7), (65_536, 1)]
#: As many entries as are unpacked at a time, and one more or less.
AROUND_A_RUN = tiles_cpu.RUN + np.arange(-1, 2)
REDUCTIONS = ["sum", "mean"]


def product(A, X, *, reduce="sum", row_scale=None, col_scale=None):
    """Into poisoned memory, leaving what is around it."""
    out, buffer = poisoned(np, (A.n_rows, X.shape[1]), X.dtype)
    scales = {"row_scale": row_scale, "col_scale": col_scale}
    assert tiles_cpu.spmm(A, X, values=A.data, reduce=reduce, out=out, **scales) is out
    assert intact(np, buffer)
    return out


def check(A, X, place=put, **options):
    found = product(A, place(np, X), **options)
    assert_close(found, spmm_oracle(A, X, **options), bound=error_bound(A, X, **options))


def products(A, X, Y):
    """Of rows at the entries, with heads or without, into poisoned memory."""
    out, buffer = poisoned(np, (A.nnz, *X.shape[1:-1]), X.dtype)
    assert tiles_cpu.sddmm(A, X, Y, out=out) is out
    assert intact(np, buffer)
    return out


def check_products(A, X, Y, place=put):
    B = A.tocsr()
    found = products(A, place(np, X), place(np, Y))
    assert_close(found, sddmm_oracle(B, X, Y), bound=sddmm_bound(B, X, Y))


def both(A, width, dtype):
    return features(A.n_rows, width, dtype), features(A.n_cols, width, dtype, seed=2)


# Every matrix


def scaled(A, dtype, data):
    """Factors of some axes, drawn."""
    axes = {"row_scale": A.n_rows, "col_scale": A.n_cols}
    return {
        name: data.draw(drawn_features(size, width=1, dtype=dtype), name).reshape(-1)
        for name, size in axes.items()
        if data.draw(st.booleans(), f"has {name}")
    }


@given(A=sgt(), dtype=value_dtypes(), reduce=st.sampled_from(REDUCTIONS), data=st.data())
def test_spmm_sums_the_stored_entries(A, dtype, reduce, data):
    A = A if A.data is None else A.with_data(A.data.astype(dtype))
    X = data.draw(drawn_features(A.n_cols, dtype=dtype, max_magnitude=4))
    check(A, X, reduce=reduce, **scaled(A, dtype, data))


@given(A=sgt(), dtype=value_dtypes(), width=feature_widths(), data=st.data())
def test_sddmm_is_the_product_at_each_entry(A, dtype, width, data):
    X, Y = (
        data.draw(drawn_features(size, width=width, dtype=dtype, max_magnitude=4))
        for size in A.shape
    )
    check_products(A, X, Y)


@given(A=sgt(allow_nan=True, allow_infinity=True, dtype=F32), data=st.data())
def test_values_that_are_no_numbers_stay_in_their_rows(A, data):
    X = data.draw(drawn_features(A.n_cols, width=5, dtype=F32, allow_nan=True, allow_infinity=True))
    check(A, X)


# Tiles, widths, dtypes


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    """Runs of entries end anywhere in a tile, and windows in a run."""
    for n, lengths in enumerate(ROW_LENGTHS.values()):
        A = rows_of(lengths, 37, F32 if n % 2 else None, np.int32, seed=n)
        X, reduce = features(37, 40, F32), REDUCTIONS[n % 3 // 2]
        expected, bound = quick_oracle(A, X, reduce)
        assert_close(product(A.tosgt(tile), X, reduce=reduce), expected, bound=bound)
        check_products(A.tosgt(tile), *both(A, 5, F32))


@pytest.mark.parametrize("length", AROUND_A_RUN)
@pytest.mark.parametrize("tile", [(16, 8), (2, 3)], ids=str)
def test_rows_around_a_run_of_entries(tile, length):
    A = rows_of([length, 0, 1, 2 * length, length - 1, 0, 3], 90, F64, np.int32)
    X, Y = both(A, 9, F64)
    expected, bound = quick_oracle(A, Y)
    assert_close(product(A.tosgt(tile), Y), expected, bound=bound)
    check_products(A.tosgt(tile), X, Y)


def test_tiles_may_be_empty():
    """A format allows columns that no entry uses, and so whole tiles and windows of them."""
    order, slots = np.array([1, 0, 2]), np.array([2, 1, 0], np.uint8)
    columns = np.array([[0, 3], [4, -1], [1, 2], [3, 4], [0, 2], [3, -1]])
    tile_ptr, window_ptr = np.array([0, 0, 0, 2, 2, 2, 3]), np.array([0, 2, 4, 4, 6])
    values = np.array([0.5, -2, 3])
    A = sparsefmt.SGT(
        window_ptr, columns, tile_ptr, slots, order, values, shape=(7, 5), tile=(2, 2)
    )
    check(A, features(5, 9, F64))
    check_products(A, *both(A, 9, F64))


# Work that is cut into pieces


@pytest.fixture
def _all_threads(one_thread):
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


@pytest.mark.usefixtures("_all_threads")
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("tile", [(16, 8), (3, 5), (64, 7)], ids=str)
def test_many_windows_and_one_with_most_entries(tile, reduce):
    A, X = long_rows(F32, np.int32), features(500, 33, F32)
    B = A.tosgt(tile)
    expected, bound = quick_oracle(A, X, reduce)
    first = product(B, X, reduce=reduce)
    assert_close(first, expected, bound=bound)
    assert all((product(B, X, reduce=reduce) == first).all() for _ in range(3))
    Z = features(A.n_rows, 33, F32, seed=2)
    row = np.repeat(np.arange(len(LONG_ROWS)), LONG_ROWS)
    terms = Z.astype(F64)[row] * X.astype(F64)[A.indices]
    eps = float(np.finfo(F32).eps)
    bound = 2 * 33 * eps * np.abs(terms).sum(1)
    assert_close(products(B, Z, X), terms.sum(1), bound=bound)


def test_columns_in_order_are_added_as_in_csr():
    """Bit for bit: a window adds the entries of a row in the order of their columns."""
    A = long_rows(F32, np.int32).sorted_indices()
    X, expected = features(500, 70, F32), np.empty((A.n_rows, 70), F32)
    matmul_cpu.spmm(A, X, A.data, out=expected)
    assert (product(A.tosgt(), X) == expected).all()
