"""Training steps over ranks beside those of one device, and what they exchange."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsefmt import autograd

from .. import _harness, _memory
from . import prediction, shares, targets
from .bandwidth import link
from .model import Share
from .models import HIDDEN, LIMITS, Training
from .pace import step_ms
from .ranks import Ranks
from .traffic import repeatable, silent

MIB = 1 << 20
#: What runs of each graph unless ``--models`` or ``--orders`` says otherwise.
MODELS = {"reddit": ("sage", "gat", "maxk")}
ORDERS = {"products": ("community", "shuffled")}
CHECKED_STEPS = 3
#: A gradient's error is relative to its norm, or to this share of that of all gradients.
LEAST = 1e-3
#: Share of a step by which one without exchanges may be slower and still tell what they cost.
MOST_NOISE = 0.02
COLUMNS = {
    "case": "<36",
    "ms": "9.2f",
    "plain_ms": "9.2f",
    "speed_up": "8.2f",
    "silent_ms": "9.2f",
    "exchange_ms": "11.2f",
    "hidden": "7.2f",
    "predicted_ms": "12.2f",
    "peak_mib": "9.0f",
    "error": "8.1e",
}
SENT_COLUMNS = {
    "case": "<36",
    "halo": "9d",
    "halo_share": "10.3f",
    "random_halo": "11.0f",
    "own": "6.3f",
    "sent_mib": "9.2f",
    "predicted_mib": "13.2f",
    "over_dense": "10.3f",
}


def training(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Every graph, order, model and number of ranks: sections ``steps`` and ``exchange``."""
    rows: list[dict[str, Any]] = []
    first, right = ranks.rank == 0, True
    if first:
        _harness.print_head(f"training, 3 layers of {HIDDEN}, float32", COLUMNS)
    for graph in options.graphs or (("reddit", "products") if ranks.cuda else ("small",)):
        for order in options.orders or ORDERS.get(graph, ("community",)):
            shares.check_alike(shares.csr_of(graph, order, ranks.device), ranks)
            for model in options.models or MODELS.get(graph, ("sage",)):
                rows += Case(graph, order, model, ranks, options).rows()
            shares.forget(generated=False)
        shares.forget(generated=True)
        right = not first or _kept(rows, options, cuda=ranks.cuda)  # a run may be cut off
    return right


def _kept(rows: list[dict[str, Any]], options: argparse.Namespace, *, cuda: bool) -> bool:
    """Keep times in one section and what is sent in another."""
    right, sent = True, [row for row in rows if row["ranks"] > 1]
    where: dict[str, Any] = {"cuda": cuda, "folder": options.out}
    if "steps" in options.sections:
        right = _harness.keep("distributed", "steps", rows, targets.of_steps, **where)
    if sent and "exchange" in options.sections:
        _harness.print_head("what a rank sends in a step", SENT_COLUMNS)
        for row in sent:
            _harness.print_row(row, SENT_COLUMNS)
        names = ("graph", "order", "model", "ranks", "wrong", *SENT_COLUMNS)
        sent = [{key: row[key] for key in names if key in row} for row in sent]
        right &= _harness.keep("distributed", "exchange", sent, targets.of_exchange, **where)
    return right


Began = tuple[list[float], list[Tensor]]


def compared(model: str, expected: Began, found: Began) -> dict[str, Any]:
    """How far losses and first gradients are from those of one device; wrong if too far."""
    a, b = torch.tensor(found[0]), torch.tensor(expected[0])
    error = ((a - b).abs() / b.abs()).max().item()  # NaN of a NaN
    # Of a gradient that is nearly 0, such as one that a softmax cancels, rounding is all there is.
    least = LEAST * torch.stack([one.norm() for one in expected[1]]).norm()
    pairs = zip(found[1], expected[1], strict=True)
    worst = torch.stack([(a - b).norm() / b.norm().clamp(min=least) for a, b in pairs]).max().item()
    row: dict[str, Any] = {"error": error, "gradient_error": worst}
    limits = LIMITS[model]
    if not (error <= limits[0] and worst <= limits[1]):
        row["wrong"] = (
            f"losses differ by {error:.3g} and gradients by {worst:.3g} of those of one device, "
            f"at most {limits[0]:g} and {limits[1]:g} are right"
        )
    return row


