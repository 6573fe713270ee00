"""Mini-batches of sampled neighbours: a training step of GraphSAGE, against PyG's layers.

On a GPU the graph is generated at the size of ogbn-products, on the CPU it is Amazon computers.
Batches are those of ``NeighborLoader``, collected before anything is timed, and what drawing one
takes is told apart.  A step is forward, backward and Adam on a batch whose ``edge_index`` no step
has had before; our layers take it as PyG's do.
"""

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import count, pairwise
from typing import Any

import numpy as np

from .. import _graphs, _harness
from .._harness import Target
from . import turns
from .neighbours import Neighbours

#: Vertices of a batch, neighbours of a vertex in each hop, and features in between.
BATCH, FAN_OUT, HIDDEN = 1024, (15, 10, 5), 256
#: Features and classes of ogbn-products.
FEAT, CLASSES = 100, 47
BATCHES = {"cuda": 8, "cpu": 4}
RUNS, WARMUPS = {"cuda": 40, "cpu": 10}, {"cuda": 10, "cpu": 2}
MOST = {"cuda": 0.8, "cpu": 0.9}
COLUMNS = {
    "case": "<18",
    "vertices": "9d",
    "edges": "9d",
    "ours": "9.3f",
    "pyg": "9.3f",
    "ratio": "7.2f",
    "sampling_ms": "11.1f",
}


def loader(options: argparse.Namespace) -> bool:
    """Measure a step on sampled neighbours, and tell whether results were right."""
    cuda = options.device == "cuda"
    _harness.print_head("ms of a step on a batch of sampled neighbours", COLUMNS)
    rows = [measure(options.device, quick=options.quick)]
    _harness.print_row(rows[0], COLUMNS)
    judge = judge_on(options.device)
    return _harness.keep("wallclock", "loader", rows, judge, cuda=cuda, folder=options.out)


def measure(device: str, *, quick: bool) -> dict[str, Any]:
    """Measure one row."""
    name, batches, sampling_ms = collected(device, quick=quick)
    case = Case(batches, device)
    row: dict[str, Any] = {
        "case": name,
        "vertices": int(np.mean([one.num_nodes for one in batches])),
        "edges": int(np.mean([one.num_edges for one in batches])),
        "sampling_ms": sampling_ms,
    }
    wrong = case.wrong()
    if wrong:
        return row | {"wrong": wrong}
    runs, warmups = (5, 1) if quick else (RUNS[device], WARMUPS[device])
    found = turns.medians(case.ways(), cuda=case.cuda, runs=runs, warmups=warmups)
    return row | found | {"ratio": found["ours"] / found["pyg"]}


