"""Launches on the tiles of an SGT: tensor cores for those entries that pay, CSR for the rest.

Conventions as in ``_launch``.  Scales are float32 for every dtype that tensor cores take.
"""

from dataclasses import dataclass
from functools import lru_cache

from .._cells import SLAB
from .._split import Split
from . import _jit
from ._launch import ITEMSIZE, Structure, row_bytes, spmm, spmm_workspace, structure

CAPABILITY = (8, 0)
#: Features that a block takes at a time, by the rows of its window: what sgt.cu is compiled for.
SLICES = {16: (32, 64), 32: (32, 64), 64: (32, 64, 128), 128: (64,)}
#: Of them: to that width the narrow one, from the other on, and of that size of values, the wide
#: one; else the middle one.
NARROW, MIDDLE, WIDE = 32, 64, 128
WIDE_ITEMSIZE = 2

UNWEIGHTED, DIRECT, SCALED = range(3)  # as in sgt.cu
#: Of each dtype that tensor cores take, float32 as tf32; float16 has no range for scaled values.
WEIGHTS = {
    "float16": (UNWEIGHTED, DIRECT),
    "bfloat16": (UNWEIGHTED, DIRECT, SCALED),
    "float32": (UNWEIGHTED, DIRECT, SCALED),
}
DTYPES = tuple(WEIGHTS)
ADD = 1
BYTES = 16  # rows of X are copied to the chip in words of so many
#: As in sgt.cu: slabs of which it keeps on chip what tells where operands lie.
RING = 32

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
        rest=None if rest is None else structure(rest),
        rest_perm=0 if perm is None else perm.data.ptr,
    )


# How a launch is cut


def slice_of(dtype: str, height: int, feat: int) -> int:
    """Features that a block takes."""
    if feat <= NARROW:
        wanted = NARROW
    else:
        wanted = WIDE if feat >= WIDE and ITEMSIZE[dtype] == WIDE_ITEMSIZE else MIDDLE
    return wanted if wanted in SLICES[height] else MIDDLE


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
    bits, starts = (0, tiles) if weights else (32 * tiles, 0)
    rings = _up(RING * SLAB * index + RING * bits + 1, index) + (RING * starts + 1) * index
    stages, slabs = (3 if size == 4 else 4), (1 if width * size > 256 else 2)
    rows = stages * slabs * SLAB * width * size
    warps, tall = cut(height, width)
    return rows + _up(rings, 16) + (warps * tall * 256 * size if weights else 0)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@lru_cache(maxsize=4096)
def _plan(dtype: str, index_dtype: str, height: int, feat: int, ldx: int, weights: int) -> Plan:
    width = slice_of(dtype, height, feat)
    return Plan(
        constants=(height, width, weights),
        slices=-(-feat // width),
        stride=row_bytes(ldx, dtype),
        threads=cut(height, width)[0] * _jit.WARP,
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
    return 4 * T.n_parts * T.height * _up(feat, slice_of(dtype, T.height, feat))


# SpMM


def spmm_tiles(
    T: TileStructure,
    dtype: str,
    *,
    feat: int,
    ldx: int,
    data: int,
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

    ``data`` are all values, in CSR order, and ``values`` those of the tiles, ``data[split.perm]``.
    ``tile_scale`` is ``row_scale`` with 0 in rows without entries in tiles, whose sums are 0 too
    and stay so if ``r`` is Inf or NaN.  X is as ``copy_width`` asks; ``out`` and ``workspace``
    begin at multiples of 16 bytes.
    """
    if not (T.n_rows and feat):
        return
    flags = 0
    if T.rest is not None:
        flags = ADD
        spmm(
            *(T.rest, dtype, "sum"), feat=feat, ldx=ldx, data=data, X=X, row_scale=row_scale,
            col_scale=col_scale, out=out, arg=0, stream=stream, perm=T.rest_perm if data else 0,
            workspace=workspace + _parts_bytes(T, dtype, feat),
        )  # fmt: skip
    weights = SCALED if col_scale else DIRECT if values else UNWEIGHTED
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
            _jit.warps_to_blocks(T.n_cuts * T.height * -(-feat // _jit.WARP)),
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
) -> _jit.Kernel:
    types = dtype, index_dtype
    return _jit.load("sgt.cu", kernel, PARAMETERS[kernel], types, constants, shared=shared)
