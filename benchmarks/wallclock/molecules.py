"""Batches of many small graphs: an epoch of GIN, against PyG's layers.

Graphs are PROTEINS and DD, or generated ones of the size of molecules where those are not there,
with random labels; features are random for PROTEINS, whose file has none.  Batches of 256 graphs
are collated by PyG's ``DataLoader`` before anything is timed, and what that takes is told apart.
An epoch trains on each batch, eager, with what is built of its graph: our layers on ``edge_index``
as PyG gives it, the same on ``Graph.batch`` of graphs that were built once, and PyG's.
"""

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np

from sparsefmt import Graph

from .. import _harness
from .._harness import Target
from . import turns

BATCH, LAYERS, HIDDEN, FEAT, CLASSES = 256, 5, 64, 32, 2
#: Of generated graphs: how many, and vertices and edges of each.
MOLECULES, VERTICES, BONDS = 2048, (12, 36), 2.2
RUNS, WARMUPS = {"cuda": 20, "cpu": 8}, {"cuda": 5, "cpu": 2}
MOST = 0.8
WAYS = ("edge_index", "batch", "pyg")
COLUMNS = {
    "case": "<12",
    "vertices": "9d",
    "edges": "9d",
    **dict.fromkeys(WAYS, "11.3f"),
    "ratio": "7.2f",
    "batch_ratio": "12.2f",
    "loader_ms": "10.1f",
}


def molecules(options: argparse.Namespace) -> bool:
    """Measure epochs of GIN, and tell whether results were right."""
    cuda = options.device == "cuda"
    _harness.print_head("ms of an epoch on batches of 256 graphs", COLUMNS)
    rows = []
    for name, graphs in data_sets(quick=options.quick):
        case = Case(graphs, options.device)
        rows.append({"case": name} | case.measure(quick=options.quick))
        _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("wallclock", "molecules", rows, judge, cuda=cuda, folder=options.out)


def data_sets(*, quick: bool) -> list[tuple[str, list[Any]]]:
    """Give names and graphs, as PyG's ``Data``, each with its number."""
    found = []
    for name in () if quick else ("proteins_full", "dd"):
        real = turns.real_graph(name)
        if real is not None:
            found.append((name, parts_of(real)))
    return found or [("generated", generated(300 if quick else MOLECULES))]


def parts_of(real: dict[str, np.ndarray]) -> list[Any]:
    """Cut a block-diagonal matrix, whose vertices have the number of their graph."""
    import torch

    indptr, indices = real["indptr"].astype(np.int64), real["indices"].astype(np.int64)
    ends = np.flatnonzero(np.diff(real["graph_ind"])) + 1
    borders = [0, *ends.tolist(), len(indptr) - 1]
    chance = np.random.default_rng(0)
    x = chance.standard_normal((len(indptr) - 1, FEAT)).astype(np.float32)
    if "node_label" in real:
        x = np.eye(int(real["node_label"].max()) + 1, dtype=np.float32)[real["node_label"]]
    found = []
    for first, last in pairwise(borders):
        target = np.repeat(np.arange(last - first), np.diff(indptr[first : last + 1]))
        source = indices[indptr[first] : indptr[last]] - first
        edges = torch.from_numpy(np.stack([source, target]))
        found.append(data_of(torch.from_numpy(x[first:last]), edges, len(found), chance))
    return found


def generated(count: int) -> list[Any]:
    """Make graphs of the size of molecules: a path and random bonds, both ways."""
    import torch

    chance, found = np.random.default_rng(0), []
    for number in range(count):
        n = int(chance.integers(*VERTICES))
        path = np.stack([np.arange(n - 1), np.arange(1, n)])
        others = chance.integers(0, n, (2, max(0, int((BONDS - 2) * n / 2))))
        bonds = np.concatenate([path, others], 1)
        edges = torch.from_numpy(np.concatenate([bonds, bonds[::-1]], 1))
        x = torch.from_numpy(chance.standard_normal((n, FEAT)).astype(np.float32))
        found.append(data_of(x, edges, number, chance))
    return found


def data_of(x: Any, edges: Any, number: int, chance: np.random.Generator) -> Any:
    """Make a graph with a random label."""
    import torch
    from torch_geometric.data import Data

    return Data(x=x, edge_index=edges, y=torch.tensor([int(chance.integers(CLASSES))]), at=number)


