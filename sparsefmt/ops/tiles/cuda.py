"""Launch SpMM by tiles: tensor cores for those entries that pay, the CSR kernel for the rest.

Scales are float32 for every dtype that tensor cores take.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..._caches import lru_cache
from ...formats.arrays import Array
from ...formats.sgt import SGT
from ..engine import jit
from ..engine.jit import ITEMSIZE, row_bytes
from ..engine.memory import memory_of
from ..engine.structure import Structure
from .cells import SLAB
from .costs import Costs
from .operands import Packed, TileStructure, find_operands

CAPABILITY = (8, 0)
#: Features that a block takes at a time, by the rows of its window: what spmm.cu is compiled for.
#: The first if there are no more of them, else the last.
SLICES = {16: (32, 64), 32: (32, 64), 64: (32, 64), 128: (64,)}

UNWEIGHTED, DIRECT, SCALED, BAKED = range(4)  # as in spmm.cu
#: Of each dtype that tensor cores take; float16 has no range for scaled values.
WEIGHTS = {
    "float16": (UNWEIGHTED, DIRECT, BAKED),
    "bfloat16": (UNWEIGHTED, DIRECT, SCALED, BAKED),
    "float32": (UNWEIGHTED, DIRECT, SCALED, BAKED),
}
DTYPES = tuple(WEIGHTS)
ADD = 1
BYTES = 16  # rows of X are copied to the chip in words of so many
#: As in spmm.cu: slabs of which it keeps on chip what tells where operands lie.
RING = 32
#: As in spmm.cu: steps of which it keeps values on chip that it puts there one by one.
BUFFERS = 3

_FILE = "tiles/spmm.cu"
#: Parameters of both kernels as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS, _OF_PARTS = "11PqIIii", "4P2q4i"


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """One launch of ``spmm_sgt_mma``."""

    constants: tuple[int, int, int]  #: height, features of a slice, weights
    slices: int
    stride: int  #: bytes between rows of X
    threads: int
    shared: int  #: bytes


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel of SpMM by tiles that may be launched: file and C++ name."""
    shapes = [(height, width) for height, widths in SLICES.items() for width in widths]
    for types in product(DTYPES, ("int32", "int64")):
        for shape, weights in product(shapes, WEIGHTS[types[0]]):
            yield _FILE, jit.expression("spmm_sgt_mma", types, (*shape, weights))
        yield _FILE, jit.expression("spmm_sgt_parts", types, ())


# How a launch is cut


def slice_of(height: int, feat: int) -> int:
    """Choose the features that a block takes."""
    narrow, wide = SLICES[height][0], SLICES[height][-1]
    return narrow if feat <= narrow else wide


def team(height: int, width: int) -> tuple[int, int]:
    """Choose the warps of a block, and the tiles of 16 rows of each: ``Cut`` in spmm.cu."""
    across = 1 if width == 32 else width // 32 if height == 16 else 2
    tall = 2 if height == 128 or (height == 64 and across > 1) else 1
    return height // 16 // tall * across, tall


