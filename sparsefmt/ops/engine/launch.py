"""What every launcher counts with: sizes of values, bytes of rows, memory set to a byte."""

from contextlib import AbstractContextManager, nullcontext
from math import prod

import numpy as np

from ...errors import KernelLaunchError, UnsupportedError
from ...formats.arrays import Array, import_cupy

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def stream() -> int:
    """Return the address of CuPy's current stream."""
    return int(import_cupy().cuda.get_current_stream().ptr)


def row_bytes(stride: int, dtype: str) -> int:
    """Count the bytes from one row to the next."""
    found = stride * ITEMSIZE[dtype]
    if found >= 2**32:
        raise UnsupportedError(
            f"rows of features lie {found} bytes apart: kernels count to 2**32, cut the features."
        )
    return found


def fill(pointer: int, size: int, byte: int, stream: int) -> None:
    """Set ``size`` bytes from the pointer on to one value, on that stream."""
    runtime = import_cupy().cuda.runtime
    try:
        runtime.memsetAsync(pointer, byte, size, stream)
    except runtime.CUDARuntimeError as error:
        raise KernelLaunchError(f"filling {size} bytes: {error}") from error


def capturing(stream: int) -> bool:
    """Return True if a CUDA graph is being captured from that stream."""
    return bool(import_cupy().cuda.runtime.streamIsCapturing(stream))


def view(pointer: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Make a CuPy array over memory that others own, and keep as long as it is read."""
    cupy = import_cupy()
    size = prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(pointer, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class _Stream:
    """A stream by its address, as CuPy takes it over."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def on_stream(address: int) -> AbstractContextManager[object]:
    """Return a context in which CuPy's operations run on that stream."""
    if address == stream():
        return nullcontext()
    found: AbstractContextManager[object] = import_cupy().cuda.Stream.from_external(
        _Stream(address)
    )
    return found
