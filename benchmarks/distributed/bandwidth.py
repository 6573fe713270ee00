"""Exchanges alone: bytes a second out of a rank, and the sum of the gradients of a model."""

import argparse
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from .. import _harness
from .._harness import Target
from .model import Link, fitted
from .models import HIDDEN, MODELS
from .pace import step_ms
from .ranks import Ranks
from .shares import SIZES

MIB = 1 << 20
#: MiB that a rank sends to others, about.
SENT = (4, 64, 512)
QUICK_SENT = (1, 4)
#: Numbers for a rank are a multiple of this: NCCL copies parts that begin between words of 16
#: bytes at 178 GiB/s where others go at 290 (four H100).
WHOLE = 1024
COLUMNS = {"case": "<36", "mib": "8.2f", "ms": "9.3f", "gib_s": "8.1f"}


def bandwidth(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Each number of ranks, 2 at least."""
    first, counts = ranks.rank == 0, [count for count in options.ranks if count > 1]
    if first:
        _harness.print_head("exchanges alone, out of a rank", COLUMNS)
    rows = []
    for count in counts:
        for row in measured(ranks, count, quick=options.quick):
            rows.append(row)
            if first:
                _harness.print_row(row, COLUMNS)
    where: dict[str, Any] = {"cuda": ranks.cuda, "folder": options.out}
    return not (first and rows) or _harness.keep("distributed", "bandwidth", rows, judge, **where)


def part_of(size: int, others: int) -> int:
    """Give the float32 numbers for each of the others, of about ``size`` bytes in all."""
    return max(size // 4 // others // WHOLE, 1) * WHOLE


@lru_cache(maxsize=4)
def measured(ranks: Ranks, count: int, *, quick: bool) -> list[dict[str, Any]]:
    """``all_to_all_single`` at each size, and ``all_reduce`` of the parameters of GraphSAGE."""
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


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Report the largest exchange of each number of ranks."""
    most = {row["ranks"]: row for row in sorted(rows, key=lambda row: row["mib"])}
    return [Target(f"{row['case']}, GiB/s", row["gib_s"]) for row in most.values()]
