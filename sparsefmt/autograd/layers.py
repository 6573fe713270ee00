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
from .engine.precision import bf16_is_allowed
from .engine.recording import recorded
from .matmul import SPMM, aggregated, multiply
from .plain import applied, is_taped
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors

# Sums with a part of each row's own


def _add_own(
    tensors: GraphTensors,
    transposed: bool,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
    *own_part: Any,
) -> Tensor:
    """Multiply and add a row's own part in one kernel, without autograd."""
    side, values = tensors.columns if transposed else tensors.rows, tensors.csr_values
    perm = None if values is None else side.perm
    y: Tensor = SPMM(side, x, values, perm, row_scale, col_scale, reduce, *own_part)
    return y


def propagated(
    graph: GraphLike,
    x: Tensor,
    scale: Tensor | None,
    own: Tensor,
    bias: Tensor | None = None,
    *,
    one_more: bool = False,
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

    Returns
    -------
    Tensor, shape (n, feat)

    Notes
    -----
    ``x`` and ``bias`` have gradients, differentiable any number of times; all else is constant.
    """
    return _propagated(tensors_of(graph), x, None, bias, scale, own, one_more)


def _propagated(
    tensors: GraphTensors,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    own: Tensor,
    one_more: bool,
    transposed: bool = False,
) -> Tensor:
    """Propagate ``x W``, or ``x`` if there is no weight, by the graph or its transpose."""
    constants = scale, own, tensors, one_more, transposed
    if recorded(x, weight, bias):  # which refuses a backward pass within vmap
        return applied(_Propagated, x, weight, bias, *constants)
    return _sum_of_maps(x, weight, bias, *constants)


def _sum_of_maps(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Any, own: Tensor, *options: Any
) -> Tensor:
    tensors, one_more, transposed = options
    h = x if weight is None else linear(x, weight)
    return _add_own(tensors, transposed, h, scale, scale, "sum", h, own, one_more, bias)


class _Propagated(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, *constants: Any
    ) -> Tensor:
        scale, own, ctx.tensors, ctx.one_more, ctx.transposed = constants
        ctx.save_for_backward(None if weight is None else x, weight, scale, own)
        return _sum_of_maps(x, weight, bias, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, own = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if of_x or of_weight:
            constants = scale, own, ctx.one_more, not ctx.transposed
            dx = _propagated(ctx.tensors.current(), grad, None, None, *constants)
            if weight is not None:
                dw = torch.mm(dx.t(), x) if of_weight else None
                dx = torch.mm(dx, weight) if of_x else None
        return dx, dw, grad.sum(0) if of_bias else None, *(None,) * 5


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
    return _propagated(tensors_of(graph), x, weight, bias, scale, own, False)


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
    return _propagated(tensors_of(graph), x, weight, bias, None, eps, True)


def maps_first(width: int, out_width: int, *, gradient: bool) -> bool:
    """Return True if SAGE and GIN aggregate what was mapped, so that fewer bytes are gathered.

    If the features have no ``gradient``, backward aggregates the gradient of what was mapped only.
    """
    passes = 2 if torch.is_grad_enabled() and not gradient else 1
    return passes * out_width <= width


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
        return _sage(tensors_of(graph), early, *inputs)[0]
    return applied(_Sage, *inputs, tensors_of(graph), early)


def _sage(
    tensors: GraphTensors, early: bool, x: Tensor, weight: Tensor, bias: Any, own_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result, and for backward the mean features, or ``early`` the stacked weights."""
    feat = weight.shape[0]
    if early:
        maps = torch.cat([weight, own_weight])
        h, own = linear(x, maps).split_with_sizes([feat, feat], 1)
        own_part = own, None, False, bias
        return _add_own(tensors, False, h, None, None, "mean", *own_part), maps
    means = aggregated(tensors.rows, x, tensors.csr_values, None, None, "mean")
    return linear(means, weight, bias).addmm_(x, own_weight.t()), means


class _Sage(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, *args: Any) -> Tensor:
        own_weight, ctx.tensors, ctx.early = args
        y, saved = _sage(ctx.tensors, ctx.early, x, weight, bias, own_weight)
        ctx.save_for_backward(x, weight, own_weight, saved)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, of_own = ctx.needs_input_grad[:4]
        back = _sage_early if ctx.early else _sage_late
        needs = of_x, of_weight or of_own
        dx, dw, dv = back(ctx.tensors.current(), needs, grad, *ctx.saved_tensors)
        return dx, dw, grad.sum(0) if of_bias else None, dv, None, None


def _sage_early(
    tensors: GraphTensors,
    needs: tuple[bool, bool],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    own_weight: Tensor,
    maps: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of features and both weights, where maps came first."""
    dx = dw = dv = None
    both = torch.cat([_mean_back(tensors, grad), grad], 1)
    if needs[0]:
        if torch.is_grad_enabled():  # to be differentiated once more
            maps = torch.cat([weight, own_weight])
        dx = torch.mm(both, maps)
    if needs[1]:
        dw, dv = torch.mm(both.t(), x).split_with_sizes([weight.shape[0], own_weight.shape[0]])
    return dx, dw, dv


def _sage_late(
    tensors: GraphTensors,
    needs: tuple[bool, bool],
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    own_weight: Tensor,
    means: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of features and both weights, where the means came first."""
    dx = dw = dv = None
    # To be differentiated once more; ``recorded`` refuses a tangent.
    again = recorded(grad) or torch.is_grad_enabled()
    if needs[0]:
        of_means, own = torch.mm(grad, weight), torch.mm(grad, own_weight)
        if again:
            dx = _mean_back(tensors, of_means) + own
        else:
            scales = None, tensors.rows.inverse_degree_beside(grad)
            dx = _add_own(tensors, True, of_means, *scales, "sum", own)
    if needs[1]:
        if again:
            means = multiply(tensors, False, x, tensors.csr_values, None, None, "mean")
        dw, dv = torch.mm(grad.t(), means), torch.mm(grad.t(), x)
    return dx, dw, dv


def _mean_back(tensors: GraphTensors, grad: Tensor) -> Tensor:
    """Return the gradient of the features of a mean, differentiably."""
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
        ctx.op, ctx.rounds = attention.GAT_OF_VECTORS_WITH_STATISTICS, bf16_is_allowed()
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
