"""The product with row-balanced sparse features (CBSR): SpGEMM of MaxK-GNN."""

from typing import Any

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.table import Op, Price, csr_kernels
from . import cuda

REDUCTIONS = ("sum", "mean")


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
    row_scale, col_scale : array, shape (n_rows,) and (n_cols,), optional
        ``r`` and ``c``, of the dtype of ``S``, or float32 beside 2-byte features.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of the dtype and device of ``S``, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        Dense, on the device of the inputs, of the dtype of ``S``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``, with ``S`` for ``X``; also if ``S`` is no CBSR, or ``reduce`` neither.

    Notes
    -----
    Deterministic.  Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |S[j, f]|``.
    MaxK-GNN (ASPLOS'24), section 4.1.
    """
    A = engine_checks.sparse("A", A)
    engine_checks.choice("reduce", reduce, REDUCTIONS)
    S = balanced("S", S, A)
    if A.data is not None:
        engine_checks.same_dtype("S", S, "A", A)
    row_scale = factors("row_scale", row_scale, A, "rows", "S", S)
    col_scale = factors("col_scale", col_scale, A, "columns", "S", S)
    if out is not None:
        inputs = [row_scale, col_scale, *S._arrays().values()]
        engine_checks.output(out, shape=(A.n_rows, S.n_cols), like=S.data, inputs=inputs, A=A)
    options = {"row_scale": row_scale, "col_scale": col_scale, "reduce": reduce, "out": out}
    return choose.run(SPGEMM, A, S.indices, S.data, S.n_cols, values=A.data, **options)


def balanced(name: str, S: object, A: Format, like: tuple[str, Array] | None = None) -> CBSR:
    """Check row-balanced features: a row per column of ``A``, on its device, as wide as others."""
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
    if not engine_checks.beside(S.indices, A):
        checks.same_device(name, S.indices, "A", A._indices)
    return S


def factors(
    name: str, value: Any, A: Format, axis: str, other_name: str, other: Any
) -> Array | None:
    """Check for factors of the dtype of the features, or float32 beside 2-byte ones."""
    if value is None:
        return None
    found: Any = engine_checks.factors(name, value, A=A, axis=axis)
    if not (other.dtype.itemsize == 2 and found.dtype == np.float32):
        engine_checks.same_dtype(name, found, other_name, other)
    return found


# The row of the table


def _rows(S: Any, columns: Any, data: Any, feat: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, feat), data),)


def _price(S: Any, columns: Any, data: Any, feat: int, values: Any = None, *_: Any) -> Price:
    """Every entry reads ``k`` columns and values; every row of the product is written."""
    entries = S.nnz * columns.shape[1]
    weights = 0 if values is None else S.nnz * data.itemsize
    read = entries * (columns.itemsize + data.itemsize) + S.nnz * 4 + weights
    return Price(read + S.n_rows * feat * data.itemsize, 2 * entries)


SPGEMM = Op(
    "spgemm",
    "Tensor columns, Tensor kept, SymInt feat, Tensor? values, Tensor? row_scale, "
    "Tensor? col_scale, str reduce",
    results=_rows,
    kernels=(
        *csr_kernels(cuda.spgemm, "spgemm_csr_cbsr", "spgemm_csr_cbsr_numba"),
        choose.convert_to_csr("spgemm"),
    ),
    price=_price,
    narrowed=("*",),
    functions=("spgemm",),
)
