"""Laws that hold for every matrix: transposes, conversions, products, slices, copies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import host, put

import sparsefmt
from sparsefmt.testing import (
    assert_close,
    assert_same_matrix,
    cbsr,
    coo,
    csc,
    csr,
    error_bound,
    features,
    graphs,
    index_dtypes,
    sgt,
    spmm_oracle,
    stored_entries,
    value_dtypes,
)

FORMATS = ("coo", "csr", "csc", "sgt")
matrices = st.one_of(coo(), csr(), csc(), sgt(), graphs(format=None))
anything = matrices | cbsr()
names = st.sampled_from(FORMATS)


# bfloat16 on a GPU depends on the CuPy at hand; tests/formats/test_conversions.py covers it.
plain = value_dtypes(bfloat16=False)


# Identity


@given(A=anything, goal=names)
def test_transpose_swaps_rows_and_columns(A, goal):
    swapped = sorted((col, row, repr(value)) for row, col, value in stored_entries(A))
    assert swapped == sorted((row, col, repr(value)) for row, col, value in stored_entries(A.T))
    assert A.T.shape == A.shape[::-1]
    assert_same_matrix(A.T.T, A)
    if A.format in ("coo", "csr", "csc"):
        assert A.T.T == A
        assert_same_matrix(A.T.asformat(goal), A.asformat(goal).T)


@given(A=matrices, goal=names)
def test_every_format_holds_the_same_entries(A, goal):
    B, perm = A.asformat_with_perm(goal)
    B.check()
    assert_same_matrix(A, B)
    assert sorted(perm.tolist()) == list(range(A.nnz))
    if A.data is not None:
        assert A.data[perm].tobytes() == B.data.tobytes()
    A, B = A.tocsr(), A.tocsr().asformat(goal)
    assert B.toarray().astype(float).shape == A.shape
    if goal in ("coo", "sgt"):  # both hand rows over in CSR order: sums are equal bit for bit
        assert B.toarray().tobytes() == A.toarray().tobytes()


@given(A=csr() | csc())
def test_sorting_keeps_the_entries_and_is_idempotent(A):
    B = A.sorted_indices()
    assert B.has_sorted_indices
    assert B.sorted_indices() is B
    assert type(B) is type(A)
    assert_same_matrix(A, B)
    assert (B is A) == A.has_sorted_indices


# Products


@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
def test_product_is_the_oracle_within_its_bound(xp, format, data):
    # The loops of tiles are compiled for each kind of value and of index: 4 s each.
    kinds = {"dtype": "float32", "index_dtype": "int32"} if format == "sgt" else {"dtype": plain}
    A = data.draw(csr(**kinds), label="A")
    dtype = A.dtype or np.float32
    X = data.draw(features(A.n_cols, width=st.integers(0, 9), dtype=dtype), label="X")
    Y = put(xp, A.asformat(format)) @ xp.asarray(X)
    assert_close(Y, spmm_oracle(A, X), bound=error_bound(A, X))


# Slices, against NumPy on dense


def slices(size):
    ends = st.none() | st.integers(-size - 2, size + 2)
    steps = st.none() | st.integers(-3, 3).filter(bool)
    return st.builds(slice, ends, ends, steps)


def places(size):
    """Integers with repetition, negative ones too, in any integer dtype that holds them."""
    if not size:
        return st.just(np.zeros(0, np.int64))
    dtypes = st.sampled_from([np.int64, np.int32, np.int16, np.int8])
    lists = st.lists(st.integers(-size, size - 1), max_size=6)
    return st.builds(np.array, lists, dtypes)


def keys(size):
    masks = st.lists(st.booleans(), min_size=size, max_size=size).map(lambda m: np.array(m, bool))
    return slices(size) | places(size) | masks


def exact(A):
    """With small integers for values: sums of duplicates are exact in every order and dtype."""
    ones = np.arange(A.nnz, dtype=np.float64) % 8 - 3
    return A.with_data(ones)


@given(data=st.data())
def test_chosen_rows_and_columns_are_those_of_dense(xp, data):
    A = exact(data.draw(matrices, label="A"))
    rows, cols = data.draw(keys(A.n_rows), label="rows"), data.draw(keys(A.n_cols), label="cols")
    there = [key if isinstance(key, slice) else xp.asarray(key) for key in (rows, cols)]
    B, X = put(xp, A), A.toarray()
    for chosen, expected in (
        (B[there[0]], X[rows]),
        (B[there[0],], X[rows]),
        (B[:, there[1]], X[:, cols]),
        (B[there[0], there[1]], X[rows][:, cols]),
    ):
        chosen.check()
        assert (chosen.format, chosen.index_dtype) == (A.format, A.index_dtype)
        assert host(chosen.toarray()).tolist() == expected.tolist()
        assert getattr(chosen, "tile", None) == getattr(A, "tile", None)
    # Explicit zeros and duplicates are kept, and so is the absence of values.
    count = A.with_data(np.ones(A.nnz)).toarray()[rows][:, cols].sum()
    assert chosen.nnz == count
    assert B.with_data(None)[there[0]].data is None


# Copies, casts, values


@given(A=cbsr(), index=index_dtypes())
def test_balanced_rows_never_become_invalid_by_a_cast(A, index):
    try:
        A.astype(index_dtype=index).check()
    except sparsefmt.SparseFmtError:
        pass
