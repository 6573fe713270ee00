"""Every ordered pair of formats: nothing is lost, added, moved within a row, or written to."""

import itertools
from functools import cache

import numpy as np
import pytest
from op_cases import host
from test_formats import oracle

import sparsefmt
from sparsefmt import COO, CSR, UnsupportedError
from sparsefmt.formats import condense, convert, primitives
from sparsefmt.testing import assert_same_matrix, stored_entries
from sparsefmt.testing.space import KINDS

ml_dtypes = pytest.importorskip("ml_dtypes")

FORMATS = ("coo", "csr", "csc", "sgt")
PAIRS = list(itertools.product(FORMATS, FORMATS))
TILES = [(16, 8), (8, 8), (16, 16), (1, 1), (3, 5), (256, 256)]
INDEX_DTYPES = [np.dtype(np.int32), np.dtype(np.int64)]
VALUE_DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
NAN, INF = float("nan"), float("inf")


def of_kind(kind, shape, a, b):
    row, col = KINDS[kind](*shape, a, b)
    return shape, row, col


def repeated(shape, row, col):
    """Each entry two or three times, not side by side."""
    return shape, np.concatenate([row, row, row[::2]]), np.concatenate([col, col, col[::2]])


def shuffled(shape, row, col, seed=7):
    order = np.random.default_rng(seed).permutation(len(row))
    return shape, row[order], col[order]


GRAPHS = {
    "empty_0x0": of_kind("empty", (0, 0), 0, 0),
    "empty_0xm": of_kind("empty", (0, 7), 0, 0),
    "empty_nx0": of_kind("empty", (7, 0), 0, 0),
    "no_entries": of_kind("empty", (20, 30), 0, 0),
    "one_cell": ((1, 1), np.array([0]), np.array([0])),
    "one_row": of_kind("one_row", (1, 40), 0, 1),
    "one_column": ((40, 1), np.arange(0, 40, 3), np.zeros(14, np.int64)),
    "star": of_kind("star", (25, 25), 3, 20),
    "power_law": of_kind("power_law", (33, 33), 5, 11),
    "banded": of_kind("banded", (24, 24), 2, 0),
    "dense_block": of_kind("dense_block", (20, 20), 9, 6),
    "isolated_rows": of_kind("isolated_rows", (40, 17), 2, 1),
    "last_rows_empty": ((50, 9), np.array([0, 3, 3]), np.array([8, 0, 8])),
    "duplicates": repeated(*of_kind("isolated_rows", (18, 18), 1, 0)),
    "unsorted": shuffled(*of_kind("power_law", (19, 19), 2, 3)),
    "unsorted_duplicates": shuffled(*repeated(*of_kind("star", (9, 9), 4, 2))),
    "rectangular_wide": shuffled(*of_kind("power_law", (6, 70), 1, 9)),
    "rectangular_tall": shuffled(*of_kind("star", (70, 6), 30, 2)),
}


@cache
def graph(kind, dtype=None, index=INDEX_DTYPES[0]):
    """A COO of that kind; every fourth value is an explicit zero, the signs of zeros alternate."""
    shape, row, col = GRAPHS[kind]
    data = np.random.default_rng(len(row)).uniform(-9, 9, len(row))
    data[::4] = 0.0
    data[4::8] = -0.0
    data = None if dtype is None else data.astype(dtype)
    return COO(row.astype(index), col.astype(index), data, shape=shape)


def on(xp, A):
    """``A`` in the memory of the array module under test."""
    try:
        return A if xp is np else A.to("cuda")
    except (TypeError, ValueError) as error:
        if A.dtype != VALUE_DTYPES[1]:
            raise
        pytest.skip(f"this CuPy has no bfloat16: {error}")


def bits(A):
    """Every array of a matrix as bytes: NaN payloads and the sign of zero count."""
    A = A.to("cpu")
    return {name: (a.dtype, a.shape, a.tobytes()) for name, a in A._arrays().items()}


def flat(data):
    return host(data).ravel().view(np.uint8).tobytes()


def source(xp, name, kind, dtype, index):
    """A matrix in the format ``name``, checked against the graph's own entries."""
    return on(xp, graph(kind, dtype, index)).asformat(name)


# Every pair


@pytest.mark.parametrize("dtype", [None, *VALUE_DTYPES], ids=str)
@pytest.mark.parametrize(("start", "goal"), PAIRS, ids="-".join)
def test_conversion_keeps_every_entry_and_carries_values_by_its_permutation(xp, start, goal, dtype):
    for kind, index in itertools.product(GRAPHS, INDEX_DTYPES):
        original = graph(kind, dtype, index)
        A = source(xp, start, kind, dtype, index)
        before = bits(A)
        B, perm = A.asformat_with_perm(goal)
        B.check()
        assert (B.format, B.shape, B.nnz) == (goal, A.shape, A.nnz)
        assert (B.dtype, B.index_dtype, B.device) == (dtype, index, A.device)
        assert_same_matrix(original, B)
        assert sorted(host(perm).tolist()) == list(range(A.nnz))
        assert perm.dtype in INDEX_DTYPES
        if dtype is not None:
            assert flat(B.data) == flat(A.data[perm])
        if dtype == np.float64:  # without values: the permutation by which they would have moved
            bare, other = A.with_data(None).asformat_with_perm(goal)
            assert bare == B.with_data(None)
            assert host(other).tolist() == host(perm).tolist()
        assert A.asformat(goal) == B
        assert bits(A) == before, kind


