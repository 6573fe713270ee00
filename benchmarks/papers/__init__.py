"""What each paper claims for its users, measured: ``python -m benchmarks papers maxk``.

Without a name all five run.  Labelled data sets are read from ``--data`` where they are there, in
this project's ``.npz``, torch-geometric's folders or OGB's; the others are planted: graphs of the
papers' sizes whose labels must be learned from neighbours.
"""

from importlib import import_module

#: Papers, whose modules hold a ``PAPER``.
NAMES = ("maxk", "es_spmm", "tcgnn", "fusegnn", "sensei")


def main(argv: list[str]) -> int:
    """Run the tables of the paper named first, or of all; 1 if a result was wrong."""
    names, options = (argv[:1], argv[1:]) if argv and argv[0] in NAMES else (NAMES, argv)
    return max([import_module(f"benchmarks.papers.{name}").PAPER(options) for name in names])


BENCHMARKS = {"papers": main}
