"""Launch the gradients of an aggregation, of features and of edge values in one pass."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.compressed import CSR
from ..engine import jit
from ..engine.jit import ITEMSIZE, fill, row_bytes
from ..engine.memory import memory_of
from ..engine.structure import Structure, structure_of
from .cuda import Shape, load_shape

_FILE = "matmul/aggregate.cu"
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


class _Addresses(NamedTuple):
    """Where arrays begin on the device, 0 for none; in the order of the kernel's parameters."""

    perm: int
    values: int
    row_scale: int
    col_scale: int
    self_weight: int
    x: int
    grad: int
    dx: int
    da: int


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that this module may launch: file and C++ name."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        for constants in _constants(types[0]):
            yield _FILE, jit.expression("aggregate_backward", types, constants)
        yield _FILE, jit.expression("aggregate_cut_rows", types, ())
        wide = _sums_dtype(types[0])
        for values, back in sorted({(types[0], 0), (wide, 0), (wide, 1)}):
            yield _FILE, jit.expression("permuted", (values, *types), (back,))
    for dtype in VALUE_DTYPES:
        yield _FILE, jit.expression("aggregate_self", (dtype,), ())


def _constants(dtype: str) -> Iterator[tuple[int, int, int]]:
    """List lanes, values and WEIGHTS; rare shapes have the general kernels only."""
    wide = 16 // ITEMSIZE[dtype]
    for lanes in (4, 8, LANES, *[MANY_LANES] * (dtype == "float32")):
        yield from ((lanes, wide, weights) for weights in (UNWEIGHTED, WEIGHTED, SCALED))
    for shape in [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2):
        yield (*shape, SCALED)


def _sums_dtype(dtype: str) -> str:
    """Return the dtype in which sums of such values run."""
    return "float64" if dtype == "float64" else "float32"


