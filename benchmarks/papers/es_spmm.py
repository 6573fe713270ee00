"""ES-SpMM (arXiv 2104.10716): products over at most S entries of a row, in inference.

- ``accuracy``: GCN and GraphSAGE of two and three layers, trained on all edges; each model then
  answers from samples, by each strategy and S, beside all edges: points lost, and times faster of
  the answer and of its product over cuSPARSE; and where a share of all edges is dropped at random
  instead (figure 5);
- ``kernels``: the product alone beside cuSPARSE, or torch.sparse on the CPU.
"""

import argparse
import statistics
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from sparsefmt import COO, Graph
from sparsefmt.formats.arrays import namespace
from sparsefmt.ops import spmm_sampled

from .. import _baselines, _graphs, _harness, sampling
from .._table import Benchmark, Limit, Row, Section, numbers, some_of
from . import _learning
from ._data import Labelled, labelled
from ._learning import Network, Recipe, score, train
from ._paper import Claim, Panel, Paper
from .maxk import MODELS, OfReLU

SAMPLES = (8, 16, 32, 64, 128, 256)
KINDS = ("GCN", "SAGE")
SHARES = (0.2, 0.4, 0.6, 0.8)


class Inference:
    """Models of one kind, trained from several seeds on all edges of a data set."""

    def __init__(self, data: Labelled, model: str, layers: int, options: Any) -> None:
        self.data = data
        recipe = Recipe.of(options, hidden=128, layers=layers)
        seeds = options.seeds[0] if options.seeds else 2 if options.quick else 10
        make = partial(Network, partial(OfReLU, MODELS[model], 0.0), data, recipe)
        self.models = [train(make, data, recipe, seed=seed).model for seed in range(seeds)]
        self.whole = self.scores(data.graph)
        self.features = _graphs.uniform(data.A.indptr, (data.A.n_cols, recipe.hidden))
        _, self.theirs = _baselines.best_spmm(_graphs.weighted(data.A), self.features)

    def scores(self, graph: Graph) -> list[float]:
        """Return the test's metric of each seed's model."""
        masks = (self.data.splits[seed % len(self.data.splits)][2] for seed in range(99))
        with torch.no_grad():
            logits = [model(self.data.x, graph) for model in self.models]
        return [score(one, self.data, m) for one, m in zip(logits, masks, strict=False)]

    def lost(self, graph: Graph) -> dict[str, float]:
        """Return the mean over seeds, the points below all edges, and their deviation."""
        scores = self.scores(graph)
        gaps = [whole - part for whole, part in zip(self.whole, scores, strict=True)]
        sd = statistics.stdev(self.whole) if len(gaps) > 1 else 0.0
        return {"score": statistics.fmean(scores), "lost": statistics.fmean(gaps), "sd": sd}

    def sampled(self, width: int, strategy: str, options: argparse.Namespace) -> Row:
        """Compare answers from samples with those from all edges, and time one of each."""
        data = self.data
        row: Row = {"dropped": 1 - float(data.A.lengths.clip(0, width).sum()) / data.A.nnz}
        of_all_edges = deepcopy(self.models[0])
        self._set(width, strategy)
        row |= self.lost(data.graph)

        def answer(model: Module) -> None:
            with torch.no_grad():
                model(data.x, data.graph)

        calls = {"ms": partial(answer, self.models[0]), "whole_ms": partial(answer, of_all_edges)}
        timed = partial(_harness.timed, cuda=options.cuda, quick=options.quick)
        row |= timed(calls)
        self._set(None, strategy)
        product = partial(spmm_sampled, data.A, self.features, width, strategy=strategy)
        return row | {"product_over": timed({"ms": product, "their_ms": self.theirs})["over_their"]}

    def _set(self, width: int | None, strategy: str) -> None:
        """Let the layers go over so many entries of a row."""
        for model in self.models:
            for layer in model.layers:
                layer.layer.sample, layer.layer.strategy = width, strategy


def trained(options: argparse.Namespace) -> Iterator[tuple[str, Inference, dict[str, Any]]]:
    """Yield a name, trained models and the common columns of their rows, for each data set."""
    for data in labelled(options, ("reddit",), ("pubmed", "amazon_computers", "musae_facebook")):
        for model in options.models or KINDS:
            for layers in options.layers or ((2,) if options.quick else (2, 3)):
                facts = {"graph": data.name, "origin": data.origin, "metric": data.metric}
                facts |= {"model": f"{model} {layers} layers"}
                yield (
                    f"{data.name} {model} {layers}",
                    Inference(data, model, layers, options),
                    facts,
                )


def accuracy(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each model on samples and on the edges that are left: points lost, and times faster."""
    for name, models, facts in trained(options):
        for strategy in options.strategies or ("bucket", "fastrand"):
            for width in options.sample or SAMPLES:
                row = {"case": f"{name} {strategy} S={width}", "strategy": strategy} | facts
                yield row | {"sample": width} | models.sampled(width, strategy, options)
        coo = models.data.A.tocoo()
        draw = namespace(coo.row).random.default_rng(0)
        for share in SHARES:
            kept = draw.random(coo.nnz) >= share
            part = COO(coo.row[kept], coo.col[kept], shape=coo.shape)
            row = {"case": f"{name} without {share:.0%}", "strategy": "random edges"} | facts
            yield row | {"dropped": share} | models.lost(Graph(part.tocsr()))


def short(row: Row) -> bool:
    """Return True for the paper's strategies in float32 with 16 entries a row."""
    return (row["sample"], row["dtype"]) == (16, "float32") and row["strategy"] != "random"


LOSSES = ("no loss", "1 point less")


def free(row: Row) -> bool:
    """Return True if a sample loses no more than seeds differ by, or a tenth of a point."""
    return "sample" in row and bool(row["lost"] <= max(row["sd"], 0.1))


def cheap(row: Row) -> bool:
    """Return True if a sample loses no more than a point."""
    return "sample" in row and bool(row["lost"] <= 1.0)


SECTIONS = {
    "accuracy": Section(accuracy, (Limit("lost", high=True, by=("model", "strategy")),)),
    "kernels": sampling.SECTIONS["table"],
}
BY = ("graph", "model", "strategy")
EXTRA = {"models": some_of(KINDS), "layers": numbers} | _learning.EXTRA | sampling.EXTRA
PAPER = Paper(
    Benchmark("papers-es_spmm", __doc__, SECTIONS, EXTRA),
    (
        Claim(
            "product over cuSPARSE, S=16, largest", "45.3", "kernels", "over_cusparse", short, max
        ),
        *(
            Claim(f"{what}, {loss}, largest", theirs, "accuracy", column, where, max)
            for what, column, figures in (
                ("product over cuSPARSE", "product_over", ("4.35", "25")),
                ("whole answers", "over_whole", ("", "")),
            )
            for loss, where, theirs in zip(LOSSES, (free, cheap), figures, strict=True)
        ),
    ),
    (
        Panel("accuracy", "lost", "points lost", "dropped", BY),
        Panel("accuracy", "over_whole", "answer, times faster", "dropped", BY),
        Panel("kernels", "over_spmm", "product over our own of all entries"),
    ),
    {"kernels": ("sampled", "table")},
)
