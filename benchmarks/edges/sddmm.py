"""SDDMM against cuSPARSE and the gather probe; on the CPU against PyG's gather way.

``python -m benchmarks sddmm [--device cpu|cuda] [--graphs ddi,path.npz] [--widths 32,64]
[--dtypes float32,float16] [--quick] [--out FOLDER]``

Every case is checked in float64 at sampled entries.  cuSPARSE runs preprocessed, with the better of
two layouts of Y^T.  float16 is for information: cuSPARSE may refuse it.
"""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import sddmm

from .. import _baselines, _cusparse, _graphs, _harness, _options, _oracle, _probe
from .._harness import Target, geomean

WIDTHS = (32, 64, 128, 256)
CPU_WIDTHS = (32, 128)
DTYPES = ("float32", "float16")
COLUMNS = {
    "case": "<24",
    "ms": "9.3f",
    "cusparse_ms": "11.3f",
    "layout": "<12",
    "ratio": "6.2f",
    "cold_ms": "9.3f",
    "probe_ms": "9.3f",
    "times_probe": "11.2f",
    "gb_s": "7.0f",
    "error": "8.1e",
    "cusparse": "<30",
}
CPU_COLUMNS = {"case": "<16", "ms": "9.2f", "pyg_ms": "9.2f", "ratio": "6.2f", "error": "8.1e"}


def main(argv: list[str]) -> int:
    """Run the one section of the device; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sddmm")
    _options.add_options(parser)
    parser.add_argument("--dtypes", type=_options.names, default=DTYPES)
    options = _options.parse(parser, argv)
    return 0 if (cpu if options.device == "cpu" else table)(options) else 1


def table(options: argparse.Namespace) -> bool:
    """Every graph, width and dtype."""
    _harness.print_head(f"sddmm against cuSPARSE {_cusparse.version()}", COLUMNS)
    rows = []
    for name in options.graphs or _graphs.TABLE:
        graph = _graphs.load(name)
        for feat in options.widths or WIDTHS:
            for dtype in options.dtypes:
                case = {"case": f"{Path(name).stem} {feat} {dtype}", "feat": feat, "dtype": dtype}
                rows.append(case | _cell(graph, feat, dtype, quick=options.quick))
                _harness.print_row(rows[-1], COLUMNS)
        _harness.free()
    return _harness.keep("sddmm", "table", rows, judge, cuda=True, folder=options.out)


def _cell(graph: CSR, feat: int, dtype: str, *, quick: bool) -> dict[str, Any]:
    import cupy

    X = _graphs.uniform(graph.indptr, (graph.n_rows, feat), dtype, seed=1)
    Y = _graphs.uniform(graph.indptr, (graph.n_cols, feat), dtype, seed=2)
    out, their_out = (cupy.empty(graph.nnz, X.dtype) for _ in range(2))
    _harness.poison(out)
    error = _oracle.sddmm_error(graph, X, Y, sddmm(graph, X, Y, out=out))
    wrong = _oracle.complaint(error, X.dtype)
    if wrong:
        return {"wrong": wrong}
    functions = [lambda: sddmm(graph, X, Y, out=out)]
    row: dict[str, Any] = {"error": error}
    try:
        row["layout"], theirs = _cusparse.best_sddmm(graph, X, Y, their_out)
        theirs()
        row["cusparse_error"] = _oracle.sddmm_error(graph, X, Y, their_out)
        functions.append(theirs)
    except _cusparse.CusparseError as refusal:
        row["cusparse"] = f"refused: {refusal}"
    times, row["runs"] = _harness.paced(functions, cuda=True, quick=quick)
    if not quick:
        cold = _harness.medians(functions, cuda=True, runs=5, warmups=1, flush=True)
        row |= dict(zip(("cold_ms", "cusparse_cold_ms"), cold, strict=False))
    row["ms"] = times[0]
    if len(times) == 2:
        row |= {"cusparse_ms": times[1], "ratio": times[1] / times[0]}
    return row | _gathered(graph, Y, times[0])


def _gathered(graph: CSR, Y: Array, ms: float) -> dict[str, Any]:
    """Rows of Y gathered in GB/s, and the time of a probe that does only that."""
    found = {"gb_s": graph.nnz * Y.shape[1] * Y.itemsize / ms / 1e6}
    probe = _probe.best(graph.indices, Y)
    if probe is not None:
        found |= {"probe_ms": probe.ms, "times_probe": ms / probe.ms}
    return found


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over cuSPARSE in float32, over the probe's time by dtype."""
    found = []
    for dtype, limit in (("float32", 2.0), ("float16", None)):
        held = {r["case"]: r["ratio"] for r in rows if r["dtype"] == dtype and "ratio" in r}
        if held:
            worst = min(held, key=lambda case: held[case])
            name = f"{dtype} over cuSPARSE, geomean of {len(held)}"
            found += [
                Target(name, geomean(held.values()), limit),
                Target(f"{dtype} over cuSPARSE, worst ({worst})", held[worst]),
            ]
        probed = [r["times_probe"] for r in rows if r["dtype"] == dtype and "times_probe" in r]
        if probed:
            found.append(Target(f"{dtype} times the gather probe, geomean", geomean(probed)))
    return found


def cpu(options: argparse.Namespace) -> bool:
    """float32 against ``(x[row] * y[col]).sum(-1)``."""
    threads = _baselines.use_threads(options.threads)
    _harness.print_head(f"sddmm, {threads} CPU threads, float32", CPU_COLUMNS)
    rows = []
    for name in options.graphs or ("cpu",):
        graph = _graphs.load(name, device="cpu")
        for feat in options.widths or CPU_WIDTHS:
            case = {"case": f"{Path(name).stem} x {feat}", "feat": feat, "threads": threads}
            rows.append(case | _cpu_case(graph, feat, quick=options.quick))
            _harness.print_row(rows[-1], CPU_COLUMNS)
    return _harness.keep("sddmm", "cpu", rows, judge_cpu, cuda=False, folder=options.out)


def _cpu_case(graph: CSR, feat: int, *, quick: bool) -> dict[str, Any]:
    X = _graphs.uniform(graph.indptr, (graph.n_rows, feat), seed=1)
    Y = _graphs.uniform(graph.indptr, (graph.n_cols, feat), seed=2)
    error = _oracle.sddmm_error(graph, X, Y, sddmm(graph, X, Y))
    wrong = _oracle.complaint(error, X.dtype)
    if wrong:
        return {"wrong": wrong}
    theirs = _baselines.guarded(lambda: _baselines.pyg_sddmm(graph, X, Y))
    functions = [lambda: sddmm(graph, X, Y), theirs]
    (ms, pyg_ms), runs = _harness.paced(functions, cuda=False, quick=quick)
    return {"ms": ms, "pyg_ms": pyg_ms, "ratio": pyg_ms / ms, "error": error, "runs": runs}


def judge_cpu(rows: list[dict[str, Any]]) -> list[Target]:
    """Five times PyG's way in every case."""
    ratios = [row["ratio"] for row in rows]
    return [Target("worst over PyG's gather", min(ratios), 5.0)]
