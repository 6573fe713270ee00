"""A graph that one GPU cannot train on, at a width that all of them together can."""

import argparse
import gc
from collections.abc import Callable
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
#: Hidden widths that one GPU tries; results are compared at the first.
FIRST, SECOND, STEP, MOST = 64, 256, 64, 4096
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
    began = Training(MODEL, data, FIRST).begun(CHECKED_STEPS)
    training = Training(MODEL, data, width)
    losses, _ = training.begun(CHECKED_STEPS)
    found = step_ms({"ms": training.step}, cuda=ranks.cuda, runs=5, warmups=1)
    found |= peak(training) | _held(data) if ranks.cuda else {}
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

    def train(width: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        data = shares.whole(GRAPH, ORDER, device)
        autograd.prepare(data.graph)
        found = Training(MODEL, data, width).begun(CHECKED_STEPS)
        if not began:
            began.append(found)
        return torch.cuda.max_memory_allocated() + _pool_bytes()

    fits, width = until_memory(train, torch.cuda.mem_get_info()[1])
    return began[0] if began else None, fits, width


def until_memory(train: Callable[[int], int], room: int) -> tuple[int, int | None]:
    """Train at larger and larger widths until memory does not do.

    Parameters
    ----------
    train : callable
        Trains at a width, and gives the bytes that it took.
    room : int
        Bytes that there are: the third width is where the first two say that it will be full.

    Returns
    -------
    fits : int
        The last width that was trained; 0 if none was.
    width : int or None
        The first that was not; None if all up to ``MOST`` were.
    """
    fits, before, width, slope = 0, 0, FIRST, 0.0
    while width <= MOST:
        try:
            size = train(width)
        except (torch.OutOfMemoryError, MemoryError):  # torch's; CuPy's and sparsefmt's
            return fits, width
        finally:
            gc.collect()
            _harness.free()
        slope, before = (size - before) / (width - fits) if fits else 0.0, size
        fits = width
        full = width + int((room - size) / slope) if slope > 0 else SECOND
        width = max(width + STEP, min(full // STEP * STEP, MOST))
    return fits, None


def _held(data: shares.Data) -> dict[str, float]:
    """Memory in use between steps, and what of it is for an entry, beside the features."""
    held, graph = torch.cuda.memory_allocated() + _pool_bytes(), data.graph
    features = (graph.n_local + len(graph.halo.vertices)) * data.x[:1].nbytes
    return {
        "held_mib": held / (1 << 20),
        "entry_bytes": (held - features) / max(graph.local.nnz, 1),
    }


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
