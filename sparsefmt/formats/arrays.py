"""Array modules, devices of arrays, and moves between them.

A backend counts only if its module is already loaded: a CuPy array cannot exist before CuPy does.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from .._caches import cache
from ..errors import DeviceError, DtypeError, OutOfMemoryError, ShapeError, UnsupportedError

#: A ``numpy.ndarray`` or a ``cupy.ndarray`` (CuPy ships no type stubs, so both are ``Any``).
Array: TypeAlias = Any
#: Whatever NumPy takes as a dtype; None for the default.
DType: TypeAlias = str | type | np.dtype[Any] | None

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
VALUE_DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Bytes at which arrays begin that are sent together: a line of the L2.
ALIGNMENT = 128

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()
_DLPACK_CPU = (1, 3)  # host memory, pinned or not
_DLPACK_CUDA = (2, 13)  # device and managed memory


def is_cupy(a: object) -> bool:
    """Return True if ``a`` is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(a, cupy.ndarray)


def namespace(a: Array) -> ModuleType:
    """Return the array module (``numpy`` or ``cupy``) that ``a`` belongs to."""
    return sys.modules["cupy"] if is_cupy(a) else np


def device_of(a: Array) -> str:
    """Return ``"cpu"`` or ``"cuda:<ordinal>"``."""
    return f"cuda:{a.device.id}" if is_cupy(a) else "cpu"


def on_device_of(a: Array) -> AbstractContextManager[object]:
    """Return a context in which new CuPy arrays and launches go to the device of ``a``."""
    if not is_cupy(a):
        return _NO_CONTEXT
    device = a.device  # entering it takes 2 µs, a look at the current one 0.3
    current = device.id == sys.modules["cupy"].cuda.runtime.getDevice()
    return _NO_CONTEXT if current else device


def finish(a: Array) -> None:
    """Wait for the current stream of ``a``'s device, so that any stream may read its results."""
    if is_cupy(a):
        with on_device_of(a):
            namespace(a).cuda.get_current_stream().synchronize()  # synchronize!


def as_array(
    name: str, value: object, *, empty: DType = np.int64, like: Array | None = None
) -> Array:
    """Convert ``value`` to an array in native byte order; an array is not copied.

    NumPy and CuPy arrays stay where they are, other arrays come in through DLPack, and Python
    sequences become arrays on the device of ``like`` (by default the CPU).  A sequence without
    any number becomes one of dtype ``empty``.
    """
    if is_cupy(value):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedError(f"{name} is a masked array: fill it, {name}.filled(0) for instance.")
    if isinstance(value, np.ndarray):
        array: Array = np.asarray(value)  # np.matrix and np.memmap become plain views
    elif hasattr(value, "__dlpack_device__"):
        array = _from_dlpack(name, value)
    else:
        array = _from_sequence(name, value, empty)
    if array.dtype.hasobject:
        raise DtypeError(f"{name} holds Python objects (dtype {array.dtype}): give numbers.")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not is_cupy(like) or not isinstance(value, list | tuple | range):
        return array
    with on_device_of(like):
        return namespace(like).asarray(array)


def _from_sequence(name: str, value: object, empty: DType) -> Array:
    if value is None:
        raise DtypeError(f"{name} is None: give an array.")
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{name} is no array ({error}): give rows of one length.") from error
    return array.astype(empty) if array.size == 0 and array.dtype == np.float64 else array


def contiguous(a: Array) -> Array:
    """Return ``a`` itself if it is C-contiguous, else a contiguous copy on its device."""
    if a.flags.c_contiguous:
        return a
    with on_device_of(a), allocating(f"a contiguous copy of {a.nbytes} bytes"):
        return namespace(a).ascontiguousarray(a)


def has_tangent(value: object) -> bool:
    """Return True for torch's tensor with a tangent of forward mode, which sparse ones have not."""
    torch = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level < 0:
        return False
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return torch.autograd.forward_ad.unpack_dual(value).tangent is not None


