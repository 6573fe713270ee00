"""What GAT saves where torch allows bfloat16 in products of float32, the rounding included.

Errors are relative to the sum of the magnitudes of what is added up.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from .. import _harness
from .._harness import Target, geomean
from .._oracle import LIMITS
from .cases import Attention, case_of, ends_of, graphs_of, prepared
from .oracle import Exact

GRAPHS = ("reddit", "products")
SHAPES = ((4, 32), (8, 32))
#: Least gain of forward, and of forward and backward; and of errors the most.
LEAST, LIMIT = {"forward": 1.5, "both": 1.5}, 2.0**-8 + LIMITS["float32"]
COLUMNS = {
    "case": "<28",
    "forward_ms": "11.3f",
    "exact_forward_ms": "17.3f",
    "forward": "8.3f",
    "both_ms": "9.3f",
    "exact_both_ms": "14.3f",
    "both": "6.3f",
    "error": "8.1e",
}


def rounded(options: argparse.Namespace) -> bool:
    """Every shape in turn with the exact one."""
    _harness.print_head("GAT of float32 features rounded to bfloat16, and exact", COLUMNS)
    rows = []
    for name, source in graphs_of(options, GRAPHS, ()):
        graph = prepared(source, options)
        for heads, feat in SHAPES:
            row = case_of("gat", name, heads, feat, "float32")
            rows.append(row | _row_of(Attention("gat", graph, heads, feat), quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
        del graph
    return _harness.keep("fuse", "rounded", rows, judge, cuda=True, folder=options.out)


def _row_of(ours: Attention, *, quick: bool) -> dict[str, Any]:
    names = "out", *ours.inputs
    found = dict(zip(names, _allowing(ours.both, "medium")(), strict=True))
    exact = Exact(ours.kind, ends_of(ours.A), ours.inputs, ours.grad)
    errors = exact.errors(found)
    wrong = [f"{name} {error:.3g}" for name, error in errors.items() if not error <= LIMIT]
    if wrong:
        return {"wrong": f"errors of {', '.join(wrong)}, {LIMIT:.3g} is allowed"}
    row: dict[str, Any] = {"error": max(errors.values())}
    del found, exact
    _harness.free()
    for way, call in (("forward", ours.forward_only), ("both", ours.both)):
        calls = [_allowing(call, precision) for precision in ("medium", "highest")]
        (ms, exact_ms), row["runs"] = _harness.paced(calls, cuda=True, quick=quick)
        row |= {f"{way}_ms": ms, f"exact_{way}_ms": exact_ms, way: exact_ms / ms}
    return row


def _allowing(call: Callable[[], Any], precision: str) -> Callable[[], Any]:
    """Make the call while torch has that precision of its own products."""

    def run() -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            return call()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """What rounding gives forward, and forward and backward together."""
    held = [row for row in rows if "both" in row]
    found = [
        Target(f"{way} rounded over exact, {row['case']}", row[way], least)
        for row in held
        for way, least in LEAST.items()
    ]
    for way in LEAST if held else ():
        gains = [row[way] for row in held]
        found.append(Target(f"{way} rounded over exact, geomean", geomean(gains)))
    return found
