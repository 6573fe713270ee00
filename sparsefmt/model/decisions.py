"""Whether the vertices of a model's graph go into another order: predicted, timed, explained."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..plan.calibration import constants_of
from ..plan.locality import Locality, locality
from ..plan.planner import TELLING, Plan
from ..plan.pricing import Constants, Work
from ..reorder import community_order
from .composition import seconds_of
from .trace import FAILURES, TracedForward, evaluating, running
from .vertex_order import VertexOrder

#: A step is to be shorter by this factor, as predicted.
GAIN = 1.05
#: Seconds for each entry, and at least, that an order takes to find, with its kernels compiled.
FINDING = {"cpu": (4e-6, 0.0), "cuda": (6e-9, 0.1)}


@dataclass(frozen=True)
class Ordering:
    """What was decided of the order of vertices, and why."""

    reason: str
    chosen: bool = False
    finding: float | None = None  #: seconds that finding the order and moving the graph took
    predicted: tuple[float, ...] = ()  #: seconds of a step's products, as given and reordered
    measured: tuple[float, ...] = ()  #: seconds of a step

    def explain(self) -> str:
        """Write what was decided in one paragraph."""
        lines = [f"order of vertices: {self.reason}"]
        for name, pair in (("predicted", self.predicted), ("measured", self.measured)):
            if pair:
                before, after = (seconds * 1e3 for seconds in pair)
                lines.append(f"  {name}: {before:.3f} ms a step as given, {after:.3f} reordered")
        if self.finding is not None:
            lines.append(f"  found in {self.finding:.2f} s")
        return "\n".join(lines)


@dataclass(frozen=True)
class Trial:
    """A traced model, what it is called with, and whether it trains."""

    traced: TracedForward
    given: tuple[Any, ...]
    training: bool


def decide(trial: Trial, plans: Sequence[Plan], graph: Graph | Tensor) -> Ordering:
    """Order the vertices by community if that pays within the steps of the settings.

    Sets the order of the traced model if it does.  Predictions count what gathers miss in the
    caches, for the structure as it is and in the new order, and the rows that move on the way in
    and out.  Unless the mode is "model", steps of the model are timed then, two in each order.
    """
    if not any(one is graph for one in trial.given):
        return Ordering("stays, since the model is not called with the graph")
    if not plans:
        return Ordering("stays, since no layer was planned")
    try:
        found = _decided(trial, plans, graph)
    except (MemoryError, torch.OutOfMemoryError, *FAILURES) as error:
        found = Ordering(f"stays ({type(error).__name__}: {error})")
    if not found.chosen:
        trial.traced.order = None
    return found


def _decided(trial: Trial, plans: Sequence[Plan], graph: Graph | Tensor) -> Ordering:
    settings = trial.traced.settings
    steps = settings.steps or 1
    held = graph if isinstance(graph, Graph) else _of_edges(graph, plans)
    csr, constants = held.csr, constants_of(held.device)
    before, least = (_seconds(plans, reach) for reach in (locality(csr), Locality(())))
    each, once = FINDING["cpu" if held.device == "cpu" else "cuda"]
    cost = each * csr.nnz + once
    if before < GAIN * least:
        return Ordering("stays, since the caches answer nearly all that is gathered")
    if (before - least) * steps < cost:
        return Ordering(f"stays, since to find another takes longer than it saves in {steps} steps")
    start = time.perf_counter()
    order = community_order(csr)
    new = held.reordered(order)
    finding = time.perf_counter() - start
    trial.traced.order = VertexOrder(graph, new, order, settings)
    after = _seconds(plans, locality(new.csr))
    after += _moving(trial, constants)
    found = Ordering("by community", True, finding, (before, after))
    if before < GAIN * after:
        return replace(found, chosen=False, reason="stays, since another gains too little")
    if (before - after) * steps < cost:
        reason = f"stays, since another does not pay within {steps} steps"
        return replace(found, chosen=False, reason=reason)
    if settings.mode == "model":
        return found
    return _timed(trial, found, cost / steps)


def _of_edges(edge_index: Tensor, plans: Sequence[Plan]) -> Graph:
    """Give the graph of an edge_index, as large as those of the planned layers that can have it."""
    last = int(edge_index.max()) if edge_index.numel() else 0  # synchronize!
    sizes = [plan.sizes["n"] for plan in plans if plan.sizes.get("n", 0) > last]
    if not sizes:
        raise UnsupportedError("no layer was planned for the graph")
    return Graph.from_edge_index(edge_index.clone(), num_nodes=sizes[0])


def _seconds(plans: Sequence[Plan], reach: Locality) -> float:
    return sum(plan.seconds(reach) for plan in plans)


def _moving(trial: Trial, constants: Constants) -> float:
    """Run the model, and give the seconds that rows take to move in a step."""
    traced, given, order = trial.traced, trial.given, trial.traced.order
    assert order is not None  # the caller's
    with evaluating(traced.model, training=trial.training):
        if traced.ordered(traced.current(), given, order) is None:
            raise UnsupportedError(traced.why_as_given)
        traced(*given)  # what stays is moved, and products are planned
        order.moved = 0
        traced(*given)
    streamed = constants.seconds["other"][Work._fields.index("streamed")]
    return order.moved * streamed * (2 if trial.training else 1)  # gradients move back


def _timed(trial: Trial, found: Ordering, share: float) -> Ordering:
    """Time the model as it is and in the new order, and keep the faster, with its share of cost."""
    traced, training, order = trial.traced, trial.training, trial.traced.order
    run = partial(traced, *trial.given)
    like = next(one for one in trial.given if isinstance(one, Tensor))
    times: dict[bool, list[float]] = {False: [], True: []}
    with running(traced.model, training=training):
        for ordered in (False, True) * 2:
            traced.order = order if ordered else None
            times[ordered].append(seconds_of(run, like))
    traced.order = order
    before, after = min(times[False]), min(times[True])
    pays = after + share < TELLING * before
    reason = "by community" if pays else "stays, since another does not pay as timed"
    return replace(found, chosen=pays, reason=reason, measured=(before, after))
