"""Launches of products with a sample of each row: its kernels choose entries as they load them.

Conventions as in ``_launch``.  A block shares the work of its own rows, by no plan; where hardly a
row is sampled, by the chunks of the structure.  Rows have fewer than 2**31 entries.
"""

import math
from dataclasses import dataclass
from itertools import product

from ...formats import chunks
from ...formats.arrays import import_cupy
from ...formats.compressed import CSR
from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.structure import Structure
from ..matmul import cuda as matmul_cuda
from ..matmul.cuda import Shape, spmm_shape
from .options import STRATEGIES

UNWEIGHTED, DIRECT, SCALED = range(3)  # as in sampled.cu
BY_ROWS, STAGING, PLANNED = range(3)
MEAN, RESCALE = 1, 2  # flags
THREADS = 128  # of a block, as in rows.cuh
BLOCK_ROWS = 2 * THREADS  # most rows of a block, as in sampled.cuh
_PIECE = 8  # entries, as in common.cuh
#: About how many pieces a sub-warp goes through: where slices of X stay in the L2 and rows have
#: many entries (1.09x over 12 at 16 of them), where rows have few, and where slices are larger.
_PIECES, _PIECES_FEW, _PIECES_FAR = 36, 12, 6
_MANY = 16  # entries
_RESIDENT = 48 * 2**20  # bytes of a slice of X
#: And where a block gathers its sample: few rows at a time, so that the L2 keeps what it reads of
#: their indices; fewer for few entries and where it reads values too (1.02x and 1.09x over 6).
_PIECES_STAGING, _PIECES_STAGING_FEW = 6, 3
#: Widths, in mean degrees, from which chunks cut rows better: 1.02x at 12, 0.94x at 6 (H200).
_PLANNED = 8
#: And up to which it pays that one slice gathers the sample: 1.22x at 0.13, 0.9x to 1.1x at 1 to 6.
_STAGING = {"fastrand": 1, "random": 8}
_WAVES = 16  # of blocks, below which their number is made whole
_SAMPLE_LANES = 8  # of a row, as in sampling.cu


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which entries of a row: ``width`` of them by a strategy; of all rows alike.

    ``seed_at`` is the address of an int64 on the device that replaces the seed, so that a CUDA
    graph can draw anew; 0 for none.
    """

    width: int
    strategy: str
    seed: int = 0
    seed_at: int = 0

    @property
    def seeds(self) -> tuple[int, int]:
        """As kernels take them."""
        return self.seed_at, self.seed % 2**64


def bare_structure(A: CSR) -> Structure:
    """The structure of a CSR without a plan, which is not made for it."""
    arrays = A.indptr.data.ptr, A.indices.data.ptr
    return Structure(*A.shape, A.nnz, A.index_dtype.name, *arrays, *[0] * 7)


def sampled_shape(dtype: str, *, feat: int, ldx: int, together: int) -> Shape:
    """As for ``_launch.spmm``, in slices of 128 bytes at most."""
    return spmm_shape(dtype, feat=feat, ldx=ldx, together=together, wide=False)


def _whole(S: Structure, sampling: Sampling) -> bool:
    """Whether it is known that every row is taken whole."""
    return 0 < S.longest <= sampling.width


def _by_plan(S: Structure, sampling: Sampling) -> bool:
    """Whether to go by the chunks: hardly a row is sampled, and no block cuts a row."""
    rare = bool(S.blocks) and not S.n_cuts and S.nnz * _PLANNED <= S.n_rows * sampling.width
    return rare and sampling.strategy != "random"


def _kept(S: Structure, sampling: Sampling, slices: int) -> tuple[int, int] | None:
    """Places where the first slice gathers a sample for the others; None where that does not pay.

    Of each row, 0 for as many as it has entries, and of all rows; values behind indices of so many
    are aligned, whatever their dtypes.
    """
    if slices < 2 or sampling.strategy == "bucket" or not S.nnz:
        return None
    most = _STAGING[sampling.strategy] * S.nnz
    if S.n_rows * sampling.width > most:
        return None
    room = sampling.width if S.n_rows * sampling.width <= S.nnz else 0
    return room, -(-(S.n_rows * room or S.nnz) // 4) * 4


def workspace(
    S: Structure,
    dtype: str,
    sampling: Sampling,
    *,
    feat: int,
    ldx: int,
    together: int,
    weighted: bool,
) -> int:
    """Bytes to gather a sample, where that pays: its columns, and values if there are any.

    ``together`` has the lowest bits of the addresses of X and the result.
    """
    if _whole(S, sampling):
        return matmul_cuda.spmm_workspace(S, dtype, feat, arg=False)
    shape = sampled_shape(dtype, feat=feat, ldx=ldx, together=together)
    kept = _kept(S, sampling, _slices(feat, shape))
    return kept[1] * (ITEMSIZE[S.index_dtype] + weighted * ITEMSIZE[dtype]) if kept else 0


def _slices(feat: int, shape: Shape) -> int:
    return -(-feat // (shape.lanes * shape.vector))


def spmm_sampled(
    S: Structure,
    dtype: str,
    sampling: Sampling,
    *,
    feat: int,
    ldx: int,
    data: int,
    perm: int = 0,
    X: int,
    row_scale: int = 0,
    col_scale: int = 0,
    flags: int = 0,
    out: int,
    workspace: int = 0,
    stream: int,
) -> None:
    """``out = diag(r) sum of a c X`` over the sampled entries; values as ``_launch.spmm`` takes."""
    if _whole(S, sampling):
        matmul_cuda.spmm_of_pointers(
            *(S, dtype, "mean" if flags & MEAN else "sum"),
            feat=feat,
            ldx=ldx,
            data=data,
            perm=perm,
            X=X,
            row_scale=row_scale,
            col_scale=col_scale,
            out=out,
            arg=0,
            workspace=workspace,
            stream=stream,
        )
        return
    if not (S.n_rows and feat):
        return
    if not S.nnz:
        fill(out, S.n_rows * feat * ITEMSIZE[dtype], 0, stream)
        return
    shape = sampled_shape(dtype, feat=feat, ldx=ldx, together=(X | out) % 16)
    slices, types, stride = _slices(feat, shape), (dtype, S.index_dtype), row_bytes(ldx, dtype)
    weights = _weights(dtype, shape, bool(data), bool(perm or col_scale))
    kept = _kept(S, sampling, slices)
    room, places = kept or (0, 0)
    values = workspace + places * ITEMSIZE[S.index_dtype] if kept and data else 0

    def launch(way: int, strategy: str, entries: tuple[int, ...], first: int, count: int) -> None:
        pieces = _pieces(S, sampling, shape, way, bool(values))
        rows = _rows_of_block(S, sampling.width, shape, count, pieces)
        blocks = S.blocks if way == PLANNED else -(-S.n_rows // rows)
        constants = shape.lanes, shape.vector, STRATEGIES[strategy], weights, way
        kernel = jit.load("sampling/spmm.cu", "spmm_sampled", "12PQqII6i", types, constants)
        indices, data, perm = entries
        to = (workspace, values) if way == STAGING else (0, 0)
        arrays = (S.indptr, indices, S.start, data, perm, row_scale, col_scale, X, out, *to)
        sizes = (S.n_rows, stride, blocks, first, sampling.width, room, rows, feat, flags)
        args = (*arrays, *sampling.seeds, *sizes)
        kernel(blocks * count, args, threads=THREADS, stream=stream)

    if kept:
        launch(STAGING, sampling.strategy, (S.indices, data, perm), 0, 1)
        launch(BY_ROWS, "bucket", (workspace, values, 0), 1, slices - 1)
    else:
        way = PLANNED if _by_plan(S, sampling) else BY_ROWS
        launch(way, sampling.strategy, (S.indices, data, perm), 0, slices)


def _weights(dtype: str, shape: Shape, data: bool, others: bool) -> int:
    """Template argument WEIGHTS; rare shapes have the general one."""
    rare = shape.lanes != 8 or shape.vector * ITEMSIZE[dtype] < 16
    return SCALED if others or rare else DIRECT if data else UNWEIGHTED


def _pieces(S: Structure, sampling: Sampling, shape: Shape, way: int, weighted: bool) -> int:
    """How many a sub-warp is to go through: measured, see the constants."""
    if way == STAGING:
        few = weighted or sampling.width <= _MANY
        return _PIECES_STAGING_FEW if few else _PIECES_STAGING
    if S.n_cols * shape.lanes * 16 > _RESIDENT:
        return _PIECES_FAR
    return _PIECES if min(S.nnz / S.n_rows, sampling.width) >= _MANY else _PIECES_FEW


def _rows_of_block(S: Structure, width: int, shape: Shape, slices: int, pieces: int) -> int:
    """Rows that keep the sub-warps of a block busy, as far as the mean degree tells.

    A last wave of few blocks takes as long as a full one: where waves are few, they are whole.
    """
    device = import_cupy().cuda.runtime.getDevice()
    wave = chunks.RESIDENT_BLOCKS * chunks.multiprocessors(device) // slices or 1
    kept = min(S.nnz / S.n_rows, width)
    rows = min(THREADS // shape.lanes * pieces / max(kept / _PIECE, 1), BLOCK_ROWS)
    waves = S.n_rows / (rows * wave)
    if waves < _WAVES:
        rows = S.n_rows / (max(round(waves), 1) * wave)
    return max(min(math.ceil(rows), BLOCK_ROWS), 4)


def sddmm_sampled(
    S: Structure,
    dtype: str,
    sampling: Sampling,
    *,
    feat: int,
    ldx: int,
    ldy: int,
    X: int,
    Y: int,
    row_scale: int = 0,
    col_scale: int = 0,
    flags: int = 0,
    out: int,
    stream: int,
) -> None:
    """``out[e] = r c <X[i], Y[j]>`` at the sampled entries, 0 at the others."""
    size = ITEMSIZE[dtype]
    fill(out, S.nnz * size, 0, stream)
    if not (S.nnz and feat):
        return
    together = (X | Y | ldx * size | ldy * size | feat * size) % 16
    shape = Shape(_PIECE, 1 if together else 16 // size)
    rows = _rows_of_block(S, sampling.width, shape, 1, _PIECES_FEW)
    constants, types = (shape.vector, STRATEGIES[sampling.strategy]), (dtype, S.index_dtype)
    kernel = jit.load("sampling/sddmm.cu", "sddmm_sampled", "8PQq2I4i", types, constants)
    arrays = (S.indptr, S.indices, row_scale, col_scale, X, Y, out, *sampling.seeds)
    strides = row_bytes(ldx, dtype), row_bytes(ldy, dtype)
    args = (*arrays, S.n_rows, *strides, sampling.width, rows, feat, flags)
    kernel(-(-S.n_rows // rows), args, threads=THREADS, stream=stream)


def sample_rows(
    S: Structure,
    sampling: Sampling,
    *,
    to: int = 0,
    room: int = 0,
    cols: int,
    entries: int,
    rows: int = 0,
    stream: int,
) -> None:
    """Column, entry and row of each sampled entry.

    Those of row i lie at ``to[i]``; without ``to`` at ``i * room``, or at ``indptr[i]`` where room
    is 0, and columns in places that stay free are n_cols.
    """
    if not S.n_rows:
        return
    constants = (STRATEGIES[sampling.strategy],)
    kernel = jit.load("sampling/rows.cu", "sample_rows", "7PQ2q2i", (S.index_dtype,), constants)
    arrays = (S.indptr, S.indices, to, cols, entries, rows, *sampling.seeds)
    blocks = min(-(-S.n_rows * _SAMPLE_LANES // THREADS), jit.MAX_BLOCKS)
    args = (*arrays, S.n_rows, S.n_cols, sampling.width, room)
    kernel(blocks, args, threads=THREADS, stream=stream)


def variants(dtype: str) -> list[tuple[int, int, int, int, int]]:
    """Lanes, values, strategy, weights and way of every product that is launched."""
    wide = 16 // ITEMSIZE[dtype]
    bucket, fastrand, drawn = STRATEGIES.values()
    ways = [*product(STRATEGIES.values(), (BY_ROWS,)), (bucket, PLANNED), (fastrand, PLANNED)]
    ways += [(fastrand, STAGING), (drawn, STAGING)]
    rare = [(4, wide), (8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    found = [*product(((8, wide),), (UNWEIGHTED, DIRECT, SCALED), ways)]
    found += product(rare, (SCALED,), ways)
    return [(*shape, strategy, weights, way) for shape, weights, (strategy, way) in found]