@pytest.mark.parametrize(("start", "goal"), PAIRS, ids="-".join)
def test_order_within_rows_and_columns_is_stable(xp, start, goal):
    """As CSR must hold the entries: by row, within a row as they are stored."""
    for kind in GRAPHS:
        A = source(xp, start, kind, np.dtype(np.float32), INDEX_DTYPES[0])
        B = A.asformat(goal)
        expected = stored_entries(A.tocsr() if start == "sgt" else A)
        if goal != "coo":
            expected.sort(key=lambda entry: entry[goal == "csc"])
        assert repr(stored_entries(B.tocsr() if goal == "sgt" else B)) == repr(expected), kind


# Round trips, bit for bit

SPECIAL = [NAN, -0.0, 0.0, INF, -INF, 1.5, -2.25]


def special(kind, dtype=np.float32):
    A = graph(kind)
    return A.with_data(np.resize(np.array(SPECIAL, dtype), A.nnz))


@pytest.mark.parametrize("kind", GRAPHS)
def test_csr_and_csc_come_back_bit_for_bit(xp, kind):
    A = on(xp, special(kind)).tocsr()
    for B in (A.tocoo(), *map(A.tosgt, TILES)):
        assert bits(B.tocsr()) == bits(A)
    C = A.tocsc()
    assert bits(C.tocoo().tocsc()) == bits(C)
    B = C.tocsr()
    assert B.has_sorted_indices
    expected = sorted(stored_entries(A), key=lambda entry: entry[:2])
    assert repr(stored_entries(B)) == repr(expected)
    assert bits(A.sorted_indices()) == bits(A if A.has_sorted_indices else B)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_nan_infinity_and_negative_zero_survive(xp, dtype):
    for start, goal in PAIRS:
        A = on(xp, special("unsorted_duplicates", dtype)).asformat(start)
        assert_same_matrix(A, A.asformat(goal))


# Dense


@pytest.mark.parametrize("kind", GRAPHS)
def test_dense_adds_duplicates_up(xp, kind):
    kinds = FORMATS, INDEX_DTYPES, (np.float32, np.float64)
    for start, index, dtype in itertools.product(*kinds):
        A = source(xp, start, kind, np.dtype(dtype), index)
        X, cells = A.toarray_with_perm()
        assert X.dtype == dtype
        np.testing.assert_allclose(host(X), oracle(A), rtol=1e-6, atol=1e-5)
        coo = A.tocsr().tocoo() if start == "sgt" else A.tocoo()
        assert host(cells).tolist() == (host(coo.row) * A.n_cols + host(coo.col)).tolist()


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if "duplicates" not in kind])
def test_dense_to_sparse_to_dense_is_exact(xp, kind, dtype):
    X = source(xp, "csr", kind, dtype, INDEX_DTYPES[0]).toarray()
    for goal, index in itertools.product(FORMATS, INDEX_DTYPES):
        A = sparsefmt.from_dense(X, goal, index_dtype=index)
        A.check()
        assert (A.format, A.index_dtype, A.dtype) == (goal, index, dtype)
        B, cells = convert.from_dense_with_perm(X, goal, index_dtype=index)
        assert B == A
        assert flat(B.data) == flat(host(X).ravel()[host(cells)])
        assert A.nnz == int((host(X) != 0).sum())
        assert host(A.toarray()).astype(float).tolist() == host(X).astype(float).tolist()


# Condensed tiles


