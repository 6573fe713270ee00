"""Exchanges alone: bytes a second out of a rank, and the sum of the gradients of a model."""

import argparse
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from .._harness import MIB
from .._table import Limit, print_row
from .model import Link, fitted
from .models import HIDDEN, MODELS
from .ranks import Ranks, step_ms
from .shares import SIZES

#: MiB that a rank sends to others, about.
SENT = (4, 64, 512)
QUICK_SENT = (1, 4)
#: Numbers for a rank are a multiple of this: NCCL copies parts that begin between words of 16
#: bytes at 178 GiB/s where others go at 290 (four H100).
WHOLE = 1024


def bandwidth(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Measure each number of ranks, 2 at least."""
    counts = [count for count in options.ranks if count > 1]
    rows = [row for count in counts for row in measured(ranks, count, quick=options.quick)]
    if ranks.rank or not rows:
        return True
    for row in rows:
        print_row(row)
    rows.sort(key=lambda row: float(row["mib"]))
    return bool(options.keep("bandwidth", rows, (Limit("gib_s", by=("ranks",), high=True),)))


def part_of(size: int, others: int) -> int:
    """Return the float32 numbers for each of the others, of about ``size`` bytes in all."""
    return max(size // 4 // others // WHOLE, 1) * WHOLE


@lru_cache(maxsize=4)
def measured(ranks: Ranks, count: int, *, quick: bool) -> list[dict[str, Any]]:
    """Time ``all_to_all_single`` at each size, and ``all_reduce`` of GraphSAGE's parameters."""
    group, others, calls, sent = ranks.groups[count], count - 1, {}, {}
    for size in QUICK_SENT if quick else SENT:
        part, name = part_of(size * MIB, others), f"all_to_all_single, {count} ranks, {size} MiB"
        sent[name] = part * others * 4
        if ranks.has(count):
            splits = [part * (rank != ranks.rank) for rank in range(count)]
            into, given = torch.zeros(2, part * others, device=ranks.device)
            exchange = into, given, splits, splits
            calls[name] = partial(dist.all_to_all_single, *exchange, group=group)
    name = f"all_reduce of parameters, {count} ranks"
    numbers = sum(p.numel() for p in MODELS["sage"](*SIZES["reddit"], HIDDEN).parameters())
    sent[name] = 2 * 4 * numbers * others // count
    if ranks.has(count):
        flat = torch.zeros(numbers, device=ranks.device)
        calls[name] = partial(dist.all_reduce, flat, group=group)
    runs = 3 if quick else 15
    ms = {
        name: step_ms({"": call}, cuda=ranks.cuda, runs=runs, warmups=2)[""]
        for name, call in calls.items()
    }
    times = [one for one in ranks.gather(ms) if one]
    return [_row(name, count, sent[name], max(one[name] for one in times)) for name in sent]


def _row(case: str, count: int, size: int, ms: float) -> dict[str, Any]:
    mib = size / MIB
    return {"case": case, "ranks": count, "mib": mib, "ms": ms, "gib_s": mib / 1024 / ms * 1e3}


def link(ranks: Ranks, count: int, *, quick: bool) -> Link:
    """Fit what joins so many ranks to the exchanges measured."""
    rows = [r for r in measured(ranks, count, quick=quick) if r["case"].startswith("all_to_all")]
    return fitted([r["mib"] * MIB for r in rows], [r["ms"] / 1e3 for r in rows])
