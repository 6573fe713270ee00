"""What each paper claims for its users, measured: ``python -m benchmarks papers maxk``."""

from importlib import import_module

#: Papers, whose modules hold a ``PAPER``.
NAMES = ("maxk",)


def main(argv: list[str]) -> int:
    """Run the tables of the paper named first, or of all; 1 if a result was wrong."""
    names, options = (argv[:1], argv[1:]) if argv and argv[0] in NAMES else (NAMES, argv)
    return max(import_module(f"benchmarks.papers.{name}").PAPER(options) for name in names)


BENCHMARKS = {"papers": main}
