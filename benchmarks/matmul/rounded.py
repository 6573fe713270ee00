"""What a product saves by rounding float32 features to bfloat16, the rounding included.

Epochs with it are in ``maxk``, section ``training``.  Errors are relative to the sum of magnitudes,
which is the result itself here, since all numbers are in [0, 1).
"""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt.ops import explain, spmm

from .. import _graphs, _harness, _oracle
from .._harness import Target, geomean

#: With products and reddit, those on which rounding might not pay.
GRAPHS = ("ddi", "arxiv", "flickr", "amazon0505", "com-amazon", "reddit", "products")
WIDTHS = (16, 64, 128, 256)
#: Graphs and widths that are bound by bytes, and what rounding gives there at least.
BOUND, WIDE, LEAST = ("reddit", "products"), (128, 256), 1.7
LIMIT = 2.0**-8
COLUMNS = {
    "case": "<28",
    "ms": "9.3f",
    "exact_ms": "9.3f",
    "times": "7.3f",
    "kernel": "<20",
    "error": "8.1e",
}


def rounded(options: argparse.Namespace) -> bool:
    """Every product in turn with the exact one."""
    _harness.print_head("float32 features rounded to bfloat16, and exact", COLUMNS)
    rows = []
    for name in options.graphs or GRAPHS:
        A = _graphs.weighted(_graphs.load(name))
        for feat in options.widths or WIDTHS:
            row = {"case": f"{Path(name).stem} {feat}", "graph": Path(name).stem, "feat": feat}
            rows.append(row | _product(A, feat, quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("spmm", "rounded", rows, judge, cuda=True, folder=options.out)


def _product(A: Any, feat: int, *, quick: bool) -> dict[str, Any]:
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    out, exact = spmm(A, X), spmm(A, X)
    _harness.poison(out)
    spmm(A, X, precision="bf16", out=out)
    error = _oracle.spmm_error(A, X, out)
    if not error <= LIMIT:
        return {"wrong": f"off by {error:.3g} of the sum of magnitudes, {LIMIT:.3g} is allowed"}
    functions = [
        lambda: spmm(A, X, precision="bf16", out=out),
        lambda: spmm(A, X, out=exact),
    ]
    (ms, exact_ms), runs = _harness.paced(functions, cuda=True, quick=quick)
    kernel = explain("spmm", A, X, precision="bf16").chosen.name
    times = {"ms": ms, "exact_ms": exact_ms, "times": exact_ms / ms}
    return times | {"kernel": kernel, "error": error, "runs": runs}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """What rounding gives where bytes bound, and that it costs nothing elsewhere."""
    held = {row["case"]: row for row in rows if "times" in row}
    found = [
        Target(f"rounded over exact, {case}", row["times"], LEAST)
        for case, row in held.items()
        if row["graph"] in BOUND and row["feat"] in WIDE
    ]
    if held:
        worst = min(held, key=lambda case: held[case]["times"])
        times = [row["times"] for row in held.values()]
        found += [
            Target("rounded over exact, geomean", geomean(times)),
            Target(f"rounded over exact, least ({worst})", held[worst]["times"], 0.98),
        ]
    return found
