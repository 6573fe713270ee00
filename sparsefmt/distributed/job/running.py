"""One rank of a training: it meets the others, connects, and trains while they are watched."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import SparseFmtError, UnsupportedError
from ..parts.cutting import version
from ..parts.files import check_ranks, read_partition
from .checkpoint import check_writable
from .meeting import Place, Store, below, meet, place_of
from .options import Options
from .training import Training, check_trainable
from .watch import FIRST, Watch


def run(folder: Path, device: str, timeout: float, options: Options) -> None:
    """Train on a folder of parts, as the rank that the environment says.

    Parameters
    ----------
    folder : Path
    device : "auto", "cpu" or "cuda"
        "auto" is a GPU where there is one: that of the process's number on its machine.
    timeout : float
        Seconds in which the others must come, and after which none that is gone or stands still
        is waited for.
    options : Options

    Raises
    ------
    RankError
        If the ranks cannot meet, or differ.  Once they have met, a fault ends the process: see
        ``Watch``.
    """
    place = place_of(os.environ)
    found: dict[str, Any] = {}
    facts = _facts(found, folder, device, options, place)
    place, store = meet(place, facts, timeout)
    partition, where = found["partition"], found["device"]
    try:
        with Watch(place, timeout) as watch:
            _connect(place, store, where, timeout)
            training = Training(partition, options, None, where)
            watch.progress = training.progress
            training.run(_say if place.rank == 0 else lambda line: None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(place: Place, store: Store, where: torch.device, timeout: float) -> None:
    """Make the process group; collectives wait longer than the watch, which names who is late."""
    if where.type == "cuda":
        torch.cuda.set_device(where)
        # NCCL would abort the process before the watch can say which rank is gone.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # Else an exchange waits until the product beside it has begun all of its blocks.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    dist.init_process_group(
        "nccl" if where.type == "cuda" else "gloo",
        store=below("group", store),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=2 * FIRST * timeout),
    )


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
        if options.checkpoint is not None and place.rank == 0:
            check_writable(options.checkpoint)
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
