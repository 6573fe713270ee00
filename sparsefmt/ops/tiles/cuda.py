"""Launches on the tiles of an SGT: tensor cores for those entries that pay, CSR for the rest.

Conventions as in ``_launch``.  Scales are float32 for every dtype that tensor cores take.
"""

from dataclasses import dataclass
from functools import lru_cache

from ...formats.cells import SLAB
from ...formats.split import Split
from ..engine import jit
from ..engine.launch import ITEMSIZE, row_bytes
from ..engine.structure import Structure
from ..matmul.cuda import spmm_of_pointers, spmm_workspace, structure

CAPABILITY = (8, 0)
#: Features that a block takes at a time, by the rows of its window: what sgt.cu is compiled for.
#: The first if there are no more of them, else the last.
SLICES = {16: (32, 64), 32: (32, 64), 64: (32, 64), 128: (64,)}

UNWEIGHTED, DIRECT, SCALED, BAKED = range(4)  # as in sgt.cu
#: Of each dtype that tensor cores take; float16 has no range for scaled values.
WEIGHTS = {
    "float16": (UNWEIGHTED, DIRECT, BAKED),
    "bfloat16": (UNWEIGHTED, DIRECT, SCALED, BAKED),
    "float32": (UNWEIGHTED, DIRECT, SCALED, BAKED),
}
DTYPES = tuple(WEIGHTS)
ADD = 1
BYTES = 16  # rows of X are copied to the chip in words of so many
#: As in sgt.cu: slabs of which it keeps on chip what tells where operands lie.
RING = 32
#: As in sgt.cu: steps of which it keeps values on chip that it puts there one by one.
BUFFERS = 3

PARAMETERS = {"spmm_sgt_mma": "11PqIIii", "spmm_sgt_parts": "4P2q4i"}


@dataclass(frozen=True, slots=True)
class TileStructure:
    """A ``Split`` that takes something, on a GPU, as the kernels see it: sizes and pointers."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    height: int
    n_items: int
    n_cuts: int
    n_parts: int
    items: int
    cuts: int
    columns: int
    masks: int
    starts: int
    cells: int
    n_cells: int
    baked: bool
    rest: Structure | None
    rest_perm: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of ``spmm_sgt_mma``."""

    constants: tuple[int, int, int]  #: height, features of a slice, weights
    slices: int
    stride: int  #: bytes between rows of X
    threads: int
    shared: int  #: bytes


def tile_structure(split: Split, shape: tuple[int, int]) -> TileStructure:
    """The structure of an SGT of that shape on a GPU; holds as long as the split does."""
    rest, perm = split.rest, split.rest_perm
    return TileStructure(
        n_rows=shape[0],
        n_cols=shape[1],
        nnz=split.nnz,
        index_dtype=split.items.dtype.name,
        height=split.height,
        n_items=len(split.items),
        n_cuts=len(split.cuts),
        n_parts=split.n_parts,
        items=split.items.data.ptr,
        cuts=split.cuts.data.ptr,
        columns=split.columns.data.ptr,
        masks=split.masks.data.ptr,
        starts=split.starts.data.ptr,
        cells=split.cells.data.ptr,
        n_cells=split.n_cells,
        baked=split.baked,
        rest=None if rest is None else structure(rest),
        rest_perm=0 if perm is None else perm.data.ptr,
    )


# How a launch is cut


def slice_of(height: int, feat: int) -> int:
    """Features that a block takes."""
    narrow, wide = SLICES[height][0], SLICES[height][-1]
    return narrow if feat <= narrow else wide


def cut(height: int, width: int) -> tuple[int, int]:
    """Warps of a block, and tiles of 16 rows that each has: ``Cut`` in sgt.cu."""
    across = 1 if width == 32 else width // 32 if height == 16 else 2
    tall = 2 if height == 128 or (height == 64 and across > 1) else 1
    return height // 16 // tall * across, tall


