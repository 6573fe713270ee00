"""Attention that goes through the columns in parts, as it does where the L2 holds few of them."""

import numpy as np
import pytest
import test_row_attention as whole
from laws.cases import CASES
from laws.checks import LAYOUTS, all_equal, check, placed
from op_cases import DTYPES, KINDS, LONG_ROWS, ROW_LENGTHS, matrix, moved, name_of, put

from sparsefmt import CSR, ops
from sparsefmt.ops.attention.pairwise import column_blocks as attention_column_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread", "in_parts")]

every_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.startswith(("gatv2", "dot_attention"))], ids=str
)


@pytest.fixture
def in_parts(monkeypatch):
    """Whatever the sizes are."""
    monkeypatch.setattr(attention_column_blocks, "count", lambda S, nbytes: 3)


@pytest.fixture
def xp():
    return pytest.importorskip("cupy")


def sorted_matrix(case, *args, **options):
    return case.matrix(*args, **options).tocsr().sorted_indices()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("feat", [1, 5, 16, 32, 40, 128])
@every_case
def test_every_dtype_and_width(xp, case, feat, dtype):
    A = sorted_matrix(case, dtype)
    check(xp, case, A, case.arguments(A, dtype, feat=feat))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64], ids=name_of)
@pytest.mark.parametrize("kind", [*KINDS, *ROW_LENGTHS])
@every_case
def test_every_kind_of_graph(xp, case, kind, index_dtype):
    A = sorted_matrix(case, np.float32, kind, index_dtype=index_dtype)
    check(xp, case, A, case.arguments(A, feat=16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=name_of)
@every_case
def test_rows_and_columns_that_many_blocks_share(xp, case, dtype):
    A = sorted_matrix(case, dtype, "long")
    for B in (A, A.T.tocsr().sorted_indices()):
        check(xp, case, B, case.arguments(B, dtype, feat=16))


@pytest.mark.parametrize("scores", whole.SCORES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=name_of)
def test_what_is_infinite_stays_where_it_is(xp, dtype, scores):
    whole.test_infinite_scores_and_nan_spread_over_their_row_alone(xp, dtype, scores)
    shape = (dtype, (2,), 16)
    for loops in ({}, whole.LOOPS):
        whole.test_rows_may_begin_with_scores_of_minus_infinity(xp, *shape, scores, loops)
    whole.test_infinite_features_reach_no_further_than_entries(xp, *shape, scores)


@pytest.mark.parametrize("layout", LAYOUTS)
@every_case
def test_the_arrays_may_lie_anywhere(xp, case, layout):
    """Even where that leaves columns in no parts."""
    A = case.matrix()
    check(xp, case, A, case.arguments(A, feat=16), place=LAYOUTS[layout], matrix=moved)


@every_case
def test_results_repeat_bit_for_bit(xp, case):
    A, args = placed(xp, case, np.float32, LONG_ROWS)
    first = case.run(A, args)
    assert all(all_equal(xp, case.run(A, args), first) for _ in range(4))


def test_parts_hold_each_entry_once(xp):
    A = put(xp, matrix("power law", None, np.int32).tocsr().sorted_indices())
    parts = attention_column_blocks.blocks_of(A, 4, 0)
    assert attention_column_blocks.blocks_of(A, 4, 0) is parts
    size, seen = -(-A.n_cols // 4), []
    for k, part in enumerate(parts):
        indptr, moves = (array.get() for array in part.arrays[:2])
        assert part.structure.nnz == indptr[-1]
        row = np.repeat(np.arange(A.n_rows), np.diff(indptr))
        entries = np.arange(indptr[-1]) + moves[row]
        column = A.indices.get()[entries]
        assert ((column >= k * size) & (column < (k + 1) * size)).all()
        assert (np.searchsorted(A.indptr.get(), entries, side="right") - 1 == row).all()
        seen.append(entries)
    assert np.sort(np.concatenate(seen)).tolist() == list(range(A.nnz))


def test_columns_that_do_not_ascend_are_in_no_parts(xp):
    indptr, indices = np.array([0, 3, 4], np.int32), np.array([2, 0, 1, 2], np.int32)
    A = put(xp, CSR(indptr, indices, shape=(2, 3)))
    assert attention_column_blocks.blocks_of(A, 2, 0) == ()
    X = xp.ones((3, 1, 8), np.float32)
    assert bool((ops.dot_attention(A, X[:2], X, X) == 1).all())
