"""Compositions that ``optimize`` chooses, against the default one and the fastest.

Sections of ``plan``: the ``grid`` of compositions of GCN and GAT, unless ``--sections`` says
otherwise; ``layers``, the same for GraphSAGE, GIN, and SGConv and TAGConv of two hops (figure 10 of
SENSEi); ``samples``, graphs of at most 10, 100 and 1,000 entries a row, of which the first is
planned for and another one measured (figure 9); ``vertices``, products with the vertices in other
orders; and ``epochs``, training with ``steps=``.

A cell is a layer on a graph, its ``--widths`` such as 32x256, and inference or training.
``of_oracle`` is what ``optimize(mode="auto")`` chose over the fastest composition; ``over_own``
over the layer's own, and ``over_default`` over what DGL runs, the paper's default: rows are scaled
apart, and transformed first where that narrows them.  ``overhead`` is what ``optimize`` took, in
iterations, kernels compiled before.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from copy import copy
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, functional

from sparsefmt import CSR, Graph, nn, ops, optimize, reorder
from sparsefmt.formats.arrays import finish, namespace, to_device
from sparsefmt.model.program import Program
from sparsefmt.plan import constants_of, planner
from sparsefmt.plan.locality import locality
from sparsefmt.plan.pricing import work_of
from sparsefmt.plan.rules import Primitive, text_of

from . import _baselines, _graphs, _harness, _oracle
from ._harness import Call
from ._table import Benchmark, Limit, Row, Section, both, positive, some_of
from .training import Model

MODELS: dict[str, Callable[[int, int], Module]] = {
    "gcn": nn.GCNConv,
    "gat": nn.GATConv,
    "sage": nn.SAGEConv,
    "gin": lambda f_in, f_out: nn.GINConv(Linear(f_in, f_out)),
    "sgc": lambda f_in, f_out: nn.SGConv(f_in, f_out, K=2),
    "tagcn": lambda f_in, f_out: nn.TAGConv(f_in, f_out, K=2),
}
#: Those of a section, unless they are named.
GRID, LAYERS = ("gcn", "gat"), ("sage", "gin", "sgc", "tagcn")
GRAPHS = ("reddit", "com-amazon", "mycielskian17", "belgium", "asia", "coauthors", "products")
CPU_GRAPHS = ("com-amazon", "mycielskian13", "belgium", "coauthors", "arxiv")
CPU_WIDTHS = ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32))
WIDTHS = (*CPU_WIDTHS, (32, 1024), (2048, 256))
#: Graphs whose rows are sampled, and their most entries.
SAMPLED, MOST = ("reddit", "mycielskian17", "products"), (10, 100, 1000)
#: What DGL runs: where a layer widens rows, and where it narrows them.
DEFAULT = {
    "gcn": ("D·(A·(D·(H·W)))", "(D·(A·(D·H)))·W"),
    "gat": ("attention((H·W)·a, (H·W)·b)·(H·W)",) * 2,
}
#: Least share of the oracle's speed, and speed-up over the default in inference and in training.
OF_ORACLE = {"gcn": 0.97, "gat": 0.99}
OVER_DEFAULT = {
    **{("cuda", "gcn"): (1.17, 1.04), ("cuda", "gat"): (1.5, 1.6)},
    **{("cpu", "gcn"): (1.11, None), ("cpu", "gat"): (1.6, None)},
}
RIGHT = 1e-3  #: largest error, of a result's norm


def grid(models: tuple[str, ...], options: argparse.Namespace) -> Iterator[Row]:
    """Yield every cell that fits into memory."""
    warm_up(options.models or models, options.device)
    for name, A in _graphs.loaded(options, GRAPHS, cpu=CPU_GRAPHS):
        yield from cells(name, A, A, models, options)


def samples(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every cell of graphs of at most so many entries a row, planned for another sample."""
    warm_up(options.models or GRID, options.device)
    for name, A in _graphs.loaded(options, SAMPLED, cpu=CPU_GRAPHS[1:2]):
        for most in MOST[:1] if options.quick else MOST:
            first, second = (ops.sample(A, most, seed=seed) for seed in (0, 1))
            yield from cells(f"{name}/{most}", first, second, GRID, options)


