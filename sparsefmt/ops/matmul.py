"""SpMM: a sparse matrix times a dense feature matrix."""

import itertools
from typing import Any

import numpy as np

from .._arrays import VALUE_DTYPES, Array, is_cupy
from ..base import Format
from ..compressed import CSR
from ..coo import COO
from . import _check, _jit, _registry

#: Entries and row ends that a block of ``spmm_csr_balanced`` takes, as in spmm.cu.
ITEMS = 4096
#: What it can count: a sub-warp looks up to an eighth beyond the items of a block.
MOST_ITEMS = 3 * 2**29


def spmm(A: Format, X: Array, *, out: Array | None = None) -> Array:
    """Sparse matrix times dense feature matrix: the aggregation of a vertex's in-neighbours.

    ``Y[i, f] = sum_e a[e] * X[j, f]`` over the stored entries ``e = (i, j)`` of row ``i``; every
    ``a[e]`` is 1 for an unweighted ``A``.  An implicit zero never touches Inf or NaN.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        The format picks the method: COO scatters with atomics (GAS; not deterministic on a GPU),
        CSR reduces row by row (GAR); the others are converted to CSR first, at each call.
    X : array, shape (n_cols, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 sums
        run in float32.  Any ``feat``, 0 included.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of X's dtype and device, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        On the device of the inputs, of X's dtype.

    Raises
    ------
    ShapeError
        If ``X`` is not 2-D or has not one row per column of ``A``, or ``out`` has not the
        result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, or ``X`` or ``out`` has a dtype that does not fit.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If no kernel runs these dtypes; the text lists each kernel's reasons.

    Notes
    -----
    Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |X[j, f]|``.  GAS and GAR are named in
    fuseGNN (ICCAD'20), section 3.
    """
    A = _check.sparse("A", A)
    X = _check.features("X", X, rows=A.n_cols, like=A)
    inputs = [X, *A._arrays().values()]
    out = _check.output(out, shape=(A.n_rows, X.shape[1]), like=X, inputs=inputs)
    return _registry.run("spmm", A, X, out=out)


# Launchers


