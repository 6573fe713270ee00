"""Graph attention for torch: ``gat_aggregate``, and ``gat_of_vectors`` for layers."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..errors import UnsupportedError
from ..ops.attention.score import Options
from ._attention import Attention, as_computed, unwatched
from .engine import check_attention as check
from .engine.library import LibraryOp
from .engine.recording import apart, once, recorded
from .tensors.edge_index import as_graph
from .tensors.order import in_csr_order
from .tensors.prepare import GraphLike, graph_tensors, side_of

GAT = LibraryOp("gat")
GAT_WITH_STATISTICS = LibraryOp("gat_with_statistics")
GAT_BACKWARD = LibraryOp("gat_backward")
GAT_OF_VECTORS_BACKWARD = LibraryOp("gat_of_vectors_backward")
GAT_SCORES = LibraryOp("gat_scores")


def gat_aggregate(
    graph: GraphLike,
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edge_scores: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by graph attention, differentiably.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] h[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``leaky(el[j, k] + er[i, k] + edge_scores[e, k])``, and ``leaky(z)`` is ``z`` where positive,
    else ``negative_slope * z``.  ``M`` is 0 with probability ``dropout``, else
    ``1 / (1 - dropout)``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``h``.
    h : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.
    el : Tensor, shape (n_cols, heads) or (n_cols,)
        The sources' part of the scores: of the dtype of ``h``, or float32 beside 2 bytes.
    er : Tensor, shape (n_rows, heads) or (n_rows,)
        The targets' part.
    edge_scores : Tensor, shape (nnz, heads) or (nnz,), optional
        The entries' own part, in the order of ``graph.structure``.
    negative_slope : float
    dropout : float
        From 0 to less than 1; 0 draws nothing.
    seed : int or Tensor of one int64, optional
        Of ``M``, which depends on it, the entry's number in CSR order and the head alone.  By
        default it is drawn from torch's generator of the device at each call, also at each replay
        of a CUDA graph.
    self_loops : bool
        As if each vertex of a square graph had exactly one loop: stored entries with ``i == j`` are
        left out, and each row has one more entry ``(i, i)``, without a part of its own.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``h``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError
        If rows, columns or heads do not fit together, ``dropout`` lies outside its range, ``seed``
        is not one integer, or ``self_loops`` is asked of a graph that is not square.
    DtypeError, DeviceError
        If dtypes or devices do not fit together, or an argument is of another kind.
    UnsupportedError
        If a tensor is sparse, it is called within ``torch.func`` or with a tangent or, in backward,
        its gradient is differentiated again.

    Notes
    -----
    ``h``, ``el``, ``er`` and ``edge_scores`` have gradients.  Deterministic, backward too.  For
    backward ``h``, the result, the part of it whose scores are positive, and six numbers for each
    row and head are kept, and nothing of the size of the entries; only the gradient of
    ``edge_scores`` allocates that.  It is made of products rounded to the dtype of ``h``.  Autocast
    narrows ``h`` and takes scores in float32.  Where torch allows bfloat16 in products of float32,
    a GPU gathers rows of ``h`` and of the gradient so.  ``M`` is by Philox4x32-10, as in
    ``ops.gat``.  GAT (ICLR'18), equations 1 to 4; fuseGNN (ICCAD'20), section 3.
    """
    graph = as_graph(graph, h, er)
    tensors = graph_tensors(graph)
    (h,), (el, er, edge_scores) = check.autocast(tensors, (h,), (el, er, edge_scores))
    check.features("h", h, rows=tensors.n_cols, axis="columns", graph=tensors)
    like = ("h", h)
    check.scores("el", el, rows=tensors.n_cols, each="source", like=like, graph=tensors)
    check.scores("er", er, rows=tensors.n_rows, each="target", like=like, graph=tensors)
    check.edges(edge_scores, like=like, graph=tensors)
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    return from_scores(graph, options, h, el, er, in_csr_order(tensors, edge_scores), None)