class Case:
    """A model of ours and one of PyG's with the same parameters, and batches for both."""

    def __init__(self, graphs: list[Any], device: str) -> None:
        import torch
        import torch_geometric.nn as pyg
        from torch_geometric.loader import DataLoader

        from sparsefmt import nn

        torch.manual_seed(0)
        self.device, self.cuda = device, device == "cuda"
        start = time.perf_counter()
        self.batches = [*DataLoader(graphs, BATCH, shuffle=True)]
        self.loader_ms = (time.perf_counter() - start) * 1e3
        self.members = [one.at.tolist() for one in self.batches]
        self.batches = [one.to(device) for one in self.batches]
        self.pieces = [
            Graph.from_edge_index(one.edge_index.to(device), num_nodes=one.num_nodes)
            for one in graphs
        ]
        feat = graphs[0].x.shape[1]
        self.ours, self.theirs = (gin(library.GINConv, feat).to(device) for library in (nn, pyg))
        self.theirs.load_state_dict(self.ours.state_dict())
        self.optimizers = {
            model: torch.optim.Adam(model.parameters(), lr=1e-3)
            for model in (self.ours, self.theirs)
        }

    def measure(self, *, quick: bool) -> dict[str, Any]:
        """Measure one row."""
        row: dict[str, Any] = {
            "vertices": int(np.mean([one.num_nodes for one in self.batches])),
            "edges": int(np.mean([one.num_edges for one in self.batches])),
            "loader_ms": self.loader_ms,
        }
        wrong = self.wrong()
        if wrong:
            return row | {"wrong": wrong}
        runs, warmups = (3, 1) if quick else (RUNS[self.device], WARMUPS[self.device])
        found = turns.medians(self.ways(), cuda=self.cuda, runs=runs, warmups=warmups)
        ratios = {"ratio": found["edge_index"], "batch_ratio": found["batch"]}
        return row | found | {name: ms / found["pyg"] for name, ms in ratios.items()}

    def joined(self, number: int) -> Graph:
        """Join the graphs of a batch."""
        return Graph.batch([self.pieces[at] for at in self.members[number]])

    def loss(self, model: Any, number: int, graph: Any) -> Any:
        """Compute the loss of a batch."""
        from torch.nn.functional import cross_entropy

        batch = self.batches[number]
        x = batch.x.to(next(model.parameters()).dtype)
        return cross_entropy(model(x, graph, batch.batch, batch.num_graphs), batch.y)

    def epoch(self, model: Any, graph_of: Callable[[int], Any]) -> Any:
        """Train on every batch."""
        optimizer = self.optimizers[model]
        for number in range(len(self.batches)):
            optimizer.zero_grad()
            loss = self.loss(model, number, graph_of(number))
            loss.backward()
            optimizer.step()
        return loss

    def wrong(self) -> str:
        """What differs from PyG in float64 by more than float32 can; empty if nothing does."""
        import torch

        edges = self.batches[0].edge_index
        exact = deepcopy(self.theirs).double()
        cases = ((self.ours, edges), (self.ours, self.joined(0)), (exact, edges))
        found = []
        for model, graph in cases:
            copied = deepcopy(model)  # whose running means may change
            loss = self.loss(copied, 0, graph)
            found.append([loss, *torch.autograd.grad(loss, [*copied.parameters()])])
        error = max(absolute_error(one, found[2]) for one in found[:2])
        return "" if error < 1e-3 else f"relative error {error:.1e} against PyG in float64"

    def ways(self) -> dict[str, Callable[[], turns.Work]]:
        """Name -> what makes its next epoch, each ``edge_index`` a tensor that nobody has seen."""

        def of_edges(model: Any) -> turns.Work:
            fresh = [one.edge_index.clone() for one in self.batches]
            return lambda: self.epoch(model, fresh.__getitem__)

        return {
            "edge_index": lambda: of_edges(self.ours),
            "batch": lambda: lambda: self.epoch(self.ours, self.joined),
            "pyg": lambda: of_edges(self.theirs),
        }


def absolute_error(found: Any, expected: Any) -> float:
    """Norm of the errors of all tensors, relative to that of those expected.

    A bias before a normalisation has a gradient of 0, to which no error is small.
    """
    import torch

    one, two = (
        torch.cat([t.detach().double().flatten() for t in each]) for each in (found, expected)
    )
    return float((one - two).norm() / two.norm())


def gin(layer: Any, feat: int) -> Any:
    """Make five layers, each with a network of two, and a sum over each graph's vertices."""
    from torch.nn import BatchNorm1d, Linear, Module, ModuleList, ReLU, Sequential
    from torch_geometric.nn import global_add_pool

    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [feat, *[HIDDEN] * LAYERS]
            self.layers = ModuleList(
                layer(Sequential(Linear(n, m), BatchNorm1d(m), ReLU(), Linear(m, m), ReLU()))
                for n, m in pairwise(widths)
            )
            self.last = Linear(HIDDEN, CLASSES)

        def forward(self, x: Any, graph: Any, batch: Any, count: int) -> Any:
            for one in self.layers:
                x = one(x, graph)
            return self.last(global_add_pool(x, batch, count))

    return Model()


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """An epoch of ours over PyG's, by both ways."""
    found = []
    for row in rows:
        for name, key in (("edge_index", "ratio"), ("Graph.batch", "batch_ratio")):
            case = f"{row['case']} by {name}, ours / PyG"
            found.append(Target(case, row[key], MOST, at_least=False))
    return found
