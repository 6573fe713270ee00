"""Messages with features of edges against PyG's, and against a gather of the same bytes.

``python -m benchmarks messages [--device cpu|cuda] [--sections ceiling,gine]
[--graphs arxiv,reddit] [--widths 32] [--quick] [--out FOLDER]``

``ceiling`` is GINE's sum and its gradients on arrays beside a probe that only reads and writes what
they must; edges in order of their targets, and in no order.  ``gine`` is forward and backward of
PyG's GINEConv without its network.  Every case is checked in float64 on sampled rows and edges.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR, Graph, ops
from sparsefmt.formats.arrays import Array

from .. import _baselines, _graphs, _harness, _options, _oracle
from .._harness import Target

SECTIONS = {"ceiling": ("messages.messages", "ceiling"), "gine": ("messages.messages", "gine")}
GRAPHS, WIDTHS = ("arxiv", "reddit"), (32,)
SAMPLES = 64
COLUMNS = {
    "case": "<34",
    "ms": "9.3f",
    "probe_ms": "9.3f",
    "share": "6.3f",
    "gather_ms": "9.3f",
    "gb_s": "7.0f",
    "error": "8.1e",
}
GINE_COLUMNS = {
    "case": "<24",
    "ms": "9.3f",
    "pyg_ms": "9.3f",
    "ratio": "6.2f",
    "forward_ms": "10.3f",
    "pyg_forward_ms": "14.3f",
    "error": "8.1e",
    "pyg": "<30",
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks messages")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS))
    options = _options.parse(parser, argv)
    able = list(SECTIONS) if options.device == "cuda" else ["gine"]
    options.sections = [name for name in options.sections or able if name in able]
    return _options.run(SECTIONS, options)


# Against the probe


def ceiling(options: argparse.Namespace) -> bool:
    """Every graph, width and order of edges, forward and backward."""
    _harness.print_head("GINE's messages beside a gather of the same bytes, float32", COLUMNS)
    rows = []
    for name in options.graphs or GRAPHS:
        graph = _graphs.load(name)
        for feat, order in (
            (feat, order) for feat in options.widths or WIDTHS for order in ("sorted", "shuffled")
        ):
            for row in _ceiling_rows(graph, feat, order, quick=options.quick):
                case = {"case": f"{Path(name).stem} x {feat} {order} {row.pop('way')}"}
                rows.append(case | {"feat": feat, "order": order} | row)
                _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
    return _harness.keep("messages", "ceiling", rows, judge, cuda=True, folder=options.out)


def _ceiling_rows(graph: CSR, feat: int, order: str, *, quick: bool) -> list[dict[str, Any]]:
    import cupy

    from sparsefmt.ops.messages import cuda

    from . import ceiling as probe

    X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), seed=1) - np.float32(0.5)
    E = _graphs.uniform(graph.indptr, (graph.nnz, feat), seed=2) - np.float32(0.5)
    grad = _graphs.uniform(graph.indptr, (graph.n_rows, feat), seed=3)
    perm = None
    if order == "shuffled":
        perm = cupy.random.RandomState(0).permutation(graph.nnz).astype(np.int32)
    T = ops.transpose(graph)
    places = T.perm if perm is None else perm[T.perm]
    Y, dX, dE = cupy.empty_like(grad), cupy.empty_like(X), cupy.empty_like(E)
    forward = partial(cuda.message_aggregate, graph, X, E, perm, "relu_add", "sum", out=Y)
    given = X, E, grad, places, None, "relu_add", True
    backward = partial(cuda.message_aggregate_backward, T.csr, *given, out=(dX, dE))
    forward()
    backward()
    errors = _error_of_sums(graph, X, E, perm, Y), _error_of_gradients(T.csr, given, dX, dE)
    wrong = [_oracle.complaint(error, X.dtype) for error in errors]
    if any(wrong):
        return [{"way": "", "wrong": "; ".join(filter(None, wrong))}]
    (forward_ms, backward_ms), runs = _harness.paced([forward, backward], cuda=True, quick=quick)
    size = graph.nnz * feat * 4
    columns, found = T.csr.indices, []
    for way, ms, error, times, args in (
        ("forward", forward_ms, errors[0], 2, (graph.indices, perm, X, E)),
        ("backward", backward_ms, errors[1], 3, (columns, places, grad, E, dE)),
    ):
        probe_ms = probe.best_ms(*args)
        row = {"way": way, "ms": ms, "probe_ms": probe_ms, "share": probe_ms / ms, "runs": runs}
        row["gather_ms"] = probe.best_ms(args[0], None, args[2], None)
        found.append(row | {"gb_s": times * size / ms / 1e6, "error": error})
    return found


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Three quarters of the probe in each case."""
    worst = min(rows, key=lambda row: float(row["share"]))
    return [Target(f"share of the probe, worst ({worst['case']})", worst["share"], 0.75)]


