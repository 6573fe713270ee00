"""The models that are trained: three layers each, on a whole graph or on the rows of a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Identity, Linear, Module, ModuleList
from torch.nn.functional import cross_entropy

from sparsefmt import distributed
from sparsefmt.nn import GATConv, SAGEConv

from .model import Layer
from .shares import Data

HIDDEN, LAYERS, HEADS, K = 256, 3, 4, 32
ITEM = 4  #: bytes of a float32


class Model(Module):
    """Layers of a graph between maps of each vertex alone, ReLU between the layers or not."""

    def __init__(self, layers: list[Module], *, relu: bool, ends: tuple[Module, Module]) -> None:
        super().__init__()
        self.first, self.last = ends
        self.layers, self.relu = ModuleList(layers), relu

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """(n_local, feat) to (n_local, classes)."""
        x = self.first(x)
        for at, layer in enumerate(self.layers):
            x = x.relu() if self.relu and at else x
            x = layer(x, graph)
        out: Tensor = self.last(x)
        return out


def sage(feat: int, classes: int, hidden: int) -> Model:
    """GraphSAGE."""
    widths = [feat, *[hidden] * (LAYERS - 1), classes]
    layers: list[Module] = [SAGEConv(a, b) for a, b in pairwise(widths)]
    return Model(layers, relu=True, ends=(Identity(), Identity()))


def gat(feat: int, classes: int, hidden: int) -> Model:
    """GAT of 4 heads, ``hidden // 8`` features each, and of one head at the end."""
    width = hidden // 8
    layers: list[Module] = [
        GATConv(feat, width, HEADS),
        *(GATConv(HEADS * width, width, HEADS) for _ in range(LAYERS - 2)),
        GATConv(HEADS * width, classes),
    ]
    return Model(layers, relu=True, ends=(Identity(), Identity()))


def maxk(feat: int, classes: int, hidden: int) -> Model:
    """MaxK-GNN's: GraphSAGE that keeps 32 features, between two linear maps."""
    layers: list[Module] = [SAGEConv(hidden, hidden, k=K) for _ in range(LAYERS)]
    return Model(layers, relu=False, ends=(Linear(feat, hidden), Linear(hidden, classes)))


MODELS: dict[str, Callable[[int, int, int], Model]] = {"sage": sage, "gat": gat, "maxk": maxk}
#: Largest difference from training on one device: of losses, and of gradients by their norm.
#: Sums in another order change which of two nearly equal features MaxK keeps.
LIMITS = {"sage": (1e-5, 1e-3), "gat": (1e-5, 1e-3), "maxk": (1e-3, 2e-2)}

#: Those whose products run while features of others are on their way.
OVERLAPS = ("sage", "maxk")


@dataclass(frozen=True)
class Sizes:
    """Of a vertex."""

    features: int
    classes: int


def layers_of(model: str, sizes: Sizes, hidden: int) -> list[Layer]:
    """What a step computes and exchanges, for the prediction.

    A layer's aggregation, and so its exchange, is at the narrower of its widths.  Features that are
    constant are exchanged once, and not in a step: GraphSAGE maps them first only where that is
    less than half as wide.
    """
    feat, classes = sizes.features, sizes.classes
    if model == "maxk":
        return [Layer(hidden, 4 * hidden**2, K * (ITEM + 1), K * ITEM)] * LAYERS
    # Maps of the neighbours and of a vertex itself, or one for both.
    width, maps = (hidden, 2) if model == "sage" else (HEADS * (hidden // 8), 1)
    wide, last = width * ITEM, min(width, classes) * ITEM
    moved, flops = model == "sage" and feat > 2 * width, 2 * maps * feat * width
    first = Layer(width, flops, wide, wide) if moved else Layer(feat, flops, 0, 0, products=1)
    if model == "gat":
        first = Layer(width, flops, 0, 0)
    return [
        first,
        *[Layer(width, 2 * maps * width**2, wide, wide)] * (LAYERS - 2),
        Layer(min(width, classes), 2 * maps * width * classes, last, last),
    ]


class Training:
    """A model on the data of a rank, from the same weights on each, and the step that trains it."""

    def __init__(self, name: str, data: Data, hidden: int = HIDDEN) -> None:
        torch.manual_seed(0)
        model = MODELS[name](data.x.shape[1], data.classes, hidden)
        self.name, self.data, self.hidden = name, data, hidden
        self.model = model.to(data.x.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def backward(self) -> Tensor:
        """Compute the gradients of all vertices; the loss is the part of those of this rank."""
        self.optimizer.zero_grad()
        logits, labels = self.model(self.data.x, self.data.graph), self.data.labels
        if self.data.group is None:
            loss = cross_entropy(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = distributed.cross_entropy(logits, labels, group=self.data.group)
            loss.backward()  # type: ignore[no-untyped-call]
            distributed.sum_gradients(self.model, self.data.group)
        return loss.detach()

    def step(self) -> Tensor:
        """Train one step, and give its loss as ``backward`` does."""
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

    @property
    def layers(self) -> list[Layer]:
        """What a step computes and exchanges."""
        return layers_of(self.name, Sizes(self.data.x.shape[1], self.data.classes), self.hidden)

    @property
    def parameter_bytes(self) -> int:
        """What a sum of the gradients moves."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())
