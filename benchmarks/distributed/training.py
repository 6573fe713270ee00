"""Training steps over ranks beside those of one device, and what they exchange."""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsefmt import autograd

from .. import _harness
from .._harness import MIB
from .._table import Limit, Row, print_row
from . import models
from .model import Link, Machine, Share, calibrated, expected_halo, fitted, step
from .models import HIDDEN, ITEM, LIMITS, OVERLAPS, Training
from .ranks import Ranks, repeatable, silent, step_ms

# Exchanges alone

#: MiB that a rank sends to others, about.
SENT = (4, 64, 512)
QUICK_SENT = (1, 4)
#: Numbers for a rank are a multiple of this: NCCL copies parts that begin between words of 16
#: bytes at 178 GiB/s where others go at 290 (four H100).
WHOLE = 1024


def bandwidth(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Measure each number of ranks, 2 at least."""
    counts = [count for count in options.ranks if count > 1]
    rows = [row for count in counts for row in measured(ranks, count, quick=options.quick)]
    if ranks.rank or not rows:
        return True
    for row in rows:
        print_row(row)
    rows.sort(key=lambda row: float(row["mib"]))
    return bool(options.keep("bandwidth", rows, (Limit("gib_s", by=("ranks",), high=True),)))


def part_of(size: int, others: int) -> int:
    """Return the float32 numbers for each of the others, of about ``size`` bytes in all."""
    return max(size // 4 // others // WHOLE, 1) * WHOLE


@lru_cache(maxsize=4)
def measured(ranks: Ranks, count: int, *, quick: bool) -> list[dict[str, Any]]:
    """Time ``all_to_all_single`` at each size, and ``all_reduce`` of GraphSAGE's parameters."""
    group, others, calls, sent = ranks.groups[count], count - 1, {}, {}
    for size in QUICK_SENT if quick else SENT:
        part, name = part_of(size * MIB, others), f"all_to_all_single, {count} ranks, {size} MiB"
        sent[name] = part * others * 4
        if ranks.has(count):
            splits = [part * (rank != ranks.rank) for rank in range(count)]
            into, given = torch.zeros(2, part * others, device=ranks.device)
            exchange = into, given, splits, splits
            calls[name] = partial(dist.all_to_all_single, *exchange, group=group)
    name = f"all_reduce of parameters, {count} ranks"
    numbers = sum(
        p.numel() for p in models.MODELS["sage"](*models.SIZES["reddit"], HIDDEN).parameters()
    )
    sent[name] = 2 * 4 * numbers * others // count
    if ranks.has(count):
        flat = torch.zeros(numbers, device=ranks.device)
        calls[name] = partial(dist.all_reduce, flat, group=group)
    runs = 3 if quick else 15
    ms = {
        name: step_ms({"": call}, cuda=ranks.cuda, runs=runs, warmups=2)[""]
        for name, call in calls.items()
    }
    times = [one for one in ranks.gather(ms) if one]
    return [_row(name, count, sent[name], max(one[name] for one in times)) for name in sent]


def _row(case: str, count: int, size: int, ms: float) -> dict[str, Any]:
    mib = size / MIB
    return {"case": case, "ranks": count, "mib": mib, "ms": ms, "gib_s": mib / 1024 / ms * 1e3}


def link(ranks: Ranks, count: int, *, quick: bool) -> Link:
    """Fit what joins so many ranks to the exchanges measured."""
    rows = [r for r in measured(ranks, count, quick=quick) if r["case"].startswith("all_to_all")]
    return fitted([r["mib"] * MIB for r in rows], [r["ms"] / 1e3 for r in rows])


# Steps

#: What runs of each graph.
MODELS = {"reddit": ("sage", "gat", "maxk")}
ORDERS = {"products": ("community", "shuffled")}
CHECKED_STEPS = 3
#: A gradient's error is relative to its norm, or to this share of that of all gradients.
LEAST = 1e-3
#: Share of a step by which one without exchanges may be slower and still tell what they cost.
MOST_NOISE = 0.02
#: What is kept of a row in the section ``exchange``.
EXCHANGED = ("halo", "halo_share", "random_halo", "own", "sent_mib", "predicted_mib", "over_dense")
ALONE, HIDDEN_SHARE, MAXK, PREDICTED = 1.03, 0.5, 0.2, 1.15
#: Speed-up on GPUs, by graph, model and ranks: on 2 ranks in every order, else as ``_as_stated``.
SPEED_UP = {
    ("reddit", "sage", 2): 1.8,
    ("products", "sage", 2): 1.8,
    ("reddit", "sage", 4): 3.2,
    ("products", "sage", 4): 3.2,
    ("reddit", "gat", 4): 3.0,
    ("reddit", "maxk", 4): 2.6,
}


def _as_stated(row: Row) -> bool:
    """Return True if a case is in the order that targets mean: of products ids as generated."""
    return row["graph"] != "products" or row["order"] == "shuffled"


def _least(row: Row) -> float | None:
    limit = SPEED_UP.get((row["graph"], row["model"], row["ranks"]))
    return limit if row["ranks"] == 2 or _as_stated(row) else None


def _is_predicted(row: Row) -> bool:
    known = (row["graph"], row["model"]) in {key[:2] for key in SPEED_UP}
    return known and row["ranks"] in (2, 4) and _as_stated(row)


def _hidden(row: Row) -> float | None:
    return HIDDEN_SHARE if row["ranks"] == 2 and _least(row) else None


STEPS = (
    Limit("over_plain", "each", most=ALONE),
    Limit("speed_up", "each", least=_least, where=lambda row: row["ranks"] > 1),
    Limit("hidden", "each", least=_hidden),
    Limit("off", "each", most=PREDICTED, where=_is_predicted),
)
EXCHANGE = (
    Limit("over_predicted", "each", high=True),
    Limit("over_dense", "each", most=MAXK, on=("cpu", "cuda")),
)


def training(ranks: Ranks, options: argparse.Namespace) -> bool:
    """Measure every graph, order, model and number of ranks: ``steps`` and ``exchange``."""
    rows: list[dict[str, Any]] = []
    first, right = ranks.rank == 0, True
    for graph in options.graphs or (("reddit", "products") if ranks.cuda else ("small",)):
        for order in ORDERS.get(graph, ("community",)):
            models.check_alike(models.csr_of(graph, order, ranks.device), ranks)
            for model in MODELS.get(graph, ("sage",)):
                rows += Case(graph, order, model, ranks, options).rows()
            models.forget(generated=False)
        models.forget(generated=True)
        right = not first or _kept(rows, options)  # a run may be cut off
    return right


def _kept(rows: list[Row], options: argparse.Namespace) -> bool:
    """Keep times in one section and what is sent in another."""
    right = "steps" not in options.sections or options.keep("steps", rows, STEPS)
    names = ("case", "graph", "order", "model", "ranks", "wrong", "error", *EXCHANGED)
    sent = [{k: row[k] for k in names if k in row} for row in rows if row["ranks"] > 1]
    for row in sent:
        if row.get("predicted_mib"):
            row["over_predicted"] = row["sent_mib"] / row["predicted_mib"]
    if sent and "exchange" in options.sections:
        right &= options.keep("exchange", sent, EXCHANGE)
    return right


Began = tuple[list[float], list[Tensor]]


def compared(model: str, expected: Began, found: Began) -> dict[str, Any]:
    """Return the errors of losses and first gradients, beside one device; wrong if too large."""
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
        """Return one for each number of ranks; none but on the first rank."""
        machine = plain_ms = None
        if self.ranks.rank == 0:
            data = models.whole(self.graph, self.order, self.ranks.device)
            autograd.prepare(data.graph)
            self.plain = Training(self.model, data)
            self.began = self.plain.begun(CHECKED_STEPS)
            if self.timed:
                how = {"cuda": self.ranks.cuda, "quick": self.quick}
                machine, plain_ms = machine_of(self.plain, **how)
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
            row |= predicted(self.plain, by_rank, count, machine, joint)
            plain_ms = row.get("plain_ms", plain_ms)
            rows.append(row | _ratios(row, plain_ms))
            print_row(rows[-1])
        return rows

    def _row(self, count: int, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return of each figure the most that a rank has, and what the first compared."""
        graph = Path(self.graph).stem
        name = f"{graph} {self.order} {self.model}, {count} rank{'s' if count > 1 else ''}"
        row = {"case": name, "graph": graph, "order": self.order, "model": self.model}
        figures = [one["figures"] for one in found]
        most = {key: max(one[key] for one in figures) for key in figures[0]}
        return row | {"ranks": count} | most | found[0]["compared"]

    def _measured(self, count: int) -> dict[str, Any]:
        """Measure this rank, as one of so many."""
        data = models.share(self.graph, self.order, count, self.ranks)
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
        """Time a step beside the plain one or, of several ranks, one without its exchanges."""
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
    """Return memory that a step takes beyond what is in use before it."""
    return {"peak_mib": sum(_harness.peak_bytes(training.step)) / MIB}


def _ratios(row: dict[str, Any], plain_ms: float | None) -> dict[str, Any]:
    """Return ratios of times and bytes; 1 - (step - silent) / exchange is hidden of that."""
    found: dict[str, Any] = {}
    if row.get("dense_mib"):
        found["over_dense"] = row["sent_mib"] / row["dense_mib"]
    if plain_ms is None:
        return found
    found |= {"plain_ms": plain_ms, "speed_up": plain_ms / row["ms"]}
    if "predicted_ms" in row:
        ratio = row["predicted_ms"] / row["ms"]
        found["off"] = max(ratio, 1 / ratio)
    if row["ranks"] == 1:
        return found | {"over_plain": row["ms"] / plain_ms}
    exposed = row["ms"] - row["silent_ms"]
    if -exposed > MOST_NOISE * row["ms"]:  # it is not the same step without exchanges
        return found
    return found | {"hidden": 1 - exposed / row["exchange_ms"] if row["exchange_ms"] else 1.0}


# What the model says: the constants of one device, and the step of the busiest rank


def machine_of(training: Training, *, cuda: bool, quick: bool) -> tuple[Machine, float]:
    """Measure products and maps of the hidden width, and the milliseconds of a step, on one device.

    What a step takes beyond the products and maps that the model counts is its ``rest``.
    """
    data = training.data
    x = torch.ones(data.total, HIDDEN, device=data.x.device)
    weight = torch.ones(HIDDEN, HIDDEN, device=data.x.device)
    ways = {
        "product": lambda: autograd.spmm(data.graph, x, reduce="mean"),
        "map": lambda: x @ weight,
        "copy": lambda: x.neg(),
        "step": training.step,
    }
    runs, warmups = (3, 1) if quick else (9, 2)
    ms = step_ms(ways, cuda=cuda, runs=runs, warmups=warmups)
    bare = Machine(
        gathered=data.graph.nnz * HIDDEN * ITEM / ms["product"] * 1e3,
        flops=2 * data.total * HIDDEN**2 / ms["map"] * 1e3,
        copied=2 * x.nbytes / ms["copy"] * 1e3,
    )
    whole = Share(data.total, data.graph.nnz, 1.0, 0.0)
    return calibrated(training.layers, whole, bare, ms["step"] / 1e3), ms["step"]


def predicted(
    training: Training,
    shares: Sequence[Share],
    ranks: int,
    machine: Machine | None,
    link: Link | None,
) -> dict[str, Any]:
    """Predict what the busiest rank sends in a step and, of a known machine, how long it takes.

    Beside them the halo of a graph whose entries lie at random.
    """
    vertices, entries, own, halo = zip(*map(astuple, shares), strict=True)
    share = Share(max(vertices), max(entries), min(own), max(halo))
    layers, data = training.layers, training.data
    sent = share.halo * sum(layer.forward + layer.backward for layer in layers)
    random = expected_halo(data.total, data.graph.nnz, ranks)
    found = {"own": share.own, "predicted_mib": sent / MIB, "random_halo": random}
    if training.name == "maxk":
        found["dense_mib"] = share.halo * len(layers) * 2 * HIDDEN * ITEM / MIB
    if machine is None or link is None:
        return found
    how: dict[str, Any] = {"ranks": ranks, "parameters": training.parameter_bytes}
    times = step(layers, share, machine, link, **how, overlap=training.name in OVERLAPS)
    return found | {
        "predicted_ms": times.total * 1e3,
        "predicted_exchange_ms": times.exchange * 1e3,
        "predicted_hidden": times.hidden,
        "machine": asdict(machine),
        "link": asdict(link),
    }


# A graph that one GPU cannot train on, at a width that all of them together can

#: Steps in which the loss has to fall: where layers are wide, Adam's first ones overshoot.
FALLING = 20
GRAPH, ORDER, MODEL = "large", "shuffled", "sage"
#: Hidden widths that one GPU tries; results are compared at the first.
WIDTHS = (64, 256, 576, 1152, 2304)


def large(ranks: Ranks, options: argparse.Namespace) -> bool:
    """On one GPU until memory does not do, then at that width on the most ranks."""
    count, first = max(options.ranks), ranks.rank == 0
    models.check_alike(models.csr_of(GRAPH, ORDER, ranks.device), ranks)
    expected: list[Began] = []

    def train(width: int) -> None:
        data = models.whole(GRAPH, ORDER, ranks.device)
        autograd.prepare(data.graph)
        began = Training(MODEL, data, width).begun(CHECKED_STEPS)
        expected[:] = expected or [began]

    fits, width = ranks.gather(until_memory(train) if first else None)[0]
    if width is None or count < 2:
        if first:
            print(f"  {GRAPH} trains on one GPU at all widths, or there is one rank alone")
        return True
    data = models.share(GRAPH, ORDER, count, ranks)
    models.forget(generated=True)
    began = Training(MODEL, data, WIDTHS[0]).begun(CHECKED_STEPS)
    training = Training(MODEL, data, width)
    losses, _ = training.begun(FALLING)
    found = step_ms({"ms": training.step}, cuda=True, runs=5, warmups=1)
    by_rank = ranks.gather(found | peak(training) | _held(data))
    if not first:
        return True
    row: dict[str, Any] = {"case": f"{GRAPH}, {count} ranks", "ranks": count, "losses": losses}
    row |= {"vertices": data.total, "hidden": width, "fits": fits}
    row |= {key: max(one[key] for one in by_rank) for key in by_rank[0]}
    row |= compared(MODEL, *expected, began) if expected else {}
    row["falls"] = losses[-1] / losses[0]
    print_row(row)
    return bool(options.keep("large", [row], (Limit("falls", "each", most=1.0),)))


def until_memory(train: Callable[[int], None]) -> tuple[int, int | None]:
    """Train at larger and larger widths until memory does not do.

    Returns
    -------
    fits : int
        The last width that was trained; 0 if none was.
    width : int or None
        The first that was not; None if all were.
    """
    fits = 0
    for width in WIDTHS:
        try:
            train(width)
        except (torch.OutOfMemoryError, MemoryError):  # torch's; CuPy's and sparsefmt's
            return fits, width
        finally:
            gc.collect()
            _harness.free()
        fits = width
    return fits, None


def _held(data: models.Data) -> dict[str, float]:
    """Memory in use between steps, and what of it is for an entry, beside the features."""
    import cupy

    held, graph = torch.cuda.memory_allocated(), data.graph
    held += cupy.get_default_memory_pool().used_bytes()
    features = (graph.n_local + len(graph.halo.vertices)) * data.x[:1].nbytes
    entry = (held - features) / max(graph.local.nnz, 1)
    return {"held_mib": held / MIB, "entry_bytes": entry}
