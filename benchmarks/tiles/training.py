"""Epochs of GCN and AGNN by tiles and by CSR beside PyG and torch.sparse.

GCN has two layers with 16 features between them; AGNN four layers of 32 features between two linear
ones: TC-GNN's models.  An epoch is forward, loss, backward and a step of Adam over all vertices,
with features and values in float32.  All ways begin with the same weights, and all run with torch's
matrix products in TF32 ("high"), where ours go by tiles if that pays, and in float32 ("highest"),
by CSR.  Graphs are prepared before: PyG's GCN keeps its normalised edges, its AGNN has its loops.
Both models run eagerly, ours and theirs: an epoch of AGNN is a hundred operations or so, and on the
smallest graphs the time is that of the host, which launches them one by one.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import cross_entropy, relu

from sparsefmt import COO, CSR, Graph, autograd, nn
from sparsefmt.formats.arrays import namespace
from sparsefmt.ops import scale
from sparsefmt.ops.tiles.kernels import MMA_TILE

from .. import _baselines, _graphs, _harness
from .._harness import Target, geomean
from ..cbsr.training import worst
from .cases import sources

CLASSES = 16
GENERATED = ("artist", "com-amazon", "amazon0505", "yelp", "arxiv", "flickr")
REAL = (
    "citeseer",
    "cora",
    "pubmed",
    "proteins_full",
    "dd",
    "amazon_computers",
    "musae_facebook",
    "fb_oklahoma97",
    "com_dblp",
    "ego_twitter",
)
#: Features of the data sets, as published.
FEATURES = {
    "reddit": 602,
    "proteins": 8,
    "products": 100,
    "ppa": 58,
    "arxiv": 128,
    "ddi": 128,
    "flickr": 500,
    "yelp": 300,
    "artist": 100,
    "citeseer": 3703,
    "cora": 1433,
    "pubmed": 500,
    "proteins_full": 29,
    "dd": 89,
    "amazon_computers": 767,
    "musae_facebook": 4714,
    "tolokers": 10,
}
OTHER_FEATURES = 96  #: of TC-GNN's graphs without any, com-amazon and amazon0505 among them
#: Torch's names for the precision of matrix products, and the largest difference from the reference
#: in float32, relative to its norm: of TF32's operands 11 bits are right, through several layers.
LIMITS = {"high": 2e-2, "highest": 1e-3}
COLUMNS = {
    "case": "<30",
    "ms": "8.3f",
    "pyg_ms": "8.3f",
    "torch_ms": "8.3f",
    "over_pyg": "8.2f",
    "over_torch": "10.2f",
    "error": "8.1e",
    "skipped": "<40",
}


class GCN(Module):
    """Two layers."""

    def __init__(self, layer: Callable[[int, int], Module], feat: int, hidden: int = 16) -> None:
        super().__init__()
        self.layers = ModuleList([layer(feat, hidden), layer(hidden, CLASSES)])

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """(n, feat) to (n, CLASSES)."""
        out: Tensor = self.layers[1](relu(self.layers[0](x, graph)), graph)
        return out


class AGNN(Module):
    """Four layers without weights but ``beta``, between linear ones."""

    def __init__(self, layer: Callable[[], Module], feat: int, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.last = Linear(feat, hidden), Linear(hidden, CLASSES)
        self.layers = ModuleList(layer() for _ in range(4))

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """(n, feat) to (n, CLASSES)."""
        x = relu(self.first(x))
        for layer in self.layers:
            x = layer(x, graph)
        out: Tensor = self.last(x)
        return out


class Product(nn.GCNConv):
    """A layer of GCN with any way to multiply by the normalised graph."""

    def __init__(self, *channels: int, product: Callable[[Tensor], Tensor]) -> None:
        super().__init__(*channels)
        self.product = product

    def forward(self, x: Tensor, graph: Any, edge_weight: Tensor | None = None) -> Tensor:
        """The graph is the product's affair."""
        y = self.product(self.lin(x))
        return y if self.bias is None else y + self.bias


MODELS: dict[str, Callable[..., Module]] = {"GCN": GCN, "AGNN": AGNN}
OURS: dict[str, Callable[..., Module]] = {"GCN": nn.GCNConv, "AGNN": nn.AGNNConv}
#: Layers of a way, and what they take for the graph.
Way = tuple[Callable[..., Module], Any]


def normalised(A: CSR) -> CSR:
    """``D^-1/2 (A + I) D^-1/2`` of an unweighted graph; loops only where there are none."""
    coo, xp = A.tocoo(), namespace(A.indptr)
    missing = xp.ones(A.n_rows, bool)
    missing[coo.row[coo.row == coo.col]] = False
    loops = xp.flatnonzero(missing).astype(A.index_dtype)
    ends = (xp.concatenate([coo.row, loops]), xp.concatenate([coo.col, loops]))
    B = COO(*ends, shape=A.shape).tocsr().sorted_indices()
    factors = (1 / xp.sqrt(B.lengths)).astype(np.float32)
    result: CSR = scale(B, row=factors, col=factors)
    return result


def torch_way(A: CSR, kind: str) -> Way:
    """torch.sparse has the products of GCN."""
    if kind != "GCN":
        raise _baselines.Missing(f"torch.sparse has no {kind}")
    return partial(Product, product=_baselines.torch_product(normalised(A))), None