def gat_of_vectors(
    graph: GraphLike,
    h: Tensor,
    source: Tensor,
    target: Tensor,
    edge_scores: Tensor | None = None,
    loop_scores: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate by graph attention whose scores are products of the features and two vectors.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] h[j, k, :] + bias[k, :]`` for head ``k``, with ``M`` and
    ``P`` as in ``gat_aggregate`` for ``el[j, k] = <h[j, k, :], source[k, :]>`` and
    ``er[i, k] = <h[i, k, :], target[k, :]>``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
        Only its structure is read.  On the device of ``h``.
    h : Tensor, shape (n, heads, feat) or (n, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.
    source, target : Tensor, shape (heads, feat) or (1, heads, feat), or (feat,) or (1, feat)
        The vectors of sources and targets.  In the dtype of ``h``, or float32 beside 2 bytes; they
        are rounded to the dtype of ``h``.
    edge_scores : Tensor, shape (nnz, heads) or (nnz,), optional
        The entries' own part of the scores, in the order of ``graph.structure``.
    loop_scores : Tensor, shape (n, heads) or (n,), optional
        The same of the loops that ``self_loops`` makes; by default 0.
    bias : Tensor, optional
        Added to each row.  Shape and dtype as those of ``source``.
    negative_slope, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n, heads, feat) or (n, feat)
        In the dtype of ``h``, or autocast's; ``bias`` for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat_aggregate``; and if the graph is not square, or ``loop_scores`` or a vector not as
        above.
    UnsupportedError
        As ``gat_aggregate``; and if ``loop_scores`` are given without ``self_loops``.

    Notes
    -----
    All floating tensors have gradients, which cannot be differentiated again.  Deterministic,
    backward too.  The same as ``gat_aggregate`` of scores that torch computed, in fewer passes over
    ``h``: backward adds up the gradient of ``h`` by weights and by scores in one.  Autocast narrows
    ``h`` and the vectors.  ``nn.GATConv`` is written with it.  GAT (ICLR'18), equations 1 to 6;
    fuseGNN (ICCAD'20), section 3.
    """
    graph = as_graph(graph, h)
    tensors = graph_tensors(graph)
    if loop_scores is not None and self_loops is False:
        raise UnsupportedError(
            "loop_scores are given but self_loops is False: there are no loops whose scores they "
            "were, give self_loops=True or leave them out."
        )
    narrow, wide = (h, source, target, bias), (edge_scores, loop_scores)
    (h, source, target, bias), (edge_scores, loop_scores) = check.autocast(tensors, narrow, wide)
    check.features("h", h, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.square("h is of sources and targets", tensors)
    like = ("h", h)
    check.vector("source", source, like=like, graph=tensors)
    check.vector("target", target, like=like, graph=tensors)
    if bias is not None:
        check.vector("bias", bias, like=like, graph=tensors)
    check.edges(edge_scores, like=like, graph=tensors)
    if loop_scores is not None:
        check.scores(
            "loop_scores", loop_scores, rows=tensors.n_rows, each="vertex", like=like, graph=tensors
        )
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    scores = in_csr_order(tensors, edge_scores), loop_scores
    return from_vectors(graph, options, h, source, target, *scores, bias=bias)


# Without checks


def from_scores(graph: GraphLike, options: Options, *inputs: Tensor | None) -> Tensor:
    """Run ``gat_aggregate`` on ``h, el, er`` and edge scores of entries and loops, unchecked.

    The scores of loops are (n,) or (n, heads), or None.
    """
    found: Tensor
    if not recorded(*inputs):
        found = GAT(side_of(graph, False), None, *inputs, *options)
        return found
    seed, *numbers = options
    given = None, *apart(*inputs), seed, graph, GAT_WITH_STATISTICS, numbers
    found = _Gat.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _Gat(Attention):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, plus, stats = ctx.saved_tensors
        results = as_computed(ctx, ctx.op, given, out, plus, stats)
        of_edges, of_loops = ctx.needs_input_grad[4:6]
        args = grad, *results, of_edges, *given[1:], *ctx.numbers
        sides = side_of(ctx.graph, False), side_of(ctx.graph, True)
        *others, d_loops, d_edges = once("gat_aggregate", GAT_BACKWARD, *sides, *args)
        optional = d_edges if of_edges else None, d_loops if of_loops else None
        return None, *others, *optional, *(None,) * 4


def from_vectors(
    graph: GraphLike,
    options: Options,
    h: Tensor,
    source: Tensor,
    target: Tensor,
    *scores: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Run ``gat_of_vectors`` with edge ``scores`` of entries and loops, unchecked.

    ``bias``, of heads * feat values, is added to each row.  As one Function: no two parts of the
    gradient of ``h`` have to be added up, and the bias costs no launch.
    """
    inputs = h, source, target, *scores, bias
    found: Tensor
    if not recorded(*inputs):
        source, target, bias = _rounded(h, source, target, bias)
        el, er = GAT_SCORES(h, source, target)
        found = GAT(side_of(graph, False), bias, h, el, er, *scores, *options)
        return found
    seed, *numbers = options
    given = *apart(*inputs), seed, graph, numbers
    found = _GatOfVectors.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _GatOfVectors(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, source: Tensor, target: Tensor, *given: Any) -> Tensor:
        *scores, bias, seed, ctx.graph, ctx.numbers = given
        source, target, bias = _rounded(h, source, target, bias)
        inputs = bias, h, *GAT_SCORES(h, source, target), *scores, seed
        out, *statistics = GAT_WITH_STATISTICS(side_of(ctx.graph, False), *inputs, *ctx.numbers)
        ctx.save_for_backward(source, target, *inputs, unwatched(ctx, out), *statistics)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, target, *inputs, out, plus, stats = ctx.saved_tensors
        of_edges, of_loops, of_bias = ctx.needs_input_grad[3:6]
        bias, *_ = inputs
        results = as_computed(ctx, GAT_WITH_STATISTICS, inputs, out, plus, stats)
        args = grad, *results, of_edges, source, target, *inputs, *ctx.numbers
        sides = side_of(ctx.graph, False), side_of(ctx.graph, True)
        gradients = once("gat_of_vectors", GAT_OF_VECTORS_BACKWARD, *sides, *args)
        dh, d_vectors, d_loops, d_edges = gradients
        d_source, d_target = d_vectors[0].view(source.shape), d_vectors[1].view(target.shape)
        d_bias = d_vectors[2].view(bias.shape) if of_bias else None
        optional = d_edges if of_edges else None, d_loops if of_loops else None
        return dh, d_source, d_target, *optional, d_bias, *(None,) * 3


def _rounded(h: Tensor, *vectors: Tensor | None) -> tuple[Any, ...]:
    """Cast vectors to the dtype of the features, as kernels read them."""
    return tuple(None if v is None else v.to(h.dtype) for v in vectors)
