"""``torchrun -m sparsefmt.distributed.train DIR``: train on a folder of parts, a rank a process.

Without torchrun one process has all parts.  Exit codes: 0, done; 1, a rank failed or is gone; 2,
bad options or input, or ranks that differ.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import SparseFmtError
from .options import MODELS, Options

#: Largest count of anything.
_MOST = 2**31 - 1
OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with these arguments (``sys.argv``'s by default); the exit code."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if given["resume"] and given["checkpoint"] is None:
        parser.error("--resume goes on from a checkpoint: give --checkpoint FILE too")
    folder, device, timeout = (given.pop(name) for name in ("folder", "device", "timeout"))
    # Pages of its C++ frames, where a rank is gone, would bury the sentence that names it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from .running import run

        run(folder, device, timeout, Options(**given))
    except (SparseFmtError, MemoryError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        what = getattr(error, "strerror", None) or error
        print("sparsefmt: error:", " ".join(f"{where}{what}".split()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparsefmt.distributed.train",
        description="Train a graph neural network on a folder of sparsefmt partition.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add, default = parser.add_argument, Options()
    add("folder", metavar="DIR", type=Path, help="with features and labels")
    add("--model", choices=MODELS, default=default.model)
    add("--hidden", type=_count, default=default.hidden, help="width of hidden layers")
    add("--layers", type=_count, default=default.layers)
    add("--heads", type=_count, default=default.heads, help="of gat's hidden layers")
    add("--k", type=_count, default=default.k, help="features that maxk keeps")
    add("--epochs", type=_count, default=default.epochs, help="in all, with those resumed")
    add("--lr", type=_amount, default=default.lr, help="of Adam")
    add("--weight-decay", type=_amount, default=default.weight_decay)
    add(
        "--dropout",
        type=_share,
        default=default.dropout,
        help="between layers; what it drops depends on the number of ranks",
    )
    add("--seed", type=_seed, default=default.seed)
    add("--dtype", choices=("float32", "float64"), default=default.dtype)
    add("--checkpoint", type=Path, metavar="FILE", help="to write every so many epochs")
    add("--every", type=_count, default=default.every, metavar="N")
    add("--resume", action="store_true", help="go on from the checkpoint, if it is there")
    add(
        "--timeout",
        type=_seconds,
        default=60.0,
        help="seconds without a sign of a rank, or without its progress, until all end",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1 to {_MOST}")
    return int(text)


def _seed(text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
    if not -(2**63) <= number < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not from -2^63 to 2^63 - 1")
    return number


def _amount(text: str) -> float:
    return _between(text, 0.0, 1e6)


def _share(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _seconds(text: str) -> float:
    return _between(text, 5.0, 86400.0)


def _between(text: str, low: float, high: float) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not low <= number <= high:
        raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
    return number


if __name__ == "__main__":
    sys.exit(main())
