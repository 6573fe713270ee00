"""Slow and obvious: what products compute, one stored entry at a time, and how exactly.

Public as ``sparsefmt.testing``.  Neither this oracle nor those of other rooms call a conversion or
a kernel, so that they share no bugs with them; arithmetic is float64.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ...errors import ShapeError
from ...formats.arrays import Array, DType
from ...formats.base import Format
from ...formats.oracle import dot, float64, stored_entries

_F = TypeVar("_F", bound=Format)
_REDUCTIONS = ("sum", "mean", "max", "min")


def spmm_oracle(
    A: Format, X: Array, *, reduce: str = "sum", row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``A @ X`` in float64, one stored entry after another.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * X[j, f]`` over the entries ``e = (i, j)`` of row i.
    An implicit zero never touches ``X``: an infinity there stays out of rows that do not store its
    column.  A row without entries gives 0; in a max or min NaN wins.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, m)
    X : array, shape (m, feat)
        NumPy or CuPy, any float dtype.
    reduce : "sum", "mean", "max" or "min"
    row_scale : array, shape (n,), optional
        ``r``
    col_scale : array, shape (m,), optional
        ``c``

    Returns
    -------
    numpy.ndarray of float64, shape (n, feat)

    Raises
    ------
    ShapeError
        If ``X`` does not have one row per column of ``A``.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 2], [0, 2], [1.0, 10.0], shape=(2, 3))
    >>> X = np.array([[1.0], [2.0], [3.0]])
    >>> spmm_oracle(A, X).tolist(), spmm_oracle(A, X, reduce="max").tolist()
    ([[31.0], [0.0]], [[30.0], [0.0]])
    """
    X = _features("X", X, A.n_cols)
    r, c = factors(row_scale, A.n_rows), factors(col_scale, A.n_cols)
    with np.errstate(invalid="ignore", over="ignore"):
        Y, degree = _reduced(A, c[:, None] * X, reduce)
        return np.where(degree > 0, r[:, None] * Y, 0.0)


def _reduced(A: Format, X: Array, reduce: str) -> tuple[Array, Array]:
    """Return the reduction before the row's factor, and each row's number of entries."""
    assert reduce in _REDUCTIONS, f"reduce is {reduce!r}: use one of {_REDUCTIONS}"
    Y, degree = np.zeros((A.n_rows, X.shape[1])), np.zeros((A.n_rows, 1))
    for row, col, value in stored_entries(A):
        product = value * X[col]
        if reduce in ("sum", "mean") or degree[row] == 0:
            Y[row] += product
        else:  # NumPy's: NaN wins
            Y[row] = (np.maximum if reduce == "max" else np.minimum)(Y[row], product)
        degree[row] += 1
    return (Y / np.maximum(degree, 1) if reduce == "mean" else Y), degree


def error_bound(
    A: Format,
    X: Array,
    *,
    dtype: DType = None,
    factor: float = 2.0,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> Array:
    """Bound how far ``A @ X``, computed in ``dtype``, may lie from the oracle.

    ``factor * deg * eps * sum |a| |x|`` for each output, where ``deg`` counts the stored entries of
    its row, whatever the order of the sum; and ``deg`` times the least normal number, for products
    that underflow or are flushed to zero (float16: the least subnormal one).  A mean divides that
    by ``deg``; a maximum or minimum has ``deg = 1`` and the largest ``|a| |x|`` for the sum.

    Parameters
    ----------
    A, X, reduce, row_scale, col_scale
        As for ``spmm_oracle``.
    dtype : dtype, optional
        Of the result; ``X.dtype`` if left out.
    factor : float
        2 covers the rounding of the products, of the sums and of the result.

    Returns
    -------
    numpy.ndarray of float64, shape (n, feat)
    """
    eps, least = precision_of(X.dtype if dtype is None else dtype)
    X = np.abs(_features("X", X, A.n_cols))
    r, c = (
        np.abs(factors(scale, size))
        for scale, size in ((row_scale, A.n_rows), (col_scale, A.n_cols))
    )
    selects = reduce in ("max", "min")
    with np.errstate(invalid="ignore", over="ignore"):
        size, degree = _reduced(magnitudes(A), c[:, None] * X, "max" if selects else "sum")
        size = size * r[:, None]
    # A row without entries has bound 0: its result must be exactly zero.
    terms = np.minimum(degree, 1) if selects else degree
    bound: Array = factor * terms * (eps * size + least)
    return bound / np.maximum(degree, 1) if reduce == "mean" else bound


def dot_bound(A: Any, x: Array, y: Array, *, factor: float = 2.0) -> float:
    """Bound how far ``dot(A @ x, y)`` and ``dot(x, A.T @ y)`` may lie from each other.

    ``x`` has shape (n_cols, feat) and ``y`` (n_rows, feat); the products are computed in the
    coarser of their dtypes, the dots by ``dot``.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 1, 3], [0, 0, 1], [1.0, 2.0, 3.0], shape=(2, 2))
    >>> x, y = np.ones((2, 1)), np.ones((2, 1))
    >>> left, right = dot(spmm_oracle(A, x), y), dot(x, spmm_oracle(A.T, y))
    >>> assert abs(left - right) <= dot_bound(A, x, y)
    """
    coarse = max(x.dtype, y.dtype, key=lambda dtype: precision_of(dtype)[0])
    forth = error_bound(A, x, dtype=coarse, factor=factor)
    back = error_bound(A.T, y, dtype=coarse, factor=factor)
    exact = dot(spmm_oracle(magnitudes(A), np.abs(float64(x))), np.abs(float64(y)))
    # The two dots add the same products in different orders, in float64.
    rounding: float = factor * (x.size + y.size) * float(np.finfo(np.float64).eps) * exact
    return dot(forth, np.abs(float64(y))) + dot(np.abs(float64(x)), back) + rounding


def by_heads(
    function: Callable[..., Array], A: Any, X: Array, values: Array, **options: Any
) -> Array:
    """Compute ``function(A, X, **options)`` with the values of each head: an oracle or its bound.

    ``values`` has shape (nnz, heads), in the order of A's data, and ``X`` (m, heads, feat) or (m,
    feat): the result has shape (n, heads, feat).
    """
    of_heads = [X] * values.shape[1] if X.ndim == 2 else np.moveaxis(X, 1, 0)
    pairs = zip(of_heads, values.T, strict=True)
    results = [function(A.with_data(a), x, **options) for x, a in pairs]
    return np.stack(results, 1) if results else np.zeros((A.n_rows, 0, X.shape[-1]))


def _features(name: str, X: Array, rows: int) -> Array:
    if X.ndim != 2 or X.shape[0] != rows:
        raise ShapeError(f"{name} has shape {X.shape}: give ({rows}, feat), one row per vertex.")
    return float64(X)


def factors(values: Array, size: int) -> Array:
    """Return scales in float64, ones for none."""
    return np.ones(size) if values is None else float64(values)


def degrees(A: Format) -> Array:
    """Count the stored entries of each row."""
    return np.bincount([row for row, _, _ in stored_entries(A)], minlength=A.n_rows)


def magnitudes(A: _F) -> _F:
    """Return the matrix on the CPU with the magnitudes of its values."""
    A = A.to("cpu")
    return A if A.data is None else A.with_data(np.abs(A.data))


def precision_of(dtype: DType) -> tuple[float, float]:
    """Return the relative spacing, and the magnitude below which results may be lost."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return 2.0**-7, 2.0**-126
    limits = np.finfo(dtype)  # which bfloat16 is unknown to
    return float(limits.eps), float(
        limits.smallest_subnormal if dtype.itemsize == 2 else limits.tiny
    )
