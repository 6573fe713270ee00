"""An epoch of each paper's models beside its peer: forward, loss, backward and Adam, all vertices.

- ``fuse``: fuseGNN's GCN (16 features between two layers) and GAT (8 heads of 8) beside PyG, on
  the wall;
- ``tcgnn``: TC-GNN's GCN and AGNN (four layers of 32) in TF32, by tiles if they pay, beside PyG;
- ``maxk``: MaxK-GNN's GraphSAGE (three layers of 256) with MaxK beside ReLU by torch.sparse and
  by ours, matrix products in float32, TF32 and bfloat16;
- ``sampled``: ES-SpMM's samples: a GCN over 16 random entries of a row beside PyG over all.

All begin with the same weights, graphs are prepared before, and PyG's GCN keeps its normalised
edges.  Logits and gradients are compared in float32 with the peer's layers doing the same: of MaxK
by a dense product, of samples with as many entries as the longest row; those of ``fuse`` with PyG's
in float64, where PyG's own error may be half as large.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import cross_entropy, elu, relu

from sparsefmt import CSR, Graph, autograd, nn, reorder
from sparsefmt.ops import scale
from sparsefmt.ops.tiles.kernels import MMA_TILE

from . import _baselines, _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section

CLASSES, HIDDEN, SAMPLE = 16, 256, 16
LIMIT, MAXK_LIMIT = 1e-3, 1e-2  #: MaxK may keep another of two nearly equal features
TIMES_PYG = 2.0  #: most of an error of ours over that of PyG, from the same float64 reference
Layers = Callable[[int], list[Module]]


class Model(Module):
    """Layers of a graph with an activation between them, and linear maps at both ends or none."""

    def __init__(
        self, layers: list[Module], act: Callable[[Tensor], Tensor] = relu, ends: Any = None
    ) -> None:
        super().__init__()
        self.layers, self.act = ModuleList(layers), act
        self.ends = ModuleList(map(Linear, *zip(*ends, strict=True))) if ends else None

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return logits of (n, CLASSES)."""
        x = self.ends[0](x) if self.ends else x
        for at, layer in enumerate(self.layers):
            x = layer(self.act(x) if at else x, graph)
        out: Tensor = self.ends[1](x) if self.ends else x
        return out


class MeanLayer(nn.SAGEConv):
    """GraphSAGE by any mean over in-neighbours, of what an activation makes of features."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.act = act

    def forward(self, x: Tensor, graph: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Return the mean of the mapped features, bias and own part; a graph, or what takes it."""
        mean = graph if callable(graph) else partial(autograd.spmm, graph, reduce="mean")
        x = self.act(x)
        out: Tensor = self.lin_l(mean(x)) + self.lin_r(x)
        return out


@dataclass(frozen=True)
class System:
    """A model of ours, its peer, and the peer's layers that give the same result."""

    name: str
    ours: Callable[[int], Module]
    peer: Callable[[int], Module]
    peer_graph: Callable[[CSR], Any]
    graphs: tuple[str, ...]
    reference: Callable[[int], Module] | None = None  #: the peer unless there is one
    exact: Callable[[int, int], Module] | None = None  #: ours that equals it, by the longest row
    precision: str = "highest"  #: of torch's matrix products
    relu: Callable[[int], Module] | None = None  #: ours with ReLU, timed beside it
    over: Mapping[str, float] = field(default_factory=dict)  #: least speed-up, by graph
    real: tuple[str, ...] = ()  #: small graphs of files: timed on the wall, held against float64


def gcn(layer: Callable[..., Module], feat: int) -> Module:
    """Build two layers of GCN."""
    return Model([layer(feat, 16), layer(16, CLASSES)])


def gat(layer: Callable[..., Module], feat: int) -> Module:
    """Build two layers of GAT."""
    return Model([layer(feat, 8, heads=8), layer(64, CLASSES)], elu)


def agnn(layer: Callable[[], Module], feat: int) -> Module:
    """Build four layers of AGNN between linear ones."""
    return Model([layer() for _ in range(4)], lambda x: x, [(feat, 32), (32, CLASSES)])


def sage(layer: Callable[[], Module], feat: int) -> Module:
    """Build three layers of GraphSAGE between linear ones."""
    ends = [(feat, HIDDEN), (HIDDEN, CLASSES)]
    return Model([layer() for _ in range(3)], lambda x: x, ends)


