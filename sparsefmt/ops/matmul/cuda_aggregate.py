"""Launches of the gradients of an aggregation, of features and of edge values in one pass.

Conventions as in ``_launch``: factors of rows and columns are float32 for 2-byte features.
"""

from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.structure import Structure
from .cuda import Shape, spmm_shape

UNWEIGHTED, WEIGHTED, SCALED = range(3)  # as in aggregate.cu
THREADS = 128  # of a block, as in rows.cuh
#: Lanes of a sub-warp, each of 16 bytes: its slice of features goes in one launch.  Every further
#: launch reads the indices again, reads and writes a float for each entry; a wider slice takes more
#: of the L2: twice as many are 1.07x faster where such slices of float32 are small (ddi, flickr,
#: artist), 0.95x where not (reddit), and 8 lanes are 0.9 to 1.0x (H200).
LANES, MANY_LANES = 16, 32
SMALL_BYTES = 48 * 2**20
_SELF_LANES = 8
#: Entries from which values go to the order of the transpose, and gradients back, in passes of
#: their own, rather than by the kernel that gathers features: 0.97x (arxiv, 64 features) to 0.65x
#: the time where the way back goes by the inverse permutation,
APART = 3 << 19
#: and where not: it takes 2.7 times as long then.
APART_SCATTERED = 4 << 20
#: But all of it lies in the L2, and passes cost 1.02x to 1.3x the time (ddi, flickr), below so many
#: bytes of features,
APART_BYTES = 16 << 20
#: unless values alone fill it.
APART_ALWAYS = 8 << 20
_EACH = 8  # entries of a thread in those passes, as in aggregate.cu


