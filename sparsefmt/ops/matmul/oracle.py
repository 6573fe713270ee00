"""Slow and obvious: what each operation computes, one stored entry at a time, and how exactly.

Public as ``sparsefmt.testing``.  Nothing here calls a conversion or a kernel, so that nothing here
shares their bugs; arithmetic is float64.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ...errors import ShapeError
from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.oracle import dot, float64, stored_entries

_F = TypeVar("_F", bound=Format)
_REDUCTIONS = ("sum", "mean", "max", "min")


def spmm_oracle(
    A: Format, X: Array, *, reduce: str = "sum", row_scale: Any = None, col_scale: Any = None
) -> Array:
    """``A @ X`` in float64, one stored entry after another.

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
    r, c = _factors(row_scale, A.n_rows), _factors(col_scale, A.n_cols)
    with np.errstate(invalid="ignore", over="ignore"):
        Y, degree = _reduced(A, c[:, None] * X, reduce)
        return np.where(degree > 0, r[:, None] * Y, 0.0)


def _reduced(A: Format, X: Array, reduce: str) -> tuple[Array, Array]:
    """The reduction before the row's factor, and each row's number of entries."""
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
    dtype: Any = None,
    factor: float = 2.0,
    reduce: str = "sum",
    row_scale: Any = None,
    col_scale: Any = None,
) -> Array:
    """How far ``A @ X``, computed in ``dtype``, may lie from the oracle.

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
    eps, least = _precision(X.dtype if dtype is None else dtype)
    X = np.abs(_features("X", X, A.n_cols))
    r, c = (
        np.abs(_factors(one, size)) for one, size in ((row_scale, A.n_rows), (col_scale, A.n_cols))
    )
    selects = reduce in ("max", "min")
    with np.errstate(invalid="ignore", over="ignore"):
        size, degree = _reduced(_magnitudes(A), c[:, None] * X, "max" if selects else "sum")
        size = size * r[:, None]
    # A row without entries has bound 0: its result must be exactly zero.
    terms = np.minimum(degree, 1) if selects else degree
    bound: Array = factor * terms * (eps * size + least)
    return bound / np.maximum(degree, 1) if reduce == "mean" else bound


def dot_bound(A: Any, x: Array, y: Array, *, factor: float = 2.0) -> float:
    """How far ``dot(A @ x, y)`` and ``dot(x, A.T @ y)`` may lie from each other.

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
    coarse = max(x.dtype, y.dtype, key=_spacing)
    forth = error_bound(A, x, dtype=coarse, factor=factor)
    back = error_bound(A.T, y, dtype=coarse, factor=factor)
    exact = dot(spmm_oracle(_magnitudes(A), np.abs(float64(x))), np.abs(float64(y)))
    # The two dots add the same products in different orders, in float64.
    rounding: float = factor * (x.size + y.size) * float(np.finfo(np.float64).eps) * exact
    return dot(forth, np.abs(float64(y))) + dot(np.abs(float64(x)), back) + rounding


