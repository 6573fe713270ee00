"""Exact casts of arrays that files and other libraries bring, or errors that say why not."""

from typing import Any

import numpy as np

from ..errors import DtypeError, IndexRangeError, UnsupportedError
from . import checks
from .arrays import VALUE_DTYPES, Array, DType, as_array, namespace, on_device_of

#: Every integer up to this magnitude is a float64.
_EXACT = 2**53


def values(name: str, array: object, dtype: DType = None) -> Array:
    """Convert an array to values that a format may hold; raise if a cast would not be exact.

    Parameters
    ----------
    name : str
        What an error calls the array.
    array : NumPy or CuPy array (or what ``as_array`` takes), any shape
    dtype : float16, bfloat16, float32 or float64, optional
        Round to this dtype.  By default the four float dtypes stay as they are, integers and
        booleans become float64, and so do longer floats; each of these casts must be exact.

    Raises
    ------
    UnsupportedError
        If the values are complex.
    DtypeError
        If they are no numbers, if a value is not exact in float64 and ``dtype`` is not given, or
        if a finite value would overflow to infinity.
    """
    a = as_array(name, array)
    if a.dtype.kind == "c":
        raise UnsupportedError(
            f"{name} is {a.dtype}: complex values are not supported, give .real or abs()."
        )
    if a.dtype.kind not in "biuf" and a.dtype.name not in VALUE_DTYPES:
        raise DtypeError(f"{name} is {a.dtype}: give numbers (floats, integers or booleans).")
    with on_device_of(a):
        if dtype is not None:
            return _rounded(name, a, checks.value_dtype("dtype", dtype))
        if a.dtype.name in VALUE_DTYPES:
            return a
        if a.dtype.kind == "f":
            wide = _rounded(name, a, np.dtype(np.float64))
            _refuse(name, a, (wide != a) & (a == a))
            return wide
        return _exact_from_integers(name, a)


def indices(name: str, array: object, index_dtype: DType = None) -> Array:
    """Convert an array to int32 or int64 indices.

    Parameters
    ----------
    name : str
        What an error calls the array.
    array : NumPy or CuPy array (or what ``as_array`` takes), any shape
    index_dtype : int32 or int64, optional
        By default int32 and int64 stay as they are; other integers become int32 if their values
        fit, else int64.

    Raises
    ------
    DtypeError
        If the array does not hold integers.
    IndexRangeError
        If an index does not fit: no cast of indices is ever lossy.
    """
    a = as_array(name, array)
    if a.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {a.dtype}: indices are integers, cast with .astype().")
    if index_dtype is not None:
        return _fitting(name, a, checks.index_dtype("index_dtype", index_dtype))
    if a.dtype in (np.int32, np.int64):
        return a
    with on_device_of(a):
        narrow = not a.size or int(a.max()) <= np.iinfo(np.int32).max  # synchronize!
    return _fitting(name, a, np.dtype(np.int32 if narrow else np.int64))


def indices_alike(shape: tuple[int, int], **arrays: object) -> list[Array]:
    """Convert arrays to indices of one dtype: int64 if one of them, or the shape, needs it."""
    cast = [indices(name, array) for name, array in arrays.items()]
    common = np.result_type(*(array.dtype for array in cast), index_dtype(shape, 0))
    return [array.astype(common, copy=False) for array in cast]


def index_dtype(shape: tuple[int, int], nnz: int) -> np.dtype[Any]:
    """Choose int32 if it can index the shape and count the entries, else int64."""
    small = max(*shape, nnz) <= np.iinfo(np.int32).max
    return np.dtype(np.int32 if small else np.int64)


def _fitting(name: str, a: Array, target: np.dtype[Any]) -> Array:
    limits = np.iinfo(target)
    if a.size and not np.can_cast(a.dtype, target):
        with on_device_of(a):
            least, most = int(a.min()), int(a.max())  # synchronize!
        if least < limits.min or most > limits.max:
            beyond = most if most > limits.max else least
            mend = "use int64" if target == np.int32 else "indices are at most 2**63 - 1"
            raise IndexRangeError(f"{name} holds {beyond}, which {target} cannot: {mend}.")
    with on_device_of(a):
        return a.astype(target, copy=False)


def _rounded(name: str, a: Array, target: np.dtype[Any]) -> Array:
    if a.dtype == target:
        return a
    xp = namespace(a)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = a.astype(target)
    overflow = xp.isinf(cast)
    if a.dtype.kind not in "biu":
        overflow &= ~xp.isinf(a)
    if overflow.any():  # synchronize!
        first = int(xp.flatnonzero(overflow)[0])
        raise DtypeError(
            f"{name}[{first}] is {a.ravel()[first]}, which overflows {target}: use a wider dtype."
        )
    return cast


def _exact_from_integers(name: str, a: Array) -> Array:
    wide = a.astype(np.float64)
    if a.size and a.dtype.itemsize == 8 and (int(a.max()) > _EXACT or int(a.min()) < -_EXACT):
        xp = namespace(a)
        # 2**63 and 2**64 come only from rounding up, and must not be cast back.
        inside = wide < float(2 ** (64 - (a.dtype.kind == "i")))
        _refuse(name, a, ~inside | (xp.where(inside, wide, 0).astype(a.dtype) != a))
    return wide


def _refuse(name: str, a: Array, inexact: Array) -> None:
    if inexact.any():  # synchronize!
        first = int(namespace(a).flatnonzero(inexact)[0])
        raise DtypeError(
            f"{name}[{first}] is {a.ravel()[first]}, which float64 cannot hold exactly: "
            'pass dtype="float64" to round, or another dtype.'
        )
