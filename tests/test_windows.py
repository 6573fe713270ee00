"""Windows of rows, and their entries by column: what ``sspmm`` goes by on a GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import put

from sparsefmt import CSR
from sparsefmt._windows import MOST_COLUMNS, MOST_ROWS, Cut
from sparsefmt.ops import _launch_sspmm
from sparsefmt.testing import csr

CUTS = st.builds(Cut, st.integers(1, MOST_ROWS), st.integers(1, 7), st.integers(1, 9))
ROOM = 227 * 2**10


def host(array):
    return array.get() if hasattr(array, "get") else array


@given(data=st.data())
def test_every_entry_is_in_its_bucket_once(xp, data):
    A = data.draw(csr(), label="A")
    cut = data.draw(CUTS, label="cut")
    rows = data.draw(st.none() | st.permutations(range(A.n_rows)), label="order")
    order = None if rows is None else xp.asarray(rows, A.index_dtype)
    W = put(xp, A).windows(cut, order)
    row, col = map(host, W.coordinates())
    pieces, perm, words = (host(one).astype(np.int64) for one in (W.pieces, W.perm, W.words))

    assert sorted(perm.tolist()) == list(range(A.nnz))
    assert np.array_equal(row, np.repeat(np.arange(A.n_rows), A.lengths)[perm])
    assert np.array_equal(col, A.indices[perm])
    lengths = np.diff(pieces[:, 0])
    assert lengths.sum() == A.nnz
    assert not A.nnz or 0 < lengths.min() <= lengths.max() <= cut.piece
    bucket = np.repeat(pieces[:-1, 1], lengths)
    n_windows = -(-A.n_rows // cut.height)
    position = np.argsort(host(W.order))[row]
    assert np.array_equal(bucket, col // W.part_size * n_windows + position // cut.height)
    ascending = np.lexsort((perm, words >> 8, bucket))
    assert np.array_equal(ascending, np.arange(A.nnz))
    if order is None:
        assert (np.diff(A.lengths[host(W.order)]) <= 0).all()


def test_they_are_kept_for_each_cut_and_order(xp):
    A = put(xp, CSR(np.array([0, 1, 3]), np.array([0, 0, 1]), np.ones(3), shape=(2, 2)))
    order = xp.asarray([1, 0])
    first = A.windows(Cut(2, 1, 4)), A.windows(Cut(1, 1, 4)), A.windows(Cut(2, 1, 4), order)
    again = A.windows(Cut(2, 1, 4)), A.windows(Cut(1, 1, 4)), A.windows(Cut(2, 1, 4), order)
    assert all(map(lambda one, other: one is other, first, again))
    assert A.with_data(None).windows(Cut(2, 1, 4)) is first[0]
    assert first[0].height == 2
    assert len({id(one) for one in first}) == 3


@given(
    rows=st.integers(0, 10**9),
    cols=st.integers(0, 10**9),
    degree=st.integers(0, 3000),
    size=st.sampled_from([2, 4, 8]),
    feat=st.integers(0, 100_000),
    k=st.integers(0, 100_000),
    few=st.sampled_from([12, 128]),
    room=st.sampled_from([48 * 2**10, 99 * 2**10, ROOM]),
)
def test_a_window_fits_on_chip_and_its_words(rows, cols, degree, size, feat, k, few, room):
    found = _launch_sspmm._cut((rows, cols), rows * degree, size, feat, k, few, room)
    if found is None:
        assert feat == 0 or (feat * size + 16 > room - 16)
        return
    assert 1 <= found.height <= MOST_ROWS
    assert found.height * feat * size + 8 + found.height * max(size, 4) <= room
    assert found.parts >= 1
    assert -(-cols // found.parts) <= MOST_COLUMNS


def test_graphs_of_many_entries_have_tall_windows_and_parts_that_stay_in_the_l2():
    def cut(n, nnz, k, few=12):
        return _launch_sspmm._cut((n, n), nnz, 4, 256, k, few, ROOM)

    reddit, products, flickr = (232_965, 114_615_892), (2_449_029, 123_718_280), (89_250, 989_006)
    assert [cut(*reddit, k).parts for k in (8, 16, 32, 64, 192)] == [1, 1, 1, 2, 2]
    assert [cut(*products, k).parts for k in (8, 16, 32, 64)] == [2, 4, 4, 4]
    assert [cut(*products, k, 128).parts for k in (8, 64)] == [1, 1]
    assert cut(*reddit, 8).height == 127
    assert cut(*flickr, 8).height == 63
    assert cut(*flickr, 64).parts == 1


@pytest.mark.gpu
def test_a_row_that_does_not_fit_on_chip_goes_by_panels():
    cupy = pytest.importorskip("cupy")
    from sparsefmt import ops

    A = CSR(np.array([0, 2, 3]), np.array([0, 1, 1]), np.ones(3, np.float32), shape=(2, 2))
    B, dY = A.to("cuda"), cupy.ones((2, 60_000), np.float32)
    S = ops.maxk(dY, 3)
    explanation = str(ops.explain("sspmm", B, dY, S))
    assert "sspmm runs sspmm_csr_panels" in explanation
    assert "a row of 60000 features does not fit on chip" in explanation
    assert ops.sspmm(B, dY, S).data.tolist() == [[1.0] * 3, [2.0] * 3]
