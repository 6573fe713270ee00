"""Launch the gradients of graph attention, for arrays of any library with a ``Memory``.

They are made of what each target's entries read, over the transpose for what sources have; scores
that vectors made take one launch more.
"""

from typing import Any

from ...._caches import lru_cache
from ....formats.compressed import CSR
from ...edges import cuda as edges_cuda
from ...engine import jit
from ...engine.jit import Launch
from ...engine.memory import Memory, memory_of
from ...engine.structure import Structure, structure_of, transposed
from ...matmul.cuda import NARROW, rounded
from ..operands import Forward, GatArguments, heads_and_feat, shape_of, sums_dtype
from . import cuda
from .cuda import FLOATS, SCORE_GRADIENT_LANES, THREADS, dropout_of, in_memory

_STATS_LANES = 8  # as in gat.cu
#: Rows that a block of the scores' gradient has at least; blocks at most, and where rows are wide.
_SHARE_ROWS, _MOST_SHARES, _FEWEST_SHARES = 64, 1024, 64


def gat_backward(
    A: CSR | Structure, T: Any, perm: Any, grad: Any, out: Any, plus: Any, statistics: Any,
    of_edges: bool, *arguments: Any, narrow: bool = False, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launch gradients of ``h, el, er, loop_edges, edges``: empty if not given or not wanted.

    What is not given of the forward pass and of the transpose is made anew.  ``narrow`` rounds
    float32 rows of ``grad``, and of ``h`` where that is the forward pass's, to bfloat16 once before
    entries gather them; what is read in order stays float32.
    """
    given = GatArguments(*arguments)
    m = memory_of(given.h)
    given, found = in_memory(m, given), Forward(out, plus, statistics)
    if statistics is None:
        found = cuda.forward(A, None, given, train=True, narrow=narrow)
    transpose = None if T is None else (T, perm)
    dh, d_el_slices, *others = _gradients(
        A, transpose, grad, found, None, of_edges, given, narrow=narrow
    )
    with m.on_device(dh):
        d_el = d_el_slices.squeeze(-1) if d_el_slices.shape[-1] == 1 else d_el_slices.sum(-1)
    return dh, d_el, *others


def gat_of_vectors_backward(
    A: CSR | Structure, T: Any, perm: Any, grad: Any, out: Any, plus: Any, statistics: Any,
    of_edges: bool, source: Any, target: Any, bias: Any, *arguments: Any, narrow: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Launch gradients of ``h``, ``source, target, bias`` in one array, ``loop_edges``, ``edges``.

    Vectors and bias are as ``gat_scores`` and ``gat`` had them.
    """
    given = GatArguments(*arguments)
    m = memory_of(given.h)
    given, found = in_memory(m, given), Forward(out, plus, statistics)
    grad, bias = m.contiguous(grad), m.contiguous(bias)
    dh, d_el_slices, d_er, *others = _gradients(
        A, (T, perm), grad, found, bias, of_edges, given, narrow=narrow
    )
    vectors = m.contiguous(source), m.contiguous(target)
    result = None if bias is None else grad
    return dh, through_scores(given.h, dh, d_el_slices, d_er, vectors, result), *others


def _gradients(
    A: Any, transpose: Any, grad: Any, found: Forward, bias: Any, of_edges: bool,
    given: GatArguments, *, narrow: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Launch gradients of the features, of ``el`` by slice (..., slices), and of other scores."""
    S, m = structure_of(A), memory_of(given.h)
    h, edges, loop_edges = given.h, given.edges, given.loop_edges
    grad, dtype = m.contiguous(grad), sums_dtype(h)
    shapes = given.er.shape, shape_of(loop_edges), shape_of(edges, of_edges)
    d_er, d_loops, d_edges = (m.empty(shape, dtype, h) for shape in shapes)
    stats = m.empty((S.n_rows, heads_and_feat(h)[0], 4), dtype, h)
    with m.on_device(h):
        results = stats, d_er, None if loop_edges is None else d_loops
        _of_targets(S, m, grad, found, bias, given, results)
        T, perm = transposed(A) if transpose is None else transpose
        dh, d_el_slices = _of_sources(structure_of(T), m, perm, grad, given, stats, narrow=narrow)
        if edges is not None and of_edges:
            _of_edges(S, m, grad, given, stats, d_edges)
    return dh, d_el_slices, d_er, d_loops, d_edges


def _of_targets(
    S: Structure, m: Memory, grad: Any, found: Forward, bias: Any, given: GatArguments,
    results: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch what entries read of their targets, and gradients of ``er`` and ``loop_edges``."""
    h, (stats, d_er, d_loops) = given.h, results
    heads, feat = heads_and_feat(h)
    items = S.n_rows * heads
    if not items:
        return
    if not given.loops:
        cuda.zero(m, d_loops)
        d_loops = None
    drop, of_items = dropout_of(m, given.dropout, given.seed), given._replace(edges=None)
    scores = cuda.score_parameters(m, drop, of_items, S.nnz)
    arrays = m.pointers(found.out, found.plus, bias, grad, h)
    written = m.pointers(found.statistics, stats, d_er, d_loops)
    launch = S.once(stats_launch, m.dtype(h), heads, feat)
    launch(m.stream(h), *arrays, *scores, *written)


def stats_launch(S: Structure, dtype: str, heads: int, feat: int) -> Launch:
    """Decide the launch over rows of targets."""
    items, sums = S.n_rows * heads, "float64" if dtype == "float64" else "float32"
    layout = f"5P{cuda.scores_layout(sums)}4Pq2i"
    kernel = jit.load("attention/gat/gat.cu", "gat_stats", layout, (dtype,))
    blocks = -(-items * _STATS_LANES // THREADS)
    return kernel.ready(blocks, after=(items, heads, feat), threads=THREADS)


def _of_sources(
    T: Structure, m: Memory, perm: Any, grad: Any, given: GatArguments, stats: Any, *, narrow: bool
) -> tuple[Any, Any]:
    """Launch gradients of ``h`` and, by slice, ``el``; ``perm`` numbers the transpose's entries."""
    h, (heads, feat) = given.h, heads_and_feat(given.h)
    dh = m.empty(h.shape, m.dtype(h), h)
    gathered = rounded(grad) if narrow else grad
    X, out, features = m.pointers(gathered, dh, h)
    alignment = X | (features | out) >> narrow
    read_as = NARROW if narrow else m.dtype(h)
    slices = cuda.row_shape(read_as, heads, feat, alignment % 16)[2]
    d_el_slices = m.empty((*given.el.shape, slices), sums_dtype(h), h)
    if not feat or not (T.nnz or given.loops):
        cuda.zero(m, dh)
        cuda.zero(m, d_el_slices)
    elif T.n_rows and heads:
        given = given._replace(er=None, edges=given.edges if T.nnz else None)
        drop = dropout_of(m, given.dropout, given.seed)
        scores = cuda.score_parameters(m, drop, given, T.nnz)
        of_targets, of_slices = m.pointers(stats, d_el_slices)
        arrays = of_targets, features, out, of_slices
        extra = cuda.ANYTHING if given.loops or given.edges is not None else cuda.NOTHING
        cuda.launch_rows(
            *(T, m, h, X, m.pointer(perm) if drop.below or given.edges is not None else 0),
            (*scores, *arrays, heads, feat, slices),
            alignment=alignment,
            backward=True,
            narrow=narrow,
            flags=(int(drop.below > 0), extra),
        )
    return dh, d_el_slices


def _of_edges(
    S: Structure, m: Memory, grad: Any, given: GatArguments, stats: Any, out: Any
) -> None:
    """Launch the gradient of ``edges``, from products rounded to the dtype of the features."""
    h, (heads, _) = given.h, heads_and_feat(given.h)
    if not (S.nnz and heads):
        return
    dots, drop = edges_cuda.sddmm(S, grad, h), dropout_of(m, given.dropout, given.seed)
    layout, types = f"9PQqii2{FLOATS[sums_dtype(h)]}I", (m.dtype(h), S.index_dtype)
    kernel = jit.load("attention/gat/entries.cu", "gat_edge_gradient", layout, types)
    arrays = map(m.pointer, (given.el, given.edges, stats, dots, out))
    sizes = (drop.seed_at, drop.seed, S.nnz, heads, int(given.loops))
    numbers = (given.slope, drop.scale, drop.below)
    args: tuple[Any, ...] = (S.indptr, S.indices, S.start, *arrays, *sizes, *numbers)
    kernel(S.blocks, args, threads=THREADS, stream=m.stream(h))


def through_scores(
    h: Any, dh: Any, d_el_slices: Any, d_er: Any, vectors: tuple[Any, Any], result: Any
) -> Any:
    """Gradients of the vectors, and of the bias if ``result``, that of the result, is given.

    ``dh`` takes what the scores add to it.
    """
    m, (heads, feat), shape = memory_of(h), heads_and_feat(h), vectors[0].shape
    count, dtype = 2 if result is None else 3, m.dtype(h)
    if not all(h.shape):
        return m.zeros((count, *shape), sums_dtype(h), h)
    blocks = score_blocks(h.shape[0], heads, feat)
    partial = m.empty((blocks, count, *shape), sums_dtype(h), h)
    arrays = m.pointers(h, dh, d_el_slices, d_er, *vectors, result, dh, partial)
    alignment = arrays[0] | arrays[1] | arrays[4] | arrays[5] | arrays[6]
    vector, slices = cuda.score_vector(dtype, feat, alignment), d_el_slices.shape[-1]
    with m.on_device(h):
        launch = through_launch(m.device(h), dtype, h.shape[0], heads, feat, slices, vector)
        launch(m.stream(h), *arrays)
        return partial.sum(0)


@lru_cache(maxsize=256)
def through_launch(
    device: int, dtype: str, n: int, heads: int, feat: int, slices: int, vector: int
) -> Launch:
    """Decide how that is launched; ``device`` is the number of the current one."""
    lanes = SCORE_GRADIENT_LANES[heads * feat > SCORE_GRADIENT_LANES[0] * vector]
    blocks, constants = score_blocks(n, heads, feat), (lanes, vector)
    file, layout = "attention/gat/scores.cu", "9Pq4i"
    kernel = jit.load(file, "gat_scores_backward", layout, (dtype,), constants)
    grid = blocks * -(-heads * feat // (lanes * vector))
    return kernel.ready(grid, after=(n, blocks, heads, feat, slices), threads=THREADS)


@lru_cache(maxsize=256)
def score_blocks(n: int, heads: int, feat: int) -> int:
    """Choose how many partial sums ``gat_scores_backward`` makes of each value."""
    wide = max(_MOST_SHARES * THREADS // max(heads * feat, THREADS), _FEWEST_SHARES)
    return max(min(-(-n // _SHARE_ROWS), wide), 1)
