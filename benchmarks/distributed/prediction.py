"""What the model says of a case: the constants of one device, and the step of the busiest rank."""

from collections.abc import Sequence
from dataclasses import asdict
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


def busiest(shares: Sequence[Share]) -> Share:
    """Give the most that any rank has of each, and the least share of own entries."""
    return Share(
        max(one.vertices for one in shares),
        max(one.entries for one in shares),
        min(one.own for one in shares),
        max(one.halo for one in shares),
    )


def bytes_of(training: Training, share: Share, ranks: int) -> dict[str, Any]:
    """Predict what a rank sends in a step, and the halo of a graph whose entries lie at random."""
    halo, data = share.halo, training.data
    sent = halo * sum(layer.forward + layer.backward for layer in training.layers)
    dense = halo * sum(2 * HIDDEN * ITEM for layer in training.layers)
    found = {
        "predicted_mib": sent / MIB,
        "random_halo": expected_halo(data.total, data.graph.nnz, ranks),
    }
    return found | ({"dense_mib": dense / MIB} if training.name == "maxk" else {})


def step_of(
    training: Training, share: Share, machine: Machine, joint: Link, ranks: int
) -> dict[str, Any]:
    """Predict the times of a step."""
    times = step(
        training.layers,
        share,
        machine,
        joint,
        ranks=ranks,
        parameters=training.parameter_bytes,
        overlap=training.name in OVERLAPS,
    )
    return {
        "predicted_ms": times.total * 1e3,
        "predicted_exchange_ms": times.exchange * 1e3,
        "predicted_hidden": times.hidden,
        "machine": asdict(machine),
        "link": asdict(joint),
    }
