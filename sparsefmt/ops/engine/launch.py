"""What every launcher counts with: sizes of values, bytes of rows, memory set to a byte."""

from ...errors import KernelLaunchError, UnsupportedError
from ...formats.arrays import import_cupy

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def stream() -> int:
    """CuPy's current stream."""
    return int(import_cupy().cuda.get_current_stream().ptr)


def row_bytes(stride: int, dtype: str) -> int:
    """Bytes from one row to the next."""
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
    """Whether a CUDA graph is being captured from that stream."""
    return bool(import_cupy().cuda.runtime.streamIsCapturing(stream))
