"""Compositions that ``optimize`` chooses, against the default one and the fastest.

``python -m benchmarks plan [--device cpu|cuda] [--sections grid,vertices,epochs]
[--graphs reddit,belgium] [--models gcn,gat] [--widths 32x256,256x32] [--quick] [--out FOLDER]``

Sections are the ``grid`` of compositions, unless ``--sections`` says otherwise; ``vertices``,
products with the vertices in other orders; and ``epochs``, training with ``steps=``.  In the grid a
cell is a layer on a graph, its widths, and inference or training.  All compositions that pruning
leaves run in turn with the layer's own, on the same kernels and tensors, and results are compared.
Columns are what ``optimize(mode="auto")`` chose over the fastest of them (the oracle) and over the
layer's own; over "all once", which runs each once and keeps the fastest; and over "the other",
which always transforms second (GCN) or never shares what it transforms (GAT): SENSEi
(arXiv 2306.15155), tables 3 and 4.  ``overhead`` is what ``optimize`` took, in iterations.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsefmt import Graph, nn, optimize
from sparsefmt.autograd.composition import Program
from sparsefmt.plan.rules import bare

from .. import _baselines, _graphs, _harness, _options
from .._harness import Target, geomean
from . import graphs

MODELS = {"gcn": nn.GCNConv, "gat": nn.GATConv}
GRAPHS = {
    "cuda": ("reddit", "com-amazon", "mycielskian17", "belgium", "asia", "coauthors", "products"),
    "cpu": ("com-amazon", "mycielskian13", "belgium", "coauthors", "arxiv"),
}
WIDTHS = {
    "cuda": ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32), (32, 1024), (2048, 256)),
    "cpu": ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32)),
}
#: Compositions that are always the other way round.
OTHER = {"gcn": "(D·A·D·H)·W", "gat": "(attention((H·W)·a, (H·W)·b)·H)·W"}
#: Least share of the oracle's speed, and speed-up over the default in inference and in training.
OF_ORACLE = {"gcn": 0.97, "gat": 0.99}
SPEEDUPS = {
    ("cuda", "gcn"): (1.17, 1.04),
    ("cuda", "gat"): (1.5, 1.6),
    ("cpu", "gcn"): (1.11, None),
    ("cpu", "gat"): (1.6, None),
}
COLUMNS = {
    "case": "<36",
    "ms": "9.3f",
    "own_ms": "9.3f",
    "oracle_ms": "9.3f",
    "over_own": "8.2f",
    "of_oracle": "9.3f",
    "overhead": "8.2f",
    "chosen": "<40",
}
LIMIT = 1e-3  # of a result's norm
SECTIONS = {
    "grid": ("plan.plan", "grid"),
    "vertices": ("plan.vertices", "vertices"),
    "epochs": ("plan.vertices", "epochs"),
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS), default=("grid",))
    parser.add_argument("--models", type=_options.some_of(MODELS), default=tuple(MODELS))
    for action in parser._actions:
        if action.dest == "widths":
            action.type = _pairs
    options = _options.parse(parser, argv)
    if options.device == "cpu":
        _baselines.use_threads(options.threads)
    return _options.run(SECTIONS, options)


def grid(options: argparse.Namespace) -> bool:
    """Measure every cell, and tell whether all were right."""
    cuda = options.device == "cuda"
    _harness.print_head("compositions: chosen, the layer's own, and the fastest", COLUMNS)
    rows = []
    for row in cells(options):
        _harness.print_row(row, COLUMNS)
        rows.append(row)
    judge = judge_on(options.device)
    return _harness.keep("plan", "grid", rows, judge, cuda=cuda, folder=options.out)


def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    """Widths of input and output, such as 32x256."""
    found = tuple(tuple(map(_options.positive, pair.split("x"))) for pair in text.split(","))
    if any(len(pair) != 2 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} are no pairs such as 32x256")
    return found


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every cell that fits into memory."""
    device = options.device
    warm_up(options.models, device)
    for name in options.graphs or GRAPHS[device]:
        A = graphs.load(name, device)
        graph = Graph(A)
        for model, widths, training in product(
            options.models, options.widths or WIDTHS[device], (False, True)
        ):
            kind = "training" if training else "inference"
            case = f"{name} {model} {widths[0]}x{widths[1]} {kind}"
            facts = {"case": case, "graph": name, "model": model, "training": training}
            x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, widths[0])))
            try:
                yield facts | Cell(model, graph, x, widths, training).measured(quick=options.quick)
            except (MemoryError, torch.OutOfMemoryError):
                continue  # no composition of so wide a layer fits
            finally:
                _harness.free()


def warm_up(models: tuple[str, ...], device: str) -> None:
    """Compile on a small graph what no decision is to wait for."""
    A = graphs.load("small", device)
    graph = Graph(A)
    for model, training in product(models, (False, True)):
        x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, 32)))
        for widths in ((32, 64), (32, 8)):
            Cell(model, graph, x.detach(), widths, training).measured(quick=True)


