"""The numba twins: every operation on NumPy arrays, on all cores, deterministic.

numba has no 2-byte floats, so float16 and bfloat16 are widened to float32, computed there and
rounded once.  As with every OpenMP program, a process that has run an operation cannot ``fork`` and
run one in the child: start such workers with ``spawn``.
"""

import threading
from typing import Any

import numba
import numpy as np

from .._arrays import Array
from ..compressed import CSR
from ..coo import COO

#: Pieces of work a thread: enough to even out hubs, few enough to cost nothing.
PIECES_PER_THREAD = 16
#: Features that one thread scatters at a time: a cache line of float32.
SLAB = 16

_compile = numba.njit(parallel=True, cache=True, nogil=True)
#: numba's workqueue, the only pool of some platforms, aborts the process when two threads enter it.
#: One parallel loop uses all cores: waiting for it costs nothing.
_pool = threading.Lock()


def spmm_csr(A: CSR, X: Array, out: Array) -> None:
    """``out[i] = sum of a[e] * X[col[e]]`` over the entries of row i."""
    pieces = PIECES_PER_THREAD * numba.get_num_threads()
    limits = np.linspace(0, A.nnz, pieces + 1).astype(np.int64)
    rows = np.searchsorted(A.indptr, limits[1:-1])  # pieces of equal entries, cut at rows
    bounds = np.concatenate(([0], rows, [A.n_rows])).astype(np.int64)
    data, X, Y = _widened(A.data, X, out)
    with _pool:
        _spmm_csr(A.indptr, A.indices, data, X, Y, bounds)
    if Y is not out:
        out[...] = Y


def spmm_coo(A: COO, X: Array, out: Array) -> None:
    """``out[row[e]] += a[e] * X[col[e]]`` for every entry, in their order."""
    data, X, Y = _widened(A.data, X, out)
    with _pool:
        _spmm_coo(A.row, A.col, data, X, Y)
    if Y is not out:
        out[...] = Y


def _widened(data: Array | None, X: Array, out: Array) -> tuple[Array | None, Array, Array]:
    if X.dtype.itemsize >= 4:
        return data, X, out
    wide = None if data is None else data.astype(np.float32)
    return wide, X.astype(np.float32), np.empty(out.shape, np.float32)


@_compile
def _spmm_csr(indptr: Any, indices: Any, data: Any, X: Any, Y: Any, bounds: Any) -> None:
    for piece in numba.prange(len(bounds) - 1):
        for i in range(bounds[piece], bounds[piece + 1]):
            Y[i] = 0
            for e in range(indptr[i], indptr[i + 1]):
                x = X[indices[e]]
                if data is None:
                    for f in range(len(x)):
                        Y[i, f] += x[f]
                else:
                    for f in range(len(x)):
                        Y[i, f] += data[e] * x[f]


@_compile
def _spmm_coo(row: Any, col: Any, data: Any, X: Any, Y: Any) -> None:
    feat = X.shape[1]
    for slab in numba.prange((feat + SLAB - 1) // SLAB):
        start, stop = slab * SLAB, min((slab + 1) * SLAB, feat)
        Y[:, start:stop] = 0
        for e in range(len(row)):
            i, j = row[e], col[e]
            for f in range(start, stop):
                if data is None:
                    Y[i, f] += X[j, f]
                else:
                    Y[i, f] += data[e] * X[j, f]
