"""A graph that one GPU cannot train on, at a width that all of them together can."""

import argparse
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sparsefmt import autograd

from .. import _harness
from .._harness import Target
from . import shares
from .models import Training
from .pace import step_ms
from .ranks import Ranks
from .training import CHECKED_STEPS, Began, compared, peak

GRAPH, ORDER, MODEL = "large", "shuffled", "sage"
#: Hidden widths in turn, until one GPU runs out of memory; results are compared at the first.
WIDTHS = (64, *range(256, 2049, 128))
COLUMNS = {
    "case": "<30",
    "hidden": "7d",
    "fits": "6d",
    "ms": "9.2f",
    "held_mib": "9.0f",
    "peak_mib": "9.0f",
    "error": "8.1e",
}


def large(ranks: Ranks, options: argparse.Namespace) -> bool:
    """On one GPU until memory does not do, then at that width on the most ranks."""
    count = max(options.ranks)
    shares.check_alike(shares.csr_of(GRAPH, ORDER, ranks.device), ranks)
    if ranks.rank == 0:
        _harness.print_head(f"{GRAPH}, {MODEL}, on one GPU and on {count}", COLUMNS)
    alone = _on_one(ranks.device) if ranks.rank == 0 else None
    _harness.free()
    fits, width = ranks.gather(alone and alone[1:])[0]
    if width is None or count < 2:
        if ranks.rank == 0:
            print(f"  {GRAPH} trains on one GPU at all widths, or there is one rank alone")
        return True
    data = shares.share(GRAPH, ORDER, count, ranks)
    shares.forget(generated=True)
    began = Training(MODEL, data, WIDTHS[0]).begun(CHECKED_STEPS)
    training = Training(MODEL, data, width)
    losses, _ = training.begun(CHECKED_STEPS)
    found = step_ms({"ms": training.step}, cuda=ranks.cuda, runs=5, warmups=1)
    if ranks.cuda:
        held = torch.cuda.memory_allocated() + _pool_bytes()
        found |= {"held_mib": held / (1 << 20)} | peak(training)
        graph, row = data.graph, data.x[:1].nbytes
        features = (graph.n_local + len(graph.halo.vertices)) * row
        found["entry_bytes"] = (held - features) / max(graph.local.nnz, 1)
    by_rank = ranks.gather(found)
    if alone is None:
        return True
    row: dict[str, Any] = {"case": f"{GRAPH}, {count} ranks", "ranks": count, "losses": losses}
    row |= {"vertices": data.total, "hidden": width, "fits": fits}
    row |= {key: max(one[key] for one in by_rank) for key in found}
    row |= {} if alone[0] is None else compared(MODEL, alone[0], began)
    _harness.print_row(row, COLUMNS)
    where: dict[str, Any] = {"cuda": ranks.cuda, "folder": options.out}
    return _harness.keep("distributed", "large", [row], judge, **where)


def _on_one(device: str) -> tuple[Began | None, int, int | None]:
    """How training begins at the first width; the last that fits, and the one that does not."""
    began: list[Began] = []

    def train(width: int) -> None:
        data = shares.whole(GRAPH, ORDER, device)
        autograd.prepare(data.graph)
        found = Training(MODEL, data, width).begun(CHECKED_STEPS)
        if not began:
            began.append(found)

    fits, width = until_memory(train, WIDTHS)
    return began[0] if began else None, fits, width


def until_memory(train: Callable[[int], None], widths: Iterable[int]) -> tuple[int, int | None]:
    """Train at each width until memory does not do.

    Returns
    -------
    fits : int
        The last width that was trained; 0 if none was.
    width : int or None
        The first that was not; None if all were.
    """
    fits = 0
    for width in widths:
        try:
            train(width)
        except (torch.OutOfMemoryError, MemoryError):  # torch's; CuPy's and sparsefmt's
            return fits, width
        finally:
            gc.collect()
            _harness.free()
        fits = width
    return fits, None


def _pool_bytes() -> int:
    import cupy

    return int(cupy.get_default_memory_pool().used_bytes())


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Whether losses fall where one GPU has too little memory."""
    return [
        Target(
            f"{row['case']}, last loss over first",
            row["losses"][-1] / row["losses"][0],
            1.0,
            at_least=False,
        )
        for row in rows
    ]
