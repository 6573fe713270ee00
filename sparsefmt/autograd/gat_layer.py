"""GAT's convolution in one node of autograd's: linear map, scores, attention and bias."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from . import attention as gat
from ._attention import is_changed, unwatched
from ._gat_at_once import Heads, gat_at_once, gat_at_once_backward
from .engine import check_attention, checks
from .engine.products import is_watched
from .engine.recording import once
from .plain import applied, is_taped
from .tensors.prepare import GraphLike, side_of, tensors_of
from .tensors.tensors import Side


def gat_convolution(
    graph: GraphLike,
    x: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor, Tensor],
    bias: Tensor | None,
    *,
    negative_slope: float,
    dropout: float,
    self_loops: bool,
) -> Tensor:
    """Run GAT's convolution of a call that ``is_plain``: ``gat_of_vectors`` of ``x W``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, in_channels)
    weight : Tensor, shape (heads * feat, in_channels)
        ``W`` transposed.
    vectors : two Tensors, shape (1, heads, feat)
        Of sources and targets.
    bias : Tensor, shape (heads * feat,), optional
    negative_slope, dropout, self_loops
        As for ``gat_of_vectors``.

    Returns
    -------
    Tensor, shape (n, heads * feat)

    Raises
    ------
    ShapeError, DtypeError
        If a number is no number of its kind, or out of its range.

    Notes
    -----
    The gradient can be used but not differentiated.
    """
    inputs = x, weight, *vectors, bias
    # That the graph is square ``is_plain`` has asked.
    slope, share, loops = check_attention.numbers(negative_slope, dropout, self_loops)
    seed = checks.seed_on_device(None, tensors_of(graph)) if share else None
    if is_taped(*inputs):
        return applied(_GatLayer, *inputs, seed, graph, (slope, share, loops))
    heads = Heads(linear(x, weight), *vectors, bias, seed, slope, share, loops)
    at_once = gat_at_once(tensors_of(graph).rows, heads, train=False)
    return _by_library(graph, heads, gat.GAT)[0] if at_once is None else at_once[0]


def _by_library(graph: GraphLike, heads: Heads, op: Any) -> tuple[Tensor, ...]:
    """Run the library's ops: the result, scores of sources and targets, and what else there is."""
    h, source, target, bias, seed, *numbers = heads
    of_heads = _of_heads(h, source)
    el, er = gat.GAT_SCORES(of_heads, source, target)
    given = bias, of_heads, el, er, None, None, seed, *numbers
    found = op(side_of(graph, False), *given)
    out, *statistics = (found,) if isinstance(found, Tensor) else found
    # No view: torch refuses to write to one that a Function has made.
    out = out if out.dim() == 2 else out.view(h.shape).data
    return out, el, er, *statistics


def _of_heads(h: Tensor, source: Tensor) -> Tensor:
    """Give features of several heads an axis for them."""
    heads, feat = source.shape[1:]
    return h if heads == 1 else h.view(-1, heads, feat)


class _GatLayer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *given: Any) -> Tensor:
        source, target, bias, seed, ctx.graph, ctx.numbers = given
        heads = Heads(linear(x, weight), source, target, bias, seed, *ctx.numbers)
        found, *kept = _forward(ctx.graph, heads)
        ctx.save_for_backward(x, weight, *heads[:5], unwatched(ctx, found), *kept)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, h, source, target, bias, seed, out, *kept = ctx.saved_tensors
        of_x, of_weight, _, _, of_bias = ctx.needs_input_grad[:5]
        graph, heads = ctx.graph, Heads(h, source, target, bias, seed, *ctx.numbers)
        at_once = len(kept) == 1 and not is_watched(grad)
        if is_changed(ctx):
            out, *kept = _forward(graph, heads)
        if not at_once and len(kept) == 1:  # what watches backward has not seen forward
            out, *kept = _by_library(graph, heads, gat.GAT_WITH_STATISTICS)
        backward = gat_at_once_backward if len(kept) == 1 else _backward_by_library

        def gradients(x: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
            tensors = tensors_of(graph)
            columns: Any = tensors.columns
            return backward(tensors.rows, columns, *given)

        # Of x and weight too, so that whoever differentiates again comes here, and is refused.
        given = grad, out, kept, *heads
        dh, d_vectors = once("gat_of_vectors", gradients, x, weight, *given)
        d_source, d_target, *d_bias = d_vectors.unbind()
        return (
            torch.mm(dh, weight) if of_x else None,
            torch.mm(dh.t(), x) if of_weight else None,
            d_source,
            d_target,
            d_bias[0].view(-1) if of_bias else None,
            *(None,) * 3,
        )


def _forward(graph: GraphLike, heads: Heads) -> tuple[Tensor, ...]:
    """Give the result, and one tensor or several that backward reads."""
    at_once = gat_at_once(tensors_of(graph).rows, heads, train=True)
    return _by_library(graph, heads, gat.GAT_WITH_STATISTICS) if at_once is None else at_once


def _backward_by_library(
    rows: Side, columns: Side, grad: Tensor, out: Tensor, kept: Any, *given: Any
) -> tuple[Tensor, Tensor]:
    """Run the library's op: gradients of the features, and of vectors and bias in one."""
    h, source, target, bias, seed, *numbers = given
    (el, er, plus, statistics), of_heads = kept, _of_heads(h, source)
    shape = of_heads.shape
    results = grad.reshape(shape), out.view(shape), plus, statistics, False
    inputs = source, target, bias, of_heads, el, er, None, None, seed, *numbers
    dh, d_vectors, _, _ = gat.GAT_OF_VECTORS_BACKWARD(rows, columns, *results, *inputs)
    return dh.view(h.shape), d_vectors
