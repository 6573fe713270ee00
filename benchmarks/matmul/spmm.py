"""SpMM against the gather ceiling, cuSPARSE and what else people use.

``python -m benchmarks spmm [--device cpu|cuda] [--sections table,libraries,memory]
[--graphs reddit,path.npz] [--widths 64,128] [--dtypes float32,float16] [--quick] [--out FOLDER]``

On a GPU the sections are

- ``table``: graphs, widths and dtypes against cuSPARSE's best algorithm and the gather probe;
- ``libraries``: the products of cupyx, torch.sparse and PyG, and torch.compile's;
- ``memory``: peak of forward and backward through torch;
- ``sorted``: the ratio to cuSPARSE with ids in order of degree instead of shuffled.

The first three run unless ``--sections`` says otherwise.  On the CPU there is one section, against
torch.sparse CSR and SciPy.  Every case is checked in float64 on sampled rows before it is timed:
relative error at most 1e-5 in float32, 1e-3 in float16, and 1e-3 beyond the rounding of the result
(2**-8) in bfloat16.  Medians of 20 runs after 5, of 10 after 3 where one takes over 50 ms.
"""

import argparse
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.ops import spmm

from .. import _baselines, _graphs, _harness, _options, _oracle
from .._harness import Target, geomean

DTYPES = ("float32", "float16", "bfloat16")
SECTIONS = {
    "table": ("matmul.table", "table"),
    "libraries": ("matmul.libraries", "libraries"),
    "memory": ("matmul.libraries", "memory"),
    "sorted": ("matmul.table", "by_order"),
}
DEFAULT_SECTIONS = ("table", "libraries", "memory")
#: Widths of each graph on the CPU: short rows of few features show what a row itself costs.
CPU_WIDTHS = {"cpu": (32, 128), "short": (8, 16)}
CPU_COLUMNS = {
    "case": "<16",
    "ms": "9.2f",
    "torch_ms": "9.2f",
    "over_torch": "10.2f",
    "scipy_ms": "9.2f",
    "over_scipy": "10.2f",
    "error": "8.1e",
}


def main(argv: list[str]) -> int:
    """Run the sections asked for; 1 if a result was wrong."""
    options = parse(argv)
    if options.device == "cpu":
        return 0 if cpu(options) else 1
    return _options.run(SECTIONS, options)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, lists split; ``graphs`` and ``widths`` are None where a section decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks spmm")
    _options.add_options(parser)
    parser.add_argument("--sections", type=_options.some_of(SECTIONS), default=DEFAULT_SECTIONS)
    parser.add_argument("--dtypes", type=_options.some_of(DTYPES), default=DTYPES)
    return _options.parse(parser, argv)


# On the CPU


def cpu(options: argparse.Namespace) -> bool:
    """float32 against torch.sparse CSR and SciPy, the same threads for all (SciPy has one)."""
    threads = _baselines.use_threads(options.threads)
    _harness.print_head(f"spmm, {threads} CPU threads, float32", CPU_COLUMNS)
    rows = []
    for name in options.graphs or CPU_WIDTHS:
        A = _graphs.weighted(_graphs.load(name, device="cpu"))
        for feat in options.widths or CPU_WIDTHS.get(name, CPU_WIDTHS["cpu"]):
            case = {"case": f"{Path(name).stem} x {feat}", "feat": feat, "threads": threads}
            rows.append(case | cpu_case(A, feat, quick=options.quick))
            _harness.print_row(rows[-1], CPU_COLUMNS)
    return _harness.keep("spmm", "cpu", rows, judge_cpu, cuda=False, folder=options.out)


def cpu_case(A: CSR, feat: int, *, quick: bool) -> dict[str, Any]:
    """One width: checked, and the three timed in turn."""
    X = _graphs.uniform(A.indptr, (A.n_cols, feat))
    error = _oracle.spmm_error(A, X, spmm(A, X))
    wrong = _oracle.complaint(error, X.dtype)
    if wrong:
        return {"wrong": wrong}
    theirs = [_baselines.guarded(lambda: _baselines.torch_spmm(A, X)), _baselines.scipy_spmm(A, X)]
    found, runs = _harness.paced([lambda: spmm(A, X), *theirs], cuda=False, quick=quick)
    ms, torch_ms, scipy_ms = found
    ratios = {"over_torch": torch_ms / ms, "over_scipy": scipy_ms / ms}
    times = {"ms": ms, "torch_ms": torch_ms, "scipy_ms": scipy_ms}
    return times | ratios | {"error": error, "runs": runs}


def judge_cpu(rows: list[dict[str, Any]]) -> list[Target]:
    """At least as fast as torch, half as fast again as SciPy, in every case."""
    over_torch = [row["over_torch"] for row in rows]
    over_scipy = [row["over_scipy"] for row in rows]
    return [
        Target("worst over torch.sparse CSR", min(over_torch), 1.0),
        Target("worst over SciPy", min(over_scipy), 1.5),
        Target("geomean over torch.sparse CSR", geomean(over_torch)),
        Target("geomean over SciPy", geomean(over_scipy)),
    ]
