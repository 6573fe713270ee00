"""``A @ X``, and the gradients of an aggregation, against cuSPARSE and what else people use.

Sections of ``spmm``:

- ``table``: graphs, widths and dtypes against cuSPARSE's best algorithm (of float16 for bfloat16),
  on the CPU torch.sparse, and SciPy there;
- ``libraries``: the products of cupyx, torch.sparse and PyG;
- ``memory``: peak of forward and backward through torch;
- ``sorted``: the ratio to cuSPARSE with ids in order of degree instead of shuffled.

Every case is checked in float64 on sampled rows before it is timed.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sparsefmt import CSR, Graph, autograd
from sparsefmt.formats.arrays import Array, is_cupy, namespace
from sparsefmt.ops import Transpose, aggregate_backward, spmm, transpose

from . import _baselines, _graphs, _harness, _oracle
from ._harness import MIB, Call
from ._table import Benchmark, Limit, Row, Section, both, some_of

WIDTHS, WIDE = (16, 32, 64, 128, 256), (64, 128, 256)
DTYPES = ("float32", "float16", "bfloat16")
#: Widths of each graph on the CPU: short rows of few features show what a row itself costs.
CPU_WIDTHS = {"cpu": (32, 128), "short": (8, 16)}
LARGE, LARGE_WIDTHS = ("reddit", "products"), (64, 256)
#: Library -> how to prepare it, the graphs and widths that it is run on, and the least ratio.
LIBRARIES: dict[str, tuple[Callable[[CSR, Array], Any], tuple[str, ...], Any, float | None]] = {
    "cupyx": (_baselines.scipy_spmm, LARGE, LARGE_WIDTHS, 8.0),
    "torch.sparse CSR": (_baselines.torch_spmm, _graphs.TABLE, LARGE_WIDTHS, None),
    "PyG EdgeIndex": (_baselines.pyg_spmm, ("arxiv", "reddit"), (64,), None),
    "PyG gather-scatter": (_baselines.pyg_scatter, ("arxiv", "reddit"), (64,), None),
}
#: Of ``aggregate_backward``: widths, and most milliseconds on an H200, half of cuSPARSE's there.
BOTH_WIDTHS, OVER_CUSPARSE = (64, 128, 256), 2.0
BOTH_MS = {("reddit", 64): 10.4 / OVER_CUSPARSE, ("reddit", 256): 43.0 / OVER_CUSPARSE}


@dataclass
class Operands:
    """A matrix and features of one dtype, uniform in [0, 1), with room for the result."""

    A: CSR
    X: Array
    Y: Array

    @classmethod
    def of(cls, graph: CSR, feat: int, dtype: str = "float32") -> "Operands":
        """Draw values and features."""
        A = _graphs.weighted(graph, dtype)
        X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), dtype)
        return cls(A, X, namespace(X).empty((graph.n_rows, feat), X.dtype))

    def with_ones(self) -> "Operands":
        """Return the same with ones for values, for who has no product without any."""
        return replace(self, A=self.A.with_data(namespace(self.X).ones(self.A.nnz, self.X.dtype)))

    def __call__(self) -> Array:
        """Multiply, into ``Y``."""
        return spmm(self.A, self.X, out=self.Y)

    def theirs(self) -> tuple[str, Call]:
        """Return cuSPARSE's best algorithm and product, on the CPU torch.sparse's."""
        return _baselines.best_spmm(self.A, self.X)

    def checked(self, call: Call | None = None) -> Row:
        """Return the error of a product from a poisoned output, and if it is wrong."""
        _harness.poison(self.Y)
        (call or self)()
        error = _oracle.spmm_error(self.A, self.X, self.Y)
        return _oracle.rounded(error, self.X.dtype)


def table(options: argparse.Namespace) -> Iterator[Row]:
    """Yield every cell: ours beside theirs of the same dtype, warm and cold."""
    for name, graph in _graphs.loaded(options, _graphs.TABLE, cpu=("cpu", "short")):
        for feat in options.widths or (WIDTHS if options.cuda else CPU_WIDTHS.get(name, (32,))):
            wide_ms = None
            for dtype in options.dtypes or (DTYPES if options.cuda else DTYPES[:1]):
                row: Row = {"case": f"{name} {feat} {dtype}", "graph": name, "feat": feat}
                row |= {"dtype": dtype} | _cell(graph, feat, dtype, options)
                if dtype == "float32":
                    wide_ms = row.get("cusparse_ms")
                elif wide_ms and "ms" in row:
                    row["over_float32"] = wide_ms / row["ms"]
                yield row


def _cell(graph: CSR, feat: int, dtype: str, options: argparse.Namespace) -> Row:
    ours = Operands.of(graph, feat, dtype)
    row = ours.checked()
    if "wrong" in row:
        return row
    theirs = Operands.of(graph, feat, "float16") if dtype == "bfloat16" else ours
    row["algorithm"], product = theirs.theirs()
    calls = {"ms": ours, "cusparse_ms" if options.cuda else "torch_ms": product}
    if not options.cuda:
        calls["scipy_ms"] = _baselines.scipy_spmm(ours.A, ours.X)
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick, cold=True)
    row["gb_s"] = graph.nnz * feat * ours.X.itemsize / row["ms"] / 1e6
    return row


def libraries(options: argparse.Namespace) -> Iterator[Row]:
    """Yield ``A @ X``, result allocated, in turn with each library's, in float32."""
    for library, (make, graphs, widths, _) in LIBRARIES.items():
        for name, graph in _graphs.loaded(options, graphs):
            for feat in options.widths or (widths[:1] if options.quick else widths):
                A = _graphs.weighted(graph)
                X = _graphs.uniform(A.indptr, (A.n_cols, feat))
                error = _oracle.spmm_error(A, X, A @ X)
                row: Row = {"case": f"{library}: {name} {feat}", "library": library}
                row |= _oracle.rounded(error, X.dtype)
                calls: dict[str, Call] = {"ms": partial(A.__matmul__, X)}
                row |= _baselines.add(calls, "their_ms", partial(make, A, X))
                yield row | _harness.timed(calls, cuda=options.cuda, quick=options.quick)


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the peak beyond inputs, results and gradients, in percent of 8 bytes an entry.

    The graph and its transpose, built before, count as inputs.
    """
    for name, structure in _graphs.loaded(options, LARGE):
        for feat in options.widths or (64,):
            A, graph = _graphs.weighted(structure), Graph(structure)
            X = _graphs.uniform(A.indptr, (A.n_cols, feat))
            x = _baselines.tensor(X).requires_grad_()
            weight = _baselines.tensor(A.data).requires_grad_()
            gradient = torch.ones(A.n_rows, feat, device=x.device)

            forward = partial(autograd.spmm, graph, x, weight)
            both = partial(_harness.with_gradients, forward, (x, weight), gradient)
            results = both()  # builds the transpose, compiles
            error = _oracle.spmm_error(A, X, _baselines.as_cupy(results[0]))
            row = {"case": f"{name} {feat}"} | _oracle.rounded(error, A.dtype)
            returned = sum(result.nbytes for result in results)
            del results
            extra = sum(_harness.peak_bytes(both)) - returned
            nnz_bytes = A.nnz * (A.indices.itemsize + A.data.itemsize)
            row |= {"nnz_mib": nnz_bytes / MIB, "extra_mib": extra / MIB}
            yield row | {"percent": 100 * extra / nnz_bytes}


def by_order(options: argparse.Namespace) -> Iterator[Row]:
    """Yield float32 with ids shuffled and by degree: how far the ratio to cuSPARSE moves."""
    for name, source in _graphs.chosen(options, _graphs.TABLE):
        for feat in options.widths or WIDE:
            row: Row = {"case": f"{name} {feat}"}
            for order in ("shuffled", "sorted"):
                A = _graphs.load(source, device=options.device, by_degree=order == "sorted")
                ours = Operands.of(A, feat)
                row |= ours.checked()
                calls = {"ms": ours, "their_ms": ours.theirs()[1]}
                result = _harness.timed(calls, cuda=options.cuda, quick=options.quick)
                row |= {f"{order}_ms": result["ms"], f"{order}_ratio": result["over_their"]}
            yield row | {"moves": abs(row["sorted_ratio"] / row["shuffled_ratio"] - 1)}


# Both gradients of an aggregation


def aggregate(options: argparse.Namespace) -> Iterator[Row]:
    """Yield both gradients in one pass beside cuSPARSE's SpMM and SDDMM, whose times add up."""
    for name, graph in _graphs.loaded(options, _graphs.TABLE):
        A = _graphs.weighted(graph)
        B, T = A.tocsc().T, transpose(A)
        for feat in options.widths or (BOTH_WIDTHS if options.cuda else (32,)):
            X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), seed=1)
            G = _graphs.uniform(graph.indptr, (graph.n_rows, feat), seed=2)
            row: Row = {"case": f"{name} {feat}", "graph": name, "feat": feat}
            yield row | _gradients(A, B, T, X, G, options)


