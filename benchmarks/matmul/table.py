"""SpMM over graphs, widths and dtypes against cuSPARSE and the gather probe; and by row order."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array
from sparsefmt.ops import spmm

from .. import _cusparse, _graphs, _harness, _oracle, _probe
from .._harness import Target, geomean

WIDTHS = (16, 32, 64, 128, 256)
WIDE = (64, 128, 256)  #: the widths of the targets; the others have one of their own
HALVES = ("float16", "bfloat16")
COLUMNS = {
    "case": "<25",
    "ms": "8.3f",
    "cusparse_ms": "11.3f",
    "algorithm": "<8",
    "ratio": "5.2f",
    "ratio_f32": "9.2f",
    "gb_s": "6.0f",
    "copy": "5.2f",
    "cold_ms": "8.3f",
    "cold_ratio": "10.2f",
    "probe_ms": "8.3f",
    "ceiling": "7.2f",
    "error": "8.1e",
    "probe": "<20",
}
SORTED_COLUMNS = {
    "case": "<18",
    "shuffled_ms": "11.3f",
    "shuffled_ratio": "14.2f",
    "sorted_ms": "9.3f",
    "sorted_ratio": "12.2f",
    "moves": "6.3f",
}


@dataclass
class Operands:
    """Operands of one dtype, with a result for each side."""

    A: CSR
    X: Array
    Y: Array
    theirs: Array

    @classmethod
    def of(cls, graph: CSR, feat: int, dtype: str) -> "Operands":
        """Values and features uniform in [0, 1)."""
        A = _graphs.weighted(graph, dtype)
        X = _graphs.uniform(graph.indptr, (graph.n_cols, feat), dtype)
        Y, theirs = (_empty(X, graph.n_rows) for _ in range(2))
        return cls(A, X, Y, theirs)

    def __call__(self) -> Array:
        """The product, into ``Y``."""
        return spmm(self.A, self.X, out=self.Y)

    def baseline(self) -> tuple[str, _cusparse.Product]:
        """The best algorithm of cuSPARSE for these operands, and its product."""
        return _cusparse.best_spmm(self.A, self.X, self.theirs)

    def error(self) -> float:
        """Of our result, from a poisoned output."""
        _harness.poison(self.Y)
        self()
        return _oracle.spmm_error(self.A, self.X, self.Y)


def _empty(X: Array, rows: int) -> Array:
    import cupy

    return cupy.empty((rows, X.shape[1]), X.dtype)


def table(options: argparse.Namespace) -> bool:
    """Every cell: ours beside cuSPARSE of the same dtype (float16 for bfloat16), warm and cold."""
    _harness.print_head(
        f"spmm against cuSPARSE {_cusparse.version()}; copy {_harness.copy_bandwidth():.0f} GB/s",
        COLUMNS,
    )
    rows = []
    for name in options.graphs or _graphs.TABLE:
        graph = _graphs.load(name)
        probes: dict[int, _probe.Probe | None] = {}  # by the bytes of a row
        for feat in options.widths or WIDTHS:
            for row in cells(graph, Path(name).stem, feat, options, probes):
                _harness.print_row(row, COLUMNS)
                rows.append(row)
        _harness.free()
    return _harness.keep("spmm", "table", rows, judge_table, cuda=True, folder=options.out)


def cells(
    graph: CSR,
    name: str,
    feat: int,
    options: argparse.Namespace,
    probes: dict[int, _probe.Probe | None],
) -> Iterable[dict[str, Any]]:
    """One cell for each dtype; float32 first, since the halves are held against it too."""
    wide = Operands.of(graph, feat, "float32")
    algorithm, wide_theirs = wide.baseline()
    row: dict[str, Any] = {}
    if "float32" in options.dtypes:
        row = _cell(wide, algorithm, wide_theirs, options, probes)
        yield _named(name, feat, "float32") | row
    halves = [dtype for dtype in HALVES if dtype in options.dtypes]
    if not halves:
        return
    wide_ms = row.get("cusparse_ms") or _harness.paced([wide_theirs], cuda=True)[0][0]
    del wide, wide_theirs
    narrow = Operands.of(graph, feat, "float16")
    algorithm, theirs = narrow.baseline()
    for dtype in halves:
        ours = narrow if dtype == "float16" else Operands.of(graph, feat, dtype)
        row = _cell(ours, algorithm, theirs, options, probes, narrow)
        if "ms" in row:
            row["ratio_f32"] = wide_ms / row["ms"]
        yield _named(name, feat, dtype) | row


def _named(name: str, feat: int, dtype: str) -> dict[str, Any]:
    case = f"{name} {feat} {dtype}"
    return {"case": case, "graph": name, "feat": feat, "dtype": dtype}


def _cell(
    ours: Operands,
    algorithm: str,
    theirs: _cusparse.Product,
    options: argparse.Namespace,
    probes: dict[int, _probe.Probe | None],
    operands: Operands | None = None,
) -> dict[str, Any]:
    """Times of both; ``operands`` are cuSPARSE's where they are not ours."""
    error = ours.error()
    wrong = _oracle.complaint(error, ours.X.dtype)
    if wrong:
        return {"wrong": wrong}
    theirs()
    other = operands or ours
    their_error = _oracle.spmm_error(other.A, other.X, other.theirs)
    (ms, their_ms), runs = _harness.paced([ours, theirs], cuda=True, quick=options.quick)
    row = {
        "ms": ms,
        "cusparse_ms": their_ms,
        "algorithm": algorithm,
        "ratio": their_ms / ms,
        "runs": runs,
        "error": error,
        "cusparse_error": their_error,
    }
    if not options.quick:
        cold = _harness.medians([ours, theirs], cuda=True, runs=5, warmups=1, flush=True)
        row |= {"cold_ms": cold[0], "cold_ratio": cold[1] / cold[0]}
    return row | _against_ceiling(ours, ms, probes)


