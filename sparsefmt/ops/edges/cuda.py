"""Launches whose results have one value an entry: SDDMM, edge softmax, and the gradient of values.

The conventions are those of ``_launch``.
"""

from ...formats.chunks import LONG_ROW
from ..engine import jit
from ..matmul.cuda import ITEMSIZE, THREADS, Structure, fill, load, row_bytes

#: Bytes of Y that SDDMM takes in one launch: about the L2. Wider features take several, each
#: adding to the sums: 1.05 to 1.2x on graphs of 0.1 M vertices and more (H200).
RESIDENT_BYTES = 60 * 2**20
#: Mean values of a row from which teams take rows; shorter ones go by tiles: 1.6x on rows of 50,
#: 0.9x on rows of 400 (H200).
LONG_VALUES = 128
#: Numbers of heads with a tile kernel of their own; one more serves those that are no power of 2.
TILE_HEADS = (1, 2, 4, 8)
_TILE_THREADS = 128  # as in attention.cu
#: Rows of a warp: more fill its tiles better, fewer make more warps. 16 to 128 within 10 % where
#: rows are many, 16 best by up to 2x where they are few.
_TILE_ROWS = 16
#: Threads of a team in attention.cu, and numbers of heads that it takes side by side.
TEAMS = (16, 32, 128, 512)
#: Values a thread of a mean row up to which a team is taken; a thread holds 16 at a time (H200).
_VALUES_PER_THREAD = {16: 16, 32: 32, 128: 64, 512: 64}
_TOGETHER = (1, 2, 4, 8, 16, 32)


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
    perm: int = 0,
) -> None:
    """``out[e, h] = r[i] c[j] <X_i, Y_j>`` over the features of head h, heads side by side.

    Entry e is ``out[perm[e]]`` where given; only without it ``out`` has as many rows as S entries.
    One launch for as many features of Y as the L2 serves well, a 128-byte slice at least.
    """
    if not (S.nnz and heads):
        return
    size = ITEMSIZE[dtype]
    if not feat:
        fill(out, S.nnz * heads * size, 0, stream)
        return
    together = X | Y | ldx * size | ldy * size | feat * size
    vector = 16 // size if together % 16 == 0 else 8 // size if together % 8 == 0 else 1
    kernel = load("edges/sddmm.cu", "sddmm_csr_balanced", dtype, S.index_dtype, (vector,))
    arrays = (S.indptr, S.indices, S.start, X, Y, row_scale, col_scale, perm, out)
    sizes = (S.nnz, row_bytes(ldx, dtype), row_bytes(ldy, dtype), S.blocks)
    width = feat
    if size > 2 and heads == 1:  # sums of 2-byte dtypes are not rounded in between
        least = 8 * vector
        launches = -(-feat // max(RESIDENT_BYTES // (S.n_cols * size), least))
        width = -(-feat // (launches * least)) * least
    for begin in range(0, feat, width):
        bounds = (heads, feat, begin, min(begin + width, feat))
        kernel(S.blocks * heads, (*arrays, *sizes, *bounds), threads=THREADS, stream=stream)


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
    kernel = load("edges/sddmm.cu", "spmm_arg_da", dtype, S.index_dtype)
    arrays = (S.indptr, S.indices, S.start, arg, grad, X, row_scale, col_scale, out)
    args = (*arrays, S.nnz, row_bytes(ldx, dtype), feat)
    kernel(S.blocks, args, threads=THREADS, stream=stream)


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
    name, constants, n_long, grid, threads, last = _softmax_plan(S, heads)
    kernel = load("edges/softmax.cu", name, dtype, S.index_dtype, (*constants, int(backward)))
    sizes = (S.n_rows, n_long, LONG_ROW, heads, last)
    kernel(grid, (S.indptr, S.long, *arrays, *sizes), threads=threads, stream=stream)


def _softmax_plan(
    S: Structure, heads: int
) -> tuple[str, tuple[int, ...], int, tuple[int, int], int, int]:
    """Kernel, its template arguments, blocks for long rows, grid, threads, the last parameter."""
    together = heads if heads in _TOGETHER else 1
    tiled = heads in TILE_HEADS or (heads < jit.WARP and together < heads)
    if tiled and S.nnz * together < LONG_VALUES * S.n_rows:
        blocks = -(-S.n_rows * jit.WARP // (_TILE_THREADS * _TILE_ROWS))
        own = heads if heads in TILE_HEADS else 0
        grid = (S.n_long + blocks, 1)
        return "edge_softmax_tiles", (own,), S.n_long, grid, _TILE_THREADS, _TILE_ROWS
    values = S.nnz * together // S.n_rows
    fitting = (n for n in TEAMS if n >= together and n * _VALUES_PER_THREAD[n] >= values)
    lanes = next(fitting, TEAMS[-1]) if together == heads else jit.WARP
    threads = max(lanes, 128)
    # Where a block is the team, it takes long rows as any other.
    n_long = S.n_long if lanes < threads else 0
    grid = (n_long + -(-S.n_rows * lanes // threads), heads // together)
    return "edge_softmax_rows", (lanes, int(together == heads)), n_long, grid, threads, together