def aggregate_shape(S: Structure, dtype: str, *, feat: int, alignment: int) -> Shape:
    """Choose the widest loads that alignment allows, the lowest bits of all addresses."""
    size = ITEMSIZE[dtype]
    alignment |= feat * size
    if alignment % 16:
        return load_shape(dtype, feat=feat, stride=feat, alignment=alignment)
    lanes = 4 if feat * size <= 64 else 8 if feat * size <= 128 else LANES
    most = 16 * MANY_LANES
    if size == 4 and feat * size >= most and S.n_cols * most <= SMALL_BYTES:
        lanes = MANY_LANES
    return Shape(lanes, 16 // size)


def goes_apart(T: Structure, dtype: str, feat: int, *, inverse: bool) -> bool:
    """Return True if entries move between both orders in passes of their own."""
    wide = T.n_rows * feat * ITEMSIZE[dtype] >= APART_BYTES
    return T.nnz >= (APART_ALWAYS if not wide else APART if inverse else APART_SCATTERED)


def aggregate_backward(
    A: CSR | Structure, x: Array, grad: Array, values: Array, perm: Array, row_scale: Array,
    col_scale: Array, *, self_weight: Array | None = None, inverse: Array | None = None,
    out: tuple[Any, Any] | None = None, dself: Array | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute gradients of a product in its features and values.

    ``dx[j] = c[j] sum of a[e] r[i] grad[i] + self[j] grad[j]``, ``da[e] = r c <grad[i], x[j]>``.
    ``A`` is the transpose: its entry k is number ``perm[k]`` in the values and ``da``, or k without
    ``perm``.  ``inverse`` may be the inverse permutation.  ``dself[j] = <grad[j], x[j]>`` is of the
    dtype that sums run in, and is given wherever ``self_weight`` is.
    """
    T, m = structure_of(A), memory_of(x)
    dtype, feat = m.dtype(x), x.shape[1]
    dx, da = out or (m.empty((T.n_rows, feat), dtype, x), m.empty((T.nnz,), dtype, x))
    x, grad, values = m.rows_in_place(x), m.rows_in_place(grad), m.contiguous(values)
    row_scale = None if row_scale is None else m.factors(row_scale)
    col_scale = None if col_scale is None else m.factors(col_scale)
    arrays = perm, values, row_scale, col_scale, self_weight, x, grad, dx, da
    at, stream = _Addresses(*m.pointers(*arrays)), m.stream(x)
    strides = row_bytes(m.row_stride(x), dtype), row_bytes(m.row_stride(grad), dtype)
    with m.on_device(x):
        if dself is not None and T.n_rows:
            kernel = jit.load(_FILE, "aggregate_self", "5Pq2Ii", (dtype,))
            without = 0 if T.nnz else at.dx
            own = at.x, at.grad, at.self_weight, without, m.pointer(dself)
            blocks = -(-T.n_rows * _SELF_LANES // THREADS)
            kernel(blocks, (*own, T.n_rows, *strides, feat), threads=THREADS, stream=stream)
        if not (T.nnz and feat):
            fill(at.da, T.nnz * ITEMSIZE[dtype], 0, stream)
            if dself is None:
                fill(at.dx, T.n_rows * feat * ITEMSIZE[dtype], 0, stream)
            return dx, da
        apart = perm is not None and goes_apart(T, dtype, feat, inverse=inverse is not None)
        weights = SCALED if at.row_scale or at.col_scale else WEIGHTED if at.values else UNWEIGHTED
        case = dtype, feat, strides, (at.x | at.grad | at.dx) % 16, weights
        (dots, moved, nbytes), launches = T.prepared(_launches, *case, apart, at.values > 0)
        workspace = m.empty((nbytes,), "uint8", x) if nbytes else None
        begin = m.pointer(workspace) if nbytes else 0
        carry, ordered = begin + dots + moved, begin + dots if at.values else 0
        read = at
        if apart:
            read = at._replace(perm=0, values=ordered, da=0)
            if ordered:
                _permute(T, (dtype, dtype), (at.perm, at.values, ordered), False, stream)
        addresses = T.indptr, T.indices, T.start, T.slot, *read, begin, carry
        shared = T.start, T.cut, at.col_scale, at.self_weight, at.grad, at.dx, carry
        for launch, add_up in launches:
            launch(stream, *addresses)
            if add_up is not None:
                add_up(stream, *shared)
        if apart:
            back = memory_of(inverse).pointer(inverse) if inverse is not None else at.perm
            kinds = _sums_dtype(dtype), dtype
            _permute(T, kinds, (back, begin, at.da), inverse is None, stream)
    return dx, da


def _launches(
    T: Structure, dtype: str, feat: int, strides: tuple[int, int], alignment: int, weights: int,
    apart: bool, valued: bool,
) -> tuple[tuple[int, int, int], list[tuple[jit.Launch, jit.Launch | None]]]:  # fmt: skip
    """Prepare launches for each slice of features, and that for rows that blocks share.

    Before them are the bytes of the workspace: for dot products of entries, for values in T's
    order, and in all.
    """
    shape = aggregate_shape(T, dtype, feat=feat, alignment=alignment | strides[0] | strides[1])
    width, size = shape.width, ITEMSIZE[dtype]
    dots = -(-T.nnz * max(size, 4) // 16) * 16 if apart or feat > width else 0
    moved = -(-T.nnz * size // 16) * 16 if apart and valued else 0
    if shape.vector * size < 16:  # rare shapes have the general one
        weights = SCALED
    types = dtype, T.index_dtype
    kernel = jit.load(_FILE, "aggregate_backward", "15Pq2I3i", types, (*shape, weights))
    cuts = jit.load(_FILE, "aggregate_cut_rows", "7PI5i", types) if T.n_cuts else None
    blocks, launches = -(-T.n_cuts * width // THREADS), []
    for begin in range(0, feat, width):
        sizes = T.nnz, *strides, feat, begin, int(begin + width >= feat)
        launch, add_up = kernel.ready(T.blocks, after=sizes, threads=THREADS), None
        if cuts is not None:
            sizes = strides[1], T.n_cuts, feat, begin, *shape
            add_up = cuts.ready(blocks, after=sizes, threads=THREADS)
        launches.append((launch, add_up))
    return (dots, moved, dots + moved + 2 * T.n_cuts * width * max(size, 4)), launches


def _permute(
    T: Structure, kinds: tuple[str, str], arrays: tuple[int, int, int], back: bool, stream: int
) -> None:
    """Gather one value for each entry by a permutation, or scatter it ``back``."""
    types = (*kinds, T.index_dtype)
    kernel = jit.load(_FILE, "permuted", "3Pq", types, (int(back),))
    kernel(-(-T.nnz // (THREADS * _EACH)), (*arrays, T.nnz), threads=THREADS, stream=stream)
