"""The processes of a benchmark, one a GPU, and a process group for each number of ranks."""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(minutes=8)


@dataclass(frozen=True, eq=False)
class Ranks:
    """What one of the processes knows of all."""

    rank: int
    device: str  #: "cpu", or "cuda:<rank>"
    groups: dict[int, Any]  #: number of ranks -> the group of the first so many

    @property
    def cuda(self) -> bool:
        """Whether they compute on GPUs."""
        return self.device != "cpu"

    def has(self, count: int) -> bool:
        """Whether this process is one of the first so many."""
        return self.rank < count

    def gather(self, value: Any) -> list[Any]:
        """Give each process what all of them have, by rank; the hosts wait for each other."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found


Work = Callable[[Ranks, argparse.Namespace], bool]


def start(work: Work, options: argparse.Namespace) -> bool:
    """Run ``work(ranks, options)`` in as many processes as the largest number of ranks.

    Returns
    -------
    bool
        What the first of them returns.
    """
    # Multicast by NVLink can put the GPUs of a host that others share out of service.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # as docs/distributed.md says
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_serve, (folder, work, options), nprocs=max(options.ranks))  # type: ignore[no-untyped-call]
        return Path(folder, "right").exists()


def _serve(rank: int, folder: str, work: Work, options: argparse.Namespace) -> None:
    """Join the others; hosts talk by gloo, so that no GPU spins while one of them works alone."""
    cuda = options.device == "cuda"
    if cuda:
        import cupy

        torch.cuda.set_device(rank)
        cupy.cuda.Device(rank).use()
    else:
        import numba

        count = max(options.threads // max(options.ranks), 1)
        torch.set_num_threads(count)
        numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    store = f"file://{folder}/store"
    sizes = {"rank": rank, "world_size": max(options.ranks), "timeout": TIMEOUT}
    dist.init_process_group("gloo", init_method=store, **sizes)
    backend = "nccl" if cuda else "gloo"
    groups = {
        count: dist.new_group([*range(count)], backend=backend, timeout=TIMEOUT)
        for count in options.ranks
    }
    device = f"cuda:{rank}" if cuda else "cpu"
    right = work(Ranks(rank, device, groups), options)
    if rank == 0 and right:
        Path(folder, "right").touch()
    dist.barrier()
    dist.destroy_process_group()
