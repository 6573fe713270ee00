"""Attention for torch: GAT, GATv2 and dot products, from scores to sums in one op.

No array with a value for each entry is saved: backward computes the weights again.  Gradients
cannot be differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import ShapeError, UnsupportedError
from ..ops.attention import rows, score
from ..ops.attention.score import Options
from ..ops.engine.bind import bind, flag
from .engine import checks
from .engine.library import LibraryOp, is_functional
from .engine.precision import bf16_is_allowed, exact
from .engine.recording import apart, once_differentiable, recorded
from .tensors.order import in_csr_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors

GAT, GAT_OF_VECTORS = LibraryOp("gat"), LibraryOp("gat_of_vectors")
GAT_WITH_STATISTICS, GAT_BACKWARD = LibraryOp("gat_with_statistics"), LibraryOp("gat_backward")
GAT_OF_VECTORS_WITH_STATISTICS = LibraryOp("gat_of_vectors_with_statistics")
GAT_OF_VECTORS_BACKWARD = LibraryOp("gat_of_vectors_backward")
ATTEND, ATTEND_WITH_STATISTICS = LibraryOp("attend"), LibraryOp("attend_with_statistics")
ATTEND_BACKWARD = LibraryOp("attend_backward")
_EMPTY = torch.empty(0, device="cpu")


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
    tensors = tensors_of(graph, h, er)
    arrays = {"h": h, "el": el, "er": er, "edge_scores": edge_scores}
    _, h, el, er, edges = bind(rows.GAT, tensors, **arrays)
    options = _options(negative_slope, dropout, seed, self_loops, tensors)
    return from_scores(tensors, options, h, el, er, in_csr_order(tensors, edges), None)


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
    tensors = tensors_of(graph, h)
    if loop_scores is not None and self_loops is False:
        raise UnsupportedError(
            "loop_scores are given but self_loops is False: there are no loops whose scores they "
            "were, give self_loops=True or leave them out."
        )
    arrays = {"h": h, "source": source, "target": target, "bias": bias}
    scores = {"edge_scores": edge_scores, "loop_scores": loop_scores}
    _, *vectors, edges, loops = bind(rows.GAT_OF_VECTORS, tensors, **arrays, **scores)
    _check_square("h is of sources and targets", tensors)
    options = _options(negative_slope, dropout, seed, self_loops, tensors)
    return from_vectors(tensors, options, *vectors, in_csr_order(tensors, edges), loops)


def gatv2_aggregate(
    graph: GraphLike,
    left: Tensor,
    right: Tensor,
    att: Tensor,
    edge_scores: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by GATv2's attention, differentiably.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] left[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``sum_f att[k, f] leaky(left[j, k, f] + right[i, k, f]) + edge_scores[e, k]``; ``leaky`` and
    ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``left``.
    left : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    right : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``left``.
    att : Tensor, shape (heads, feat) or (1, heads, feat), or (feat,) without heads
        In the dtype of ``left``, or float32 beside 2 bytes.
    edge_scores, negative_slope, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``left``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``.

    Notes
    -----
    ``left``, ``right``, ``att`` and ``edge_scores`` have gradients.  Deterministic, backward too.
    For backward the operands, the result and one number for each row and head are kept; scores are
    computed again.  Autocast narrows ``left`` and ``right`` and takes the others in float32.
    GATv2 (ICLR'22), equation 7.
    """
    tensors = tensors_of(graph, left, right)
    arrays = {"left": left, "right": right, "att": att, "edge_scores": edge_scores}
    _, left, right, att, edges = bind(rows.GATV2, tensors, **arrays)
    options = _options(negative_slope, dropout, seed, self_loops, tensors)
    edges = in_csr_order(tensors, edges)
    return _pairwise(tensors, options, 1.0, right, left, None, att, edges)


