"""Windows of rows, and their entries by column: what ``sspmm`` goes by on a GPU."""

import gc
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import host, put

from sparsefmt import CSR
from sparsefmt.ops.cbsr.cuda_sspmm import Chip, threads_of_block, window_sizes
from sparsefmt.ops.cbsr.windows import (
    MOST_COLUMNS,
    MOST_ROWS,
    ROW_BITS,
    WindowSizes,
    build_windows,
    windows_of,
)
from sparsefmt.reorder import Order
from sparsefmt.testing import csr

SIZES = st.builds(WindowSizes, st.integers(1, MOST_ROWS), st.integers(1, 7), st.integers(1, 9))
H200 = Chip(227 * 2**10, 228 * 2**10, 50 * 2**20)


@given(data=st.data())
def test_every_entry_is_in_its_bucket_once(xp, data):
    A = data.draw(csr(), label="A")
    sizes = data.draw(SIZES, label="sizes")
    rows = data.draw(st.none() | st.permutations(range(A.n_rows)), label="order")
    B, order = put(xp, A), None if rows is None else xp.asarray(rows, A.index_dtype)
    W = build_windows(B.indptr, B.indices, A.n_cols, sizes, order)
    arrays = W.pieces, W.order, W.perm, W.words
    pieces, order, perm, words = (host(one).astype(np.int64) for one in arrays)
    lengths = np.diff(pieces[:, 0])
    bucket = np.repeat(pieces[:-1, 1], lengths)
    part, window = np.divmod(bucket, max(-(-A.n_rows // sizes.height), 1))
    row = order[window * sizes.height + words % MOST_ROWS]
    col = part * W.part_size + (words >> ROW_BITS)

    assert sorted(perm.tolist()) == list(range(A.nnz))
    assert np.array_equal(row, np.repeat(np.arange(A.n_rows), A.lengths)[perm])
    assert np.array_equal(col, A.indices[perm])
    assert lengths.sum() == A.nnz
    assert not A.nnz or 0 < lengths.min() <= lengths.max() <= sizes.piece
    assert (words % MOST_ROWS < sizes.height).all()
    in_order = np.lexsort((perm, words >> ROW_BITS, bucket))
    assert np.array_equal(in_order, np.arange(A.nnz))
    if rows is None:
        assert (np.diff(A.lengths[order]) <= 0).all()
    else:
        assert order.tolist() == rows


def small(xp):
    return put(xp, CSR(np.array([0, 1, 3]), np.array([0, 0, 1]), np.ones(3), shape=(2, 2)))


def test_they_are_built_once_for_each_size_and_order(xp):
    A, order = small(xp), Order(xp.asarray([1, 0]))
    low, tall = WindowSizes(1, 1, 4), WindowSizes(2, 1, 4)
    asked = (tall, None), (low, None), (tall, order)
    first, again = ([windows_of(A, *one) for one in asked] for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert len({id(one) for one in first}) == 3


def test_what_has_the_same_structure_shares_them(xp):
    A, sizes = small(xp), WindowSizes(2, 1, 4)
    given, twice = windows_of(A.with_data(None), sizes), windows_of(A.T.T, sizes)
    assert given is twice is windows_of(A, sizes)
    assert windows_of(A._replace(shape=(2, 3)), sizes) is not given


def test_they_go_with_their_order(xp):
    A, order = small(xp), Order(xp.asarray([1, 0]))
    gone = ref(windows_of(A, WindowSizes(2, 1, 4), order))
    assert gone() is not None
    del order
    gc.collect()
    assert gone() is None


def test_threads_share_one_sort(xp):
    A, sizes = small(xp), WindowSizes(1, 2, 1)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: windows_of(A, sizes), range(32))
    assert len({id(one) for one in found}) == 1


def test_an_order_that_changes_later_changes_nothing(xp):
    A, rows = small(xp), xp.asarray([1, 0])
    W = windows_of(A, WindowSizes(1, 1, 4), Order(rows))
    rows[:] = 0
    assert W.order.tolist() == [1, 0]


@given(
    rows=st.integers(0, 10**9),
    cols=st.integers(0, 10**9),
    degree=st.integers(0, 3000),
    size=st.sampled_from([2, 4, 8]),
    feat=st.integers(0, 100_000),
    k=st.integers(0, 100_000),
    ordered=st.booleans(),
    chip=st.sampled_from([H200, Chip(99 * 2**10, 100 * 2**10, 2**22), Chip(2**16, 2**16, 2**22)]),
)
def test_a_window_fits_on_chip_and_its_words(rows, cols, degree, size, feat, k, ordered, chip):
    found = window_sizes((rows, cols), rows * degree, size, feat, k, chip, ordered=ordered)
    if found is None:
        assert feat == 0 or feat * size + 16 > chip.of_block
        return
    assert 1 <= found.height <= MOST_ROWS
    on_chip = found.height * feat * size + 8 + found.height * max(size, 4)
    assert on_chip <= chip.of_block
    assert 128 <= threads_of_block(on_chip, chip) <= 1024
    assert found.parts >= 1
    assert -(-cols // found.parts) <= MOST_COLUMNS


def test_graphs_of_many_entries_have_tall_windows_and_parts_that_stay_in_the_l2():
    def sizes(n, nnz, k, ordered=False):
        return window_sizes((n, n), nnz, 4, 256, k, H200, ordered=ordered)

    reddit, products, flickr = (232_965, 114_615_892), (2_449_029, 123_718_280), (89_250, 989_006)
    assert [sizes(*reddit, k).parts for k in (8, 16, 32, 64, 192)] == [1, 1, 1, 2, 2]
    assert [sizes(*products, k).parts for k in (8, 16, 32, 64)] == [2, 4, 4, 4]
    assert [sizes(*products, k, True).parts for k in (8, 64)] == [1, 1]
    assert [sizes(*graph, 8).height for graph in (reddit, products, flickr)] == [128, 128, 64]
    assert sizes(*flickr, 64).parts == 1
    assert [threads_of_block(height * 1028, H200) for height in (128, 64)] == [1024, 256]


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
