"""Checks of a format's arrays; each error names the argument, its value and the mend.

Each full check has two halves: on a GPU the kernels of ``_faults`` find the lowest offending place
of every kind with one synchronisation, on a CPU NumPy does.
"""

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import (
    DeviceError,
    DtypeError,
    FormatError,
    IndexRangeError,
    ShapeError,
    SparseFmtError,
    UnsupportedError,
)
from . import faults as formats_faults
from .arrays import (
    INDEX_DTYPES,
    VALUE_DTYPES,
    Array,
    as_array,
    device_of,
    is_cupy,
    namespace,
    on_device_of,
)

#: Sizes of a shape go to this: a pointer array of int64 over it can still be addressed.
MAX_SIZE = np.iinfo(np.int64).max // 8 - 1


def integer(
    name: str,
    value: object,
    *,
    least: int | None = None,
    error: type[SparseFmtError] = ShapeError,
) -> int:
    """Check for an integer, ``least`` or more, and give it as Python's; else raise that error."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError as reason:
        raise error(f"{name} is {value!r}: give an integer.") from reason
    if least is not None and found < least:
        raise error(f"{name} is {found}: give {least} or more.")
    return found


def shape(value: object) -> tuple[int, int]:
    """A shape as two non-negative Python integers."""
    try:
        rows, cols = (int(operator.index(size)) for size in value)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"shape is {value!r}: give two integers (n_rows, n_cols).") from error
    if rows < 0 or cols < 0:
        raise ShapeError(f"shape is {(rows, cols)}: sizes cannot be negative.")
    if max(rows, cols) > MAX_SIZE:
        raise IndexRangeError(f"shape is {(rows, cols)}: sizes go to {MAX_SIZE}.")
    return rows, cols


#: Look at all indices before each operation, and wait after each kernel.  Read once: a look into
#: the environment takes about as long as all else that Python does in a launch.
DEBUG = os.environ.get("SPARSEFMT_DEBUG") == "1"


def level(name: str, value: object) -> None:
    """A validation level."""
    if value not in ("full", "cheap"):
        raise UnsupportedError(f'{name} is {value!r}: use "full" or "cheap".')


def index_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` if indices may have it."""
    found = any_dtype(name, dtype)
    if found not in INDEX_DTYPES:
        raise DtypeError(f"{name} is {found}: indices are int32 or int64, cast with .astype().")
    return found


_PLAIN = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))


