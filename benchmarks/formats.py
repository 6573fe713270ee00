"""Conversions against SciPy (CPU) and cupyx.scipy.sparse (GPU); tiles that condensing saves.

``convert`` is of a reddit-sized graph on a GPU, on the CPU of one of 5 million edges, weighted and
its entries in no order.  Every conversion is checked against the library's before it is timed.
``tiles [FOLDER]`` measures every ``.npz`` of a folder, by default that of the real graphs, and
writes the table between the markers of ``docs/formats.md``.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import COO, CSR
from sparsefmt.formats.arrays import namespace
from sparsefmt.formats.base import Format
from sparsefmt.stats import TILES, Tile, summarize

from . import _baselines, _graphs, _harness
from ._table import DATA, ROOT, Benchmark, Limit, Row, Section, markdown, write_block
from ._table import END as END

PAGE = ROOT / "docs" / "formats.md"
BEGIN = "<!-- begin: python -m benchmarks tiles -->\n"
#: Least speed-up over the library, and most milliseconds of a translation to tiles.
OVER, MOST_MS = {"cpu": 0.83, "cuda": 1.0}, {"cpu": 3000.0, "cuda": 120.0}
MOST_PEAK = 6.0  #: bytes of a translation over those of the structure


def convert(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every conversion with its baseline."""
    for name, structure in _graphs.loaded(options, ("reddit",)):
        coo = shuffled(_graphs.weighted(structure).tocoo())
        csr, theirs = coo.tocsr(), _baselines.scipy_sparse(coo.data)
        their_coo = theirs.coo_matrix((coo.data, coo.coords), shape=coo.shape)
        their_csr = theirs.csr_matrix((csr.data, csr.indices, csr.indptr), shape=csr.shape)
        their_coo.has_canonical_format = not options.cuda  # SciPy's sum over duplicates is left out
        tiles = structure.tosgt()
        pairs: dict[str, tuple[Any, Any]] = {
            "coo -> csr": (coo.tocsr, their_coo.tocsr),
            "csr -> csc": (csr.tocsc, their_csr.tocsc),
            "csr -> coo": (csr.tocoo, their_csr.tocoo),
            "csr -> csc, unweighted": (structure.tocsc, None),
            "csr -> sgt(16x8)": (structure.tosgt, None),
            "sgt(16x8) -> csr": (tiles.tocsr, None),
        }
        for case, (ours, other) in pairs.items():
            row: Row = {"case": f"{name}: {case}"} | differs(ours(), other and other(), structure)
            calls = {"ms": ours} | ({"their_ms": other} if other else {})
            row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
            if "-> sgt" in case:
                row |= {"tile_ms": row["ms"], "tiles": tiles.tile_count, "saved": tiles.reduction}
                if options.cuda:
                    row["peak"] = _harness.allocations(ours)[0] / structure.nbytes
            yield row


def shuffled(coo: COO) -> COO:
    """Return the entries in no order."""
    order = namespace(coo.row).argsort(_graphs.uniform(coo.row, (coo.nnz,), seed=2))
    return COO(coo.row[order], coo.col[order], coo.data[order], shape=coo.shape)


def differs(ours: Any, theirs: Any, structure: CSR) -> dict[str, str]:
    """Return ``wrong`` unless the result has the entries of theirs, or of the structure."""
    if theirs is None:
        same = ours.with_data(None).tocsr().sorted_indices() == structure
    else:
        names = ("row", "col", "data")
        if ours.format != "coo":
            theirs, names = theirs.copy(), ("indptr", "indices", "data")
            theirs.sort_indices()  # the entries of a row may stand in any order
            ours = ours.sorted_indices()
        pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
        same = all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
    return {} if same else {"wrong": "the entries are not those that they should be"}


CONVERT = Section(
    convert,
    (
        Limit("over_their", "each", least=lambda row: OVER[row["device"]], on=tuple(OVER)),
        Limit("tile_ms", "each", most=lambda row: MOST_MS[row["device"]], on=tuple(MOST_MS)),
        Limit("peak", "each", most=MOST_PEAK),
    ),
)


# The table of docs/formats.md


def tiles(argv: list[str]) -> int:
    """Measure the graphs of a folder and write the table into the page."""
    default = Path(os.environ.get("SPARSEFMT_DATA", DATA))
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiles", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="of .npz files")
    paths = sorted(parser.parse_args(argv).folder.glob("*.npz"))
    if not paths:
        parser.error("the folder holds no .npz file")
    table = tile_table(graphs(paths))
    write_block(PAGE, BEGIN, table)
    print(table, end="")
    return 0


def graphs(paths: list[Path]) -> Iterator[tuple[str, CSR]]:
    """Yield name and structure of each file, one in memory at a time."""
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            shape = tuple(file["shape"].tolist())
            yield path.stem, CSR(file["indptr"], file["indices"], shape=shape)


def tile_table(graphs: Iterable[tuple[str, Format]], *, tiles: Sequence[Tile] = TILES) -> str:
    """Write a Markdown table of the tiles that condensing saves, and their density, by graph.

    One line a graph, then the mean of the shares (TC-GNN, figure 7 reports 67%).
    """
    titles = [f"{tile[0]}x{tile[1]} {part}" for tile in tiles for part in ("saved", "density")]
    lines = [["graph", "rows", "entries", *titles], ["---", *["---:"] * (len(titles) + 2)]]
    shares = []
    for name, A in graphs:
        per_shape = summarize(A, tiles=tiles).tiles
        shares.append([share for stats in per_shape for share in (stats.reduction, stats.density)])
        lines.append([name, f"{A.n_rows:,}", f"{A.nnz:,}", *map("{:.1%}".format, shares[-1])])
    if shares:
        means = np.mean(shares, axis=0).tolist()
        lines.append(["**mean**", "", "", *map("{:.1%}".format, means)])
    return markdown(*lines)


BENCHMARKS = {"convert": Benchmark("convert", __doc__, {"table": CONVERT}), "tiles": tiles}
