"""Eager steps on a small graph: ours, PyG's, and torch's own without any graph, the floor.

Two layers with dropout and cross entropy on a random graph of pubmed's size; wall time until the
device is done of forward, of forward and backward, and of a step with fused Adam, in turn in one
process.  The floor has the same linear maps, and each result is what they gave.  Before any is
timed, loss and gradients are compared with PyG's in float64.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

from sparsefmt import Graph

from .. import _harness
from .._harness import Target
from .captured import EDGES, WIDTHS, N, wall_ms
from .changing import without_loops

LAYERS = ("GCNConv", "SAGEConv", "GATConv")
RUNS, WARMUPS = 100, 20
#: Most that forward and backward may take, in those of the floor and of PyG.
MOST_OF_FLOOR, MOST_OF_PYG = 1.8, 1.0
WAYS, PARTS = ("ours", "pyg", "floor"), ("forward", "both", "step")
#: Forward and backward are "both".
COLUMNS = {
    "case": "<12",
    **{f"{way}_{part}": "13.3f" for part in PARTS for way in WAYS},
    "of_floor": "9.2f",
    "of_pyg": "8.2f",
}


def eager(options: argparse.Namespace) -> bool:
    """Measure every layer, and tell whether results were right."""
    _harness.print_head("ms on a graph of pubmed's size", COLUMNS)
    rows = []
    for name in LAYERS:
        case = Case(name, options.device)
        row: dict[str, Any] = {"case": name}
        wrong = case.wrong()
        rows.append(row | ({"wrong": wrong} if wrong else case.times(quick=options.quick)))
        _harness.print_row(rows[-1], COLUMNS)
    cuda = options.device == "cuda"
    return _harness.keep("wallclock", "eager", rows, judge, cuda=cuda, folder=options.out)


class Case:
    """A model of two layers in three ways, with the same parameters."""

    def __init__(self, name: str, device: str) -> None:
        import torch
        import torch_geometric.nn as pyg

        from sparsefmt import nn

        torch.manual_seed(0)
        self.edges = without_loops(N, EDGES, device)
        self.x = torch.randn(N, WIDTHS[0], device=device)
        self.labels = torch.randint(WIDTHS[-1], (N,), device=device)
        graph, self.cuda = Graph.from_edge_index(self.edges, num_nodes=N), device == "cuda"
        ours, theirs = (two(getattr(layers, name), device) for layers in (nn, pyg))
        theirs.load_state_dict(ours.state_dict())
        floor = two(lambda a, b: linear_maps(name, a, b), device)
        models = (ours, graph), (theirs, self.edges), (floor, None)
        self.models = dict(zip(WAYS, models, strict=True))

    def wrong(self) -> str:
        """What differs from PyG in float64 by more than float32 can; empty if nothing does."""
        from copy import deepcopy

        import torch

        found = []
        for way, wide in (("ours", False), ("pyg", True)):
            model, graph = self.models[way]
            model, x = (deepcopy(model).double(), self.x.double()) if wide else (model, self.x)
            loss = self.loss(model, graph, x, share=0.0)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append([one.detach().double() for one in (loss, *gradients)])
        for mine, theirs in zip(*found, strict=True):
            error = float((mine - theirs).norm() / theirs.norm())
            if not error < 1e-4:
                return f"relative error {error:.1e} against PyG in float64"
        return ""

    def loss(self, model: Any, graph: Any, x: Any, *, share: float = 0.5) -> Any:
        """Forward pass and loss, with a share of the hidden features dropped."""
        from torch.nn.functional import cross_entropy, dropout

        first, second = model
        return cross_entropy(second(dropout(first(x, graph).relu(), share), graph), self.labels)

    def parts(self, way: str) -> dict[str, Callable[[], Any]]:
        """Make the functions that are timed."""
        import torch

        model, graph = self.models[way]
        adam = torch.optim.Adam(model.parameters(), lr=0.01, fused=self.cuda)

        def forward() -> Any:
            return self.loss(model, graph, self.x)

        def both() -> Any:
            adam.zero_grad()
            loss = forward()
            loss.backward()
            return loss

        def step() -> Any:
            loss = both()
            adam.step()
            return loss

        return {"forward": forward, "both": both, "step": step}

    def times(self, *, quick: bool) -> dict[str, Any]:
        """Median wall times in ms, taken in turn, and ours over the others'."""
        parts = {way: self.parts(way) for way in WAYS}
        cases = list(itertools.product(WAYS, PARTS))
        found: dict[str, list[float]] = {f"{way}_{part}": [] for way, part in cases}
        chance = random.Random(0)
        for run in range(WARMUPS + (10 if quick else RUNS)):
            # Each finds what the one before it left in the caches.
            for way, part in chance.sample(cases, len(cases)):
                taken = wall_ms(parts[way][part], []) if self.cuda else cpu_ms(parts[way][part])
                if run >= WARMUPS:
                    found[f"{way}_{part}"].append(taken)
        row: dict[str, Any] = {name: statistics.median(taken) for name, taken in found.items()}
        own = row["ours_both"]
        return row | {"of_floor": own / row["floor_both"], "of_pyg": own / row["pyg_both"]}


def two(make: Callable[[int, int], Any], device: str) -> Any:
    """Make two layers, one behind the other."""
    import torch

    return torch.nn.ModuleList([make(a, b).to(device) for a, b in itertools.pairwise(WIDTHS)])


def linear_maps(name: str, width: int, result: int) -> Any:
    """Make a layer of the linear maps that the layer of that name has, without a graph."""
    import torch

    class Maps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(width, result)
            self.own = None
            if name == "SAGEConv":
                self.own = torch.nn.Linear(width, result, bias=False)

        def forward(self, x: Any, _: Any) -> Any:
            return self.lin(x) if self.own is None else self.lin(x) + self.own(x)

    return Maps()


def cpu_ms(function: Callable[[], Any]) -> float:
    """Milliseconds of a call on the CPU."""
    import time

    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Forward and backward over the floor's and over PyG's."""
    return [
        target
        for row in rows
        for target in (
            Target(f"{row['case']}, ours / floor", row["of_floor"], MOST_OF_FLOOR, at_least=False),
            Target(f"{row['case']}, ours / PyG", row["of_pyg"], MOST_OF_PYG, at_least=False),
        )
    ]
