"""Launch GCN's normalisation of edge values, and its gradient.

Degrees (or scales), their gradients and one byte a vertex that says whether it stores a loop lie in
a workspace; pointers to those bytes are 0 where no loops are added.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.chunks import LONG_ROW
from ...formats.compressed import COO, CSR
from ..engine import jit
from ..engine.jit import ITEMSIZE, fill
from ..engine.memory import memory_of
from ..engine.structure import Structure, exact, structure_of

#: Bytes of the workspace, a vertex: degree (or scale), flag, and in backward the scale's gradient.
_BYTES, _BYTES_BACKWARD = 9, 17
_FILE = "gcn/gcn_norm.cu"
_TEAM = 8  # as in gcn_norm.cu
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "gcn_degrees": "5Pq",
    "gcn_scaled": "8P2q",
    "gcn_slopes": "8P2q",
    "gcn_gradient": "8Pq",
    "gcn_unit_scales": "4Pq",
    "gcn_rows": "6Pq2i",
    "gcn_rows_scaled": "9Pq2i",
}


def load(kernel: str, types: tuple[str, ...], *constants: int) -> jit.Kernel:
    """Load a kernel of this room."""
    return jit.load(_FILE, kernel, _PARAMETERS[kernel], types, constants)


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that this room may launch: file and C++ name."""
    for types in product(("float32", "float64"), ("int32", "int64")):
        yield _FILE, jit.expression("gcn_unit_scales", types, ())
    names = [name for name in _PARAMETERS if name != "gcn_unit_scales"]
    for types, name in product(product(VALUE_DTYPES, ("int32", "int64")), names):
        # A row is read with or without values; single entries by a kernel for each.
        unweighted = [(0,)] * (types[0] == "float32")
        for constants in [()] if name.startswith("gcn_rows") else [(1,), *unweighted]:
            yield _FILE, jit.expression(name, types, constants)


class _Entries(NamedTuple):
    """Pointers to the rows, columns and values of the entries, and their types."""

    row: int
    col: int
    data: int
    nnz: int
    types: tuple[str, str]
    weighted: bool  #: no values, and values of no entries, have the same pointer

    def load(self, kernel: str) -> jit.Kernel:
        """Load a kernel that takes one entry a thread."""
        return load(kernel, self.types, int(self.weighted))

    def add_degrees(self, degree: int, flags: int, size: int, stream: int) -> None:
        """Add up rows and flag loops, by atomics, in a workspace that it zeroes."""
        fill(degree, size, 0, stream)
        if self.nnz:
            args = (self.row, self.col, self.data, degree, flags, self.nnz)
            self.load("gcn_degrees")(_blocks(self.nnz), args, stream=stream)


def gcn_norm_coo(
    A: COO, values: Array, loops: bool, *, structure: tuple[Any, Any], out: Array, **_: Any
) -> Any:
    """Compute ``out[e] = s[i] a[e] s[j]``, then with loops theirs, as the twin in ``cpu.py``.

    ``structure`` takes rows and columns.  Two launches and the zeroing.
    """
    m, nnz, n = memory_of(out), A.nnz, A.n_rows
    if not (nnz or (n and loops)):
        return out
    workspace = m.empty((_BYTES * n,), "uint8", out)
    with m.on_device(out):
        types, stream = (m.dtype(out), A.index_dtype.name), m.stream(out)
        pointers = m.pointer(A.row), m.pointer(A.col), m.pointer(values)
        entries, degree = _Entries(*pointers, nnz, types, values is not None), m.pointer(workspace)
        flags = degree + 8 * n if loops else 0
        entries.add_degrees(degree, flags, _BYTES * n, stream)
        results = (*map(m.pointer, structure), m.pointer(out))
        args = (*pointers, degree, flags, *results, nnz, n)
        entries.load("gcn_scaled")(_blocks(nnz + n * loops), args, stream=stream)
    return out


