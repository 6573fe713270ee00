"""Whether products of a planned model go by tiles on tensor cores: allowed, timed, explained."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..plan.planner import TELLING
from ._tiles import against_float32
from .composition import seconds_of
from .structure import drop_tiles, has_tiles, prepare

#: Rows and columns of a tile: of the kernels' windows, those that paid most often.
TILE = (64, 16)
#: Seconds for each entry, and at least, that tiles of a graph and its transpose take to build.
BUILDING = 6e-9, 5e-3
#: The most of a product's time that tiles have saved: those of graphs of a few dense parts.
MOST_SAVED = 0.4


@dataclass(frozen=True)
class Tiling:
    """What was decided of tiles, and why."""

    reason: str
    chosen: bool = False
    building: float | None = None  #: seconds that tiles took to build
    measured: tuple[float, ...] = ()  #: seconds of a step, without and with them

    def explain(self) -> str:
        """Write what was decided in one paragraph."""
        lines = [f"tiles: {self.reason}"]
        if self.measured:
            before, after = (seconds * 1e3 for seconds in self.measured)
            lines.append(f"  measured: {before:.3f} ms a step without, {after:.3f} with them")
        if self.building is not None:
            lines.append(f"  built in {self.building:.2f} s")
        return "\n".join(lines)


@dataclass(frozen=True)
class Step:
    """A step of a planned model, and what its products cost."""

    run: Callable[[], Any]
    like: Tensor | None  #: features, of which tiles take the dtype or not
    graphs: Sequence[Graph]  #: those that are multiplied with
    seconds: float  #: predicted, of all products
    mode: Callable[[], AbstractContextManager[Any]]  #: in which it is timed


def decide(step: Step, steps: int) -> Tiling:
    """Build tiles for the graphs of a step, and keep them if it is faster with their share of cost.

    Products by tiles round as torch's own do, and only while torch allows it.
    """
    reasons = _against(step)
    if reasons:
        return Tiling(f"none, since {reasons}")
    each, least = BUILDING
    cost = sum(each * graph.nnz + least for graph in step.graphs)
    if MOST_SAVED * step.seconds * steps < cost:
        return Tiling(f"none, since to build them takes longer than they save in {steps} steps")
    with step.mode():
        before = _least(step)
        start = time.perf_counter()
        try:
            for graph in step.graphs:
                prepare(graph, tile=TILE)
            building = time.perf_counter() - start
            after = _least(step)
        except (MemoryError, torch.OutOfMemoryError) as error:
            _drop(step.graphs)
            return Tiling(f"none ({type(error).__name__}: {error})")
    pays = after + building / steps < TELLING * before
    if not pays:
        _drop(step.graphs)
    reason = f"of {TILE[0]} x {TILE[1]}" if pays else "none, since they do not pay as timed"
    return Tiling(reason, pays, building, (before, after))


def _against(step: Step) -> str:
    """Say why products with such features have no tiles, if so."""
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
        return "a graph has some already"
    return ""


def _least(step: Step) -> float:
    """Time a step twice, after one that compiles and splits tiles."""
    assert step.like is not None  # nothing is against it
    return min([seconds_of(step.run, step.like) for _ in range(3)][1:])


def _drop(graphs: Sequence[Graph]) -> None:
    for graph in graphs:
        drop_tiles(graph, TILE)
