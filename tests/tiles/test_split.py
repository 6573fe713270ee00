"""Which entries of tiles go to matrix units, against loops that read them as ``sgt.cu`` does."""

from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from op_cases import host, put

from sparsefmt import COO, CSR, SGT, DtypeError
from sparsefmt.ops.tiles import costs as tile_costs
from sparsefmt.ops.tiles import slabs as tile_slabs
from sparsefmt.ops.tiles import split
from sparsefmt.ops.tiles.split import HEIGHTS, Costs, Split
from sparsefmt.testing import csr, index_dtypes

#: Small matrices pay too; all is taken, nothing, a few columns.
FREE = Costs(slab=16, window=24, left=1, again=96, row=0, piece=0, launch=0)
ALL, NONE = replace(FREE, slab=0, window=0), Costs(gain=1e9)
SOME = replace(FREE, slab=90, again=2, gain=0, part=2)
COSTS = [FREE, ALL, SOME, NONE]
ANY_COSTS = st.sampled_from(COSTS) | st.builds(
    Costs,
    slab=st.floats(0, 64),
    window=st.floats(0, 64),
    row=st.floats(0, 4),
    launch=st.sampled_from([0, 100]),
    piece=st.sampled_from([0, 10]),
    left=st.sampled_from([1, 1.5]),
    again=st.floats(0, 8),
    gain=st.sampled_from([0, 1, 1.05]),
    part=st.integers(1, 3),
)
TILES = [(height, width) for height in HEIGHTS for width in (1, 5, 8, 16, 40)]


def arrays(found: Split) -> dict[str, np.ndarray]:
    """On the CPU, those of the rest too."""
    named = {name: getattr(found, name) for name in Split.__dataclass_fields__}
    rest = named.pop("rest")
    named |= {} if rest is None else {"indptr": rest.indptr, "indices": rest.indices}
    return {name: host(value) for name, value in named.items() if hasattr(value, "dtype")}


def same(found: Split, expected: Split) -> None:
    """In every bit."""
    one, other = arrays(found), arrays(expected)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert np.array_equal(one[name], other[name]), name
    for name in ("height", "nnz", "taken", "n_parts", "share"):
        assert getattr(found, name) == getattr(expected, name)
    assert (found.rest is None) == (expected.rest is None)