def gcn_norm_csr(
    A: CSR | Structure, values: Array, loops: bool, *, structure: tuple[Any, Any] = (None, None),
    indptr: Array | None = None, out: Array | None = None,
) -> Any:  # fmt: skip
    """Compute ``gcn_norm_coo`` for a CSR, the loop of a row behind its entries, by two launches.

    ``structure`` takes the indptr and indices of the result.  ``indptr`` is that of a ``Structure``
    as an array: the result lies beside it.
    """
    S = exact(A)  # long rows have blocks of their own
    like = A.indptr if isinstance(A, CSR) else indptr
    m = memory_of(like)
    values = m.contiguous(values)
    dtype = "float32" if values is None else m.dtype(values)
    if out is None:
        out = m.empty((S.nnz + S.n_rows * loops,), dtype, like)
    if not S.n_rows:
        return out
    workspace = m.empty((_BYTES * S.n_rows,), "uint8", like)
    with m.on_device(like):
        types, stream, degree = (dtype, S.index_dtype), m.stream(like), m.pointer(workspace)
        flags = degree + 8 * S.n_rows if loops else 0
        arrays = (S.indptr, S.indices, m.pointer(values), S.long, degree, flags)
        results = (*map(m.pointer, structure), m.pointer(out))
        sizes, blocks = (S.n_rows, S.n_long, LONG_ROW), S.n_long + _blocks(S.n_rows * _TEAM)
        load("gcn_rows", types)(blocks, (*arrays, *sizes), stream=stream)
        load("gcn_rows_scaled", types)(blocks, (*arrays, *results, *sizes), stream=stream)
    return out


def gcn_unit_scales(S: Structure, out: Array) -> Any:
    """Compute ``d[i]^-1/2`` and ``own[i] / d[i]``, (2, n), float32 or float64; entries count 1.

    ``d[i]`` is the number of entries of row i and ``own[i]``, which is 1 less the loops of the row:
    one of them counts, stored or not.
    """
    m, n = memory_of(out), S.n_rows
    with m.on_device(out):
        dtype = m.dtype(out)
        scales = m.pointer(out), m.pointer(out) + ITEMSIZE[dtype] * n
        kernel = load("gcn_unit_scales", (dtype, S.index_dtype))
        args = (S.indptr, S.indices, *scales, n)
        kernel(jit.warps_to_blocks(n), args, stream=m.stream(out))
    return out


def gcn_norm_backward(
    A: COO | CSR | Structure, values: Array, grad: Array, loops: bool, *,
    indptr: Array | None = None, out: Array | None = None,
) -> Any:  # fmt: skip
    """Compute the gradient of the values, by three launches and the zeroing.

    ``indptr`` is that of a ``Structure`` as an array: rows are expanded from it.
    """
    m, nnz, n = memory_of(grad), A.nnz, A.n_rows
    if m.deterministic():
        raise UnsupportedError(
            "gcn_norm_backward adds up by atomics, in no fixed order: in deterministic mode "
            "compose spmm, for the degrees, and sddmm, for the products of their inverse roots."
        )
    values, grad = m.contiguous(values), m.contiguous(grad)
    if out is None:
        out = m.empty((nnz,), m.dtype(grad), grad)
    if not nnz:
        return out
    with m.on_device(grad):
        if isinstance(A, COO):
            row, col, ends, index_dtype = A.row, m.pointer(A.col), 0, A.index_dtype.name
        else:
            S = structure_of(A)
            row = m.expand(A.indptr if isinstance(A, CSR) else indptr, nnz)
            col, ends, index_dtype = S.indices, S.indptr, S.index_dtype
        workspace = m.empty((_BYTES_BACKWARD * n,), "uint8", grad)
        types, stream, scale = (m.dtype(grad), index_dtype), m.stream(grad), m.pointer(workspace)
        at = m.pointer(row), col, m.pointer(values)
        entries = _Entries(*at, nnz, types, values is not None)
        slope, flags = scale + 8 * n, scale + 16 * n if loops else 0
        entries.add_degrees(scale, flags, _BYTES_BACKWARD * n, stream)
        places, vertices = (entries.row, col, ends), (scale, flags, slope)
        slopes = (*places, entries.data, m.pointer(grad), *vertices, nnz, n)
        entries.load("gcn_slopes")(_blocks(max(nnz, n * loops)), slopes, stream=stream)
        gradient = (*places, m.pointer(grad), *vertices, m.pointer(out), nnz)
        entries.load("gcn_gradient")(_blocks(nnz), gradient, stream=stream)
    return out


def _blocks(threads: int) -> int:
    return jit.warps_to_blocks(-(-threads // jit.WARP))