def _from_dlpack(name: str, value: Any) -> Array:
    # PyG's EdgeIndex and Index wrap a tensor and own no memory: what they export dangles.
    value = value.as_tensor() if hasattr(value, "as_tensor") else value
    # A torch tensor with a pending negative bit exports its memory, not its values.
    value = value.resolve_neg() if hasattr(value, "resolve_neg") else value
    try:
        kind, ordinal = value.__dlpack_device__()
    except (BufferError, ValueError, RuntimeError) as error:
        raise DeviceError(f"{name} has no memory to share ({error}): use CPU or CUDA.") from error
    if kind not in _DLPACK_CPU + _DLPACK_CUDA:
        place = (int(kind), ordinal)
        raise DeviceError(f"{name} lives on DLPack device {place}: use CPU or CUDA memory.")
    library = np if kind in _DLPACK_CPU else import_cupy()
    try:
        if has_tangent(value):
            raise TypeError("it has a tangent of forward mode")
        return library.from_dlpack(value)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(
            f"{name}: {library.__name__} cannot take over this {type(value).__name__} "
            f"({str(error).rstrip('.')}): detach it, make it dense, or convert it to a dtype that "
            f"{library.__name__} has."
        ) from error


def import_cupy() -> ModuleType:
    """Import CuPy, or raise a ``DeviceError`` that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            "a CUDA device was asked for but CuPy is not installed: "
            "pip install 'sparsefmt[cuda13]' (or [cuda12])."
        ) from error
    module: ModuleType = cupy
    return module


def elementwise(
    inputs: str, outputs: str, body: str, name: str, preamble: str = ""
) -> Callable[[], Any]:
    """Return a function that compiles an element-wise kernel at its first call and returns it."""

    def kernel() -> Any:
        return import_cupy().ElementwiseKernel(inputs, outputs, body, name, preamble=preamble)

    kernel.__name__ = name
    return cache(kernel)


def parse_device(device: str) -> int | None:
    """Return the CUDA ordinal in ``"cuda"`` or ``"cuda:<n>"``, None for ``"cpu"``."""
    text = str(device)  # a torch.device too
    kind, _, number = text.partition(":")
    if text == "cpu":
        return None
    if kind != "cuda" or not (number.isdecimal() or text == "cuda"):
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
    """Move ``a`` to ``device``; return ``a`` itself if it is there already."""
    ordinal = parse_device(device)
    if ordinal is None:
        return a.get() if is_cupy(a) else a  # synchronize!
    if device_of(a) == f"cuda:{ordinal}":
        return a
    cupy = import_cupy()
    with cupy.cuda.Device(ordinal), allocating(f"moving {a.nbytes} bytes to {device}"):
        return cupy.asarray(a)


def send(arrays: Sequence[Array], *, like: Array) -> list[Array]:
    """Move contiguous CPU arrays to the device of ``like`` by one copy; return views of it."""
    if not is_cupy(like):
        return list(arrays)
    ends = list(accumulate(-(-a.nbytes // ALIGNMENT) * ALIGNMENT for a in arrays))
    packed = np.empty(ends[-1], np.uint8)
    for a, begin in zip(arrays, [0, *ends], strict=False):
        packed[begin : begin + a.nbytes] = a.ravel().view(np.uint8)
    with on_device_of(like):
        sent = namespace(like).asarray(packed)
        return [
            sent[begin : begin + a.nbytes].view(a.dtype).reshape(a.shape)
            for a, begin in zip(arrays, [0, *ends], strict=False)
        ]


class allocating:  # lower case, as other contexts that are called
    """A context that turns out-of-memory errors of array libraries into ``OutOfMemoryError``."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise an ``OutOfMemoryError`` that names the allocation, if memory ran out."""
        if isinstance(error, MemoryError) and not isinstance(error, OutOfMemoryError):
            raise out_of_memory(self.what, error) from error


def out_of_memory(what: str, error: MemoryError) -> OutOfMemoryError:
    """Return an ``OutOfMemoryError`` that names the allocation and a way to mend it."""
    reason = str(error).rstrip(".")
    return OutOfMemoryError(f"{what}: {reason}. Free arrays or use a smaller graph.")
