"""What the variants of SpMM cost beside the plain weighted sum."""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt.ops import spmm

from .. import _graphs, _harness, _oracle
from .._harness import Target, geomean

GRAPHS = ("arxiv", "amazon0505", "reddit", "products")
WIDTHS = (64, 256)
#: Variant -> most times the plain sum; below 1.0 for what reads less.
LIMITS = {
    "mean": 1.1,
    "max": 1.3,
    "min": 1.3,
    "unweighted": 1.0,
    "row_scale": 1.08,
    "col_scale": 1.08,
    "both scales": 1.08,
}
COLUMNS = {
    "case": "<28",
    "ms": "9.3f",
    "sum_ms": "9.3f",
    "times": "6.3f",
    "error": "8.1e",
}


def variants(options: argparse.Namespace) -> bool:
    """Every variant in turn with the plain sum, float32."""
    _harness.print_head("variants, times the plain weighted sum, float32", COLUMNS)
    rows = []
    for name in options.graphs or GRAPHS:
        for feat in options.widths or WIDTHS:
            for row in _variants_of(name, feat, quick=options.quick):
                _harness.print_row(row, COLUMNS)
                rows.append(row)
    return _harness.keep("spmm", "variants", rows, judge, cuda=True, folder=options.out)


def _variants_of(name: str, feat: int, *, quick: bool) -> list[dict[str, Any]]:
    graph = _graphs.load(name)
    A = _graphs.weighted(graph)
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    r = _graphs.uniform(A.indptr, (A.n_rows,), seed=2)
    c = _graphs.uniform(A.indptr, (A.n_cols,), seed=3)
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        **{reduce: (A, {"reduce": reduce}) for reduce in ("mean", "max", "min")},
        "unweighted": (graph, {}),
        "row_scale": (A, {"row_scale": r}),
        "col_scale": (A, {"col_scale": c}),
        "both scales": (A, {"row_scale": r, "col_scale": c}),
    }
    out, plain = spmm(A, X), spmm(A, X)
    rows = []
    for variant, (matrix, arguments) in chosen.items():
        row = {"case": f"{Path(name).stem} {feat} {variant}", "variant": variant, "feat": feat}
        _harness.poison(out)
        spmm(matrix, X, out=out, **arguments)
        error = _oracle.spmm_error(matrix, X, out, **arguments)
        wrong = _oracle.complaint(error, X.dtype)
        if wrong:
            rows.append(row | {"wrong": wrong})
            continue
        functions = [
            lambda matrix=matrix, arguments=arguments: spmm(matrix, X, out=out, **arguments),
            lambda: spmm(A, X, out=plain),
        ]
        (ms, sum_ms), runs = _harness.paced(functions, cuda=True, quick=quick)
        times = {"ms": ms, "sum_ms": sum_ms, "times": ms / sum_ms}
        rows.append(row | times | {"error": error, "runs": runs})
    return rows


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The worst case of each variant, and its geomean."""
    found = []
    for variant, limit in LIMITS.items():
        held = {row["case"]: row["times"] for row in rows if row["variant"] == variant}
        if held:
            worst = max(held, key=lambda case: held[case])
            found += [
                Target(f"{variant}, geomean of times the sum", geomean(held.values())),
                Target(f"{variant}, most ({worst})", held[worst], limit, at_least=False),
            ]
    return found
