"""Compositions that ``optimize`` chooses, against the default one and the fastest.

``python -m benchmarks plan [--device cpu|cuda] [--sections grid,layers,samples,vertices,epochs]
[--graphs reddit,belgium] [--models gcn,gat] [--widths 32x256,256x32] [--quick] [--out FOLDER]``

Sections are the ``grid`` of compositions, unless ``--sections`` says otherwise; ``layers``, the
same for GraphSAGE, GIN, and SGConv and TAGConv of two hops (figure 10 of SENSEi); and
``samples``, graphs of at most 10, 100 and 1,000 entries a row, of which the first is planned for
and another one measured (figure 9).  ``vertices`` has products with the vertices in other orders,
and ``epochs`` training with ``steps=``.

In these a cell is a layer on a graph, its widths, and inference or training.  Columns are what
``optimize(mode="auto")`` chose over the fastest composition (the oracle) and over the layer's own;
over "all once", which runs each once and keeps the fastest; and over "the other", which always
transforms second (GCN) or never shares what it transforms (GAT): SENSEi (arXiv 2306.15155), tables
3 and 4.  ``overhead`` is what ``optimize`` took, in iterations, with kernels compiled and the graph
built, for which the first run of a layer waits as well.  ``over_default`` is over what DGL runs,
the paper's default: rows are scaled apart, and transformed first where that narrows them.
``beyond`` is the best composition of the paper's rules over what was chosen: what scales in the
product, and scores made of ``H (W a)``, add to it.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from sparsefmt import CSR, ops

from .. import _baselines, _harness, _options
from .._harness import Target, geomean
from . import graphs
from .cell import MODELS, Cell, warm_up

#: Those of a section, unless they are named.
GRID, LAYERS = ("gcn", "gat"), ("sage", "gin", "sgc", "tagcn")
GRAPHS = {
    "cuda": ("reddit", "com-amazon", "mycielskian17", "belgium", "asia", "coauthors", "products"),
    "cpu": ("com-amazon", "mycielskian13", "belgium", "coauthors", "arxiv"),
}
WIDTHS = {
    "cuda": ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32), (32, 1024), (2048, 256)),
    "cpu": ((32, 32), (32, 256), (256, 32), (256, 256), (1024, 32)),
}
#: Graphs whose rows are sampled, and their most entries.
SAMPLED = {"cuda": ("reddit", "mycielskian17", "products"), "cpu": ("mycielskian13", "arxiv")}
MOST = (10, 100, 1000)
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
    "over_default": "12.2f",
    "beyond": "6.2f",
    "of_oracle": "9.3f",
    "overhead": "8.2f",
    "chosen": "<40",
}
SECTIONS = {
    "grid": ("plan.plan", "grid"),
    "layers": ("plan.plan", "layers"),
    "samples": ("plan.plan", "samples"),
    "vertices": ("plan.vertices", "vertices"),
    "epochs": ("plan.vertices", "epochs"),
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS), default=("grid",))
    parser.add_argument("--models", type=_options.some_of(MODELS))
    for action in parser._actions:
        if action.dest == "widths":
            action.type = _pairs
    options = _options.parse(parser, argv)
    if options.device == "cpu":
        _baselines.use_threads(options.threads)
    return _options.run(SECTIONS, options)


def grid(options: argparse.Namespace) -> bool:
    """Measure every cell of GCN and GAT, and tell whether all were right."""
    return _section("grid", options, cells(options, options.models or GRID))


def layers(options: argparse.Namespace) -> bool:
    """Measure other layers."""
    return _section("layers", options, cells(options, options.models or LAYERS))


def samples(options: argparse.Namespace) -> bool:
    """Plan for one sample of a graph, and measure what that chooses for another."""
    return _section("samples", options, sampled(options, options.models or GRID))


def _section(name: str, options: argparse.Namespace, cells: Iterator[dict[str, Any]]) -> bool:
    cuda = options.device == "cuda"
    _harness.print_head(f"{name}: chosen, the layer's own, and the fastest composition", COLUMNS)
    rows = []
    for row in cells:
        _harness.print_row(row, COLUMNS)
        rows.append(row)
    judge = judge_on(options.device)
    return _harness.keep("plan", name, rows, judge, cuda=cuda, folder=options.out)


def _pairs(text: str) -> tuple[tuple[int, ...], ...]:
    """Widths of input and output, such as 32x256."""
    found = tuple(tuple(map(_options.positive, pair.split("x"))) for pair in text.split(","))
    if any(len(pair) != 2 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} are no pairs such as 32x256")
    return found


def cells(options: argparse.Namespace, models: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every cell that fits into memory."""
    device = options.device
    warm_up(models, device)
    for name in options.graphs or GRAPHS[device]:
        A = graphs.load(name, device)
        for facts in _kinds(name, models, options):
            yield from _measured(facts, A, A, quick=options.quick)


def sampled(options: argparse.Namespace, models: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Every cell of graphs of at most so many entries a row."""
    device = options.device
    warm_up(models, device)
    for name, most in product(options.graphs or SAMPLED[device], MOST):
        first, second = (ops.sample(graphs.load(name, device), most, seed=i) for i in (0, 1))
        for facts in _kinds(f"{name}/{most}", models, options):
            yield from _measured(facts, first, second, quick=options.quick)


def _kinds(
    name: str, models: tuple[str, ...], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Layers of every width, in inference and in training."""
    all_widths = options.widths or WIDTHS[options.device]
    for model, widths, training in product(models, all_widths, (False, True)):
        case = f"{name} {model} {widths[0]}x{widths[1]} {_kind(training)}"
        facts = {"case": case, "graph": name, "model": model}
        yield {**facts, "widths": widths, "training": training}


def _measured(
    facts: dict[str, Any], first: CSR, A: CSR, *, quick: bool
) -> Iterator[dict[str, Any]]:
    """Plan for the first graph, and measure on the other; nothing if no composition fits."""
    try:
        cell = Cell(first, A, facts["model"], facts["widths"], training=facts["training"])
        yield facts | cell.measured(quick=quick)
    except (MemoryError, torch.OutOfMemoryError):
        pass
    finally:
        _harness.free()


def _kind(training: bool) -> str:
    return "training" if training else "inference"


def _speedups(name: str, rows: list[dict[str, Any]], limit: float | None) -> Iterator[Target]:
    """Geometric means over the default and the layer's own, and of those beyond the paper's."""
    with_choice = [row for row in rows if row["choices"] > 1]
    for column, least in (("over_default", limit), ("over_own", limit), ("beyond", None)):
        for part, where in ((rows, ""), (with_choice, ", where there is a choice")):
            ratios = [row[column] for row in part if column in row]
            if ratios:
                yield Target(f"{name}, {column}{where}", geomean(ratios), least)


def judge_on(device: str) -> _harness.Judge:
    """Targets of a device: DESIGN's shares of the oracle, and the paper's speed-ups."""

    def judge(rows: list[dict[str, Any]]) -> list[Target]:
        found = []
        for model in dict.fromkeys(row["model"] for row in rows):
            of_model = [row for row in rows if row["model"] == model]
            near = [row["of_oracle"] for row in of_model]
            found.append(Target(f"{model}, of the oracle", geomean(near), OF_ORACLE.get(model)))
            limits = SPEEDUPS.get((device, model), (None, None))
            for training, limit in zip((False, True), limits, strict=True):
                of_kind = [row for row in of_model if row["training"] == training]
                found += _speedups(f"{model}, {_kind(training)}", of_kind, limit)
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
