"""What the model says of a case: the constants of one device, and the step of the busiest rank."""

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import torch

from sparsefmt import autograd

from .model import Link, Machine, Share, calibrated, expected_halo, step
from .models import HIDDEN, ITEM, OVERLAPS, Training
from .pace import step_ms

MIB = 1 << 20


def machine_of(training: Training, *, cuda: bool, quick: bool) -> tuple[Machine, float]:
    """Measure products and maps of the hidden width, and the milliseconds of a step, on one device.

    What a step takes beyond the products and maps that the model counts is its ``rest``.
    """
    data = training.data
    x = torch.ones(data.total, HIDDEN, device=data.x.device)
    weight = torch.ones(HIDDEN, HIDDEN, device=data.x.device)
    ways = {
        "product": lambda: autograd.spmm(data.graph, x, reduce="mean"),
        "map": lambda: x @ weight,
        "copy": lambda: x.neg(),
        "step": training.step,
    }
    runs, warmups = (3, 1) if quick else (9, 2)
    ms = step_ms(ways, cuda=cuda, runs=runs, warmups=warmups)
    bare = Machine(
        gathered=data.graph.nnz * HIDDEN * ITEM / ms["product"] * 1e3,
        flops=2 * data.total * HIDDEN**2 / ms["map"] * 1e3,
        copied=2 * x.nbytes / ms["copy"] * 1e3,
    )
    whole = Share(data.total, data.graph.nnz, 1.0, 0.0)
    return calibrated(training.layers, whole, bare, ms["step"] / 1e3), ms["step"]


def predicted(
    training: Training,
    shares: Sequence[Share],
    ranks: int,
    machine: Machine | None,
    link: Link | None,
) -> dict[str, Any]:
    """Predict what the busiest rank sends in a step and, of a known machine, how long it takes.

    Beside them the halo of a graph whose entries lie at random.
    """
    vertices, entries, own, halo = zip(*map(astuple, shares), strict=True)
    share = Share(max(vertices), max(entries), min(own), max(halo))
    layers, data = training.layers, training.data
    sent = share.halo * sum(layer.forward + layer.backward for layer in layers)
    random = expected_halo(data.total, data.graph.nnz, ranks)
    found = {"own": share.own, "predicted_mib": sent / MIB, "random_halo": random}
    if training.name == "maxk":
        found["dense_mib"] = share.halo * len(layers) * 2 * HIDDEN * ITEM / MIB
    if machine is None or link is None:
        return found
    how: dict[str, Any] = {"ranks": ranks, "parameters": training.parameter_bytes}
    times = step(layers, share, machine, link, **how, overlap=training.name in OVERLAPS)
    return found | {
        "predicted_ms": times.total * 1e3,
        "predicted_exchange_ms": times.exchange * 1e3,
        "predicted_hidden": times.hidden,
        "machine": asdict(machine),
        "link": asdict(link),
    }
