"""What a call costs the host, in us and in additions of the same library; CUDA graph replays.

Beside them what torch itself takes: its add, and the dispatch of a library op, which eager calls on
a GPU go around.

Calls on a small graph without waiting for the device, in batches of 200; the median batch.  A batch
of additions runs right before each: a host's clock may change from one second to the next, and the
median of their ratios does not follow it.  On a GPU each op is also captured in a CUDA graph,
replayed 100 times with other inputs, and every replay compared with a call outside the graph.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from sparsefmt import Graph, autograd, ops
from sparsefmt.autograd.tensors.prepare import tensors_of
from sparsefmt.formats.arrays import namespace

from .. import _baselines, _graphs, _harness, _oracle
from .._harness import Call
from .._table import Benchmark, Limit, Row, Section

FEAT = 32
BATCH, BATCHES = 200, 15
REPLAYS = 100
FORWARD_US, BOTH_US = 20.0, 60.0
KEPT = 8  # features, or entries of a row
#: Most that a call may cost, in additions of the same library: of arrays into ``out``, of tensors.
MOST_ADDITIONS = {"ops.spmm(out=)": 2.0, "spmm, forward": 2.5, "maxk_aggregate": 6.0}


def host(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what each call costs, and on a GPU how many replays of it are right."""
    cuda = options.cuda
    for name, source in _graphs.chosen(options, ("small",), cpu=("small",)):
        prefix = "" if name == "small" else f"{name}: "
        cases = Cases(source, options.device)
        errors = cases.errors()
        calls = cases.calls()
        for case, call in calls.items():
            addition = calls["add(out=)" if _is_of_arrays(case) else "torch.add"]
            us, additions = host_us(call, addition, cuda=cuda, quick=options.quick)
            row: Row = {"case": prefix + case, "us": us, "additions": additions}
            if case in errors:
                row |= _oracle.judged(errors[case], 1e-5)
            yield row
        for case, (call, inputs) in cases.forwards().items() if cuda else ():
            yield {"case": f"{prefix}{case}, captured"} | replayed(call, inputs)


class Cases:
    """The calls, all on one graph: torch tensors beside CuPy (on the CPU NumPy) arrays."""

    def __init__(self, name: str, device: str) -> None:
        A = _graphs.weighted(_graphs.load(name, device=device))
        self.A, self.graph = A, Graph(A.with_data(None))
        self.X = _graphs.uniform(A.indptr, (A.n_cols, FEAT))
        self.scores_array = _graphs.uniform(A.indptr, (A.nnz, 4))
        self.x = _baselines.tensor(self.X)
        self.y = self.x.clone()
        self.weight = _baselines.tensor(A.data)
        self.scores = _baselines.tensor(self.scores_array)

    def errors(self) -> dict[str, float]:
        """Return errors of the products, so that no wrong one is timed."""
        A, X = self.A, self.X
        Y = _baselines.tensor(ops.spmm(A, X))
        dense = _baselines.tensor(A.toarray()).double() @ self.x.double()
        product = autograd.spmm(self.graph, self.x, self.weight)
        of_arrays, of_tensors = (_oracle.norm_error([y], [dense]) for y in (Y, product))
        return {"A @ X": of_arrays, "ops.spmm(out=)": of_arrays, "spmm, forward": of_tensors}

    def forwards(self) -> dict[str, tuple[Call, list[Any]]]:
        """Return calls through torch with the tensors that they read."""
        graph, x, y, weight, scores = self.graph, self.x, self.y, self.weight, self.scores
        return {
            "spmm": (lambda: autograd.spmm(graph, x, weight), [x, weight]),
            "spmm, max": (lambda: autograd.spmm(graph, x, weight, reduce="max"), [x, weight]),
            "sddmm": (lambda: autograd.sddmm(graph, x, y), [x, y]),
            "edge_softmax": (lambda: autograd.edge_softmax(graph, scores), [scores]),
        }

    def calls(self) -> dict[str, Call]:
        """Return all that is timed: torch's own, forward, forward and backward, the array ops."""
        graph = self.graph
        x, y, weight, s = (
            t.clone().requires_grad_() for t in (self.x, self.y, self.weight, self.scores)
        )
        side = tensors_of(graph).rows
        arrays = side.indptr, side.indices, side.n_cols, side.plan
        args = self.x, self.weight, None, None, None, "sum"

        def both(forward: Call, *inputs: Any) -> Call:
            gradient = torch.ones_like(forward())
            return lambda: torch.autograd.grad(forward(), inputs, gradient)

        calls: dict[str, Call] = {
            "torch.add": lambda: torch.add(self.x, self.y),
            "spmm, library op": lambda: torch.ops.sparsefmt.spmm.default(*arrays, *args),
        }
        calls |= {f"{name}, forward": call for name, (call, _) in self.forwards().items()}
        return calls | {
            **self.of_arrays(),
            "maxk_aggregate": lambda: autograd.maxk_aggregate(graph, self.x, KEPT),
            "spmm, both": both(lambda: autograd.spmm(graph, x, weight), x, weight),
            "sddmm, both": both(lambda: autograd.sddmm(graph, x, y), x, y),
            "edge_softmax, both": both(lambda: autograd.edge_softmax(graph, s), s),
        }

    def of_arrays(self) -> dict[str, Call]:
        """Return the operations on arrays, and the array library's own addition."""
        A, X, scores = self.A, self.X, self.scores_array
        xp, out = namespace(X), self.X.copy()
        S, heads = ops.maxk(X, KEPT), X.reshape(len(X), 4, -1)
        ends = heads[..., 0].copy()
        return {
            "add(out=)": lambda: xp.add(X, X, out=out),
            "ops.spmm(out=)": lambda: ops.spmm(A, X, out=out),
            "A @ X": lambda: A @ X,
            "ops.sddmm": lambda: ops.sddmm(A, X, X),
            "ops.maxk": lambda: ops.maxk(X, KEPT),
            "ops.spgemm": lambda: ops.spgemm(A, S),
            "ops.sspmm": lambda: ops.sspmm(A, X, S),
            "ops.edge_softmax": lambda: ops.edge_softmax(A, scores),
            "ops.spmm_sampled": lambda: ops.spmm_sampled(A, X, KEPT),
            "ops.gat": lambda: ops.gat(A, heads, ends, ends),
            "ops.dot_attention": lambda: ops.dot_attention(A, heads, heads),
        }


