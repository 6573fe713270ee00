"""Aggregation by GAS and by GAR over mean degrees and widths: fuseGNN's Figs. 9 to 12.

``gas`` scatters the entries of an unsorted COO, atomically on a GPU; ``gar`` converts it to CSR
at each call and sums rows; ``cached`` has the CSR already; ``pyg`` gathers and scatters.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsefmt import COO, CSR, generate
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import aggregate
from sparsefmt.ops.matmul.aggregation import chosen_method

from .. import _baselines, _graphs, _harness, _memory, _oracle
from .._baselines import Call
from .._harness import Target
from .._memory import MIB
from ..attention.cases import is_cuda, stem
from ..attention.pace import paced

DEGREES = (2, 5, 10, 20, 50, 100, 200, 500)
WIDTHS = (16, 32, 64, 128, 256, 512)
ENTRIES = {"cuda": 4_000_000, "cpu": 200_000}
QUICK_ENTRIES = {"cuda": 1_000_000, "cpu": 20_000}
COMMUNITY = 1000
#: Milliseconds of "auto", and of the method predicted to be faster, over those of the better one.
AUTO = 1.05
WAYS = {"gas": "GAS (COO, atomics)", "gar": "GAR, converted each time", "cached": "GAR, CSR kept"}
LABELS = WAYS | {"pyg": "PyG (scatter)"}
COLUMNS = {
    "case": "<18",
    "gas_ms": "8.3f",
    "gar_ms": "8.3f",
    "cached_ms": "9.3f",
    "auto_ms": "8.3f",
    "pyg_ms": "8.3f",
    "auto_over": "9.3f",
    "predicted": "<9",
    "gas_mib": "8.1f",
    "gar_mib": "8.1f",
    "cached_mib": "10.1f",
    "pyg_mib": "8.1f",
    "error": "8.1e",
    "skipped": "<40",
}


def methods(options: argparse.Namespace) -> bool:
    """Every degree and width in float32, without values, and the plot."""
    cuda = is_cuda(options)
    _harness.print_head("aggregation of an unsorted COO, float32", COLUMNS)
    rows = []
    for name, graph in _graphs_of(options):
        for feat in options.widths or WIDTHS:
            degree = graph.nnz / max(graph.n_rows, 1)
            row = {"case": f"{name} width {feat}", "graph": name, "degree": degree, "feat": feat}
            row |= options.facts | _cell(graph, feat, options)
            _harness.print_row(row, COLUMNS)
            rows.append(row)
            _harness.free()
    right = _harness.keep("fuse", "methods", rows, judge, cuda=cuda, folder=options.out)
    path = (options.out or _harness.RESULTS) / f"fuse-{'gpu' if cuda else 'cpu'}.json"
    if path.exists():
        kept = json.loads(path.read_text())["sections"].get("methods", {"rows": [], "machine": {}})
        machine = kept["machine"].get("device") or kept["machine"].get("cpu", "")
        plot(kept["rows"], machine, path.with_name("fuse-methods.png"))
    return right


def _graphs_of(options: argparse.Namespace) -> Iterator[tuple[str, CSR]]:
    """Those asked for, else one of each mean degree with about the same number of entries."""
    for name in options.graphs or ():
        yield stem(name), _graphs.load(name, device=options.device)
    if options.graphs:
        return
    entries = (QUICK_ENTRIES if options.quick else ENTRIES)[options.device]
    for degree in DEGREES:
        nodes = max(entries // degree, 4 * degree)
        coo = generate.power_law(
            nodes, nodes * degree, community=COMMUNITY, seed=0, device=options.device
        )
        yield f"degree {degree}", coo.tocsr().sorted_indices()
        _harness.free()


def unsorted(A: CSR) -> COO:
    """The entries in an order at random."""
    coo = A.tocoo()
    order = _graphs.uniform(A.indptr, (A.nnz,), seed=3).argsort()
    return COO(coo.row[order], coo.col[order], shape=A.shape, validate="cheap")


def _cell(A: CSR, feat: int, options: argparse.Namespace) -> dict[str, Any]:
    """All ways in turn."""
    cuda = is_cuda(options)
    coo, X = unsorted(A), _graphs.uniform(A.indptr, (A.n_cols, feat))
    calls: dict[str, Call] = {
        "gas": partial(aggregate, coo, X, method="gas"),
        "gar": partial(aggregate, coo, X, method="gar"),
        "cached": partial(aggregate, A, X, method="gar"),
        "auto": partial(aggregate, coo, X, method="auto"),
    }
    row: dict[str, Any] = {"error": 0.0, "predicted": chosen_method(coo, X)[0]}
    for name, call in calls.items():
        with _harness.poisoned(cuda=cuda):
            error = _oracle.spmm_error(A, X, call())
        in_turn = 0 if name in ("gar", "cached") else int(A.lengths.max())
        wrong = _oracle.complaint(error, X.dtype, in_turn=in_turn)
        if wrong:
            return {"wrong": f"{name}: {wrong}"}
        row["error"] = max(row["error"], error)
    try:
        calls["pyg"] = _baselines.guarded(lambda: pyg(coo, X))
    except _baselines.Missing as reason:
        row["skipped"] = f"PyG: {reason}"
    _harness.free()
    times, row["runs"] = paced([*calls.values()], cuda=cuda, quick=options.quick)
    row |= {f"{name}_ms": ms for name, ms in zip(calls, times, strict=True)}
    row["auto_over"] = row["auto_ms"] / min(row["gas_ms"], row["gar_ms"])
    if cuda:
        row |= {f"{n}_mib": sum(_memory.torch_peak_bytes(c)) / MIB for n, c in calls.items()}
    return row


def pyg(coo: COO, X: Array) -> Call:
    """Gather and scatter over the entries as they come."""
    from torch_geometric.utils import scatter

    rows, cols = (_baselines.tensor(ends).long() for ends in (coo.row, coo.col))
    x, n_rows = _baselines.tensor(X), coo.n_rows
    call: Call = torch.no_grad()(lambda: scatter(x[cols], rows, 0, n_rows, "sum"))
    return call


def crossover(rows: list[dict[str, Any]], feat: int) -> float | None:
    """The least mean degree from which on converting to CSR is not slower, if there is one."""
    held = [row for row in rows if row["feat"] == feat]
    found = None
    for row in sorted(held, key=lambda row: row["degree"], reverse=True):
        if row["gar_ms"] > row["gas_ms"]:
            break
        found = row["degree"]
    return found


def mispredicted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those where the method that is predicted to be faster loses more than that to the other."""
    found = []
    for row in rows:
        better = min(row["gas_ms"], row["gar_ms"])
        if row[f"{row['predicted']}_ms"] > AUTO * better:
            found.append(row)
    return found


