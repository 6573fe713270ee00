"""From raw device pointers to launches: what CuPy's operations and torch's library ops share.

Every function takes a ``Structure``, the name of the value dtype, sizes, device pointers as
integers (0 for none) and the stream, and returns when the launch is enqueued.  Scales are float32
for 2-byte values, else of their dtype.  Nothing is checked but what a kernel cannot do: the callers
have checked their arrays.
"""

from dataclasses import dataclass
from functools import lru_cache

from .._arrays import import_cupy
from .._chunks import LONG_ROW
from ..compressed import CSR
from ..errors import KernelLaunchError, UnsupportedError
from . import _jit

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
#: Mean entries of a row from which slices of 256 bytes beat 128: 1.02 to 1.06x on graphs of 50 and
#: more, 0.90x on graphs of 12 (H200, float32).
DENSE_ROWS = 32

#: Bytes of Y that SDDMM takes in one launch: about twice the L2. Wider features take several, each
#: adding to the sums: 1.2 to 1.4x on graphs of 0.4 M vertices and more (H200).
RESIDENT_BYTES = 96 * 2**20

SUM, SCALED_SUM, EXTREME, EXTREME_ARG = range(4)  # as in spmm.cu
UNWEIGHTED, DIRECT, INDIRECT = range(3)
_THREADS = 128  # of a block in spmm.cu and sddmm.cu
_FLAGS = {"mean": 1, "min": 2}
#: Threads of a team in attention.cu, and numbers of heads that it takes side by side.
TEAMS = (8, 16, 32, 128, 512)
#: Values a thread of a mean row up to which a team is taken; a thread holds 16 at a time (H200).
_VALUES_PER_THREAD = {8: 8, 16: 16, 32: 32, 128: 64, 512: 64}
_TOGETHER = (1, 2, 4, 8, 16, 32)