def pyg_layer(name: str, **options: Any) -> Callable[..., Module]:
    """Return PyG's layer of that name, imported when it is made."""

    def make(*channels: int, **more: Any) -> Module:
        from torch_geometric import nn as pyg

        layer: Module = getattr(pyg, name)(*channels, **options, **more)
        return layer

    return make


def looped(A: CSR) -> Tensor:
    """Return PyG's ``edge_index`` with each vertex' loop."""
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edges = remove_self_loops(_baselines.edge_index(A))[0]
    return add_self_loops(edges, num_nodes=A.n_rows)[0]


def torch_mean(A: CSR) -> Callable[[Any], Any]:
    """Return the mean over in-neighbours by torch.sparse, with gradient."""
    weights = (1 / A.lengths.clip(1)).astype(np.float32)
    return _baselines.torch_product(scale(A.with_data(None), row=weights))


REAL, TILED = ("cora", "pubmed"), ("artist", "com-amazon", "arxiv")
LARGE = ("reddit", "products")
RELU = partial(sage, partial(MeanLayer, relu))
PYG_GCN = partial(gcn, pyg_layer("GCNConv", cached=True))
PYG_GAT = partial(gat, pyg_layer("GATConv", add_self_loops=False))
PYG_AGNN = partial(agnn, pyg_layer("AGNNConv", add_self_loops=False))
EDGES = _baselines.edge_index


#: What torch's words for the precision of products mean on a GPU.
PRECISIONS = {"highest": "", "high": " TF32", "medium": " bfloat16"}


def maxk(k: int, over: float, precision: str = "highest") -> System:
    """Return GraphSAGE that keeps ``k`` features."""
    return System(
        f"SAGE k={k}{PRECISIONS[precision]}",
        partial(sage, partial(nn.SAGEConv, HIDDEN, HIDDEN, k=k)),
        *(RELU, torch_mean, LARGE),
        reference=partial(sage, lambda: MeanLayer(nn.MaxK(k))),
        precision=precision,
        relu=RELU,
        over={"reddit": over},
    )


SYSTEMS = {
    "fuse": (
        System(
            *("GCN", partial(gcn, nn.GCNConv), PYG_GCN, EDGES, ()),
            over={"cora": 2.0, "pubmed": 2.0},
            real=REAL,
        ),
        System(
            *("GAT", partial(gat, nn.GATConv), PYG_GAT, looped, ()),
            over={"cora": 2.0, "pubmed": 3.0},
            real=REAL,
        ),
    ),
    "tcgnn": (
        System("GCN", partial(gcn, nn.GCNConv), PYG_GCN, EDGES, TILED, precision="high"),
        System("AGNN", partial(agnn, nn.AGNNConv), PYG_AGNN, looped, TILED, precision="high"),
    ),
    "maxk": (
        *(maxk(32, 4.0), maxk(16, 6.0), maxk(16, 6.0, "high"), maxk(16, 6.0, "medium")),
        System(
            *("SAGE ReLU bfloat16", RELU, RELU, torch_mean, LARGE),
            precision="medium",
            over={"reddit": 2.2},
        ),
    ),
    "sampled": (
        System(
            f"GCN S={SAMPLE}",
            partial(gcn, partial(nn.GCNConv, training_sample=SAMPLE)),
            PYG_GCN,
            EDGES,
            ("arxiv",),
            exact=lambda feat, most: gcn(partial(nn.GCNConv, training_sample=most), feat),
        ),
    ),
}


