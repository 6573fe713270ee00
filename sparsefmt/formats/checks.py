"""Checks of a format's arrays; each error names the argument, its value and the mend.

Each full check has two halves: on a GPU the kernels of ``faults`` find the lowest offending place
of every kind with one synchronisation, on a CPU NumPy does.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

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
from . import primitives
from .arrays import (
    INDEX_DTYPES,
    VALUE_DTYPES,
    Array,
    DType,
    as_array,
    device_of,
    is_cupy,
    namespace,
    on_device_of,
)

if TYPE_CHECKING:
    from .sgt import SGT

#: Sizes of a shape go to this: a pointer array of int64 over it can still be addressed.
MAX_SIZE = np.iinfo(np.int64).max // 8 - 1


def as_index(value: Any) -> int:
    """Convert an integer of any kind to Python's; raise TypeError for all else, a bool too."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise TypeError(f"{value} is no integer")
    return operator.index(value)


def integer(
    name: str,
    value: object,
    *,
    least: int | None = None,
    error: type[SparseFmtError] = ShapeError,
) -> int:
    """Check that ``value`` is an integer, ``least`` or more; return it, or raise ``error``."""
    try:
        number = as_index(value)
    except TypeError as reason:
        raise error(f"{name} is {value!r}: give an integer.") from reason
    if least is not None and number < least:
        raise error(f"{name} is {number}: give {least} or more.")
    return number


def shape(value: object) -> tuple[int, int]:
    """Check a shape and return it as two Python integers."""
    try:
        rows, cols = (int(as_index(size)) for size in value)  # type: ignore[attr-defined]
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
    """Check a validation level: "full" or "cheap"."""
    if value not in ("full", "cheap"):
        raise UnsupportedError(f'{name} is {value!r}: use "full" or "cheap".')


def index_dtype(name: str, dtype: DType) -> np.dtype[Any]:
    """Check that indices may have ``dtype``, and return it."""
    target = any_dtype(name, dtype)
    if target not in INDEX_DTYPES:
        raise DtypeError(f"{name} is {target}: indices are int32 or int64, cast with .astype().")
    return target


_PLAIN = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))


def value_dtype(name: str, dtype: DType) -> np.dtype[Any]:
    """Check that values may have ``dtype``, and return it in native byte order."""
    if isinstance(dtype, np.dtype) and dtype in _PLAIN:
        return dtype
    target = any_dtype(name, dtype)
    if target.name not in VALUE_DTYPES:
        raise DtypeError(
            f"{name} is {target}: values are float16, bfloat16, float32 or float64, "
            "cast with .astype()."
        )
    return target if target.isnative else target.newbyteorder("=")


def any_dtype(name: str, dtype: DType) -> np.dtype[Any]:
    """Convert ``dtype`` to NumPy's; raise if NumPy knows none of that name."""
    try:
        target: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise DtypeError(
            f"{name} is {dtype!r}, which is no NumPy dtype (bfloat16 is one after importing "
            "ml_dtypes): give one."
        ) from error
    return target


