"""The graphs and models that are trained, whole on one device or shared out among ranks.

Each process generates the same graph on its own device, of one seed, and keeps its rows: quicker
than to hand it over.  That all have the same is checked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy

from sparsefmt import CSR, Graph, distributed, reorder
from sparsefmt.distributed import DistGraph, balanced
from sparsefmt.distributed.graph import MAPPED_AGAIN
from sparsefmt.formats.arrays import namespace
from sparsefmt.interop.torch import to_tensor
from sparsefmt.model.maps import maps_first
from sparsefmt.nn import GATConv, SAGEConv

from .. import _graphs, _harness
from ..training import Model
from .model import Layer
from .ranks import Ranks

#: Features and classes of the papers' graphs; of others as of products.
SIZES = {"reddit": (602, 41), "products": (100, 47)}


@dataclass(frozen=True)
class Data:
    """A graph, or the rows of a rank, with features and labels of its vertices."""

    graph: Any  #: ``Graph`` or ``DistGraph``
    x: Tensor  #: (n_local, feat)
    labels: Tensor  #: (n_local,)
    total: int  #: vertices of the whole graph
    classes: int

    @property
    def group(self) -> Any:
        """Return the group of the ranks that share the graph; None for a whole one."""
        return self.graph.group if isinstance(self.graph, DistGraph) else None


@lru_cache(maxsize=1)
def csr_of(name: str, order: str, device: str) -> CSR:
    """Generate the graph, its vertices in that order, ascending columns in every row."""
    A = _graphs.load(name, device=device)
    if order == "community":
        A = reorder.community_order(A).apply(A).sorted_indices()
    _harness.free()
    return A


def check_alike(A: CSR, ranks: Ranks) -> None:
    """Raise SystemExit if not all processes have the same graph."""
    places = namespace(A.indices).arange(A.nnz) % 1_000_003
    sums = {(A.shape, A.nnz, int((A.indices * places).sum()))}
    if len(sums.union(ranks.gather(*sums))) > 1:
        raise SystemExit("the graphs that the processes generated differ")


def whole(name: str, order: str, device: str) -> Data:
    """Return all of it on one device."""
    A = csr_of(name, order, device)
    return _data(name, Graph(A), A, slice(0, A.n_rows))


@lru_cache(maxsize=4)
def share(name: str, order: str, count: int, ranks: Ranks) -> Data:
    """Return the rows of this rank, of so many ranks."""
    A = csr_of(name, order, ranks.device)
    graph = Graph(A)
    bounds = balanced(graph, count)
    rows = slice(*bounds[ranks.rank : ranks.rank + 2])
    return _data(name, DistGraph.of(graph, bounds, ranks.groups[count]), A, rows)


def _data(name: str, graph: Any, A: CSR, rows: slice) -> Data:
    feat, classes = SIZES.get(name, SIZES["products"])
    x = to_tensor(_graphs.normal(A.indptr, (A.n_rows, feat)))[rows].clone()
    _harness.free()
    labels = torch.arange(A.n_rows, device=x.device)[rows] % classes
    return Data(graph, x, labels, A.n_rows, classes)


def forget(*, generated: bool) -> None:
    """Remove the graphs in an order, and of those as generated too."""
    csr_of.cache_clear()
    share.cache_clear()
    if generated:
        _graphs.load.cache_clear()
    _harness.free()


# Models: three layers each

HIDDEN, LAYERS, HEADS, K = 256, 3, 4, 32
ITEM = 4  #: bytes of a float32


def _widths(feat: int, classes: int, hidden: int) -> list[tuple[int, int]]:
    """Features into and out of each layer."""
    return [*pairwise([feat, *[hidden] * (LAYERS - 1), classes])]


def sage(feat: int, classes: int, hidden: int) -> Model:
    """GraphSAGE."""
    return Model([SAGEConv(*ends) for ends in _widths(feat, classes, hidden)])


def gat(feat: int, classes: int, hidden: int) -> Model:
    """GAT of 4 heads, ``hidden // 8`` features each, and of one head at the end."""
    *ends, (width, _) = _widths(feat, classes, HEADS * (hidden // 8))
    layers: list[Module] = [GATConv(i, o // HEADS, HEADS) for i, o in ends]
    return Model([*layers, GATConv(width, classes)])


def maxk(feat: int, classes: int, hidden: int) -> Model:
    """MaxK-GNN's: GraphSAGE that keeps 32 features, between two linear maps."""
    layers: list[Module] = [SAGEConv(hidden, hidden, k=K) for _ in range(LAYERS)]
    return Model(layers, lambda x: x, [(feat, hidden), (hidden, classes)])


MODELS: dict[str, Callable[[int, int, int], Model]] = {"sage": sage, "gat": gat, "maxk": maxk}
#: Largest difference from training on one device: of losses, and of gradients by their norm.
#: Sums in another order change which of two nearly equal features MaxK keeps.
LIMITS = {"sage": (1e-5, 1e-3), "gat": (1e-5, 1e-3), "maxk": (1e-3, 2e-2)}
#: Those whose products run while features of others are on their way.
OVERLAPS = ("sage", "maxk")


def layers_of(model: str, feat: int, classes: int, hidden: int) -> list[Layer]:
    """Return what a step computes and exchanges, for the prediction.

    A layer's aggregation, and so its exchange, is at the narrower of its widths.  Features that are
    constant are exchanged once, and not in a step, unless they are mapped first.
    """
    if model == "maxk":
        both, sent = 4 * hidden**2, (K * (ITEM + 1), K * ITEM)
        added = 4 * ITEM * (hidden + K)
        # The maps at the ends are counted with the layers; only the first one's has two passes.
        flops = [1.5 * both + 2 * feat * hidden, both, both + 2 * hidden * classes]
        return [Layer(hidden, one, *sent, added=added) for one in flops]
    if model == "sage":
        ends = _widths(feat, classes, hidden)
        return [_sage_layer(i, o, constant=not at) for at, (i, o) in enumerate(ends)]
    found = []
    for i, o in _widths(feat, classes, HEADS * (hidden // 8)):
        constant, width = not found, min(i, o) if found else o
        moves = not (constant and i <= max(o, MAPPED_AGAIN))
        sent, added = (width * ITEM, 6 * width * ITEM) if moves else (0, 0)
        found.append(Layer(width, 2 * i * o, sent, sent, added=added))
    return found


def _sage_layer(i: int, o: int, *, constant: bool) -> Layer:
    """Return a layer from ``i`` features, which have a gradient or are ``constant``, to ``o``.

    What a rank adds up, in arrays: both parts of a product and of its gradient, the map of a
    vertex's own features, a bias after a product, and the gradients of both maps.  One GPU has a
    node for the whole layer.
    """
    early = maps_first(i, o, gradient=not constant)
    width, forward, backward = (o, 7 * o, 3 * i) if early else (i, 2 * i + o, 5 * i)
    sent, products = (0, 1) if constant and not early else (width * ITEM, 2)
    added = ITEM * (forward + (0 if constant else backward))
    return Layer(width, 4 * i * o, sent, sent, products, added)


class Training:
    """A model on the data of a rank, from the same weights on each, and the step that trains it."""

    def __init__(self, name: str, data: Data, hidden: int = HIDDEN) -> None:
        torch.manual_seed(0)
        sizes = data.x.shape[1], data.classes, hidden
        self.name, self.data = name, data
        self.model = MODELS[name](*sizes).to(data.x.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        #: What a step computes and exchanges, and what a sum of the gradients moves.
        self.layers = layers_of(name, *sizes)
        self.parameter_bytes = sum(p.nbytes for p in self.model.parameters())

    def backward(self) -> Tensor:
        """Compute the gradients of all vertices; the loss is the part of those of this rank."""
        self.optimizer.zero_grad()
        data = self.data
        logits, group = self.model(data.x, data.graph), data.group
        if group is None:
            loss = cross_entropy(logits, data.labels)
        else:
            loss = distributed.cross_entropy(logits, data.labels, group=group)
        loss.backward()  # type: ignore[no-untyped-call]
        if group is not None:
            distributed.sum_gradients(self.model, group)
        return loss.detach()

    def step(self) -> Tensor:
        """Train one step, and return its loss as ``backward`` does."""
        loss = self.backward()
        self.optimizer.step()
        return loss

    def begun(self, steps: int) -> tuple[list[float], list[Tensor]]:
        """Train the first steps: the loss of the whole graph at each, and the first gradients."""
        found = [self.backward()]
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        losses = torch.stack([*found, *(self.step() for _ in range(steps - 1))])
        if self.data.group is not None:
            dist.all_reduce(losses, group=self.data.group)
        return losses.tolist(), gradients