def predicted_crossover(rows: list[dict[str, Any]], feat: int) -> float | None:
    """The least mean degree from which on conversion is predicted to pay, if there is one."""
    as_predicted = [
        row | {"gas_ms": row["predicted"] == "gar", "gar_ms": row["predicted"] == "gas"}
        for row in rows
    ]
    return crossover(as_predicted, feat)


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """The worst choice of "auto", what is mispredicted; the crossovers of each width, to know."""
    worst = max(rows, key=lambda row: row["auto_over"])
    text = f'"auto" over the better method, worst ({worst["case"]})'
    found = [Target(text, worst["auto_over"], AUTO, at_least=False)]
    beyond = sum(row["auto_over"] > AUTO for row in rows)
    found.append(Target(f'cases of {len(rows)} in which "auto" is beyond that', beyond))
    wrong = mispredicted(rows)
    text = f"cells of {len(rows)} mispredicted at a loss of over {AUTO - 1:.0%}"
    cases = ", ".join(row["case"] for row in wrong)
    found.append(Target(text + (f" ({cases})" if wrong else ""), len(wrong), 0, at_least=False))
    for feat in sorted({row["feat"] for row in rows}):
        for how, of in (("measured", crossover), ("predicted", predicted_crossover)):
            degree = of(rows, feat)
            if degree is not None:
                text = f"width {feat}: mean degree from which GAR, converted, is not slower"
                found.append(Target(f"{text} than GAS, {how}", degree))
    return found


def plot(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Milliseconds, and below them MiB where they were measured, over the mean degree."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _shown(sorted({row["feat"] for row in rows}))
    units = [("ms", "milliseconds")]
    if any("gas_mib" in row for row in rows):
        units.append(("mib", "peak memory, MiB"))
    size = (4 * max(len(shown), 1), 3.6 * len(units))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(units), max(len(shown), 1), squeeze=False)
    for (unit, text), line in zip(units, panels, strict=True):
        for feat, axes in zip(shown, line, strict=False):
            _draw(axes, [row for row in rows if row["feat"] == feat], unit)
            axes.set_title(f"width {feat}")
            axes.set_xlabel("mean degree")
        line[0].set_ylabel(text)
    if shown:
        panels[0][0].legend(fontsize=8)
    figure.suptitle(f"Aggregation of an unsorted COO, float32, {device}")
    figure.savefig(path, dpi=150)
    print(f"  wrote {path}")


def _shown(widths: list[int]) -> list[int]:
    """The narrowest, one in the middle and the widest."""
    return sorted({*widths[:1], *widths[len(widths) // 2 :][:1], *widths[-1:]})


def _draw(axes: Any, rows: list[dict[str, Any]], unit: str) -> None:
    rows = sorted(rows, key=lambda row: row["degree"])
    for at, (way, label) in enumerate(LABELS.items()):
        key = f"{way}_{unit}"
        points = [(row["degree"], row[key]) for row in rows if row.get(key)]
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", color=f"C{at}", label=label)
    axes.grid(which="both", alpha=0.3)