def _spmm_csr_balanced(A: CSR, X: Array, out: Array) -> None:
    if out.size == 0:
        return
    feat = X.shape[1]
    lanes, vector = _slice(feat, X, out)
    kernel = _jit.load(
        "spmm.cu",
        "spmm_csr_balanced",
        X.dtype,
        A.index_dtype,
        LANES=lanes,
        VEC=vector,
        WEIGHTED=_weighted(A),
    )
    data = X if A.data is None else A.data  # never read where unweighted
    sizes = (np.int64(A.n_rows), np.int64(A.nnz), np.int32(feat))
    blocks = -(-(A.nnz + A.n_rows) // ITEMS) * -(-feat // (lanes * vector))
    kernel(blocks, (A.indptr, A.indices, data, X, out, *sizes))


def _spmm_csr_rows(A: CSR, X: Array, out: Array) -> None:
    feat = X.shape[1]
    kernel = _jit.load("spmm.cu", "spmm_csr_rows", X.dtype, A.index_dtype, WEIGHTED=_weighted(A))
    data = X if A.data is None else A.data  # never read where unweighted
    args = (A.indptr, A.indices, data, X, out, np.int64(A.n_rows), np.int64(feat))
    kernel(_jit.warps_to_blocks(A.n_rows * _slabs(feat)), args)


def _spmm_coo_atomic(A: COO, X: Array, out: Array) -> None:
    feat = X.shape[1]
    kernel = _jit.load("spmm.cu", "spmm_coo_atomic", X.dtype, A.index_dtype, WEIGHTED=_weighted(A))
    data = X if A.data is None else A.data  # never read where unweighted
    out.fill(0)
    args = (A.row, A.col, data, X, out, np.int64(A.nnz), np.int64(feat))
    kernel(_jit.warps_to_blocks(A.nnz * _slabs(feat)), args)


def _spmm_csr_numba(A: CSR, X: Array, out: Array) -> None:
    from . import cpu

    cpu.spmm_csr(A, X, out)


def _spmm_coo_numba(A: COO, X: Array, out: Array) -> None:
    from . import cpu

    cpu.spmm_coo(A, X, out)


def _spmm_through_csr(A: Format, X: Array, out: Array) -> None:
    _registry.run("spmm", A.tocsr(), X, out=out)


def _slice(feat: int, *arrays: Array) -> tuple[int, int]:
    """Lanes of a sub-warp and features of a lane: 16-byte loads where alignment allows them."""
    itemsize = arrays[0].itemsize
    wide = 16 // itemsize
    if feat % wide or any(array.data.ptr % 16 for array in arrays):
        return (8, 1) if feat <= 8 else (32, 1)
    return (4, wide) if feat * itemsize <= 64 else (8, wide)


def _slabs(feat: int) -> int:
    return -(-feat // _jit.WARP)


def _weighted(A: Format) -> bool:
    return A.data is not None


# What each kernel can run


def _on_gpu(A: Format, X: Array) -> list[str]:
    return [] if is_cupy(X) else ["the arrays are on the CPU"]


def _on_cpu(A: Format, X: Array) -> list[str]:
    return ["the arrays are on a GPU"] if is_cupy(X) else []


def _same_dtype(A: Format, X: Array) -> list[str]:
    if A.data is None or A.data.dtype == X.dtype:
        return []
    return [
        f"A.data is {A.data.dtype} but X is {X.dtype}: cast one, A.astype(X.dtype) for instance"
    ]


def _is(format: str) -> Any:
    return lambda A, X: [] if A.format == format else [f"A is {A.format.upper()}"]


def _not_csr(A: Format, X: Array) -> list[str]:
    return ["A is CSR already"] if A.format == "csr" else []


def _counts_in_32_bits(A: Format, X: Array) -> list[str]:
    items, feat = A.nnz + A.n_rows, X.shape[1]
    blocks = (items // ITEMS + 1) * feat
    if max(items, feat, blocks) <= MOST_ITEMS:
        return []
    return [f"{A.nnz} entries, {A.n_rows} rows x {feat} features: too many for 32-bit counts"]


def _wide_sums(A: Format, X: Array) -> list[str]:
    if X.dtype.itemsize >= 4:
        return []
    return [f"atomics would sum in {X.dtype}"]


def _all(*conditions: Any) -> Any:
    return lambda A, X: [reason for condition in conditions for reason in condition(A, X)]


_registry.register(
    *(
        _registry.Kernel("spmm", name, _all(*conditions, _same_dtype), run, **facts)
        for name, run, conditions, facts in (
            (
                "spmm_csr_balanced",
                _spmm_csr_balanced,
                (_on_gpu, _is("csr"), _counts_in_32_bits),
                {},
            ),
            ("spmm_csr_rows", _spmm_csr_rows, (_on_gpu, _is("csr")), {}),
            (
                "spmm_coo_atomic",
                _spmm_coo_atomic,
                (_on_gpu, _is("coo"), _wide_sums),
                {"deterministic": False},
            ),
            ("spmm_csr_numba", _spmm_csr_numba, (_on_cpu, _is("csr")), {}),
            ("spmm_coo_numba", _spmm_coo_numba, (_on_cpu, _is("coo")), {}),
            (
                "spmm_through_csr",
                _spmm_through_csr,
                (_not_csr,),
                {"note": "converts to CSR at each call: keep A.tocsr(), or a Graph"},
            ),
        )
    )
)

_VARIANTS = list(itertools.product(("int32", "int64"), (True, False)))
_jit.declare(
    "spmm.cu",
    *(
        _jit.expression(
            "spmm_csr_balanced", dtype, index, LANES=lanes, VEC=vector, WEIGHTED=weighted
        )
        for dtype, wide in zip(VALUE_DTYPES, (8, 8, 4, 2), strict=True)
        for lanes, vector in ((4, wide), (8, wide), (8, 1), (32, 1))
        for index, weighted in _VARIANTS
    ),
    *(
        _jit.expression("spmm_csr_rows", dtype, index, WEIGHTED=weighted)
        for dtype in VALUE_DTYPES
        for index, weighted in _VARIANTS
    ),
    *(
        _jit.expression("spmm_coo_atomic", dtype, index, WEIGHTED=weighted)
        for dtype in ("float32", "float64")
        for index, weighted in _VARIANTS
    ),
)
