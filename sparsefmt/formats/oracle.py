"""Slow and obvious readers of stored entries, and comparisons of results.

Public as ``sparsefmt.testing``.  Nothing here calls a conversion or a kernel, so that nothing here
shares their bugs; arithmetic is float64.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Array, is_cupy
from .base import Format

if TYPE_CHECKING:
    from .cbsr import CBSR
    from .compressed import COO, CSC, Compressed
    from .sgt import SGT

_Entry = tuple[int, int, float]


def stored_entries(A: Format) -> list[tuple[int, int, float]]:
    """Return every stored entry as ``(row, column, value)``, in the order of storage.

    Explicit zeros and duplicates are listed; the values of an unweighted structure are 1.0.

    Examples
    --------
    >>> import sparsefmt
    >>> stored_entries(sparsefmt.CSR([0, 2, 2], [1, 0], [0.5, 0.0], shape=(2, 3)))
    [(0, 1, 0.5), (0, 0, 0.0)]
    """
    A = A.to("cpu")
    return list(_READERS[A.format](A))


def _values(A: Format) -> list[float]:
    ones = np.ones(A.nnz)
    values: list[float] = (ones if A.data is None else float64(A.data).ravel()).tolist()
    return values


def _coo(A: "COO") -> Iterator[_Entry]:
    yield from zip(A.row.tolist(), A.col.tolist(), _values(A), strict=True)


def _csr(A: "Compressed") -> Iterator[_Entry]:
    ptr, minor, values = A.indptr.tolist(), A.indices.tolist(), _values(A)
    for major in range(len(ptr) - 1):
        for e in range(ptr[major], ptr[major + 1]):
            yield major, minor[e], values[e]


def _csc(A: "CSC") -> Iterator[_Entry]:
    for col, row, value in _csr(A):
        yield row, col, value


def _sgt(A: "SGT") -> Iterator[_Entry]:
    height, width = A.tile
    windows, tiles, values = A.window_ptr.tolist(), A.tile_ptr.tolist(), _values(A)
    for window in range(len(windows) - 1):
        for tile in range(windows[window], windows[window + 1]):
            columns = A.columns[tile].tolist()
            for e in range(tiles[tile], tiles[tile + 1]):
                row, col = divmod(int(A.slots[e]), width)
                # Values stay in CSR order: `order` says which of them this entry's is.
                yield window * height + row, columns[col], values[int(A.order[e])]


def _cbsr(A: "CBSR") -> Iterator[_Entry]:
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


def float64(a: Array) -> Array:
    """Copy values to the host, as float64."""
    host = a.get() if is_cupy(a) else np.asarray(a)
    return host.astype(np.float64)


def dot(x: Array, y: Array) -> float:
    """Compute ``sum(x * y)`` over all cells, in float64."""
    return float(np.vdot(float64(x), float64(y)))


def assert_close(actual: Any, expected: Any, *, bound: Any) -> None:
    """Raise unless ``|actual - expected| <= bound`` in every cell.

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
    got, want = float64(actual), float64(expected)
    assert got.shape == want.shape, f"shapes differ: {got.shape} and {want.shape}"
    limit = np.broadcast_to(float64(bound), want.shape)
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
    """Raise unless both matrices store the same entries, in whatever formats and order.

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
        Counter((row, col, value.hex()) for row, col, value in stored_entries(matrix))
        for matrix in (A, B)
    )
    missing, extra = ([*part.elements()] for part in (mine - theirs, theirs - mine))
    assert mine == theirs, (
        f"{B!r} lacks {len(missing)} entries of {A!r}, the first {missing[:3]}, "
        f"and has {len(extra)} others, the first {extra[:3]}"
    )