def cells(
    name: str, first: CSR, A: CSR, models: tuple[str, ...], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield layers of every width, in inference and in training."""
    widths = options.widths or (WIDTHS if options.cuda else CPU_WIDTHS)
    for model, pair in product(options.models or models, widths[:2] if options.quick else widths):
        for kind in ("inference", "training"):
            row: Row = {"case": f"{name} {model} {pair[0]}x{pair[1]} {kind}", "kind": kind}
            row |= {"graph": name, "model": model, "widths": pair}
            try:
                cell = Cell(first, A, model, pair, training=kind == "training")
                yield row | cell.measured(quick=options.quick)
            except (MemoryError, torch.OutOfMemoryError):
                _harness.free()


def warm_up(models: tuple[str, ...], device: str) -> None:
    """Run what the first call of a process waits for."""
    A = _graphs.load("small", device=device)
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
        self.first, self.second = Graph(first), Graph(A)
        self.training, self.model, self.widths = training, model, widths

    def measured(self, *, quick: bool) -> Row:
        """Choose, then time everything in turn."""
        own = self._step(lambda: self.plain(self.x, self.second))
        cuda = self.x.is_cuda
        step_s = statistics.median(_harness.wall_ms(own, cuda=cuda) for _ in range(5)) / 1e3
        self.compile()
        planner._verdicts.cache_clear()
        start = time.perf_counter()
        made = optimize(self.layer, self.first, training=self.training)
        overhead = (time.perf_counter() - start) / step_s
        self._step(lambda: self.layer(self.x, self.second))()  # plans for another sample
        plan = made.layers[""]
        calls = {text_of(c.tree): self._composed(c.tree) for c in plan.promoted}
        expected = own()
        errors = [_oracle.norm_error(call(), expected) for call in calls.values()]
        row = _oracle.judged(max(errors), RIGHT)
        functions = [own, *calls.values()]
        times, row["runs"] = _harness.paced(functions, cuda=cuda, quick=quick)
        by_tree = dict(zip(calls, times[1:], strict=True))
        as_run = by_tree | {text_of(c.tree): times[0] for c in plan.promoted if c.tree == plan.own}
        row["chosen"] = text_of(plan.chosen.tree)
        ms = as_run[row["chosen"]]
        row |= {"ms": ms, "own_ms": times[0], "oracle_ms": min(times), "choices": len(calls)}
        row |= {"over_own": times[0] / ms, "of_oracle": min(times) / ms, "overhead": overhead}
        if self.model in DEFAULT:
            default = DEFAULT[self.model][self.widths[0] <= self.widths[1]]
            row["over_default"] = as_run[default] / ms
        predicted = {text_of(c.tree): c.predicted * 1e3 for c in plan.promoted}
        return row | {"compositions": by_tree, "predicted": predicted}

    def compile(self) -> None:
        """Run all compositions, and what builds the graph: no decision waits for a compiler."""
        self._step(lambda: self.layer(self.x, self.first))()
        made = optimize(self.layer, self.first, training=self.training, mode="model")
        for candidate in made.layers[""].promoted:
            self._composed(candidate.tree)()
        made.restore()

    def _composed(self, tree: Any) -> Call:
        plan, program = self.layer._plan, Program(tree)
        _, _, code = plan.prepared(self.layer, self.x, self.second)

        def forward() -> Tensor:
            values = plan.values(self.layer, self.x, self.second, self.second)
            result: Tensor = code.finish(program(values, code.functions))
            return result

        return self._step(forward)

    def _step(self, forward: Call) -> Call:
        """Return a step of it: in training, with the gradients of features and parameters."""
        sources = [self.x, *self.layer.parameters()]

        def step() -> list[Tensor]:
            if not self.training:
                with torch.no_grad():
                    return [forward()]
            y = forward()
            return [y.detach(), *torch.autograd.grad(y, sources, torch.ones_like(y))]

        return step


# Orders of vertices

#: What counts as a gain; entries beyond which an order that the CPU finds takes minutes.
GAIN, MOST_ON_CPU = 1.05, 3_000_000
CLASSES, FEATURES, STEPS = 47, 100, 30
SAGE = (FEATURES, 256, 256, CLASSES)


def vertices(options: argparse.Namespace) -> Iterator[Row]:
    """Yield products in each order, of each graph as it was generated or stored and shuffled."""
    small = ("com-amazon", "flickr")
    for name, source in _graphs.chosen(options, tuple(_graphs.PAPERS), cpu=small):
        stored = _graphs.load(source, device=options.device, shuffle=False)
        chance = np.random.default_rng(0).permutation(stored.n_rows).astype(stored.index_dtype)
        order = reorder.Order(to_device(chance, stored.device))
        for case, A in ((name, stored), (f"{name} shuffled", order.apply(stored).sorted_indices())):
            finders = {"community": reorder.community_order, "degree": reorder.degree_order}
            if A.nnz <= MOST_ON_CPU:
                finders["rcm"] = reorder.rcm_order
            orders, seconds = {}, {}
            for one, find in finders.items():
                start = time.perf_counter()
                orders[one] = find(A)
                finish(orders[one].perm)
                seconds[f"{one}_s"] = time.perf_counter() - start
            for feat in options.widths[0] if options.widths else (128, 256):
                yield {"case": f"{case} {feat}"} | seconds | _product(A, orders, feat, options)
        _graphs.load.cache_clear()


def _product(
    A: CSR, orders: dict[str, reorder.Order], feat: int, options: argparse.Namespace
) -> Row:
    """Check and time a product in each order, and predict the first."""
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    out = namespace(X).empty((A.n_rows, feat), X.dtype)
    graphs = {"": A} | {name: order.apply(A) for name, order in orders.items()}
    calls = {
        f"{name}_ms".lstrip("_"): lambda B=B: ops.spmm(B, X, out=out) for name, B in graphs.items()
    }
    error = max(_oracle.spmm_error(B, X, ops.spmm(B, X)) for B in graphs.values())
    row = _oracle.rounded(error, X.dtype)
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    row |= {f"gain_{name}": row["ms"] / row[f"{name}_ms"] for name in orders}
    row["predicted"] = predicted(A, feat) / predicted(graphs["community"], feat)
    right = (row["gain_community"] > GAIN) == (row["predicted"] > GAIN)
    return row | {"right": float(right)}


def predicted(A: CSR, feat: int) -> float:
    """Return seconds of a product, of constants for the kind of device."""
    constants, kind = constants_of(A.device), "spmm_unweighted"
    sizes = {"n": A.n_cols, "nnz": A.nnz, "w": feat}
    work = work_of(Primitive(kind, ("nnz", "n", "w")), sizes, constants, locality=locality(A))
    return constants.predict(work, kind)


def step_of(model: Module, x: Tensor, graph: Graph, labels: Tensor) -> list[Any]:
    """Train one epoch without the optimizer: the loss and all gradients."""
    model.zero_grad()
    loss = functional.cross_entropy(model(x, graph), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad for p in model.parameters())]


def epochs(options: argparse.Namespace) -> Iterator[Row]:
    """Yield epochs of GraphSAGE as ``optimize`` makes them, and of the layers as they are."""
    for name, A in _graphs.loaded(options, ("products", "reddit"), cpu=("flickr",)):
        graph = Graph(A)
        x = _baselines.tensor(_graphs.normal(A.indptr, (A.n_rows, FEATURES)))
        labels = torch.arange(A.n_rows, device=x.device) % CLASSES
        torch.manual_seed(0)
        own, first, planned = (
            Model([*map(nn.SAGEConv, SAGE, SAGE[1:])]).to(x.device) for _ in range(3)
        )
        planned.load_state_dict(own.state_dict())
        inputs = x, graph, labels
        expected = [one.clone() for one in step_of(own, *inputs)]
        more: dict[str, Any] = {"x": x, "training": True, "steps": STEPS}
        optimize(first, graph, **more)  # compiles
        made = optimize(planned, graph, **more)
        ordering: Any = made.ordering
        if ordering.chosen:
            perm = _baselines.tensor(ordering.order.perm).long()
            inputs = x[perm], graph.reordered(ordering.order), labels[perm]
            optimize(planned, inputs[1], **more | {"x": inputs[0]})
        error = _oracle.norm_error(step_of(planned, *inputs), expected)
        row: Row = {"case": f"{name} sage", "graph": name} | _oracle.judged(error, RIGHT)
        calls = {
            "ms": lambda m=planned, i=inputs: step_of(m, *i),
            "own_ms": lambda m=own, i=(x, graph, labels): step_of(m, *i),
        }
        row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
        seconds = ordering.seconds or 0.0
        gained = max(row["own_ms"] - row["ms"], 1e-9)
        row |= {"finding_s": seconds, "paid_back": seconds * 1e3 / gained}
        yield row | {"reason": ordering.reason, "plan": str(made)}


def pairs(text: str) -> tuple[tuple[int, ...], ...]:
    """Return widths of input and output, such as 32x256."""
    return tuple(tuple(map(positive, pair.split("x"))) for pair in text.split(","))


def _least(row: Row) -> float | None:
    limits = OVER_DEFAULT.get((row["device"], row["model"]), (None, None))
    return limits[row["kind"] == "training"]


ON = ("cpu", "cuda")
KINDS: dict[str, Any] = {"by": ("model", "kind"), "on": ON}
CELLS = (
    Limit("of_oracle", "mean", least=lambda row: OF_ORACLE.get(row["model"]), by=("model",), on=ON),
    Limit("of_oracle", least=0.95, on=ON),
    *(Limit(column, "mean", least=_least, **KINDS) for column in ("over_default", "over_own")),
    Limit(
        "over_default", "mean", where=lambda row: row["choices"] > 1, label="of several", **KINDS
    ),
    Limit("over_own", least=0.97, on=ON),
    Limit("overhead", most=4.0, on=ON),
)
SECTIONS = {
    "grid": Section(lambda options: grid(GRID, options), CELLS),
    "layers": Section(lambda options: grid(LAYERS, options), CELLS, default=False),
    "samples": Section(samples, CELLS, default=False),
    "vertices": Section(
        vertices,
        (Limit("right", "share", least=0.9, on=ON), *both("gain_community")),
        default=False,
    ),
    "epochs": Section(
        epochs,
        (
            Limit("over_own", least=0.98),
            Limit("over_own", "each", least=1.6, where=lambda row: row["graph"] == "products"),
            Limit("paid_back", most=30.0, where=lambda row: row["graph"] == "products"),
        ),
        default=False,
    ),
}
EXTRA = {"models": some_of(MODELS), "widths": pairs}
BENCHMARKS = {"plan": Benchmark("plan", __doc__, SECTIONS, EXTRA)}