def collected(device: str, *, quick: bool) -> tuple[str, list[Any], float]:
    """Give the graph's name, batches on the device, and the milliseconds to draw one."""
    name, indptr, indices, x, y = labelled(device, quick=quick)
    draw = Neighbours(indptr, indices, FAN_OUT)
    size = min(BATCH, len(y) // 4)
    start = time.perf_counter()
    drawn = [*draw.batches(size, min(BATCHES[device], len(y) // size))]
    taken = (time.perf_counter() - start) * 1e3 / len(drawn)
    return name, [batch_of(x, y, *each, size, device) for each in drawn], taken


def batch_of(x: Any, y: Any, vertices: Any, edges: Any, size: int, device: str) -> Any:
    """Make the ``Data`` that ``NeighborLoader`` gives."""
    import torch
    from torch_geometric.data import Data

    n_id = torch.from_numpy(vertices)
    made = Data(x=x[n_id], y=y[n_id], edge_index=torch.from_numpy(edges), n_id=n_id)
    made.batch_size = size
    return made.to(device)


def labelled(device: str, *, quick: bool) -> tuple[str, Any, Any, Any, Any]:
    """Give a graph by its name, ``indptr`` and ``indices``, with features and labels."""
    import torch

    real = turns.real_graph("amazon_computers") if device == "cpu" and not quick else None
    if real is not None:
        x = torch.from_numpy(real["x"].astype(np.float32))
        y = torch.from_numpy(real["y"].astype(np.int64))
        return "amazon computers", real["indptr"], real["indices"], x, y
    name = "products" if device == "cuda" and not quick else "small"
    graph = _graphs.load(name, device=device)
    indptr, indices = graph.to("cpu").indptr, graph.to("cpu").indices
    n = len(indptr) - 1
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEAT, generator=draw)
    return name, indptr, indices, x, torch.randint(0, CLASSES, (n,), generator=draw)


class Case:
    """A model of ours and one of PyG's with the same parameters, and batches for both."""

    def __init__(self, batches: list[Any], device: str) -> None:
        import torch
        import torch_geometric.nn as pyg

        from sparsefmt import nn

        torch.manual_seed(0)
        self.batches, self.cuda = batches, device == "cuda"
        widths = batches[0].x.shape[1], HIDDEN, HIDDEN, 1 + max(int(b.y.max()) for b in batches)
        self.models = {
            name: _model(library.SAGEConv, widths).to(device)
            for name, library in (("ours", nn), ("pyg", pyg))
        }
        self.models["pyg"].load_state_dict(self.models["ours"].state_dict())
        self.optimizers = {
            name: torch.optim.Adam(one.parameters(), lr=1e-3) for name, one in self.models.items()
        }

    def loss(self, model: Any, batch: Any, edges: Any) -> Any:
        """Compute the loss of the batch's own vertices, which come first."""
        from torch.nn.functional import cross_entropy

        y = model(batch.x.to(model[0].lin_l.weight.dtype), edges)
        return cross_entropy(y[: batch.batch_size], batch.y[: batch.batch_size])

    def step(self, name: str, batch: Any, edges: Any) -> Any:
        """Train on a batch."""
        model, optimizer = self.models[name], self.optimizers[name]
        optimizer.zero_grad()
        loss = self.loss(model, batch, edges)
        loss.backward()
        optimizer.step()
        return loss

    def wrong(self) -> str:
        """What differs from PyG in float64 by more than float32 can; empty if nothing does."""
        import torch

        batch, found = self.batches[0], []
        exact = deepcopy(self.models["pyg"]).double()
        for model in (*self.models.values(), exact):
            loss = self.loss(model, batch, batch.edge_index)
            found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
        error, of_pyg = (turns.relative_error(one, found[2]) for one in found[:2])
        if error < max(1e-4, 4 * of_pyg):  # sums over half a million rows lose what PyG's lose
            return ""
        return f"relative error {error:.1e} against PyG in float64, whose own is {of_pyg:.1e}"

    def ways(self) -> dict[str, Callable[[], turns.Work]]:
        """Name -> what makes its next step, with an ``edge_index`` that nobody has seen."""

        def steps(name: str) -> Callable[[], turns.Work]:
            number = count()

            def make() -> turns.Work:
                batch = self.batches[next(number) % len(self.batches)]
                edges = batch.edge_index.clone()
                return lambda: self.step(name, batch, edges)

            return make

        return {name: steps(name) for name in self.models}


def _model(layer: Any, widths: tuple[int, ...]) -> Any:
    """Make layers with ReLU between them."""
    from torch.nn import ModuleList
    from torch.nn.functional import relu

    class Model(ModuleList):
        def forward(self, x: Any, graph: Any) -> Any:
            for number, one in enumerate(self):
                x = one(x if number == 0 else relu(x), graph)
            return x

    return Model(layer(*pair) for pair in pairwise(widths))


def judge_on(device: str) -> _harness.Judge:
    """Tell how a step of ours compares with PyG's."""

    def judge(rows: list[dict[str, Any]]) -> list[Target]:
        most = MOST[device]
        return [
            Target(f"{row['case']}, ours / PyG", row["ratio"], most, at_least=False) for row in rows
        ]

    return judge
