"""Summaries against dense oracles, and the table of the documentation."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from op_cases import put

from sparsefmt import COO, CSR, DtypeError, ShapeError
from sparsefmt.generate import banded, star
from sparsefmt.stats import summarize
from sparsefmt.testing import cbsr, coo, csr, sgt

REPOSITORY = Path(__file__).resolve().parents[2]
any_format = st.one_of(csr(hubs=True), coo(), csr().map(CSR.tocsc), sgt(), cbsr())
NOTHING = CSR(np.zeros(1, np.int32), np.zeros(0, np.int32), shape=(0, 0))
NO_ROWS = CSR(np.zeros(1, np.int32), np.zeros(0, np.int32), shape=(0, 3))


def counts(A):
    """Stored entries in each cell, as a dense matrix."""
    cells = np.zeros(A.shape, np.int64)
    coo = A.tocoo()
    np.add.at(cells, (coo.row, coo.col), 1)
    return cells


@given(A=any_format)
@example(A=NOTHING)
@example(A=NO_ROWS)
def test_degrees_agree_with_counting(xp, A):
    stats = summarize(put(xp, A))
    for found, axis in ((stats.in_degree, 1), (stats.out_degree, 0)):
        degrees = counts(A).sum(axis=axis)
        if not len(degrees):
            assert (found.max, found.mean, found.empty) == (0, 0.0, 0)
            continue
        assert (found.min, found.max) == (degrees.min(), degrees.max())
        assert found.mean == pytest.approx(degrees.mean())
        assert found.median == np.median(degrees)
        assert found.std == pytest.approx(degrees.std())
        assert found.empty == (degrees == 0).sum()
        if A.nnz:  # half the mean difference
            expected = abs(degrees[:, None] - degrees).mean() / (2 * degrees.mean())
            assert found.gini == pytest.approx(expected, abs=1e-12)
    assert stats.empty_rows == stats.in_degree.empty
    assert stats.empty_cols == stats.out_degree.empty


def test_the_top_percent_is_rounded_up(xp):
    stats = summarize(put(xp, star(150)))
    assert stats.in_degree.top_share == pytest.approx((149 + 1) / 298)
    assert summarize(put(xp, banded(99, 0))).in_degree.top_share == pytest.approx(1 / 99)


@given(A=any_format)
@example(A=NOTHING)
def test_structure_agrees_with_a_dense_oracle(xp, A):
    stats, cells = summarize(put(xp, A)), counts(A)
    assert (stats.n_rows, stats.n_cols, stats.nnz) == (*A.shape, A.nnz)
    assert stats.density == pytest.approx((cells > 0).mean() if cells.size else 0.0)
    assert stats.duplicates == A.nnz - np.count_nonzero(cells)
    assert stats.self_loops == np.trace(cells)
    i, j = np.indices(A.shape)
    assert stats.bandwidth == pytest.approx((abs(i - j) * cells).sum() / max(A.nnz, 1))
    square = A.shape[0] == A.shape[1]
    assert stats.is_symmetric is (np.array_equal(cells > 0, cells.T > 0) if square else None)


@given(A=csr(rectangular=False, unsorted=True))
def test_what_is_made_symmetric_is_symmetric(xp, A):
    both = A.tocoo()
    row, col = np.concatenate([both.row, both.col]), np.concatenate([both.col, both.row])
    assert summarize(put(xp, COO(row, col, shape=A.shape))).is_symmetric


@given(A=csr(max_side=20))
def test_tiles_and_bytes_are_those_of_the_formats(xp, A):
    A = put(xp, A)
    stats = summarize(A, tiles=[(4, 2), (16, 8)])
    for found, tile in zip(stats.tiles, [(4, 2), (16, 8)], strict=True):
        B = A.tosgt(tile)
        assert found.tile == tile
        assert (found.tile_count, found.dense_tile_count) == (B.tile_count, B.dense_tile_count)
        assert (found.density, found.reduction) == (B.tile_density, B.reduction)
        assert found.nbytes == B.nbytes == stats.nbytes[f"sgt {tile[0]}x{tile[1]}"]
    for name in ("coo", "csr", "csc"):
        assert stats.nbytes[name] == A.asformat(name).nbytes


def test_nothing_is_computed_before_it_is_asked_for(xp):
    stats = summarize(put(xp, banded(50, 2)))
    assert set(vars(stats)) == {"matrix", "tile_shapes"}
    tiles = stats.tiles
    assert stats.tiles is tiles
    assert "is_symmetric" not in vars(stats)


def test_a_summary_reads_well(xp):
    text = str(summarize(put(xp, banded(1000, 1).with_data(np.ones(2998)))))
    assert "1000 x 1000, 2998 entries, density 3.00e-03, symmetric" in text
    assert "rows      min 2, mean 3.00, median 3, max 3" in text
    assert "1000 self loops, 0 duplicates, mean |i - j| 0.7" in text
    assert "16x8      " in text
    assert "KiB" in text
    assert "rectangular" in str(summarize(put(xp, NO_ROWS)))
    assert "matrix" not in repr(summarize(put(xp, NOTHING)))


def test_a_table_has_one_line_a_graph_and_the_mean(monkeypatch, xp):
    monkeypatch.syspath_prepend(str(REPOSITORY))
    tile_table = importlib.import_module("benchmarks.formats").tile_table
    graphs = [("band", put(xp, banded(64, 1))), ("star", put(xp, star(64)))]
    lines = tile_table(graphs, tiles=[(8, 8)]).splitlines()
    assert lines[0] == "| graph | rows | entries | 8x8 saved | 8x8 density |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| band", "| star", "| **mean**"]
    assert lines[2].startswith("| band | 64 | 190 | ")
    assert len(tile_table([]).splitlines()) == 2


def test_the_documentation_holds_the_table_of_the_real_graphs(
    shared_data, monkeypatch, tmp_path, capsys
):
    monkeypatch.syspath_prepend(str(REPOSITORY))
    tiles = importlib.import_module("benchmarks.formats")
    page = tmp_path / "formats.md"
    page.write_text(f"before\n{tiles.BEGIN}old\n{tiles.END}after\n", encoding="utf-8")
    monkeypatch.setattr(tiles, "PAGE", page)
    assert tiles.tiles([str(shared_data)]) == 0
    table = capsys.readouterr().out
    text = f"before\n{tiles.BEGIN}\n{table}\n{tiles.END}after\n"
    assert page.read_text(encoding="utf-8") == text
    assert table in (REPOSITORY / "docs" / "formats.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("found", ["", "BEGIN", "END", "END BEGIN"])
def test_a_page_without_both_markers_is_left_alone(monkeypatch, tmp_path, capsys, found):
    monkeypatch.syspath_prepend(str(REPOSITORY))
    tiles = importlib.import_module("benchmarks.formats")
    with pytest.raises(SystemExit, match="2"):
        tiles.tiles([str(tmp_path)])
    assert "no .npz file" in capsys.readouterr().err
    page = tmp_path / "formats.md"
    text = "before\n" + "".join(getattr(tiles, name) for name in found.split()) + "after\n"
    page.write_text(text, encoding="utf-8")
    monkeypatch.setattr(tiles, "PAGE", page)
    A = banded(8, 1).tocsr()
    np.savez(tmp_path / "band.npz", indptr=A.indptr, indices=A.indices, shape=np.array(A.shape))
    with pytest.raises(SystemExit, match=r"formats.md lacks the lines .*, in this order: put"):
        tiles.tiles([str(tmp_path)])
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: summarize(np.eye(3)), DtypeError, "A is a ndarray: give a sparsefmt format"),
        (lambda: summarize(NOTHING, tiles=[(0, 8)]), ShapeError, r"tile is \(0, 8\)"),
        (lambda: summarize(NOTHING, tiles=[8]), ShapeError, "tile is 8: give two integers"),
        (lambda: summarize(NOTHING, tiles=5), ShapeError, "tiles is 5: give a sequence of"),
        (lambda: summarize(NOTHING, tiles=None), ShapeError, r"tiles is None: .* \[\(16, 8\)\]"),
        (lambda: summarize(NOTHING, tiles=["ab"]), ShapeError, "tile is 'ab'"),
    ],
)
def test_what_cannot_be_summed_up_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (1 << 50, "1024.00 TiB")]
)
def test_bytes_are_written_as_people_read_them(count, text):
    assert importlib.import_module("sparsefmt.stats")._bytes(count) == text
