"""What pays over many steps of a planned model: another order of vertices, tiles, a capture.

Tiles are built and timed here.  An order and a capture are advice: the one changes what the user's
code holds, the other takes its loss and optimizer.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from ..autograd.engine.tiles import against_float32
from ..autograd.tensors.prepare import drop_tiles, has_tiles, prepare
from ..graph.graph import Graph
from ..plan.locality import Locality, locality
from ..plan.planner import TELLING, Plan
from ..reorder import Order, community_order
from .composition import seconds_of, times_of

#: A step is to be shorter by this factor in another order, as predicted.
GAIN = 1.05
#: Seconds for each entry, and at least, that an order takes to find, with its kernels compiled.
FINDING = {"cpu": (4e-6, 0.0), "cuda": (6e-9, 0.1)}
#: Rows and columns of a tile: of the kernels' windows, those that paid most often.
TILE = (64, 16)
#: Seconds for each entry, and at least, that tiles of a graph and its transpose take to build.
BUILDING = 6e-9, 5e-3
#: The most of a product's time that tiles have saved: those of graphs of a few dense parts.
MOST_SAVED = 0.4
#: Share of a step's time that its launches take on the host, from which the device waits for them.
LEAST_SHARE = 0.8
#: Timed runs of a step, with tiles and without; the first compiles and splits tiles.
RUNS = 3


#: What the two times of a decision are.
_TIMES = {
    "order of vertices": "{:.3f} ms a step as it is, {:.3f} reordered",
    "tiles": "{:.3f} ms a step without, {:.3f} with them",
    "capture": "{:.3f} ms of launches in a step of {:.3f} ms",
}


@dataclass(frozen=True)
class Decision:
    """What was decided of one subject, and why."""

    subject: str
    reason: str
    chosen: bool = False  #: whether it pays
    seconds: float | None = None  #: that finding an order, or building tiles, took
    predicted: tuple[float, ...] = ()  #: seconds, as ``_TIMES`` names them
    measured: tuple[float, ...] = ()
    order: Order | None = None  #: that was found, whether it pays or not
    graphs: tuple["ref[Graph]", ...] = ()  #: that have tiles now

    def undo(self) -> None:
        """Drop the tiles."""
        for graph in (weak() for weak in self.graphs):
            if graph is not None:
                drop_tiles(graph, TILE)

    def explain(self) -> str:
        """Write what was decided in one paragraph."""
        lines = [f"{self.subject}: {self.reason}"]
        for name, times in (("predicted", self.predicted), ("measured", self.measured)):
            if times:
                text = _TIMES[self.subject].format(*(seconds * 1e3 for seconds in times))
                lines.append(f"  {name}: {text}")
        if self.seconds is not None:
            lines.append(f"  took {self.seconds:.2f} s")
        return "\n".join(lines)


@dataclass(frozen=True)
class TimedStep:
    """A step of a planned model, and what its products cost."""

    run: Callable[[], Any]
    like: Tensor | None  #: features, of which tiles take the dtype or not
    graphs: Sequence[Graph]  #: those that are multiplied with
    plans: Sequence[Plan]
    mode: Callable[[], AbstractContextManager[Any]]  #: in which it is timed
    steps: int


_ORDER, _TILES, _CAPTURE = (partial(Decision, subject) for subject in _TIMES)


def decide_order(step: TimedStep, graph: Graph | None) -> Decision:
    """Predict whether the vertices of a graph by community pay within the steps.

    Predictions count what gathers miss in the caches, for the structure as it is and in the new
    order.  The user's code moves its rows once.
    """
    if graph is None or not step.plans:
        return _ORDER("stays, since no layer was planned")
    try:
        return _order(step, graph)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _ORDER(f"stays ({type(error).__name__}: {error})")


def _order(step: TimedStep, graph: Graph) -> Decision:
    """Decide on the order, which is computed if it may pay."""
    csr = graph.csr
    before, least = (_products(step.plans, reach) for reach in (locality(csr), Locality(())))
    each, fixed = FINDING["cpu" if graph.device == "cpu" else "cuda"]
    cost = each * csr.nnz + fixed
    if before < GAIN * least:
        return _ORDER("stays, since the caches answer nearly all that is gathered")
    if (before - least) * step.steps < cost:
        takes = "to find another takes longer than it saves"
        return _ORDER(f"stays, since {takes} in {step.steps} steps")
    start = time.perf_counter()
    order = community_order(csr)
    after = _products(step.plans, locality(graph.reordered(order).csr))
    seconds = time.perf_counter() - start
    decided = partial(_ORDER, seconds=seconds, predicted=(before, after), order=order)
    if before < GAIN * after:
        return decided("stays, since another gains too little")
    if (before - after) * step.steps < cost:
        return decided(f"stays, since another does not pay within {step.steps} steps")
    reason = "by community pays: graph.reordered(order), and x[order.perm], of the plan's ordering"
    return decided(reason, chosen=True)


def _products(plans: Sequence[Plan], reach: Locality) -> float:
    """Predict the seconds of the products whose gathers reach so far."""
    return sum(plan.seconds(reach) for plan in plans)


def decide_tiles(step: TimedStep) -> Decision:
    """Build tiles for the graphs of a step where that can pay, and keep them if it is faster.

    Products by tiles round as torch's own do, and only while torch allows it.
    """
    if reason := _against_tiles(step):
        return _TILES(f"none, since {reason}")
    result = None
    try:
        result = _timed_tiles(step)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _TILES(f"none ({type(error).__name__}: {error})")
    finally:
        if result is None or not result.chosen:
            for graph in step.graphs:
                drop_tiles(graph, TILE)
    return result


def _timed_tiles(step: TimedStep) -> Decision:
    """Build tiles, and time the step without and with them, twice each after a first run."""
    like = cast(Tensor, step.like)
    with step.mode():
        before = min([seconds_of(step.run, like) for _ in range(RUNS)][1:])
        start = time.perf_counter()
        for graph in step.graphs:
            prepare(graph, tile=TILE)
        seconds = time.perf_counter() - start
        first, *later = [seconds_of(step.run, like) for _ in range(RUNS)]
    after = min(later)
    seconds += max(0.0, first - after)
    decided = partial(_TILES, seconds=seconds, measured=(before, after))
    if after < TELLING * before:  # what they took to build is spent
        graphs = tuple(map(ref, step.graphs))
        return decided(f"of {TILE[0]} x {TILE[1]}", chosen=True, graphs=graphs)
    return decided("none, since they do not pay as timed")


def _against_tiles(step: TimedStep) -> str:
    """Return why products with such features have no tiles, or an empty text."""
    like = step.like
    if like is None:
        return "the model was not called with features"
    if not like.is_cuda:
        return "they are for tensor cores, and the features are on the CPU"
    if like.dtype is torch.float64:
        return "tensor cores round float64"
    if like.dtype is torch.float32 and (reasons := against_float32()):
        return reasons[0]
    if not step.graphs:
        return "no layer was planned"
    if any(has_tiles(graph) for graph in step.graphs):
        return "a graph has some already, by which its products go"
    each, fixed = BUILDING
    products = sum(plan.chosen.predicted for plan in step.plans)
    cost = sum(each * graph.nnz + fixed for graph in step.graphs)
    if MOST_SAVED * products * step.steps < cost:
        return f"to build them takes longer than they save in {step.steps} steps"
    return ""


def decide_capture(step: TimedStep) -> Decision:
    """Time what the host takes to launch a step, and the step until the device is done."""
    like = step.like
    if like is None:
        return _CAPTURE("not decided, since the model was not called with features")
    if not like.is_cuda:
        return _CAPTURE("none, since the features are on the CPU, which launches nothing")
    with step.mode():
        times = min((times_of(step.run, like) for _ in range(RUNS)), key=lambda pair: pair[1])
    if times[0] < LEAST_SHARE * times[1]:
        return _CAPTURE("not needed, since the device is busy meanwhile", measured=times)
    reason = "pays, since the device waits for launches: sparsefmt.nn.capture(step, ...)"
    return _CAPTURE(reason, chosen=True, measured=times)


#: What is left as it is where processes share the graph: each of them would decide for itself.
OVER_PROCESSES: dict[str, Any] = {
    "ordering": _ORDER("stays, since processes share the graph: reorder it before it is cut"),
    "tiling": _TILES("none, since processes share the graph"),
    "launching": _CAPTURE("not decided, since processes share the graph"),
}
