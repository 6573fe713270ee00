"""Launch SDDMM by tiles: tensor cores for those entries that pay, the CSR kernel for the rest."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from ..._caches import lru_cache
from ...formats.arrays import Array
from ...formats.sgt import SGT
from ..edges.cuda import RESIDENT_BYTES
from ..engine import jit
from ..engine.jit import ITEMSIZE, fill, row_bytes
from ..engine.memory import memory_of
from ..engine.structure import Structure
from .cells import SLAB
from .costs import Costs
from .cuda import DTYPES, SLICES, readable
from .operands import TileStructure, find_operands

#: Bytes of features that a block takes: what sddmm.cu is compiled for.  More take several
#: launches.
ROWS = (128, 256, 512)
#: As in sddmm.cu.
STAGES = 3
ADD, KEEP, TOGETHER = 1, 2, 4

_FILE = "tiles/sddmm.cu"
#: Parameters as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = "11P2q3I4i"


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel of SDDMM by tiles that may be launched: file and C++ name."""
    for types in product(DTYPES, ("int32", "int64")):
        for constants in product(SLICES, ROWS, (0, 1)):
            yield _FILE, jit.expression("sddmm_sgt_mma", types, constants)


def block(height: int, row: int) -> tuple[int, int]:
    """Choose the threads of a block, and the bytes it has on chip: ``Block`` in sddmm.cu."""
    tall = 1 if height < 64 else 2
    deep = 2 if tall * row > 512 else 1
    slabs = 1 if row > 256 or height == 16 else 2
    threads = height // 16 // tall * 2 * deep * jit.WARP
    return threads, STAGES * slabs * SLAB * row + 2 * deep * slabs * height * SLAB * 4


@lru_cache(maxsize=4096)
def launches(dtype: str, feat: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Choose the bytes of features of a block, and where each launch begins, with its flags."""
    size = ITEMSIZE[dtype]
    row = next((start for start in ROWS if start >= feat * size), ROWS[-1])
    begins = range(0, feat, row // size)
    last = begins[-1]
    return row, tuple((start, ADD * (start > 0) | KEEP * (start < last)) for start in begins)


def sddmm(
    on_csr: Callable[..., Any], A: SGT | Structure, X: Array, Y: Array,
    row_scale: Array | None = None, col_scale: Array | None = None, *, perm: Array | None = None,
    costs: Costs | None = None, out: Array | None = None, **_: Any,
) -> Any:  # fmt: skip
    """Compute ``out[e, h] = r[i] c[j] <X_i, Y_j>`` over the features of head h, heads side by side.

    Entry e is ``out[perm[e]]`` where given.  ``on_csr`` makes the products of the rest.
    """
    choice = find_operands(A, "sddmm", X, costs)
    if choice is None:  # another thread has just prepared other tiles
        return on_csr(A, X, Y, row_scale, col_scale, out=out, perm=perm)
    m, operands = memory_of(X), choice[1]
    T, dtype, heads = operands.structure, m.dtype(X), X.shape[1] if X.ndim == 3 else 1
    if out is None:
        out = m.empty((T.nnz, *X.shape[1:-1]), dtype, X)
    if not (T.nnz and heads):
        return out
    row_scale, col_scale = m.factors(row_scale), m.factors(col_scale)
    with m.on_device(X):
        if not X.shape[-1]:
            fill(m.pointer(out), T.nnz * heads * ITEMSIZE[dtype], 0, m.stream(X))
            return out
        # What a copy has behind a head is 0 in both and counts as features.
        X, Y, numbers = readable(X), readable(Y), operands.numbers(perm)
        if T.rest is not None:
            on_csr(T.rest, X, Y, row_scale, col_scale, out=out, perm=numbers.rest)
        _launch(T, X, Y, numbers.tiles, row_scale, col_scale, out)
    return out


def _launch(
    T: TileStructure, X: Array, Y: Array, numbers: Array, row_scale: Array, col_scale: Array,
    out: Array,
) -> None:  # fmt: skip
    m, heads, feat = memory_of(X), X.shape[1] if X.ndim == 3 else 1, X.shape[-1]
    dtype, scaled = m.dtype(X), row_scale is not None or col_scale is not None
    row, ranges = launches(dtype, feat)
    # Sums of features that take several launches: 4 bytes an entry in tiles and head.
    sums = m.empty((4 * T.taken * heads,), "uint8", X) if len(ranges) > 1 else None
    x_stride, y_stride = row_bytes(m.row_stride(X), dtype), row_bytes(m.row_stride(Y), dtype)
    # All heads of an entry are written at a time, or the rows of one head read: what the L2 holds.
    order = TOGETHER if T.n_cols * y_stride <= RESIDENT_BYTES else 0
    threads, shared = block(T.height, row)
    constants = (T.height, row, int(sums is not None or scaled))
    types = dtype, T.index_dtype
    kernel = jit.load(_FILE, "sddmm_sgt_mma", _PARAMETERS, types, constants, shared=shared)
    arrays = map(m.pointer, (numbers, X, Y, row_scale, col_scale, out, sums))
    sizes = (T.n_rows, T.taken, x_stride, y_stride, T.n_items, heads, feat)
    args = (T.items, T.columns, T.starts, T.cells, *arrays, *sizes)
    blocks, stream = T.n_items * heads, m.stream(X)
    for begin, flags in ranges:
        bounds = begin, flags | order
        kernel(blocks, (*args, *bounds), threads=threads, shared=shared, stream=stream)
