"""``torchrun -m sparsefmt.distributed.train DIR``: train on a folder of parts, a rank a process.

Without torchrun one process has all parts.  Exit codes: 0, done; 1, a rank failed or is gone; 2,
bad options or input, or ranks that differ.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SparseFmtError, UnsupportedError
from .cutting import version
from .files import check_ranks, read_partition
from .meeting import Place, below, meet, place_of
from .training import MODELS, Options, Training, check_trainable
from .watch import Watch

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with these arguments (``sys.argv``'s by default); the exit code."""
    given = vars(_parser().parse_args(arguments))
    folder, device, timeout = (given.pop(name) for name in ("folder", "device", "timeout"))
    try:
        _run(folder, device, timeout, Options(**given))
    except (SparseFmtError, MemoryError, OSError) as error:
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        what = getattr(error, "strerror", None) or error
        print("sparsefmt: error:", " ".join(f"{where}{what}".split()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


def _run(folder: Path, device: str, timeout: float, options: Options) -> None:
    place = place_of(os.environ)
    found: dict[str, Any] = {}
    facts = _facts(found, folder, device, options, place)
    place, store = meet(place, facts, timeout)
    partition, where = found["partition"], found["device"]
    with Watch(place, timeout):
        if where.type == "cuda":
            torch.cuda.set_device(where)
            # NCCL would abort the process before the watch can say which rank is gone.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        dist.init_process_group(
            "nccl" if where.type == "cuda" else "gloo",
            store=below("group", store),
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=timeout),
        )
        training = Training(partition, options, None, where)
        training.run(_say if place.rank == 0 else lambda line: None)
    dist.destroy_process_group()


def _say(line: str) -> None:
    print(line, flush=True)


def _facts(
    found: dict[str, Any], folder: Path, device: str, options: Options, place: Place
) -> dict[str, str]:
    """Say what must be alike on all ranks, or why this one cannot take part."""
    facts = {"sparsefmt": version(), "torch": torch.__version__}
    try:
        partition = read_partition(folder)
        check_ranks(partition, place.ranks)
        check_trainable(partition, options)
        found.update(partition=partition, device=_device(device, place))
    except (SparseFmtError, OSError) as error:
        return {"fault": str(error)}
    facts["partition"] = partition.fingerprint
    facts["device"] = found["device"].type
    alike = [name for name in vars(options) if name != "checkpoint"]
    return facts | {f"--{name}": str(getattr(options, name)) for name in alike}


def _device(name: str, place: Place) -> torch.device:
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise UnsupportedError(
            f"there are {count} GPUs and this is process {place.local_rank} of its machine, "
            "counted from 0: start one process for each GPU, or give --device cpu."
        )
    return torch.device("cuda", place.local_rank)


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
    add("--dropout", type=_share, default=default.dropout, help="depends on the number of ranks")
    add("--seed", type=int, default=default.seed)
    add("--dtype", choices=("float32", "float64"), default=default.dtype)
    add("--checkpoint", type=Path, metavar="FILE", help="to write every so many epochs")
    add("--every", type=_count, default=default.every, metavar="N")
    add("--resume", action="store_true", help="go on from the checkpoint, if it is there")
    add("--timeout", type=_seconds, default=60.0, help="seconds without a rank until all end")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 1")
    return int(text)


def _amount(text: str) -> float:
    return _between(text, 0.0, 1e6)


def _share(text: str) -> float:
    return _between(text, 0.0, 1.0)


def _seconds(text: str) -> float:
    return _between(text, 1.0, 86400.0)


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
