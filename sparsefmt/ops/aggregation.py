"""Aggregation by a chosen method, and the scaling of edges that normalises it."""

from typing import Any

import numpy as np

from .. import _primitives as primitives
from .._arrays import Array, allocating, namespace, on_device_of
from ..base import Format
from ..errors import UnsupportedError
from . import _check
from .matmul import spmm


def aggregate(A: Format, X: Array, *, method: str = "auto") -> Array:
    """Sum of each vertex's in-neighbours, ``Y = A @ X``, by gather-apply-scatter or -reduce.

    ``Y[i, f] = sum_e a[e] * X[j, f]`` over the stored entries ``e = (i, j)`` of row ``i``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    X : array, shape (n_cols, feat)
        As for ``spmm``.
    method : "auto", "gas" or "gar"
        ``gas`` takes the entries of a COO in whatever order they come and adds each to its row,
        atomically on a GPU (not deterministic there; float16 and bfloat16 add up in a float32
        workspace); ``gar`` sums the rows of a CSR.  A matrix in another format is converted, at
        each call.  ``auto`` scatters a COO and reduces all else.

    Returns
    -------
    array, shape (n_rows, feat)

    Raises
    ------
    UnsupportedError
        If ``method`` is unknown.
    ShapeError, DtypeError, DeviceError
        As ``spmm``.

    Notes
    -----
    GAS pays where rows are short and a sort costs more than it saves.  fuseGNN (ICCAD'20),
    section 3.
    """
    A = _check.sparse("A", A)
    _check.choice("method", method, ("auto", "gas", "gar"))
    if method == "auto":
        method = "gas" if A.format == "coo" else "gar"
    X = _check.features("X", X, A=A)
    _check.values_like(A, X)
    return spmm(A.tocoo() if method == "gas" else A.tocsr(), X)


def scale(A: Format, row: Array | None = None, col: Array | None = None) -> Any:
    """``diag(row) · A · diag(col)`` as a sparse matrix: the same structure with scaled values.

    ``b[e] = row[i] * a[e] * col[j]`` for the stored entry ``e = (i, j)``; ``a[e]`` is 1 for an
    unweighted ``A``, and a factor that is left out is 1.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    row : array, shape (n_rows,), optional
    col : array, shape (n_cols,), optional
        Of the dtype of ``A.data``; for an unweighted ``A`` both of one dtype, float16, bfloat16,
        float32 or float64, which the result has.  2-byte products are rounded once.

    Returns
    -------
    the format of ``A``
        Sharing its index arrays; ``A`` itself if both factors are left out.

    Raises
    ------
    ShapeError
        If ``row`` or ``col`` is not 1-D with one factor per row or column.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.

    Notes
    -----
    Deterministic.  ``spmm`` takes both factors itself and spares this pass over the values.
    """
    A = _check.sparse("A", A)
    row = _check.factors("row", row, A=A, axis="rows")
    col = _check.factors("col", col, A=A, axis="columns")
    given = [(name, one) for name, one in (("row", row), ("col", col)) if one is not None]
    if not given:
        return A
    name, like = given[0] if A.data is None else ("A.data", A.data)
    for other, factor in given:
        _check.same_dtype(other, factor, name, like)
    quiet = np.errstate(over="ignore", under="ignore", invalid="ignore")  # as the kernels
    with on_device_of(like), allocating(f"values of {A.nnz} entries"), quiet:
        rows, cols = _places(A)
        wide = like.dtype if like.dtype.itemsize >= 4 else np.dtype(np.float32)
        products: Array = None if A.data is None else A.data.astype(wide)
        for factor, places in ((row, rows), (col, cols)):
            if factor is not None:
                found = factor.astype(wide, copy=False)[places]
                products = found if products is None else namespace(found).multiply(found, products)
        return A._replace(data=products.astype(like.dtype, copy=False))


def _places(A: Any) -> tuple[Any, Any]:
    """Row and column of each value, in the order and shape in which the format keeps them."""
    if A.format == "coo":
        return A.row, A.col
    if A.format == "cbsr":
        return namespace(A.indices).arange(A.n_rows)[:, None], A.indices
    if A.format == "sgt":
        A = A.tocsr()  # whose order an SGT's values have
    if A.format not in ("csr", "csc"):
        raise UnsupportedError(f"A is {A.format.upper()}: convert it, A.tocsr() for instance.")
    major = primitives.expand(A.indptr, A.nnz)
    return (major, A.indices) if A.format == "csr" else (A.indices, major)
