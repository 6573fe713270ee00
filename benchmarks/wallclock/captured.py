"""Training steps on a small graph: eager, as one CUDA graph by ``nn.capture``, and PyG's.

Two layers with dropout, cross entropy and fused Adam on a random graph of pubmed's size; wall time
of a step until the device is done, in turn in one process.  Before any is timed, the captured steps
are compared with eager ones, from one seed.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from sparsefmt import Graph

from .. import _harness
from .._harness import Target
from .changing import without_loops

N, EDGES, WIDTHS = 19_717, 88_648, (500, 16, 3)
LAYERS = ("GCNConv", "SAGEConv", "GATConv")
RUNS, WARMUPS, STEPS = 100, 20, 10
#: PyG's eager step over the captured one, at least.
LEAST = 10.0
WAYS = ("eager", "captured", "pyg")
COLUMNS = {"case": "<12", **dict.fromkeys(WAYS, "9.3f"), "ratio": "7.2f"}


def captured(options: argparse.Namespace) -> bool:
    """Measure every layer, and tell whether captured steps were right."""
    _harness.print_head("ms of a training step, pubmed's size", COLUMNS)
    rows = []
    for name in LAYERS:
        row: dict[str, Any] = {"case": name}
        wrong = wrong_steps(name)
        rows.append(row | ({"wrong": wrong} if wrong else times(name, quick=options.quick)))
        _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("wallclock", "captured", rows, judge, cuda=True, folder=options.out)


def steps(
    name: str, layers: Any, graph: Any, *, capturable: bool = False
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Make a model of two layers, and its training step of features and labels."""
    import torch
    from torch.nn.functional import cross_entropy, dropout

    torch.manual_seed(0)
    first, second = (getattr(layers, name)(a, b).cuda() for a, b in itertools.pairwise(WIDTHS))
    model = torch.nn.ModuleList([first, second])
    adam = torch.optim.Adam(model.parameters(), lr=0.01, fused=True, capturable=capturable)

    def step(x: Any, labels: Any) -> Any:
        adam.zero_grad()
        hidden = dropout(first(x, graph).relu())
        loss = cross_entropy(second(hidden, graph), labels)
        loss.backward()
        adam.step()
        return loss

    return model, step


def data() -> tuple[Any, Any, Any]:
    """Make an ``edge_index``, features and labels."""
    import torch

    torch.manual_seed(1)
    edges = without_loops(N, EDGES, "cuda")
    labels = torch.randint(WIDTHS[-1], (N,), device="cuda")
    return edges, torch.randn(N, WIDTHS[0], device="cuda"), labels


def wrong_steps(name: str) -> str:
    """Say what differs between captured and eager steps; empty if nothing does."""
    import torch

    from sparsefmt import nn

    edges, *given = data()
    graph = Graph.from_edge_index(edges, num_nodes=N)
    left = []
    for captured in (False, True):
        model, step = steps(name, nn, graph, capturable=captured)
        step = nn.capture(step, *given) if captured else step
        torch.manual_seed(2)
        for _ in range(STEPS):
            step(*given)
        left.append(torch.cat([p.detach().flatten() for p in model.parameters()]).double())
    error = float((left[1] - left[0]).norm() / left[0].norm())
    return "" if error < 1e-4 else f"parameters differ by {error:.1e} after {STEPS} steps"


def times(name: str, *, quick: bool) -> dict[str, Any]:
    """Median wall times in ms of each way, taken in turn, and PyG's over the captured."""
    import torch_geometric.nn as pyg

    from sparsefmt import nn

    edges, *given = data()
    graph = Graph.from_edge_index(edges, num_nodes=N)
    ways = {"eager": steps(name, nn, graph)[1], "pyg": steps(name, pyg, edges)[1]}
    ways["captured"] = nn.capture(steps(name, nn, graph, capturable=True)[1], *given)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    chance = random.Random(0)
    for run in range(WARMUPS + (10 if quick else RUNS)):
        # Each finds what the one before it left in the caches.
        for way in chance.sample(WAYS, len(WAYS)):
            taken = wall_ms(ways[way], given)
            if run >= WARMUPS:
                found[way].append(taken)
    row: dict[str, Any] = {way: statistics.median(taken) for way, taken in found.items()}
    return row | {"ratio": row["pyg"] / row["captured"]}


def wall_ms(step: Callable[..., Any], given: list[Any]) -> float:
    """Milliseconds from an idle device to an idle device."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    step(*given)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """PyG's eager step over our captured one."""
    return [
        Target(f"{row['case']}, PyG eager / captured", row["ratio"], LEAST, at_least=True)
        for row in rows
    ]