def _gradients(
    A: CSR, B: CSR, T: Transpose, X: Array, G: Array, options: argparse.Namespace
) -> Row:
    ours = partial(aggregate_backward, A, X, G, transposed=T)
    with _harness.poisoned(cuda=is_cupy(X)):
        dX, dA = ours()[:2]
    error = max(_oracle.spmm_error(B, G, dX), _oracle.sddmm_error(A, G, X, dA))
    row = _oracle.rounded(error, X.dtype)
    if "wrong" in row:
        return row
    calls = {"ms": ours, "spmm_ms": _baselines.best_spmm(B, G)[1]}
    calls["sddmm_ms"] = _baselines.best_sddmm(A, G, X)[1]
    row |= _harness.timed(calls, cuda=options.cuda, quick=options.quick)
    return row | {"over_both": (row["spmm_ms"] + row["sddmm_ms"]) / row["ms"]}


def of_dtype(dtype: str, widths: tuple[int, ...]) -> dict[str, Any]:
    """Return what a limit needs to choose rows of a dtype, of these widths."""

    def counts(row: Row) -> bool:
        return row["dtype"] == dtype and row["feat"] in widths

    return {"where": counts, "by": ("dtype",), "label": "/".join(map(str, widths))}


TABLE = (
    *both("over_cusparse", 1.35, 1.0, **of_dtype("float32", WIDE)),
    *both("over_cusparse", 1.4, **of_dtype("float32", (16, 32))),
    *(one for dtype in DTYPES[1:] for one in both("over_cusparse", 2.0, **of_dtype(dtype, WIDE))),
    *(one for dtype in DTYPES[1:] for one in both("over_float32", 2.2, **of_dtype(dtype, WIDE))),
    Limit(
        "error", most=lambda row: _oracle.LIMITS[row["dtype"]], by=("dtype",), on=("cuda", "cpu")
    ),
    *both("over_torch", None, 1.0, on=("cpu",)),
    *both("over_scipy", None, 1.5, on=("cpu",)),
)
SECTIONS = {
    "table": Section(table, TABLE),
    "libraries": Section(
        libraries,
        both("over_their", None, lambda row: LIBRARIES[row["library"]][3], by=("library",)),
    ),
    "memory": Section(memory, (Limit("percent", most=5.0),), only="cuda"),
    "sorted": Section(
        by_order,
        (
            Limit("shuffled_ratio", "mean"),
            *both("sorted_ratio"),
            Limit("moves", most=0.1),
        ),
        default=False,
    ),
}
AGGREGATE = Section(
    aggregate,
    (
        *both("over_both", OVER_CUSPARSE),
        Limit("ms", "each", most=lambda row: BOTH_MS.get((row["graph"], row["feat"]))),
        Limit("error", high=True),
    ),
)
BENCHMARKS = {"spmm": Benchmark("spmm", __doc__, SECTIONS, {"dtypes": some_of(DTYPES)})}
