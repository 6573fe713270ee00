"""MaxK-GNN (ASPLOS'24): keep the k largest features of each vertex in the place of ReLU.

- ``accuracy``: GCN, GraphSAGE and GIN with MaxK beside ReLU, over seeds, each normalised by layers
  or batches, as validation says (by layers alone of less than three seeds); ``where`` names the
  features that MaxK chooses from, the layer's ``input`` or what its weights made of it;
- ``epochs``: an epoch of GraphSAGE beside torch.sparse and our own ReLU;
- ``kernels``: ``spgemm`` and ``sspmm`` at every k beside cuSPARSE's product of all features;
- ``approximator``: a network of one hidden layer with MaxK learns x^2, as in figure 4.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, LayerNorm, Linear, Module, Sequential
from torch.nn.functional import dropout, mse_loss, relu

from sparsefmt import nn

from .. import cbsr, training
from .._table import Benchmark, Limit, Row, Section, numbers, some_of
from . import _learning
from ._data import Labelled, labelled
from ._learning import Network, Recipe, over_seeds, train
from ._paper import Claim, Panel, Paper, of

NORMS = (LayerNorm, BatchNorm1d)
KS, HIDDEN = (2, 4, 8, 16, 32, 64, 96, 128, 192), 256
SHARE, LOST = 8, 0.5  #: points below ReLU are judged where an eighth of the features is kept
MODELS = {
    "GCN": lambda n, **options: nn.GCNConv(n, n, **options),
    "SAGE": lambda n, **options: nn.SAGEConv(n, n, **options),
    "GIN": lambda n, **options: nn.GINConv(Linear(n, n), **options),
}


class OfReLU(Module):
    """ReLU and dropout before a layer, in the places of MaxK and its dropout."""

    def __init__(self, build: Callable[[int], Module], share: float, hidden: int) -> None:
        super().__init__()
        self.layer, self.share = build(hidden), share

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Return what the layer makes of the features."""
        y: Tensor = self.layer(dropout(relu(x), self.share, self.training), graph)
        return y


def accuracy(options: argparse.Namespace) -> Iterator[Row]:
    """Yield data sets, models and k beside ReLU of the same seeds; both wirings at an eighth."""
    quick = options.quick
    recipe = Recipe.of(options, hidden=HIDDEN)
    seeds = options.seeds[0] if options.seeds else 2 if quick else 10
    ks = [k for k in options.k or ((4, 8, 16) if quick else KS) if k <= recipe.hidden]
    for data in labelled(options, ("flickr", "arxiv", "reddit")):
        for model in options.models or MODELS:
            build, share = MODELS[model], recipe.dropout
            plain = trial(partial(OfReLU, build, share), data, recipe, seeds)
            facts = {"graph": data.name, "model": model, "metric": data.metric}
            facts |= {"origin": data.origin, "relu": plain["score"], "relu_sd": plain["sd"]}
            for k in ks:
                both = model != "GIN" and k * SHARE == recipe.hidden
                for where in ("input", "mapped") if both else ("input",):
                    layer = partial(build, k=k, dropout=share, maxk_on=where)
                    row: Row = {"case": f"{data.name} {model} k={k} {where}", "k": k}
                    row |= {"where": where, "share_of": recipe.hidden / k} | facts
                    row |= trial(layer, data, recipe, seeds)
                    yield row | {"lost": plain["score"] - row["score"]}


def trial(layer: Any, data: Labelled, recipe: Recipe, seeds: int) -> dict[str, Any]:
    """Train a network of such layers from each seed, normalised in the way that validates best."""
    results = []
    for norm in NORMS[: None if seeds > 2 else 1]:
        make = partial(Network, layer, data, recipe, norm)
        scores = over_seeds(seeds, partial(train, make, data, recipe))
        results.append(scores | {"norm": norm.__name__})
    return max(results, key=lambda result: result["valid"])


def approximator(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the error of networks that learn x^2 on [-1, 1], by their number of hidden units."""
    x = torch.linspace(-1, 1, 512, device=options.device)[:, None]
    for units in (4, 16) if options.quick else (4, 8, 16, 32, 64):
        row: Row = {"case": f"{units} units", "units": units}
        for name, act in (("relu", torch.nn.ReLU()), ("maxk", nn.MaxK(max(units // 4, 1)))):
            errors = []
            for seed in range(1 if options.quick else 10):
                torch.manual_seed(seed)
                net = Sequential(Linear(1, units), act, Linear(units, 1)).to(x.device)
                adam = torch.optim.Adam(net.parameters(), 0.01)
                for _ in range(200 if options.quick else 2000):
                    adam.zero_grad()
                    loss = mse_loss(net(x), x * x)
                    loss.backward()  # type: ignore[no-untyped-call]
                    adam.step()
                errors.append(float(loss.detach()) ** 0.5)
            row[name] = statistics.median(errors)
        yield row


#: The default wiring at an eighth of the features.
JUDGED = of(share_of=SHARE, where="input")
SECTIONS = {
    "accuracy": Section(
        accuracy,
        (Limit("lost", "each", most=LOST, where=JUDGED, on=("cpu", "cuda")),),
    ),
    "epochs": training.SECTIONS["maxk"],
    "kernels": cbsr.SECTIONS["products"],
    "approximator": Section(approximator),
}
EXTRA = {"k": numbers, "models": some_of(MODELS)} | _learning.EXTRA
PAPER = Paper(
    Benchmark("papers-maxk", __doc__, SECTIONS, EXTRA),
    (
        Claim("points lost at an eighth, most", "about 0", "accuracy", "lost", JUDGED, max),
        *(
            Claim(
                f"epoch of SAGE over {what}, k=16, planted {graph}{precision}",
                *(theirs if column == "over_peer" else "", "epochs", column),
                of(case=f"SAGE k=16{precision} {graph}"),
            )
            for graph, theirs in (("reddit", "3.2"), ("products", ""))
            for precision in ("", " TF32", " bfloat16")
            for what, column in (("DGL (here torch.sparse)", "over_peer"), ("ReLU", "over_relu"))
        ),
        Claim("SpGEMM over cuSPARSE, k=16", "", "kernels", "spgemm_ratio", of(k=16)),
        Claim("SSpMM over cuSPARSE, k=16", "", "kernels", "sspmm_ratio", of(k=16)),
    ),
    (
        Panel("accuracy", "lost", "points below ReLU", "k", ("graph", "model", "where"), log=True),
        Panel(
            "kernels",
            "spgemm_ratio",
            "SpGEMM over cuSPARSE (CPU: torch)",
            "k",
            ("graph",),
            log=True,
        ),
        Panel("approximator", "maxk", "error of x^2 by MaxK", "units", log=True),
    ),
    {"epochs": ("training", "maxk"), "kernels": ("maxk", "products")},
)
