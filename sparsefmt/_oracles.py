"""Slow and obvious: what a matrix stores and what it computes, one entry at a time.

Public as ``sparsefmt.testing``.  Nothing here calls a conversion or a kernel, so that nothing here
shares their bugs; arithmetic is float64.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ._arrays import Array, is_cupy
from .base import Format
from .errors import ShapeError

_Entry = tuple[int, int, float]


def stored_entries(A: Format) -> list[tuple[int, int, float]]:
    """Every stored entry as ``(row, column, value)``, in the order in which ``A`` stores it.

    Explicit zeros and duplicates are listed; the values of an unweighted structure are 1.0.

    Examples
    --------
    >>> import sparsefmt
    >>> stored_entries(sparsefmt.CSR([0, 2, 2], [1, 0], [0.5, 0.0], shape=(2, 3)))
    [(0, 1, 0.5), (0, 0, 0.0)]
    """
    A = A.to("cpu")
    return list(_READERS[A.format](A))


def _values(A: Any) -> list[float]:
    ones = np.ones(A.nnz)
    found: list[float] = (ones if A.data is None else _float64(A.data).ravel()).tolist()
    return found


def _coo(A: Any) -> Iterator[_Entry]:
    yield from zip(A.row.tolist(), A.col.tolist(), _values(A), strict=True)


def _csr(A: Any) -> Iterator[_Entry]:
    ptr, minor, values = A.indptr.tolist(), A.indices.tolist(), _values(A)
    for major in range(len(ptr) - 1):
        for e in range(ptr[major], ptr[major + 1]):
            yield major, minor[e], values[e]


def _csc(A: Any) -> Iterator[_Entry]:
    for col, row, value in _csr(A):
        yield row, col, value


def _sgt(A: Any) -> Iterator[_Entry]:
    height, width = A.tile
    windows, tiles, values = A.window_ptr.tolist(), A.tile_ptr.tolist(), _values(A)
    for window in range(len(windows) - 1):
        for tile in range(windows[window], windows[window + 1]):
            columns = A.columns[tile].tolist()
            for e in range(tiles[tile], tiles[tile + 1]):
                row, col = divmod(int(A.slots[e]), width)
                # Values stay in CSR order: `order` says which of them this entry's is.
                yield window * height + row, columns[col], values[int(A.order[e])]


def _cbsr(A: Any) -> Iterator[_Entry]:
    values = iter(_values(A))
    for row, columns in enumerate(A.indices.tolist()):
        for col in columns:
            yield row, col, next(values)


_READERS: dict[str, Callable[[Any], Iterator[_Entry]]] = {
    "coo": _coo,
    "csr": _csr,
    "csc": _csc,
    "sgt": _sgt,
    "cbsr": _cbsr,
}


def _float64(a: Array) -> Array:
    host = a.get() if is_cupy(a) else np.asarray(a)
    return host.astype(np.float64)


def _features(name: str, X: Array, rows: int) -> Array:
    if X.ndim != 2 or X.shape[0] != rows:
        raise ShapeError(f"{name} has shape {X.shape}: give ({rows}, feat), one row per vertex.")
    return _float64(X)


def spmm_oracle(A: Format, X: Array) -> Array:
    """``A @ X`` in float64, one stored entry after another.

    An implicit zero never touches ``X``: an infinity there stays out of rows that do not store its
    column.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, m)
    X : array, shape (m, feat)
        NumPy or CuPy, any float dtype.

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
    >>> spmm_oracle(A, np.array([[1.0], [2.0], [3.0]])).tolist()
    [[31.0], [0.0]]
    """
    X = _features("X", X, A.n_cols)
    Y = np.zeros((A.n_rows, X.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for row, col, value in stored_entries(A):
            Y[row] += value * X[col]
    return Y


def error_bound(A: Format, X: Array, *, dtype: Any = None, factor: float = 2.0) -> Array:
    """How far ``A @ X``, computed in ``dtype``, may lie from the oracle.

    ``factor * deg * eps * sum |a| |x|`` for each output, where ``deg`` counts the stored entries of
    its row, whatever the order of the sum; and ``deg`` times the least normal number, for products
    that underflow or are flushed to zero (float16: the least subnormal one).

    Parameters
    ----------
    A, X
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
    bound, degree = np.zeros((A.n_rows, X.shape[1])), np.zeros((A.n_rows, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        for row, col, value in stored_entries(A):
            bound[row] += abs(value) * X[col]
            degree[row] += 1
    # A row without entries has bound 0: its result must be exactly zero.
    return factor * degree * (eps * bound + least)


def _spacing(dtype: Any) -> float:
    return _precision(dtype)[0]


def _precision(dtype: Any) -> tuple[float, float]:
    """Relative spacing, and the magnitude below which results may be lost."""
    dtype = np.dtype(dtype)
    if dtype.name == "bfloat16":
        return 2.0**-7, 2.0**-126
    found = np.finfo(dtype)  # which bfloat16 is unknown to
    return float(found.eps), float(found.smallest_subnormal if dtype.itemsize == 2 else found.tiny)


def dot(x: Array, y: Array) -> float:
    """``sum(x * y)`` over all cells, in float64."""
    return float(np.vdot(_float64(x), _float64(y)))


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
    >>> assert_close(left, right, bound=dot_bound(A, x, y))
    """
    coarse = max(x.dtype, y.dtype, key=_spacing)
    forth = error_bound(A, x, dtype=coarse, factor=factor)
    back = error_bound(A.T, y, dtype=coarse, factor=factor)
    exact = dot(spmm_oracle(_magnitudes(A), np.abs(_float64(x))), np.abs(_float64(y)))
    # The two dots add the same products in different orders, in float64.
    rounding: float = factor * (x.size + y.size) * float(np.finfo(np.float64).eps) * exact
    return dot(forth, np.abs(_float64(y))) + dot(np.abs(_float64(x)), back) + rounding


def _magnitudes(A: Format) -> Format:
    A = A.to("cpu")
    return A if A.data is None else A.with_data(np.abs(A.data))


def assert_close(actual: Any, expected: Any, *, bound: Any) -> None:
    """Fail unless ``|actual - expected| <= bound`` in every cell.

    Where ``expected`` is infinite or NaN, ``actual`` must be the same.

    Parameters
    ----------
    actual, expected : array or float
        NumPy or CuPy, of one shape.
    bound : array or float
        From ``error_bound`` or ``dot_bound``, or derived from them.

    Raises
    ------
    AssertionError
        Naming the cell that misses its bound by most.
    """
    got, want = _float64(actual), _float64(expected)
    assert got.shape == want.shape, f"shapes differ: {got.shape} and {want.shape}"
    limit = np.broadcast_to(_float64(bound), want.shape)
    finite = np.isfinite(want)  # elsewhere no distance makes sense: only equality counts
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        good = same | (finite & (np.abs(got - want) <= limit))
        excess = np.where(good, -1.0, np.nan_to_num(np.abs(got - want) - limit, nan=np.inf))
    if good.all():
        return
    cell = np.unravel_index(int(excess.argmax()), want.shape)
    raise AssertionError(
        f"{int((~good).sum())} of {want.size} cells are off; at {tuple(map(int, cell))}: "
        f"{got[cell]!r}, expected {want[cell]!r} within {limit[cell]!r}"
    )


def assert_same_matrix(A: Format, B: Format) -> None:
    """Fail unless both store the same entries, as multisets: whatever the formats and the order.

    Explicit zeros and duplicates count, -0.0 differs from 0.0, NaN equals NaN.  Value and index
    dtypes may differ; an unweighted structure is not the same as one whose values are all 1.

    Examples
    --------
    >>> import sparsefmt
    >>> A = sparsefmt.COO([1, 0], [0, 2], [1.0, 2.0], shape=(2, 3))
    >>> assert_same_matrix(A, A.tocsr())
    """
    assert A.shape == B.shape, f"shapes differ: {A!r} and {B!r}"
    assert (A.data is None) == (B.data is None), f"only one is weighted: {A!r} and {B!r}"
    mine, theirs = (  # by hex, NaN equals NaN and -0.0 differs from 0.0
        Counter((row, col, value.hex()) for row, col, value in stored_entries(one))
        for one in (A, B)
    )
    missing, extra = ([*part.elements()] for part in (mine - theirs, theirs - mine))
    assert mine == theirs, (
        f"{B!r} lacks {len(missing)} entries of {A!r}, the first {missing[:3]}, "
        f"and has {len(extra)} others, the first {extra[:3]}"
    )
