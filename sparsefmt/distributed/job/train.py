"""``torchrun -m sparsefmt.distributed.train DIR``: train on a folder of parts, a rank a process.

Without torchrun one process has all parts.  Exit codes: 0, done; 1, a rank failed or is gone; 2,
bad options or input, or ranks that differ.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...errors import SparseFmtError
from .options import MODELS, Options

#: Largest count of anything.
_MOST = 2**31 - 1
OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a training with these arguments, by default ``sys.argv``'s; return the exit code."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    if options["resume"] and options["checkpoint"] is None:
        parser.error("--resume goes on from a checkpoint: give --checkpoint FILE too")
    folder, device, timeout = (options.pop(name) for name in ("folder", "device", "timeout"))
    # Pages of its C++ frames, where a rank is gone, would bury the sentence that names it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from .launch import run

        run(folder, device, timeout, Options(**options))
    except (SparseFmtError, MemoryError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        what = getattr(error, "strerror", None) or error
        print("sparsefmt: error:", " ".join(f"{where}{what}".split()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, whose defaults are those of ``Options``."""
    parser = argparse.ArgumentParser(
        prog="sparsefmt.distributed.train",
        description="Train a graph neural network on a folder of sparsefmt partition.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="with features and labels")
    add("--model", choices=MODELS)
    add("--hidden", type=_count, help="width of hidden layers")
    add("--layers", type=_count)
    add("--heads", type=_count, help="of gat's hidden layers")
    add("--k", type=_count, help="features that maxk keeps")
    add("--epochs", type=_count, help="in all, with those resumed")
    add("--lr", type=_between(0.0, 1e6), help="of Adam")
    add("--weight-decay", type=_between(0.0, 1e6))
    dropped = "between layers; what it drops depends on the number of ranks"
    add("--dropout", type=_between(0.0, 1.0), help=dropped)
    add("--seed", type=_seed)
    add("--dtype", choices=("float32", "float64"))
    add("--checkpoint", type=Path, metavar="FILE", help="to write every so many epochs")
    add("--every", type=_count, metavar="N")
    add("--resume", action="store_true", help="go on from the checkpoint, if it is there")
    wait = "seconds without a sign of a rank, or without its progress, until all end"
    add("--timeout", type=_between(5.0, 86400.0), default=60.0, help=wait)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.set_defaults(**vars(Options()))
    return parser


def _count(text: str) -> int:
    """Read an integer of 1 or more."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1 to {_MOST}")
    return int(text)


def _seed(text: str) -> int:
    """Read a seed of torch."""
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not from -2^63 to 2^63 - 1")
    return number


def _between(low: float, high: float) -> Callable[[str], float]:
    """Return a function that reads a number from ``low`` to ``high``."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return number

    return read
