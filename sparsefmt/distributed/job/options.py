"""Options of a training, and its command line.  Nothing here needs torch."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Largest count of anything.
_MOST = 2**31 - 1
MODELS = ("gcn", "sage", "gat", "maxk")


@dataclass(frozen=True)
class Options:
    """Options of a training."""

    model: str = "gcn"
    hidden: int = 256
    layers: int = 3
    heads: int = 4  #: of gat's hidden layers
    k: int = 32  #: of maxk: features of each vertex that a layer keeps
    epochs: int = 100
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.5
    seed: int = 0
    dtype: str = "float32"
    checkpoint: Path | None = None
    every: int = 10
    resume: bool = False

    def shape(self) -> dict[str, Any]:
        """Return the options that a checkpoint must have alike."""
        names = ["model", "hidden", "layers", "seed", "dtype"]
        names += [name for name, of in (("heads", "gat"), ("k", "maxk")) if self.model == of]
        return {name: asdict(self)[name] for name in names}


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, whose defaults are those of ``Options``."""
    result = argparse.ArgumentParser(
        prog="sparsefmt.distributed.train",
        description="Train a graph neural network on a folder of sparsefmt partition.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
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
    add("--seed", type=_between(-(2**63), 2**63 - 1, "-2^63 to 2^63 - 1"))
    add("--dtype", choices=("float32", "float64"))
    add("--checkpoint", type=Path, metavar="FILE", help="to write every so many epochs")
    add("--every", type=_count, metavar="N")
    add("--resume", action="store_true", help="go on from the checkpoint, if it is there")
    wait = "seconds without a sign of a rank, or without its progress, until all end"
    add("--timeout", type=_between(5.0, 86400.0), default=60.0, help=wait)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    result.set_defaults(**vars(Options()))
    return result


def _count(text: str) -> int:
    """Read an integer of 1 or more."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1 to {_MOST}")
    return int(text)


def _between(low: float, high: float, span: str = "") -> Callable[[str], float]:
    """Return a function that reads a number from ``low`` to ``high``, an integer if they are."""
    kind, noun = (int, "integer") if isinstance(low, int) else (float, "number")

    def read(text: str) -> float:
        try:
            number = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no {noun}") from error
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {span or f'{low:g} to {high:g}'}")
        return number

    return read
