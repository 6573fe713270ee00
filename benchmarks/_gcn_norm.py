"""GCN's normalisation by its own kernels against the same composed of ``spmm`` and ``scale``.

``python -m benchmarks._gcn_norm [--device cpu|cuda] [--graphs arxiv,path.npz] [--quick]
[--out FOLDER]``

The composition is the shorter of both: it would do if it took at most 1.15 times as long.  Every
result of either is checked against the composition in float64.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsefmt import COO, CSR, ops
from sparsefmt.formats import primitives
from sparsefmt.formats.arrays import Array, namespace
from sparsefmt.formats.base import Format
from sparsefmt.interop.torch import from_tensor, is_tensor

from . import _baselines, _graphs, _harness, _options, _oracle
from ._harness import Target, geomean

GRAPHS = ("arxiv", "flickr", "reddit", "products")
#: Times of the kernels up to which the composition would take their place.
LIMIT = 1.15
COLUMNS = {
    "case": "<44",
    "kernels_ms": "11.3f",
    "composed_ms": "12.3f",
    "times": "7.2f",
    "error": "9.1e",
}


class Case(NamedTuple):
    """Both ways to one result, and the same in float64."""

    name: str
    kernels: Callable[[], Any]
    composed: Callable[[], Any]
    exact: Callable[[], Any]
    gradient: bool = False


def main(argv: list[str]) -> int:
    """Run both sections; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._gcn_norm")
    _options.add_options(parser)
    options = _options.parse(parser, argv)
    if options.device == "cpu":
        _baselines.use_threads(options.threads)
    right = [_section(name, cases, options) for name, cases in SECTIONS.items()]
    return 0 if all(right) else 1