def shared_bytes(dtype: str, index_dtype: str, height: int, width: int, weights: int) -> int:
    """Count a block's bytes: rows of X in stages, its guide, with values its warps' tiles.

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
def launch_shape(
    dtype: str, index_dtype: str, height: int, feat: int, stride: int, weights: int
) -> LaunchShape:
    """Choose the shape of a launch; ``stride`` counts the values between rows of X."""
    width = slice_of(height, feat)
    return LaunchShape(
        constants=(height, width, weights),
        slices=-(-feat // width),
        stride=row_bytes(stride, dtype),
        threads=team(height, width)[0] * jit.WARP,
        shared=shared_bytes(dtype, index_dtype, height, width, weights),
    )


# What kernels read in place


def copy_width(dtype: str, feat: int, *, stride: int, pointer: int) -> int:
    """Return 0 if rows of X are read where they lie; else the row stride of the copy to make.

    Rows begin, and end, at multiples of 16 bytes, so that no word reaches beyond them.  What lies
    in a copy behind ``feat`` is read and not used.
    """
    size = ITEMSIZE[dtype]
    aligned = (pointer | stride * size | feat * size) % BYTES == 0
    return 0 if aligned else _up(feat * size, BYTES) // size


def readable(x: Array) -> Any:
    """Return ``x``, or a copy of it, wider by zeros, whose rows and heads begin as kernels ask."""
    m = memory_of(x)
    x, feat = m.rows_in_place(x), x.shape[-1]
    width = copy_width(m.dtype(x), feat, stride=m.row_stride(x), pointer=m.pointer(x))
    if not width:
        return x
    copy = m.zeros((*x.shape[:-1], width), m.dtype(x), x)
    copy[..., :feat] = x
    return copy


# SpMM


def spmm(
    on_csr: Callable[..., Any], A: SGT | Structure, x: Array, values: Array | None = None,
    perm: Array | None = None, row_scale: Array | None = None, col_scale: Array | None = None,
    reduce: str = "sum", *, costs: Costs | None = None, out: Array | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Compute ``out = diag(r) a c X``, a sum or mean, where ``against_spmm`` has no reason.

    The value of entry e is ``values[perm[e]]``, of an SGT its own; ``on_csr`` multiplies the rest.
    """
    weighted = values is not None or col_scale is not None
    choice = find_operands(A, "spmm", x, costs, weighted=weighted)
    if choice is None:  # another thread has just prepared other tiles
        return on_csr(A, x, values, perm, row_scale, col_scale, reduce, out=out)
    tiles, operands = choice
    m, T, feat = memory_of(x), operands.structure, x.shape[1]
    if out is None:
        out = m.empty((T.n_rows, feat), m.dtype(x), x)
    if not (T.n_rows and feat):
        return out
    values, col_scale = m.contiguous(values), m.factors(col_scale)
    with m.on_device(x):
        shares = tiles.shares() if reduce == "mean" else None
        rows, tile_rows = operands.row_factors(m.factors(row_scale), shares)
        baked = operands.split.baked and col_scale is None
        packed = tiles.packed(operands, values, perm, baked=baked)
        x = readable(x)
        if T.rest is not None:
            of_rest = x if x.shape[1] == feat else x[:, :feat]
            on_csr(T.rest, of_rest, packed.rest, packed.perm, rows, col_scale, out=out)
        _launch(T, x, packed, baked, tile_rows, col_scale, out)
    return out


def _launch(
    T: TileStructure, x: Array, packed: Packed, baked: bool, row_scale: Array, col_scale: Array,
    out: Array,
) -> None:  # fmt: skip
    m, feat = memory_of(x), out.shape[1]
    dtype, values, flags = m.dtype(x), m.pointer(packed.tiles), ADD * (T.rest is not None)
    weights = SCALED if col_scale is not None else UNWEIGHTED
    if values and weights == UNWEIGHTED:
        weights = BAKED if baked else DIRECT
    shape = launch_shape(dtype, T.index_dtype, T.height, feat, m.row_stride(x), weights)
    pitch = shape.slices * shape.constants[1]
    sums = m.empty((4 * T.n_parts * T.height * pitch,), "uint8", x) if T.n_parts else None
    scale, workspace, to, stream = *map(m.pointer, (row_scale, sums, out)), m.stream(x)
    types, of_case = (dtype, T.index_dtype), shape.constants
    kernel = jit.load(_FILE, "spmm_sgt_mma", _PARAMETERS, types, of_case, shared=shape.shared)
    kernel(
        T.n_items * shape.slices,
        (
            *(T.items, T.columns, T.masks, T.starts, T.cells, values, m.pointer(col_scale)),
            *(scale, m.pointer(x), to, workspace),
            *(T.n_rows, shape.stride, T.n_items, feat, flags),
        ),
        threads=shape.threads,
        shared=shape.shared,
        stream=stream,
    )
    if T.n_cuts:
        kernel = jit.load(_FILE, "spmm_sgt_parts", _OF_PARTS, types)
        kernel(
            jit.warps_to_blocks(T.n_cuts * T.height * -(-feat // jit.WARP)),
            (T.cuts, workspace, scale, to, T.n_rows, pitch, T.n_cuts, T.height, feat, flags),
            stream=stream,
        )
