"""What another order of the vertices gives: predicted and measured, products and epochs."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import Module, functional

from sparsefmt import CSR, Graph, optimize, reorder
from sparsefmt.formats.arrays import finish, namespace, to_device
from sparsefmt.nn import SAGEConv
from sparsefmt.ops import spmm
from sparsefmt.plan import constants_of
from sparsefmt.plan.locality import locality
from sparsefmt.plan.pricing import work_of
from sparsefmt.plan.rules import Primitive

from .. import _baselines, _graphs, _harness
from .._harness import Target, geomean

WIDTHS = (128, 256)
#: What counts as a gain; the share of graphs for which the prediction must tell.
GAIN, RIGHT = 1.05, 0.9
#: Entries beyond which an order that the CPU finds takes minutes.
MOST_ON_CPU = 3_000_000
COLUMNS = {
    "case": "<34",
    "ms": "9.4f",
    "community_ms": "12.4f",
    "gain": "7.3f",
    "predicted": "9.3f",
    "degree": "7.3f",
    "rcm": "7.3f",
    "seconds": "8.3f",
}
EPOCH_GRAPHS = ("products", "reddit")
HIDDEN, LAYERS, CLASSES, FEATURES, STEPS = 256, 3, 47, 100, 30
EPOCH_COLUMNS = {
    "case": "<22",
    "ms": "9.2f",
    "own_ms": "9.2f",
    "times": "7.3f",
    "finding_s": "9.2f",
    "paid_back": "9.1f",
    "reason": "<24",
}


def vertices(options: argparse.Namespace) -> bool:
    """Products in each order; files also with their vertices shuffled."""
    cuda = options.device != "cpu"
    _harness.print_head("vertices by community over as they come, float32", COLUMNS)
    rows = []
    for name, A in structures(options):
        orders = _orders(A)
        for feat in WIDTHS:
            rows.append({"case": f"{name} {feat}"} | _product(A, orders, feat, cuda, options.quick))
            _harness.print_row(rows[-1], COLUMNS)
        _harness.free()
    return _harness.keep("plan", "vertices", rows, judge, cuda=cuda, folder=options.out)


def structures(options: argparse.Namespace) -> Iterator[tuple[str, CSR]]:
    """Each graph with its vertices shuffled, and as it was generated or stored."""
    for name in options.graphs or _graphs.PAPERS:
        if name in _graphs.RECIPES:
            for shuffle in (True, False):
                A = _graphs.load(name, device=options.device, shuffle=shuffle)
                yield f"{name}{' shuffled' if shuffle else ''}", A
                _graphs.load.cache_clear()
        else:
            A = _graphs.load(name, device=options.device)
            yield Path(name).stem, A
            yield f"{Path(name).stem} shuffled", shuffled(A)


def shuffled(A: CSR) -> CSR:
    """The graph with its vertices in random order, and ascending columns."""
    perm = np.random.default_rng(0).permutation(A.n_rows).astype(A.index_dtype)
    found: CSR = reorder.Order(to_device(perm, A.device)).apply(A).sorted_indices()
    return found


def _orders(A: CSR) -> dict[str, tuple[CSR, float]]:
    """The graph by community, by degree, by reverse Cuthill-McKee, and the seconds of each."""
    finders = {"community": reorder.community_order, "degree": reorder.degree_order}
    if A.nnz <= MOST_ON_CPU:
        finders["rcm"] = reorder.rcm_order
    found = {}
    for name, find in finders.items():
        start = time.perf_counter()
        B = find(A).apply(A)
        finish(B.indices)  # synchronize!
        found[name] = B, time.perf_counter() - start
    return found


def _product(
    A: CSR, orders: dict[str, tuple[CSR, float]], feat: int, cuda: bool, quick: bool
) -> dict[str, Any]:
    """Time a product in each order, and predict the first."""
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    out = namespace(X).empty((A.n_rows, feat), X.dtype)
    graphs = [A, *(B for B, _ in orders.values())]
    calls = [lambda B=B: spmm(B, X, out=out) for B in graphs]
    (ms, *others), runs = _harness.paced(calls, cuda=cuda, quick=quick)
    given, ordered = (predicted(B, feat) for B in graphs[:2])
    row = {"ms": ms, "community_ms": others[0], "gain": ms / others[0]}
    row["predicted"] = given / ordered
    row |= {name: ms / one for name, one in list(zip(orders, others, strict=True))[1:]}
    return row | {"seconds": orders["community"][1], "nnz": A.nnz, "runs": runs, "feat": feat}


def predicted(A: CSR, feat: int) -> float:
    """Seconds of a product, of constants for the kind of device."""
    constants, kind = constants_of(A.device), "spmm_unweighted"
    sizes = {"n": A.n_cols, "nnz": A.nnz, "w": feat}
    work = work_of(Primitive(kind, ("nnz", "n", "w")), sizes, constants, locality=locality(A))
    return constants.predict(work, kind)


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Whether predictions are on the right side of a gain, and what the order gives."""
    right = [(row["gain"] > GAIN) == (row["predicted"] > GAIN) for row in rows]
    worst = min(rows, key=lambda row: row["gain"])
    return [
        Target("gain predicted above or below 1.05 rightly", sum(right) / len(right), RIGHT),
        Target(f"least gain by community ({worst['case']})", worst["gain"]),
        Target("gain by community, geomean", geomean(row["gain"] for row in rows)),
    ]


