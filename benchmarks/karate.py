"""A product with 34 vertices (Zachary's karate club) on the CPU: a section of ``wallclock``."""

import argparse
import timeit
from collections.abc import Iterator

import numpy as np

from sparsefmt import ops

from . import _oracle
from ._harness import Call
from ._table import Row

MOST_US = 12.0


def small(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the product at each width: the least of the rounds, in microseconds a call."""
    import scipy.sparse
    from torch_geometric.datasets import KarateClub

    import sparsefmt
    from sparsefmt.testing import error_bound, spmm_oracle

    edges = KarateClub()[0].edge_index.numpy()
    karate = sparsefmt.from_edge_index(edges, num_nodes=34, index_dtype=np.int32).tocsr()
    rng = np.random.default_rng(0)
    calls, rounds = (200, 5) if options.quick else (2000, 30)
    for feat, weighted in ((16, True), (16, False), (34, True), (34, False)):
        values = rng.uniform(1, 2, karate.nnz).astype(np.float32)
        A = karate.with_data(values if weighted else None)
        X = rng.standard_normal((A.n_cols, feat)).astype(np.float32)
        out, ones = np.empty_like(X), np.ones_like(values)
        csr = (values if weighted else ones, A.indices, A.indptr)
        theirs = scipy.sparse.csr_array(csr, shape=A.shape)
        ways: dict[str, Call] = {
            "spmm_us": lambda: ops.spmm(A, X),  # noqa: B023
            "out_us": lambda: ops.spmm(A, X, out=out),  # noqa: B023
            "matmul_us": lambda: A @ X,  # noqa: B023
            "scipy_us": lambda: theirs @ X,  # noqa: B023
        }
        off = np.abs(ops.spmm(A, X) - spmm_oracle(A, X)) > error_bound(A, X)
        row: Row = {"case": f"{feat} features{', weighted' * weighted}", "error": float(off.sum())}
        row |= _oracle.refused(_oracle.over(row["error"], 0))
        for _ in range(rounds):
            for way, call in ways.items():
                us = timeit.timeit(call, number=calls) / calls * 1e6
                row[way] = min(row.get(way, us), us)
        yield row
