"""What holds at a limit and not beyond it: places of faults, bits of words, entries of chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsefmt import CBSR, COO, CSR, Graph, from_dense
from sparsefmt.errors import FormatError, IndexRangeError, ShapeError, UnsupportedError
from sparsefmt.formats import condense, foreign, primitives


@given(st.integers(0, 4), st.integers(1, 9))
def test_pointers_that_fall_are_refused_at_every_place(place, by):
    indptr = np.arange(6)
    indptr[place + 1] = place - by
    with pytest.raises(
        FormatError, match=rf"decreases from {place} to {place - by} at .* {place + 1}:"
    ):
        CSR(indptr, np.zeros(5, int), shape=(5, 3))


@pytest.mark.parametrize(("row", "place"), [*np.ndindex(3, 3)])
def test_rows_that_do_not_ascend_are_refused_at_every_place(row, place):
    indices = np.tile(np.arange(4, dtype=np.uint8), (3, 1))
    indices[row, place + 1] = place
    with pytest.raises(FormatError, match=rf"indices\[{row}, {place}:{place + 2}\] is "):
        CBSR(indices, np.ones((3, 4)), shape=(3, 9))


@pytest.mark.parametrize("level", ["cheap", "full"])
@pytest.mark.parametrize("format", ["coo", "csr", "csc", "sgt", "cbsr"])
def test_both_levels_look_at_the_number_of_values(format, level):
    """Of a matrix too that was built without any check."""
    if format == "cbsr":
        A = CBSR(np.zeros((2, 1), np.uint8), np.ones((2, 1)), shape=(2, 3))
    else:
        A = COO([0, 1], [1, 0], [1.0, 2.0], shape=(2, 3)).asformat(format)
    A.check(level)
    with pytest.raises(ShapeError, match="data has shape"):
        A._replace(data=A.data[:1]).check(level)
    if format != "cbsr":
        fields = {name: getattr(A, name) for name in A._array_fields}
        with pytest.raises(UnsupportedError, match="validate is 'none'"):  # another level
            type(A)(**fields, shape=A.shape, validate="none")


@pytest.mark.parametrize("shape", [(0, 2**31), (2**31, 0)])
def test_dense_matrices_are_stored_if_their_sides_fit(shape):
    X = np.empty(shape, np.float32)
    assert from_dense(X, index_dtype="int64", format="coo").shape == shape
    with pytest.raises(IndexRangeError, match="use int64 indices"):
        from_dense(X, format="coo")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_indices_that_have_their_dtype_are_not_copied(dtype):
    a = np.arange(3, dtype=dtype)
    assert foreign.indices("a", a) is a
    assert np.shares_memory(foreign.indices("a", a, dtype), a)


def test_matrices_and_graphs_of_other_values_share_what_was_built():
    A = CSR([0, 1, 2], [1, 0], [1.0, 2.0], shape=(2, 2))
    for data in (None, np.ones(2), np.ones(2, np.float32)):
        assert A.with_data(data).chunks is A.chunks
    pytest.importorskip("sparsefmt.autograd.gcn")  # registers the slot
    graph = Graph(COO([0, 1], [1, 0], shape=(2, 2)))
    other = graph.with_data([1.0, 2.0])
    assert other._slots.looped is graph._slots.looped
    assert other._slots.lock is graph._slots.lock


@pytest.mark.parametrize("columns", [1, 2, 3, 1000])
def test_words_hold_64_bits_and_no_more(columns):
    """Columns are ranked where they would not fit."""
    assert primitives.bits_for(columns) == (columns - 1).bit_length()
    A = CSR([0, columns], np.arange(columns) * 2**50, shape=(1, 2**60 - 2))
    bits = (columns - 1).bit_length()
    layout = condense._layout(A, 2 ** (64 - bits))
    assert layout.column_bits + layout.place_bits == 64
    assert layout.windows == 1
    with pytest.raises(UnsupportedError, match="no 64-bit key"):
        condense._layout(A, 2 ** (64 - bits) + 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 9))
def test_chunks_of_windows_pass_their_size_by_one_window_at_most(lengths, windows, entries):
    limits = np.concatenate([[0], np.cumsum(lengths)])
    found = list(condense._chunks(limits, windows, entries))
    assert [w for some, _ in found for w in range(some.start, some.stop)] == [*range(len(lengths))]
    for some, part in found:
        assert (part.start, part.stop) == (limits[some.start], limits[some.stop])
        assert some.stop - some.start <= windows
        assert part.stop - part.start <= entries + lengths[some.start]
