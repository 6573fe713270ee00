"""Kernels that one layer launches, forward and backward."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from sparsefmt import Graph, nn

from .. import _harness
from .._baselines import Call
from .._harness import Target
from . import profile
from .cases import graphs_of, normal, prepared

GRAPHS = ("arxiv",)
IN_CHANNELS, HEADS, FEAT = 128, 4, 32
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "GAT": lambda: nn.GATConv(IN_CHANNELS, FEAT, heads=HEADS),
    "GCN": lambda: nn.GCNConv(IN_CHANNELS, HEADS * FEAT),
}
#: Most kernels, products of dense matrices apart.
LIMITS = {"GAT": 8}
COLUMNS = {"case": "<20", "kernels": "7d", "gemms": "5d", "copies": "6d", "gpu_ms": "8.3f"}


def launches(options: argparse.Namespace) -> bool:
    """Each layer: the gradients of features and parameters from that of the result."""
    _harness.print_head("kernels of one layer, forward and backward", COLUMNS)
    rows = []
    for name, source in graphs_of(options, GRAPHS, ()):
        graph = prepared(source, options)
        for model in LAYERS:
            step = step_of(model, graph)
            step()  # compiles, and keeps what belongs to the graph
            row = {"case": f"{model} {name}", "model": model, "graph": name}
            rows.append(row | of(profile.on_device(step)))
            _harness.print_row(rows[-1], COLUMNS)
            for launched, us in rows[-1]["launched"]:
                print(f"    {us:9.1f} us  {launched[:90]}")
    return _harness.keep("fuse", "launches", rows, judge, cuda=True, folder=options.out)


def step_of(model: str, graph: Graph) -> Call:
    """Forward and backward of one layer."""
    like, n = graph.csr.indptr, graph.n_rows
    x = normal(like, (n, IN_CHANNELS), seed=1).requires_grad_()
    grad = normal(like, (n, HEADS * FEAT), seed=2)
    torch.manual_seed(0)
    layer = LAYERS[model]().to(x.device)
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x, graph), inputs, grad)


def of(events: list[tuple[str, float]]) -> dict[str, Any]:
    """The row of what ran."""
    counts: dict[str, Any] = profile.counted(name for name, _ in events)
    launched = [[name, us] for name, us in events]
    return counts | {"gpu_ms": sum(us for _, us in events) / 1e3, "launched": launched}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Kernels of each layer; products of dense matrices, to know."""
    found = []
    for row in rows:
        limit = LIMITS.get(row["model"])
        found.append(Target(f"{row['case']} kernels", row["kernels"], limit, at_least=False))
        found.append(Target(f"{row['case']} products of dense matrices", row["gemms"]))
    return found