def pyg_way(A: CSR, kind: str) -> Way:
    """PyG's layers over an ``edge_index``; that of AGNN has its loops already."""
    from torch_geometric import nn as pyg
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edges = _baselines.edge_index(A)
    if kind == "GCN":
        return partial(pyg.GCNConv, cached=True), edges
    edges = add_self_loops(remove_self_loops(edges)[0], num_nodes=A.n_rows)[0]
    return partial(pyg.AGNNConv, add_self_loops=False), edges


OTHERS = {"pyg": pyg_way, "torch": torch_way}
#: Of each model, whose results are right.
REFERENCES = {"GCN": "torch", "AGNN": "pyg"}


class Training:
    """A graph with features and labels, and a model in several ways, all from the same weights."""

    def __init__(self, A: CSR, kind: str, feat: int) -> None:
        graph = Graph(A)
        autograd.prepare(graph, tile=MMA_TILE)
        self.A, self.kind, self.feat = A, kind, feat
        self.x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, feat)))
        self.labels = torch.arange(A.n_rows, device=self.x.device) % CLASSES
        self.ways: dict[str, Way] = {"ours": (OURS[kind], graph)}
        torch.manual_seed(0)
        self.weights = MODELS[kind](OURS[kind], feat).state_dict()

    def add(self, name: str) -> None:
        """Another library's way; ``Missing`` if an epoch of it does not run here."""

        def first() -> Callable[[], None]:
            self.ways[name] = OTHERS[name](self.A, self.kind)
            return self.epoch(name)

        try:
            _baselines.guarded(first)
        except _baselines.Missing:
            self.ways.pop(name, None)
            raise

    def model(self, name: str) -> Module:
        """With the common weights."""
        model = MODELS[self.kind](self.ways[name][0], self.feat).to(self.x.device)
        model.load_state_dict(self.weights)
        return model

    def results(self, name: str) -> list[Tensor]:
        """Logits, and the gradients of all weights as one tensor: some are next to nothing."""
        model = self.model(name)
        logits = model(self.x, self.ways[name][1])
        loss = cross_entropy(logits, self.labels)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        return [logits.detach(), torch.cat([gradient.ravel() for gradient in gradients])]

    def epoch(self, name: str) -> Callable[[], None]:
        """A function that trains for one."""
        model, graph = self.model(name), self.ways[name][1]
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def run() -> None:
            optimizer.zero_grad()
            loss = cross_entropy(model(self.x, graph), self.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return run


def models(options: argparse.Namespace) -> bool:
    """Every graph and model, in TF32 and in float32."""
    _harness.print_head(
        "epochs in TF32 (high), by tiles if they pay, and float32 (highest)", COLUMNS
    )
    rows = []
    for name, source in sources(options, GENERATED, REAL):
        for kind in MODELS:
            feat = FEATURES.get(name, OTHER_FEATURES)
            for row in _rows_of(Training(_graphs.load(source), kind, feat), options.quick):
                row = {"case": f"{name} {kind} {row['precision']}", "graph": name} | row
                _harness.print_row(row, COLUMNS)
                rows.append(row)
            _harness.free()
    return _harness.keep("tcgnn", "models", rows, judge, cuda=True, folder=options.out)


def _rows_of(training: Training, quick: bool) -> Iterator[dict[str, Any]]:
    """The reference is computed in float32."""
    torch.set_float32_matmul_precision("highest")
    common: dict[str, Any] = {"model": training.kind, "feat": training.feat}
    for name in OTHERS:
        try:
            training.add(name)
        except _baselines.Missing as reason:
            if name in ("pyg", REFERENCES[training.kind]):
                common["skipped"] = f"{name}: {reason}"
        _harness.free()
    reference = REFERENCES[training.kind]
    exact = training.results(reference) if reference in training.ways else None
    for precision, limit in LIMITS.items():
        torch.set_float32_matmul_precision(precision)
        row = {"precision": precision} | common
        if exact is not None:
            row["error"] = worst(training.results("ours"), exact)
            if not row["error"] <= limit:
                wrong = f"differs by {row['error']:.3g}, at most {limit:g} is right"
                yield row | {"wrong": wrong}
                continue
        yield row | _timed(training, quick=quick)
    torch.set_float32_matmul_precision("highest")


def _timed(training: Training, *, quick: bool) -> dict[str, Any]:
    calls = {name: training.epoch(name) for name in training.ways}
    times, runs = _harness.paced([*calls.values()], cuda=True, quick=quick)
    found = dict(zip(calls, times, strict=True))
    row: dict[str, Any] = {"ms": found.pop("ours"), "runs": runs}
    for name, ms in found.items():
        row |= {f"{name}_ms": ms, f"over_{name}": ms / row["ms"]}
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over PyG and torch.sparse, and in TF32 over float32, to know."""
    found = []
    for kind in MODELS:
        for precision in LIMITS:
            held = [r for r in rows if (r["model"], r["precision"]) == (kind, precision)]
            for key, library in (("over_pyg", "PyG"), ("over_torch", "torch.sparse")):
                ratios = [row[key] for row in held if key in row]
                if ratios:
                    name = f"{kind} {precision} over {library}"
                    found.append(Target(f"{name}, geomean of {len(ratios)}", geomean(ratios)))
                    found.append(Target(f"{name}, worst", min(ratios)))
        ms = {(r["graph"], r["precision"]): r["ms"] for r in rows if r["model"] == kind}
        both = {graph for graph, _ in ms if {(graph, name) for name in LIMITS} <= ms.keys()}
        if both:
            gains = [ms[graph, "highest"] / ms[graph, "high"] for graph in both]
            name = f"{kind}, tiles in TF32 over CSR in float32, geomean of {len(gains)}"
            found.append(Target(name, geomean(gains)))
    return found
