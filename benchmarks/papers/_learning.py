"""Training of a model until its validation is best, over seeds and splits."""

import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ModuleList
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, dropout

from sparsefmt import nn

from .._table import numbers
from ._data import Labelled

#: Options of the papers that train.
EXTRA = {"seeds": numbers, "epochs": numbers}


@dataclass(frozen=True)
class Recipe:
    """Options of training: by Adam over all vertices, to the best epoch by validation."""

    hidden: int = 256
    layers: int = 3
    epochs: int = 200
    rate: float = 0.003
    dropout: float = 0.3
    every: int = 5  #: epochs between two looks at the validation

    @classmethod
    def of(cls, options: Any, **more: Any) -> "Recipe":
        """Return the recipe of options: of few epochs for quick ones."""
        recipe = cls(**more)
        if options.quick:
            recipe = replace(recipe, hidden=64, layers=2, epochs=60, rate=0.01)
        return replace(recipe, epochs=options.epochs[0]) if options.epochs else recipe


class Network(Module):
    """A linear map, layers of a graph between normalisations, and a linear map.

    ``layer(hidden)`` builds a layer, whose activation stands before it, as MaxK-GNN's do.
    """

    def __init__(
        self,
        layer: Callable[[int], Module],
        data: Labelled,
        recipe: Recipe,
        norm: Callable[[int], Module] = LayerNorm,
    ) -> None:
        super().__init__()
        hidden, self.share = recipe.hidden, recipe.dropout
        self.first, self.last = Linear(data.x.shape[1], hidden), Linear(hidden, data.outputs)
        self.layers = ModuleList(layer(hidden) for _ in range(recipe.layers))
        self.norms = ModuleList(norm(hidden) for _ in range(recipe.layers))

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return numbers of each class or task."""
        x = self.first(dropout(x, self.share, self.training))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, graph))
        out: Tensor = self.last(x)
        return out


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the mean loss over vertices with these labels."""
    if y.dim() == 2:
        return binary_cross_entropy_with_logits(logits, y.float())
    return cross_entropy(logits, y)


def score(logits: Tensor, data: Labelled, mask: Tensor) -> float:
    """Compute the metric of a data set over the vertices of a mask, in percent."""
    logits, y = logits[mask].float(), data.y[mask]
    if data.metric == "roc_auc":
        several = y.dim() == 2
        scores = logits if several else logits[:, 1:] - logits[:, :1]
        return 100 * roc_auc(scores, y if several else y[:, None])
    if y.dim() == 2:  # micro-F1
        said = logits > 0
        both = (said & (y > 0)).sum()
        return 200 * float(both / (said.sum() + (y > 0).sum()).clamp(min=1))
    return 100 * float((logits.argmax(1) == y).float().mean())


def roc_auc(scores: Tensor, y: Tensor) -> float:
    """Compute the mean over columns of the share of pairs in right order; of a tie, half."""
    areas = []
    for column, label in zip(scores.T, y.T, strict=True):
        _, place, count = torch.unique(column, return_inverse=True, return_counts=True)
        ranks = (count.cumsum(0) - (count - 1) / 2.0).double()[place]
        positive = label > 0
        ones, zeros = int(positive.sum()), int((~positive).sum())
        if ones and zeros:
            area = float(ranks[positive].sum()) - ones * (ones + 1) / 2
            areas.append(area / (ones * zeros))
    return statistics.fmean(areas) if areas else 0.5


@dataclass(frozen=True)
class Trained:
    """A model trained from one seed, at its best validation."""

    model: Module
    test: float
    curve: tuple[float, ...]  #: of validation


def train(
    make: Callable[[], Module], data: Labelled, recipe: Recipe, seed: int, *, graph: Any = None
) -> Trained:
    """Train a model from one seed, on the split of that number; on a GPU as one CUDA graph."""
    torch.manual_seed(seed)
    graph = data.graph if graph is None else graph
    model = make().to(data.x.device)
    cuda = data.x.is_cuda
    adam = torch.optim.Adam(model.parameters(), recipe.rate, fused=cuda, capturable=cuda)
    training, validation, test = data.splits[seed % len(data.splits)]
    x, rows = data.x, training.nonzero()[:, 0]  # by number: a mask is counted on the CPU
    y = data.y[rows]

    def step() -> None:
        adam.zero_grad()
        loss_of(model(x, graph)[rows], y).backward()  # type: ignore[no-untyped-call]
        adam.step()

    learn = nn.capture(step, check=False)
    best, curve, weights = (-1.0, 0.0), [], model.state_dict()
    for epoch in range(recipe.epochs):
        model.train()
        learn()
        if epoch % recipe.every == recipe.every - 1:
            model.eval()
            with torch.no_grad():
                logits = model(x, graph)
            curve.append(score(logits, data, validation))
            if curve[-1] > best[0]:
                best = curve[-1], score(logits, data, test)
                weights = deepcopy(model.state_dict())
    model.load_state_dict(weights)
    return Trained(model.eval(), best[1], tuple(curve))


def over_seeds(seeds: int, run: Callable[[int], Trained]) -> dict[str, Any]:
    """Return mean and deviation of the test's metric, the mean curve, and its mean maximum."""
    results = [run(seed) for seed in range(seeds)]
    tests = [result.test for result in results]
    curves = zip(*(result.curve for result in results), strict=True)
    return {
        "score": statistics.fmean(tests),
        "sd": statistics.stdev(tests) if seeds > 1 else 0.0,
        "valid": statistics.fmean(max(result.curve) for result in results),
        "curve": [round(statistics.fmean(values), 2) for values in curves],
    }
