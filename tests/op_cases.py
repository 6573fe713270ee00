"""What the tests of operations share: graphs that kernels go wrong on, and memory that shows it."""

import os
import subprocess
import sys
from functools import cache

import ml_dtypes
import numpy as np

import sparsefmt
from sparsefmt.formats.base import Format

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INDEX_DTYPES = [np.int32, np.int64]
WIDTHS = [0, 1, 7, 16, 33, 64, 128, 257]
FORMATS = ["coo", "csr", "csc", "sgt"]
REDUCTIONS = ["sum", "mean", "max", "min"]
GUARD = 64


def name_of(dtype):
    """For the names of tests."""
    return np.dtype(dtype).name if isinstance(dtype, type) else None


def run_apart(code, *words, **environment):
    """Run code in a process of its own, and return what it printed."""
    command, environment = [sys.executable, "-c", code, *words], os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def matrix(kind, dtype, index_dtype, *, seed=0):
    """A non-symmetric COO of the named kind with its entries in no order."""
    rng = np.random.default_rng(seed)
    shape, row, col = KINDS[kind](rng)
    order = rng.permutation(len(row))
    data = None if dtype is None else rng.uniform(-1, 1, len(row)).astype(dtype)
    row, col = (np.asarray(a, index_dtype)[order] for a in (row, col))
    return sparsefmt.COO(row, col, data, shape=shape)


def _random(n_rows, n_cols, nnz):
    return lambda rng: (
        (n_rows, n_cols),
        rng.integers(0, n_rows, nnz),
        rng.integers(0, n_cols, nnz),
    )


def _power_law(rng):
    row = np.minimum(rng.zipf(1.6, 600) - 1, 59)
    return (60, 45), row, rng.integers(0, 45, 600)


def _shuffled(rng):
    """A hub and empty rows, repeated entries too: hardly two orders of its entries are alike."""
    row = np.where(rng.random(160) < 0.2, 4, rng.integers(0, 11, 160) * 2)
    return (23, 17), row, rng.integers(0, 17, 160)


KINDS = {
    "empty": lambda rng: ((4, 3), [], []),
    "no rows": lambda rng: ((0, 3), [], []),
    "no columns": lambda rng: ((3, 0), [], []),
    "one row": _random(1, 20, 30),
    "one column": _random(20, 1, 15),
    "star": lambda rng: ((50, 400), np.zeros(400, int), np.arange(400)),
    "power law": _power_law,
    "banded": lambda rng: ((40, 40), np.repeat(np.arange(40), 2), np.arange(80) // 2 * 7 % 40),
    "dense block": lambda rng: ((32, 32), *np.indices((16, 16)).reshape(2, -1)),
    "isolated rows": lambda rng: ((90, 30), rng.integers(0, 9, 50) * 10, rng.integers(0, 30, 50)),
    "shuffled": _shuffled,
}

#: Lengths of rows whose ends fall everywhere in windows of 8 rows and 16 entries.
ROW_LENGTHS = {
    "every length": np.arange(50),
    "falling": np.arange(40)[::-1],
    "one each": np.ones(67, int),
    "seven and nine": np.tile([7, 9], 20),
    "around sixteen": np.tile([15, 16, 17, 1], 12),
    "empty runs": np.concatenate([[3], np.zeros(100, int), [17], np.zeros(31, int), [1, 0, 0]]),
    "hub among empty": np.concatenate([np.zeros(9, int), [300], np.zeros(22, int), [2]]),
    "last rows empty": np.concatenate([np.full(9, 5), np.zeros(40, int)]),
}
#: More entries than a block of a kernel takes, in rows that many blocks share and in short ones.
LONG_ROWS = np.concatenate(
    [[10_000, 0, 0, 1], np.zeros(2_000, int), np.arange(300) % 60, [3_000], np.ones(900, int)]
)


def rows_of(lengths, n_cols, dtype, index_dtype, *, seed=0):
    """A CSR whose rows have these lengths, with random columns, some of them repeated."""
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index_dtype)
    nnz = int(indptr[-1])
    indices = rng.integers(0, n_cols, nnz).astype(index_dtype)
    data = None if dtype is None else rng.uniform(-1, 1, nnz).astype(dtype)
    return sparsefmt.CSR(indptr, indices, data, shape=(len(lengths), n_cols))


