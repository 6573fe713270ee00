"""Wall time of several ways to do the same, in turn in one process; and where real graphs are."""

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Of the real graphs: ``$SPARSEFMT_DATA``, or else ``../shared/data`` beside the checkout.
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

Work = Callable[[], Any]


def real_graph(name: str) -> dict[str, np.ndarray] | None:
    """Arrays of a file of the folder of real graphs, None where it is not there."""
    path = Path(os.environ.get("SPARSEFMT_DATA", DATA)) / f"{name}.npz"
    if not path.exists():
        print(f"  no {path}: give SPARSEFMT_DATA=folder for real graphs", flush=True)
        return None
    with np.load(path, allow_pickle=False) as kept:
        return {key: kept[key] for key in kept.files if key != "meta"}


def medians(
    ways: Mapping[str, Callable[[], Work]], *, cuda: bool, runs: int, warmups: int
) -> dict[str, float]:
    """Median milliseconds of each way, from an idle device to an idle device.

    Each is made anew for every run, which is not timed, and they take turns in a changing order.
    """
    found: dict[str, list[float]] = {way: [] for way in ways}
    chance = random.Random(0)
    for run in range(warmups + runs):
        for way in chance.sample([*ways], len(ways)):
            work = ways[way]()
            taken = wall_ms(work, cuda=cuda)
            if run >= warmups:
                found[way].append(taken)
    return {way: statistics.median(taken) for way, taken in found.items()}


def wall_ms(work: Work, *, cuda: bool) -> float:
    """Milliseconds from an idle device to an idle device."""
    wait(cuda=cuda)
    start = time.perf_counter()
    found = work()
    wait(cuda=cuda)
    del found
    return (time.perf_counter() - start) * 1e3


def wait(*, cuda: bool) -> None:
    """Wait for the GPU, if there is one."""
    if cuda:
        import torch

        torch.cuda.synchronize()


def relative_error(found: Any, expected: Any) -> float:
    """Largest error of tensors relative to the norm of those expected."""
    pairs = (
        (a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)
    )
    return max(float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs)
