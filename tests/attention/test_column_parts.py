"""Attention that goes through the columns in parts, as it does where the L2 holds few of them."""

import numpy as np
import pytest
import test_row_attention as whole
from op_cases import (
    DTYPES,
    INDEX_DTYPES,
    KINDS,
    ROW_LENGTHS,
    long_rows,
    matrix,
    name_of,
    put,
    rows_of,
)

from sparsefmt import CSR, ops
from sparsefmt.ops.attention.pairwise import column_blocks as attention_column_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread", "in_parts")]

SHAPES = [((4,), 32), ((1,), 128), ((2,), 7), ((), 5), ((3,), 40)]


@pytest.fixture
def in_parts(monkeypatch):
    """Whatever the sizes are."""
    monkeypatch.setattr(attention_column_blocks, "count", lambda S, nbytes: 3)


@pytest.fixture
def xp():
    return pytest.importorskip("cupy")


def check(xp, A, scores, heads, feat, dtype=np.float32, **options):
    A = A.tocsr().sorted_indices()
    arrays, grad = whole.operands(A, scores, heads, feat, dtype)
    given = whole.options_of(A, arrays, options)
    whole.check(xp, A, arrays, grad, **given)


@pytest.mark.parametrize("loops", [{}, whole.LOOPS], ids=["stored", "self_loops"])
@pytest.mark.parametrize("scores", whole.SCORES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "feat"), SHAPES)
def test_every_dtype_and_shape_of_features(xp, heads, feat, dtype, scores, loops):
    for options in whole.OPTIONS:
        check(xp, whole.square(), scores, heads, feat, dtype, **options, **loops)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_graph(xp, kind, index_dtype):
    for scores in whole.SCORES:
        check(xp, matrix(kind, None, index_dtype), scores, (2,), 16)


@pytest.mark.parametrize("lengths", ROW_LENGTHS)
def test_rows_end_anywhere(xp, lengths):
    A = rows_of(ROW_LENGTHS[lengths], 30, None, np.int32)
    for B in (A, A.T.tocsr()):
        check(xp, B, "dot", (2,), 16)


@pytest.mark.parametrize("scores", whole.SCORES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=name_of)
def test_rows_and_columns_that_many_blocks_share(xp, dtype, scores):
    A = long_rows(None, np.int32)
    for B in (A, A.T.tocsr()):
        check(xp, B, scores, (2,), 16, dtype)


@pytest.mark.parametrize("scores", whole.SCORES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=name_of)
def test_what_is_infinite_stays_where_it_is(xp, dtype, scores):
    whole.test_infinite_scores_and_nan_spread_over_their_row_alone(xp, dtype, scores)
    shape = (dtype, (2,), 16)
    for loops in ({}, whole.LOOPS):
        whole.test_rows_may_begin_with_scores_of_minus_infinity(xp, *shape, scores, loops)
    whole.test_infinite_features_reach_no_further_than_entries(xp, *shape, scores)


@pytest.mark.parametrize("scores", whole.SCORES)
def test_the_arrays_may_lie_anywhere(xp, scores):
    """Even where that leaves columns in no parts."""
    whole.test_the_arrays_may_lie_anywhere(xp, np.float32, scores)


@pytest.mark.parametrize("scores", whole.SCORES)
def test_results_repeat_bit_for_bit(xp, scores):
    whole.test_results_repeat_bit_for_bit(xp, scores)


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
