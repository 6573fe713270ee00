"""Slow and obvious: what products of row-balanced features compute; see matmul's oracle."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.oracle import float64, stored_entries
from ..matmul.oracle import degrees, error_bound, factors, magnitudes, precision_of, spmm_oracle


def spgemm_oracle(
    A: Format,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> Array:
    """Compute ``A @ S`` for row-balanced ``S`` in float64, one stored entry of ``A`` after another.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * S[j, f]`` as ``spmm_oracle`` for "sum" and "mean",
    but what ``S`` does not store never touches ``A``.

    Returns
    -------
    numpy.ndarray of float64, shape (n_rows, feat)

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 2], [0, 1], [np.inf, 10.0], shape=(2, 2))
    >>> S = sparsefmt.CBSR(np.array([[0], [2]], np.uint8), [[1.0], [2.0]], shape=(2, 3))
    >>> spgemm_oracle(A, S).tolist()
    [[inf, 0.0, 20.0], [0.0, 0.0, 0.0]]
    """
    places, values = S.to("cpu").indices, float64(S.data)
    r, c = factors(row_scale, A.n_rows), factors(col_scale, A.n_cols)
    Y, degree = np.zeros((A.n_rows, S.n_cols)), degrees(A)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        for row, col, value in stored_entries(A):
            Y[row, places[col]] += value * (c[col] * values[col])
        share = np.maximum(degree, 1) if reduce == "mean" else 1
        return np.where(degree > 0, r[:, None] * (Y / share), 0.0)


def spgemm_bound(
    A: Format,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    factor: float = 2.0,
) -> Array:
    """Bound how far ``A @ S``, computed in the dtype of ``S``, may lie from the oracle.

    ``factor * deg * (eps * reduce |r| |a| |c| |s| + least normal number)``.
    """
    eps, least = precision_of(S.dtype)
    r, c = (None if scale is None else np.abs(float64(scale)) for scale in (row_scale, col_scale))
    size = spgemm_oracle(magnitudes(A), magnitudes(S), reduce=reduce, row_scale=r, col_scale=c)
    with np.errstate(over="ignore"):
        return factor * degrees(A)[:, None] * (eps * size + least)


def sspmm_oracle(A: Format, dY: Array, S: CBSR, **options: Any) -> Array:
    """Return the gradient of ``spgemm`` in ``S.data``: ``A.T @ dY`` in float64 at those of ``S``.

    Options are those of ``spgemm``; shape (n_cols, k).
    """
    return _at_places(spmm_oracle, A, dY, S, **options)


def sspmm_bound(A: Format, dY: Array, S: CBSR, **options: Any) -> Array:
    """Bound how far that gradient, computed in the dtype of ``dY``, may lie from the oracle."""
    return _at_places(error_bound, A, dY, S, **options)


def _at_places(
    product: Callable[..., Array], A: Any, dY: Array, S: CBSR, *, reduce: str = "sum",
    row_scale: Array | None = None, col_scale: Array | None = None,
) -> Array:  # fmt: skip
    """Take ``product`` of ``diag(c) A.T diag(r) dY`` where ``S`` stores."""
    r = factors(row_scale, A.n_rows)
    r = r / np.maximum(degrees(A), 1) if reduce == "mean" else r
    dense = product(A.T, dY, row_scale=col_scale, col_scale=r)
    return np.take_along_axis(dense, S.to("cpu").indices.astype(np.int64), axis=1)


def sddmm_cbsr_oracle(A: Format, X: Array, S: CBSR) -> Array:
    """Compute ``sddmm_oracle`` over what row-balanced ``S`` stores: ``<X[i], S[j]>`` at entries."""
    X, places, values = float64(X), S.to("cpu").indices, float64(S.data)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.array(
            [X[row, places[col]] @ values[col] for row, col, _ in stored_entries(A)], np.float64
        )


def sddmm_cbsr_bound(A: Format, X: Array, S: CBSR, *, factor: float = 2.0) -> Array:
    """Bound how far such products, computed in the dtype of ``X``, may lie from the oracle.

    ``factor * k * (eps * sum |x| |s| + least normal number)``.
    """
    eps, least = precision_of(X.dtype)
    size = sddmm_cbsr_oracle(A, np.abs(float64(X)), magnitudes(S))
    return factor * S.k * (eps * size + least)
