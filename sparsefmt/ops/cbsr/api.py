"""The product with row-balanced sparse features (CBSR): SpGEMM of MaxK-GNN."""

from typing import Any

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, namespace
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.compressed import CSR
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.choose import pointer
from ..matmul.api import REDUCTIONS


def spgemm(
    A: Format,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Sparse matrix times row-balanced sparse features: the aggregation behind a MaxK.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * S[j, f]`` over the stored entries ``e = (i, j)`` of
    row ``i``; every ``a[e]`` is 1 for an unweighted ``A``, ``r`` and ``c`` are 1 where left out.
    Only the ``k`` stored places of a row of ``S`` are touched: what ``S`` does not store adds
    nothing, though ``a[e]`` be Inf or NaN.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        Other formats are converted to CSR, at each call.
    S : CBSR, shape (n_cols, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 are
        computed in float32.
    reduce : "sum" or "mean"
        ``mean`` divides by the number of stored entries of the row of ``A``, whether or not their
        rows of ``S`` store the feature.  A row without entries gives 0.
    row_scale : array, shape (n_rows,), optional
        ``r``, of the dtype of ``S``, or float32 beside 2-byte features.
    col_scale : array, shape (n_cols,), optional
        ``c``, of the same dtypes.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of the dtype and device of ``S``, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        Dense, on the device of the inputs, of the dtype of ``S``.

    Raises
    ------
    ShapeError
        If ``S`` has not one row per column of ``A``, a scale is not 1-D with one factor per row or
        column, or ``out`` has not the result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format or ``S`` no CBSR, ``S`` has another dtype than ``A.data``, or a
        scale or ``out`` has a dtype that does not fit.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``reduce`` is neither.

    Notes
    -----
    Deterministic.  Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |S[j, f]|``.
    MaxK-GNN (ASPLOS'24), section 4.1.
    """
    A = engine_checks.sparse("A", A)
    engine_checks.choice("reduce", reduce, REDUCTIONS[:2])
    S = balanced("S", S, A)
    if A.data is not None:
        engine_checks.same_dtype("S", S, "A", A)
    row_scale = factors("row_scale", row_scale, A, "rows", "S", S)
    col_scale = factors("col_scale", col_scale, A, "columns", "S", S)
    inputs = [row_scale, col_scale, *S._arrays().values(), *A._arrays().values()]
    out = engine_checks.output(out, shape=(A.n_rows, S.n_cols), like=S.data, inputs=inputs)
    options = {"reduce": reduce, "row_scale": row_scale, "col_scale": col_scale}
    return choose.run("spgemm", A, S, out=out, **options)


def balanced(name: str, S: object, A: Format, like: tuple[str, Array] | None = None) -> CBSR:
    """Row-balanced features, one row per column of ``A``, on its device; as wide as the others."""
    if not isinstance(S, CBSR):
        raise DtypeError(f"{name} is a {type(S).__name__}: give a CBSR, maxk(X, k) for instance.")
    if S.n_rows != A.n_cols:
        raise ShapeError(
            f"{name} has {S.n_rows} rows but A has {A.n_cols} columns: {name} needs one row per "
            f"column of A ({name}.shape == {S.shape}, A.shape == {A.shape})."
        )
    if like is not None and like[1].shape[1] != S.n_cols:
        raise ShapeError(
            f"{name} has {S.n_cols} columns but {like[0]} has shape {like[1].shape}: give both the "
            "same feature width."
        )
    checks.same_device(name, S.indices, "A", A._indices)
    return S


def factors(
    name: str, value: Any, A: Format, axis: str, other_name: str, other: Any
) -> Array | None:
    """Factors of the dtype of the features, or float32 beside 2-byte ones, as kernels take them."""
    found = engine_checks.factors(name, value, A=A, axis=axis)
    if found is not None and not (other.dtype.itemsize == 2 and found.dtype == np.float32):
        engine_checks.same_dtype(name, found, other_name, other)
    return engine_checks.factors(name, found, A=A, axis=axis, like=other)


# Launchers


def _spgemm_gpu(
    A: CSR, S: CBSR, *, out: Array, reduce: str, row_scale: Array | None, col_scale: Array | None
) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    structure, dtype = matmul_cuda.structure(A), str(S.dtype)
    workspace = memory(cuda.spgemm_workspace(structure, dtype, S.n_cols), out)
    cuda.spgemm(
        structure,
        dtype,
        feat=S.n_cols,
        k=S.k,
        index_bytes=S.indices.itemsize,
        indices=pointer(S.indices),
        values=pointer(S.data),
        data=pointer(A.data),
        row_scale=pointer(row_scale),
        col_scale=pointer(col_scale),
        mean=reduce == "mean",
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def _spgemm_numba(
    A: CSR, S: CBSR, *, out: Array, reduce: str, row_scale: Array | None, col_scale: Array | None
) -> None:
    from ..engine import cpu

    structure, features = (A.indptr, A.indices, A.data), (S.indices, S.data)
    cpu.spgemm(*structure, *features, row_scale, col_scale, out, mean=reduce == "mean")


def memory(size: int, like: Array) -> Array | None:
    """So many bytes on the device of ``like``; None for none."""
    return namespace(like).empty(size, np.uint8) if size else None


def _rows() -> tuple[choose.Kernel, ...]:
    gpu, cpu = (
        choose.all_of(place, choose.is_format("csr")) for place in (choose.on_gpu, choose.on_cpu)
    )
    return (
        choose.Kernel("spgemm", "spgemm_csr_cbsr", gpu, _spgemm_gpu),
        choose.Kernel("spgemm", "spgemm_csr_cbsr_numba", cpu, _spgemm_numba),
        choose.through_csr("spgemm"),
    )


choose.register(*_rows())
