"""Launch sums of messages that have features of their entries, their gradients, and combinations.

Nothing is checked: the callers have checked their arrays.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.compressed import CSR
from ..engine import jit
from ..engine.jit import ITEMSIZE, fill, row_bytes
from ..engine.memory import memory_of
from ..engine.structure import Structure, structure_of
from ..matmul.cuda import load_shape

_FILE = "messages/messages.cu"
THREADS = 128  # of a block, as in rows.cuh
#: KIND, as in messages.cu: of messages, of their gradients, of combinations.
SUMS = {"mul": 0, "add": 1, "relu_add": 2, "copy_edge": 3}
GRADIENTS = {"mul": 4, "add": 5, "relu_add": 6}
COMBINATIONS = {"mul": 7, "add": 8, "sub": 8, "left": 9}
ANY = 10
MEAN, MINUS = 1, 2  # flags


class _Arrays(NamedTuple):
    """Arrays of a launch, None where it has none; in the order of the kernel's parameters."""

    perm: Any = None
    scale: Any = None
    gathered: Any = None
    entries: Any = None
    own: Any = None
    sums: Any = None
    written: Any = None


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that this module may launch: file and C++ name."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        wide = 16 // ITEMSIZE[types[0]]
        shapes = [(lanes, wide, kind) for lanes in (4, 8) for kind in range(ANY)]
        shapes += [(8, 1, ANY), (32, 1, ANY), *[(16, wide // 2, ANY)] * (wide > 2)]
        for constants in shapes:
            yield _FILE, jit.expression("message_rows", types, constants)
        yield _FILE, jit.expression("message_cut_rows", types, ())


def message_aggregate(
    A: CSR | Structure, x: Array, edges: Array, perm: Array, message: str, reduce: str, *,
    out: Array | None = None,
) -> Any:  # fmt: skip
    """Compute ``out[i] = reduce of m(x[j], edges[perm[e]])`` over the entries of row i."""
    S, m = structure_of(A), memory_of(edges)
    if out is None:
        out = m.empty((S.n_rows, edges.shape[1]), m.dtype(edges), edges)
    x = None if message == "copy_edge" else x
    arrays = _Arrays(perm, None, x, edges, None, out, None)
    _launch(S, SUMS[message], arrays, edges, MEAN * (reduce == "mean"))
    return out


def message_aggregate_backward(
    A: CSR | Structure, x: Array, edges: Array, grad: Array, perm: Array, scale: Array,
    message: str, wanted: bool, *, out: tuple[Any, Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute the gradients in features and, if ``wanted``, of entries: of 0 rows if not.

    ``A`` is the transpose: its entry k is number ``perm[k]`` in the features of entries.  ``scale``
    multiplies the rows of ``grad``.
    """
    T, m = structure_of(A), memory_of(grad)
    feat, dtype = grad.shape[1], m.dtype(grad)
    if out is None:
        shapes = (T.n_rows, feat), (T.nnz if wanted else 0, feat)
        out = m.empty(shapes[0], dtype, grad), m.empty(shapes[1], dtype, grad)
    x, edges = (None, None) if message == "add" else (x, edges)
    arrays = _Arrays(perm, m.factors(scale), grad, edges, x, out[0], out[1] if wanted else None)
    _launch(T, GRADIENTS[message], arrays, grad, 0)
    return out


def edge_combine(
    A: CSR | Structure, left: Array, right: Array, perm: Array, scale: Array, op: str, *,
    out: Array | None = None,
) -> Any:  # fmt: skip
    """Compute ``out[perm[e]] = scale[i] left[i] op right[j]`` for each entry, or ``left`` alone.

    Sums and differences take no ``scale``.
    """
    S, m = structure_of(A), memory_of(left)
    if out is None:
        out = m.empty((S.nnz, left.shape[1]), m.dtype(left), left)
    right = None if op == "left" else right
    arrays = _Arrays(perm, m.factors(scale), right, None, left, None, out)
    _launch(S, COMBINATIONS[op], arrays, left, MINUS * (op == "sub"))
    return out


def _launch(S: Structure, kind: int, arrays: _Arrays, like: Array, flags: int) -> None:
    """Launch a kernel over the rows of S; ``like`` has the features' number and dtype."""
    m, feat = memory_of(like), like.shape[1]
    dtype = m.dtype(like)
    gathered, entries, own = (
        None if array is None else m.rows_in_place(array)
        for array in (arrays.gathered, arrays.entries, arrays.own)
    )
    at = m.pointers(*arrays[:2], gathered, entries, own, *arrays[5:])
    strides = [0 if a is None else m.row_stride(a) for a in (gathered, entries, own)]
    size = ITEMSIZE[dtype]
    with m.on_device(like):
        stream = m.stream(like)
        if not (S.nnz and feat):
            if at[5]:
                fill(at[5], S.n_rows * feat * size, 0, stream)
            return
        alignment = (at[2] | at[3] | at[4] | at[5] | at[6]) % 16
        for stride in strides:
            alignment |= stride * size % 16
        shape = load_shape(dtype, feat=feat, stride=feat, alignment=alignment)
        width = -(-feat // shape.width) * shape.width
        nbytes = 2 * S.n_cuts * width * max(size, 4) if at[5] else 0
        workspace = m.empty((nbytes,), "uint8", like) if nbytes else None
        carry = m.pointer(workspace)
        rare = shape.vector * size < 16
        constants, types = (*shape, ANY if rare else kind), (dtype, S.index_dtype)
        kernel = jit.load(_FILE, "message_rows", "12Pq4I3i", types, constants)
        sizes = *(row_bytes(stride, dtype) for stride in strides), S.blocks, feat, kind, flags
        blocks = S.blocks * (width // shape.width)
        row_bytes(feat, dtype)  # the kernel counts in the rows of results as in those it reads
        structure = S.indptr, S.indices, S.start, S.slot
        kernel(blocks, (*structure, *at, carry, S.nnz, *sizes), threads=THREADS, stream=stream)
        if nbytes:
            kernel = jit.load(_FILE, "message_cut_rows", "5P6i", types)
            args = S.indptr, S.start, S.cut, at[5], carry, S.n_cuts, feat, width, *shape, flags
            kernel(-(-S.n_cuts * width // THREADS), args, threads=THREADS, stream=stream)
