"""Edge groups: laws over all matrices, and what is refused."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparsefmt import CSR, ShapeError, UnsupportedError
from sparsefmt.formats.arrays import to_device
from sparsefmt.partition import edge_groups
from sparsefmt.testing import coo, csr

widths = st.integers(1, 9)
HUB = CSR(np.array([0, 0, 11, 11, 13, 13]), np.arange(13) % 4, shape=(5, 4))


def on(xp, A):
    return A.to("cpu" if xp is np else "cuda")


def host(array):
    return to_device(array, "cpu")


@given(A=csr(hubs=True), width=widths)
@example(A=HUB, width=4)
@example(A=CSR(np.zeros(1, np.int32), np.zeros(0, np.int32), shape=(0, 0)), width=1)
def test_groups_cut_every_row_into_consecutive_pieces(xp, A, width):
    groups = edge_groups(on(xp, A), width)
    row, ptr = host(groups.row).tolist(), host(groups.ptr).tolist()
    pieces = [
        (i, start, min(start + width, int(A.indptr[i + 1])))
        for i in range(A.n_rows)
        for start in range(int(A.indptr[i]), int(A.indptr[i + 1]), width)
    ]
    assert [(i, *ends) for i, ends in zip(row, pairwise(ptr), strict=True)] == pieces
    assert groups.count == len(pieces)
    assert groups.n_rows == A.n_rows


@given(A=csr(hubs=True), width=widths)
def test_lengths_add_up_and_are_bounded(xp, A, width):
    groups = edge_groups(on(xp, A), width)
    lengths = np.diff(host(groups.ptr))
    assert lengths.sum() == A.nnz
    assert ((lengths >= 1) & (lengths <= width)).all()


@given(A=csr(hubs=True), width=widths)
@example(A=HUB, width=4)
def test_first_finds_the_groups_of_a_row(xp, A, width):
    groups = edge_groups(on(xp, A), width)
    first, row = host(groups.first), host(groups.row)
    for i in range(A.n_rows):
        assert (row[first[i] : first[i + 1]] == i).all()
    assert first[-1] == groups.count


@given(A=csr(hubs=True), width=widths)
@example(A=HUB, width=4)
def test_split_rows_have_a_place_for_every_partial_result(xp, A, width):
    groups = edge_groups(on(xp, A), width)
    counts = -(-np.diff(A.indptr) // width)
    split = np.flatnonzero(counts > 1)
    assert host(groups.split_rows).tolist() == split.tolist()
    assert host(groups.split_ptr).tolist() == [0, *np.cumsum(counts[split]).tolist()]


@given(A=csr(), width=widths)
def test_arrays_have_the_index_dtype_and_stay_on_the_device(xp, A, width):
    A = on(xp, A)
    groups = edge_groups(A, width)
    arrays = (groups.row, groups.ptr, groups.first, groups.split_rows, groups.split_ptr)
    assert {array.dtype for array in arrays} == {A.index_dtype}
    assert groups.device == A.device
    assert groups.nbytes == sum(int(array.nbytes) for array in arrays[:3])


def test_a_width_beyond_the_index_dtype_keeps_rows_whole(xp):
    groups = edge_groups(on(xp, HUB).astype(index_dtype=np.int32), 1 << 40)
    assert host(groups.row).tolist() == [1, 3]
    assert len(groups.split_rows) == 0
    assert groups.width == 1 << 40


def test_moving_to_the_same_device_is_free(xp):
    groups = edge_groups(on(xp, HUB), 4)
    assert groups.to(groups.device) is groups
    assert repr(groups) == f"EdgeGroups(4 of 5 rows, width=4, {groups.device})"


@pytest.mark.gpu
def test_moving_between_devices_keeps_the_groups():
    there = edge_groups(HUB, 4).to("cuda")
    assert there.device == "cuda:0"
    assert there.to("cpu").ptr.tolist() == edge_groups(HUB, 4).ptr.tolist()


@pytest.mark.parametrize("width", [0, -3, 1.5, "32", None])
def test_bad_widths_are_refused(xp, width):
    with pytest.raises(ShapeError, match="width is "):
        edge_groups(on(xp, HUB), width)


@given(A=coo())
def test_only_csr_has_rows_to_cut(A):
    with pytest.raises(UnsupportedError, match=r"A is a COO: .* give A\.tocsr\(\)"):
        edge_groups(A, 4)
