"""The options that benchmarks share."""

import argparse
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsefmt.formats.arrays import parse_device

from ._harness import RESULTS, free

#: Section -> the module and its function that runs it and says whether all was right.
Sections = dict[str, tuple[str, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of sections takes."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graphs", type=names, help="of benchmarks/_graphs.py, or paths")
    parser.add_argument("--widths", type=widths, help="of features, such as 64,128")
    add_results_options(parser, "5 runs of each, none with empty L2")
    parser.add_argument("--threads", type=positive, default=2, help="on the CPU")


def add_results_options(parser: argparse.ArgumentParser, quick: str) -> None:
    """Where results go, and what ``--quick`` does beside keeping its own apart."""
    kept = f"{quick}, kept apart from the results"
    parser.add_argument("--quick", action=_Quick, nargs=0, default=False, help=kept)
    parser.add_argument("--out", type=Path, help="folder of the JSON, by default results/")


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The options; ``DeviceError`` if the device is not there."""
    options = parser.parse_args(argv)
    parse_device(options.device)
    return options


def run(sections: Sections, options: argparse.Namespace) -> int:
    """Run the sections that ``options`` names; 1 if a result was wrong."""
    right = True
    for name in options.sections:
        module, function = sections[name]
        right &= getattr(import_module(f".{module}", __package__), function)(options)
        free()
    return 0 if right else 1


class _Quick(argparse.Action):
    """Sets the flag, and a folder of its own unless one is given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any
    ) -> None:
        namespace.quick = True
        namespace.out = namespace.out or RESULTS / "quick"


def positive(text: str) -> int:
    """A number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def widths(text: str) -> tuple[int, ...]:
    """Positive numbers with commas."""
    return tuple(map(positive, text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """The names of a list with commas."""
    return tuple(text.split(","))


def some_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Known names with commas."""

    def split(text: str) -> tuple[str, ...]:
        unknown = [name for name in names(text) if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return names(text)

    return split
