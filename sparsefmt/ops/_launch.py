"""From raw device pointers to launches: what CuPy's operations and torch's library ops share.

Every function takes a ``Structure``, the name of the value dtype, sizes, device pointers as
integers (0 for none) and the stream, and returns when the launch is enqueued.  Nothing is checked
but what a kernel cannot do: the callers have checked their arrays.
"""

from dataclasses import dataclass
from itertools import product

from .._arrays import VALUE_DTYPES, import_cupy
from .._chunks import LONG_ROW
from ..compressed import CSR
from ..errors import UnsupportedError
from . import _jit

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
#: Mean entries of a row from which slices of 256 bytes beat 128: 1.02 to 1.06x on graphs of 50 and
#: more, 0.90x on graphs of 12 (H200, float32).
DENSE_ROWS = 32

#: Bytes of Y that SDDMM takes in one launch: about twice the L2. Wider features take several, each
#: adding to the sums: 1.2 to 1.4x on graphs of 0.4 M vertices and more (H200).
RESIDENT_BYTES = 96 * 2**20

_SUM, _SCALED_SUM, _EXTREME, _EXTREME_ARG = range(4)  # as in spmm.cu
_UNWEIGHTED, _DIRECT, _INDIRECT = range(3)
_FLAGS = {"mean": 1, "min": 2}
#: Threads of a team in attention.cu, and numbers of heads that it takes side by side.
_TEAMS = (8, 16, 32, 128, 512)
#: Values of a mean row up to which a team of that size is taken (H200; a thread holds 16 at a time).
_VALUES_PER_THREAD = {8: 16, 16: 16, 32: 32, 128: 64, 512: 64}
_TOGETHER = (1, 2, 4, 8, 16, 32)


#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "spmm_csr_balanced": "13PqIIii",
    "spmm_csr_cut_rows": "8P3i",
    "spmm_coo_atomic": "7P3q",
    "spmm_arg_dx": "9P2q",
    "spmm_arg_da": "9PqIi",
    "sddmm_csr_balanced": "6PqIII4i",
    "edge_softmax_rows": "5Pqiqii",
}


@dataclass(frozen=True, slots=True)
class Structure:
    """A CSR and its ``Chunks`` as the kernels see them: sizes and device pointers."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    indptr: int
    indices: int
    start: int
    slot: int
    cut: int
    long: int
    blocks: int
    n_cuts: int
    n_long: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How a sub-warp reads rows of features: ``lanes`` times ``vector`` values at a time."""

    lanes: int
    vector: int


def structure(A: CSR) -> Structure:
    """The structure of a CSR on a GPU."""
    chunks = A.chunks
    return Structure(
        n_rows=A.n_rows,
        n_cols=A.n_cols,
        nnz=A.nnz,
        index_dtype=A.index_dtype.name,
        indptr=A.indptr.data.ptr,
        indices=A.indices.data.ptr,
        start=chunks.start.data.ptr,
        slot=chunks.slot.data.ptr,
        cut=chunks.cut.data.ptr,
        long=chunks.long.data.ptr,
        blocks=chunks.blocks,
        n_cuts=len(chunks.cut),
        n_long=len(chunks.long),
    )


def stream() -> int:
    """CuPy's current stream."""
    return int(import_cupy().cuda.get_current_stream().ptr)


def _load(
    file: str, kernel: str, dtype: str, index_dtype: str, constants: tuple[int, ...] = ()
) -> _jit.Kernel:
    return _jit.load(file, kernel, _PARAMETERS[kernel], (dtype, index_dtype), constants)


# SpMM