def shared_bytes(dtype: str, index_dtype: str, height: int, width: int, weights: int) -> int:
    """Of a block: rows of X in several stages, its guide, and with values the tiles of its warps.

    Half of the 99 KiB is enough that every device with such tensor cores has for a block.
    """
    size, index, tiles = ITEMSIZE[dtype], ITEMSIZE[index_dtype], height // 16
    rings = RING * (SLAB * index + (0 if weights else 32 * tiles)) + 1
    stages = 3 if size == 4 and not weights else 4
    slabs = 1 if size == 4 and weights else 2
    rows = stages * slabs * SLAB * width * size
    steps = (0, BUFFERS, BUFFERS, stages)[weights]
    return rows + _up(rings, 16) + steps * slabs * height * SLAB * size


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@lru_cache(maxsize=4096)
def _plan(dtype: str, index_dtype: str, height: int, feat: int, ldx: int, weights: int) -> Plan:
    width = slice_of(height, feat)
    return Plan(
        constants=(height, width, weights),
        slices=-(-feat // width),
        stride=row_bytes(ldx, dtype),
        threads=cut(height, width)[0] * jit.WARP,
        shared=shared_bytes(dtype, index_dtype, height, width, weights),
    )


# What a caller provides


def copy_width(dtype: str, feat: int, *, ldx: int, X: int) -> int:
    """0 if rows of X are read where they lie; else values from row to row of the copy to make.

    Rows begin, and end, at multiples of 16 bytes, so that no word reaches beyond them.  What lies
    in a copy behind ``feat`` is read and not used.
    """
    size = ITEMSIZE[dtype]
    return 0 if (X | ldx * size | feat * size) % BYTES == 0 else _up(feat * size, BYTES) // size


def spmm_tiles_workspace(T: TileStructure, dtype: str, feat: int) -> int:
    """Bytes for the parts of windows that several blocks share, and what the rest takes."""
    rest = 0 if T.rest is None else spmm_workspace(T.rest, dtype, feat, arg=False)
    return _parts_bytes(T, dtype, feat) + rest


def _parts_bytes(T: TileStructure, dtype: str, feat: int) -> int:
    return 4 * T.n_parts * T.height * _up(feat, slice_of(T.height, feat))


# SpMM


def spmm_tiles(
    T: TileStructure,
    dtype: str,
    *,
    feat: int,
    ldx: int,
    data: int,
    perm: int,
    values: int,
    X: int,
    row_scale: int,
    tile_scale: int,
    col_scale: int,
    out: int,
    workspace: int,
    stream: int,
) -> None:
    """``out = diag(r) a c X``, sums only.

    ``values`` are those of the entries in tiles, or if ``T.baked`` and without ``col_scale`` those
    of all cells, 0 where there is no entry; 16-byte aligned then.  ``data`` are those of the rest,
    or if there is a ``perm`` ``data[perm]``.
    ``tile_scale`` is ``row_scale`` with 0 in rows without entries in tiles, whose sums are 0 too
    and stay so if ``r`` is Inf or NaN.  X is as ``copy_width`` asks; ``workspace`` begins at a
    multiple of 16 bytes.
    """
    if not (T.n_rows and feat):
        return
    flags = 0
    if T.rest is not None:
        flags = ADD
        spmm_of_pointers(
            *(T.rest, dtype, "sum"), feat=feat, ldx=ldx, data=data, X=X, row_scale=row_scale,
            col_scale=col_scale, out=out, arg=0, stream=stream, perm=perm,
            workspace=workspace + _parts_bytes(T, dtype, feat),
        )  # fmt: skip
    weights = SCALED if col_scale else UNWEIGHTED if not values else BAKED if T.baked else DIRECT
    plan = _plan(dtype, T.index_dtype, T.height, feat, ldx, weights)
    kernel = _load("spmm_sgt_mma", dtype, T.index_dtype, plan.constants, shared=plan.shared)
    kernel(
        T.n_items * plan.slices,
        (
            *(T.items, T.columns, T.masks, T.starts, T.cells, values, col_scale, tile_scale),
            *(X, out, workspace, T.n_rows, plan.stride, T.n_items, feat, flags),
        ),
        threads=plan.threads,
        shared=plan.shared,
        stream=stream,
    )
    if T.n_cuts:
        kernel = _load("spmm_sgt_parts", dtype, T.index_dtype)
        pitch = plan.slices * plan.constants[1]
        kernel(
            jit.warps_to_blocks(T.n_cuts * T.height * -(-feat // jit.WARP)),
            (
                *(T.cuts, workspace, tile_scale, out),
                *(T.n_rows, pitch, T.n_cuts, T.height, feat, flags),
            ),
            stream=stream,
        )


def _load(
    kernel: str,
    dtype: str,
    index_dtype: str,
    constants: tuple[int, ...] = (),
    *,
    shared: int = 0,
) -> jit.Kernel:
    types = dtype, index_dtype
    return jit.load("tiles/spmm.cu", kernel, PARAMETERS[kernel], types, constants, shared=shared)
