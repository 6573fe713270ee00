"""Checks of a format's arrays; each error names the argument, its value and the mend.

On a GPU a full check is one kernel that keeps the lowest offending position of each kind, and one
synchronisation that reads them.
"""

import operator
from functools import cache
from typing import Any

import numpy as np

from ._arrays import (
    INDEX_DTYPES,
    VALUE_DTYPES,
    Array,
    as_array,
    device_of,
    is_cupy,
    namespace,
    on_device_of,
)
from .errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    ShapeError,
    UnsupportedError,
)


def shape(value: object) -> tuple[int, int]:
    """A shape as two non-negative Python integers."""
    try:
        rows, cols = (operator.index(size) for size in value)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"shape is {value!r}: give two integers (n_rows, n_cols).") from error
    if rows < 0 or cols < 0:
        raise ShapeError(f"shape is {(rows, cols)}: sizes cannot be negative.")
    return rows, cols


def index_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` if indices may have it."""
    found = _dtype(name, dtype)
    if found not in INDEX_DTYPES:
        raise DtypeError(f"{name} is {found}: indices are int32 or int64, cast with .astype().")
    return found


def value_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` if values may have it."""
    found = _dtype(name, dtype)
    if found.name not in VALUE_DTYPES:
        raise DtypeError(
            f"{name} is {found}: values are float16, bfloat16, float32 or float64, "
            "cast with .astype()."
        )
    return found


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise DtypeError(f"{name} is {dtype!r}, which is not a dtype.") from error


def sizes_fit(shape: tuple[int, int], nnz: int, dtype: np.dtype[Any]) -> None:
    """Whether ``dtype`` can index the shape and count the entries."""
    limit = int(np.iinfo(dtype).max)
    if max(*shape, nnz) > limit:
        raise IndexRangeError(
            f"shape {shape} with {nnz} entries goes beyond {dtype} (at most {limit}): "
            "use int64 indices."
        )


def indices(**arrays: Array) -> None:
    """1-D index arrays of one dtype on one device."""
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ShapeError(f"{name} has shape {array.shape}: give a 1-D array.")
        index_dtype(f"{name}.dtype", array.dtype)
        if array.dtype != first.dtype:
            raise DtypeError(
                f"{name} is {array.dtype} but {first_name} is {first.dtype}: "
                "give both the same index dtype."
            )
        same_device(name, array, first_name, first)


def same_device(name: str, array: Array, other_name: str, other: Array) -> None:
    """Both arrays on one device."""
    if device_of(array) != device_of(other):
        raise DeviceError(
            f"{name} is on {device_of(array)} but {other_name} is on {device_of(other)}: "
            'move one of them (.to("cuda"), .get()).'
        )


def values(data: Array | None, expected: tuple[int, ...], *, like: Array) -> None:
    """Values of a known dtype, one per stored entry, beside the indices."""
    if data is None:
        return
    value_dtype("data.dtype", data.dtype)
    if data.shape != expected:
        raise ShapeError(
            f"data has shape {data.shape} but the structure stores {expected}: "
            "give one value per stored entry, or None for an unweighted structure."
        )
    same_device("data", data, "the index array", like)


def pointers(name: str, array: Array, expected: int, why: str) -> None:
    """A pointer array of the right length."""
    if array.shape != (expected,):
        raise ShapeError(f"{name} has shape {array.shape}, expected ({expected},): {why}.")


def dense(name: str, array: Array) -> None:
    """A dense matrix."""
    if array.ndim != 2:
        raise ShapeError(f"{name} has shape {array.shape}: give a 2-D array.")


def selection(axis: str, key: Any, size: int, *, like: Array) -> Array:
    """The chosen places along an axis of ``size`` as integers in ``[0, size)``."""
    xp = namespace(like)
    if isinstance(key, slice):
        return xp.arange(*key.indices(size), dtype=like.dtype)
    if isinstance(key, int | np.integer):
        raise UnsupportedError(f"{axis}: {key} is one place; use the slice {key}:{key + 1}.")
    chosen = as_array(axis, key)
    if chosen.ndim != 1 or chosen.dtype.kind not in "biu":
        raise DtypeError(f"{axis} is {key!r}: use a slice, a boolean mask or 1-D integers.")
    same_device(axis, chosen, "the matrix", like)
    if chosen.dtype.kind == "b":
        if len(chosen) != size:
            raise ShapeError(f"{axis}: the mask has {len(chosen)} places for {size} {axis}.")
        return xp.flatnonzero(chosen).astype(like.dtype)
    if len(chosen) and not -size <= int(chosen.min()) <= int(chosen.max()) < size:  # synchronize!
        raise IndexRangeError(f"{axis}: {int(chosen.min())} .. {int(chosen.max())} of {size} {axis}.")
    return xp.where(chosen < 0, chosen + size, chosen).astype(like.dtype)


def monotone(name: str, ptr: Array, last: int) -> None:
    """Pointers that start at 0, never decrease and end at ``last``."""
    found = _first_faults(ptr, ptr[:0], last, 1)
    raise_pointer_fault(name, ptr, last, found)


def compressed(indptr: Array, minor: Array, n_minor: int, axis: str) -> None:
    """Monotone ``indptr`` and indices in ``[0, n_minor)``."""
    faults = _first_faults(indptr, minor, len(minor), n_minor)
    raise_pointer_fault("indptr", indptr, len(minor), faults)
    raise_index_fault("indices", minor, n_minor, axis, faults[3])


def in_range(name: str, array: Array, size: int, axis: str) -> None:
    """Indices in ``[0, size)``."""
    xp_zero = np.zeros(1, array.dtype)
    ptr = xp_zero if not is_cupy(array) else array[:0]
    raise_index_fault(name, array, size, axis, _first_faults(ptr, array, 0, size)[3])


def raise_pointer_fault(name: str, ptr: Array, last: int, faults: tuple[int, ...]) -> None:
    """Turn pointer faults, if any, into a ``FormatError``."""
    if faults[0] >= 0:
        raise FormatError(f"{name}[0] is {int(ptr[0])}: the first pointer must be 0.")
    if faults[1] >= 0:
        i = faults[1]
        raise FormatError(
            f"{name} decreases from {int(ptr[i])} to {int(ptr[i + 1])} at position {i + 1}: "
            "pointers must not decrease."
        )
    if faults[2] >= 0:
        raise FormatError(f"{name}[-1] is {int(ptr[-1])} but {last} entries are stored: both agree.")


def raise_index_fault(name: str, array: Array, size: int, axis: str, fault: int) -> None:
    """Turn an index fault, if any, into an ``IndexRangeError``."""
    if fault >= 0:
        raise IndexRangeError(
            f"{name}[{fault}] is {int(array.ravel()[fault])} but there are {size} {axis}: "
            f"indices count from 0 to {axis} - 1."
        )


def _first_faults(ptr: Array, minor: Array, last: int, n_minor: int) -> tuple[int, ...]:
    """Lowest position with: wrong first pointer, decrease, wrong last pointer, bad index; else -1."""
    if not is_cupy(minor):
        return _first_faults_numpy(ptr, minor, last, n_minor)
    with on_device_of(minor):
        import cupy

        clean = np.iinfo(np.int64).max
        faults = cupy.full(4, clean, cupy.int64)
        size = max(len(ptr), minor.size)
        if size:
            _faults_kernel()(ptr, minor, len(ptr), minor.size, last, n_minor, faults, size=size)
        return tuple(-1 if fault == clean else int(fault) for fault in faults.get())  # synchronize!


def _first_faults_numpy(ptr: Array, minor: Array, last: int, n_minor: int) -> tuple[int, ...]:
    first = 0 if len(ptr) and ptr[0] != 0 else -1
    falls = np.flatnonzero(ptr[1:] < ptr[:-1])
    end = 0 if len(ptr) and ptr[-1] != last else -1
    bad = -1
    if minor.size and (minor.min() < 0 or minor.max() >= n_minor):
        bad = int(np.flatnonzero((minor.ravel() < 0) | (minor.ravel() >= n_minor))[0])
    return first, int(falls[0]) if len(falls) else -1, end, bad


@cache
def _faults_kernel() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "raw I ptr, raw M minor, int64 n_ptr, int64 n_minor_entries, int64 last, int64 n_minor",
        "raw int64 faults",
        """
        if (i < n_ptr) {
            long long here = ptr[i];
            if (i == 0 && here != 0) atomicMin(&faults[0], 0LL);
            if (i + 1 < n_ptr && ptr[i + 1] < here) atomicMin(&faults[1], (long long)i);
            if (i + 1 == n_ptr && here != last) atomicMin(&faults[2], 0LL);
        }
        if (i < n_minor_entries) {
            long long index = minor[i];
            if (index < 0 || index >= n_minor) atomicMin(&faults[3], (long long)i);
        }
        """,
        "sparsefmt_first_faults",
    )