def value_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` in native byte order if values may have it."""
    if isinstance(dtype, np.dtype) and dtype in _PLAIN:
        return dtype
    found = any_dtype(name, dtype)
    if found.name not in VALUE_DTYPES:
        raise DtypeError(
            f"{name} is {found}: values are float16, bfloat16, float32 or float64, "
            "cast with .astype()."
        )
    return found if found.isnative else found.newbyteorder("=")


def any_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """``dtype`` if NumPy knows it."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise DtypeError(
            f"{name} is {dtype!r}, which is no NumPy dtype (bfloat16 is one after importing "
            "ml_dtypes): give one."
        ) from error
    return found


def sizes_fit(shape: tuple[int, int], nnz: int, dtype: np.dtype[Any]) -> None:
    """Whether ``dtype`` can hold every size: rows, columns and entries.

    The sizes themselves, not only the indices below them: then pointers, transposes and loop
    bounds of the same dtype cannot overflow either.
    """
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
        index_like(name, array, first_name, first)


def index_like(name: str, array: Array, other_name: str, other: Array) -> None:
    """An index array of the same dtype and on the same device as the other."""
    index_dtype(f"{name}.dtype", array.dtype)
    if array.dtype != other.dtype:
        raise DtypeError(
            f"{name} is {array.dtype} but {other_name} is {other.dtype}: "
            "give both the same index dtype."
        )
    same_device(name, array, other_name, other)


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
        raise ShapeError(f"{name} has shape {array.shape}: give ({expected},), {why}.")


def dense(name: str, array: Array) -> None:
    """A dense matrix."""
    if array.ndim != 2:
        raise ShapeError(f"{name} has shape {array.shape}: give a 2-D array.")


def selection(axis: str, key: Any, size: int, *, like: Array) -> Array:
    """The chosen places along an axis of ``size`` as integers in ``[0, size)``."""
    xp = namespace(like)
    if isinstance(key, slice):
        try:
            return xp.arange(*key.indices(size), dtype=like.dtype)
        except (TypeError, ValueError) as error:
            raise DtypeError(f"{axis}: {key} is no slice of integers ({error}).") from error
    if isinstance(key, bool | np.bool_ | float | complex | str | None | type(...)):
        raise DtypeError(f"{axis}: {key!r} chooses none; use a slice, a mask or 1-D integers.")
    if isinstance(key, int | np.integer):
        raise UnsupportedError(f"{axis}: {key} is one place; use the slice {key}:{int(key) + 1}.")
    chosen = as_array(axis, key, beside=like)
    if chosen.ndim != 1 or chosen.dtype.kind not in "biu":
        raise DtypeError(
            f"{axis}: the key has dtype {chosen.dtype} and shape {chosen.shape}; use a slice, a "
            "boolean mask or 1-D integers."
        )
    same_device(axis, chosen, "the matrix", like)
    if chosen.dtype.kind == "b":
        if len(chosen) != size:
            raise ShapeError(
                f"{axis}: the mask has {len(chosen)} places for {size} {axis}; give one for each."
            )
        return xp.flatnonzero(chosen).astype(like.dtype)  # synchronize!
    if len(chosen):
        low, high = int(chosen.min()), int(chosen.max())  # synchronize!
        if low < -size or high >= size:
            raise IndexRangeError(
                f"{axis}: the key goes from {low} to {high} but there are {size} {axis}; "
                f"use {-size} to {size - 1}."
            )
    chosen = chosen.astype(like.dtype)  # exact: in range, and the range fits
    return xp.where(chosen < 0, chosen + size, chosen)


def coordinates(row: Array, col: Array, shape: tuple[int, int]) -> None:
    """Rows and columns inside ``shape``."""
    if is_cupy(row):
        with on_device_of(row):
            faults = formats_faults.lowest(2, ("coordinates", len(row), (row, col, *shape)))
    else:
        faults = first_outside(row, shape[0]), first_outside(col, shape[1])
    raise_index_fault("row", row, shape[0], "rows", faults[0])
    raise_index_fault("col", col, shape[1], "columns", faults[1])


def compressed(indptr: Array, minor: Array, n_minor: int, axis: str) -> None:
    """Monotone ``indptr`` and indices in ``[0, n_minor)``."""
    nnz = len(minor)
    if is_cupy(minor):
        args = (indptr, minor, len(indptr), nnz, n_minor)
        with on_device_of(minor):
            faults = formats_faults.lowest(4, ("compressed", max(len(indptr), nnz), args))
    else:
        faults = (*first_pointer_faults(indptr, nnz), first_outside(minor, n_minor))
    raise_pointer_fault("indptr", indptr, nnz, faults[:3])
    raise_index_fault("indices", minor, n_minor, axis, faults[3])


def balanced(indices: Array, n_cols: int) -> None:
    """Columns in ``[0, n_cols)``, ascending and distinct in every row."""
    n_rows, k = indices.shape
    if is_cupy(indices):
        with on_device_of(indices):
            faults = formats_faults.lowest(2, ("balanced", n_rows * k, (indices, k, n_cols)))
    else:
        fall = first_true(indices[:, 1:] <= indices[:, :-1])
        row, place = divmod(fall, max(k - 1, 1))
        faults = first_outside(indices, n_cols), -1 if fall < 0 else row * k + place + 1
    raise_index_fault("indices", indices, n_cols, "columns", faults[0])
    if faults[1] >= 0:
        row, place = divmod(faults[1], k)
        left, right = (int(column) for column in indices[row, place - 1 : place + 1])
        raise FormatError(
            f"indices[{row}, {place - 1}:{place + 1}] is {[left, right]}: columns of a row must "
            "ascend and be distinct, sort them."
        )


def in_range(name: str, array: Array, size: int, axis: str) -> None:
    """Indices in ``[0, size)``."""
    if is_cupy(array):
        with on_device_of(array):
            (fault,) = formats_faults.lowest(1, ("in_range", array.size, (array, size)))
    else:
        fault = first_outside(array, size)
    raise_index_fault(name, array, size, axis, fault)


def raise_pointer_fault(name: str, ptr: Array, last: int, faults: Sequence[int]) -> None:
    """Turn pointer faults, if any, into a ``FormatError``."""
    first, fall, end = faults
    if first >= 0:
        raise FormatError(f"{name}[0] is {int(ptr[0])}: the first pointer must be 0.")
    if fall >= 0:
        raise FormatError(
            f"{name} decreases from {int(ptr[fall])} to {int(ptr[fall + 1])} at position "
            f"{fall + 1}: pointers must not decrease."
        )
    if end >= 0:
        raise FormatError(f"{name}[-1] is {int(ptr[-1])}: the last pointer must be {last}.")


def raise_index_fault(name: str, array: Array, size: int, axis: str, fault: int) -> None:
    """Turn an index fault, if any, into an ``IndexRangeError``."""
    if fault >= 0:
        place = np.unravel_index(fault, array.shape)
        where = ", ".join(str(int(i)) for i in place)
        mend = f"use 0 to {size - 1}, or a larger shape" if size else "store no entries"
        raise IndexRangeError(
            f"{name}[{where}] is {int(array[place])} but there are {size} {axis}: {mend}."
        )


def first_true(wrong: Array) -> int:
    """Lowest flat position that is true, -1 if none is (NumPy)."""
    at = int(wrong.argmax()) if wrong.size else 0
    return at if wrong.size and wrong.ravel()[at] else -1


def first_outside(array: Array, stop: int, start: int = 0) -> int:
    """Lowest flat position outside ``[start, stop)``, -1 if none is (NumPy)."""
    if not array.size or (array.min() >= start and array.max() < stop):
        return -1
    return first_true((array < start) | (array >= stop))


def first_pointer_faults(ptr: Array, last: int) -> tuple[int, int, int]:
    """Lowest position of: a wrong first pointer, a decrease, a wrong last one (NumPy)."""
    first = -1 if ptr[0] == 0 else 0
    end = -1 if ptr[-1] == last else 0
    return first, first_true(ptr[1:] < ptr[:-1]), end