def naive_tiles(A, tile):
    """Tiles with and without condensing, from sets of columns and of blocks."""
    height, width = tile
    windows = {}
    for row, col, _ in stored_entries(A):
        windows.setdefault(row // height, set()).add(col)
    condensed = sum(-(-len(cols) // width) for cols in windows.values())
    return condensed, sum(len({col // width for col in cols}) for cols in windows.values())


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_hold_the_columns_of_their_window_ascending(xp, tile, kind):
    """Entries are ordered by window, column and place, and statistics follow from counts."""
    for index in INDEX_DTYPES:
        A = on(xp, graph(kind, np.dtype(np.float32), index))
        B = A.tosgt(tile)
        B.check()
        assert B.tile == tile
        condensed, dense = naive_tiles(A, tile)
        assert (B.tile_count, B.dense_tile_count) == (condensed, dense)
        assert B.reduction == (1 - condensed / dense if dense else 0)
        assert type(B.reduction) is float
        filled = len({(row, col) for row, col, _ in stored_entries(A)})
        assert B.tile_density == (filled / (condensed * tile[0] * tile[1]) if condensed else 0)
        host_B, used = B.to("cpu"), {}
        for row, col, _ in stored_entries(A):
            used.setdefault(row // tile[0], set()).add(col)
        for window in range(B.n_windows):
            first, end = host_B.window_ptr[window : window + 2]
            slots = host_B.columns[first:end].ravel().tolist()
            columns = sorted(used.get(window, ()))
            assert slots == columns + [-1] * (len(slots) - len(columns))
        csr = host_B.tocsr().tocoo()
        places = host_B.order.tolist()
        keys = [(csr.row[place] // tile[0], csr.col[place], place) for place in places]
        assert keys == sorted(keys)


@pytest.mark.parametrize("kind", GRAPHS)
def test_retiling_is_tiling_the_original(xp, kind):
    A = on(xp, graph(kind, np.dtype(np.float32)))
    for tile, other in itertools.permutations(TILES[:4], 2):
        assert A.tosgt(tile).tosgt(other) == A.tosgt(other)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunk_size_does_not_change_the_tiles(xp, monkeypatch, chunk, kind):
    A = on(xp, special(kind)).tocsr()
    whole = [A.tosgt(tile) for tile in TILES]
    monkeypatch.setattr(condense, "CHUNK_ENTRIES", chunk)
    monkeypatch.setattr(condense, "PART_ENTRIES", chunk)
    assert [A.tosgt(tile) for tile in TILES] == whole


# Shapes whose indices do not fit one 64-bit word with their neighbours

FAR = 2**60 - 8


@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (16, 8)], ids=str)
def test_columns_too_wide_for_a_word_are_ranked(xp, tile):
    col = np.array([FAR - 1, 0, 3, FAR - 1, FAR // 2, 3, 1])
    A = on(xp, CSR(np.array([0, 2, 2, 5, 6, 7]), col, shape=(5, FAR)))
    B = A.tosgt(tile)
    B.check()
    assert B.tocsr() == A
    assert (B.tile_count, B.dense_tile_count) == naive_tiles(A, tile)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_grouping_is_a_stable_sort_with_the_bounds_of_each_key(xp, dtype):
    ptr, perm = primitives.group(xp.asarray([3, 0, 3, 5, 0, 1], dtype), 6)
    assert host(perm).tolist() == [1, 4, 5, 0, 2, 3]
    assert host(ptr).tolist() == [0, 2, 3, 3, 5, 5, 6]


def test_conversions_share_what_they_leave_alone():
    def shares(a, b):
        return a.__array_interface__["data"] == b.__array_interface__["data"]

    csr = graph("power_law", np.dtype(np.float32)).tocsr().copy()
    csc, coo = csr.tocsc(), csr.tocoo()
    assert shares(coo.col, csr.indices)
    assert shares(csc.tocoo().row, csc.indices)
    assert shares(coo.tocsr().indices, coo.col)  # in the order of rows
    tiles = csr.tosgt()
    pairs = [(csr, coo), (csc, csc.tocoo()), (coo, coo.tocsr()), (csr, tiles)]
    assert all(shares(A.data, B.data) for A, B in [*pairs, (csr, tiles.tocsr())])


# CBSR


def balanced(shape, k, dtype=np.float32):
    rng = np.random.default_rng(shape[1])
    width = np.uint8 if shape[1] <= 256 else np.uint16 if shape[1] <= 65536 else np.int32
    rows = [np.sort(rng.choice(shape[1], k, replace=False)) for _ in range(shape[0])]
    indices = np.array(rows, width).reshape(shape[0], k)
    data = rng.normal(size=(shape[0], k)).astype(dtype)
    data[::2] = 0
    return sparsefmt.CBSR(indices, data, shape=shape)


BALANCED = [((0, 4), 2), ((1, 1), 1), ((5, 8), 8), ((7, 256), 3), ((7, 257), 4), ((3, 70000), 5)]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "k"), BALANCED, ids=str)
def test_balanced_rows_convert_exactly(xp, shape, k, dtype):
    A = on(xp, balanced(shape, k, dtype))
    before = bits(A)
    for goal in FORMATS:
        B, perm = A.asformat_with_perm(goal)
        B.check()
        assert_same_matrix(A, B)
        assert flat(B.data) == flat(A.data.ravel()[perm])
    assert host(A.tocsr().lengths).tolist() == [k] * shape[0]
    X, cells = A.toarray_with_perm()
    assert host(X).astype(float).tolist() == oracle(A).tolist()
    assert flat(host(X).ravel()[host(cells)]) == flat(A.data)
    assert_same_matrix(A.T, A.tocsr().T)
    assert bits(A) == before


def test_a_window_too_large_for_its_keys_is_refused(monkeypatch):
    A = CSR(np.array([0, 2], np.int32), np.array([0, 1], np.int32), shape=(1, 2))
    monkeypatch.setattr("sparsefmt.formats.primitives.bits_for", lambda count: 33)
    with pytest.raises(UnsupportedError, match="a window of 2 entries over 2 columns has no"):
        A.tosgt()
