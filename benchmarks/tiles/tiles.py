"""Tiles that condensing saves on real graphs: the table of ``docs/formats.md``.

``python -m benchmarks tiles [FOLDER]`` reads every ``.npz`` of the folder and writes the table
between the markers of that page.  Unless named, the folder is ``$SPARSEFMT_DATA``, or else
``../shared/data`` beside the checkout.
"""

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sparsefmt import CSR
from sparsefmt.formats.base import Format
from sparsefmt.stats import TILES, Tile, summarize

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "formats.md"
BEGIN = "<!-- begin: python -m benchmarks tiles -->\n"
END = "<!-- end -->\n"


def main(argv: list[str]) -> int:
    """Measure the graphs of a folder and write the table into the page."""
    default = Path(os.environ.get("SPARSEFMT_DATA", ROOT.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks tiles", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="of .npz files")
    paths = sorted(parser.parse_args(argv).folder.glob("*.npz"))
    if not paths:
        parser.error("the folder holds no .npz file")
    table = tile_table(graphs(paths))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(table, end="")
    return 0


def graphs(paths: list[Path]) -> Iterator[tuple[str, CSR]]:
    """Name and structure of each file, one in memory at a time."""
    for path in paths:
        with np.load(path, allow_pickle=False) as file:
            shape = tuple(file["shape"].tolist())
            yield path.stem, CSR(file["indptr"], file["indices"], shape=shape)


def with_table(page: str, table: str) -> str:
    """The page with the table between its markers; SystemExit if it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(
            f"{PAGE} lacks the lines {BEGIN.rstrip()} and {END.rstrip()}, in this order: "
            "put them where the table belongs."
        )
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def tile_table(graphs: Iterable[tuple[str, Format]], *, tiles: Sequence[Tile] = TILES) -> str:
    """Write a Markdown table of the tiles that condensing saves, and their density, by graph.

    Parameters
    ----------
    graphs : iterable of (name, matrix)
        Read in turn, so that a generator may read them from files.
    tiles : sequence of (height, width)

    Returns
    -------
    str
        One line a graph, then the mean of the shares (TC-GNN, figure 7 reports 67%).
    """
    titles = [f"{tile[0]}x{tile[1]} {part}" for tile in tiles for part in ("saved", "density")]
    lines = [
        _line(["graph", "rows", "entries", *titles]),
        _line(["---", *["---:"] * (len(titles) + 2)]),
    ]
    shares = []
    for name, A in graphs:
        per_shape = summarize(A, tiles=tiles).tiles
        shares.append([share for stats in per_shape for share in (stats.reduction, stats.density)])
        lines.append(
            _line([name, f"{A.n_rows:,}", f"{A.nnz:,}", *map("{:.1%}".format, shares[-1])])
        )
    if shares:
        means = np.mean(shares, axis=0).tolist()
        lines.append(_line(["**mean**", "", "", *map("{:.1%}".format, means)]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
