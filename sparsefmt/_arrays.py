"""Which array module holds an array, and how arrays get in and move between devices.

A backend counts only if its module is already loaded: a CuPy array cannot exist before CuPy does.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from .errors import DeviceError, DtypeError, OutOfMemoryError

#: A ``numpy.ndarray`` or a ``cupy.ndarray`` (CuPy ships no type stubs, so both are ``Any``).
Array: TypeAlias = Any

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
VALUE_DTYPES = ("float16", "bfloat16", "float32", "float64")

_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 3, 13)  # device, pinned host and managed memory


def is_cupy(a: object) -> bool:
    """Whether ``a`` is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(a, cupy.ndarray)


def namespace(a: Array) -> ModuleType:
    """The array module (``numpy`` or ``cupy``) that ``a`` belongs to."""
    return sys.modules["cupy"] if is_cupy(a) else np


def device_of(a: Array) -> str:
    """``"cpu"`` or ``"cuda:<ordinal>"``."""
    return f"cuda:{a.device.id}" if is_cupy(a) else "cpu"


def on_device_of(a: Array) -> AbstractContextManager[object]:
    """A context in which new CuPy arrays and launches go to the device that holds ``a``."""
    return a.device if is_cupy(a) else nullcontext()


def as_array(name: str, value: object) -> Array:
    """``value`` as a contiguous array in native byte order; no copy where that already holds.

    NumPy and CuPy arrays stay where they are, other arrays come in through DLPack, and Python
    sequences become NumPy arrays.  An empty sequence becomes an empty array of int32.
    """
    if is_cupy(value) or isinstance(value, np.ndarray):
        array: Array = value
    elif hasattr(value, "__dlpack_device__"):
        array = _from_dlpack(name, value)
    else:
        array = np.asarray(value)
        if array.size == 0 and array.dtype == np.float64:
            array = array.astype(np.int32)
    if array.dtype.hasobject:
        raise DtypeError(f"{name} holds Python objects (dtype {array.dtype}): give numbers.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def contiguous(a: Array) -> Array:
    """``a`` itself if it is C-contiguous, else a contiguous copy on the same device."""
    return a if a.flags.c_contiguous else namespace(a).ascontiguousarray(a)


def _from_dlpack(name: str, value: Any) -> Array:
    kind, ordinal = value.__dlpack_device__()
    if kind == _DLPACK_CPU:
        try:
            return np.from_dlpack(value)
        except (BufferError, TypeError, RuntimeError) as error:
            raise DtypeError(
                f"{name}: NumPy cannot take over this {type(value).__name__} ({error}): "
                "detach it, or convert it to a dtype that NumPy has."
            ) from error
    if kind in _DLPACK_CUDA:
        return import_cupy().from_dlpack(value)
    raise DeviceError(f"{name} lives on DLPack device {(kind, ordinal)}: use CPU or CUDA memory.")


def import_cupy() -> ModuleType:
    """CuPy, or a ``DeviceError`` that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            "a CUDA device was asked for but CuPy is not installed: "
            "pip install 'sparsefmt[cuda13]' (or [cuda12])."
        ) from error
    module: ModuleType = cupy
    return module


def parse_device(device: str) -> int | None:
    """The CUDA ordinal in ``"cuda"`` or ``"cuda:<n>"``, None for ``"cpu"``."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu" and not number:
        return None
    if kind != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise DeviceError(f'device is {device!r}: use "cpu", "cuda" or "cuda:<ordinal>".')
    cupy = import_cupy()
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"device is {device!r} but CUDA finds no device: {error}.") from error
    ordinal = int(number) if number else int(cupy.cuda.runtime.getDevice())
    if ordinal >= count:
        raise DeviceError(f"device is {device!r} but there are {count} CUDA devices: count from 0.")
    return ordinal


def to_device(a: Array, device: str) -> Array:
    """``a`` on ``device``: itself if it is there already, else a copy."""
    ordinal = parse_device(device)
    if ordinal is None:
        return a.get() if is_cupy(a) else a  # synchronize!
    if device_of(a) == f"cuda:{ordinal}":
        return a
    cupy = import_cupy()
    with cupy.cuda.Device(ordinal), allocating(f"moving {a.nbytes} bytes to {device}"):
        return cupy.asarray(a)


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Turn the array libraries' out-of-memory errors into ``OutOfMemoryError``."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{what}: {error} Free arrays or use a smaller graph.") from error
