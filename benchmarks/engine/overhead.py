"""What a call costs the host, in µs and in additions of the same library; CUDA graph replays.

Beside them what torch itself takes: its add, a Function that only allocates, and the dispatch of a
library op, which eager calls on a GPU go around.

``python -m benchmarks overhead [--device cpu|cuda] [--out FOLDER]``

Calls on a small graph without waiting for the device, in batches of 200; the median batch.  A batch
of additions runs right before each: a host's clock may change from one second to the next, and the
median of their ratios does not follow it.  On a GPU each op is also captured in a CUDA graph,
replayed 100 times with other inputs, and every replay compared with a call outside the graph.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsefmt import Graph, autograd, ops
from sparsefmt.formats.arrays import namespace

from .. import _baselines, _graphs, _harness
from .._harness import Target

FEAT = 32
BATCH, BATCHES = 200, 15
REPLAYS = 100
FORWARD_US, BOTH_US = 20.0, 60.0
KEPT = 8  # features, or entries of a row
#: Most that a call may cost, in additions of the same library: of arrays into ``out``, of tensors.
MOST_ADDITIONS = {"ops.spmm(out=)": 2.0, "spmm, forward": 2.5, "maxk_aggregate": 6.0}
COLUMNS = {"case": "<28", "us": "9.2f", "additions": "9.2f", "replays": "8d", "equal": "6d"}

Call = Callable[[], Any]


def main(argv: list[str]) -> int:
    """Measure and report; 1 if a replay differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--graph", default="small", help="of benchmarks/_graphs.py, or a path")
    parser.add_argument("--out", type=Path, help="folder of the JSON, by default results/")
    options = parser.parse_args(argv)
    cuda = options.device == "cuda"
    _harness.print_head("host microseconds per call", COLUMNS)
    rows = []
    cases = Cases(options.graph, options.device)
    calls = cases.calls()
    for case, call in calls.items():
        addition = calls["add(out=)" if _is_of_arrays(case) else "torch.add"]
        us, additions = host_us(call, addition, cuda=cuda)
        rows.append({"case": case, "us": us, "additions": additions})
        _harness.print_row(rows[-1], COLUMNS)
    for case, (call, inputs) in cases.forwards().items() if cuda else ():
        rows.append({"case": f"{case}, captured"} | replayed(call, inputs))
        _harness.print_row(rows[-1], COLUMNS)
    right = _harness.keep("overhead", "host", rows, judge, cuda=cuda, folder=options.out)
    return 0 if right else 1


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

    def forwards(self) -> dict[str, tuple[Call, list[Any]]]:
        """Op -> a call through torch and the tensors that it reads."""
        graph, x, y, weight, scores = self.graph, self.x, self.y, self.weight, self.scores
        return {
            "spmm": (lambda: autograd.spmm(graph, x, weight), [x, weight]),
            "spmm, max": (lambda: autograd.spmm(graph, x, weight, reduce="max"), [x, weight]),
            "sddmm": (lambda: autograd.sddmm(graph, x, y), [x, y]),
            "edge_softmax": (lambda: autograd.edge_softmax(graph, scores), [scores]),
        }

    def calls(self) -> dict[str, Call]:
        """Everything timed: torch's own, forward, forward and backward, the array ops."""
        import torch

        from sparsefmt.autograd.tensors.prepare import tensors_of

        graph = self.graph
        x, y, weight, s = (
            t.clone().requires_grad_() for t in (self.x, self.y, self.weight, self.scores)
        )
        function, side = bare_function(), tensors_of(graph).rows
        arrays = side.indptr, side.indices, side.n_cols, side.plan
        args = self.x, self.weight, None, None, None, "sum"

        def both(forward: Call, *inputs: Any) -> Call:
            gradient = torch.ones_like(forward())
            return lambda: torch.autograd.grad(forward(), inputs, gradient)

        calls: dict[str, Call] = {
            "torch.add": lambda: torch.add(self.x, self.y),
            "bare Function": lambda: function(self.x, self.weight),
            "bare Function, and back": both(lambda: function(x, weight), x, weight),
            "spmm, library op": lambda: torch.ops.sparsefmt.spmm.default(*arrays, *args),
        }
        calls |= {f"{name}, forward": call for name, (call, _) in self.forwards().items()}
        return (
            calls
            | self.of_arrays()
            | {
                "maxk_aggregate": lambda: autograd.maxk_aggregate(graph, self.x, KEPT),
                "spmm, both": both(lambda: autograd.spmm(graph, x, weight), x, weight),
                "sddmm, both": both(lambda: autograd.sddmm(graph, x, y), x, y),
                "edge_softmax, both": both(lambda: autograd.edge_softmax(graph, s), s),
            }
        )

    def of_arrays(self) -> dict[str, Call]:
        """The operations on arrays, and the array library's own addition."""
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


def bare_function() -> Callable[..., Any]:
    """A Function of features and weights that only allocates."""
    import torch

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return torch.empty_like(tensors[0])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    return Bare.apply


def _is_of_arrays(case: str) -> bool:
    return case.startswith(("ops.", "add(")) or case == "A @ X"


def host_us(call: Call, addition: Call, *, cuda: bool) -> tuple[float, float]:
    """Microseconds until a call returns, and in additions: medians of batches taken in turn."""
    both = [
        (_batch_us(addition, cuda=cuda), _batch_us(call, cuda=cuda)) for _ in range(BATCHES + 1)
    ]
    both = both[1:]  # the first ones warm up
    ratios = [us / one for one, us in both]
    return statistics.median(us for _, us in both), statistics.median(ratios)


def _batch_us(call: Call, *, cuda: bool) -> float:
    """Microseconds of one of a batch of calls, the device idle before it."""
    _wait(cuda=cuda)
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    found = (time.perf_counter() - start) / BATCH * 1e6
    _wait(cuda=cuda)
    return found


def _wait(*, cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.synchronize()


def replayed(call: Call, inputs: list[Any]) -> dict[str, Any]:
    """Capture the call, replay it with other inputs each time, compare with a call outside."""
    import torch

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


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The dearest forward and the dearest forward and backward; how many replays were equal."""
    found = []
    captured = any("equal" in row for row in rows)  # on a GPU, which the limits are for
    for kind, most in (("forward", FORWARD_US), ("both", BOTH_US)):
        limit = most if captured else None
        held = {row["case"]: row["us"] for row in rows if row["case"].endswith(f", {kind}")}
        worst = max(held, key=lambda case: held[case])
        found.append(Target(f"us, {kind}, most ({worst})", held[worst], limit, at_least=False))
    additions = {row["case"]: row["additions"] for row in rows if "additions" in row}
    of_arrays = [case for case in additions if _is_of_arrays(case) and case != "add(out=)"]
    for case in (*of_arrays, "spmm, forward", "maxk_aggregate") if additions else ():
        most = MOST_ADDITIONS.get(case, 3.0) if captured else None
        found.append(Target(f"additions, {case}", additions[case], most, at_least=False))
    equal = [row["equal"] for row in rows if "equal" in row]
    if equal:
        found.append(Target("equal replays of each captured op", min(equal), REPLAYS))
    return found