#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "spmm_csr_balanced": "13PqIIii",
    "spmm_csr_cut_rows": "8P3i",
    "spmm_coo_atomic": "7P3q",
    "spmm_arg_dx": "9P2q",
    "spmm_arg_da": "9PqIi",
    "sddmm_csr_balanced": "8PqIII4i",
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
    dtype: str, reduce: str, *, feat: int, ldx: int, together: int, dense: bool
) -> Shape:
    """The widest loads that alignment allows, in slices that stay in the L2.

    64-byte slices for narrow features, 256-byte ones where rows are long, else 128 bytes; loads of
    8 bytes or of one value where rows of X or of the result are not aligned to more.  ``together``
    has the lowest bits of both addresses.
    """
    size = ITEMSIZE[dtype]
    together |= ldx * size | feat * size
    if together % 16 == 0:
        if feat * size <= 64:
            return Shape(4, 16 // size)
        wide = dense and feat * size > 128 and reduce in ("sum", "mean")
        return Shape(16 if wide else 8, 16 // size)
    if together % 8 == 0 and size < 8:
        return Shape(16, 8 // size)
    return Shape(8 if feat <= 8 else 32, 1)


@lru_cache(maxsize=4096)
def _spmm_plan(
    dtype: str,
    reduce: str,
    feat: int,
    ldx: int,
    together: int,
    dense: bool,
    given: tuple[bool, ...],
    shape: Shape | None,
) -> tuple[tuple[int, int, int, int], int, int]:
    """Template arguments, slices of features, bytes between rows; looked up at most launches."""
    if shape is None:
        shape = spmm_shape(dtype, reduce, feat=feat, ldx=ldx, together=together, dense=dense)
    variant = _variant(shape.vector * ITEMSIZE[dtype] < 16, reduce, *given)
    slices = -(-feat // (shape.lanes * shape.vector))
    return (shape.lanes, shape.vector, *variant), slices, _bytes(ldx, dtype)


def spmm_workspace(S: Structure, dtype: str, feat: int, *, arg: bool) -> int:
    """Bytes for the partial results of rows that blocks share; 0 unless a row is very long.

    At most feat / 256 bytes an entry (float32), where all rows are long; 1 % of reddit's at 256.
    """
    return 2 * S.n_cuts * feat * (max(ITEMSIZE[dtype], 4) + arg * ITEMSIZE[S.index_dtype])


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
        _fill(out, S.n_rows * feat * ITEMSIZE[dtype], 0, stream)
        if arg:
            _fill(arg, S.n_rows * feat * ITEMSIZE[S.index_dtype], 0xFF, stream)
        return
    together = (X | out) % 16
    dense = S.nnz >= DENSE_ROWS * S.n_rows
    given = bool(row_scale), bool(arg), bool(data), bool(perm), bool(col_scale)
    constants, slices, stride = _spmm_plan(dtype, reduce, feat, ldx, together, dense, given, shape)
    flags = _FLAGS.get(reduce, 0)
    partial_args = workspace + 2 * S.n_cuts * feat * max(ITEMSIZE[dtype], 4)
    kernel = _load("spmm.cu", "spmm_csr_balanced", dtype, S.index_dtype, constants)
    kernel(
        S.blocks * slices,
        (
            *(S.indptr, S.indices, S.start, S.slot, data, perm, col_scale, row_scale, X, out, arg),
            *(workspace, partial_args, S.nnz, stride, S.blocks, feat, flags),
        ),
        threads=_THREADS,
        stream=stream,
    )
    if S.n_cuts:
        kernel = _load(
            "spmm.cu", "spmm_csr_cut_rows", dtype, S.index_dtype, (max(constants[2], SCALED_SUM),)
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
    rare: bool, reduce: str, scaled: bool, arg: bool, data: bool, perm: bool, cols: bool
) -> tuple[int, int]:
    """Template arguments REDUCE and WEIGHTS; rare shapes and reductions have the general ones."""
    if reduce in ("max", "min"):
        return EXTREME_ARG if arg else EXTREME, INDIRECT
    reduction = SCALED_SUM if rare or scaled or reduce == "mean" else SUM
    if not (data or cols):
        return reduction, UNWEIGHTED
    return reduction, INDIRECT if rare or perm or cols else DIRECT


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
    kernel(S.blocks, args, threads=_THREADS, stream=stream)


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
    row_scale: int = 0,
    col_scale: int = 0,
) -> None:
    """``out[e, h] = r[i] c[j] <X_i, Y_j>`` over the features of head h, heads side by side.

    One launch for as many features of Y as the L2 serves well, a 128-byte slice at least.
    """
    if not (S.nnz and heads):
        return
    size = ITEMSIZE[dtype]
    if not feat:
        _fill(out, S.nnz * heads * size, 0, stream)
        return
    together = X | Y | ldx * size | ldy * size | feat * size
    vector = 16 // size if together % 16 == 0 else 8 // size if together % 8 == 0 else 1
    kernel = _load("sddmm.cu", "sddmm_csr_balanced", dtype, S.index_dtype, (vector,))
    arrays = (S.indptr, S.indices, S.start, X, Y, row_scale, col_scale, out)
    sizes = (S.nnz, _bytes(ldx, dtype), _bytes(ldy, dtype), S.blocks)
    width = feat
    if size > 2 and heads == 1:  # sums of 2-byte dtypes are not rounded in between
        least = 8 * vector
        width = max(RESIDENT_BYTES // (S.n_cols * size) // least * least, least)
    for begin in range(0, feat, width):
        bounds = (heads, feat, begin, min(begin + width, feat))
        kernel(S.blocks * heads, (*arrays, *sizes, *bounds), threads=_THREADS, stream=stream)


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
    fitting = (n for n in TEAMS if n >= together and n * _VALUES_PER_THREAD[n] >= values)
    lanes = next(fitting, TEAMS[-1]) if together == heads else 32
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
    found = stride * ITEMSIZE[dtype]
    if found >= 2**32:
        raise UnsupportedError(
            f"rows of features lie {found} bytes apart: kernels count to 2**32, cut the features."
        )
    return found


def _fill(pointer: int, size: int, byte: int, stream: int) -> None:
    runtime = import_cupy().cuda.runtime
    try:
        runtime.memsetAsync(pointer, byte, size, stream)
    except runtime.CUDARuntimeError as error:
        raise KernelLaunchError(f"filling {size} bytes: {error}") from error
