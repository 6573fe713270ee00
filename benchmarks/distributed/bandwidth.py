"""Exchanges alone: bytes a second out of a rank, and the sum of the gradients of a model."""

import argparse
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from .. import _harness
from .._harness import Target
from .model import Link, fitted
from .models import HIDDEN, sage
from .pace import step_ms
from .ranks import Ranks
from .shares import SIZES

MIB, GIB = 1 << 20, 1 << 30
#: MiB that a rank sends to others.
SENT = (4, 64, 512)
QUICK_SENT = (1, 4)
COLUMNS = {"case": "<36", "mib": "8.2f", "ms": "9.3f", "gib_s": "8.1f"}


def bandwidth(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Each number of ranks, 2 at least."""
    first = ranks.rank == 0
    if first:
        _harness.print_head("exchanges alone, out of a rank", COLUMNS)
    rows = []
    for count in options.ranks:
        if count > 1:
            for row in measured(ranks, count, quick=options.quick):
                rows.append(row)
                if first:
                    _harness.print_row(row, COLUMNS)
    if not (first and rows):
        return True
    cuda = ranks.cuda
    return _harness.keep("distributed", "bandwidth", rows, judge, cuda=cuda, folder=options.out)


@lru_cache(maxsize=4)
def measured(ranks: Ranks, count: int, *, quick: bool) -> list[dict[str, Any]]:
    """``all_to_all_single`` at each size, and ``all_reduce`` of the parameters of GraphSAGE."""
    group, sizes = ranks.groups[count], QUICK_SENT if quick else SENT
    calls = {}
    if ranks.has(count):
        for size in sizes:
            parts = size * MIB // 4 // (count - 1)
            splits = [parts] * count
            splits[ranks.rank] = 0
            given = torch.zeros(parts * (count - 1), device=ranks.device)
            calls[size] = _exchange(given, splits, group)
        model = sage(*SIZES["reddit"], HIDDEN)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=ranks.device)
        calls[0] = lambda: dist.all_reduce(flat, group=group)
    runs = 3 if quick else 15
    found = {
        key: step_ms({"": call}, cuda=ranks.cuda, runs=runs, warmups=2)[""]
        for key, call in calls.items()
    }
    slowest = [one for one in ranks.gather(found) if one]
    times = {key: max(one[key] for one in slowest) for key in slowest[0]}
    rows = [
        _row(f"all_to_all_single, {count} ranks, {size} MiB", count, size * MIB, times[size])
        for size in sizes
    ]
    reduced = sum(p.numel() for p in sage(*SIZES["reddit"], HIDDEN).parameters()) * 4
    name = f"all_reduce of parameters, {count} ranks"
    return [*rows, _row(name, count, 2 * reduced * (count - 1) / count, times[0])]


def _exchange(given: torch.Tensor, splits: list[int], group: Any) -> Any:
    into = torch.empty_like(given)
    return lambda: dist.all_to_all_single(into, given, splits, splits, group=group)


def _row(case: str, count: int, size: float, ms: float) -> dict[str, Any]:
    gib_s = size / GIB / ms * 1e3
    return {"case": case, "ranks": count, "mib": size / MIB, "ms": ms, "gib_s": gib_s}


def link(ranks: Ranks, count: int, *, quick: bool) -> Link:
    """What joins so many ranks, fitted to the exchanges measured."""
    rows = [r for r in measured(ranks, count, quick=quick) if r["case"].startswith("all_to_all")]
    return fitted([r["mib"] * MIB for r in rows], [r["ms"] / 1e3 for r in rows])


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The largest exchanges, to know."""
    most = max(row["mib"] for row in rows)
    return [Target(f"{r['case']}, GiB/s", r["gib_s"]) for r in rows if r["mib"] == most]