def skewed(seed, shape, nnz, index="int32", *, duplicates=True):
    """Some columns are in most rows, some windows are empty, some entries come twice."""
    rng = np.random.default_rng(seed)
    n_rows, n_cols = shape
    row = rng.integers(0, n_rows, nnz)
    row = row[(row // 16 % 3 != 1) | (row % 2 == 0) & (row < n_rows // 2)]
    col = np.minimum(rng.zipf(1.4, len(row)) - 1, rng.integers(0, n_cols, len(row)))
    if not duplicates:
        row, col = np.unique(np.stack([row, col]), axis=1)
    A = COO(row.astype(index), col.astype(index), shape=shape).tocsr()
    return A.with_data(np.arange(1.0, A.nnz + 1))


def set_cells(masks: np.ndarray) -> set[tuple[int, int, int]]:
    """Slab, row and column of every bit, as lanes of ``sgt.cu`` make an operand of it."""
    found = set()
    tiles = masks.shape[2]
    for slab, lane, tile in np.ndindex(*masks.shape):
        if tiles == 1:
            byte = int(masks[slab, lane, 0])
            bits = byte & 0xF | (byte & 0xF0) << 4
        else:
            even, odd = masks[slab, lane, tile // 2 * 2 :][:2].tolist()
            bits = (even | odd << 8) >> tile % 2 * 4
        for word in range(8):
            if bits >> word // 2 + word % 2 * 8 & 1:
                row = tile * 16 + lane // 4 + word // 2 % 2 * 8
                found.add((slab, row, lane % 4 * 2 + word // 4 * 8 + word % 2))
    return found


def placed(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column in the slab, as ``sgt.cu`` reads them."""
    at = cells.astype(np.int64)
    return (at >> 8) * 16 + (at >> 1 & 1) * 8 + (at >> 5 & 7), (
        (at >> 2 & 1) * 8 + (at >> 3 & 3) * 2 + (at & 1)
    )


def check(found: Split, A: CSR, costs: Costs) -> None:
    """Whatever is chosen: each entry is there once, where it belongs."""
    tiles = found.height // 16
    n_slabs = len(found.columns)
    assert (found.nnz, found.taken) == (A.nnz, len(found.perm))
    if not found.share:
        nothing_is_taken(found, A)
        return
    left = np.zeros(0, int) if found.rest is None else found.rest_perm
    assert sorted([*found.perm, *left]) == list(range(A.nnz))
    assert found.share == (A.nnz - len(left)) / A.nnz

    assert found.starts[0] == 0
    assert len(found.starts) == n_slabs * tiles + 1
    tile_of = np.repeat(np.arange(n_slabs * tiles), np.diff(found.starts))
    slab, (row, k) = tile_of // tiles, placed(found.cells)
    assert np.array_equal(row // 16, tile_of % tiles)
    in_order = np.lexsort((found.perm, k, tile_of))
    assert np.array_equal(in_order, np.arange(found.taken))
    cells = set(zip(slab.tolist(), row.tolist(), k.tolist(), strict=True))
    assert len(cells) == found.taken
    assert set_cells(found.masks) == cells

    window = np.full(n_slabs, -1)
    for at, first, end, _ in found.items:
        assert (window[first:end] == -1).all()
        assert end - first <= costs.part
        window[first:end] = at
    csr_row = np.repeat(np.arange(A.n_rows), A.lengths)[found.perm]
    assert np.array_equal(window[slab] * found.height + row, csr_row)
    assert np.array_equal(found.columns[slab, k], A.indices[found.perm])
    columns_are_packed(found, window)
    parts_are_numbered(found)
    rest_is_what_is_left(found, A)


def columns_are_packed(found: Split, window: np.ndarray) -> None:
    """Ascending in a window; the last fills its slab up."""
    for at in np.unique(window):
        columns = found.columns[window == at].ravel()
        used = len(np.unique(columns))
        assert (np.diff(columns[:used]) > 0).all()
        assert (columns[used:] == columns[used - 1]).all()
        assert len(columns) - used < split.SLAB


def parts_are_numbered(found: Split) -> None:
    slots = found.items[:, 3]
    assert slots[slots >= 0].tolist() == list(range(found.n_parts))
    covered = []
    for at, first, end, zero in found.cuts:
        assert end - first > 1
        assert zero == 0
        assert (found.items[np.isin(slots, np.arange(first, end)), 0] == at).all()
        covered += range(first, end)
    assert covered == list(range(found.n_parts))
    windows, counts = np.unique(found.items[:, 0], return_counts=True)
    assert found.cuts[:, 0].tolist() == windows[counts > 1].tolist()


def rest_is_what_is_left(found: Split, A: CSR) -> None:
    if found.rest is None:
        n_windows = -(-A.n_rows // found.height)
        assert np.unique(found.items[:, 0]).tolist() == list(range(n_windows))
        return
    found.rest.check()
    assert (found.rest.data, found.rest.shape) == (None, A.shape)
    assert (np.diff(found.rest_perm) > 0).all()
    assert np.array_equal(found.rest.indices, A.indices[found.rest_perm])
    row = np.repeat(np.arange(A.n_rows), A.lengths)[found.rest_perm]
    assert np.array_equal(np.repeat(np.arange(A.n_rows), found.rest.lengths), row)
    dtypes = {found.rest.indptr.dtype, found.rest.indices.dtype, found.rest_perm.dtype}
    assert dtypes == {A.index_dtype}


def nothing_is_taken(found: Split, A: CSR) -> None:
    assert (found.taken, found.n_parts, found.share) == (0, 0, 0.0)
    assert found.rest is found.rest_perm is None
    shapes = {name: value.shape for name, value in arrays(found).items()}
    empty = {"items": (0, 4), "cuts": (0, 4), "columns": (0, 16), "cells": (0,), "perm": (0,)}
    assert shapes == {**empty, "masks": (0, 32, found.height // 16), "starts": (1,)}


def dtypes_fit(found: Split, index: np.dtype) -> None:
    indices = dict.fromkeys(["items", "cuts", "columns", "starts", "perm", "rest_perm"], index)
    expected = {"masks": np.uint8, "cells": np.uint16, "indptr": index, "indices": index, **indices}
    assert all(value.dtype == expected[name] for name, value in arrays(found).items())


def split_on(xp, A: CSR, tile: tuple[int, int], costs: Costs) -> Split:
    """Checked, and the same on every device."""
    expected = split.split(A.tosgt(tile), A, costs)
    check(expected, A, costs)
    dtypes_fit(expected, A.index_dtype)
    B = put(xp, A)
    same(split.split(B.tosgt(tile), B, costs), expected)
    return expected


@given(data=st.data())
def test_any_matrix_is_split_without_loss(xp, data):
    A = data.draw(csr(max_side=40, max_nnz=60), label="A")
    tile = data.draw(st.sampled_from(TILES) | st.just((7, 3)), label="tile")
    found = split_on(xp, A, tile, data.draw(ANY_COSTS, label="costs"))
    assert tile[0] in HEIGHTS or found.share == 0


@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 400), st.integers(1, 300)),
    nnz=st.integers(0, 3000),
    index=index_dtypes(),
    tile=st.sampled_from(TILES),
    costs=ANY_COSTS,
)
def test_matrices_of_many_windows_are_split_without_loss(xp, seed, shape, nnz, index, tile, costs):
    split_on(xp, skewed(seed, shape, nnz, index), tile, costs)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_and_choice(xp, tile, costs):
    found = split_on(xp, skewed(1, (300, 200), 4000), tile, costs)
    assert (found.share == 0) == (costs == NONE)


@pytest.mark.parametrize("tile", [(16, 8), (128, 16)], ids=str)
def test_choices_differ(tile):
    """What the costs above are for."""
    A = skewed(1, (300, 200), 4000, duplicates=False)
    _, whole, some, none = (split.split(A.tosgt(tile), A, costs).share for costs in COSTS)
    assert (whole, none) == (1, 0)
    assert 0.1 < some < 0.9


def test_windows_that_must_be_cut_have_more_to_save(xp):
    """One window of three slabs of dense blocks: 768 entries, in parts of one slab."""
    A = CSR(np.arange(0, 769, 48), np.tile(np.arange(48), 16), shape=(16, 48))
    for piece, share in ((500, 1), (2000, 0)):  # of 64 rows
        costs = replace(FREE, window=0, piece=piece, part=1)
        assert split_on(xp, A, (16, 16), costs).share == share


@pytest.mark.parametrize("height", HEIGHTS)
def test_every_entry_has_a_place_among_the_cells(xp, height):
    full = CSR(np.arange(0, 3201, 32), np.tile(np.arange(32), 100), shape=(100, 32))
    found = split_on(xp, full, (height, 16), ALL)
    assert found.baked
    assert found.n_cells == len(found.columns) * 16 * height
    assert not split_on(xp, full[:, :3], (height, 16), ALL).baked
    for itemsize in (2, 4):
        place = host(found.places(itemsize))
        assert len(set(place.tolist())) == found.taken
        assert place.max() < found.n_cells
        tiles = np.repeat(np.arange(len(found.starts) - 1), np.diff(host(found.starts)))
        assert np.array_equal(place // 256, tiles)


def test_of_entries_in_one_cell_the_first_counts(xp):
    A = CSR(np.array([0, 3, 3, 5]), np.array([1, 0, 1, 1, 1]), shape=(3, 2))
    found = split_on(xp, A, (16, 16), ALL)
    assert found.perm.tolist() == [1, 0, 3]
    assert found.rest_perm.tolist() == [2, 4]
    assert found.share == 3 / 5


def test_a_window_that_keeps_a_column_keeps_what_equals_it(xp):
    """Two windows, one of columns of one entry each: only the other pays."""
    row = np.concatenate([np.tile(np.arange(16), 4), np.arange(16, 32)])
    col = np.concatenate([np.repeat(np.arange(4), 16), np.arange(16)])
    A = COO(row, col, shape=(32, 16)).tocsr()
    found = split_on(xp, A, (16, 16), replace(FREE, slab=80, window=0, again=0))
    assert found.items.tolist() == [[0, 0, 1, -1]]
    assert found.columns.tolist() == [[0, 1, 2, 3] + [3] * 12]
    assert found.rest_perm.tolist() == list(range(64, 80))


def test_columns_of_fewer_entries_stay_behind(xp):
    """Columns 0 to 15 in 8 rows each, columns 16 to 63 in one: a slab for those, none for these."""
    row = np.concatenate([np.repeat(np.arange(8), 16), np.arange(48) % 16])
    col = np.concatenate([np.tile(np.arange(16), 8), np.arange(16, 64)])
    A = COO(row, col, shape=(16, 64)).tocsr()
    found = split_on(xp, A, (16, 8), replace(FREE, slab=80, window=0, again=8))
    assert found.columns.tolist() == [list(range(16))]
    assert found.taken == 128


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (40, 7)])
def test_without_entries_nothing_is_taken(xp, shape):
    A = CSR(np.zeros(shape[0] + 1, np.int64), np.zeros(0, np.int64), shape=shape)
    assert split_on(xp, A, (16, 16), ALL).share == 0


def test_a_sample_that_saves_nothing_ends_it(xp, monkeypatch):
    """Windows of columns of one entry: all of them are the same, so that a few tell."""
    costs = replace(FREE, slab=80)
    A = CSR(np.arange(337), np.arange(336), shape=(336, 336))
    assert split_on(xp, A, (16, 16), costs).share == 0
    monkeypatch.setattr(split, "SAMPLE", 3)
    choose = Mock(side_effect=split._choose)
    monkeypatch.setattr(split, "_choose", choose)
    assert split_on(xp, A, (16, 16), costs).share == 0
    assert {len(call.args[0]) for call in choose.call_args_list} <= {3}


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("period", [2, 3, 4, 5, 6])
def test_what_repeats_itself_does_not_hide_from_a_sample(xp, monkeypatch, period, first):
    """One window of ``period`` pays, the others hold next to nothing."""
    window, every = np.arange(first % period, 600, period), np.arange(600)
    inside = np.repeat(np.arange(16), 16)
    row = np.concatenate([(16 * window[:, None] + inside).ravel(), 16 * every])
    col = np.concatenate([np.tile(np.arange(16), 16 * len(window)), np.full(600, 40)])
    A = COO(row, col, shape=(9600, 41)).tocsr()
    monkeypatch.setattr(split, "SAMPLE", 20)
    found = split_on(xp, A, (16, 16), replace(FREE, again=0, window=0))
    assert found.taken >= 256 * len(window)


@pytest.mark.parametrize("sample", [1, 2, 3, 7])
def test_a_sample_that_pays_changes_nothing(xp, monkeypatch, sample):
    A = CSR(np.arange(0, 1601, 10), np.tile(np.arange(10), 160), shape=(160, 10))
    whole = split_on(xp, A, (16, 16), FREE)
    assert whole.share == 1
    monkeypatch.setattr(split, "SAMPLE", sample)
    same(split_on(xp, A, (16, 16), FREE), whole)


@pytest.mark.parametrize("step", [1, 2, 3, 50])
def test_a_sample_has_the_figures_of_its_windows(xp, step):
    A = skewed(2, (300, 100), 2000)
    expected = tile_slabs.count_columns(A.tosgt((16, 8))).figures[::step]
    assert np.array_equal(tile_slabs.figures(put(xp, A).tosgt((16, 8)), step), expected)


def test_what_columns_hold(xp):
    """Of 1, 2, 3, 4 and 5 entries, and one cell twice; the second window is empty."""
    lengths = np.array([1, 2, 3, 4, 5])
    col = np.repeat(np.arange(5), lengths)
    row = np.arange(15) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    A = COO(np.append(row, 0), np.append(col, 2), shape=(40, 5)).tocsr()
    counted = tile_slabs.count_columns(put(xp, A).tosgt((16, 4)))
    assert counted.figures.tolist() == [[1, 1, 1, 2, 9], [0] * 5, [0] * 5]
    assert host(counted.counts).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert host(counted.begins).tolist() == [0, 1, 3, 7, 11, 16, 16, 16, 16]


def test_columns_without_entries_hold_nothing(xp):
    """A format allows them, and so whole tiles and windows of them."""
    tiles = {
        "window_ptr": np.array([0, 2, 4, 4, 6]),
        "columns": np.array([[0, 3], [4, -1], [1, 2], [3, 4], [0, 2], [3, -1]]),
        "tile_ptr": np.array([0, 0, 0, 2, 2, 2, 3]),
        "slots": np.array([3, 1, 0], np.uint8),
        "order": np.array([1, 0, 2]),
    }
    tiles = {name: xp.asarray(one) for name, one in tiles.items()}
    A = SGT(**tiles, shape=(64, 5), tile=(16, 2), validate="cheap")
    counted = tile_slabs.count_columns(A)
    assert counted.figures.tolist() == [[0] * 5, [0, 1, 0, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]
    assert host(counted.counts).tolist() == [0] * 5 + [2] + [0] * 4 + [1, 0]
    assert host(counted.begins).tolist() == [0] * 6 + [2] * 5 + [3, 3]


def choice(figures: list[list[int]], costs: Costs, height: int) -> list[int] | None:
    """What columns of each window must hold, 0 for none taken; by loops, in whole numbers."""
    windows = []
    for *columns, many in figures:
        entries = [n * one for n, one in enumerate(columns[:-1], 1)] + [many]
        slabs = [-(-sum(columns[n:]) // 16) for n in range(len(columns))]
        windows.append([(0, 0), *((slab, sum(entries[n:])) for n, slab in enumerate(slabs))])
    scale, rows = height / 64, costs.row * height

    def cost(slabs: int, taken: int, everything: int) -> float:
        return scale * (costs.slab * slabs + costs.window) + costs.left * (everything - taken)

    least, alone, apart, whole = [], 0, costs.launch, 0
    for options in windows:
        everything = options[1][1]
        prices = [
            cost(*one, everything) + costs.again * scale + rows
            if one[0]
            else costs.left * everything + rows
            for one in options
        ]
        prices[0] = everything + rows
        least.append(prices.index(min(prices)))
        alone, apart = alone + prices[0], apart + min(prices)
        whole += cost(*options[1], everything)
    if whole <= apart:
        least, apart = [1] * len(windows), whole
    given = [options[n] for options, n in zip(windows, least, strict=True)]
    part = costs.longest_part(sum(slabs for slabs, _ in given))
    pieces = [-(-slabs // part) for slabs, _ in given if slabs > part]
    apart += costs.launch + costs.piece * scale * sum(pieces)
    saves = costs.gain * (alone - apart) >= (costs.gain - 1) * alone
    return least if saves and sum(taken for _, taken in given) else None


@given(
    columns=st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=9),
    many=st.integers(4, 9),
    height=st.sampled_from([64, 128]),
    costs=st.builds(
        Costs,
        slab=st.integers(0, 64),
        window=st.integers(0, 64),
        row=st.integers(0, 1),
        left=st.integers(0, 2),
        again=st.integers(0, 9),
        piece=st.integers(0, 9),
        launch=st.integers(0, 9),
        gain=st.sampled_from([0, 1, 1.25]),
        part=st.integers(1, 3),
    ),
)
def test_what_is_chosen_is_the_first_of_the_cheapest(columns, many, height, costs):
    figures = [[*one, many * one[-1]] for one in columns]
    found = split._choose(np.array(figures), costs, height)
    expected = choice(figures, costs, height)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.least.tolist() == [n or tile_slabs.NEVER for n in expected]
        assert (found.slab_ptr[-1], found.entry_ptr[-1]) == (found.n_slabs, found.taken)


@pytest.mark.parametrize(
    "bad",
    [
        *({"slab": np.nan}, {"gain": np.inf}, {"row": -1}, {"window": "many"}, {"launch": None}),
        *({"part": 0}, {"part": 2.0}, {"part": True}, {"part": 2**31}, {"slab": 10**400}),
        *({"slab": np.complex64(1)}, {"slab": np.float16(-1)}, {"slab": np.bool_(1)}),
    ],
    ids=str,
)
def test_costs_are_checked(bad):
    with pytest.raises(DtypeError, match=f"^{next(iter(bad))} is .*: give a"):
        Costs(**bad)


def test_numbers_of_numpy_are_numbers():
    assert Costs(slab=np.float16(3), part=np.int64(2)) == Costs(slab=3, part=2)


@pytest.mark.parametrize("bad", ["x", 3, {}, np.zeros(3), Costs], ids=str)
def test_a_split_goes_by_costs(bad):
    A = CSR(np.arange(5), np.arange(4), shape=(4, 4)).tosgt((16, 16))
    with pytest.raises(DtypeError, match=r"costs is a .*: give ops"):
        A.split(bad)
    assert A.split().places(4).size == 0


def test_every_kind_of_product_has_measured_costs():
    for op, itemsize, weighted in product(("spmm", "sddmm"), (2, 4), (False, True)):
        if (op, weighted) == ("sddmm", True):
            continue  # it reads no values
        found = [tile_costs.measured(op, itemsize, weighted, feat) for feat in (1, 7, 64, 10**6)]
        assert found[:2] == [None, None]
        assert found[2] is found[3] is not None
