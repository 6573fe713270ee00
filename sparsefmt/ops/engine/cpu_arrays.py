"""NumPy arrays as loops on the CPU take them: flat, contiguous, 2-byte floats widened."""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from .memory import rows_apart


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
    A: CSR, dtype: Any, row_scale: Array | None, col_scale: Array | None
) -> Array:
    """Compute ``r[i] c[j]`` at each entry, 1 for a missing scale."""
    factors = np.ones(A.nnz, dtype)
    if row_scale is not None:
        factors *= np.repeat(row_scale, A.lengths)
    if col_scale is not None:
        factors *= col_scale[A.indices]
    return factors
