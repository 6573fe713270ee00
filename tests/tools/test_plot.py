"""Pictures: what they count, that nothing is cut off, and what they refuse."""

import numpy as np
import pytest
from matplotlib.text import Text

from sparsefmt import COO, UnsupportedError, plot
from sparsefmt.stats import summarize


def random_coo(n_rows: int, n_cols: int, nnz: int, seed: int = 0) -> COO:
    rng = np.random.default_rng(seed)
    row, col = rng.integers(0, [[n_rows], [n_cols]], (2, nnz))
    return COO(row.astype(np.int32), col.astype(np.int32), shape=(n_rows, n_cols))


def star(n: int) -> COO:
    leaves, hub = np.arange(1, n, dtype=np.int32), np.zeros(n - 1, np.int32)
    return COO(hub, leaves, shape=(n, n))


GRAPHS = {
    "no cells": COO([], [], shape=(0, 0)),
    "no entries": COO([], [], shape=(5, 7)),
    "one entry": COO([0], [0], shape=(1, 1)),
    "small": random_coo(12, 12, 30),
    "star": star(3000),
    "wide": random_coo(4, 6000, 500),
    "tall": random_coo(6000, 3, 500),
    "many duplicates": COO(np.zeros(500, np.int32), np.zeros(500, np.int32), shape=(2, 2)),
    "large": random_coo(20_000, 20_000, 60_000),
}


@pytest.fixture(params=GRAPHS)
def graph(request) -> COO:
    return GRAPHS[request.param]


def is_cut_off(fig) -> bool:
    """Whether anything reaches over the edge of the figure."""
    fig.canvas.draw()
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    slack = 0.01
    return min(box.x0, box.y0) < -slack or box.x1 > width + slack or box.y1 > height + slack


def texts(fig) -> str:
    return "\n".join(text.get_text() for text in fig.findobj(Text))


def test_density_image_counts_every_entry_once(graph):
    for max_cells in (1, 7, 360):
        image = plot.density_image(graph, max_cells)
        assert image.counts.sum() == graph.nnz
        assert max(image.counts.shape) <= max_cells


def test_density_image_puts_an_entry_in_the_cell_of_its_row_and_column():
    A = random_coo(9, 13, 40)
    assert np.array_equal(plot.density_image(A).counts, A.toarray())
    A = COO([0, 999, 500], [0, 1999, 1000], shape=(1000, 2000))
    counts = plot.density_image(A, max_cells=4).counts
    assert np.array_equal(np.argwhere(counts), [[0, 0], [2, 2], [3, 3]])


def test_survival_is_the_share_of_vertices_of_at_least_that_degree():
    d, share = plot.survival(np.array([3, 0, 1, 1]))
    assert d.tolist() == [0, 1, 3]
    assert share.tolist() == [1.0, 0.75, 0.25]


@pytest.mark.parametrize("tile", [(1, 1), (8, 8), (16, 8), (5, 3)])
def test_tiles_agree_with_the_statistics(graph, tile):
    (expected,) = summarize(graph, tiles=[tile]).tiles
    before, after = plot.uncondensed_tiles(graph, tile), plot.condensed_tiles(graph, tile)
    assert (len(before), len(after)) == (expected.dense_tile_count, expected.tile_count)
    assert before.sum() == after.sum() == graph.nnz


def test_nothing_of_a_picture_is_cut_off(graph):
    fig = plot.draw(graph, title="" if graph.nnz < 10 else "graph.npz")
    assert not is_cut_off(fig)
    assert f"{graph.nnz:,} stored entries" in texts(fig)


def test_degrees_that_agree_are_drawn_once():
    ring = np.arange(10, dtype=np.int32)
    fig = plot.draw(COO(ring, np.roll(ring, 1), shape=(10, 10)))
    assert "in-degree = out-degree" in texts(fig)
    fig = plot.draw(star(10))
    assert "in-degree: mean 0.9, max 9, 9 of degree 0" in texts(fig)
    assert "out-degree: mean 0.9, max 1, 1 of degree 0" in texts(fig)
    assert texts(plot.draw(GRAPHS["no entries"])).count("no stored entries") == 4


@pytest.mark.parametrize(
    "title", ["x" * 300, "$\\frac{a", "\u0433\u0440\u0430\u0444.npz", "a_b^{c", "two\nlines"]
)
def test_any_title_is_drawn_as_it_is(title):
    fig = plot.draw(GRAPHS["one entry"], title=title)
    assert not is_cut_off(fig)
    assert title[:28] in texts(fig)


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_signs_that_the_font_lacks_do_not_stop_a_picture(tmp_path, suffix):
    path = tmp_path / f"picture{suffix}"
    plot.save(plot.draw(GRAPHS["one entry"], title="\u56fe.npz"), path)
    assert path.stat().st_size > 2000


@pytest.mark.parametrize("name", ["a.npz", "a.mtx", "a", "a.jpg", ".png", "png"])
def test_only_pictures_are_written(tmp_path, name):
    with pytest.raises(
        UnsupportedError, match=r"is no picture's name: end it in \.png, \.pdf, \.svg"
    ):
        plot.save(plot.draw(GRAPHS["one entry"]), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_every_format_gives_the_same_picture_large_enough_to_read(tmp_path):
    A = random_coo(50, 40, 200).tocsr()
    pictures = set()
    for name in ("coo", "csr", "csc", "sgt"):
        plot.save(plot.draw(A.asformat(name)), tmp_path / f"{name}.png")
        pictures.add((tmp_path / f"{name}.png").read_bytes())
    assert len(pictures) == 1
    (picture,) = pictures
    assert picture[1:4] == b"PNG"
    assert [int.from_bytes(picture[i : i + 4], "big") for i in (16, 20)] == [1800, 1440]


def test_demo_picture_shows_times_and_bytes(tmp_path):
    formats = ("coo", "csr")
    fig = plot.draw_demo(
        GRAPHS["large"],
        title="a graph",
        note="a machine",
        convert_ms={("coo", "csr"): 1.25, ("csr", "coo"): 0.0},
        spmm_ms=dict(zip(formats, (3.5, 0.75), strict=True)),
        nbytes=dict(zip(formats, (3 << 20, 2 << 20), strict=True)),
        features=64,
    )
    shown = texts(fig)
    for text in ("a machine", "1.25", "3.5", "0.75", "CSR", "MiB"):
        assert text in shown
    assert not is_cut_off(fig)
