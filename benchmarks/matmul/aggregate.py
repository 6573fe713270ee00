"""Both gradients of an aggregation in one pass against cuSPARSE's SpMM and SDDMM."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import Transpose, aggregate_backward, transpose

from .. import _cusparse, _graphs, _harness, _oracle
from .._baselines import Call
from .._harness import Target, geomean
from ..attention.pace import paced

WIDTHS = (64, 128, 256)
OVER_CUSPARSE = 2.0  #: geomean
#: Most milliseconds on an H200, (graph, width): half of what cuSPARSE took there.
LIMITS = {("reddit", 64): 10.4 / OVER_CUSPARSE, ("reddit", 256): 43.0 / OVER_CUSPARSE}
COLUMNS = {
    "case": "<20",
    "ms": "8.3f",
    "cusparse_ms": "11.3f",
    "spmm_ms": "8.3f",
    "sddmm_ms": "8.3f",
    "ratio": "6.2f",
    "dx_error": "8.1e",
    "da_error": "8.1e",
    "algorithm": "<20",
}


@dataclass
class Operands:
    """A weighted matrix with its transpose, features and the gradient of the product."""

    A: CSR
    B: CSR  #: the transpose, with its values
    T: Transpose  #: what a graph keeps of it
    X: Array
    G: Array

    @classmethod
    def of(cls, graph: CSR, feat: int) -> "Operands":
        """Values, features and gradient uniform in [0, 1): no terms cancel."""
        A = _graphs.weighted(graph)
        X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), seed=1)
        G = _graphs.uniform(graph.indptr, (graph.n_rows, feat), seed=2)
        return cls(A, A.tocsc().T, transpose(A), X, G)

    def __call__(self) -> tuple[Array, ...]:
        """Both gradients, in one pass over the entries."""
        found: tuple[Array, ...] = aggregate_backward(self.A, self.X, self.G, transposed=self.T)
        return found

    def checked(self, *, cuda: bool) -> dict[str, Any]:
        """Errors of both, from poisoned outputs, and what is wrong."""
        with _harness.poisoned(cuda=cuda):
            dX, dA = self()[:2]
        row: dict[str, Any] = {
            "dx_error": _oracle.spmm_error(self.B, self.G, dX),
            "da_error": _oracle.sddmm_error(self.A, self.G, self.X, dA),
        }
        for name in ("dx_error", "da_error"):
            wrong = _oracle.complaint(row[name], self.X.dtype)
            if wrong:
                return {"wrong": f"{name.removesuffix('_error')}: {wrong}"}
        return row

    def theirs(self) -> tuple[str, dict[str, Call]]:
        """The best algorithms of cuSPARSE, and both products."""
        import cupy

        Y, out = cupy.empty_like(self.X), cupy.empty_like(self.A.data)
        spmm_by, spmm = _cusparse.best_spmm(self.B, self.G, Y)
        sddmm_by, sddmm = _cusparse.best_sddmm(self.A, self.G, self.X, out)
        return f"{spmm_by}, {sddmm_by}", {"spmm_ms": spmm, "sddmm_ms": sddmm}


def aggregate(options: argparse.Namespace) -> bool:
    """Every graph and width in float32."""
    title = f"aggregate_backward against cuSPARSE {_cusparse.version()}, SpMM and SDDMM"
    _harness.print_head(title, COLUMNS)
    rows = []
    for source in options.graphs or _graphs.TABLE:
        graph, name = _graphs.load(source, device=options.device), Path(source).stem
        for feat in options.widths or WIDTHS:
            row = {"case": f"{name} {feat}", "graph": name, "feat": feat}
            rows.append(row | _cell(Operands.of(graph, feat), quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
        del graph
    return _harness.keep("fuse", "aggregate", rows, judge, cuda=True, folder=options.out)


def _cell(ours: Operands, *, quick: bool) -> dict[str, Any]:
    """Ours in turn with each of theirs, whose times add up."""
    row = ours.checked(cuda=True)
    if "wrong" in row:
        return row
    row["algorithm"], products = ours.theirs()
    calls: dict[str, Call] = {"ms": ours, **products}
    times, row["runs"] = paced([*calls.values()], cuda=True, quick=quick)
    row |= dict(zip(calls, times, strict=True))
    row["cusparse_ms"] = row["spmm_ms"] + row["sddmm_ms"]
    return row | {"ratio": row["cusparse_ms"] / row["ms"]}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The geomean over cuSPARSE, and the milliseconds that are stated; the worst, to know."""
    worst = min(rows, key=lambda row: row["ratio"])
    mean = geomean(row["ratio"] for row in rows)
    found = [
        Target(f"over cuSPARSE's SpMM and SDDMM, geomean of {len(rows)}", mean, OVER_CUSPARSE),
        Target(f"over cuSPARSE's SpMM and SDDMM, worst ({worst['case']})", worst["ratio"]),
    ]
    for row in rows:
        limit = LIMITS.get((row["graph"], row["feat"]))
        if limit is not None:
            found.append(Target(f"{row['case']} ms", row["ms"], limit, at_least=False))
    largest = max(max(row["dx_error"], row["da_error"]) for row in rows)
    return [*found, Target("largest relative error", largest)]