# Epochs


class Model(Module):
    """GraphSAGE of three layers."""

    def __init__(self) -> None:
        super().__init__()
        widths = (FEATURES, *(HIDDEN,) * (LAYERS - 1), CLASSES)
        self.layers = torch.nn.ModuleList(map(SAGEConv, widths, widths[1:]))

    def forward(self, x: torch.Tensor, graph: Graph) -> torch.Tensor:
        """Scores of the classes."""
        for layer in self.layers[:-1]:
            x = layer(x, graph).relu()
        scores: torch.Tensor = self.layers[-1](x, graph)
        return scores


def epochs(options: argparse.Namespace) -> bool:
    """Training epochs of GraphSAGE as ``optimize`` makes them, and of the layers as they are."""
    cuda = options.device != "cpu"
    _harness.print_head(f"epochs, planned for {STEPS}, beside the layers' own", EPOCH_COLUMNS)
    rows = []
    for name in options.graphs or EPOCH_GRAPHS:
        A = _graphs.load(name, device=options.device)
        row = {"case": f"{Path(name).stem} sage {LAYERS} x {HIDDEN}"}
        rows.append(row | _epochs(A, quick=options.quick))
        _harness.print_row(rows[-1], EPOCH_COLUMNS)
        _graphs.load.cache_clear()
        _harness.free()
    return _harness.keep("plan", "epochs", rows, judge_epochs, cuda=cuda, folder=options.out)


def _epochs(A: CSR, *, quick: bool) -> dict[str, Any]:
    graph = Graph(A)
    x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, FEATURES)))
    labels = torch.arange(A.n_rows, device=x.device) % CLASSES
    torch.manual_seed(0)
    own = Model().to(x.device)
    first, planned = (Model().to(x.device) for _ in range(2))
    planned.load_state_dict(own.state_dict())

    def step(
        model: Module, x: torch.Tensor, graph: Graph, labels: torch.Tensor
    ) -> list[torch.Tensor]:
        model.zero_grad()
        loss = functional.cross_entropy(model(x, graph), labels)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]  # type: ignore[misc]

    expected = [one.clone() for one in step(own, x, graph, labels)]
    options = {"x": x, "training": True, "steps": STEPS}
    compiled = optimize(first, graph, **options).ordering  # the first on a machine
    found = optimize(planned, graph, **options)
    ordering, inputs = found.ordering, (x, graph, labels)
    assert ordering is not None
    if ordering.chosen:
        perm = _baselines.tensor(ordering.order.perm).long()
        inputs = x[perm], graph.reordered(ordering.order), labels[perm]
        optimize(planned, inputs[1], **options | {"x": inputs[0]})
    for one, other in zip(step(planned, *inputs), expected, strict=True):
        error = float((one - other).norm() / other.norm())
        if not error <= 1e-3:
            return {"wrong": f"a gradient is off by {error:.2g}"}
    calls = [lambda: step(planned, *inputs), lambda: step(own, x, graph, labels)]
    (ms, own_ms), runs = _harness.paced(calls, cuda=x.is_cuda, quick=quick)
    row = {"ms": ms, "own_ms": own_ms, "times": own_ms / ms, "reason": ordering.reason}
    row |= {"finding_s": ordering.seconds or 0.0, "runs": runs, "plan": str(found)}
    row["paid_back"] = row["finding_s"] * 1e3 / max(own_ms - ms, 1e-9)
    row["first_s"] = compiled.seconds if compiled else None
    return row | {"predicted": ordering.predicted, "measured": ordering.measured}


def judge_epochs(rows: list[dict[str, Any]]) -> list[Target]:
    """DESIGN's speed of products, and that nothing becomes slower."""
    found = [Target("least over the layers as they are", min(r["times"] for r in rows), 0.98)]
    for row in rows:
        if row["case"].startswith("products"):
            found += [
                Target("products, over the layers as they are", row["times"], 1.6),
                Target("products, paid back in epochs", row["paid_back"], 30.0, at_least=False),
            ]
    return found