def sizes_fit(shape: tuple[int, int], nnz: int, dtype: np.dtype[Any]) -> None:
    """Check that ``dtype`` can hold every size: rows, columns and entries.

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
    """Check that arrays are 1-D indices of one dtype on one device."""
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ShapeError(f"{name} has shape {array.shape}: give a 1-D array.")
        index_like(name, array, first_name, first)


def index_like(name: str, array: Array, reference_name: str, reference: Array) -> None:
    """Check that an index array has the dtype and the device of another."""
    index_dtype(f"{name}.dtype", array.dtype)
    if array.dtype != reference.dtype:
        raise DtypeError(
            f"{name} is {array.dtype} but {reference_name} is {reference.dtype}: "
            "give both the same index dtype."
        )
    same_device(name, array, reference_name, reference)


def same_device(name: str, array: Array, reference_name: str, reference: Array) -> None:
    """Check that two arrays are on one device."""
    if device_of(array) != device_of(reference):
        raise DeviceError(
            f"{name} is on {device_of(array)} but {reference_name} is on {device_of(reference)}: "
            'move one of them (.to("cuda"), .get()).'
        )


def values(data: Array | None, expected: tuple[int, ...], *, like: Array) -> None:
    """Check values: a known dtype, one per stored entry, on the device of the indices."""
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
    """Check that a pointer array has the expected length."""
    if array.shape != (expected,):
        raise ShapeError(f"{name} has shape {array.shape}: give ({expected},), {why}.")


def dense(name: str, array: Array) -> None:
    """Check that a dense matrix is 2-D."""
    if array.ndim != 2:
        raise ShapeError(f"{name} has shape {array.shape}: give a 2-D array.")


def selection(axis: str, key: Any, size: int, *, like: Array) -> Array:
    """Convert a key along an axis of ``size`` to an array of integers in ``[0, size)``."""
    xp = namespace(like)
    if isinstance(key, slice):
        try:
            return xp.arange(*key.indices(size), dtype=like.dtype)
        except (TypeError, ValueError) as error:
            raise DtypeError(f"{axis}: {key} is no slice of integers ({error}).") from error
    if isinstance(key, bool | np.bool_ | float | complex | str | None | type(...)):
        raise DtypeError(f"{axis}: {key!r} chooses none; use a slice, a mask or 1-D integers.")
    if isinstance(key, int | np.integer) and -size <= key < size:
        end = int(key) + 1 or ""
        raise UnsupportedError(f"{axis}: {key} is one place; use the slice {key}:{end}.")
    chosen = as_array(axis, key, like=like)
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
                + (f"use {-size} to {size - 1}." if size else "choose none.")
            )
    chosen = chosen.astype(like.dtype)  # exact: in range, and the range fits
    return xp.where(chosen < 0, chosen + size, chosen)


def coordinates(row: Array, col: Array, shape: tuple[int, int]) -> None:
    """Check that rows and columns lie inside ``shape``."""
    if is_cupy(row):
        faults = formats_faults.lowest(2, ("coordinates", len(row), (row, col, *shape)))
    else:
        faults = first_outside(row, shape[0]), first_outside(col, shape[1])
    raise_index_fault("row", row, shape[0], "rows", faults[0])
    raise_index_fault("col", col, shape[1], "columns", faults[1])


def compressed(indptr: Array, minor: Array, n_minor: int, axis: str) -> None:
    """Check that ``indptr`` never decreases and indices lie in ``[0, n_minor)``."""
    nnz = len(minor)
    if is_cupy(minor):
        args = (indptr, minor, len(indptr), nnz, n_minor)
        faults = formats_faults.lowest(4, ("compressed", max(len(indptr), nnz), args))
    else:
        faults = (*first_pointer_faults(indptr, nnz), first_outside(minor, n_minor))
    raise_pointer_fault("indptr", indptr, nnz, faults[:3])
    raise_index_fault("indices", minor, n_minor, axis, faults[3])


def balanced(indices: Array, n_cols: int) -> None:
    """Check that a CBSR's columns lie in ``[0, n_cols)`` and ascend, distinct, in every row."""
    n_rows, k = indices.shape
    if is_cupy(indices):
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
    """Check that indices lie in ``[0, size)``."""
    if is_cupy(array):
        (fault,) = formats_faults.lowest(1, ("in_range", array.size, (array, size)))
    else:
        fault = first_outside(array, size)
    raise_index_fault(name, array, size, axis, fault)


def raise_pointer_fault(name: str, ptr: Array, last: int, faults: Sequence[int]) -> None:
    """Raise a ``FormatError`` for the first pointer fault, if any."""
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
    """Raise an ``IndexRangeError`` for an index fault, if any."""
    if fault >= 0:
        place = np.unravel_index(fault, array.shape)
        where = ", ".join(str(int(i)) for i in place)
        mend = f"use 0 to {size - 1}, or a larger shape" if size else "store no entries"
        raise IndexRangeError(
            f"{name}[{where}] is {int(array[place])} but there are {size} {axis}: {mend}."
        )


def first_true(wrong: Array) -> int:
    """Return the lowest flat position that is true, -1 if none is (NumPy)."""
    at = int(wrong.argmax()) if wrong.size else 0
    return at if wrong.size and wrong.ravel()[at] else -1


def first_outside(array: Array, stop: int, start: int = 0) -> int:
    """Return the lowest flat position outside ``[start, stop)``, -1 if none is (NumPy)."""
    if not array.size or (array.min() >= start and array.max() < stop):
        return -1
    return first_true((array < start) | (array >= stop))


def first_pointer_faults(ptr: Array, last: int) -> tuple[int, int, int]:
    """Return the positions of a wrong first pointer, a decrease and a wrong last one, or -1."""
    first = -1 if ptr[0] == 0 else 0
    end = -1 if ptr[-1] == last else 0
    return first, first_true(ptr[1:] < ptr[:-1]), end


#: Kinds of fault of an SGT, in the order in which they are reported; a later kind means something
#: only where the earlier ones are absent.  A column that no entry uses is no fault.
_SGT_KINDS = 15
#: Kinds 10 to 14: what is wrong with the array at the place that was found.
_SGT_TEXTS = (
    "slots[{0}] lies in a tile column that is padding (-1): use a column of the window",
    "slots[{0}] lies below the last row of the matrix: use rows inside the shape",
    "slots and order do not ascend by (column, order) in a tile at position {1}: sort its entries",
    "order never names {0}: it must be a permutation of 0 to nnz - 1",
    "order puts a later row at place {0} than at {1}: places must count entries row by row",
)


