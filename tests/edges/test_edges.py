"""Softmax over the entries of each row and its gradient, and products at entries."""

import laws.checks
import numpy as np
import pytest
from laws.cases import NAMED
from op_cases import DTYPES, features, matrix, name_of, put, rows_of

import sparsefmt
from sparsefmt import ops
from sparsefmt.ops.edges import cuda as edges_cuda

HEADS = [(), (1,), (2,), (4,), (7,), (8,), (33,)]


def check(xp, A, scores):
    laws.checks.check(xp, NAMED["edge_softmax of 2 axes"], A, {"scores": scores})


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", ["edge_softmax", "edge_softmax_backward"])
def test_every_dtype_and_number_of_heads(xp, name, dtype, heads):
    case = NAMED[f"{name} of 2 axes"].with_heads(heads)
    A = case.matrix(dtype)
    laws.checks.check(xp, case, A, case.arguments(A, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(), (2,), (8,), (16,), (32,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("length", [1, 60, 300])
def test_teams_of_every_size(monkeypatch, length, dtype, heads):
    """Rows that a team holds, reads twice, leaves to its warp or to a block, without any tiles."""
    import cupy

    monkeypatch.setattr(edges_cuda, "LONG_VALUES", 0)
    lengths = [0, 1, 7, 100, 2049, 3000, *[length] * 200]
    A = rows_of(lengths, 9, None, np.int32)
    scores = (3 * features(A.nnz, heads, np.float64)).astype(dtype)
    check(cupy, A, scores)
    case = NAMED["edge_softmax_backward of 2 axes"].with_heads(heads)
    laws.checks.check(cupy, case, A, case.arguments(A, dtype))


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shift", [-1e4, 0, 1e4])
def test_scores_far_from_zero_overflow_nothing(xp, dtype, shift, heads):
    A = matrix("power law", None, np.int32).tocsr()
    check(xp, A, (features(A.nnz, heads, np.float64) * 4 + shift).astype(dtype))
    check(xp, A, (np.sign(features(A.nnz, heads, np.float64)) * 1e4).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=name_of)
def test_every_distance_from_the_largest_score(xp, dtype):
    """Down to where probabilities vanish."""
    A = rows_of([2] * 3000, 4, None, np.int32)
    far = np.linspace(0, 110 if dtype == np.float32 else 760, 3000)
    check(xp, A, np.stack([np.zeros(3000), -far], axis=1).ravel().astype(dtype))


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_infinite_scores_and_nan_are_as_in_torch(xp, dtype, heads):
    A = sparsefmt.CSR([0, 3, 5, 5, 8, 10], np.zeros(10, int), shape=(5, 1))
    column = np.array([0, -np.inf, 1, -np.inf, -np.inf, np.nan, 1, 2, np.inf, 0], dtype)
    scores = np.tile(column[:, None], heads) if heads else column
    found = ops.edge_softmax(put(xp, A), put(xp, scores))
    found = found.get() if hasattr(found, "get") else found
    found = found.astype(np.float64).reshape(10, -1)[:, 0]
    assert found[1] == 0
    assert np.isfinite(found[:3]).all()
    assert np.isnan(found[3:9]).all()  # only -inf; a NaN; the infinity itself


def test_shifting_a_row_changes_nothing(xp):
    A = matrix("power law", None, np.int32).tocsr()
    scores = np.round(features(A.nnz, (), np.float32) * 8)
    shift = np.repeat(np.arange(A.n_rows, dtype=np.float32), A.lengths)
    first, second = (ops.edge_softmax(put(xp, A), put(xp, s)) for s in (scores, scores + shift))
    assert bool((first == second).all())


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (4, 16), (8, 1), (3, 33), (5, 0), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_products_of_every_number_of_heads(xp, dtype, shape):
    case = NAMED["sddmm of heads"].with_heads(shape[:1])
    A = case.matrix(dtype, index_dtype=np.int64)
    laws.checks.check(xp, case, A, case.arguments(A, dtype, feat=shape[1]))


def test_values_of_the_matrix_are_not_read(xp):
    A = matrix("power law", np.float32, np.int32).tocsr()
    X, Y = (put(xp, features(n, 8, np.float64)) for n in A.shape)  # not even of the same dtype
    bad = A.with_data(np.full(A.nnz, np.nan, np.float32))
    found = ops.sddmm(put(xp, bad), X, Y)
    assert bool((found == ops.sddmm(put(xp, A.with_data(None)), X, Y)).all())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_of_features_stays_in_the_entries_of_its_row(xp, bad):
    A = rows_of(np.arange(20), 7, None, np.int32)
    X, Y = (features(n, 12, np.float32) for n in A.shape)
    X[5, 3], Y[2, 11] = bad, bad
    laws.checks.check(xp, NAMED["sddmm"], A, {"X": X, "Y": Y})
