"""A graph used once: wall time of a training step with a new ``edge_index``, against PyG's layer.

A step is forward and backward of one layer of 64 features, on an ``edge_index`` that no step has
had before, nor one of so many edges, until the device is done: a ``Graph`` made of it, a tensor
given to our layer, and PyG's layer of the same parameters, in turn in one process.  Beside them our
layer on one graph that stays, and on one ``edge_index`` that stays; what it costs to remember the
latter comes from many forward calls with each, none of which waits for the device.  Before any of
it is timed, results and gradients are compared with PyG's in float64; no error may be beyond
``MOST_ERROR``, or twice PyG's own in float32 (a sum over all edges, as attention's vectors have it,
cancels).
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from sparsefmt import Graph

from .. import _harness
from .._harness import Target

SIZES = ((1_000, 8_000), (20_000, 200_000), (200_000, 2_000_000))
LAYERS = ("SAGEConv", "GCNConv", "GINConv", "GATConv")
FEAT = 64
#: Other graphs between two steps on the same one, whose tensors a step gets as copies.
GRAPHS = 10
#: Numbers of edges that the new graphs of a size have, one after the other, as a loader's have.
SIZES_OF_ONE = 997
RUNS, WARMUPS = 40, 10
#: Forward calls of each kind that tell what remembering costs, and so many at a time.
CALLS, ROUND = 2000, 20
#: Most that a step may take, in steps of PyG's, up to so many edges and beyond.
SMALL, MOST_SMALL, MOST_LARGE = 1_000_000, 0.8, 0.5
#: Most microseconds that an ``edge_index`` which has been seen costs more than a ``Graph``.
MOST_REMEMBERING_US = 5.0
#: Largest relative error, and the largest of PyG's own to which ours may be twice as large.
MOST_ERROR, MOST_OF_PYG = 1e-4, 1e-2
WAYS = ("graph", "edge_index", "pyg", "kept graph", "kept edge_index")
COLUMNS = {"case": "<28", **dict.fromkeys(WAYS, "9.3f"), "ratio": "7.2f", "more_us": "9.1f"}

Step = Callable[[], Any]


def changing(options: argparse.Namespace) -> bool:
    """Measure every layer at every size, and tell whether all results were right."""
    cuda = options.device == "cuda"
    _harness.print_head("ms of a step with a new edge_index", COLUMNS)
    rows = []
    for n, edges in SIZES[:1] if options.quick else SIZES:
        for name in LAYERS:
            case = Case(name, n, edges, options.device)
            row: dict[str, Any] = {"case": f"{name} {n}/{edges}", "edges": edges}
            wrong = case.wrong()
            rows.append(row | ({"wrong": wrong} if wrong else case.times(quick=options.quick)))
            _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("wallclock", "changing", rows, judge, cuda=cuda, folder=options.out)


class Case:
    """One layer at one size, ours and PyG's with the same parameters."""

    def __init__(self, name: str, n: int, edges: int, device: str) -> None:
        import torch
        import torch_geometric.nn as pyg

        from sparsefmt import nn

        torch.manual_seed(0)
        self.n, self.cuda = n, device == "cuda"
        self.ours = _layer(nn, name).to(device)
        self.theirs = _layer(pyg, name).to(device)
        self.theirs.load_state_dict(self.ours.state_dict())
        self.x = torch.randn(n, FEAT, device=device, requires_grad=True)
        self.gradient = torch.randn(n, FEAT, device=device)
        self.edges = [without_loops(n, edges, device) for _ in range(GRAPHS)]

    def step(self, layer: Any, graph: Any, x: Any = None) -> tuple[Any, ...]:
        """Forward and backward: the result, and the gradients of features and parameters."""
        import torch

        x = self.x if x is None else x
        y = layer(x, graph)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], self.gradient.to(y.dtype))
        return y, *gradients

    def wrong(self) -> str:
        """What differs from PyG in float64 by more than float32 can; empty if nothing does."""
        from copy import deepcopy

        x = self.x.detach().double().requires_grad_()
        exact = self.step(deepcopy(self.theirs).double(), self.edges[0], x)
        theirs = self.errors(exact, self.theirs, self.edges[0])
        for graph in (Graph.from_edge_index(self.edges[0], num_nodes=self.n), self.edges[0]):
            errors = self.errors(exact, self.ours, graph)
            for error, of_pyg in zip(errors, theirs, strict=True):
                if not (error < max(MOST_ERROR, 2 * of_pyg) and of_pyg < MOST_OF_PYG):
                    return f"off by {error:.1e} of float64's, PyG in float32 by {of_pyg:.1e}"
        return ""

    def errors(self, exact: tuple[Any, ...], layer: Any, graph: Any) -> list[float]:
        """Relative errors of the results of a step."""
        found = (one.detach().double() for one in self.step(layer, graph))
        wanted = (one.detach() for one in exact)
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]

    def times(self, *, quick: bool) -> dict[str, Any]:
        """Median wall times in ms of each way, taken in turn, and ours over PyG's."""
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        steps, chance = self.steps(), random.Random(0)
        for run in range(WARMUPS + (5 if quick else RUNS)):
            # Each finds what the one before it left in the caches.
            for way in chance.sample(WAYS, len(WAYS)):
                step = steps[way]()
                taken = self.wall_ms(step)
                if run >= WARMUPS:
                    found[way].append(taken)
        row: dict[str, Any] = {way: statistics.median(taken) for way, taken in found.items()}
        return row | {"ratio": row["graph"] / row["pyg"], "more_us": self.more_us(quick=quick)}

    def more_us(self, *, quick: bool) -> float:
        """Microseconds of the host that a forward takes longer with an ``edge_index`` it knows."""
        import torch

        kept = self.edges[0].clone()
        graph = Graph.from_edge_index(kept, num_nodes=self.n)
        more = []
        with torch.no_grad():
            for _ in range((100 if quick else CALLS) // ROUND):
                seconds = [self._calls(given) for given in (graph, kept)]
                more.append((seconds[1] - seconds[0]) / ROUND)
        return 1e6 * statistics.median(more)

    def _calls(self, given: Any) -> float:
        """Seconds of the host for some forward calls."""
        self._wait()
        start = time.perf_counter()
        for _ in range(ROUND):
            self.ours(self.x, given)
        return time.perf_counter() - start

    def steps(self) -> dict[str, Callable[[], Step]]:
        """Way -> what makes its next step, its ``edge_index`` a tensor that nobody has seen."""
        ours, theirs = self.ours, self.theirs
        new = self._new()
        kept = self.edges[0].clone()
        graph = Graph.from_edge_index(kept, num_nodes=self.n)

        def of_graph() -> Step:
            edges = next(new)
            return lambda: self.step(ours, Graph.from_edge_index(edges, num_nodes=self.n))

        def of_edges(layer: Any) -> Step:
            edges = next(new)
            return lambda: self.step(layer, edges)

        return {
            "graph": of_graph,
            "edge_index": lambda: of_edges(ours),
            "pyg": lambda: of_edges(theirs),
            "kept graph": lambda: lambda: self.step(ours, graph),
            "kept edge_index": lambda: lambda: self.step(ours, kept),
        }

    def _new(self) -> Iterator[Any]:
        for number in count():
            edges = self.edges[number % GRAPHS]
            yield edges[:, number % SIZES_OF_ONE :].clone()

    def wall_ms(self, step: Step) -> float:
        """Milliseconds from an idle device to an idle device."""
        self._wait()
        start = time.perf_counter()
        found = step()
        self._wait()
        del found
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()


def _layer(layers: Any, name: str) -> Any:
    """Make a layer of ``FEAT`` features; GIN's map is a linear one."""
    import torch

    of_gin = name == "GINConv"
    return getattr(layers, name)(*((torch.nn.Linear(FEAT, FEAT),) if of_gin else (FEAT, FEAT)))


def without_loops(n: int, edges: int, device: str) -> Any:
    """Make a random ``edge_index``; of several loops of one vertex PyG's GCNConv takes the last."""
    import torch

    source = torch.randint(0, n, (edges,), device=device)
    return torch.stack([source, (source + torch.randint(1, n, (edges,), device=device)) % n])


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Our step over PyG's for each case, and what remembering an ``edge_index`` costs."""
    found = []
    for row in rows:
        most = MOST_SMALL if row["edges"] < SMALL else MOST_LARGE
        found.append(Target(f"{row['case']}, ours / PyG", row["ratio"], most, at_least=False))
    extra = [row["more_us"] for row in rows]
    name = "us more for an edge_index that is remembered, median"
    return [*found, Target(name, statistics.median(extra), MOST_REMEMBERING_US, at_least=False)]
