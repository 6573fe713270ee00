"""Graphs with labels, and two-layer GCNs that are trained on them.

Real graphs come with features, labels and a published split.  A generated one has its planted
communities for labels: the mean of each is a normal vector times ``SIGNAL``, and the features of a
vertex are that of its community and normal noise of one, so that they alone tell about half of the
vertices; a tenth of these is for training, a tenth for validation, the others for testing.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy, dropout, relu

from sparsefmt import CSR, Graph, autograd
from sparsefmt.nn import GCNConv

from .. import _graphs
from ..attention.cases import graphs_of

REAL = ("cora", "citeseer", "amazon_computers", "tolokers")
PARTS = ("train", "val", "test")
#: Beyond so many columns features are counts, whose rows are made to add up to one; below, columns
#: are measures, which are standardised.
MANY_COLUMNS = 100
#: Of a generated graph.
FEAT = 64
#: Spread of the means of communities, by which nobody tells more than 58 % of the vertices of
#: reddit, 55 % of those of "small".
SIGNAL, SIGNALS = 0.32, {"small": 0.2}
QUICK_EPOCHS = 5
MakeLayer = Callable[[int, int], Module]


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained, by Adam on all training vertices at once."""

    hidden: int = 64
    dropout: float = 0.5
    weight_decay: float = 5e-4
    lr: float = 0.01
    epochs: int = 200


#: Those of the citation graphs are GCN's own; the others were chosen by validation accuracy.
RECIPES = {
    "cora": Recipe(hidden=16),
    "citeseer": Recipe(hidden=16),
    "amazon_computers": Recipe(weight_decay=0.0, lr=0.1),
    "tolokers": Recipe(dropout=0.0, weight_decay=0.0, lr=0.03),
}


def recipe_of(name: str, *, quick: bool) -> Recipe:
    """That of a graph; ``quick`` in a few epochs."""
    found = RECIPES.get(name, Recipe())
    return replace(found, epochs=QUICK_EPOCHS) if quick else found


@dataclass(frozen=True)
class Labelled:
    """A graph with features, labels and the vertices of each part, all on one device."""

    name: str
    graph: Graph
    x: Tensor  #: (n, feat)
    y: Tensor  #: (n,), -1 where there is none
    parts: dict[str, Tensor]  #: ids
    planted: bool = False  #: whether the labels are communities
    filled: Tensor | None = None  #: places of ``x``, counted through it, where not most are filled

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(self.y.max()) + 1

    def accuracy(self, logits: Tensor, part: str) -> Tensor:
        """The share of a part's vertices whose largest logit is that of their label, 0-d."""
        at = self.parts[part]
        return (logits[at].argmax(1) == self.y[at]).double().mean()

    def without_edges(self) -> "Labelled":
        """The same vertices, no two linked."""
        empty = self.graph.csr.indptr * 0
        alone = CSR(empty, self.graph.csr.indices[:0], shape=self.graph.shape)
        return replace(self, graph=Graph(alone))


def labelled(
    options: argparse.Namespace, real: tuple[str, ...], generated: str
) -> Iterator["Labelled"]:
    """The graphs asked for, else those of files, as far as there are any, and a generated one."""
    for _, source in graphs_of(options, (generated,) if generated else (), real):
        make = planted if source in _graphs.RECIPES else from_file
        yield make(source, device=options.device)


def from_file(path: str, *, device: str) -> Labelled:
    """A labelled graph of ``--data``; its first split where there are several."""
    graph = Graph(_graphs.load(path, device=device))
    with np.load(path, allow_pickle=False) as file:
        if "y" not in file.files:
            raise SystemExit(f"{path} has no labels: give one of {', '.join(REAL)}")
        x, y = _features(file), file["y"].astype(np.int64)
        parts = {part: np.flatnonzero(file[f"{part}_mask"]) for part in PARTS}
    return _on_device(Path(path).stem, graph, x, y, parts, device)