def sddmm_oracle(A: Format, X: Array, Y: Array) -> Array:
    """``<X[i], Y[j]>`` at each stored entry ``(i, j)``, in the order in which ``A`` stores them.

    Parameters
    ----------
    A : CSR, shape (n, m)
        Or another format; mind its order.
    X, Y : array, shape (n, feat) and (m, feat), or (n, heads, feat) and (m, heads, feat)

    Returns
    -------
    numpy.ndarray of float64, shape (nnz,) or (nnz, heads)

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 1, 2], [1, 0], shape=(2, 2))
    >>> X = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm_oracle(A, X, X).tolist()
    [11.0, 11.0]
    """
    X, Y = float64(X), float64(Y)
    found = np.zeros((A.nnz, *X.shape[1:-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for e, (row, col, _) in enumerate(stored_entries(A)):
            found[e] = (X[row] * Y[col]).sum(axis=-1)
    return found


def sddmm_bound(A: Format, X: Array, Y: Array, *, factor: float = 2.0) -> Array:
    """How far products of ``X`` and ``Y``, computed in their dtype, may lie from the oracle.

    ``factor * feat * (eps * sum |x| |y| + least normal number)``; shape as ``sddmm_oracle``.
    """
    eps, least = _precision(X.dtype)
    size = sddmm_oracle(A, np.abs(float64(X)), np.abs(float64(Y)))
    return factor * X.shape[-1] * (eps * size + least)


def spgemm_oracle(
    A: Format, S: CBSR, *, reduce: str = "sum", row_scale: Any = None, col_scale: Any = None
) -> Array:
    """``A @ S`` for row-balanced ``S`` in float64, one stored entry of ``A`` after another.

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
    r, c = _factors(row_scale, A.n_rows), _factors(col_scale, A.n_cols)
    Y, degree = np.zeros((A.n_rows, S.n_cols)), _degrees(A)[:, None]
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
    row_scale: Any = None,
    col_scale: Any = None,
    factor: float = 2.0,
) -> Array:
    """How far ``A @ S``, computed in the dtype of ``S``, may lie from the oracle.

    ``factor * deg * (eps * reduce |r| |a| |c| |s| + least normal number)``.
    """
    eps, least = _precision(S.dtype)
    r, c = (None if one is None else np.abs(float64(one)) for one in (row_scale, col_scale))
    size = spgemm_oracle(_magnitudes(A), _magnitudes(S), reduce=reduce, row_scale=r, col_scale=c)
    with np.errstate(over="ignore"):
        return factor * _degrees(A)[:, None] * (eps * size + least)


def sspmm_oracle(A: Format, dY: Array, S: CBSR, **options: Any) -> Array:
    """The gradient of ``spgemm`` in ``S.data``: ``A.T @ dY`` in float64, at the places of ``S``.

    Options are those of ``spgemm``; shape (n_cols, k).
    """
    return _at_places(spmm_oracle, A, dY, S, **options)


def sspmm_bound(A: Format, dY: Array, S: CBSR, **options: Any) -> Array:
    """How far that gradient, computed in the dtype of ``dY``, may lie from the oracle."""
    return _at_places(error_bound, A, dY, S, **options)


def _at_places(
    product: Callable[..., Array], A: Any, dY: Array, S: CBSR, *, reduce: str = "sum",
    row_scale: Any = None, col_scale: Any = None,
) -> Array:  # fmt: skip
    """What ``product`` says of ``diag(c) A.T diag(r) dY``, where ``S`` stores."""
    r = _factors(row_scale, A.n_rows)
    r = r / np.maximum(_degrees(A), 1) if reduce == "mean" else r
    whole = product(A.T, dY, row_scale=col_scale, col_scale=r)
    return np.take_along_axis(whole, S.to("cpu").indices.astype(np.int64), axis=1)


def sddmm_cbsr_oracle(A: Format, X: Array, S: CBSR) -> Array:
    """``<X[i], S[j]>`` over what row-balanced ``S`` stores, at each entry; as ``sddmm_oracle``."""
    X, places, values = float64(X), S.to("cpu").indices, float64(S.data)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.array(
            [X[row, places[col]] @ values[col] for row, col, _ in stored_entries(A)], np.float64
        )


def sddmm_cbsr_bound(A: Format, X: Array, S: CBSR, *, factor: float = 2.0) -> Array:
    """How far such products, computed in the dtype of ``X``, may lie from the oracle.

    ``factor * k * (eps * sum |x| |s| + least normal number)``.
    """
    eps, least = _precision(X.dtype)
    size = sddmm_cbsr_oracle(A, np.abs(float64(X)), _magnitudes(S))
    return factor * S.k * (eps * size + least)


def edge_softmax_oracle(A: Format, scores: Array) -> Array:
    """Softmax of each row's scores in float64, head by head.

    Parameters
    ----------
    A : CSR, shape (n, m)
    scores : array, shape (nnz,) or (nnz, heads)
        In the order of the entries of ``A``.

    Returns
    -------
    numpy.ndarray of float64, shape of ``scores``
        NaN in rows whose largest score is infinite, and where a score is NaN.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 3], [0, 1, 0], shape=(2, 2))
    >>> edge_softmax_oracle(A, np.array([5.0, 5.0, -1e4])).tolist()
    [0.5, 0.5, 1.0]
    """
    scores = float64(scores)
    found = np.zeros(scores.shape)
    with np.errstate(invalid="ignore"):
        for places in _places_by_row(A):
            powers = np.exp(scores[places] - scores[places].max(axis=0))
            found[places] = powers / powers.sum(axis=0)
    return found


def edge_softmax_bound(A: Format, scores: Array, *, factor: float = 2.0) -> Array:
    """How far a softmax, computed in the scores' dtype, may lie from the oracle.

    ``factor * p * eps * (deg + 4 + d + D)`` with ``d`` the score's distance from the row's largest
    and ``D`` its mean under ``p``: an argument of exp that is off by ``d * eps`` makes its power
    off by that part.  And ``factor`` times the least normal number.
    """
    eps, least = _precision(scores.dtype)
    scores, p = float64(scores), edge_softmax_oracle(A, scores)
    bound = np.zeros(p.shape)
    with np.errstate(invalid="ignore"):
        for places in _places_by_row(A):
            far = scores[places].max(axis=0) - scores[places]
            mean = np.where(p[places] > 0, p[places] * far, 0).sum(axis=0)
            share = np.where(p[places] > 0, p[places] * (len(places) + 4 + far + mean), 0)
            bound[places] = factor * (eps * share + least)
    return bound


def edge_softmax_backward_oracle(A: Format, probabilities: Array, grad: Array) -> Array:
    """``p * (grad - sum of p * grad over the row)`` in float64, head by head."""
    p, grad = float64(probabilities), float64(grad)
    found = np.zeros(p.shape)
    for places in _places_by_row(A):
        mean = (p[places] * grad[places]).sum(axis=0)
        found[places] = p[places] * (grad[places] - mean)
    return found


def edge_softmax_backward_bound(
    A: Format, probabilities: Array, grad: Array, *, factor: float = 2.0
) -> Array:
    """How far that gradient, computed in the dtype of ``grad``, may lie from the oracle.

    ``factor * (deg + 2) * (eps * |p| * (|grad| + sum |p| |grad|) + least normal number)``.
    """
    eps, least = _precision(grad.dtype)
    p, grad = np.abs(float64(probabilities)), np.abs(float64(grad))
    bound = np.zeros(p.shape)
    for places in _places_by_row(A):
        size = p[places] * (grad[places] + (p[places] * grad[places]).sum(axis=0))
        bound[places] = factor * (len(places) + 2) * (eps * size + least)
    return bound


def _places_by_row(A: Format) -> list[list[int]]:
    """The numbers of the entries of each row that has some."""
    found: dict[int, list[int]] = {}
    for e, (row, _, _) in enumerate(stored_entries(A)):
        found.setdefault(row, []).append(e)
    return list(found.values())


def _features(name: str, X: Array, rows: int) -> Array:
    if X.ndim != 2 or X.shape[0] != rows:
        raise ShapeError(f"{name} has shape {X.shape}: give ({rows}, feat), one row per vertex.")
    return float64(X)


def _factors(values: Any, size: int) -> Array:
    return np.ones(size) if values is None else float64(values)


def _degrees(A: Format) -> Array:
    """Stored entries of each row."""
    return np.bincount([row for row, _, _ in stored_entries(A)], minlength=A.n_rows)


def _magnitudes(A: _F) -> _F:
    A = A.to("cpu")
    return A if A.data is None else A.with_data(np.abs(A.data))


def _spacing(dtype: Any) -> float:
    return _precision(dtype)[0]


def _precision(dtype: Any) -> tuple[float, float]:
    """Relative spacing, and the magnitude below which results may be lost."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return 2.0**-7, 2.0**-126
    found = np.finfo(dtype)  # which bfloat16 is unknown to
    return float(found.eps), float(found.smallest_subnormal if dtype.itemsize == 2 else found.tiny)
