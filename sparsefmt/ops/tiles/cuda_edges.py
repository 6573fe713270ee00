"""SDDMM by the tiles of an SGT: tensor cores for those entries that pay, CSR for the rest.

Conventions as in ``_launch_tiles``.
"""

from functools import lru_cache

from ..edges import cuda as edges_cuda
from ..edges.cuda import RESIDENT_BYTES
from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from .cells import SLAB
from .cuda import TileStructure

#: Bytes of features that a block takes: what sddmm_sgt.cu is compiled for.  More take several
#: launches.
ROWS = (128, 256, 512)
#: As in sddmm_sgt.cu.
STAGES = 3
ADD, KEEP, TOGETHER = 1, 2, 4

PARAMETERS = "11P2q3I4i"


def block(height: int, row: int) -> tuple[int, int]:
    """Threads of a block, and the bytes it has on chip: ``Block`` in sddmm_sgt.cu."""
    tall = 1 if height < 64 else 2
    deep = 2 if tall * row > 512 else 1
    slabs = 1 if row > 256 or height == 16 else 2
    threads = height // 16 // tall * 2 * deep * jit.WARP
    return threads, STAGES * slabs * SLAB * row + 2 * deep * slabs * height * SLAB * 4


@lru_cache(maxsize=4096)
def _ranges(dtype: str, feat: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Bytes of features of a block, and where each launch begins, with its flags."""
    size = ITEMSIZE[dtype]
    row = next((one for one in ROWS if one >= feat * size), ROWS[-1])
    begins = range(0, feat, row // size)
    last = begins[-1]
    return row, tuple((one, ADD * (one > 0) | KEEP * (one < last)) for one in begins)


def sddmm_tiles_workspace(T: TileStructure, dtype: str, *, heads: int, feat: int) -> int:
    """Bytes for the sums of features that take several launches: 4 an entry in tiles and head."""
    return 4 * _taken(T) * heads if feat * ITEMSIZE[dtype] > ROWS[-1] else 0


def _taken(T: TileStructure) -> int:
    return T.nnz - (0 if T.rest is None else T.rest.nnz)


def sddmm_tiles(
    T: TileStructure,
    dtype: str,
    *,
    heads: int,
    feat: int,
    ldx: int,
    ldy: int,
    X: int,
    Y: int,
    perm: int,
    out: int,
    workspace: int,
    stream: int,
    row_scale: int = 0,
    col_scale: int = 0,
) -> None:
    """``out[e, h] = r[i] c[j] <X_i, Y_j>`` over the features of head h, heads side by side.

    ``perm`` has the place in ``out`` of each entry in tiles, ``T.rest_perm`` of each other one.
    X, Y, their rows and each head begin at multiples of 16 bytes, as ``copy_width`` asks; what a
    copy has behind a head is 0 in both and counts as features.
    """
    if not (T.nnz and heads):
        return
    if not feat:
        fill(out, T.nnz * heads * ITEMSIZE[dtype], 0, stream)
        return
    if T.rest is not None:
        edges_cuda.sddmm_of_pointers(
            *(T.rest, dtype), heads=heads, feat=feat, ldx=ldx, ldy=ldy, X=X, Y=Y, perm=T.rest_perm,
            row_scale=row_scale, col_scale=col_scale, out=out, stream=stream,
        )  # fmt: skip
    row, ranges = _ranges(dtype, feat)
    x_stride, y_stride = row_bytes(ldx, dtype), row_bytes(ldy, dtype)
    # All heads of an entry are written at a time, or the rows of one head read: what the L2 holds.
    order = TOGETHER if T.n_cols * y_stride <= RESIDENT_BYTES else 0
    parts = workspace if len(ranges) > 1 else 0
    threads, shared = block(T.height, row)
    constants = (T.height, row, int(bool(parts or row_scale or col_scale)))
    types = dtype, T.index_dtype
    kernel = jit.load(
        "tiles/sddmm.cu", "sddmm_sgt_mma", PARAMETERS, types, constants, shared=shared
    )
    arrays = (T.items, T.columns, T.starts, T.cells, perm, X, Y, row_scale, col_scale, out, parts)
    sizes = (T.n_rows, _taken(T), x_stride, y_stride, T.n_items, heads, feat)
    for begin, flags in ranges:
        args = (*arrays, *sizes, begin, flags | order)
        kernel(T.n_items * heads, args, threads=threads, shared=shared, stream=stream)
