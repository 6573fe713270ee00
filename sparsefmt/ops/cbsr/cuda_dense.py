"""Launches from row-balanced features to dense ones, and back.  Conventions as in ``_launch``."""

from ..engine import jit
from ..engine.launch import ITEMSIZE

#: Values and columns by their bytes, as ``cbsr_dense.cu`` moves them.
VALUES = {2: "uint16", 4: "int32", 8: "int64"}
COLUMNS = {1: "uint8", 2: "uint16", 4: "int32"}


def cbsr_to_dense(
    dtype: str,
    *,
    n_rows: int,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    values: int,
    out: int,
    stream: int,
) -> None:
    """``out[i, indices[i, t]] = values[i, t]``, and 0 elsewhere."""
    if not n_rows:
        return
    size = ITEMSIZE[dtype]
    types = VALUES[size], COLUMNS[index_bytes]
    kernel = jit.load("cbsr/dense.cu", "cbsr_to_dense", "3Pq3i", types)
    aligned = (out | feat * size) % 16 == 0
    args = (values, indices, out, n_rows, feat, k, aligned)
    kernel(jit.warps_to_blocks(n_rows), args, stream=stream)


def dense_to_cbsr(
    dtype: str,
    *,
    n_rows: int,
    k: int,
    ldx: int,
    index_bytes: int,
    X: int,
    indices: int,
    out: int,
    stream: int,
    first: int = 0,
    width: int = 2**31 - 1,
) -> None:
    """``out[i, t] = X[i, indices[i, t] - first]``, where X has that column of ``width``."""
    if not n_rows:
        return
    types = VALUES[ITEMSIZE[dtype]], COLUMNS[index_bytes]
    kernel = jit.load("cbsr/dense.cu", "dense_to_cbsr", "3P2q3i", types)
    args = (X, indices, out, n_rows * k, ldx, k, first, width)
    kernel(jit.warps_to_blocks(-(-n_rows * k // jit.WARP)), args, stream=stream)
