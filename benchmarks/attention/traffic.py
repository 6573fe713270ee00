"""Bytes that fused attention must move, and how fast it does, beside the gather probe.

For E entries of int32, n vertices, H heads, F features of all heads, float32:

- GAT forward ``E (4 + 4 H + 4 F) + n (4 + 12 H + 8 F)``: an entry reads its column, the scores and
  the features of its source; a vertex reads its range and its scores, and writes its features, the
  part of them with positive scores, and two statistics of a head;
- GAT backward ``E (4 + 16 H + 4 F) + n (8 + 56 H + 20 F)``: a target reads its features, that part
  and the gradient, and writes four statistics and the gradient of its score; an entry of the
  transpose reads its row, the statistics and the gradient of its target; a source reads its
  features and scores, and writes the gradients of both;
- the gradients of an aggregation ``E (16 + 4 F) + n (4 + 8 F)``: an entry of the transpose reads
  its row, number and value and the gradient of its target, and writes the gradient of its value; a
  source reads its features and writes their gradient.

Unfused, as PyG does it, a forward moves ``E (48 + 92 H + 20 F) + 4 n F``: it gathers (reads and
writes), multiplies (reads and writes) and scatters (reads) the features of every entry, and its
scores go through eleven operations that read and write one number or two of each head.

Every operand counts as often as it is asked for: caches answer part of it, so that the rate may
exceed that of the memory.  The probe reads rows of F features in the order of the entries.
"""

import argparse
from typing import Any

import torch

from sparsefmt import CSR

from .. import _graphs, _harness, _probe
from .._baselines import Call
from .._harness import Target
from ..matmul.aggregate import Operands
from .cases import Attention, graphs_of, prepared
from .pace import paced

GRAPHS = ("reddit",)
SHAPES = ((4, 32), (1, 128), (1, 16))
GB = 1e9
COLUMNS = {
    "case": "<34",
    "ms": "8.3f",
    "gb": "8.2f",
    "gb_s": "7.0f",
    "probe_gb_s": "10.0f",
    "share": "6.2f",
    "unfused_gb": "10.1f",
    "error": "8.1e",
    "probe": "<20",
}


def counted(entries: int, n: int, heads: int, width: int) -> dict[str, int]:
    """Bytes of each operation, by the formulas above; ``width`` features of all heads."""
    return {
        "forward": entries * (4 + 4 * heads + 4 * width) + n * (4 + 12 * heads + 8 * width),
        "backward": entries * (4 + 16 * heads + 4 * width) + n * (8 + 56 * heads + 20 * width),
        "aggregate_backward": entries * (16 + 4 * width) + n * (4 + 8 * width),
        "unfused": entries * (48 + 92 * heads + 20 * width) + 4 * n * width,
    }


def traffic(options: argparse.Namespace) -> bool:
    """GAT's forward and backward in every shape, and the gradients of an aggregation."""
    _harness.print_head("bytes that must move, float32", COLUMNS)
    rows: list[dict[str, Any]] = []
    for name, source in graphs_of(options, GRAPHS, ()):
        graph = prepared(source, options)
        probes: dict[int, _probe.Probe | None] = {}
        for heads, feat in SHAPES:
            ours = Attention("gat", graph, heads, feat)
            for row in _attention_rows(ours, name, heads, feat, quick=options.quick):
                _finish(row, graph.csr, heads * feat, probes, rows)
            _harness.free()
        for feat in options.widths or (128,):
            row = {"case": f"aggregate_backward {name} {feat}", "operation": "aggregate_backward"}
            row |= _aggregate_row(graph.csr, feat, quick=options.quick)
            _finish(row, graph.csr, feat, probes, rows)
            _harness.free()
    return _harness.keep("fuse", "traffic", rows, judge, cuda=True, folder=options.out)


def _attention_rows(
    ours: Attention, name: str, heads: int, feat: int, *, quick: bool
) -> list[dict[str, Any]]:
    """Forward with what the backward needs, and backward alone."""
    checked = ours.checked()
    case = f"gat {name} {heads}x{feat}"
    if "wrong" in checked:
        return [{"case": case, "operation": "forward"} | checked]
    moved = counted(ours.A.nnz, ours.A.n_rows, heads, heads * feat)
    out, inputs = ours.forward(), [*ours.inputs.values()]
    calls: dict[str, Call] = {
        "forward": ours.forward,
        "backward": lambda: torch.autograd.grad(out, inputs, ours.grad, retain_graph=True),
    }
    times, runs = paced([*calls.values()], cuda=True, quick=quick)
    rows = [
        {"case": f"{case} {operation}", "operation": operation, "ms": ms, "runs": runs}
        | {"gb": moved[operation] / GB}
        | checked
        for operation, ms in zip(calls, times, strict=True)
    ]
    rows[0]["unfused_gb"] = moved["unfused"] / GB
    return rows


def _aggregate_row(A: CSR, feat: int, *, quick: bool) -> dict[str, Any]:
    ours = Operands.of(A, feat)
    checked = ours.checked(cuda=True)
    if "wrong" in checked:
        return checked
    (ms,), runs = paced([ours], cuda=True, quick=quick)
    gb = counted(A.nnz, A.n_rows, 1, feat)["aggregate_backward"] / GB
    error = max(checked["dx_error"], checked["da_error"])
    return {"ms": ms, "runs": runs, "gb": gb, "error": error}


def _finish(
    row: dict[str, Any],
    A: CSR,
    width: int,
    probes: dict[int, _probe.Probe | None],
    rows: list[dict[str, Any]],
) -> None:
    """Add the rates, print and keep the row; one probe for each width."""
    if "ms" in row:
        row["gb_s"] = row["gb"] / row["ms"] * 1e3
        if width not in probes:
            X = _graphs.uniform(A.indptr, (A.n_cols, width))
            probes[width] = _probe.best(A.indices, X)
        probe = probes[width]
        if probe is not None:
            read = A.nnz * 4 * (width + 1) / GB
            row |= {"probe": str(probe), "probe_gb_s": read / probe.ms * 1e3}
            row["share"] = row["gb_s"] / row["probe_gb_s"]
    _harness.print_row(row, COLUMNS)
    rows.append(row)


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Rates, shares of the probe's and of unfused traffic, to know."""
    found = []
    for row in rows:
        found.append(Target(f"{row['case']}, GB/s", row["gb_s"]))
        if "share" in row:
            found.append(Target(f"{row['case']}, share of the probe's rate", row["share"]))
        if "unfused_gb" in row:
            text = f"{row['case']}, share of the bytes of unfused operations"
            found.append(Target(text, row["gb"] / row["unfused_gb"]))
    return found