def _against_ceiling(
    ours: Operands, ms: float, probes: dict[int, _probe.Probe | None]
) -> dict[str, Any]:
    """Gathered GB/s, their share of copy bandwidth, and the share of the ceiling reached.

    The ceiling's time is the probe's and that of writing the result at copy bandwidth.
    """
    row_bytes = ours.X.shape[1] * ours.X.itemsize
    gathered = ours.A.nnz * row_bytes / ms / 1e6
    found: dict[str, Any] = {"gb_s": gathered, "copy": gathered / _harness.copy_bandwidth()}
    if row_bytes not in probes:
        probes[row_bytes] = _probe.best(ours.A.indices, ours.X)
    probe = probes[row_bytes]
    if probe is not None:
        least = probe.ms + ours.Y.nbytes / _harness.copy_bandwidth() / 1e6
        found |= {"probe_ms": probe.ms, "probe": str(probe), "ceiling": least / ms}
    return found


def judge_table(rows: list[dict[str, Any]]) -> list[Target]:
    """The figures of the wide widths by dtype, and of the narrow ones in float32."""
    f32 = [row for row in rows if row["dtype"] == "float32"]
    wide = [row for row in f32 if row["feat"] in WIDE]
    narrow = [row for row in f32 if row["feat"] in (16, 32)]
    found = [
        *geomean_and_worst("float32 64/128/256 over cuSPARSE", wide, "ratio", 1.35, 1.0),
        *geomean_and_worst("float32 16/32 over cuSPARSE", narrow, "ratio", 1.4, None),
        *geomean_and_worst("float32 64/128/256 share of the ceiling", wide, "ceiling", 0.8, 0.65),
        *geomean_and_worst("float32 16/32 share of the ceiling", narrow, "ceiling", None, None),
    ]
    for dtype in HALVES:
        half = [row for row in rows if row["dtype"] == dtype and row["feat"] in WIDE]
        found += [
            *geomean_and_worst(
                f"{dtype} 64/128/256 over cuSPARSE float16", half, "ratio", 2.0, None
            ),
            *geomean_and_worst(
                f"{dtype} 64/128/256 over cuSPARSE float32", half, "ratio_f32", 2.2, None
            ),
            *geomean_and_worst(
                f"{dtype} 64/128/256 share of the ceiling", half, "ceiling", 0.75, None
            ),
        ]
    for dtype, limit in _oracle.LIMITS.items():
        errors = [row["error"] for row in rows if row["dtype"] == dtype]
        if errors:
            found.append(Target(f"{dtype} largest relative error", max(errors), limit, False))
    theirs = [row["cusparse_error"] for row in rows if row["dtype"] == "float32"]
    if theirs:
        found.append(Target("cuSPARSE's largest relative error in float32", max(theirs)))
    return found


def geomean_and_worst(
    name: str, rows: list[dict[str, Any]], key: str, mean: float | None, worst: float | None
) -> list[Target]:
    """Geomean and worst of a figure, where any row has it."""
    held = {row["case"]: row[key] for row in rows if key in row}
    if not held:
        return []
    lowest = min(held, key=lambda case: held[case])
    return [
        Target(f"{name}, geomean of {len(held)}", geomean(held.values()), mean),
        Target(f"{name}, worst ({lowest})", held[lowest], worst),
    ]


# By row order


def by_order(options: argparse.Namespace) -> bool:
    """float32 with ids shuffled and in order of degree: how far the ratio to cuSPARSE moves."""
    _harness.print_head("ids by degree instead of shuffled, float32", SORTED_COLUMNS)
    rows = []
    for name in options.graphs or _graphs.TABLE:
        for feat in options.widths or WIDE:
            row = _order_row(name, feat, quick=options.quick)
            _harness.print_row(row, SORTED_COLUMNS)
            rows.append(row)
            _harness.free()
    return _harness.keep("spmm", "sorted", rows, judge_sorted, cuda=True, folder=options.out)


def _order_row(name: str, feat: int, *, quick: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"{Path(name).stem} {feat}", "feat": feat}
    for order in ("shuffled", "sorted"):
        ours = Operands.of(_graphs.load(name, by_degree=order == "sorted"), feat, "float32")
        wrong = _oracle.complaint(ours.error(), ours.X.dtype)
        if wrong:
            return row | {"wrong": f"{order}: {wrong}"}
        algorithm, theirs = ours.baseline()
        (ms, their_ms), runs = _harness.paced([ours, theirs], cuda=True, quick=quick)
        found = {"ms": ms, "cusparse_ms": their_ms, "ratio": their_ms / ms}
        found |= {"algorithm": algorithm, "runs": runs}
        row |= {f"{order}_{key}": value for key, value in found.items()}
    return row | {"moves": row["sorted_ratio"] / row["shuffled_ratio"] - 1}


def judge_sorted(rows: list[dict[str, Any]]) -> list[Target]:
    """The ratio moves by at most a tenth, overall and in every case."""
    shuffled = geomean(row["shuffled_ratio"] for row in rows)
    by_degree = geomean(row["sorted_ratio"] for row in rows)
    most = max(rows, key=lambda row: abs(row["moves"]))
    return [
        Target("geomean ratio, shuffled", shuffled),
        Target("geomean ratio, by degree", by_degree),
        Target("ratio moves, geomean", abs(by_degree / shuffled - 1), 0.1, at_least=False),
        Target(f"ratio moves, most ({most['case']})", abs(most["moves"]), 0.1, at_least=False),
        Target("lowest ratio by degree", min(row["sorted_ratio"] for row in rows)),
    ]
