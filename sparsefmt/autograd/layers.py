"""Whole layers in one node of autograd's: linear maps, aggregation and bias, forward and backward.

On a small graph a training step takes host time, and each node of autograd's, each launch and each
small operation of torch's takes its part of that.  Nothing is checked here but whether a call is
one that these nodes serve, ``is_plain``: those that are not go step by step, and are checked there.
Gradients are differentiable any number of times, that of attention once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from . import attention
from .engine import checks
from .engine.recording import recorded
from .matmul import SPMM, aggregated, multiply
from .plain import applied, is_taped
from .tensors.prepare import GraphLike, side_of, tensors_of

# Sums with a part of each row's own


def _plus(
    graph: GraphLike, transposed: bool, x: Tensor, scales: Any, reduce: str, *own: Any
) -> Tensor:
    """Run the kernel that adds a row's own part to its sum; no autograd."""
    tensors = tensors_of(graph)
    side, values = tensors.side(transposed), tensors.csr_values
    perm = None if values is None else side.perm
    y: Tensor = SPMM(side, x, values, perm, *scales, reduce, *own)
    return y


def propagated(
    graph: GraphLike,
    x: Tensor,
    scale: Tensor | None,
    own: Tensor,
    bias: Tensor | None = None,
    *,
    one_more: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Propagate features of a call that ``is_plain``: the sum over neighbours and an own part.

    ``y[i] = scale[i] * sum_e(a[e] * scale[j] * x[j]) + own[i] * x[i] + bias`` over the stored
    entries ``e = (i, j)`` of row ``i``; ``a`` are the graph's own values, or 1.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, feat)
    scale : Tensor, shape (n,), optional
    own : Tensor, shape (n,)
        Where it is 0 the own features add nothing, even if they are Inf or NaN.
    bias : Tensor, shape (feat,), optional
    one_more : bool
        If so ``own`` has one value, and ``1 + own[0]`` is the factor of all.
    transposed : bool
        Whether to go by the transpose.

    Returns
    -------
    Tensor, shape (n, feat)

    Notes
    -----
    ``x`` and ``bias`` have gradients, differentiable any number of times; all else is constant.
    """
    if not recorded(x, bias):  # which refuses a backward pass within vmap
        return _plus(graph, transposed, x, (scale, scale), "sum", x, own, one_more, bias)
    return applied(_Propagated, x, bias, scale, own, graph, one_more, transposed)


class _Propagated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, scale: Any, *given: Any) -> Tensor:
        own, ctx.graph, ctx.one_more, ctx.transposed = given
        ctx.save_for_backward(scale, own)
        scales = scale, scale
        return _plus(ctx.graph, ctx.transposed, x, scales, "sum", x, own, ctx.one_more, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = _back(ctx, grad, *ctx.saved_tensors)
        if ctx.needs_input_grad[1]:
            db = grad.sum(0)
        return dx, db, None, None, None, None, None


def _back(ctx: Any, grad: Tensor, scale: Tensor | None, own: Tensor) -> Tensor:
    """Give the gradient of what was propagated."""
    options = {"one_more": ctx.one_more, "transposed": not ctx.transposed}
    return propagated(ctx.graph, grad, scale, own, **options)


def gcn_convolution(
    graph: GraphLike, x: Tensor, weight: Tensor, scale: Tensor, own: Tensor, bias: Tensor | None
) -> Tensor:
    """Run GCN's convolution of a call that ``is_plain``: ``propagated`` of ``x W``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, in_channels)
    weight : Tensor, shape (out_channels, in_channels)
        ``W`` transposed.
    scale, own, bias
        As for ``propagated``.

    Returns
    -------
    Tensor, shape (n, out_channels)
    """
    if not is_taped(x, weight, bias):
        h = linear(x, weight)
        return _plus(graph, False, h, (scale, scale), "sum", h, own, False, bias)
    return applied(_Gcn, x, weight, bias, scale, own, graph, False)


def gin_convolution(
    graph: GraphLike, x: Tensor, eps: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Run GIN's convolution of a call that ``is_plain``: ``((1 + eps) x + A x) W + b``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, in_channels)
    eps : Tensor, shape (1,)
        A constant.
    weight : Tensor, shape (out_channels, in_channels)
        ``W`` transposed.
    bias : Tensor, shape (out_channels,), optional

    Returns
    -------
    Tensor, shape (n, out_channels)

    Notes
    -----
    The map comes first where fewer bytes are gathered so, as in ``sage_convolution``.
    """
    if not maps_first(*weight.shape[::-1], gradient=x.requires_grad):
        return linear(propagated(graph, x, None, eps, one_more=True), weight, bias)
    if not is_taped(x, weight, bias):
        h = linear(x, weight)
        return _plus(graph, False, h, (None, None), "sum", h, eps, True, bias)
    return applied(_Gcn, x, weight, bias, None, eps, graph, True)


def maps_first(width: int, out_width: int, *, gradient: bool) -> bool:
    """Tell whether SAGE and GIN aggregate what was mapped, so that fewer bytes are gathered.

    If the features have no ``gradient``, backward aggregates the gradient of what was mapped only.
    """
    passes = 2 if torch.is_grad_enabled() and not gradient else 1
    return passes * out_width <= width


class _Gcn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *given: Any) -> Tensor:
        scale, own, ctx.graph, ctx.one_more = given
        ctx.save_for_backward(x, weight, scale, own)
        ctx.transposed = False
        h = linear(x, weight)
        return _plus(ctx.graph, False, h, (scale, scale), "sum", h, own, ctx.one_more, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *factors = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if of_x or of_weight:
            dh = _back(ctx, grad, *factors)
            dx = torch.mm(dh, weight) if of_x else None
            dw = torch.mm(dh.t(), x) if of_weight else None
        return dx, dw, grad.sum(0) if of_bias else None, *(None,) * 4


# Means beside a map of each row's own


def sage_convolution(
    graph: GraphLike, x: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor
) -> Tensor:
    """Run GraphSAGE's convolution of a call that ``is_plain``: ``mean_j(x[j]) W + b + x V``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, in_channels)
    weight, own_weight : Tensor, shape (out_channels, in_channels)
        ``W`` and ``V`` transposed.
    bias : Tensor, shape (out_channels,), optional

    Returns
    -------
    Tensor, shape (n, out_channels)

    Notes
    -----
    A mean and ``W`` commute: the map comes first, in one product with that of ``V``, where fewer
    bytes are gathered so.  If ``x`` has no gradient, backward aggregates only what was mapped.
    """
    inputs = x, weight, bias, own_weight
    early = maps_first(*weight.shape[::-1], gradient=x.requires_grad)
    if not is_taped(*inputs):
        return _sage(graph, early, *inputs)[0]
    return applied(_Sage, *inputs, graph, early)


def _sage(
    graph: GraphLike, early: bool, x: Tensor, weight: Tensor, bias: Any, own_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Give the result and what backward reads: the means of the features, or ``early`` the maps."""
    feat = weight.shape[0]
    if early:
        maps = torch.cat([weight, own_weight])
        h, own = linear(x, maps).split_with_sizes([feat, feat], 1)
        return _plus(graph, False, h, (None, None), "mean", own, None, False, bias), maps
    tensors = tensors_of(graph)
    means = aggregated(tensors.rows, x, tensors.csr_values, None, None, "mean")
    return linear(means, weight, bias).addmm_(x, own_weight.t()), means


class _Sage(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *given: Any) -> Tensor:
        own_weight, ctx.graph, ctx.early = given
        y, kept = _sage(ctx.graph, ctx.early, x, weight, bias, own_weight)
        ctx.save_for_backward(x, weight, own_weight, kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, own_weight, kept = ctx.saved_tensors
        of_x, of_weight, of_bias, of_own = ctx.needs_input_grad[:4]
        back = _sage_early if ctx.early else _sage_late
        wanted = of_x, of_weight or of_own
        dx, dw, dv = back(ctx.graph, wanted, grad, x, weight, own_weight, kept)
        return dx, dw, grad.sum(0) if of_bias else None, dv, None, None


def _sage_early(
    graph: GraphLike,
    wanted: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    own_weight: Tensor,
    maps: Tensor,
) -> tuple[Tensor | None, ...]:
    """Give the gradients of features and both weights, where maps came first."""
    dx = dw = dv = None
    both = torch.cat([_mean_back(graph, grad), grad], 1)
    if wanted[0]:
        if torch.is_grad_enabled():  # to be differentiated once more
            maps = torch.cat([weight, own_weight])
        dx = torch.mm(both, maps)
    if wanted[1]:
        dw, dv = torch.mm(both.t(), x).split_with_sizes([weight.shape[0], own_weight.shape[0]])
    return dx, dw, dv


def _sage_late(
    graph: GraphLike,
    wanted: Any,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    own_weight: Tensor,
    means: Tensor,
) -> tuple[Tensor | None, ...]:
    """Give the gradients of features and both weights, where the means came first."""
    dx = dw = dv = None
    # To be differentiated once more; ``recorded`` refuses a tangent.
    again = recorded(grad) or torch.is_grad_enabled()
    if wanted[0]:
        of_means, own = torch.mm(grad, weight), torch.mm(grad, own_weight)
        if again:
            dx = _mean_back(graph, of_means) + own
        else:
            scales = None, side_of(graph, False).inverse_degree_beside(grad)
            dx = _plus(graph, True, of_means, scales, "sum", own, None, False, None)
    if wanted[1]:
        if again:
            tensors = tensors_of(graph)
            means = multiply(tensors, False, x, tensors.csr_values, None, None, "mean")
        dw, dv = torch.mm(grad.t(), means), torch.mm(grad.t(), x)
    return dx, dw, dv


def _mean_back(graph: GraphLike, grad: Tensor) -> Tensor:
    """Give the gradient of the features of a mean, differentiably."""
    tensors = tensors_of(graph)
    scale = tensors.rows.inverse_degree_beside(grad)
    return multiply(tensors, True, grad, tensors.csr_values, None, scale)


# Graph attention


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
    """Run ``gat_of_vectors`` of ``x W``, (n, heads * feat), in a call that ``is_plain``.

    ``weight`` is ``W`` transposed, ``vectors`` of sources and targets (1, heads, feat).
    """
    # ``is_plain`` has checked that the graph is square.
    slope, share, loops = attention.numbers(negative_slope, dropout, self_loops)
    tensors = tensors_of(graph)
    seed = checks.seed_on_device(None, tensors) if share else None
    if is_taped(x, weight, *vectors, bias):
        numbers = slope, share, loops
        return applied(_GatLayer, x, weight, *vectors, bias, seed, tensors, numbers)
    options = seed, slope, share, loops
    inputs = linear(x, weight), *vectors, bias, None, None
    out: Tensor = attention.GAT_OF_VECTORS(tensors.rows, *inputs, *options)
    return out


class _GatLayer(Function):
    """A linear map, and attention of scores that vectors make of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *given: Any) -> Tensor:
        source, target, bias, seed, ctx.tensors, ctx.numbers = given
        ctx.op = attention.GAT_OF_VECTORS_WITH_STATISTICS
        inputs = linear(x, weight), source, target, bias, None, None, seed
        out, *statistics = ctx.op(ctx.tensors.rows, *inputs, *ctx.numbers)
        ctx.save_for_backward(x, weight, *inputs, attention.unversioned(ctx, out), *statistics)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        of_x, of_weight, _, _, of_bias = ctx.needs_input_grad[:5]
        given = attention.GAT_OF_VECTORS_BACKWARD, grad, saved, False
        dh, d_vectors, *_ = attention.gradients(ctx, "gat_of_vectors", *given, also=(x, weight))
        d_source, d_target, *d_bias = d_vectors.unbind()
        return (
            torch.mm(dh, weight) if of_x else None,
            torch.mm(dh.t(), x) if of_weight else None,
            d_source,
            d_target,
            d_bias[0].view(-1) if of_bias else None,
            *(None,) * 3,
        )