class Case:
    """A model on a graph in an order."""

    def __init__(self, graph: str, order: str, model: str, ranks: Ranks, options: Any) -> None:
        self.graph, self.order, self.model, self.ranks = graph, order, model, ranks
        self.counts, self.quick = options.ranks, options.quick
        self.timed = "steps" in options.sections
        #: On the first rank: training on one device without a process group, and how it began.
        self.plain: Training | None = None
        self.began: Began = [], []

    def rows(self) -> list[dict[str, Any]]:
        """One for each number of ranks; none but on the first rank."""
        machine = plain_ms = None
        if self.ranks.rank == 0:
            data = shares.whole(self.graph, self.order, self.ranks.device)
            autograd.prepare(data.graph)
            self.plain = Training(self.model, data)
            self.began = self.plain.begun(CHECKED_STEPS)
            if self.timed:
                how = {"cuda": self.ranks.cuda, "quick": self.quick}
                machine, plain_ms = prediction.machine_of(self.plain, **how)
        rows: list[dict[str, Any]] = []
        for count in self.counts:
            joint = link(self.ranks, count, quick=self.quick) if self.timed and count > 1 else None
            mine = self._measured(count) if self.ranks.has(count) else None
            found = [one for one in self.ranks.gather(mine) if one is not None]
            _harness.free()
            if self.plain is None:
                continue
            row = self._row(count, found)
            by_rank = [one["share"] for one in found]
            row |= prediction.predicted(self.plain, by_rank, count, machine, joint)
            plain_ms = row.get("plain_ms", plain_ms)
            rows.append(row | _ratios(row, plain_ms))
            _harness.print_row(rows[-1], COLUMNS)
        return rows

    def _row(self, count: int, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Of each figure the most that a rank has, and what the first says of the results."""
        graph = Path(self.graph).stem
        name = f"{graph} {self.order} {self.model}, {count} rank{'s' if count > 1 else ''}"
        row = {"case": name, "graph": graph, "order": self.order, "model": self.model}
        figures = [one["figures"] for one in found]
        most = {key: max(one[key] for one in figures) for key in figures[0]}
        return row | {"ranks": count} | most | found[0]["compared"]

    def _measured(self, count: int) -> dict[str, Any]:
        """What this rank finds, as one of so many."""
        data = shares.share(self.graph, self.order, count, self.ranks)
        training, graph = Training(self.model, data), data.graph
        began, before = training.begun(CHECKED_STEPS), graph.halo.traffic.nbytes
        with repeatable() as exchanges:
            training.step()
        halo, sent = len(graph.halo.vertices), len(graph.halo.rows)
        figures = {
            "halo": halo,
            "halo_share": halo / max(data.total - graph.n_local, 1),
            "sent_mib": (graph.halo.traffic.nbytes - before) / MIB,
        }
        if self.timed:
            figures |= self._times(training, exchanges)
            figures |= peak(training) if self.ranks.cuda else {}
        own = graph.own.nnz / max(graph.local.nnz, 1)
        return {
            "figures": figures,
            "share": Share(graph.n_local, graph.local.nnz, own, max(halo, sent)),
            "compared": compared(self.model, self.began, began) if self.plain else {},
        }

    def _times(self, training: Training, exchanges: list[Callable[[], Any]]) -> dict[str, float]:
        """Of a step; beside the plain one or, of several ranks, without its exchanges, and they."""
        ways: dict[str, Callable[[], Any]] = {"ms": training.step}
        if len(training.data.graph.bounds) == 2:  # one rank, the first
            ways |= {"plain_ms": self.plain.step} if self.plain else {}
        else:
            other = Training(self.model, training.data)
            other.step()  # what is exchanged once

            def without() -> None:
                with silent():
                    other.step()

            ways["silent_ms"] = without
            ways["exchange_ms"] = lambda: [exchange() for exchange in exchanges]
        runs, warmups = (3, 1) if self.quick else (15, 2)
        return step_ms(ways, cuda=self.ranks.cuda, runs=runs, warmups=warmups)


def peak(training: Training) -> dict[str, float]:
    """Memory that a step takes beyond what is in use before it."""
    return {"peak_mib": sum(_memory.torch_peak_bytes(training.step)) / MIB}


def _ratios(row: dict[str, Any], plain_ms: float | None) -> dict[str, Any]:
    """Of times and bytes; the hidden share of the exchange is 1 - (step - silent) / exchange."""
    found: dict[str, Any] = {}
    if row.get("dense_mib"):
        found["over_dense"] = row["sent_mib"] / row["dense_mib"]
    if plain_ms is None:
        return found
    found |= {"plain_ms": plain_ms, "speed_up": plain_ms / row["ms"]}
    if row["ranks"] == 1:
        return found | {"over_plain": row["ms"] / plain_ms}
    exposed = row["ms"] - row["silent_ms"]
    if -exposed > MOST_NOISE * row["ms"]:  # it is not the same step without exchanges
        return found
    return found | {"hidden": 1 - exposed / row["exchange_ms"] if row["exchange_ms"] else 1.0}
