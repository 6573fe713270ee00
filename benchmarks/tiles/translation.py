"""What translation to tiles costs beside training with them, and the tiles that it saves."""

import argparse
from functools import partial
from typing import Any

import torch

from sparsefmt import CSR, SGT
from sparsefmt.ops import Costs
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _graphs, _harness
from .._baselines import Call
from .._harness import Target, geomean
from ..matmul.table import Operands
from .cases import STORAGE, Tiled, print_row, share_of, sources, tiles_of
from .training import FEATURES, GENERATED, OTHER_FEATURES, REAL, Training

#: Of a million entries or more.
LARGE = tuple(name for name, recipe in _graphs.PAPERS.items() if recipe.edges >= 1_000_000)
LARGE_REAL = ("tolokers", "dd", "fb_oklahoma97", "com_dblp", "ego_twitter")
EPOCHS, WIDTH = 200, 16
SHARE, LEAST_ENTRIES = 0.02, 1_000_000  #: of the epochs' time, at most, of larger graphs
SPLIT = Costs()  #: by which the split that is timed decides, and the product that checks it
PAPER_TILE = (16, 8)
COLUMNS = {
    "case": "<16",
    "paper_ms": "8.3f",
    "tiles_ms": "8.3f",
    "split_ms": "8.3f",
    "both_ms": "8.3f",
    "epoch_ms": "8.3f",
    "percent": "7.3f",
    "percent_both": "12.3f",
    "error": "8.1e",
}
SAVED_COLUMNS = {
    "case": "<18",
    "reduction": "9.3f",
    "density": "7.3f",
    "per_column_16": "13.2f",
    "per_column_64": "13.2f",
    "share": "6.3f",
}


def translation(options: argparse.Namespace) -> bool:
    """SGT with TC-GNN's tiles and ours, the split, and epochs of a GCN prepared with ours."""
    _harness.print_head(f"translation beside {EPOCHS} epochs of a GCN in TF32", COLUMNS)
    rows = []
    torch.set_float32_matmul_precision("high")
    for name, source in sources(options, LARGE, LARGE_REAL):
        graph = _graphs.load(source)
        feat = FEATURES.get(name, OTHER_FEATURES)
        row = {"case": name, "entries": graph.nnz, "feat": feat}
        rows.append(row | _translated(graph, feat, quick=options.quick))
        _harness.print_row(rows[-1], COLUMNS)
        del graph
        _harness.free()
    torch.set_float32_matmul_precision("highest")
    return _harness.keep("tcgnn", "translation", rows, judge, cuda=True, folder=options.out)


def _translated(graph: CSR, feat: int, *, quick: bool) -> dict[str, Any]:
    """Every call makes a new SGT; ``both_ms`` is with the transpose's, which gradients go by."""
    operands = Operands.of(graph, WIDTH, STORAGE["tf32"])
    row = Tiled.of(tiles_of(graph), operands, "tf32", costs=SPLIT).checked()
    del operands
    if "wrong" in row:
        return row
    transposed = graph.tocsc().T
    ways: list[Call] = [
        lambda: graph.tosgt(PAPER_TILE),
        lambda: graph.tosgt(MMA_TILE),
        partial(_split, graph),
        partial(_split, transposed),
    ]
    runs, warmups = (3, 1) if quick else (7, 2)
    paper, tiles, both, back = _harness.medians(ways, cuda=True, runs=runs, warmups=warmups)
    row |= {"paper_ms": paper, "tiles_ms": tiles, "split_ms": max(both - tiles, 0.0)}
    row |= {"translated_ms": both, "both_ms": both + back}
    epoch = Training(graph, "GCN", feat).epoch("ours")
    runs, warmups = (5, 2) if quick else (10, 3)
    row["epoch_ms"] = _harness.medians([epoch], cuda=True, runs=runs, warmups=warmups)[0]
    whole = EPOCHS * row["epoch_ms"]
    return row | {"percent": 100 * both / whole, "percent_both": 100 * row["both_ms"] / whole}


def _split(graph: CSR) -> SGT:
    tiles = graph.tosgt(MMA_TILE)
    tiles.split(SPLIT)
    return tiles


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The largest share of the epochs, without and with the transpose's tiles.

    The limit holds for large graphs; where none was measured, the figures are to know.
    """
    found = []
    large = [row for row in rows if row["entries"] > LEAST_ENTRIES]
    limit = SHARE if large else None
    for key, what in (
        ("percent", "tiles and split"),
        ("percent_both", "tiles and split, of the transpose too"),
    ):
        most = max(large or rows, key=lambda row: row[key])
        name = f"{what}, largest share of {EPOCHS} epochs ({most['case']})"
        found.append(Target(name, most[key] / 100, limit, at_least=False))
    return found


def tiles_saved(options: argparse.Namespace) -> bool:
    """Tiles saved by condensing, entries of a condensed column, and those for matrix units.

    The latter as SpMM takes them in TF32 with 64 features and no values.
    """
    _harness.print_head(f"tiles of {PAPER_TILE[0]} x {PAPER_TILE[1]} saved", SAVED_COLUMNS)
    rows = []
    for name, source in sources(options, GENERATED, REAL):
        row = {"case": name} | _saved(_graphs.load(source))
        print_row(row, SAVED_COLUMNS)
        rows.append(row)
        _harness.free()
    return _harness.keep("tcgnn", "tiles_saved", rows, judge_saved, cuda=True, folder=options.out)


def _saved(graph: CSR) -> dict[str, Any]:
    """Refused unless the tiles give the graph back."""
    low, high = graph.tosgt(PAPER_TILE), graph.tosgt((64, 16))
    if low.tocsr() != graph or high.tocsr() != graph:
        return {"wrong": "the tiles do not hold the graph"}
    return {
        "entries": graph.nnz,
        "reduction": low.reduction,
        "density": low.tile_density,
        "per_column_16": per_column(low),
        "per_column_64": per_column(high),
        "share": share_of(tiles_of(graph), "spmm", "tf32", 64),
    }


def per_column(tiles: SGT) -> float:
    """Mean entries of a condensed column; 0 without any."""
    count = int((tiles.columns >= 0).sum())
    return tiles.nnz / count if count else 0.0


def judge_saved(rows: list[dict[str, Any]]) -> list[Target]:
    """Means over the graphs, to know; TC-GNN reports 67 % saved."""
    saved = [row["reduction"] for row in rows]
    return [
        Target(f"share of tiles saved, mean of {len(rows)}", sum(saved) / len(saved)),
        *(
            Target(f"entries of a column of {height} rows", geomean(row[key] for row in rows))
            for height, key in ((16, "per_column_16"), (64, "per_column_64"))
        ),
    ]