class Epochs:
    """Models of one system on a graph, all from the same weights."""

    def __init__(self, system: System, A: CSR, feat: int, options: argparse.Namespace) -> None:
        self.system, self.feat, self.options = system, feat, options
        self.graph, self.longest = Graph(A), int(A.lengths.max())
        if system.precision == "high":
            autograd.prepare(self.graph, tile=MMA_TILE)
        elif system.peer_graph is torch_mean:  # MaxK's gradient reads rows by communities
            autograd.prepare(self.graph, order=reorder.community_order(A))
        else:
            autograd.prepare(self.graph)
        self.peer_graph = system.peer_graph(A)
        self.x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, feat)))
        self.labels = torch.arange(A.n_rows, device=self.x.device) % CLASSES
        torch.manual_seed(0)
        self.weights = system.ours(feat).state_dict()

    def model(self, make: Callable[[], Module]) -> Module:
        """Build a model with the common weights."""
        model = make().to(self.x.device)
        model.load_state_dict(self.weights)
        return model

    def loss(self, model: Module, graph: Any) -> tuple[Tensor, Tensor]:
        """Return logits and the loss."""
        logits = model(self.x.to(next(model.parameters()).dtype), graph)
        return logits, cross_entropy(logits, self.labels)

    def results(self, make: Callable[[], Module], graph: Any, dtype: Any = None) -> list[Tensor]:
        """Return logits, and the gradients of all weights as one tensor, by name."""
        model = self.model(make).to(dtype)
        logits, loss = self.loss(model, graph)
        weights = [weight for _, weight in sorted(model.named_parameters())]
        gradients = torch.autograd.grad(loss, weights)
        return [logits.detach(), torch.cat([gradient.ravel() for gradient in gradients])]

    def epoch(self, make: Callable[[], Module], graph: Any) -> Call:
        """Return a function that trains for one epoch."""
        model = self.model(make)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

        def run() -> None:
            adam.zero_grad()
            self.loss(model, graph)[1].backward()  # type: ignore[no-untyped-call]
            adam.step()

        return run

    def row(self) -> Row:
        """Compare results, then time epochs in turn; without the peer where it cannot run."""
        system, feat = self.system, self.feat
        ours, peer = partial(system.ours, feat), partial(system.peer, feat)
        exact = partial(system.exact, feat, self.longest) if system.exact else ours
        reference = partial(system.reference or system.peer, feat)
        calls, row = {"ms": self.epoch(ours, self.graph)}, {}
        try:
            wide = torch.float64 if system.real else None
            right = self.results(reference, self.peer_graph, wide)
            error = row["error"] = _oracle.norm_error(self.results(exact, self.graph), right)
            limit = MAXK_LIMIT if system.peer_graph is torch_mean else LIMIT
            if system.real:
                theirs = _oracle.norm_error(self.results(peer, self.peer_graph), right)
                row |= {"pyg_error": theirs, "of_pyg": error / max(theirs, 2.0**-24)}
                limit = max(limit, TIMES_PYG * theirs)
            row |= _oracle.refused(_oracle.over(error, limit))
            torch.set_float32_matmul_precision(system.precision)
            calls["peer_ms"] = self.epoch(peer, self.peer_graph)
            calls["peer_ms"]()
            if system.relu:
                calls["relu_ms"] = self.epoch(partial(system.relu, feat), self.graph)
        except torch.OutOfMemoryError as reason:
            return {"wrong": f"the peer has no memory to be compared with: {reason}"}
        _harness.free()
        quick, cuda = self.options.quick, self.options.cuda
        if system.real:
            runs, warmups = (5, 1) if quick else (_harness.RUNS, _harness.WARMUPS)
            makers = {name: lambda call=call: call for name, call in calls.items()}
            row |= _harness.walls(makers, cuda=cuda, runs=runs, warmups=warmups)
            row |= _harness.speed_ups(row)
        else:
            row |= _harness.timed(calls, cuda=cuda, quick=quick)
        torch.set_float32_matmul_precision("highest")
        return row


def rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every model of a paper on every graph."""
    for system in SYSTEMS[name]:
        cpu = () if system.real else ("cpu",)
        for graph, A in _graphs.loaded(options, system.graphs, cpu=cpu, real=system.real):
            feat = _graphs.FEATURES.get(graph, _graphs.OTHER_FEATURES)
            row: Row = {"case": f"{system.name} {graph}", "model": system.name}
            row["over"] = system.over.get(graph)
            yield row | Epochs(system, A, feat, options).row()


LIMITS = (
    Limit("over_peer", "each", least=lambda row: row["over"]),
    Limit("over_peer", "mean", by=("model",)),
    Limit("error", high=True),
    Limit("of_pyg", most=TIMES_PYG, on=("cpu", "cuda")),
)
SECTIONS = {name: Section(partial(rows, name), LIMITS) for name in SYSTEMS}
BENCHMARKS = {"training": Benchmark("training", __doc__, SECTIONS)}
