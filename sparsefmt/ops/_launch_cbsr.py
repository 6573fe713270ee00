"""Launches of the products with row-balanced features.  The conventions are those of ``_launch``.

``indices`` has columns of ``index_bytes`` each, ``k`` in each of ``S.n_cols`` rows.
"""

from dataclasses import dataclass

from . import _jit, _launch_dense
from ._launch import DENSE_ROWS, ITEMSIZE, SCALED_SUM, Structure, fill, load
from ._launch import spmm as _spmm
from ._launch import spmm_workspace as _spmm_workspace

THREADS = 128  # of a block in spgemm.cu and sspmm.cu
_WARPS = THREADS // _jit.WARP
_SHARED_BYTES = 47 * 2**10  # of a block, what every device gives without being asked
_MEAN, _ALIGNED = 1, 2  # as in cbsr.cuh
#: Bytes of sums that stay in the L2.  Two slices of k = 64 on 233 k vertices do: 1.4x (H200).
L2_BYTES = 40 * 2**20
#: Places of such a slice: whole lines of 128 bytes in float32.
SLICE = 32
#: Features at a time of the deterministic ``sspmm``, in bytes: the widest slice of spmm.
PANEL_BYTES = 256


@dataclass(frozen=True, slots=True)
class Way:
    """How a warp reads rows of S: so many lanes an entry, places side by side, groups together."""

    lanes: int
    places: int
    vector: int
    batch: int

    @property
    def streams(self) -> int:
        return _jit.WARP // self.lanes


#: Ways of spgemm by the largest k: for rows of many entries, whose ends are rare, and of few.
#: The other one: 0.7 to 0.9x on 12 entries a row, 0.7 to 0.8x on 490 (H200, float32, prototypes).
MANY = {8: Way(4, 2, 1, 4), 16: Way(4, 4, 1, 4), 32: Way(8, 4, 1, 4), 256: Way(16, 4, 1, 4)}
#: Of 2-byte values a lane reads twice as many.
MANY_HALVES = {8: Way(4, 2, 1, 4), 16: Way(4, 4, 1, 4), 32: Way(4, 8, 1, 4), 256: Way(8, 8, 1, 4)}
FEW = {8: Way(8, 1, 1, 1), 16: Way(8, 2, 1, 1), 32: Way(8, 4, 1, 1), 256: Way(16, 4, 1, 1)}
#: More than 256 features, and float64; ``SCALAR`` also where words do not fit.
GENERAL, SCALAR = Way(8, 4, 1, 1), Way(8, 4, 0, 1)


def spgemm_way(dtype: str, index_bytes: int, k: int, *, dense: bool, together: int) -> Way:
    """``together`` has the lowest bits of the addresses of values and columns."""
    ways = {k: GENERAL}
    if index_bytes == 1 and dtype != "float64":
        ways = FEW if not dense else MANY if dtype == "float32" else MANY_HALVES
    way = ways[min(largest for largest in ways if largest >= k)]
    together |= k * ITEMSIZE[dtype]
    word = min(way.places * ITEMSIZE[dtype], 16)
    fits = (
        k % way.places == 0 and together % word == 0 and together % (way.places * index_bytes) == 0
    )
    return way if fits else SCALAR


def spgemm_workspace(S: Structure, dtype: str, feat: int) -> int:
    """Bytes for the partial results of rows that blocks share."""
    return _spmm_workspace(S, dtype, feat, arg=False)


