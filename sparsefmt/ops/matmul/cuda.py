"""From raw device pointers to launches: what CuPy's operations and torch's library ops share.

Every function takes a ``Structure``, the name of the value dtype, sizes, device pointers as
integers (0 for none) and the stream, and returns when the launch is enqueued.  Scales are float32
for 2-byte values, else of their dtype.  Nothing is checked but what a kernel cannot do: the callers
have checked their arrays.
"""

from dataclasses import dataclass
from functools import lru_cache

from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.launch import stream as stream
from ..engine.structure import Structure as Structure
from ..engine.structure import chunk_pointers, structure_of

#: Mean entries of a row from which slices of 256 bytes beat 128: 1.02 to 1.06x on graphs of 50 and
#: more, 0.90x on graphs of 12 (H200, float32).
DENSE_ROWS = 32
#: Bytes of 256-byte slices of X up to which 2-byte features gain by them (1.03x) and a product with
#: ``col_scale``, which then reads half as many scales (1.08 to 1.14x): the L2 still helps.
WIDE_BYTES = 96 * 2**20
#: Bytes of 256-byte slices of X below which 128 bytes are better: more of a slice is in the L1.
SMALL_BYTES = 2 * 2**20

SUM, SCALED_SUM, CHOSEN_SUM, EXTREME, EXTREME_ARG = range(5)  # as in spmm.cu
UNWEIGHTED, DIRECT, SCALED, INDIRECT = range(4)
THREADS = 128  # of a block in spmm.cu and sddmm.cu
COO_RUN = 32  # consecutive entries of a sub-warp, as in spmm.cu
_FLAGS = {"mean": 1, "min": 2}

