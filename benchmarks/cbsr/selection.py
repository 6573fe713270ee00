"""MaxK against torch.topk, and against a copy of what it has to read and write."""

import argparse
from typing import Any

import numpy as np

from sparsefmt.formats.arrays import Array
from sparsefmt.ops import maxk

from .. import _baselines, _graphs, _harness, _oracle
from .._harness import Target

FEAT = 256
KS = (8, 16, 32, 64, 96, 128, 192)
DTYPES = ("float32", "float16")
CPU_ROWS = 20_000
#: The k of the targets, in float32 on a GPU.
JUDGED, OVER_TOPK, TIMES_COPY = (8, 32, 64), 16.0, 2.5
COLUMNS = {
    "case": "<14",
    "ms": "9.4f",
    "topk_ms": "9.3f",
    "ratio": "7.2f",
    "over_unsorted": "13.2f",
    "copy_ms": "9.4f",
    "times_copy": "10.2f",
    "cold_ms": "9.4f",
}


def selection(options: argparse.Namespace) -> bool:
    """Every k in both dtypes, features as many as reddit has vertices."""
    cuda = options.device == "cuda"
    n_rows = _graphs.RECIPES["reddit"].nodes if cuda else CPU_ROWS
    _harness.print_head(f"maxk of {n_rows} x {FEAT} against torch.topk", COLUMNS)
    like = _graphs.load("small", device=options.device).indptr
    rows = []
    for dtype in DTYPES:
        X = features(like, n_rows, dtype)
        for k in options.k or KS:
            row = {"case": f"{dtype} k={k}", "dtype": dtype, "k": k, "rows": n_rows}
            rows.append(row | options.facts | _row(X, k, cuda=cuda, quick=options.quick))
            _harness.print_row(rows[-1], COLUMNS)
    return _harness.keep("maxk", "selection", rows, judge, cuda=cuda, folder=options.out)


def features(like: Array, n_rows: int, dtype: str) -> Array:
    """Normally distributed, with rows that hold NaN, and rows where all tie."""
    X = _graphs.normal(like, (n_rows, FEAT), dtype)
    X[::97, ::31] = np.nan
    X[1::97] = 1
    return X


def _row(X: Array, k: int, *, cuda: bool, quick: bool) -> dict[str, Any]:
    import torch

    with _harness.poisoned(cuda=cuda):
        S = maxk(X, k)
    wrong = _oracle.wrong_maxk_rows(X, S)
    if wrong:
        return {"wrong": f"{wrong} of {len(X)} rows differ from a stable sort"}
    x = _baselines.tensor(X)
    functions = [
        lambda: maxk(X, k),
        lambda: torch.topk(x, k),
        lambda: torch.topk(x, k, sorted=False),
    ]
    (ms, topk_ms, unsorted_ms), runs = _harness.paced(functions, cuda=cuda, quick=quick)
    row = {"ms": ms, "topk_ms": topk_ms, "runs": runs}
    row |= {"ratio": topk_ms / ms, "over_unsorted": unsorted_ms / ms}
    if cuda:
        copy_ms = (X.nbytes + S.nbytes) / _harness.copy_bandwidth() / 1e6
        row |= {"copy_ms": copy_ms, "times_copy": ms / copy_ms}
        if not quick:
            cold = _harness.medians(functions[:1], cuda=True, runs=5, warmups=1, flush=True)
            row["cold_ms"] = cold[0]
    return row


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Over torch.topk, and times a copy, at the k that are judged; the worst of all to know."""
    found = []
    for row in rows:
        if row["dtype"] == "float32" and row["k"] in JUDGED:
            copied = "times_copy" in row  # on a GPU, which the limits are for
            over = OVER_TOPK if copied else None
            found.append(Target(f"{row['case']} over torch.topk", row["ratio"], over))
            if copied:
                name = f"{row['case']} times a copy"
                found.append(Target(name, row["times_copy"], TIMES_COPY, at_least=False))
    worst = min(rows, key=lambda row: row["ratio"])
    return [*found, Target(f"over torch.topk, worst ({worst['case']})", worst["ratio"])]
