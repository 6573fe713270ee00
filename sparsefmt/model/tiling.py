"""Whether products of a planned model go by tiles on tensor cores: allowed, timed, explained."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..autograd.engine.tiles import against_float32
from ..autograd.tensors.prepare import drop_tiles, has_tiles, prepare
from ..graph.graph import Graph
from ..plan.planner import TELLING
from .composition import seconds_of

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
    building: float | None = None  #: seconds that tiles took to build, and to split at first use
    measured: tuple[float, ...] = ()  #: seconds of a step, without and with them
    graphs: tuple[ref[Graph], ...] = ()  #: that have tiles now

    def undo(self) -> None:
        """Drop the tiles."""
        for graph in self.graphs:
            if (held := graph()) is not None:
                drop_tiles(held, TILE)

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
class TimedStep:
    """A step of a planned model, and what its products cost."""

    run: Callable[[], Any]
    like: Tensor | None  #: features, of which tiles take the dtype or not
    graphs: Sequence[Graph]  #: those that are multiplied with
    seconds: float  #: predicted, of all products
    mode: Callable[[], AbstractContextManager[Any]]  #: in which it is timed


def decide(step: TimedStep, steps: int) -> Tiling:
    """Build tiles for the graphs of a step where that can pay, and keep them if it is faster.

    Products by tiles round as torch's own do, and only while torch allows it.
    """
    reason = _against(step)
    if reason:
        return Tiling(f"none, since {reason}")
    each, least = BUILDING
    cost = sum(each * graph.nnz + least for graph in step.graphs)
    if MOST_SAVED * step.seconds * steps < cost:
        return Tiling(f"none, since to build them takes longer than they save in {steps} steps")
    kept = False
    try:
        found = _timed(step)
        kept = found.chosen
    except (MemoryError, torch.OutOfMemoryError) as error:
        found = Tiling(f"none ({type(error).__name__}: {error})")
    finally:
        if not kept:
            for graph in step.graphs:
                drop_tiles(graph, TILE)
    return found


def _timed(step: TimedStep) -> Tiling:
    """Build tiles, and time the step without and with them, twice each after a first run."""
    with step.mode():
        before = min(_runs(step)[1:])
        start = time.perf_counter()
        for graph in step.graphs:
            prepare(graph, tile=TILE)
        building = time.perf_counter() - start
        first, *later = _runs(step)
    after = min(later)
    building += max(0.0, first - after)
    if after < TELLING * before:  # what they took to build is spent
        graphs = tuple(map(ref, step.graphs))
        return Tiling(f"of {TILE[0]} x {TILE[1]}", True, building, (before, after), graphs)
    return Tiling("none, since they do not pay as timed", False, building, (before, after))


def _against(step: TimedStep) -> str:
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
        return "a graph has some already, by which its products go"
    return ""


def _runs(step: TimedStep) -> list[float]:
    """Time three runs, of which the first compiles and splits tiles."""
    assert step.like is not None  # nothing is against it
    return [seconds_of(step.run, step.like) for _ in range(3)]
