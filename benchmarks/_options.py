"""The options that benchmarks share."""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt._arrays import parse_device

from ._harness import RESULTS


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of sections takes."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graphs", type=names, help="of benchmarks/_graphs.py, or paths")
    parser.add_argument("--widths", type=widths, help="of features, such as 64,128")
    quick = "5 runs of each, none with empty L2, kept apart from the results"
    parser.add_argument("--quick", action=_Quick, nargs=0, default=False, help=quick)
    parser.add_argument("--threads", type=positive, default=2, help="on the CPU")
    parser.add_argument("--out", type=Path, help="folder of the JSON, by default results/")


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The options; ``DeviceError`` if the device is not there."""
    options = parser.parse_args(argv)
    parse_device(options.device)
    return options


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