def in_data_order(A):
    """Give ``A`` with its entries in the order of its values; a tiled matrix keeps CSR order."""
    return A.tocsr() if A.format == "sgt" else A


def features(rows, width, dtype, *, seed=1):
    shape = (rows, *width) if isinstance(width, tuple) else (rows, width)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)


def rounded(X):
    """Features as kernels gather them that may round float32 to bfloat16."""
    return X.astype(ml_dtypes.bfloat16).astype(np.float32)


def note_calls(monkeypatch, owner, name):
    """Note the arguments of each call of a function, which runs as before."""
    calls, function = [], getattr(owner, name)

    def noting(*args, **options):
        calls.append(args)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, noting)
    return calls


def put(xp, value):
    """A matrix or array where the module's arrays live."""
    if isinstance(value, Format):
        return value.to("cuda") if xp.__name__ == "cupy" else value
    return None if value is None else xp.asarray(value)


def host(a):
    return a.get() if hasattr(a, "get") else a


def far_apart(xp, X, *, gap=3, shift=0):
    """``X`` on the device with rows ``gap`` values apart, beginning ``shift`` values late."""
    width = int(np.prod(X.shape[1:]))
    buffer = xp.full(shift + len(X) * (width + gap), np.nan, X.dtype)
    rows = buffer[shift:].reshape(len(X), width + gap)[:, :width]
    rows[...] = xp.asarray(X.reshape(len(X), width))
    inner = np.ascontiguousarray(X).strides[1:]
    return xp.lib.stride_tricks.as_strided(rows, X.shape, (rows.strides[0], *inner))


def poisoned(xp, shape, dtype):
    """An output full of NaN between two guard bands, and the whole buffer."""
    size = int(np.prod(shape))
    buffer = xp.full(size + 2 * GUARD, np.nan, dtype)
    return buffer[GUARD : GUARD + size].reshape(shape), buffer


def intact(xp, buffer):
    """Whether nothing was written to the guard bands."""
    return bool(xp.isnan(buffer[:GUARD]).all() and xp.isnan(buffer[len(buffer) - GUARD :]).all())


def moved(xp, A, *, shift=1):
    """The same CSR with every array ``shift`` values into its memory: not aligned to 16 bytes."""

    def late(a):
        if a is None:
            return None
        buffer = xp.empty(len(a) + shift, a.dtype)
        buffer[shift:] = xp.asarray(a)
        return buffer[shift:]

    return sparsefmt.CSR(late(A.indptr), late(A.indices), late(A.data), shape=A.shape)


@cache
def long_rows(dtype, index_dtype):
    return rows_of(LONG_ROWS, 500, dtype, index_dtype)


def quick_oracle(A, X, reduce="sum"):
    """``(Y, bound)`` of a CSR by NumPy's ufuncs in float64, for graphs too large for the oracle."""
    f64 = np.float64
    row = np.repeat(np.arange(A.n_rows), A.lengths)
    degree = A.lengths[:, None].astype(f64)
    values = np.ones(A.nnz) if A.data is None else A.data.astype(f64)
    products = values[:, None] * X.astype(f64)[A.indices]
    sizes = np.zeros((A.n_rows, X.shape[1]))
    eps = 2.0**-7 if X.dtype.name == "bfloat16" else float(np.finfo(X.dtype).eps)
    if reduce in ("sum", "mean"):
        Y = np.zeros_like(sizes)
        np.add.at(Y, row, products)
        np.add.at(sizes, row, np.abs(products))
        share = np.maximum(degree, 1) if reduce == "mean" else 1
        return Y / share, 2 * degree * eps * sizes / share + (degree > 0) * 1e-7 * (eps > 1e-4)
    ufunc, start = (np.maximum, -np.inf) if reduce == "max" else (np.minimum, np.inf)
    Y = np.full_like(sizes, start)
    ufunc.at(Y, row, products)
    np.maximum.at(sizes, row, np.abs(products))
    return np.where(degree > 0, Y, 0), 2 * eps * sizes + (degree > 0) * 1e-7 * (eps > 1e-4)
