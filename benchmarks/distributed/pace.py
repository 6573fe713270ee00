"""Time of steps that run one after the other without a wait between them, on all ranks alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

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
