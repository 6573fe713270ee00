"""A product with 34 vertices (Zachary's karate club) on the CPU, beside SciPy's."""

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

import sparsefmt
from sparsefmt import CSR, ops
from sparsefmt.testing import error_bound, spmm_oracle

from .. import _harness
from .._harness import Target

WIDTHS = (16, 34)
MOST_US = 12.0
CALLS, ROUNDS = 2000, 30
WAYS = ("spmm", "out", "matmul", "scipy")
COLUMNS = {"case": "<24", **dict.fromkeys(WAYS, "8.2f")}


def small(options: argparse.Namespace) -> bool:
    """Measure the product at each width, and tell whether all results were right."""
    _harness.print_head("us of a product with 34 vertices", COLUMNS)
    rows = [_row(feat, weighted, options) for feat in WIDTHS for weighted in (True, False)]
    for row in rows:
        _harness.print_row(row, COLUMNS)
    return _harness.keep("wallclock", "small", rows, judge, cuda=False, folder=options.out)


def _row(feat: int, weighted: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Take the ways in turn: the least of the rounds, in microseconds a call."""
    rng = np.random.default_rng(0)
    A = _karate_club()
    values = rng.uniform(1, 2, A.nnz).astype(np.float32) if weighted else None
    A, X = A.with_data(values), rng.standard_normal((A.n_cols, feat)).astype(np.float32)
    theirs = scipy.sparse.csr_array(
        (np.ones(A.nnz, np.float32) if values is None else values, A.indices, A.indptr),
        shape=A.shape,
    )
    out = np.empty_like(X)
    ways: dict[str, Callable[[], Any]] = {
        "spmm": lambda: ops.spmm(A, X),
        "out": lambda: ops.spmm(A, X, out=out),
        "matmul": lambda: A @ X,
        "scipy": lambda: theirs @ X,
    }
    row: dict[str, Any] = {"case": f"{feat} features, {'weighted' if weighted else 'unweighted'}"}
    off = np.abs(ops.spmm(A, X) - spmm_oracle(A, X)) > error_bound(A, X)
    if off.any():
        return row | {"wrong": f"{int(off.sum())} of the sums are off by more than their bound"}
    calls, rounds = (200, 5) if options.quick else (CALLS, ROUNDS)
    least = dict.fromkeys(WAYS, float("inf"))
    for _ in range(rounds):
        for way, function in ways.items():
            least[way] = min(least[way], timeit.timeit(function, number=calls) / calls * 1e6)
    return row | least


def _karate_club() -> CSR:
    """156 edges, which PyG brings along."""
    from torch_geometric.datasets import KarateClub

    edges = KarateClub()[0].edge_index.numpy()
    return sparsefmt.from_edge_index(edges, num_nodes=34, index_dtype=np.int32).tocsr()


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Microseconds of ``ops.spmm``."""
    return [Target(f"{row['case']}, us", row["spmm"], MOST_US, at_least=False) for row in rows]
