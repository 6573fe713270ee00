"""Launches of the normalisation of GCN and of its backward.  Conventions as in ``_launch``.

``flags`` are one byte a vertex and 0 where no loops are added.  Degrees, their gradients and flags
lie in a workspace of ``BYTES`` a vertex, which the launchers zero.
"""

from ...formats.chunks import LONG_ROW
from ..engine import jit
from ..engine.launch import fill
from ..engine.structure import Structure

#: Of the workspace, a vertex: degree (or scale), flag, and in backward the gradient of the scale.
BYTES, BYTES_BACKWARD = 9, 17
_FILE = "gcn/gcn_norm.cu"
_TEAM = 8  # as in gcn_norm.cu


def _degrees(
    types: tuple[str, str],
    nnz: int,
    arrays: tuple[int, int, int],
    workspace: tuple[int, int, int],
    stream: int,
) -> None:
    """Sums of rows and flags of loops, by atomics; all of the workspace is zeroed first."""
    degree, flags, size = workspace
    fill(degree, size, 0, stream)
    if nnz:
        kernel = jit.load(_FILE, "gcn_degrees", "5Pq", types, (int(arrays[2] != 0),))
        kernel(_blocks(nnz), (*arrays, degree, flags, nnz), stream=stream)


def gcn_norm_coo(
    dtype: str,
    index_dtype: str,
    *,
    nnz: int,
    n: int,
    loops: bool,
    row: int,
    col: int,
    data: int,
    out_row: int,
    out_col: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """``out[e] = s[i] a[e] s[j]`` and, with loops, theirs behind, and the indices of all.

    Without ``data``, of ones.  Two launches and the zeroing.
    """
    if not (nnz or (n and loops)):
        return
    types, flags = (dtype, index_dtype), workspace + 8 * n if loops else 0
    arrays, size = (row, col, data), BYTES * n
    _degrees(types, nnz, arrays, (workspace, flags, size), stream)
    kernel = jit.load(_FILE, "gcn_scaled", "8P2q", types, (int(data != 0),))
    args = (*arrays, workspace, flags, out_row, out_col, out, nnz, n)
    kernel(_blocks(nnz + n * loops), args, stream=stream)


def gcn_norm_csr(
    S: Structure,
    dtype: str,
    *,
    loops: bool,
    data: int,
    out_indptr: int,
    out_indices: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """As ``gcn_norm_coo``, the loop of a row behind its entries; two launches, deterministic.

    With 0 for ``out_indptr`` and ``out_indices``, values alone.
    """
    if not S.n_rows:
        return
    types, flags = (dtype, S.index_dtype), workspace + 8 * S.n_rows if loops else 0
    arrays, sizes = (S.indptr, S.indices, data, S.long), (S.n_rows, S.n_long, LONG_ROW)
    blocks = S.n_long + _blocks(S.n_rows * _TEAM)
    kernel = jit.load(_FILE, "gcn_rows", "6Pq2i", types)
    kernel(blocks, (*arrays, workspace, flags, *sizes), stream=stream)
    kernel = jit.load(_FILE, "gcn_rows_scaled", "9Pq2i", types)
    args = (*arrays, workspace, flags, out_indptr, out_indices, out, *sizes)
    kernel(blocks, args, stream=stream)


def gcn_norm_backward(
    dtype: str,
    index_dtype: str,
    *,
    nnz: int,
    n: int,
    loops: bool,
    row: int,
    col: int,
    indptr: int,
    data: int,
    grad: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """The gradient of the values, of a CSR too if its ``indptr`` is given beside its rows.

    Three launches and the zeroing.
    """
    if not nnz:
        return
    types, constants = (dtype, index_dtype), (int(data != 0),)
    flags, slope = workspace + 16 * n if loops else 0, workspace + 8 * n
    arrays, size = (row, col, data), BYTES_BACKWARD * n
    _degrees(types, nnz, arrays, (workspace, flags, size), stream)
    kernel = jit.load(_FILE, "gcn_slopes", "8P2q", types, constants)
    args = (row, col, indptr, data, grad, workspace, flags, slope, nnz, n)
    kernel(_blocks(max(nnz, n * loops)), args, stream=stream)
    kernel = jit.load(_FILE, "gcn_gradient", "8Pq", types, constants)
    kernel(_blocks(nnz), (row, col, indptr, grad, workspace, flags, slope, out, nnz), stream=stream)


def _blocks(threads: int) -> int:
    return jit.warps_to_blocks(-(-threads // jit.WARP))
