"""Edge softmax against copy bandwidth and PyG's softmax.

``python -m benchmarks softmax [--device cpu|cuda] [--graphs reddit,path.npz] [--heads 1,4,8]
[--quick] [--out FOLDER]``

Bandwidth counts the scores read and the probabilities written once, 2 * nnz * heads * 4 bytes.
Every case is checked in float64 on sampled rows.
"""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.ops import edge_softmax

from .. import _baselines, _graphs, _harness, _options, _oracle
from .._harness import Target, geomean

HEADS = (1, 4, 8)
LARGEST = ("products", "reddit", "proteins")
GRAPHS = (*_graphs.TABLE, "proteins")
COLUMNS = {
    "case": "<22",
    "ms": "9.3f",
    "gb_s": "7.0f",
    "copy": "6.3f",
    "cold_ms": "9.3f",
    "pyg_ms": "9.3f",
    "ratio": "7.2f",
    "error": "8.1e",
    "skipped": "<40",
}


def main(argv: list[str]) -> int:
    """Run the one section of the device; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks softmax")
    _options.add_options(parser)
    parser.add_argument("--heads", type=_options.widths, help="numbers of heads, such as 1,4,8")
    options = _options.parse(parser, argv)
    cuda = options.device == "cuda"
    where = "CPU" if not cuda else f"copy {_harness.copy_bandwidth():.0f} GB/s"
    threads = {} if cuda else {"threads": _baselines.use_threads(options.threads)}
    _harness.print_head(f"edge softmax, float32, {where}", COLUMNS)
    rows = []
    for name in options.graphs or (GRAPHS if cuda else ("cpu",)):
        graph = _graphs.load(name, device=options.device)
        for heads in options.heads or HEADS:
            stem = Path(name).stem
            case = {"case": f"{stem} x {heads}", "graph": stem, "heads": heads, **threads}
            rows.append(case | _case(graph, heads, cuda=cuda, quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
    section = "table" if cuda else "cpu"
    right = _harness.keep("softmax", section, rows, judge, cuda=cuda, folder=options.out)
    return 0 if right else 1


def _case(graph: CSR, heads: int, *, cuda: bool, quick: bool) -> dict[str, Any]:
    scores = _graphs.uniform(graph.indptr, (graph.nnz, heads)) * 8 - 4
    out = scores.copy()
    if cuda:
        _harness.poison(out)
    error = _oracle.softmax_error(graph, scores, edge_softmax(graph, scores, out=out))
    wrong = _oracle.complaint(error, scores.dtype)
    if wrong:
        return {"wrong": wrong}
    functions = [lambda: edge_softmax(graph, scores, out=out)]
    row: dict[str, Any] = {"error": error}
    try:
        functions.append(_baselines.guarded(lambda: _baselines.pyg_softmax(graph, scores)))
    except _baselines.Missing as reason:
        row["skipped"] = str(reason)
    times, row["runs"] = _harness.paced(functions, cuda=cuda, quick=quick)
    row["ms"] = times[0]
    row["gb_s"] = 2 * scores.nbytes / times[0] / 1e6
    if len(times) == 2:
        row |= {"pyg_ms": times[1], "ratio": times[1] / times[0]}
    if cuda:
        row["copy"] = row["gb_s"] / _harness.copy_bandwidth()
        if not quick:
            cold = _harness.medians(functions[:1], cuda=True, runs=5, warmups=1, flush=True)
            row["cold_ms"] = cold[0]
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Share of copy bandwidth on the largest graphs; over PyG in every case."""
    found = []
    large = {row["case"]: row["copy"] for row in rows if "copy" in row and row["graph"] in LARGEST}
    if large:
        worst = min(large, key=lambda case: large[case])
        name = f"share of copy bandwidth on the largest, worst ({worst})"
        found.append(Target(name, large[worst], 0.7))
    ratios = {row["case"]: row["ratio"] for row in rows if "ratio" in row}
    if ratios:
        worst = min(ratios, key=lambda case: ratios[case])
        found += [
            Target(f"over PyG, worst ({worst})", ratios[worst], 5.0),
            Target("over PyG, geomean", geomean(ratios.values())),
        ]
    return found
