"""Attention beside PyG on the CPU."""

import argparse
from typing import Any

from .. import _baselines, _harness
from .._baselines import Call
from .._harness import Target
from .cases import Attention, case_of, graphs_of, prepared
from .pace import paced

GRAPHS = ("flickr",)  #: a million entries
HEADS, FEAT = 4, 32
OVER_PYG = {"gat": 4.0}
COLUMNS = {
    "case": "<28",
    "ms": "9.2f",
    "forward_ms": "10.2f",
    "pyg_ms": "9.2f",
    "over_pyg": "8.2f",
    "error": "8.1e",
}


def cpu(options: argparse.Namespace) -> bool:
    """GAT or the kinds asked for, forward and backward, in float32."""
    title = f"attention {HEADS}x{FEAT} on {options.facts['threads']} threads"
    _harness.print_head(title, COLUMNS)
    rows = []
    for name, source in graphs_of(options, GRAPHS, ()):
        graph = prepared(source, options)
        for kind in options.kinds or OVER_PYG:
            ours = Attention(kind, graph, HEADS, FEAT)
            row = case_of(kind, name, HEADS, FEAT, "float32") | {"entries": graph.nnz}
            rows.append(row | options.facts | _cell(ours, quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("fuse", "cpu", rows, judge, cuda=False, folder=options.out)


def _cell(ours: Attention, *, quick: bool) -> dict[str, Any]:
    row = ours.checked()
    if "wrong" in row:
        return row
    calls: dict[str, Call] = {"ms": ours.both, "forward_ms": ours.forward_only}
    try:
        calls["pyg_ms"] = ours.pyg()
    except _baselines.Missing as reason:
        row["skipped"] = f"PyG: {reason}"
    times, row["runs"] = paced([*calls.values()], cuda=False, quick=quick)
    row |= dict(zip(calls, times, strict=True))
    return row | ({"over_pyg": row["pyg_ms"] / row["ms"]} if "pyg_ms" in row else {})


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over PyG."""
    return [
        Target(f"{row['case']} over PyG", row["over_pyg"], OVER_PYG.get(row["kind"]))
        for row in rows
        if "over_pyg" in row
    ]
