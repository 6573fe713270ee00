"""MaxK-GNN (ASPLOS'24): keep the k largest features of each vertex in the place of ReLU.

- ``accuracy``: GCN, GraphSAGE and GIN with MaxK beside ReLU, over seeds; ``where`` names the
  features that MaxK chooses from, the layer's ``input`` or what its weights made of it;
- ``epochs``: an epoch of GraphSAGE beside torch.sparse and our own ReLU;
- ``kernels``: ``spgemm`` and ``sspmm`` at every k beside cuSPARSE's product of all features;
- ``approximator``: a network of one hidden layer with MaxK learns x^2, as in figure 4.
"""

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.nn.functional import dropout, mse_loss, relu

from sparsefmt import nn

from .. import cbsr, training
from .._table import Benchmark, Limit, Row, Section, numbers, some_of
from ._data import labelled
from ._learning import Network, Recipe, over_seeds, train

KS, HIDDEN = (2, 4, 8, 16, 32, 64, 96, 128, 192), 256
LOST = 0.5  #: most points below ReLU at an eighth of the features
MODELS = {
    "GCN": lambda n, **options: nn.GCNConv(n, n, **options),
    "SAGE": lambda n, **options: nn.SAGEConv(n, n, **options),
    "GIN": lambda n, **options: nn.GINConv(Linear(n, n), **options),
}


class OfReLU(Module):
    """ReLU and dropout before a layer, in the places of MaxK and its dropout."""

    def __init__(self, layer: Module, share: float) -> None:
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return what the layer makes of the features."""
        y: Tensor = self.layer(dropout(relu(x), self.share, self.training), graph)
        return y


def accuracy(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each data set, model, k and wiring, beside ReLU from the same seeds."""
    quick = options.quick
    recipe = Recipe(hidden=32, layers=2, epochs=60) if quick else Recipe(hidden=HIDDEN)
    seeds = options.seeds or ((2,) if quick else (10,))
    ks = options.k or (recipe.hidden // 8,)
    for data in labelled(options, ("flickr", "arxiv", "reddit")):
        for model in options.models or MODELS:
            build, share = MODELS[model], recipe.dropout

            def run(layer: Any, data: Any = data) -> dict[str, Any]:
                make = partial(Network, layer, data, recipe)
                return over_seeds(seeds[0], lambda seed: train(make, data, recipe, seed=seed))

            plain = run(lambda n, build=build, share=share: OfReLU(build(n), share))
            facts = {"graph": data.name, "model": model, "metric": data.metric}
            facts |= {"origin": data.origin, "relu": plain["score"], "relu_sd": plain["sd"]}
            for k in ks:
                for where in ("input", "mapped") if model != "GIN" else ("input",):
                    kept = {"k": k, "dropout": share, "maxk_on": where}
                    row = run(lambda n, kept=kept, build=build: build(n, **kept))
                    lost = plain["score"] - row["score"]
                    case = f"{data.name} {model} k={k} {where}"
                    yield {"case": case, "k": k, "where": where, "lost": lost} | facts | row


def approximator(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the error of networks that learn x^2 on [-1, 1], by their number of hidden units."""
    x = torch.linspace(-1, 1, 512, device=options.device)[:, None]
    for units in (4, 16) if options.quick else (4, 8, 16, 32, 64):
        row: Row = {"case": f"{units} units", "units": units}
        for name, act in (("relu", torch.nn.ReLU()), ("maxk", nn.MaxK(max(units // 4, 1)))):
            errors = []
            for seed in range(3 if options.quick else 10):
                torch.manual_seed(seed)
                net = Sequential(Linear(1, units), act, Linear(units, 1)).to(x.device)
                adam = torch.optim.Adam(net.parameters(), 0.01)
                for _ in range(300 if options.quick else 2000):
                    adam.zero_grad()
                    loss = mse_loss(net(x), x * x)
                    loss.backward()  # type: ignore[no-untyped-call]
                    adam.step()
                errors.append(float(loss.detach()) ** 0.5)
            row[name] = statistics.median(errors)
        yield row


SECTIONS = {
    "accuracy": Section(
        accuracy,
        (
            Limit(
                "lost",
                "each",
                most=LOST,
                where=lambda row: row["k"] == HIDDEN // 8 and row["where"] == "input",
                on=("cpu", "cuda"),
            ),
        ),
    ),
    "epochs": training.SECTIONS["maxk"],
    "kernels": cbsr.SECTIONS["products"],
    "approximator": Section(approximator),
}
EXTRA = {"k": numbers, "seeds": numbers, "models": some_of(MODELS)}
PAPER = Benchmark("papers-maxk", __doc__, SECTIONS, EXTRA)