def tiles(A: "SGT") -> None:
    """Raise for the first kind of fault in an SGT."""
    _raise_tile_fault(A, _tile_faults_on_gpu(A) if is_cupy(A.order) else _tile_faults(A))


def _raise_tile_fault(A: "SGT", faults: Iterable[int]) -> None:
    cells = A.tile[0] * A.tile[1]
    for kind, place in enumerate(faults):
        if place < 0:
            continue
        if kind < 6:
            name, last = (("window_ptr", A.tile_count), ("tile_ptr", A.nnz))[kind // 3]
            at = [place if kind % 3 == i else -1 for i in range(3)]
            raise_pointer_fault(name, getattr(A, name), last, at)
        elif kind == 6:
            raise_index_fault("columns", A.columns, A.n_cols, "columns", place)
        elif kind == 7:
            at = [int(i) for i in np.unravel_index(place, A.columns.shape)]
            raise FormatError(
                f"columns{at} is {int(A.columns[*at])}: columns of a window must ascend and be "
                "distinct, with padding (-1) only behind the last of them."
            )
        elif kind == 8:
            raise_index_fault("slots", A.slots, cells, "cells in a tile", place)
        elif kind == 9:
            raise_index_fault("order", A.order, A.nnz, "entries", place)
        else:
            raise FormatError(_SGT_TEXTS[kind - 10].format(place, place + 1) + ".")


def _tile_faults_on_gpu(A: "SGT") -> tuple[int, ...]:
    with on_device_of(A.order):
        rows = namespace(A.order).full(A.nnz, -1, A.index_dtype)
    sizes = (A.n_windows, A.tile_count, A.nnz, *A.shape, *A.tile)
    arrays = (A.window_ptr, A.columns.ravel(), A.tile_ptr, A.slots, A.order)
    size = max(A.n_windows + 1, A.tile_count + 1, A.columns.size, A.nnz)
    places = ("tiles", size, (*arrays, *sizes, rows))
    return formats_faults.lowest(_SGT_KINDS, places, ("tiles_order", A.nnz, (rows, A.nnz)))


def _tile_faults(A: "SGT") -> Iterator[int]:
    """Yield the lowest place of each kind of fault; a kind may rely on the earlier ones."""
    yield from first_pointer_faults(A.window_ptr, A.tile_count)
    yield from first_pointer_faults(A.tile_ptr, A.nnz)
    yield first_outside(A.columns, A.n_cols, -1)
    yield first_true(_misplaced_columns(A))
    yield first_outside(A.slots, A.tile[0] * A.tile[1])
    yield first_outside(A.order, A.nnz)
    in_padding, below, rows = _tile_entry_faults(A)
    yield in_padding
    yield below
    yield _first_unsorted(A)
    yield first_true(rows < 0)
    yield first_true(rows[1:] < rows[:-1])


def _tile_entry_faults(A: "SGT") -> tuple[int, int, Array]:
    """Return the first entry in padding, the first below the last row, and rows in CSR order."""
    from .condense import sgt_coordinates

    first = [-1, -1]
    rows = np.full(A.nnz, -1, A.index_dtype)
    for rows_part, part, row, col in sgt_coordinates(A):
        for kind, wrong in enumerate((col < 0, row >= A.n_rows - rows_part.start)):
            at = first_true(wrong)
            if first[kind] < 0 <= at:
                first[kind] = part.start + at
        rows[A.order[part]] = row + rows.dtype.type(rows_part.start)
    return first[0], first[1], rows


def _misplaced_columns(A: "SGT") -> Array:
    """Return a mask of the columns that do not ascend in a window or stand behind padding."""
    flat = A.columns.ravel()
    wrong = np.zeros(A.columns.shape, bool)
    left, right = flat[:-1], flat[1:]
    wrong.reshape(-1)[1:] = (right >= 0) & ((left < 0) | (right <= left))
    starts = A.window_ptr[A.window_ptr < A.tile_count]
    wrong[starts, 0] = False
    wrong[:, 0] |= A.columns[:, 0] < 0  # a tile without columns
    return wrong


def _first_unsorted(A: "SGT") -> int:
    """Return the first entry whose successor in its tile does not come after it, -1 if none."""
    from .condense import PART_ENTRIES

    for part in primitives.parts(slice(0, max(A.nnz - 1, 0)), PART_ENTRIES):
        both = slice(part.start, part.stop + 1)
        column, order = A.slots[both] % np.int32(A.tile[1]), A.order[both]
        wrong = column[1:] < column[:-1]
        wrong |= (column[1:] == column[:-1]) & (order[1:] <= order[:-1])
        ends = np.array([part.start, part.stop], A.tile_ptr.dtype)
        low, high = np.searchsorted(A.tile_ptr, ends, side="right")
        wrong[A.tile_ptr[low:high] - 1 - part.start] = False  # the next tile begins
        if wrong.any():
            return int(part.start) + first_true(wrong)
    return -1
