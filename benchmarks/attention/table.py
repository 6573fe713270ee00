"""Forward and backward of GAT, GATv2 and dot-product attention beside cuSPARSE's SpMM and PyG."""

import argparse
from collections.abc import Iterator
from typing import Any

from sparsefmt import Graph

from .. import _baselines, _harness
from .._baselines import Call
from .._harness import Target, geomean
from . import profile
from .cases import KINDS, Attention, case_of, graphs_of, is_cuda, prepared, theirs
from .pace import LONG_MS, paced

#: Most milliseconds of forward and backward in float32 on an H200: (kind, graph, heads, feat).
LIMITS = {
    ("gat", "arxiv", 4, 32): 2.4,
    ("gat", "arxiv", 1, 128): 2.0,
    ("gat", "reddit", 4, 32): 45.0,
    ("gat", "reddit", 1, 128): 32.0,
    ("gat", "reddit", 1, 16): 13.0,
    ("gatv2", "arxiv", 4, 32): 3.0,
    ("gatv2", "reddit", 4, 32): 70.0,
    ("gatv2", "reddit", 1, 128): 50.0,
    ("dot", "arxiv", 4, 32): 3.0,
    ("dot", "reddit", 4, 32): 60.0,
    ("dot", "reddit", 1, 128): 50.0,
}
GRAPHS = ("arxiv", "reddit")
HALVES = ("float16", "bfloat16")
DTYPES = ("float32", *HALVES)
#: Where and which 2-byte features are measured unless the dtypes are asked for.
HALVES_ON, HALF = "reddit", "bfloat16"
HALF_GAIN = 1.5  #: of them over float32 there, the worst shape of each kind
COLUMNS = {
    "case": "<30",
    "ms": "8.3f",
    "forward_ms": "10.3f",
    "kernels_ms": "10.3f",
    "cusparse_ms": "11.3f",
    "spmm": "6.2f",
    "over_f32": "8.2f",
    "pyg_ms": "8.2f",
    "over_pyg": "8.1f",
    "error": "8.1e",
    "skipped": "<40",
}


def attention(options: argparse.Namespace) -> bool:
    """Every graph, kind and shape."""
    cuda = is_cuda(options)
    _harness.print_head("attention, forward and backward, beside an SpMM of width 128", COLUMNS)
    rows = []
    for name, source in graphs_of(options, GRAPHS if cuda else ("small",), ()):
        graph = prepared(source, options)
        algorithm, product = theirs(graph.csr, cuda=cuda)
        for row in _rows_of(graph, name, product, options):
            row |= {"algorithm": algorithm, "device": options.device} | options.facts
            _harness.print_row(row, COLUMNS)
            rows.append(row)
        del graph, product
        _harness.free()
    return _harness.keep("fuse", "attention", rows, judge, cuda=cuda, folder=options.out)


def shapes(kind: str, graph: str) -> list[tuple[int, int]]:
    """Heads and features that are measured: those with a limit, or of all graphs elsewhere."""
    here = [key[2:] for key in LIMITS if key[:2] == (kind, graph)]
    every = [key[2:] for key in LIMITS if key[0] == kind]
    return list(dict.fromkeys(here or every))


def _rows_of(
    graph: Graph, name: str, product: Call, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Float32 first, which the halves are held against."""
    wanted = options.dtypes or (("float32", HALF) if name == HALVES_ON else ("float32",))
    for kind in options.kinds or KINDS:
        for heads, feat in shapes(kind, name):
            wide_ms: float | None = None
            for dtype in (dtype for dtype in DTYPES if dtype in wanted):
                row = case_of(kind, name, heads, feat, dtype)
                row |= _cell(Attention(kind, graph, heads, feat, dtype), product, options)
                if dtype == "float32":
                    wide_ms = row.get("ms")
                elif wide_ms and "ms" in row:
                    row["over_f32"] = wide_ms / row["ms"]
                _harness.free()
                yield row


def _cell(ours: Attention, product: Call, options: argparse.Namespace) -> dict[str, Any]:
    """Ours in turn with the SpMM, and with PyG where that runs."""
    cuda = is_cuda(options)
    row = ours.checked()
    if "wrong" in row:
        return row
    calls: dict[str, Call] = {"ms": ours.both, "forward_ms": ours.forward_only}
    calls["cusparse_ms"] = product
    try:
        if ours.dtype == "float32":
            calls["pyg_ms"] = ours.pyg()
    except _baselines.Missing as reason:
        row["skipped"] = f"PyG: {reason}"
    _harness.free()
    times, row["runs"] = paced([*calls.values()], cuda=cuda, quick=options.quick)
    row |= dict(zip(calls, times, strict=True))
    if cuda:
        row["kernels_ms"] = profile.kernel_ms(ours.both, calls=1 if row["ms"] > LONG_MS else 3)
    row["spmm"] = row["ms"] / row["cusparse_ms"]
    if "pyg_ms" in row:
        row["over_pyg"] = row["pyg_ms"] / row["ms"]
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Milliseconds of each case, the worst gain of the halves; to know, beside the SpMM and PyG."""
    found = []
    for row in rows:
        key = (row["kind"], row["graph"], row["heads"], row["feat"])
        measured = row["device"] == "cuda" and row["dtype"] == "float32"
        limit = LIMITS.get(key) if measured else None
        found.append(Target(f"{row['case']} ms", row["ms"], limit, at_least=False))
        found.append(Target(f"{row['case']}, SpMMs of cuSPARSE at 128", row["spmm"]))
        for key_of, text in (("over_pyg", "over PyG"), ("over_f32", "over float32")):
            if key_of in row:
                found.append(Target(f"{row['case']}, {text}", row[key_of]))
    return found + [target for dtype in HALVES for target in _gains(rows, dtype)]


def _gains(rows: list[dict[str, Any]], dtype: str) -> Iterator[Target]:
    """Of 2-byte features over float32: the worst shape of each kind and graph, and the geomean."""
    held = [row for row in rows if row["dtype"] == dtype and "over_f32" in row]
    for kind, graph in dict.fromkeys((row["kind"], row["graph"]) for row in held):
        here = [row for row in held if (row["kind"], row["graph"]) == (kind, graph)]
        least = min(here, key=lambda row: row["over_f32"])
        judged = (dtype, graph, least["device"]) == (HALF, HALVES_ON, "cuda")
        name = f"{kind} {graph} {dtype} over float32"
        text = f"{name}, worst ({least['heads']}x{least['feat']})"
        yield Target(text, least["over_f32"], HALF_GAIN if judged else None)
        gains = [row["over_f32"] for row in here]
        yield Target(f"{name}, geomean of {len(gains)}", geomean(gains))