def aggregate_shape(S: Structure, dtype: str, *, feat: int, together: int) -> Shape:
    """The widest loads that alignment allows; ``together`` has the lowest bits of all of it."""
    size = ITEMSIZE[dtype]
    together |= feat * size
    if together % 16:
        return spmm_shape(dtype, feat=feat, ldx=feat, together=together, wide=False)
    lanes = 4 if feat * size <= 64 else 8 if feat * size <= 128 else LANES
    most = 16 * MANY_LANES
    if size == 4 and feat * size >= most and S.n_cols * most <= SMALL_BYTES:
        lanes = MANY_LANES
    return Shape(lanes, 16 // size)


def goes_apart(T: Structure, dtype: str, feat: int, *, inverse: bool) -> bool:
    """Whether entries move between both orders in passes of their own."""
    wide = T.n_rows * feat * ITEMSIZE[dtype] >= APART_BYTES
    return T.nnz >= (APART_ALWAYS if not wide else APART if inverse else APART_SCATTERED)


def aggregate_workspace(
    S: Structure, dtype: str, *, feat: int, together: int, data: int, perm: int, inverse: int
) -> int:
    """Bytes for sums of rows that blocks share and, where they are needed, products of entries.

    ``S`` is the transpose, ``together`` the lowest bits of ``X``, ``grad``, ``dX`` and both strides
    in bytes.
    """
    shape = aggregate_shape(S, dtype, feat=feat, together=together)
    width, size = shape.lanes * shape.vector, max(ITEMSIZE[dtype], 4)
    _, dots, moved = _of_entries(S, dtype, feat, width, (data, perm, inverse))
    return 2 * S.n_cuts * width * size + dots + moved


def _of_entries(
    S: Structure, dtype: str, feat: int, width: int, given: tuple[int, int, int]
) -> tuple[bool, int, int]:
    """Whether they go apart; bytes of dot products in the workspace, of values behind them."""
    size, (data, perm, inverse) = ITEMSIZE[dtype], given
    apart = perm != 0 and goes_apart(S, dtype, feat, inverse=inverse != 0)
    dots = S.nnz * max(size, 4) if apart or feat > width else 0
    return apart, -(-dots // 16) * 16, -(-S.nnz * size // 16) * 16 if apart and data else 0


def aggregate_backward(
    T: Structure,
    dtype: str,
    *,
    feat: int,
    ldx: int,
    ldg: int,
    perm: int,
    inverse: int = 0,
    data: int,
    X: int,
    grad: int,
    row_scale: int = 0,
    col_scale: int = 0,
    self_weight: int = 0,
    dX: int,
    dA: int,
    dself: int = 0,
    workspace: int,
    stream: int,
    shape: Shape | None = None,
) -> None:
    """``dX[j] = c[j] sum of a[e] r[i] grad[i] + self[j] grad[j]``, ``dA[e] = r c <grad[i], X[j]>``.

    ``T`` is the transpose, whose entries have the numbers ``perm`` in ``data`` and ``dA``; without
    it their own; ``inverse`` may be that permutation's.  ``dself[j] = <grad[j], X[j]>`` is of the
    type that sums run in, and is wanted wherever ``self_weight`` is given.
    """
    size = ITEMSIZE[dtype]
    strides = row_bytes(ldx, dtype), row_bytes(ldg, dtype)
    if dself and T.n_rows:
        without = 0 if T.nnz else dX
        kernel = jit.load("matmul/aggregate.cu", "aggregate_self", "5Pq2Ii", (dtype,))
        given = (X, grad, self_weight, without, dself)
        blocks = -(-T.n_rows * _SELF_LANES // THREADS)
        kernel(blocks, (*given, T.n_rows, *strides, feat), threads=THREADS, stream=stream)
    if not (T.nnz and feat):
        fill(dA, T.nnz * size, 0, stream)
        if not dself:
            fill(dX, T.n_rows * feat * size, 0, stream)
        return
    factors = (row_scale, col_scale, self_weight)
    if shape is None:
        together = X | grad | dX | strides[0] | strides[1]
        shape = aggregate_shape(T, dtype, feat=feat, together=together)
    width = shape.lanes * shape.vector
    apart, dots, moved = _of_entries(T, dtype, feat, width, (data, perm, inverse))
    carry = workspace + dots + moved
    variant = SCALED if row_scale or col_scale else WEIGHTED if data else UNWEIGHTED
    if shape.vector * size < 16:  # rare shapes have the general one
        variant = SCALED
    constants, types = (shape.lanes, shape.vector, variant), (dtype, T.index_dtype)
    values, to, places = data, dA, perm
    if apart:
        values, to, places = (workspace + dots if data else 0), 0, 0
        if data:
            _permuted(T, (dtype, dtype), (perm, data, values), False, stream)
    kernel = jit.load("matmul/aggregate.cu", "aggregate_backward", "15Pq2I3i", types, constants)
    arrays = (T.indptr, T.indices, T.start, T.slot, places, values, *factors, X, grad, dX, to)
    for begin in range(0, feat, width):
        sizes = (T.nnz, *strides, feat, begin, int(begin + width >= feat))
        args = (*arrays, workspace, carry, *sizes)
        kernel(T.blocks, args, threads=THREADS, stream=stream)
        if T.n_cuts:
            own = (T.start, T.cut, col_scale, self_weight, grad, dX, carry, strides[1])
            _cut_rows(T, dtype, (*own, T.n_cuts, feat, begin, shape.lanes, shape.vector), stream)
    if apart:
        kinds = ("float64" if dtype == "float64" else "float32", dtype)
        _permuted(T, kinds, (inverse or perm, workspace, dA), not inverse, stream)


def _permuted(
    T: Structure, kinds: tuple[str, str], arrays: tuple[int, int, int], back: bool, stream: int
) -> None:
    types = (*kinds, T.index_dtype)
    kernel = jit.load("matmul/aggregate.cu", "permuted", "3Pq", types, (int(back),))
    kernel(-(-T.nnz // (THREADS * _EACH)), (*arrays, T.nnz), threads=THREADS, stream=stream)


def _cut_rows(T: Structure, dtype: str, args: tuple[int, ...], stream: int) -> None:
    types, threads = (dtype, T.index_dtype), T.n_cuts * args[-2] * args[-1]
    kernel = jit.load("matmul/aggregate.cu", "aggregate_cut_rows", "7PI5i", types)
    kernel(-(-threads // THREADS), args, threads=THREADS, stream=stream)


def variants(dtype: str) -> list[tuple[int, int, int]]:
    """Lanes, values and weights of every instantiation that is launched."""
    wide = 16 // ITEMSIZE[dtype]
    rare = [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    lanes = [4, 8, LANES, *[MANY_LANES] * (dtype == "float32")]
    full = [(one, wide, way) for one in lanes for way in (UNWEIGHTED, WEIGHTED, SCALED)]
    return full + [(*shape, SCALED) for shape in rare]
