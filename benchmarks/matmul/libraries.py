"""SpMM beside what users of other libraries call, and its memory through torch."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array

from .. import _baselines, _graphs, _harness, _memory, _oracle
from .._harness import Target, geomean
from .._memory import MIB

LARGE = ("reddit", "products")
WIDTHS = (64, 256)
#: Library -> how to prepare it, the graphs and widths that it is run on, and the least ratio.
LIBRARIES: dict[str, tuple[Callable[[CSR, Array], Any], tuple[str, ...], Any, float | None]] = {
    "cupyx": (_baselines.scipy_spmm, LARGE, WIDTHS, 8.0),
    "torch.sparse CSR": (_baselines.torch_spmm, _graphs.TABLE, WIDTHS, None),
    "PyG EdgeIndex": (_baselines.pyg_spmm, ("arxiv", "reddit"), (64,), None),
    "PyG gather-scatter": (_baselines.pyg_scatter, ("arxiv", "reddit"), (64,), None),
    "torch.compile": (_baselines.compiled_gather_add, ("arxiv",), (64,), None),
}
COLUMNS = {
    "case": "<36",
    "ms": "9.3f",
    "their_ms": "9.3f",
    "ratio": "6.2f",
    "their_error": "11.1e",
    "skipped": "<40",
}
MEMORY_COLUMNS = {
    "case": "<16",
    "nnz_mib": "9.1f",
    "extra_mib": "9.2f",
    "percent": "8.3f",
    "torch_mib": "9.2f",
    "cupy_mib": "9.2f",
}


def libraries(options: argparse.Namespace) -> bool:
    """``A @ X`` of sparsefmt, result allocated, in turn with each library's; float32."""
    _harness.print_head("A @ X beside other libraries, float32", COLUMNS)
    rows = []
    for library, (make, graphs, widths, _) in LIBRARIES.items():
        for name in options.graphs or graphs:
            for feat in options.widths or widths:
                case = {"case": f"{library}: {Path(name).stem} {feat}", "library": library}
                rows.append(case | _beside(name, feat, make, quick=options.quick))
                _harness.print_row(rows[-1], COLUMNS)
                _harness.free()
    return _harness.keep("spmm", "libraries", rows, judge, cuda=True, folder=options.out)


def _beside(
    name: str, feat: int, make: Callable[[CSR, Array], Any], *, quick: bool
) -> dict[str, Any]:
    A = _graphs.weighted(_graphs.load(name))
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    error = _oracle.spmm_error(A, X, A @ X)
    wrong = _oracle.complaint(error, X.dtype)
    if wrong:
        return {"wrong": wrong}
    try:
        theirs = _baselines.guarded(lambda: make(A, X))
        result = _baselines.as_cupy(theirs())
    except _baselines.Missing as reason:
        return {"skipped": str(reason)}
    their_error = _oracle.spmm_error(A, X, result)
    del result
    (ms, their_ms), runs = _harness.paced([lambda: A @ X, theirs], cuda=True, quick=quick)
    times = {"ms": ms, "their_ms": their_ms, "ratio": their_ms / ms}
    return times | {"error": error, "their_error": their_error, "runs": runs}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The lowest ratio to each library, and the geomean."""
    found = []
    for library, (*_, limit) in LIBRARIES.items():
        ratios = [row["ratio"] for row in rows if row["library"] == library and "ratio" in row]
        if ratios:
            found += [
                Target(f"over {library}, worst", min(ratios), limit),
                Target(f"over {library}, geomean", geomean(ratios)),
            ]
    return found


# Memory through torch


def memory(options: argparse.Namespace) -> bool:
    """Peak of forward and backward beyond inputs, results and gradients, of nnz bytes (8 each)."""
    _harness.print_head("memory of forward and backward through torch", MEMORY_COLUMNS)
    rows = []
    for name in options.graphs or LARGE:
        for feat in options.widths or (64,):
            rows.append({"case": f"{Path(name).stem} {feat}"} | _memory_of(name, feat))
            _harness.print_row(rows[-1], MEMORY_COLUMNS)
            _harness.free()
    return _harness.keep("spmm", "memory", rows, judge_memory, cuda=True, folder=options.out)


def _memory_of(name: str, feat: int) -> dict[str, Any]:
    """The graph and its transpose, built before, count as inputs."""
    import torch

    from sparsefmt import Graph, autograd

    A = _graphs.weighted(_graphs.load(name))
    graph = Graph(A.with_data(None))
    x = _baselines.tensor(_graphs.uniform(A.indptr, (A.n_cols, feat))).requires_grad_()
    weight = _baselines.tensor(A.data).requires_grad_()
    gradient = torch.ones(A.n_rows, feat, device=x.device)

    def both() -> Any:
        y = autograd.spmm(graph, x, weight)
        return y, *torch.autograd.grad(y, (x, weight), gradient)

    results = both()  # builds the transpose, compiles
    error = _oracle.spmm_error(A, _baselines.as_cupy(x), _baselines.as_cupy(results[0]))
    wrong = _oracle.complaint(error, A.dtype)
    if wrong:
        return {"wrong": wrong}
    returned = sum(result.nbytes for result in results)
    del results
    torch_bytes, cupy_bytes = _memory.torch_peak_bytes(both)
    torch_bytes -= returned
    nnz_bytes = A.nnz * (A.indices.itemsize + A.data.itemsize)
    extra = torch_bytes + cupy_bytes
    sizes = {"nnz": nnz_bytes, "extra": extra, "torch": torch_bytes, "cupy": cupy_bytes}
    found: dict[str, Any] = {f"{key}_mib": value / MIB for key, value in sizes.items()}
    return found | {"percent": 100 * extra / nnz_bytes, "error": error}


def judge_memory(rows: list[dict[str, Any]]) -> list[Target]:
    """The worst share of nnz bytes."""
    worst = max(row["percent"] for row in rows)
    return [Target("memory beyond inputs and outputs, % of nnz bytes", worst, 5.0, at_least=False)]
