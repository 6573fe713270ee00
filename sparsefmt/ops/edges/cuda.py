"""Launch what has one value an entry: SDDMM, edge softmax, and the gradient of values."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.chunks import LONG_ROW
from ..engine import jit
from ..engine.call import Prepared, Result, launcher
from ..engine.jit import ITEMSIZE, filling, row_bytes
from ..engine.memory import Memory
from ..engine.structure import Structure, exact

#: Bytes of Y that SDDMM takes in one launch: about the L2. Wider features take several, each
#: adding to the sums: 1.05 to 1.2x on graphs of 0.1 M vertices and more (H200).
RESIDENT_BYTES = 60 * 2**20
#: Mean values of a row from which teams take rows; shorter ones go by tiles: 1.6x on rows of 50,
#: 0.9x on rows of 400 (H200).
LONG_VALUES = 128
#: Numbers of heads with a tile kernel of their own; one more serves those that are no power of 2.
TILE_HEADS = (1, 2, 4, 8)
_TILE_THREADS = 128  # as in softmax.cu
#: Rows of a warp: more fill its tiles better, fewer make more warps. 16 to 128 within 10 % where
#: rows are many, 16 best by up to 2x where they are few.
_TILE_ROWS = 16
#: Threads of a team in softmax.cu, and numbers of heads that it takes side by side.
TEAMS = (16, 32, 128, 512)
#: Values a thread of a mean row up to which a team is taken; a thread holds 16 at a time (H200).
_VALUES_PER_THREAD = {16: 16, 32: 32, 128: 64, 512: 64}
_SIDE_BY_SIDE = (1, 2, 4, 8, 16, 32)

#: Threads of a block in sddmm.cu.
THREADS = 128
_FILE = {"sddmm_csr_balanced": "edges/sddmm.cu"}
_FILE |= dict.fromkeys(("edge_softmax_rows", "edge_softmax_tiles"), "edges/softmax.cu")
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "sddmm_csr_balanced": "9PqIII4i",
    "edge_softmax_rows": "5Pqiqii",
    "edge_softmax_tiles": "5Pqiqii",
}


def load(kernel: str, dtype: str, index_dtype: str, constants: tuple[int, ...] = ()) -> jit.Kernel:
    """Load a kernel of this room."""
    return jit.load(_FILE[kernel], kernel, _PARAMETERS[kernel], (dtype, index_dtype), constants)


def instantiations() -> Iterator[tuple[str, str]]:
    """Yield file and C++ name of every kernel that this room may launch."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        wide = 16 // ITEMSIZE[types[0]]
        names: list[tuple[str, tuple[int, ...]]]
        names = [("sddmm_csr_balanced", (vector,)) for vector in sorted({wide, wide // 2, 1})]
        teams = [*((lanes, 1) for lanes in TEAMS), (32, 0)]
        softmax: list[tuple[str, tuple[int, ...]]]
        softmax = [("edge_softmax_rows", team) for team in teams]
        softmax += [("edge_softmax_tiles", (heads,)) for heads in (*TILE_HEADS, 0)]
        names += [(name, (*rest, backward)) for name, rest in softmax for backward in (0, 1)]
        for name, rest in names:
            yield _FILE[name], jit.expression(name, types, rest)


# SDDMM


@launcher(in_place=("x", "y"))
def sddmm(
    S: Structure, m: Memory, x: Array, y: Array, row_scale: Array | None = None,
    col_scale: Array | None = None, *, out: Array | None = None, perm: Array | None = None,
    **_: Any,
) -> Prepared:  # fmt: skip
    """Prepare ``out[e, h] = r[i] c[j] <x_i, y_j>`` over the features of head h, heads side by side.

    Entry e is ``out[perm[e]]`` where given; only without it ``out`` has as many rows as A entries.
    Each launch takes as many features of y as the L2 serves well, a 128-byte slice at least.
    """
    dtype, heads, feat = m.dtype(x), x.shape[1] if x.ndim == 3 else 1, x.shape[-1]
    results = (Result(tuple(x.shape[1:-1]), dtype, "nnz"),)
    if not (S.nnz and heads):
        return Prepared((), results)
    if not feat:
        fill = filling(S.nnz * heads * ITEMSIZE[dtype])
        return Prepared(((fill, ("out",)),), results)
    strides = m.row_stride(x), m.row_stride(y)
    vector = _vector((m.pointer(x) | m.pointer(y)) % 16, dtype, strides, feat)
    kernel = load("sddmm_csr_balanced", dtype, S.index_dtype, (vector,))
    width = _features_at_a_time(S, ITEMSIZE[dtype], heads, feat, vector)
    sizes = S.nnz, *(row_bytes(stride, dtype) for stride in strides), S.blocks, heads, feat
    args = "indptr", "indices", "start", "x", "y", "row_scale", "col_scale", "perm", "out"
    launches = []
    for begin in range(0, feat, width):
        after = *sizes, begin, min(begin + width, feat)
        launches.append((kernel.ready(S.blocks * heads, after=after, threads=THREADS), args))
    return Prepared(tuple(launches), results)


def _vector(alignment: int, dtype: str, strides: tuple[int, int], feat: int) -> int:
    """Values of a load: 16 or 8 bytes where addresses, rows and heads are aligned to them."""
    size = ITEMSIZE[dtype]
    alignment |= strides[0] * size | strides[1] * size | feat * size
    return 16 // size if alignment % 16 == 0 else 8 // size if alignment % 8 == 0 else 1


def _features_at_a_time(S: Structure, size: int, heads: int, feat: int, vector: int) -> int:
    if size == 2 or heads > 1:  # sums of 2-byte dtypes are not rounded in between
        return feat
    least = 8 * vector
    launches = -(-feat // max(RESIDENT_BYTES // (S.n_cols * size), least))
    return -(-feat // (launches * least)) * least


# Edge softmax


@launcher(in_place=(), structure=exact)  # long rows have blocks of their own
def edge_softmax(S: Structure, m: Memory, scores: Array, *, out: Array | None = None) -> Prepared:
    """Prepare a softmax over the entries of each row, for each head."""
    return _softmax(S, m.dtype(scores), scores.shape[1:], ("scores", ""), backward=False)


@launcher(in_place=(), structure=exact)
def edge_softmax_backward(
    S: Structure, m: Memory, probabilities: Array, grad: Array, *, out: Array | None = None
) -> Prepared:
    """Prepare ``p (g - sum of p g)`` over the entries of each row, for each head."""
    arrays = "probabilities", "grad"
    return _softmax(S, m.dtype(grad), grad.shape[1:], arrays, backward=True)


def _softmax(
    S: Structure, dtype: str, shape: tuple[int, ...], arrays: tuple[str, str], *, backward: bool
) -> Prepared:
    """Prepare a softmax of values of that shape at each entry, or its gradient."""
    heads, results = prod(shape), (Result(tuple(shape), dtype, "nnz"),)
    if not (S.nnz and heads):
        return Prepared((), results)
    name, constants, n_long, grid, threads, last = _softmax_shape(S, heads)
    kernel = load(name, dtype, S.index_dtype, (*constants, int(backward)))
    launch = kernel.ready(grid, after=(S.n_rows, n_long, LONG_ROW, heads, last), threads=threads)
    return Prepared(((launch, ("indptr", "long", *arrays, "out")),), results)


def _softmax_shape(
    S: Structure, heads: int
) -> tuple[str, tuple[int, ...], int, tuple[int, int], int, int]:
    """Kernel, its template arguments, blocks for long rows, grid, threads, the last parameter."""
    side_by_side = heads if heads in _SIDE_BY_SIDE else 1
    tiled = heads in TILE_HEADS or (heads < jit.WARP and side_by_side < heads)
    if tiled and S.nnz * side_by_side < LONG_VALUES * S.n_rows:
        blocks = -(-S.n_rows * jit.WARP // (_TILE_THREADS * _TILE_ROWS))
        own = heads if heads in TILE_HEADS else 0
        grid = (S.n_long + blocks, 1)
        return "edge_softmax_tiles", (own,), S.n_long, grid, _TILE_THREADS, _TILE_ROWS
    values = S.nnz * side_by_side // S.n_rows
    fitting = (n for n in TEAMS if n >= side_by_side and n * _VALUES_PER_THREAD[n] >= values)
    lanes = next(fitting, TEAMS[-1]) if side_by_side == heads else jit.WARP
    threads = max(lanes, 128)
    # Where a block is the team, it takes long rows as any other.
    n_long = S.n_long if lanes < threads else 0
    grid = (n_long + -(-S.n_rows * lanes // threads), heads // side_by_side)
    return (
        "edge_softmax_rows",
        (lanes, int(side_by_side == heads)),
        n_long,
        grid,
        threads,
        side_by_side,
    )