def spmm_shape(
    S: Structure, dtype: str, reduce: str, *, feat: int, ldx: int, X: int, out: int
) -> Shape:
    """The widest loads that alignment allows, in slices that stay in the L2.

    64-byte slices for narrow features, 256-byte ones where rows are long, else 128 bytes; loads of
    8 bytes or of one value where rows of X or of the result are not aligned to more.
    """
    size = _ITEMSIZE[dtype]
    together = X | out | ldx * size | feat * size  # its lowest bits: the alignment of every row
    if together % 16 == 0:
        if feat * size <= 64:
            return Shape(4, 16 // size)
        dense = S.nnz >= DENSE_ROWS * S.n_rows and feat * size > 128
        return Shape(16 if dense and reduce in ("sum", "mean") else 8, 16 // size)
    if together % 8 == 0 and size < 8:
        return Shape(16, 8 // size)
    return Shape(8 if feat <= 8 else 32, 1)


def spmm_workspace(S: Structure, feat: int, *, arg: bool) -> int:
    """Bytes for the partial results of rows that blocks share; 0 unless a row is very long."""
    return 2 * S.n_cuts * feat * (16 if arg else 8)


def spmm(
    S: Structure,
    dtype: str,
    reduce: str,
    *,
    feat: int,
    ldx: int,
    data: int,
    X: int,
    row_scale: int,
    col_scale: int,
    out: int,
    arg: int,
    workspace: int,
    stream: int,
    perm: int = 0,
    shape: Shape | None = None,
) -> None:
    """``out = diag(r) reduce(a c X)``; the value of entry e is ``data[perm[e]]`` where given."""
    if not (S.n_rows and feat):
        return
    if not S.nnz:
        _fill(out, S.n_rows * feat * _ITEMSIZE[dtype], 0, stream)
        if arg:
            _fill(arg, S.n_rows * feat * _ITEMSIZE[S.index_dtype], 0xFF, stream)
        return
    shape = shape or spmm_shape(S, dtype, reduce, feat=feat, ldx=ldx, X=X, out=out)
    reduction, weights = _variant(shape, dtype, reduce, bool(row_scale), arg, data, perm, col_scale)
    flags = _FLAGS.get(reduce, 0)
    partial_args = workspace + 16 * S.n_cuts * feat
    constants = (shape.lanes, shape.vector, reduction, weights)
    kernel = _load("spmm.cu", "spmm_csr_balanced", dtype, S.index_dtype, constants)
    slices = -(-feat // (shape.lanes * shape.vector))
    kernel(
        S.blocks * slices,
        (
            *(S.indptr, S.indices, S.start, S.slot, data, perm, col_scale, row_scale, X, out, arg),
            *(workspace, partial_args, S.nnz, _bytes(ldx, dtype), S.blocks, feat, flags),
        ),
        threads=128,
        stream=stream,
    )
    if S.n_cuts:
        kernel = _load(
            "spmm.cu", "spmm_csr_cut_rows", dtype, S.index_dtype, (max(reduction, _SCALED_SUM),)
        )
        kernel(
            _jit.warps_to_blocks(S.n_cuts * -(-feat // _jit.WARP)),
            (
                *(S.indptr, S.start, S.cut, row_scale, out, arg, workspace, partial_args),
                *(S.n_cuts, feat, flags),
            ),
            stream=stream,
        )


def _variant(
    shape: Shape, dtype: str, reduce: str, scaled: bool, arg: int, data: int, perm: int, cols: int
) -> tuple[int, int]:
    """Template arguments REDUCE and WEIGHTS; rare shapes and reductions have the general ones."""
    if reduce in ("max", "min"):
        return _EXTREME_ARG if arg else _EXTREME, _INDIRECT
    rare = shape.vector * _ITEMSIZE[dtype] < 16
    reduction = _SCALED_SUM if rare or scaled or reduce == "mean" else _SUM
    if not (data or cols):
        return reduction, _UNWEIGHTED
    return reduction, _INDIRECT if rare or perm or cols else _DIRECT


def spmm_coo(
    dtype: str,
    index_dtype: str,
    *,
    nnz: int,
    feat: int,
    ldx: int,
    row: int,
    col: int,
    data: int,
    X: int,
    row_scale: int,
    col_scale: int,
    out: int,
    stream: int,
) -> None:
    """Add every entry into ``out``, zeroed before, of float64 for float64 and else of float32."""
    if not (nnz and feat):
        return
    kernel = _load("spmm.cu", "spmm_coo_atomic", dtype, index_dtype)
    blocks = _jit.warps_to_blocks(nnz * -(-feat // _jit.WARP))
    arrays = (row, col, data, row_scale, col_scale, X, out)
    kernel(blocks, (*arrays, nnz, ldx, feat), stream=stream)


def spmm_arg_dx(
    T: Structure,
    dtype: str,
    *,
    feat: int,
    perm: int,
    data: int,
    grad: int,
    arg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    stream: int,
) -> None:
    """The gradient of X where only the entries in ``arg`` count; ``T`` is the transpose."""
    if not (T.n_rows and feat):
        return
    kernel = _load("sddmm.cu", "spmm_arg_dx", dtype, T.index_dtype)
    blocks = _jit.warps_to_blocks(T.n_rows * -(-feat // _jit.WARP))
    arrays = (T.indptr, T.indices, perm, data, arg, grad, row_scale, col_scale, out)
    kernel(blocks, (*arrays, T.n_rows, feat), stream=stream)


def spmm_arg_da(
    S: Structure,
    dtype: str,
    *,
    feat: int,
    ldx: int,
    X: int,
    grad: int,
    arg: int,
    row_scale: int,
    col_scale: int,
    out: int,
    stream: int,
) -> None:
    """The gradient of the values where only the entries in ``arg`` count."""
    if not S.nnz:
        return
    kernel = _load("sddmm.cu", "spmm_arg_da", dtype, S.index_dtype)
    arrays = (S.indptr, S.indices, S.start, arg, grad, X, row_scale, col_scale, out)
    args = (*arrays, S.nnz, _bytes(ldx, dtype), feat)
    kernel(S.blocks, args, threads=128, stream=stream)


# SDDMM


def sddmm(
    S: Structure,
    dtype: str,
    *,
    heads: int,
    feat: int,
    ldx: int,
    ldy: int,
    X: int,
    Y: int,
    out: int,
    stream: int,
) -> None:
    """``out[e, h] = <X_i, Y_j>`` over ``feat`` features of head h, heads side by side in a row.

    One launch for as many features of Y as the L2 serves well, a 128-byte slice at least.
    """
    if not (S.nnz and heads):
        return
    size = _ITEMSIZE[dtype]
    if not feat:
        _fill(out, S.nnz * heads * size, 0, stream)
        return
    together = X | Y | ldx * size | ldy * size | feat * size
    vector = 16 // size if together % 16 == 0 else 8 // size if together % 8 == 0 else 1
    kernel = _load("sddmm.cu", "sddmm_csr_balanced", dtype, S.index_dtype, (vector,))
    arrays = (S.indptr, S.indices, S.start, X, Y, out)
    sizes = (S.nnz, _bytes(ldx, dtype), _bytes(ldy, dtype), S.blocks)
    width = feat
    if size > 2 and heads == 1:  # sums of 2-byte dtypes are not rounded in between
        slice = 8 * vector
        width = max(RESIDENT_BYTES // (S.n_cols * size) // slice * slice, slice)
    for begin in range(0, feat, width):
        bounds = (heads, feat, begin, min(begin + width, feat))
        kernel(S.blocks * heads, (*arrays, *sizes, *bounds), threads=128, stream=stream)


# Edge softmax


def edge_softmax(
    S: Structure, dtype: str, *, heads: int, scores: int, out: int, stream: int
) -> None:
    """Softmax over the entries of each row, for each head."""
    _softmax(S, dtype, heads, (scores, 0, out), False, stream)


def edge_softmax_backward(
    S: Structure, dtype: str, *, heads: int, probabilities: int, grad: int, out: int, stream: int
) -> None:
    """``p (g - sum of p g)`` over the entries of each row, for each head."""
    _softmax(S, dtype, heads, (probabilities, grad, out), True, stream)


def _softmax(
    S: Structure, dtype: str, heads: int, arrays: tuple[int, ...], backward: bool, stream: int
) -> None:
    if not (S.nnz and heads):
        return
    together = heads if heads in _TOGETHER else 1
    values = S.nnz * together // S.n_rows
    fitting = (n for n in _TEAMS if n >= together and n * _VALUES_PER_THREAD[n] >= values)
    lanes = next(fitting, _TEAMS[-1]) if together == heads else 32
    threads = max(lanes, 128)
    # Where a block is the team, it takes long rows as any other.
    n_long = S.n_long if lanes < threads else 0
    kernel = _load(
        "attention.cu",
        "edge_softmax_rows",
        dtype,
        S.index_dtype,
        (lanes, int(together == heads), int(backward)),
    )
    blocks = n_long + -(-S.n_rows * lanes // threads)
    sizes = (S.n_rows, n_long, LONG_ROW, heads, together)
    grid = (blocks, 1 if together == heads else heads)
    kernel(grid, (S.indptr, S.long, *arrays, *sizes), threads=threads, stream=stream)


def _bytes(stride: int, dtype: str) -> int:
    """Bytes from one row to the next."""
    found = stride * _ITEMSIZE[dtype]
    if found >= 2**32:
        raise UnsupportedError(
            f"rows of features lie {found} bytes apart: kernels count to 2**32, cut the features."
        )
    return found


def _fill(pointer: int, size: int, byte: int, stream: int) -> None:
    import_cupy().cuda.runtime.memsetAsync(pointer, byte, size, stream)


# What the launchers may ask for

_INDEX = ("int32", "int64")
_TYPES = list(product(VALUE_DTYPES, _INDEX))


def _spmm_variants(dtype: str) -> list[tuple[int, ...]]:
    wide = 16 // _ITEMSIZE[dtype]
    full = [(r, w) for r in (_SUM, _SCALED_SUM) for w in (_UNWEIGHTED, _DIRECT, _INDIRECT)]
    general = [(_SCALED_SUM, _UNWEIGHTED), (_SCALED_SUM, _INDIRECT)]
    extremes = [(_EXTREME, _INDIRECT), (_EXTREME_ARG, _INDIRECT)]
    rare = [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    return [
        *((lanes, wide, *rest) for lanes in (4, 8) for rest in full + extremes),
        *((16, wide, *rest) for rest in full),
        *((*shape, *rest) for shape in rare for rest in general + extremes),
    ]


def _declare() -> None:
    for types in _TYPES:
        wide = 16 // _ITEMSIZE[types[0]]
        names = [("spmm_csr_balanced", variant) for variant in _spmm_variants(types[0])]
        names += [("spmm_csr_cut_rows", (r,)) for r in (_SCALED_SUM, _EXTREME, _EXTREME_ARG)]
        _jit.declare("spmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        _jit.declare("spmm.cu", _jit.expression("spmm_coo_atomic", types, ()))
        names = [("sddmm_csr_balanced", (vector,)) for vector in {wide, wide // 2, 1}]
        names += [("spmm_arg_da", ()), ("spmm_arg_dx", ())]
        _jit.declare("sddmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        teams = [*((lanes, 1) for lanes in _TEAMS), (32, 0)]
        variants = [(*team, backward) for team in teams for backward in (0, 1)]
        expressions = (_jit.expression("edge_softmax_rows", types, rest) for rest in variants)
        _jit.declare("attention.cu", *expressions)


_declare()