class Cell:
    """A layer on a graph, with all of its compositions as functions of nothing."""

    def __init__(
        self, model: str, graph: Graph, x: Tensor, widths: tuple[int, int], training: bool
    ) -> None:
        torch.manual_seed(0)
        self.layer = MODELS[model](*widths).to(x.device).train(training)
        self.graph, self.training, self.model = graph, training, model
        self.x = x.requires_grad_(training)

    def measured(self, *, quick: bool) -> dict[str, Any]:
        """Choose, then time everything in turn."""
        own = self._step(lambda: type(self.layer).forward(self.layer, self.x, self.graph))
        cuda = self.x.is_cuda
        once = statistics.median(_seconds(own) for _ in range(5))
        start = time.perf_counter()
        made = optimize(self.layer, self.graph, training=self.training)
        decided = time.perf_counter() - start
        plan = made.layers[""]
        steps = {bare(c.tree): self._composed(c.tree) for c in plan.promoted}
        wrong = self._wrong(own, steps)
        if wrong:
            return {"wrong": wrong}
        all_once = {name: _seconds(step) for name, step in steps.items()}
        times, runs = _harness.paced([own, *steps.values()], cuda=cuda, quick=quick)
        of_trees = dict(zip(steps, times[1:], strict=True))
        chosen = bare(plan.chosen.tree)
        default = self.layer.forward.adapter.default
        if chosen == default:
            of_trees[chosen] = times[0]  # the layer runs its own code then
        oracle, ms = min(times[0], *of_trees.values()), of_trees[chosen]
        found = {"ms": ms, "own_ms": times[0], "oracle_ms": oracle, "chosen": chosen, "runs": runs}
        found |= {"over_own": times[0] / ms, "of_oracle": oracle / ms, "overhead": decided / once}
        found["over_all_once"] = of_trees[min(all_once, key=lambda name: all_once[name])] / ms
        if OTHER[self.model] in of_trees:
            found["over_other"] = of_trees[OTHER[self.model]] / ms
        predicted = {bare(c.tree): c.predicted * 1e3 for c in plan.promoted}
        return found | {"compositions": of_trees, "predicted": predicted}

    def _composed(self, tree: Any) -> Callable[[], Any]:
        planned, program = self.layer.forward, Program(tree)

        def forward() -> Tensor:
            values = planned.values(self.x, self.graph)
            made = program(values, planned.functions(self.graph))
            result: Tensor = planned.adapter.finish(self.layer, made)
            return result

        return self._step(forward)

    def _step(self, forward: Callable[[], Tensor]) -> Callable[[], Any]:
        """Make a step of it: in training, with the gradients of features and parameters."""
        sources = [self.x, *self.layer.parameters()]

        def step() -> list[Tensor]:
            if not self.training:
                with torch.no_grad():
                    return [forward()]
            y = forward()
            return [y.detach(), *torch.autograd.grad(y, sources, torch.ones_like(y))]

        return step

    def _wrong(self, own: Callable[[], Any], steps: dict[str, Callable[[], Any]]) -> str:
        """Say which composition differs from the layer."""
        expected = own()
        for name, step in steps.items():
            for one, other in zip(step(), expected, strict=True):
                error = float((one - other).norm() / other.norm().clamp(min=1e-6))
                if not error <= LIMIT:
                    return f"{name} is off by {error:.2g}, {LIMIT:g} is allowed"
        return ""


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for result in step():
        if result.is_cuda:
            torch.cuda.synchronize()  # synchronize!
    return time.perf_counter() - start


def judge_on(device: str) -> _harness.Judge:
    """Targets of a device: DESIGN's shares of the oracle, and the paper's speed-ups."""

    def judge(rows: list[dict[str, Any]]) -> list[Target]:
        found = []
        for model in MODELS:
            of_model = [row for row in rows if row["model"] == model]
            if not of_model:
                continue
            near = [row["of_oracle"] for row in of_model]
            found.append(Target(f"{model}, of the oracle", geomean(near), OF_ORACLE[model]))
            for training, limit in zip((False, True), SPEEDUPS[device, model], strict=True):
                ratios = [row["over_own"] for row in of_model if row["training"] == training]
                kind = "training" if training else "inference"
                if ratios:
                    found.append(Target(f"{model}, {kind}, over its own", geomean(ratios), limit))
        within = [row["of_oracle"] >= 0.95 for row in rows]
        worst = min(rows, key=lambda row: row["over_own"])
        slowest = max(rows, key=lambda row: row["overhead"])
        name = f"overhead in iterations, most ({slowest['case']})"
        return [
            *found,
            Target("cells within 5 % of the oracle", sum(within) / len(within), 0.9),
            Target(f"least over its own ({worst['case']})", worst["over_own"], 0.97),
            Target(name, slowest["overhead"], 4.0, at_least=False),
        ]

    return judge
