"""Trained GCNs over samples of each row: ES-SpMM's Figs. 8 and 10 and its Table V.

A model is trained once, on the whole graph, and then run over samples as it is.  Accuracies are
those of the test vertices, with ``random`` the mean of several draws; a model's time is that of
both layers with their dense products, of ``torch.sparse`` with the normalised graph made before.
``aggregate_ms`` is one product of the hidden width alone, beside ``spmm`` and cuSPARSE.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from sparsefmt.ops import sample

from .. import _harness
from .._harness import Target
from ..attention.cases import is_cuda
from . import plot
from .inference import Aggregation, Trained, complaint
from .labelled import QUICK_EPOCHS, REAL, Labelled, labelled, predict, recipe_of, train
from .rates import SAMPLES, STRATEGIES

#: The graph with planted communities.
PLANTED = {"cuda": "reddit", "cpu": "small"}
DRAWS = 5  #: of ``random``
MOST_LOST = 1.0  #: percentage points of accuracy
#: On reddit and a GPU, of these strategies with so many entries: least over torch.sparse.
STATED, OVER_TORCH = {("fastrand", 64), ("random", 64)}, 5.0
#: Of a planted graph: what the features alone may tell at most, and with the edges at least.
ALONE, TOGETHER = 0.6, 0.9
COLUMNS = {
    "case": "<36",
    "rate": "6.4f",
    "accuracy": "8.4f",
    "lost": "6.2f",
    "ms": "8.3f",
    "full_ms": "8.3f",
    "torch_ms": "8.3f",
    "over_full": "9.2f",
    "over_torch": "10.2f",
    "aggregate_ms": "12.4f",
    "spmm_ms": "8.4f",
    "cusparse_ms": "11.4f",
    "over_spmm": "9.2f",
    "error": "8.1e",
}


def models(options: argparse.Namespace) -> bool:
    """Every graph, strategy and number of entries; and the plot."""
    cuda = is_cuda(options)
    _harness.print_head("inference of trained GCNs over samples, float32", COLUMNS)
    rows = []
    for data in labelled(options, REAL, PLANTED[options.device]):
        for row in _rows_of(data, options):
            _harness.print_row(row, COLUMNS)
            rows.append(row | options.facts)
        _harness.free()
    right = _harness.keep("sampled", "models", rows, judge, cuda=cuda, folder=options.out)
    path = (options.out or _harness.RESULTS) / f"sampled-{'gpu' if cuda else 'cpu'}.json"
    if path.exists():
        kept = json.loads(path.read_text())["sections"].get("models", {"rows": [], "machine": {}})
        machine = kept["machine"].get("device") or kept["machine"].get("cpu", "")
        plot.plot(kept["rows"], machine, path.with_name("sampled-accuracy.png"))
    return right


def _rows_of(data: Labelled, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is common to all, then the strategies side by side for each number of entries."""
    recipe = recipe_of(data.name, quick=options.quick)
    trained = Trained(data, recipe, train(data, recipe, seed=0))
    logits = predict(trained.model, data)
    common: dict[str, Any] = {"graph": data.name, "device": options.device}
    common |= {
        "degree": trained.A.nnz / trained.A.n_rows,
        "hidden": recipe.hidden,
        "epochs": recipe.epochs,
    }
    common |= {f"full_{part}": float(data.accuracy(logits, part)) for part in data.parts}
    common["full_error"] = trained.error(trained.model, trained.exact())
    wrong = complaint(common["full_error"])
    if wrong:
        yield {"case": f"{data.name} full"} | wrong
        return
    if data.planted:
        alone = data.without_edges()
        blind = train(alone, recipe, seed=0)
        common["alone"] = float(alone.accuracy(predict(blind, alone), "test"))
    times = _Times(trained, options)
    for width in options.sample or SAMPLES:
        rows = {}
        for strategy in options.strategies or STRATEGIES:
            row = {"case": f"{data.name} {strategy} S={width}", "strategy": strategy}
            row |= {"sample": width} | common
            rows[strategy] = row | _result(trained, row, width)
            unlike = times.aggregation.complaint(width, strategy)
            if unlike:
                rows[strategy]["wrong"] = f"aggregation: {unlike}"
        times.add(rows, width)
        yield from rows.values()