def _section(
    name: str, cases: Callable[[CSR], Iterator[Case]], options: argparse.Namespace
) -> bool:
    cuda = options.device == "cuda"
    _harness.print_head(f"gcn_norm of {name}, float32", COLUMNS)
    rows = []
    for source in options.graphs or (GRAPHS if cuda else ("cpu",)):
        stem = Path(source).stem
        graph = _graphs.load(source, device=options.device)
        in_turn = int(graph.lengths.max())  # atomics add to one sum
        for case in cases(graph):
            row = {"case": f"{stem}, {case.name}", "graph": stem, "kind": case.name}
            rows.append(row | _measured(case, in_turn, cuda=cuda, quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
    return _harness.keep("gcn", name, rows, judge, cuda=cuda, folder=options.out)


def _measured(case: Case, in_turn: int, *, cuda: bool, quick: bool) -> dict[str, Any]:
    exact = case.exact()
    error = partial(_error, exact=exact, gradient=case.gradient)
    worst = max(error(case.kernels()), error(case.composed()))
    del error, exact
    _harness.free()
    wrong = _oracle.complaint(worst, np.float32, in_turn=in_turn)
    if wrong:
        return {"wrong": wrong}
    times, runs = _harness.paced([case.kernels, case.composed], cuda=cuda, quick=quick)
    return {
        "kernels_ms": times[0],
        "composed_ms": times[1],
        "times": times[1] / times[0],
        "error": worst,
        "runs": runs,
    }


def _error(found: Any, exact: Any, *, gradient: bool) -> float:
    """Largest error relative to each value, or to the largest one of a gradient."""
    if isinstance(found, Format):
        if found.with_data(None) != exact.with_data(None):
            return inf
        found, exact = found.data, exact.data
    found, exact = (from_tensor("result", a) if is_tensor(a) else a for a in (found, exact))
    xp, size = namespace(exact), abs(exact)
    errors = abs(found - exact) / (size.max() if gradient else xp.where(size == 0, 1, size))
    return float(errors.max())


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """How many times longer the composition takes: the worst case, and the mean of each kind."""
    worst = max(rows, key=lambda row: float(row["times"]))
    found = [Target(f"times, worst ({worst['case']})", worst["times"], LIMIT, at_least=False)]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mean = geomean(row["times"] for row in rows if row["kind"] == kind)
        found.append(Target(f"times, {kind}, geomean", mean, LIMIT, at_least=False))
    return found


# CuPy's and NumPy's arrays


def of_arrays(graph: CSR) -> Iterator[Case]:
    """CSR, and COO in the order of rows and in none; forward and backward."""
    weighted = graph.with_data(_graphs.uniform(graph.indptr, (graph.nnz,), seed=1) + 0.1)
    coo = weighted.tocoo()
    order = namespace(coo.row).argsort(_graphs.uniform(coo.row, (coo.nnz,), seed=2))
    shuffled = COO(coo.row[order], coo.col[order], coo.data[order], shape=coo.shape)
    del order
    yield _forward("csr, no loops, ones", graph, self_loops=False)
    for name, A in (("csr", weighted), ("coo by rows", coo), ("coo in no order", shuffled)):
        yield _forward(f"{name}, ones", A.with_data(None))
        yield _forward(name, A)
        yield _backward(f"{name}, backward", A)


def _forward(name: str, A: Any, *, self_loops: bool = True) -> Case:
    values = namespace(A._indices).ones(A.nnz) if A.data is None else A.data.astype(np.float64)
    given = (ops.gcn_norm, A), (gcn_norm, A), (gcn_norm, A.with_data(values))
    return Case(name, *(partial(run, B, self_loops=self_loops) for run, B in given))


def _backward(name: str, A: Any) -> Case:
    grad = _graphs.uniform(A._indices, (A.nnz + A.n_rows,), seed=3) - 0.5
    wide = partial(gcn_norm_backward, A.astype(np.float64), grad.astype(np.float64))
    kernels, composed = (partial(f, A, grad) for f in (ops.gcn_norm_backward, gcn_norm_backward))
    return Case(name, kernels, composed, wide, gradient=True)


# The composition


def gcn_norm(A: Any, *, self_loops: bool = True) -> Any:
    """What ``ops.gcn_norm`` gives of a COO or CSR, of ``spmm``, ``scale`` and array operations."""
    wide, s, missing = _scales(A, self_loops)
    dtype = np.dtype(np.float32) if A.data is None else A.data.dtype
    values = ops.scale(wide, s, s).data.astype(dtype, copy=False)
    if missing is None:
        return A.with_data(values)
    own = namespace(s).where(missing, s * s, 0).astype(dtype, copy=False)
    return _with_loops(A, values, own)


def gcn_norm_backward(A: Any, grad: Array, *, self_loops: bool = True) -> Array:
    """What ``ops.gcn_norm_backward`` gives of a COO or CSR."""
    wide, s, missing = _scales(A, self_loops)
    xp, g = namespace(grad), grad.astype(s.dtype, copy=False)
    at, loops = _places(A) if self_loops else (slice(None), slice(0))
    own, g = g[loops], g[at]
    weighted = g if wide.data is None else wide.data * g
    rows, cols = _ends(A)
    # The columns' sums of a CSR would need its transpose: a COO adds up in any order.
    columns = COO._trusted(row=cols, col=rows, data=weighted, shape=A.shape)
    t = ops.spmm(wide.with_data(weighted), s[:, None]) + ops.spmm(columns, s[:, None])
    t = t[:, 0]
    if missing is not None:
        t += xp.where(missing, 2 * s * own, 0)
    found = ops.scale(wide.with_data(g), s, s).data
    found -= (s * s * s * t / 2)[rows]
    return found.astype(grad.dtype, copy=False)


def _scales(A: Any, self_loops: bool) -> tuple[Any, Array, Array | None]:
    """``A`` in float32 at least, ``d^-1/2`` of each row, and which vertices get a loop."""
    xp, counts = namespace(A._indices), A.data is None
    dtype = np.float64 if counts else np.result_type(A.data.dtype, np.float32)
    wide = A if counts else A.with_data(A.data.astype(dtype, copy=False))
    degree = ops.spmm(wide, xp.ones((A.n_cols, 1), dtype))[:, 0]
    missing = None
    if self_loops:
        rows, cols = _ends(A)
        stored = A.with_data((rows == cols).astype(np.float32))
        missing = ops.spmm(stored, xp.ones((A.n_cols, 1), np.float32))[:, 0] == 0
        degree += missing
    with np.errstate(divide="ignore", invalid="ignore"):
        s = xp.where(degree <= 0, 0, 1 / xp.sqrt(degree))
    return wide, s.astype(np.float32 if counts else dtype, copy=False), missing


def _ends(A: Any) -> tuple[Array, Array]:
    """Row and column of each entry."""
    if A.format == "coo":
        return A.row, A.col
    return primitives.expand(A.indptr, A.nnz), A.indices


def _places(A: Any) -> tuple[Any, Any]:
    """Where the result has the entries of ``A``, and where the loops."""
    if A.format == "coo":
        return slice(0, A.nnz), slice(A.nnz, None)
    count = partial(namespace(A.indptr).arange, dtype=A.index_dtype)
    return count(A.nnz) + _ends(A)[0], A.indptr[1:] + count(A.n_rows)


def _with_loops(A: Any, values: Array, own: Array) -> Any:
    """The entries of ``A`` and the loops, with these values."""
    xp, (at, loops) = namespace(values), _places(A)
    vertices = xp.arange(A.n_rows, dtype=A.index_dtype)

    def joined(entries: Array, others: Array) -> Array:
        found = xp.empty(A.nnz + A.n_rows, entries.dtype)
        found[at], found[loops] = entries, others
        return found

    rows, cols = _ends(A)
    parts = {"data": joined(values, own), "shape": A.shape}
    if A.format == "coo":
        return COO._trusted(row=joined(rows, vertices), col=joined(cols, vertices), **parts)
    indptr = A.indptr + xp.arange(A.n_rows + 1, dtype=A.index_dtype)
    return CSR._trusted(indptr=indptr, indices=joined(cols, vertices), **parts)


# Tensors


def of_tensors(graph: CSR) -> Iterator[Case]:
    """A graph whose loops are kept, as layers use it: forward, and the gradient of the weights."""
    import torch

    from sparsefmt import Graph, autograd

    kept = Graph(graph)
    autograd.prepare(kept)
    like, (nnz, n) = graph.indptr, (graph.nnz, graph.n_rows)
    w = _baselines.tensor(_graphs.uniform(like, (nnz,), seed=1) + 0.1)
    grad = _baselines.tensor(_graphs.uniform(like, (nnz + n,), seed=3) - 0.5)

    def kernels(weights: Any, self_loops: bool) -> Any:
        return autograd.gcn_norm(kept, weights, self_loops=self_loops)[1]

    for weights, exact in ((None, torch.ones_like(w).double()), (w, w.double())):
        for self_loops in (False, True):
            name = ("ones" if weights is None else "weights") + (not self_loops) * ", no loops"
            composed = partial(of_graph, kept, weights, self_loops)
            right = partial(of_graph, kept, exact, self_loops)
            yield Case(name, partial(kernels, weights, self_loops), composed, right)

    def gradient(values: Any, grad: Any) -> Any:
        return torch.autograd.grad(values, w, grad, retain_graph=True)[0]

    w.requires_grad_()
    values = kernels(w, True), of_graph(kept, w, True), of_graph(kept, w.double(), True)
    given = zip(values, (grad, grad, grad.double()), strict=True)
    yield Case("weights, backward", *(partial(gradient, *both) for both in given), gradient=True)


def of_graph(graph: Any, weights: Any, self_loops: bool) -> Any:
    """The values of ``autograd.gcn_norm``, of its products and torch's operations."""
    import torch

    from sparsefmt.autograd import sddmm, spmm
    from sparsefmt.autograd.tensors.prepare import tensors_of
    from sparsefmt.nn._loops import missing_loops

    tensors = tensors_of(graph)
    dtype = torch.float64 if weights is None else weights.dtype
    one = torch.ones(tensors.n_cols, 1, dtype=dtype, device=tensors.device)
    degree = spmm(graph, one, weights)[:, 0]
    if self_loops:
        missing = missing_loops(tensors).to(dtype)
        degree = degree + missing
    s = degree.masked_fill(degree <= 0, inf).rsqrt()
    if weights is None:
        s = s.float()
    values = sddmm(graph, s[:, None], s[:, None])
    values = values if weights is None else values * weights
    if not self_loops:
        return values
    order = tensors.cached("gcn order", lambda: _order(tensors))
    own = (s * s).masked_fill(missing == 0, 0)
    return torch.cat([values, own]).index_select(0, order)


def _order(tensors: Any) -> Any:
    """Which of the entries, or of the loops behind them, each value of the result is."""
    import torch

    indptr = tensors.rows.indptr
    vertices = torch.arange(tensors.n_rows, device=indptr.device)
    loops = indptr[1:] + vertices
    order = torch.ones(tensors.nnz + tensors.n_rows, dtype=indptr.dtype, device=indptr.device)
    order[loops] = 0
    order = order.cumsum(0, dtype=indptr.dtype) - 1
    order[loops] = (tensors.nnz + vertices).to(indptr.dtype)
    return order


SECTIONS = {"arrays": of_arrays, "tensors": of_tensors}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