def _features(file: Any) -> Any:
    """(n, feat), dense, in float32."""
    if "x" in file.files:
        x = file["x"].astype(np.float32)
    else:
        data, shape = file["x_data"].astype(np.float32), tuple(file["x_shape"].tolist())
        x = CSR(file["x_indptr"], file["x_indices"], data, shape=shape).toarray()
    if x.shape[1] > MANY_COLUMNS:
        return x / np.maximum(x.sum(1, keepdims=True), 1)
    return (x - x.mean(0)) / np.maximum(x.std(0), 1e-6)


def planted(name: str, *, device: str) -> Labelled:
    """A generated graph with its communities for labels."""
    graph = Graph(_graphs.load(name, device=device))
    y = _graphs.communities(name, device="cpu").astype(np.int64)
    chance = np.random.default_rng(0)
    means = SIGNALS.get(name, SIGNAL) * chance.standard_normal((int(y.max()) + 1, FEAT), np.float32)
    x = means[y] + chance.standard_normal((len(y), FEAT), np.float32)
    tenth = len(y) // 10
    cut = np.split(chance.permutation(len(y)), [tenth, 2 * tenth])
    found = _on_device(name, graph, x, y, dict(zip(PARTS, cut, strict=True)), device)
    return replace(found, planted=True)


def _on_device(name: str, graph: Graph, x: Any, y: Any, parts: Any, device: str) -> Labelled:
    autograd.prepare(graph)
    tensors = {part: torch.from_numpy(ids).to(device) for part, ids in parts.items()}
    x, y = (torch.from_numpy(array).to(device) for array in (x, y))
    filled = x.view(-1).nonzero()[:, 0]
    sparse = 2 * len(filled) < x.numel()
    return Labelled(name, graph, x, y, tensors, filled=filled if sparse else None)


class GCN(Module):
    """Two layers with ReLU between them, and dropout before each."""

    def __init__(self, make: MakeLayer, data: Labelled, recipe: Recipe) -> None:
        super().__init__()
        self.first = make(data.x.shape[1], recipe.hidden)
        self.second = make(recipe.hidden, data.classes)
        self.dropout, self.filled = recipe.dropout, data.filled

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """(n, feat) to (n, classes)."""
        h = relu(self.first(self._dropped(x), graph))
        out: Tensor = self.second(dropout(h, self.dropout, self.training), graph)
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        """Dropout of the features, which draws no number for a zero."""
        if self.filled is None or not (self.training and self.dropout):
            return dropout(x, self.dropout, self.training)
        found = torch.zeros_like(x)
        found.view(-1)[self.filled] = dropout(x.view(-1)[self.filled], self.dropout)
        return found


def train(data: Labelled, recipe: Recipe, *, seed: int, sample: int | None = None) -> GCN:
    """The model of the first epoch of the highest validation accuracy, by the whole graph.

    ``sample`` entries of each row are drawn anew for each product in training, all without it.
    No epoch waits for the device.
    """
    torch.manual_seed(seed)
    model = GCN(partial(GCNConv, training_sample=sample), data, recipe).to(data.x.device)
    weights, decay = [*model.parameters()], recipe.weight_decay
    optimizer = torch.optim.Adam(weights, recipe.lr, weight_decay=decay, fused=True)
    best, highest = [weight.detach().clone() for weight in weights], data.x.new_tensor(-1.0)
    at = data.parts["train"]
    for _ in range(recipe.epochs):
        model.train()
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x, data.graph)[at], data.y[at])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        accuracy = data.accuracy(predict(model, data), "val")
        for kept, weight in zip(best, weights, strict=True):
            kept.copy_(torch.where(accuracy > highest, weight.detach(), kept))
        highest = torch.maximum(highest, accuracy)
    with torch.no_grad():
        for kept, weight in zip(best, weights, strict=True):
            weight.copy_(kept)
    return model.eval()


def predict(model: Module, data: Labelled) -> Tensor:
    """Logits, in evaluation."""
    model.eval()
    with torch.no_grad():
        out: Tensor = model(data.x, data.graph)
    return out