#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
PARAMETERS = {
    "spmm_csr_balanced": "13PqIIii",
    "spmm_csr_cut_rows": "8P3i",
    "spmm_coo_atomic": "7Pq2Ii",
    "spmm_arg_da": "9PqIi",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a sub-warp reads rows of features: ``lanes`` times ``vector`` values at a time."""

    lanes: int
    vector: int


def load(
    file: str, kernel: str, dtype: str, index_dtype: str, constants: tuple[int, ...] = ()
) -> jit.Kernel:
    """Load a kernel of this room or of ``edges``."""
    return jit.load(file, kernel, PARAMETERS[kernel], (dtype, index_dtype), constants)


structure, plan = structure_of, chunk_pointers  # until every room asks the engine


# SpMM


def spmm_shape(dtype: str, *, feat: int, ldx: int, together: int, wide: bool) -> Shape:
    """The widest loads that alignment allows, in slices that stay in the L2.

    64-byte slices for narrow features, 256-byte ones where they pay (``wide``), else 128 bytes;
    loads of 8 bytes or of one value where rows of X or of the result are not aligned to more.
    ``together`` has the lowest bits of both addresses.
    """
    size = ITEMSIZE[dtype]
    together |= ldx * size | feat * size
    if together % 16 == 0:
        if feat * size <= 64:
            return Shape(4, 16 // size)
        return Shape(16 if wide and feat * size > 128 else 8, 16 // size)
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
    wide: bool,
    given: tuple[bool, ...],
    shape: Shape | None,
) -> tuple[tuple[int, int, int, int], int, int]:
    """Template arguments, slices of features, bytes between rows; looked up at most launches."""
    if shape is None:
        shape = spmm_shape(dtype, feat=feat, ldx=ldx, together=together, wide=wide)
    variant = _variant(shape.vector * ITEMSIZE[dtype] < 16, reduce, *given)
    slices = -(-feat // (shape.lanes * shape.vector))
    return (shape.lanes, shape.vector, *variant), slices, row_bytes(ldx, dtype)


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
    """``out = diag(r) reduce(a c X)``; the value of entry e is ``data[perm[e]]`` where given.

    ``reduce`` may also be "chosen": the sum of those ``a[e] c[j] X[j, f]`` whose ``arg[j, f]``,
    given in X's shape, is ``perm[e]``.
    """
    if not (S.n_rows and feat):
        return
    if not S.nnz:
        fill(out, S.n_rows * feat * ITEMSIZE[dtype], 0, stream)
        if arg and reduce != "chosen":
            fill(arg, S.n_rows * feat * ITEMSIZE[S.index_dtype], 0xFF, stream)
        return
    together = (X | out) % 16
    wide = reduce in ("sum", "mean") and _wide(S, dtype, scaled=bool(col_scale))
    given = bool(row_scale), bool(arg), bool(data), bool(perm), bool(col_scale)
    constants, slices, stride = _spmm_plan(dtype, reduce, feat, ldx, together, wide, given, shape)
    if reduce == "chosen":
        row_bytes(feat, S.index_dtype)  # the kernel counts in the rows of arg as in those of X
    flags = _FLAGS.get(reduce, 0)
    partial_args = workspace + 2 * S.n_cuts * feat * max(ITEMSIZE[dtype], 4)
    kernel = load("matmul/spmm.cu", "spmm_csr_balanced", dtype, S.index_dtype, constants)
    kernel(
        S.blocks * slices,
        (
            *(S.indptr, S.indices, S.start, S.slot, data, perm, col_scale, row_scale, X, out, arg),
            *(workspace, partial_args, S.nnz, stride, S.blocks, feat, flags),
        ),
        threads=THREADS,
        stream=stream,
    )
    if S.n_cuts:
        reduction = max(constants[2], SCALED_SUM)
        kernel = load("matmul/spmm.cu", "spmm_csr_cut_rows", dtype, S.index_dtype, (reduction,))
        kernel(
            jit.warps_to_blocks(S.n_cuts * -(-feat // jit.WARP)),
            (
                *(S.indptr, S.start, S.cut, row_scale, out, arg, workspace, partial_args),
                *(S.n_cuts, feat, flags),
            ),
            stream=stream,
        )


def _wide(S: Structure, dtype: str, *, scaled: bool) -> bool:
    """Whether slices of 256 bytes pay: measured, see the constants."""
    dense = S.nnz >= DENSE_ROWS * S.n_rows
    size = S.n_cols * 256
    if scaled:
        return dense or size <= WIDE_BYTES
    return size <= WIDE_BYTES if ITEMSIZE[dtype] == 2 else dense and size > SMALL_BYTES


def _variant(
    rare: bool, reduce: str, scaled: bool, arg: bool, data: bool, perm: bool, cols: bool
) -> tuple[int, int]:
    """Template arguments REDUCE and WEIGHTS; rare shapes and reductions have the general ones."""
    if reduce == "chosen":
        return CHOSEN_SUM, INDIRECT
    if reduce in ("max", "min"):
        plain = data and not (rare or perm or cols)
        return EXTREME_ARG if arg else EXTREME, DIRECT if plain else INDIRECT
    reduction = SCALED_SUM if rare or scaled or reduce == "mean" else SUM
    if not (data or cols):
        return reduction, UNWEIGHTED
    if rare or perm:
        return reduction, INDIRECT
    return reduction, SCALED if cols else DIRECT


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
    """Add every entry into ``out``, zeroed before, of float64 for float64 and else of float32.

    Of 2-byte features ``out`` is a fresh array: atomics write words of 16 bytes.
    """
    if not (nnz and feat):
        return
    shape = spmm_shape(dtype, feat=feat, ldx=ldx, together=(X | out) % 16, wide=False)
    blocks = -(-nnz * shape.lanes // (THREADS * COO_RUN))
    slices = -(-feat // (shape.lanes * shape.vector))
    constants = shape.lanes, shape.vector
    kernel = load("matmul/spmm.cu", "spmm_coo_atomic", dtype, index_dtype, constants)
    arrays = (row, col, data, row_scale, col_scale, X, out)
    sizes = (nnz, row_bytes(ldx, dtype), blocks, feat)
    kernel(blocks * slices, (*arrays, *sizes), threads=THREADS, stream=stream)


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
    workspace: int,
    stream: int,
) -> None:
    """The gradient of X where only the entries in ``arg`` count; ``T`` is the transpose."""
    spmm(
        T,
        dtype,
        "chosen",
        feat=feat,
        ldx=feat,
        data=data,
        perm=perm,
        X=grad,
        row_scale=col_scale,
        col_scale=row_scale,
        out=out,
        arg=arg,
        workspace=workspace,
        stream=stream,
    )