def dot_aggregate(
    graph: GraphLike,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    edge_scores: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by dot-product attention.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] values[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``scale <queries[i, k], keys[j, k]> + edge_scores[e, k]``; ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``keys``.
    queries : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``keys``.
    keys : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    values : Tensor, of the shape and dtype of ``keys``, optional
        The keys by default.
    scale : float, optional
        ``1 / sqrt(feat)`` by default.
    edge_scores, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``keys``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``; ShapeError also if ``scale`` is not finite.

    Notes
    -----
    All four tensors have gradients.  Deterministic, backward too.  For backward the operands, the
    result and one number for each row and head are kept; scores are computed again.  Autocast
    narrows all but ``edge_scores``.
    Transformer (NeurIPS'17), equation 1, over the edges of a graph.
    """
    tensors = tensors_of(graph, keys, queries)
    arrays = {"keys": keys, "queries": queries, "values": values, "edge_scores": edge_scores}
    _, keys, queries, values, edges = bind(rows.DOT_ATTENTION, tensors, **arrays)
    factor = score.scale(scale, keys.shape[-1])
    options = _options(0.0, dropout, seed, self_loops, tensors)
    edges = in_csr_order(tensors, edges)
    return _pairwise(tensors, options, factor, queries, keys, values, None, edges)


def _options(
    negative_slope: object, dropout: object, seed: object, self_loops: object, tensors: GraphTensors
) -> Options:
    """Check the numbers, and put the seed on the device of the graph."""
    slope, share = score.number("negative_slope", negative_slope), score.share(dropout)
    loops = flag("self_loops", self_loops)
    if loops and tensors.n_rows != tensors.n_cols:
        _check_square("self_loops is True", tensors)
    if seed is not None:
        checks.seed(seed, tensors)
    return Options(checks.seed_on_device(seed, tensors) if share else None, slope, share, loops)


def _check_square(why: str, tensors: GraphTensors) -> None:
    """Check that the graph is square; the error says why it must be."""
    if tensors.n_rows != tensors.n_cols:
        shape = tensors.n_rows, tensors.n_cols
        raise ShapeError(f"{why} but the graph has shape {shape}: give a square one.")


# Without checks


def from_scores(tensors: GraphTensors, options: Options, *inputs: Tensor | None) -> Tensor:
    """Run ``gat_aggregate`` on ``h, el, er`` and scores of entries and loops, unchecked."""
    return _run(_Gat, GAT, GAT_WITH_STATISTICS, tensors, options, *inputs)


def from_vectors(tensors: GraphTensors, options: Options, *inputs: Tensor | None) -> Tensor:
    """Run ``gat_of_vectors`` on vectors and scores of entries and loops, unchecked.

    As one Function: no two parts of the gradient of ``h`` have to be added up, and ``bias``, of
    heads * feat values, costs no launch.
    """
    if recorded(*inputs):
        return _recorded(_GatOfVectors, GAT_OF_VECTORS_WITH_STATISTICS, tensors, options, *inputs)
    out: Tensor = GAT_OF_VECTORS(tensors.rows, *_rounded(inputs), *inputs[4:], *options)
    return out


def _pairwise(
    tensors: GraphTensors, options: Options, scale: float, *inputs: Tensor | None
) -> Tensor:
    """Run attention on queries, keys, values, ``att`` and edge scores, unchecked.

    Without ``att`` the scores are dot products; without values the keys are the values.
    """
    numbers = options.with_scale(scale)
    return _run(_Pairwise, ATTEND, ATTEND_WITH_STATISTICS, tensors, numbers, *inputs)


def _run(
    function: type[Function], op: LibraryOp, with_statistics: LibraryOp, tensors: GraphTensors,
    options: tuple[Any, ...], *inputs: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run an op, recorded if autograd must hear of it; ``options`` begin with the seed."""
    if recorded(*inputs):
        return _recorded(function, with_statistics, tensors, options, *inputs)
    out: Tensor = op(tensors.rows, *inputs, *options)
    return out


def _recorded(
    function: Any, op: LibraryOp, tensors: GraphTensors, options: tuple[Any, ...],
    *inputs: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run an op that returns statistics as a Function, which autograd records."""
    if torch.compiler.is_compiling():
        inputs = apart(*inputs)
    out: Tensor = function.apply(*inputs, (tensors, op, options))  # torch looks at each argument
    return out


def _forward(ctx: Any, *args: Any) -> Tensor:
    """Run an op that returns statistics; save its tensors and results for backward."""
    *inputs, (ctx.tensors, ctx.op, (seed, *ctx.numbers)) = args
    inputs = [*inputs, seed]  # torch 2.11 traces no ``append`` here
    ctx.rounds = torch.compiler.is_dynamo_compiling() or bf16_is_allowed()
    out, *statistics = ctx.op(ctx.tensors.rows, *inputs, *ctx.numbers)
    ctx.save_for_backward(*inputs, unversioned(ctx, out), *statistics)
    result: Tensor = out
    return result


def unversioned(ctx: Any, out: Tensor) -> Tensor:
    """Return a result to save without torch's version check; remember its version.

    Torch refuses to unpack what has changed since it was saved, which ``F.relu_`` behind a layer
    would do; backward computes it again instead.  An empty tensor that shares the version of
    ``out`` holds no memory.
    """
    ctx.versioned = None
    if torch.compiler.is_dynamo_compiling() or type(out) is not Tensor or is_functional(out):
        return out
    ctx.versioned = out.detach()
    ctx.versioned.data = _EMPTY
    ctx.version = ctx.versioned._version
    return out.data  # the same memory, with a version of its own


def gradients(
    ctx: Any, name: str, op: Any, grad: Tensor, saved: Sequence[Any], of_edges: bool, *,
    statistics: int = 2,
) -> Any:  # fmt: skip
    """Compute what the op of the gradients returns.

    ``saved`` end with the result and ``statistics`` tensors.  Whoever differentiates again is
    refused.  It rounds only if forward did, whatever torch allows by now.
    """
    inputs, (out, *of_rows) = saved[: -1 - statistics], saved[-1 - statistics :]
    tensors = ctx.tensors.current()
    token = None if ctx.rounds else exact.set(True)
    try:
        if ctx.versioned is not None and ctx.versioned._version != ctx.version:
            out, *of_rows = ctx.op(tensors.rows, *inputs, *ctx.numbers)
        sides = tensors.rows, tensors.columns
        args = *sides, grad, out, *of_rows, of_edges, *inputs, *ctx.numbers
        return once_differentiable(name, op, *args)
    finally:
        if token is not None:
            exact.reset(token)


def _wanted(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return gradients of a Function's first arguments; None where none is wanted."""
    needs = ctx.needs_input_grad
    some = [grad if need else None for grad, need in zip(gradients, needs, strict=False)]
    return *some, *(None,) * (len(needs) - len(some))


class _Gat(Function):
    """Attention of scores of both ends."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        args = GAT_BACKWARD, grad, ctx.saved_tensors, ctx.needs_input_grad[3]
        dh, d_el, d_er, d_loops, d_edges = gradients(ctx, "gat_aggregate", *args)
        return _wanted(ctx, dh, d_el, d_er, d_edges, d_loops)


class _GatOfVectors(Function):
    """Attention of scores that vectors make of the features."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        return _forward(ctx, *_rounded(args), *args[4:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, target, bias, *_ = saved = ctx.saved_tensors
        args = GAT_OF_VECTORS_BACKWARD, grad, saved, ctx.needs_input_grad[4]
        dh, d_vectors, d_loops, d_edges = gradients(ctx, "gat_of_vectors", *args)
        d_source, d_target, *rest = d_vectors.unbind()  # each of the shape of ``source``
        d_target = d_target.view_as(target)
        d_bias = None if bias is None else rest[0].view_as(bias)
        return _wanted(ctx, dh, d_source, d_target, d_bias, d_edges, d_loops)


def _rounded(inputs: Sequence[Any]) -> list[Any]:
    """Return features, and vectors and bias in their dtype, as kernels read them."""
    dtype = inputs[0].dtype
    return [a if a is None or a.dtype is dtype else a.to(dtype) for a in inputs[:4]]


class _Pairwise(Function):
    """Attention of scores of features of both ends."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        name = "dot_aggregate" if saved[3] is None else "gatv2_aggregate"
        args = ATTEND_BACKWARD, grad, saved, ctx.needs_input_grad[4]
        return _wanted(ctx, *gradients(ctx, name, *args, statistics=1))
