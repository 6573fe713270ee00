"""Launches of MaxK.  The conventions are those of ``_launch``."""

from ...formats.cbsr import column_dtype
from ..engine import jit
from ..engine.launch import ITEMSIZE, row_bytes

#: Teams in maxk.cu: lanes, and columns that each holds.  A row goes to the first that holds it.
SHAPES = ((8, 8), (16, 8), (32, 8), (32, 16), (32, 32), (256, 16), (1024, 16), (1024, 64))
#: Columns that the widest team holds.
MAX_FEAT = 65536
_PARAMETERS = "3PiI3i"
_ALIGNED, _FEW = 1, 2  # as in maxk.cu
_GROUP = 8
_THREADS = 128  # of a block of sub-warps or warps
_MAX_ROWS = 2**31 - _THREADS  # the last block counts a few more


def instantiation(dtype: str, lanes: int, held: int) -> tuple[tuple[str, str], tuple[int, int]]:
    """Template arguments: types and constants."""
    return (dtype, column_dtype(lanes * held).name), (lanes, held)


def maxk(
    dtype: str,
    *,
    n_rows: int,
    feat: int,
    k: int,
    ldx: int,
    X: int,
    columns: int,
    values: int,
    stream: int,
) -> None:
    """The ``k`` largest of each row, ``feat`` at most ``MAX_FEAT``, and their columns."""
    if not n_rows:
        return
    size, stride = ITEMSIZE[dtype], row_bytes(ldx, dtype)
    lanes, held = next(shape for shape in SHAPES if shape[0] * shape[1] >= feat)
    types, constants = instantiation(dtype, lanes, held)
    kernel = jit.load("cbsr/maxk.cu", "maxk_rows", _PARAMETERS, types, constants)
    flags = _ALIGNED * ((X | stride | feat * size) % 16 == 0)
    flags |= _FEW * (k <= 2 * min(lanes, -(-feat // _GROUP)))
    threads = max(lanes, _THREADS)
    for begin in range(0, n_rows, _MAX_ROWS):
        rows, first = min(n_rows - begin, _MAX_ROWS), begin * k
        kernel(
            -(-rows * lanes // threads),
            (
                *(X + begin * stride, values + first * size),
                *(columns + first * column_dtype(feat).itemsize, rows, stride, feat, k, flags),
            ),
            threads=threads,
            stream=stream,
        )
