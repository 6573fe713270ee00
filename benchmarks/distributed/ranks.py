"""The processes of a benchmark, one a GPU: their groups, the time of steps, and their exchanges."""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sparsefmt.distributed import halo

from .._baselines import use_threads

TIMEOUT = timedelta(minutes=8)


@dataclass(frozen=True, eq=False)
class Ranks:
    """What one of the processes knows of all."""

    rank: int
    device: str  #: "cpu", or "cuda:<rank>"
    groups: dict[int, Any]  #: number of ranks -> the group of the first so many

    @property
    def cuda(self) -> bool:
        """Return True if they compute on GPUs."""
        return self.device != "cpu"

    def has(self, count: int) -> bool:
        """Return True if this process is one of the first so many."""
        return self.rank < count

    def gather(self, value: Any) -> list[Any]:
        """Return to each process what all of them have, by rank; the hosts wait for each other."""
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
        use_threads(max(options.threads // max(options.ranks), 1))
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


# Time

#: Steps of one way before the next has its turn.
BLOCK = 3


def step_ms(
    ways: Mapping[str, Callable[[], Any]], *, cuda: bool, runs: int, warmups: int
) -> dict[str, float]:
    """Median milliseconds of a step of each way.

    They take turns in blocks, in the same changing order on all ranks.  The first step of a block
    is not timed: it lets the host run ahead, and the ranks meet.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(warmups):
        for run in ways.values():
            run()
    chance = random.Random(0)
    for done in range(0, runs, BLOCK):
        for name in chance.sample([*ways], len(ways)):
            found[name] += _block(ways[name], min(BLOCK, runs - done), cuda=cuda)
    return {name: statistics.median(times) for name, times in found.items()}


def _block(run: Callable[[], Any], count: int, *, cuda: bool) -> list[float]:
    marks: list[Any] = []
    for _ in range(count + 1):
        run()
        if cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
    if not cuda:
        return [(b - a) * 1e3 for a, b in pairwise(marks)]
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


# Exchanges of a step: left out, or repeated without the rest of it

Collective = Callable[..., Any]


@contextmanager
def repeatable() -> Iterator[list[Callable[[], Any]]]:
    """Yield calls that send as much as each exchange once more, of tensors of their own.

    Exchanges of the same sizes share a call.
    """
    found: list[Callable[[], Any]] = []
    known: dict[Any, Callable[[], Any]] = {}

    def noting(call: Collective) -> Collective:
        def run(into: Tensor, given: Tensor, *splits: Any, group: Any, **options: Any) -> Any:
            key = call, into.shape, given.shape, into.dtype, str(splits)
            if key not in known:
                tensors = torch.zeros_like(into), torch.zeros_like(given)
                known[key] = partial(call, *tensors, *splits, group=group)
            found.append(known[key])
            return call(into, given, *splits, group=group, **options)

        return run

    with _instead(noting):
        yield found


@contextmanager
def silent() -> Iterator[None]:
    """Leave out each exchange of features: what comes was in memory before.

    Numbers of columns still travel, since others would make other work, and sums over ranks stay,
    at which the ranks meet.
    """

    def leaving(call: Collective) -> Collective:
        def run(into: Tensor, *given: Any, **options: Any) -> Any:
            if into.is_floating_point():
                return SimpleNamespace(wait=lambda: True)
            return call(into, *given, **options)

        return run

    with _instead(leaving):
        yield


@contextmanager
def _instead(other: Callable[[Collective], Collective]) -> Iterator[None]:
    """Replace both collectives by which a halo moves features."""
    with (
        patch.object(dist, "all_to_all_single", other(dist.all_to_all_single)),
        patch.object(halo, "_all_gather", other(halo._all_gather)),
    ):
        yield
