"""Products of feature rows at stored entries against a loop over them in float64."""

import numpy as np
import pytest
from op_cases import (
    DTYPES,
    FORMATS,
    INDEX_DTYPES,
    KINDS,
    WIDTHS,
    far_apart,
    features,
    in_data_order,
    intact,
    long_rows,
    matrix,
    moved,
    name_of,
    poisoned,
    put,
    rows_of,
)

from sparsefmt import ops
from sparsefmt.testing import assert_close, dot, sddmm_bound, sddmm_oracle, spmm_oracle


def check(xp, A, X, Y, place=put):
    """Into poisoned memory: every element right, no guard touched."""
    out, buffer = poisoned(xp, (A.nnz, *X.shape[1:-1]), X.dtype)
    assert ops.sddmm(put(xp, A), place(xp, X), place(xp, Y), out=out) is out
    B = in_data_order(A)
    assert_close(out, sddmm_oracle(B, X, Y), bound=sddmm_bound(B, X, Y))
    assert intact(xp, buffer)


def both(A, width, dtype):
    return features(A.n_rows, width, dtype), features(A.n_cols, width, dtype, seed=2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_width_and_dtype(xp, dtype, width):
    A = matrix("power law", None, np.int32).tocsr()
    check(xp, A, *both(A, width, dtype))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_graph_and_format(xp, format, kind, index_dtype):
    A = matrix(kind, np.float32, index_dtype).asformat(format)
    check(xp, A, *both(A, 19, np.float32))


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (4, 16), (8, 1), (3, 33), (5, 0), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_heads(xp, dtype, shape):
    A = matrix("power law", None, np.int64).tocsr()
    check(xp, A, *both(A, shape, dtype))


@pytest.mark.parametrize("width", [3, 16, (2, 8), (3, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_may_lie_apart_and_begin_anywhere(xp, dtype, width):
    A = matrix("power law", None, np.int32).tocsr()
    for gap, shift in ((1, 0), (8, 8), (5, 3)):
        place = lambda xp, X: far_apart(xp, X, gap=gap, shift=shift)  # noqa: B023, E731
        check(xp, A, *both(A, width, dtype), place=place)
    check(xp, moved(np, A), *both(A, width, dtype))


def test_other_layouts_are_copied(xp):
    A = matrix("power law", None, np.int32).tocsr()
    X, Y = both(A, (3, 8), np.float32)
    heads_last = [put(xp, np.ascontiguousarray(a.swapaxes(1, 2))).swapaxes(1, 2) for a in (X, Y)]
    found = ops.sddmm(put(xp, A), *heads_last)
    assert_close(found, sddmm_oracle(A, X, Y), bound=sddmm_bound(A, X, Y))


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=name_of)
def test_rows_that_many_blocks_share(xp, dtype):
    A = long_rows(None, np.int32)
    X, Y = both(A, 9, dtype)
    wide = [a.astype(np.float64) for a in (X, Y)]
    row = np.repeat(np.arange(A.n_rows), A.lengths)
    expected = (wide[0][row] * wide[1][A.indices]).sum(1)
    size = (np.abs(wide[0])[row] * np.abs(wide[1])[A.indices]).sum(1)
    found = ops.sddmm(put(xp, A), put(xp, X), put(xp, Y))
    assert_close(found, expected, bound=2 * 9 * (np.finfo(dtype).eps * size + 1e-7))


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


def test_it_is_the_gradient_of_spmm_in_the_edge_values(xp):
    """``<A(v) X, Y>`` is linear in the values v: ``sum_e v[e] <Y_i, X_j>``."""
    A = matrix("power law", np.float64, np.int32).tocsr()
    Y, X = both(A, 11, np.float64)
    slope = ops.sddmm(put(xp, A), put(xp, Y), put(xp, X))
    left, right = dot(slope, A.data), dot(spmm_oracle(A, X), Y)
    assert abs(left - right) <= dot(sddmm_bound(A, Y, X), np.abs(A.data)) + 1e-12 * abs(right)


def test_explain_names_the_kernel():
    A = matrix("power law", None, np.int32)
    X, Y = both(A, 4, np.float32)
    assert ops.explain("sddmm", A.tocsr(), X, Y).chosen.name == "sddmm_csr_numba"
    assert ops.explain("sddmm", A, X, Y).chosen.name == "sddmm_through_csr"
