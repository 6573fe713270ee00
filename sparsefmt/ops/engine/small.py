"""Small work on the CPU: one thread, and loops that NumPy and SciPy bring compiled.

The loops of this package are compiled by numba: 1 s to import it and to set it up, 0.5 to 4 s for
each loop, and 10 to 8000 µs for a team of threads.  Small work is done sooner without.  The sizes
of a call alone decide, so that the same call always rounds in the same way.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..._caches import store
from ...formats import primitives
from ...formats.arrays import Array, DType
from ...formats.compressed import CSR
from .memory import rows_apart

#: Multiply-adds that one thread does in at most 2 ms, twice the time of a loop of this package on
#: one core.
MOST = 1 << 22
#: Multiply-adds of graph attention, whose loops take 7 s to compile: at most 40 ms.
MOST_OF_ATTENTION = 1 << 25
#: Ones in the place of values, by dtype: shared, never written to, and never longer than ``MOST``.
_ones: dict[Any, Array] = store({})


def reasons_against(work: int, most: int | None = None) -> list[str]:
    """List the reason against a small loop of ``work`` multiply-adds: more than ``most``."""
    most = MOST if most is None else most
    if work <= most:
        return []
    return [f"{work} multiply-adds are more than the {most} of small work"]


def by_entries(A: CSR, *arrays: Any, **_: Any) -> list[str]:
    """List the reasons against one thread for work on each entry, in all heads of an array."""
    return reasons_against((A.nnz + A.n_rows) * heads_of(arrays[0]))


def heads_of(scores: Array | None) -> int:
    """Count the heads of scores, or of one value each."""
    return 1 if scores is None or scores.ndim == 1 else scores.shape[1]


def ones(count: int, dtype: DType) -> Array:
    """Return ``count`` ones of memory that calls share: nobody may write to them."""
    result = _ones.get(dtype)
    if result is None or len(result) < count:
        result = np.ones(max(count, 1024), dtype)
        if count <= MOST:
            _ones[dtype] = result
    return result[:count]


def rows_of(A: CSR) -> Array:
    """Return the row of each entry, kept with the structure."""
    return A._built().ask("rows", lambda: primitives.expand(A.indptr, A.nnz))


def blocks_of(A: CSR) -> list[primitives.Blocks]:
    """Return the blocks of long rows, kept with the structure."""
    return A._built().ask("blocks", lambda: primitives.blocks_of(A.indptr))


def long_columns_of(A: CSR) -> primitives.LongColumns:
    """Return the entries of long columns, kept with the structure."""
    return A._built().ask(
        "long columns", lambda: primitives.long_columns_of(A.indptr, A.indices, A.n_cols)
    )


def longest_row(A: CSR) -> int:
    """Return the number of entries of the longest row, kept with the structure."""
    return A._built().ask("longest", lambda: int(A.lengths.max(initial=0)))


def weights(A: CSR, like: Array, values: Array | None, col_scale: Array | None) -> Array:
    """Compute ``a[e] c[j]`` at each entry, 1 for a missing factor, in the dtype of sums."""
    kind = np.float32 if like.dtype.itemsize == 2 else like.dtype
    if col_scale is None:
        return ones(A.nnz, kind) if values is None else values_of(values, like)
    factors = col_scale[A.indices].astype(kind, copy=False)
    if values is not None:
        factors *= values
    return factors


def reduce_rows(reduce: np.ufunc, A: CSR, values: Array, empty: float) -> Array:
    """Reduce (heads, nnz) values over each row: (heads, n_rows), ``empty`` in rows without any."""
    result = np.full((len(values), A.n_rows), empty, values.dtype)
    filled = np.flatnonzero(A.indptr[1:] > A.indptr[:-1])
    if len(filled):
        result[:, filled] = reduce.reduceat(values, A.indptr[filled], axis=1)
    return result


def parts(count: int, width: int, most: int) -> Iterator[slice]:
    """Yield slices of ``count`` items, of ``width`` values each: ``most`` values, or one item."""
    return primitives.parts(slice(0, count), max(most // max(width, 1), 1))


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute without NumPy's warnings: infinities and NaN are results like others."""
    silent: Callable[..., Any] = np.errstate(all="ignore")(function)
    return silent


@quietly
def scale_rows(A: CSR, sums: Array, row_scale: Array | None, reduce: str) -> None:
    """Divide sums by the number of entries for a mean, multiply by a scale; not empty rows."""
    lengths = np.diff(A.indptr)
    if reduce == "mean":
        sums /= np.maximum(lengths, 1).astype(sums.dtype)[:, None]
    if row_scale is not None:
        factors = np.where(lengths > 0, row_scale, 1)
        sums *= factors.astype(sums.dtype, copy=False)[:, None]


# NumPy arrays as loops take them: flat, contiguous, 2-byte floats widened


def wide(a: Array) -> Array:
    """Return ``a``, its 2-byte floats as float32."""
    return a.astype(np.float32) if a.dtype.itemsize == 2 else a


def values_of(values: Array | None, like: Array) -> Array:
    """Return one value each, contiguous, 2-byte floats as float32; none for None."""
    array: Array = np.empty(0, like.dtype) if values is None else np.ascontiguousarray(values)
    return array if array.dtype.itemsize != 2 else array.astype(np.float32)


def packed(a: Array) -> Array:
    """Return ``a`` as one axis, contiguous, its 2-byte floats as float32."""
    return np.ascontiguousarray(wide(a)).reshape(-1)


def flat(a: Array) -> tuple[Array, int]:
    """Return the memory of ``a`` from its first to its last value, and its row stride.

    A copy's memory where rows are not contiguous, overlap or are not aligned.
    """
    a = a if a.dtype.itemsize != 2 else a.astype(np.float32)
    if not rows_apart(a):
        a = np.ascontiguousarray(a) if not a.flags.c_contiguous else a.copy()
    if a.flags.c_contiguous:
        return a.reshape(-1), a[0].size if len(a) else 0
    stride = a.strides[0] // a.itemsize
    size = (len(a) - 1) * stride + a[0].size
    return np.lib.stride_tricks.as_strided(a, (size,), (a.itemsize,)), stride


def factors_at_entries(
    A: CSR, dtype: DType, row_scale: Array | None, col_scale: Array | None
) -> Array:
    """Compute ``r[i] c[j]`` at each entry, 1 for a missing scale."""
    factors = np.ones(A.nnz, dtype)
    if row_scale is not None:
        factors *= np.repeat(row_scale, A.lengths)
    if col_scale is not None:
        factors *= col_scale[A.indices]
    return factors