def _sampled(A: CSR) -> list[int]:
    """Some rows of a matrix, its longest among them."""
    lengths = _host(A.indptr[1:] - A.indptr[:-1])
    chosen = np.random.default_rng(0).integers(0, A.n_rows, SAMPLES)
    return [int(lengths.argmax()), *chosen.tolist()]


def _host(a: Any) -> Array:
    return a.get() if hasattr(a, "get") else a


def _numbers(A: CSR, row: int, perm: Array | None) -> tuple[slice, Any]:
    """Places of a row's entries, and their numbers in the order of the edges."""
    begin, end = (int(A.indptr[at]) for at in (row, row + 1))
    return slice(begin, end), slice(begin, end) if perm is None else perm[begin:end]


def _error_of_sums(A: CSR, X: Array, E: Array, perm: Array | None, Y: Array) -> float:
    """The largest error of sampled rows, relative to the sum of what is added up."""
    worst = 0.0
    for row in _sampled(A):
        places, numbers = _numbers(A, row, perm)
        sums = X[A.indices[places]].astype(np.float64) + E[numbers]
        exact = sums.clip(0).sum(0)
        size = abs(sums).sum(0) + 1e-30
        worst = max(worst, float((abs(Y[row] - exact) / size).max()))
    return worst


def _error_of_gradients(T: CSR, given: tuple[Any, ...], dX: Array, dE: Array) -> float:
    """The same of gradients, at sampled columns and all their edges."""
    X, E, grad, perm, *_ = given
    worst = 0.0
    for column in _sampled(T):
        places, numbers = _numbers(T, column, perm)
        # The sum as float32 has it: in float64 another one may be positive.
        exact = (X[column] + E[numbers] > 0) * grad[T.indices[places]].astype(np.float64)
        size = abs(exact).sum(0) + 1e-30
        worst = max(worst, float((abs(dX[column] - exact.sum(0)) / size).max()))
        if len(exact):
            worst = max(worst, float(abs(dE[numbers] - exact).max()))
    return worst


# Against PyG


def gine(options: argparse.Namespace) -> bool:
    """Forward and backward in features of vertices and of edges, which lie as PyG wants them."""
    cuda = options.device == "cuda"
    if not cuda:
        _baselines.use_threads(options.threads)
    _harness.print_head(f"GINEConv without its network, float32, {options.device}", GINE_COLUMNS)
    rows = []
    for name in options.graphs or (GRAPHS if cuda else ("arxiv",)):
        graph = _graphs.load(name, device=options.device)
        for feat in options.widths or WIDTHS:
            case = {"case": f"{Path(name).stem} x {feat}", "feat": feat}
            rows.append(case | _gine_case(graph, feat, cuda=cuda, quick=options.quick))
            _harness.print_row(rows[-1], GINE_COLUMNS)
            _harness.free()
    return _harness.keep("messages", "gine", rows, judge_gine, cuda=cuda, folder=options.out)


def _gine_case(graph: CSR, feat: int, *, cuda: bool, quick: bool) -> dict[str, Any]:
    import torch
    from torch_geometric.nn import GINEConv

    from sparsefmt.autograd import message_aggregate

    kept, index = Graph(graph), _baselines.edge_index(graph)
    device = "cuda" if cuda else "cpu"
    x, grad = (torch.rand(n, feat, device=device) - 0.5 for n in (graph.n_cols, graph.n_rows))
    edges = torch.rand(graph.nnz, feat, device=device).sub_(0.5)
    leaves = [x.requires_grad_(), edges.requires_grad_()]
    conv = GINEConv(torch.nn.Identity()).to(device)

    def ours() -> Any:
        return message_aggregate(kept, x, edges, message="relu_add") + x

    def theirs() -> Any:
        return conv(x, index, edges)

    def both(forward: Any) -> Any:
        return torch.autograd.grad(forward(), leaves, grad)

    row: dict[str, Any] = {}
    functions = [partial(both, ours), partial(both, theirs), ours, theirs]
    try:
        y = theirs().detach()
        row["error"] = float((ours().detach() - y).abs().max() / y.abs().max())
        dx, de = both(theirs)
        mine, of_edges = both(ours)
        row["error"] = max(row["error"], float((mine - dx).abs().max() / dx.abs().max()))
        if not torch.equal(of_edges, de) or row["error"] > 1e-3:
            return {"wrong": f"differs from PyG's by {row['error']}"}
        del dx, de, mine, of_edges, y
    except torch.cuda.OutOfMemoryError:
        row["pyg"] = "does not fit into memory"
        functions = functions[::2]
    _harness.free()
    times, row["runs"] = _harness.paced(functions, cuda=cuda, quick=quick)
    if "pyg" in row:
        return row | {"ms": times[0], "forward_ms": times[1]}
    names = "ms", "pyg_ms", "forward_ms", "pyg_forward_ms"
    return row | dict(zip(names, times, strict=True)) | {"ratio": times[1] / times[0]}


def judge_gine(rows: list[dict[str, Any]]) -> list[Target]:
    """Four times PyG's in every case in which it fits."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return [Target("forward and backward, worst over PyG's", min(ratios), 4.0)] if ratios else []
