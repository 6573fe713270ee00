"""Launches of the products with row-balanced features.  The conventions are those of ``_launch``.

``indices`` has columns of ``index_bytes`` each, ``k`` in each of ``S.n_cols`` rows.
"""

from dataclasses import dataclass

from ..engine import jit
from ..engine.launch import ITEMSIZE, fill
from ..engine.structure import Structure
from ..matmul.cuda import DENSE_ROWS, SCALED_SUM, load
from ..matmul.cuda import spmm_workspace as _spmm_workspace
from . import cuda_dense

THREADS = 128  # of a block in spgemm.cu and sddmm_cbsr.cu
_WARPS = THREADS // jit.WARP
_SHARED_BYTES = 47 * 2**10  # of a block, what every device gives without being asked
_MEAN, ALIGNED = 1, 2  # as in cbsr.cuh


@dataclass(frozen=True, slots=True)
class Way:
    """How a warp reads rows of S: so many lanes an entry, places side by side, groups together."""

    lanes: int
    places: int
    vector: int
    batch: int

    @property
    def streams(self) -> int:
        """How many rows of S a warp reads side by side."""
        return jit.WARP // self.lanes


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
    kernel = jit.load(
        "cbsr/spgemm.cu",
        "spgemm_csr_cbsr",
        "11PqI5i",
        (dtype, S.index_dtype, cuda_dense.COLUMNS[index_bytes]),
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
        kernel = load("matmul/spmm.cu", "spmm_csr_cut_rows", dtype, S.index_dtype, (SCALED_SUM,))
        kernel(
            jit.warps_to_blocks(S.n_cuts * -(-feat // jit.WARP)),
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


# SDDMM

#: Ways of sddmm, of rows that fit words of four places and of others.
DOTS, DOTS_SCALAR = Way(8, 4, 1, 4), Way(32, 1, 0, 1)


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
    if not S.nnz:
        return
    size = ITEMSIZE[dtype]
    together = values | indices * (4 // index_bytes)
    way = DOTS_SCALAR if k % 4 or together % 16 else DOTS
    shared = 2 * _WARPS * feat * size
    on_chip = shared <= _SHARED_BYTES
    aligned = (X | ldx * size | feat * size) % 16 == 0
    kernel = jit.load(
        "cbsr/sddmm.cu",
        "sddmm_csr_cbsr",
        "9Pq3i",
        (dtype, S.index_dtype, cuda_dense.COLUMNS[index_bytes]),
        (way.lanes, way.places, way.batch, int(on_chip)),
    )
    kernel(
        S.blocks,
        (
            *(S.indptr, S.indices, S.start, col_scale, row_scale, indices, values, X, out),
            *(ldx, k, feat, ALIGNED * aligned),
        ),
        threads=THREADS,
        shared=shared if on_chip else 0,
        stream=stream,
    )