def spgemm(
    S: Structure,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    values: int,
    data: int,
    row_scale: int,
    col_scale: int,
    mean: bool,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """``out = diag(r) A diag(c) S``."""
    if not S.n_rows:
        return
    if not S.nnz:
        fill(out, S.n_rows * feat * ITEMSIZE[dtype], 0, stream)
        return
    dense = S.nnz >= DENSE_ROWS * S.n_rows
    together = (values | indices) % 16
    way = spgemm_way(dtype, index_bytes, k, dense=dense, together=together)
    log_window = _log_window(feat, way, max(ITEMSIZE[dtype], 4))
    sums = _WARPS * (way.streams + 1) << log_window
    kernel = _jit.load(
        "spgemm.cu",
        "spgemm_csr_cbsr",
        "11PqI5i",
        (dtype, S.index_dtype, _launch_dense.COLUMNS[index_bytes]),
        (way.lanes, way.places, way.vector, way.batch),
    )
    kernel(
        S.blocks * -(-feat >> log_window),
        (
            *(S.indptr, S.indices, S.start, S.slot, data, col_scale, row_scale),
            *(indices, values, out, workspace, S.nnz, S.blocks, k, feat, log_window),
            *(way.lanes.bit_length() - 1 if dense else 0, _MEAN * mean),
        ),
        threads=THREADS,
        shared=sums * max(ITEMSIZE[dtype], 4),
        stream=stream,
    )
    if S.n_cuts:
        kernel = load("spmm.cu", "spmm_csr_cut_rows", dtype, S.index_dtype, (SCALED_SUM,))
        kernel(
            _jit.warps_to_blocks(S.n_cuts * -(-feat // _jit.WARP)),
            (
                *(S.indptr, S.start, S.cut, row_scale, out, 0, workspace, 0),
                *(S.n_cuts, feat, _MEAN * mean),
            ),
            stream=stream,
        )


def _log_window(feat: int, way: Way, size: int) -> int:
    """log2 of the features whose sums shared memory holds: all, if it can, rounded up."""
    room = _SHARED_BYTES // (_WARPS * (way.streams + 1) * size)
    return min(max((feat - 1).bit_length(), 5), room.bit_length() - 1)


# SSpMM


#: Ways of the outer product: requests of four places each, of whole rows or lines of 128 bytes.
OUTER = {8: Way(2, 4, 1, 1), 16: Way(4, 4, 1, 4), 256: Way(8, 4, 1, 4)}
OUTER_GENERAL, OUTER_SCALAR = OUTER[256], Way(32, 1, 0, 1)


def outer_way(index_bytes: int, k: int, *, sampled: bool, together: int) -> Way:
    """``together`` has the lowest bits of all addresses, in words of four places 16 bytes."""
    if k % 4 or together % 16:
        return OUTER_SCALAR
    if sampled or index_bytes > 1:
        return OUTER_GENERAL
    return OUTER[min(largest for largest in OUTER if largest >= k)]


def outer_workspace(S: Structure, dtype: str, k: int) -> int:
    """Bytes for sums in float32 of what is stored in 2 bytes."""
    return 4 * S.n_cols * k if ITEMSIZE[dtype] == 2 else 0


def sspmm_outer(
    S: Structure,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    data: int,
    grad: int,
    ldg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """``out[j, t] = sum_i (diag(r) A diag(c))[i, j] grad[i, indices[j, t]]``, by atomics."""
    size, sums = ITEMSIZE[dtype], workspace or out
    total = S.n_cols * k
    if total:
        fill(sums, total * max(size, 4), 0, stream)
    if S.nnz:
        wide = max(size, 4)
        sliced = S.n_cols * SLICE * wide <= L2_BYTES < total * wide
        _outer(
            S, dtype, sampled=0, feat=feat, k=k, together=SLICE if sliced else k,
            index_bytes=index_bytes, indices=indices, values=0, data=data, X=grad,
            ldx=ldg, row_scale=row_scale, col_scale=col_scale, sums=sums, out=0, stream=stream,
        )  # fmt: skip
    if workspace and total:
        kernel = _jit.load("sspmm.cu", "narrowed", "2Pq", (dtype,))
        kernel(_jit.warps_to_blocks(-(-total // _jit.WARP)), (workspace, out, total), stream=stream)


def sddmm(
    S: Structure,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    X: int,
    ldx: int,
    indices: int,
    values: int,
    row_scale: int,
    col_scale: int,
    out: int,
    stream: int,
) -> None:
    """``out[e] = r[i] c[j] sum_t X[i, indices[j, t]] values[j, t]``."""
    if S.nnz:
        _outer(
            S, dtype, sampled=1, feat=feat, k=k, together=k, index_bytes=index_bytes,
            indices=indices, values=values, data=0, X=X, ldx=ldx, row_scale=row_scale,
            col_scale=col_scale, sums=0, out=out, stream=stream,
        )  # fmt: skip


def _outer(
    S: Structure, dtype: str, *, sampled: int, feat: int, k: int, together: int, index_bytes: int,
    indices: int, values: int, data: int, X: int, ldx: int, row_scale: int,
    col_scale: int, sums: int, out: int, stream: int,
) -> None:  # fmt: skip
    size = ITEMSIZE[dtype]
    bits = values | sums | indices * (4 // index_bytes)
    way = outer_way(index_bytes, k, sampled=bool(sampled), together=bits)
    shared = 2 * _WARPS * feat * size
    on_chip = shared <= _SHARED_BYTES
    aligned = (X | ldx * size | feat * size) % 16 == 0
    kernel = _jit.load(
        "sspmm.cu",
        "sspmm_csr_outer",
        "11PqI4i",
        (dtype, S.index_dtype, _launch_dense.COLUMNS[index_bytes]),
        (way.lanes, way.places, way.batch, int(on_chip), sampled),
    )
    kernel(
        S.blocks * -(-k // together),
        (
            *(S.indptr, S.indices, S.start, data, col_scale, row_scale, indices, values),
            *(X, sums, out, ldx, S.blocks, k, together, feat, _ALIGNED * aligned),
        ),
        threads=THREADS,
        shared=shared if on_chip else 0,
        stream=stream,
    )


def panel(dtype: str, feat: int) -> int:
    """Features at a time of ``sspmm``."""
    return min(feat, PANEL_BYTES // ITEMSIZE[dtype])


def sspmm_workspace(T: Structure, dtype: str, feat: int) -> int:
    """Bytes for a panel of the dense product and what ``spmm`` takes for it."""
    width = panel(dtype, feat)
    dense = -(-T.n_rows * width * ITEMSIZE[dtype] // 16) * 16
    return dense + _spmm_workspace(T, dtype, width, arg=False)


def sspmm(
    T: Structure,
    dtype: str,
    *,
    feat: int,
    k: int,
    index_bytes: int,
    indices: int,
    data: int,
    perm: int,
    grad: int,
    ldg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """As ``sspmm_outer``, of the transposed structure, deterministic: ``spmm``, then a choice."""
    size, width = ITEMSIZE[dtype], panel(dtype, feat)
    rest = workspace + -(-T.n_rows * width * size // 16) * 16
    for first in range(0, feat, width):
        columns = min(width, feat - first)
        _spmm(
            T, dtype, "sum", feat=columns, ldx=ldg, data=data, X=grad + first * size,
            row_scale=col_scale, col_scale=row_scale, out=workspace, arg=0, workspace=rest,
            stream=stream, perm=perm,
        )  # fmt: skip
        _launch_dense.dense_to_cbsr(
            dtype, n_rows=T.n_rows, k=k, ldx=columns, index_bytes=index_bytes, X=workspace,
            indices=indices, out=out, stream=stream, first=first, width=columns,
        )  # fmt: skip
