"""A graph that one GPU cannot train on, at a width that all of them together can."""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from sparsefmt import autograd

from .. import _harness
from .._table import Limit, print_row
from . import shares
from .models import Training
from .ranks import Ranks, step_ms
from .training import CHECKED_STEPS, Began, compared, peak

#: Steps in which the loss has to fall: where layers are wide, Adam's first ones overshoot.
STEPS = 20
GRAPH, ORDER, MODEL = "large", "shuffled", "sage"
#: Hidden widths that one GPU tries; results are compared at the first.
WIDTHS = (64, 256, 576, 1152, 2304)


def large(ranks: Ranks, options: argparse.Namespace) -> bool:
    """On one GPU until memory does not do, then at that width on the most ranks."""
    count, first = max(options.ranks), ranks.rank == 0
    shares.check_alike(shares.csr_of(GRAPH, ORDER, ranks.device), ranks)
    expected: list[Began] = []

    def train(width: int) -> None:
        data = shares.whole(GRAPH, ORDER, ranks.device)
        autograd.prepare(data.graph)
        began = Training(MODEL, data, width).begun(CHECKED_STEPS)
        expected[:] = expected or [began]

    fits, width = ranks.gather(until_memory(train) if first else None)[0]
    if width is None or count < 2:
        if first:
            print(f"  {GRAPH} trains on one GPU at all widths, or there is one rank alone")
        return True
    data = shares.share(GRAPH, ORDER, count, ranks)
    shares.forget(generated=True)
    began = Training(MODEL, data, WIDTHS[0]).begun(CHECKED_STEPS)
    training = Training(MODEL, data, width)
    losses, _ = training.begun(STEPS)
    found = step_ms({"ms": training.step}, cuda=True, runs=5, warmups=1)
    by_rank = ranks.gather(found | peak(training) | _held(data))
    if not first:
        return True
    row: dict[str, Any] = {"case": f"{GRAPH}, {count} ranks", "ranks": count, "losses": losses}
    row |= {"vertices": data.total, "hidden": width, "fits": fits}
    row |= {key: max(one[key] for one in by_rank) for key in by_rank[0]}
    row |= compared(MODEL, *expected, began) if expected else {}
    row["falls"] = losses[-1] / losses[0]
    print_row(row)
    return bool(options.keep("large", [row], (Limit("falls", "each", most=1.0),)))


def until_memory(train: Callable[[int], None]) -> tuple[int, int | None]:
    """Train at larger and larger widths until memory does not do.

    Returns
    -------
    fits : int
        The last width that was trained; 0 if none was.
    width : int or None
        The first that was not; None if all were.
    """
    fits = 0
    for width in WIDTHS:
        try:
            train(width)
        except (torch.OutOfMemoryError, MemoryError):  # torch's; CuPy's and sparsefmt's
            return fits, width
        finally:
            gc.collect()
            _harness.free()
        fits = width
    return fits, None


def _held(data: shares.Data) -> dict[str, float]:
    """Memory in use between steps, and what of it is for an entry, beside the features."""
    import cupy

    held, graph = torch.cuda.memory_allocated(), data.graph
    held += cupy.get_default_memory_pool().used_bytes()
    features = (graph.n_local + len(graph.halo.vertices)) * data.x[:1].nbytes
    entry = (held - features) / max(graph.local.nnz, 1)
    return {"held_mib": held / (1 << 20), "entry_bytes": entry}
