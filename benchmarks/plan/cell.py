"""A layer on a graph with all of its compositions, timed in turn with its own.

All that pruning leaves run on the same kernels and tensors, and results are compared.
"""

import statistics
import time
from collections.abc import Callable
from copy import copy
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsefmt import CSR, Graph, nn, optimize
from sparsefmt.model.program import Program
from sparsefmt.plan import planner
from sparsefmt.plan.rules import steps, text_of

from .. import _baselines, _graphs, _harness
from . import graphs

MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "gcn": nn.GCNConv,
    "gat": nn.GATConv,
    "sage": nn.SAGEConv,
    "gin": lambda f_in, f_out: nn.GINConv(torch.nn.Linear(f_in, f_out)),
    "sgc": lambda f_in, f_out: nn.SGConv(f_in, f_out, K=2),
    "tagcn": lambda f_in, f_out: nn.TAGConv(f_in, f_out, K=2),
}
#: Compositions that are always the other way round.
OTHER = {"gcn": "(D·A·D·H)·W", "gat": "(attention((H·W)·a, (H·W)·b)·H)·W"}
#: What DGL runs: where a layer narrows rows, and elsewhere.
DEFAULT = {
    "gcn": ("D·(A·(D·(H·W)))", "(D·(A·(D·H)))·W"),
    "gat": ("attention((H·W)·a, (H·W)·b)·(H·W)",) * 2,
}
LIMIT = 1e-3  # of a result's norm


def warm_up(models: tuple[str, ...], device: str) -> None:
    """Wake up what the first call of a process waits for."""
    A = graphs.load("small", device)
    for model, training in product(models, (False, True)):
        cell = Cell(A, A, model, (32, 64), training=training)
        cell.compile()
        optimize(cell.layer, cell.first, training=training, mode="measure")


class Cell:
    """A layer on a graph, with all of its compositions as functions of nothing."""

    def __init__(
        self, first: CSR, A: CSR, model: str, widths: tuple[int, int], *, training: bool
    ) -> None:
        torch.manual_seed(0)
        x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, widths[0])))
        self.x = x.requires_grad_(training)
        self.layer = MODELS[model](*widths).to(x.device).train(training)
        self.plain = copy(self.layer)  # with the same parameters, and never planned
        self.first, self.given = Graph(first), Graph(A)
        self.training, self.model, self.widths = training, model, widths

    def measured(self, *, quick: bool) -> dict[str, Any]:
        """Choose, then time everything in turn."""
        own = self._step(lambda: self.plain(self.x, self.given))
        cuda = self.x.is_cuda
        once = statistics.median(_seconds(own) for _ in range(5))
        self.compile()
        planner._verdicts.cache_clear()
        start = time.perf_counter()
        made = optimize(self.layer, self.first, training=self.training)
        decided = time.perf_counter() - start
        self._step(lambda: self.layer(self.x, self.given))()  # plans for another sample
        plan = made.layers[""]
        steps = {text_of(c.tree): self._composed(c.tree) for c in plan.promoted}
        wrong = self._wrong(own, steps)
        if wrong:
            return {"wrong": wrong}
        all_once = {name: _seconds(step) for name, step in steps.items()}
        times, runs = _harness.paced([own, *steps.values()], cuda=cuda, quick=quick)
        of_trees = dict(zip(steps, times[1:], strict=True))
        chosen, ms = text_of(plan.chosen.tree), of_trees[text_of(plan.chosen.tree)]
        if plan.chosen.tree == plan.own:
            chosen, ms = f"{chosen} as it is", times[0]
        oracle = min(times[0], *of_trees.values())
        found = {"ms": ms, "own_ms": times[0], "oracle_ms": oracle, "chosen": chosen, "runs": runs}
        found |= {"choices": len(of_trees)}
        found |= {"over_own": times[0] / ms, "of_oracle": oracle / ms, "overhead": decided / once}
        found["over_all_once"] = of_trees[min(all_once, key=lambda name: all_once[name])] / ms
        if self.model in DEFAULT:
            width, out = self.widths
            found["over_default"] = of_trees[DEFAULT[self.model][width <= out]] / ms
        of_paper = [of_trees[text_of(c.tree)] for c in plan.promoted if _is_of_paper(c.tree)]
        found["beyond"] = min(of_paper) / ms
        if OTHER.get(self.model) in of_trees:
            found["over_other"] = of_trees[OTHER[self.model]] / ms
        found["timed"] = {text_of(c.tree): c.measured * 1e3 for c in plan.promoted if c.measured}
        predicted = {text_of(c.tree): c.predicted * 1e3 for c in plan.promoted}
        return found | {"compositions": of_trees, "predicted": predicted}

    def compile(self) -> None:
        """Run all compositions, and what builds the graph: no decision waits for a compiler."""
        self._step(lambda: self.layer(self.x, self.first))()
        made = optimize(self.layer, self.first, training=self.training, mode="model")
        for candidate in made.layers[""].promoted:
            self._composed(candidate.tree)()
        made.restore()

    def _composed(self, tree: Any) -> Callable[[], Any]:
        plan, program = self.layer._plan, Program(tree)
        _, _, code = plan.prepared(self.layer, self.x, self.given)

        def forward() -> Tensor:
            values = plan.values(self.layer, self.x, self.given, self.given)
            result: Tensor = code.finish(program(values, code.functions))
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


def _is_of_paper(tree: Any) -> bool:
    """Tell whether SENSEi's rules make the tree: no scaled product, and no ``W a``."""
    made = [step for step in steps(tree) if step.rule.kind == "spmm_scaled"]
    return not made and "W·" not in text_of(tree)


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for result in step():
        if result.is_cuda:
            torch.cuda.synchronize()  # synchronize!
    return time.perf_counter() - start
