"""What each paper claims for its users, measured: ``python -m benchmarks papers maxk``.

Without a name all five run.  Labelled data sets are read from ``--data`` where they are there, in
this project's ``.npz``, torch-geometric's folders or OGB's; the others are planted: graphs of the
papers' sizes whose labels are those of communities.
"""

from importlib import import_module
from pathlib import Path

from .._table import write_block

#: Papers, whose modules hold a ``PAPER``.
NAMES = ("maxk", "es_spmm", "tcgnn", "fusegnn", "sensei")


def main(argv: list[str]) -> int:
    """Run the tables of the paper named first, or of all; 1 if a result was wrong."""
    names, options = (argv[:1], argv[1:]) if argv and argv[0] in NAMES else (NAMES, argv)
    papers = [import_module(f"benchmarks.papers.{name}").PAPER for name in names]
    parsed = [paper.benchmark.parse(options) for paper in papers]  # before any of them runs
    return max([paper.run(each) for paper, each in zip(papers, parsed, strict=True)])


def write_claims(folder: Path, page: Path) -> None:
    """Write claims beside the figures of a GPU that a folder holds into the blocks of a page."""
    for name in NAMES:
        paper = import_module(f"benchmarks.papers.{name}").PAPER
        if rows := paper.rows(folder, "gpu"):
            table = paper.table(rows)
            write_block(page, f"<!-- begin: python -m benchmarks papers {name} -->\n", table)


BENCHMARKS = {"papers": main}
