"""SpMM's time per entry from 1 M to 1 G entries, and beyond 2**31 of them; with a plot."""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt import CSR
from sparsefmt.ops import spmm

from .. import _cusparse, _graphs, _harness, _oracle
from .._harness import Target

#: Millions (2**20) of entries.
SIZES = (1, 4, 16, 64, 256, 1024)
QUICK_SIZES = (1, 4, 16)
DEGREES = (8, 256)
FEAT = 64
HUGE_ENTRIES, HUGE_DEGREE, HUGE_FEAT = 2_200_000_000, 256, 16
COLUMNS = {
    "case": "<24",
    "entries": "12d",
    "ms": "9.3f",
    "ns": "8.5f",
    "cusparse_ns": "11.5f",
    "algorithm": "<9",
    "ratio": "6.2f",
    "error": "8.1e",
    "skipped": "<30",
}
#: A cliff: our ns per entry rise by so much from a size to the next, and cuSPARSE's do not.
CLIFF = 1.25


def random_graph(entries: int, degree: int, index: Any) -> CSR:
    """About so many entries: degrees uniform in 0 .. 2 * degree, columns uniform, in no order."""
    import cupy

    n = max(entries // degree, 1)
    indptr = cupy.zeros(n + 1, np.int64)
    cupy.cumsum(_graphs.random_integers(2 * degree + 1, n, np.int64), out=indptr[1:])
    indices = _graphs.random_integers(n, int(indptr[-1]), index)
    return CSR(indptr.astype(index, copy=False), indices, shape=(n, n), validate="cheap")


def scaling(options: argparse.Namespace) -> bool:
    """Both libraries at every size that fits the device, then the run beyond 2**31."""
    _harness.print_head(f"nanoseconds per entry, width {FEAT}, float32", COLUMNS)
    rows = []
    for degree in DEGREES:
        for millions in QUICK_SIZES if options.quick else SIZES:
            case = {"case": f"{millions} M, degree {degree}", "degree": degree}
            case |= {"millions": millions}
            rows.append(case | _guarded(_size_row, millions << 20, degree, options.quick))
            _harness.print_row(rows[-1], COLUMNS)
            _harness.free()
    if not options.quick:
        case = {"case": f"int64, degree {HUGE_DEGREE}, width {HUGE_FEAT}"}
        rows.append(case | _guarded(_huge_row))
        _harness.print_row(rows[-1], COLUMNS)
        _harness.free()
    right = _harness.keep("spmm", "scaling", rows, judge, cuda=True, folder=options.out)
    folder = options.out or _harness.RESULTS
    kept = json.loads((folder / "spmm-gpu.json").read_text())["sections"]["scaling"]
    plot(kept["rows"], kept["machine"].get("device", ""), folder / "spmm-scaling.png")
    return right


def _guarded(measure: Any, *arguments: Any) -> dict[str, Any]:
    """The row, or why it was skipped where the device is too small."""
    try:
        found: dict[str, Any] = measure(*arguments)
        return found
    except MemoryError as error:  # CuPy's and sparsefmt's
        return {"skipped": f"out of memory: {str(error)[:60]}"}


def _size_row(entries: int, degree: int, quick: bool) -> dict[str, Any]:
    """Both write to one result: at 1 G entries X and Y alone take 64 GiB."""
    import cupy

    A = _graphs.weighted(random_graph(entries, degree, np.int32))
    X = _graphs.uniform(A.indptr, (A.n_cols, FEAT))
    Y = cupy.empty((A.n_rows, FEAT), np.float32)
    _harness.poison(Y)
    error = _oracle.spmm_error(A, X, spmm(A, X, out=Y))
    wrong = _oracle.complaint(error, X.dtype)
    if wrong:
        return {"wrong": wrong}
    algorithm, theirs = _cusparse.best_spmm(A, X, Y)
    functions = [lambda: spmm(A, X, out=Y), theirs]
    (ms, their_ms), runs = _harness.paced(functions, cuda=True, quick=quick)
    times = {"ms": ms, "cusparse_ms": their_ms, "ratio": their_ms / ms, "algorithm": algorithm}
    per_entry = {"ns": ms * 1e6 / A.nnz, "cusparse_ns": their_ms * 1e6 / A.nnz}
    return {"entries": A.nnz, "rows": A.n_rows, "error": error, "runs": runs} | times | per_entry


def _huge_row() -> dict[str, Any]:
    """Unweighted, int64: cuSPARSE would need values for every entry."""
    A = random_graph(HUGE_ENTRIES, HUGE_DEGREE, np.int64)
    X = _graphs.uniform(A.indptr, (A.n_cols, HUGE_FEAT))
    Y = spmm(A, X)
    error = _oracle.spmm_error(A, X, Y)  # the last row is among the sampled ones
    wrong = _oracle.complaint(error, X.dtype)
    if wrong or A.nnz <= 1 << 31:
        return {"wrong": wrong or f"only {A.nnz} entries"}
    (ms,), runs = _harness.paced([lambda: spmm(A, X, out=Y)], cuda=True)
    found = {"entries": A.nnz, "rows": A.n_rows, "feat": HUGE_FEAT, "error": error}
    return found | {"ms": ms, "ns": ms * 1e6 / A.nnz, "runs": runs}


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """No cliff from size to size that cuSPARSE does not have; entries of the largest run."""
    found = []
    for degree in DEGREES:
        curve = [row for row in rows if row.get("degree") == degree and "ratio" in row]
        curve.sort(key=lambda row: row["millions"])
        if len(curve) > 1:
            name = f"degree {degree}: steepest step up in ns per entry that cuSPARSE has not"
            steepest = max(step_of_ours(*pair) for pair in pairwise(curve))
            found.append(Target(name, steepest, CLIFF, at_least=False))
            lowest = min(row["ratio"] for row in curve)
            found.append(Target(f"degree {degree}: lowest ratio to cuSPARSE", lowest))
    most = max((row["entries"] for row in rows if "entries" in row), default=0)
    found.append(Target("entries of the largest run, correct", most, 2.0**31))
    return found


def step_of_ours(before: dict[str, Any], after: dict[str, Any]) -> float:
    """How many times our ns per entry rise from a size to the next, over a rise of cuSPARSE's.

    Where cuSPARSE gets faster nothing is held against us: that is no cliff but its gain.
    """
    ours, theirs = (after[key] / before[key] for key in ("ns", "cusparse_ns"))
    return ours / max(1.0, theirs)


def plot(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Nanoseconds per entry over entries, both axes logarithmic, both libraries."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for degree, colour in zip(DEGREES, ("tab:blue", "tab:orange"), strict=True):
        curve = [row for row in rows if row.get("degree") == degree and "ns" in row]
        curve.sort(key=lambda row: row["entries"])
        for key, line, library in (("ns", "o-", "sparsefmt"), ("cusparse_ns", "s--", "cuSPARSE")):
            label = f"{library}, mean degree {degree}"
            points = [(row["entries"], row[key]) for row in curve if key in row]
            if points:
                axes.loglog(*zip(*points, strict=True), line, color=colour, label=label)
    axes.set_xlabel("stored entries")
    axes.set_ylabel("nanoseconds per entry")
    axes.set_title(f"SpMM, float32, width {FEAT}, {device}")
    axes.grid(which="both", alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    print(f"  wrote {path}")