def _result(trained: Trained, case: dict[str, Any], width: int) -> dict[str, Any]:
    """Accuracy over samples, and the error where the sample is known."""
    data, strategy = trained.data, case["strategy"]
    model = trained.over(width, strategy)
    kept = int(np.minimum(np.asarray(_host(trained.A.lengths)), width).sum())
    row: dict[str, Any] = {"rate": kept / trained.A.nnz}
    torch.manual_seed(0)
    draws = DRAWS if strategy == "random" else 1
    shares = [float(data.accuracy(predict(model, data), "test")) for _ in range(draws)]
    row["accuracy"] = float(np.mean(shares))
    row["lost"] = 100 * (case["full_test"] - row["accuracy"])
    if strategy == "random":
        return row | {"draws": shares}
    exact = trained.exact(lambda A: sample(A, width, strategy=strategy))
    row["error"] = trained.error(model, exact)
    return row | complaint(row["error"])


def _host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


class _Times:
    """Times of one model, in all ways in turn."""

    def __init__(self, trained: Trained, options: argparse.Namespace) -> None:
        self.trained, self.quick, self.cuda = trained, options.quick, is_cuda(options)
        self.aggregation = Aggregation(trained)
        models: dict[str, Module] = {"full_ms": trained.model, "torch_ms": trained.by_torch()}
        self.models = {name: trained.call(model) for name, model in models.items()}
        self.products = {"spmm_ms": self.aggregation.full}
        if self.cuda:
            self.products["cusparse_ms"] = self.aggregation.cusparse()

    def add(self, rows: dict[str, dict[str, Any]], width: int) -> None:
        """To the rows that are right, by strategy."""
        right = {name: row for name, row in rows.items() if "wrong" not in row}
        ours = {name: self.trained.call(self.trained.over(width, name)) for name in right}
        self._add(right, "ms", ours, self.models)
        products = {name: self.aggregation.over(width, name) for name in right}
        self._add(right, "aggregate_ms", products, self.products)
        for row in right.values():
            row |= {f"over_{name}": row[f"{name}_ms"] / row["ms"] for name in ("full", "torch")}
            for name in self.products:
                row[f"over_{name.removesuffix('_ms')}"] = row[name] / row["aggregate_ms"]

    def _add(self, rows: Any, key: str, ours: dict[str, Any], others: dict[str, Any]) -> None:
        if not ours:
            return
        calls = [*ours.values(), *others.values()]
        times, runs = _harness.paced(calls, cuda=self.cuda, quick=self.quick)
        theirs = dict(zip(others, times[len(ours) :], strict=True))
        for row, ms in zip(rows.values(), times, strict=False):
            row |= {key: ms, "runs": runs} | theirs


# Judging


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """What is stated for reddit; Table V of each graph, and how well its model is, to know."""
    found = [target for row in rows for target in _stated(row)]
    for graph in dict.fromkeys(row["graph"] for row in rows):
        held = [row for row in rows if row["graph"] == graph]
        quick = held[0]["epochs"] == QUICK_EPOCHS
        judged = graph in PLANTED.values() and "alone" in held[0] and not quick
        text = f"{graph} test accuracy, all entries"
        found.append(Target(text, held[0]["full_test"], TOGETHER if judged else None))
        if "alone" in held[0]:
            text, most = f"{graph} test accuracy without edges", ALONE if judged else None
            found.append(Target(text, held[0]["alone"], most, at_least=False))
        found += table_v(graph, held)
    errors = [row["error"] for row in rows if "error" in row]
    errors += [row["full_error"] for row in rows]
    return [*found, Target("largest error of logits, relative to their norm", max(errors))]


def _stated(row: dict[str, Any]) -> list[Target]:
    here = row["graph"] == PLANTED["cuda"] and row["device"] == "cuda"
    if not here or (row["strategy"], row["sample"]) not in STATED:
        return []
    return [
        Target(f"{row['case']} over torch.sparse, whole model", row["over_torch"], OVER_TORCH),
        Target(f"{row['case']} points lost", row["lost"], MOST_LOST, at_least=False),
    ]


def table_v(graph: str, rows: list[dict[str, Any]]) -> list[Target]:
    """The best speed-ups of the whole model that lose less than a point of test accuracy."""
    found = []
    held = [row for row in rows if row["lost"] < MOST_LOST]
    for key, other in (("over_torch", "torch.sparse"), ("over_full", "all entries")):
        if held:
            best = max(held, key=lambda row: row[key])
            how = f"{best['strategy']} S={best['sample']}, {best['lost']:.2f} points lost"
            text = f"{graph} best over {other} at less than a point lost ({how})"
            found.append(Target(text, best[key]))
    return found or [Target(f"{graph} cases at less than a point lost", 0)]
