"""``diag(row) · A · diag(col)`` against one product per stored entry."""

import numpy as np
import pytest
from op_cases import DTYPES, FORMATS, INDEX_DTYPES, KINDS, features, matrix, name_of, put

import sparsefmt
from sparsefmt import ops
from sparsefmt.testing import assert_close, stored_entries


def check(xp, A, row, col, dtype):
    before = A.copy()
    B = ops.scale(put(xp, A), put(xp, row), put(xp, col)).to("cpu")
    B.check()
    assert (type(B), B.shape, B.dtype) == (type(A), A.shape, np.dtype(dtype))
    eps = 2.0**-7 if B.dtype.name == "bfloat16" else float(np.finfo(B.dtype).eps)
    for (i, j, a), (k, m, b) in zip(stored_entries(A), stored_entries(B), strict=True):
        assert (i, j) == (k, m)
        exact = a * (1 if row is None else float(row[i])) * (1 if col is None else float(col[j]))
        assert_close(b, exact, bound=2 * eps * abs(exact) + (1e-7 if eps > 1e-4 else 0))
    assert A == before


@pytest.mark.parametrize("factors", ["row", "col", "both"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_dtype(xp, format, dtype, weighted, factors):
    A = matrix("power law", dtype if weighted else None, np.int32).asformat(format)
    row, col = features(A.n_rows, (), dtype, seed=2), features(A.n_cols, (), dtype, seed=3)
    check(xp, A, None if factors == "col" else row, None if factors == "row" else col, dtype)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_of_graph(xp, format, kind, index_dtype):
    A = matrix(kind, np.float64, index_dtype).asformat(format)
    row, col = features(A.n_rows, (), np.float64), features(A.n_cols, (), np.float64)
    check(xp, A, row, col, np.float64)


def test_balanced_sparse_features(xp):
    S = ops.maxk(features(9, 20, np.float32), 4)
    check(xp, S, features(9, (), np.float32), features(20, (), np.float32), np.float32)


def test_without_factors_it_is_the_matrix_itself(xp):
    A = put(xp, matrix("power law", None, np.int32))
    assert ops.scale(A) is A


def test_2_byte_products_are_rounded_once(xp):
    """In float16 already ``row * a`` would overflow."""
    A = sparsefmt.COO([0], [0], np.array([300], np.float16), shape=(1, 1))
    row, col = (put(xp, np.array([value], np.float16)) for value in (300, 1 / 256))
    assert float(ops.scale(put(xp, A), row, col).data[0]) == pytest.approx(351.5625, rel=2.0**-11)