def _is_of_arrays(case: str) -> bool:
    return case.startswith(("ops.", "add(")) or case == "A @ X"


def host_us(call: Call, addition: Call, *, cuda: bool, quick: bool) -> tuple[float, float]:
    """Return microseconds until a call returns, and in additions: medians of batches in turn."""
    batches, calls = (2, 20) if quick else (BATCHES, BATCH)
    both = [
        (_batch_us(addition, calls, cuda=cuda), _batch_us(call, calls, cuda=cuda))
        for _ in range(batches + 1)
    ][1:]  # the first ones warm up
    ratios = [us / addition_us for addition_us, us in both]
    return statistics.median(us for _, us in both), statistics.median(ratios)


def _batch_us(call: Call, calls: int, *, cuda: bool) -> float:
    """Return microseconds of one of a batch of calls, the device idle before it."""
    _harness.wait(cuda=cuda)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    us = (time.perf_counter() - start) / calls * 1e6
    _harness.wait(cuda=cuda)
    return us


def replayed(call: Call, inputs: list[Any]) -> dict[str, Any]:
    """Capture the call, replay it with other inputs each time, compare with a call outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = call()
    equal = 0
    kept = [tensor.clone() for tensor in inputs]
    for _ in range(REPLAYS):
        for tensor in inputs:
            tensor.uniform_()
        captured.replay()
        equal += bool(torch.equal(result, call()))
    for tensor, before in zip(inputs, kept, strict=True):
        tensor.copy_(before)
    row: dict[str, Any] = {"replays": REPLAYS, "equal": equal}
    return row if equal == REPLAYS else row | {"wrong": f"{REPLAYS - equal} replays differ"}


def _most(row: Row) -> float | None:
    limited = _is_of_arrays(row["case"]) or row["case"] in MOST_ADDITIONS
    return MOST_ADDITIONS.get(row["case"], 3.0) if limited else None


LIMITS = (
    Limit(
        "us", most=FORWARD_US, where=lambda row: row["case"].endswith(", forward"), label="forward"
    ),
    Limit("us", most=BOTH_US, where=lambda row: row["case"].endswith(", both"), label="both"),
    Limit("additions", "each", most=_most),
    Limit("equal", least=REPLAYS),
)
BENCHMARKS = {"overhead": Benchmark("overhead", __doc__, {"host": Section(host, LIMITS)})}
