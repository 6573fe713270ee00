"""Sums of neighbours' features with a part of each vertex's own, and whole layers in one node.

On a small graph a training step takes host time, and each node of autograd's, each launch and each
small operation of torch's takes its part of that.  The functions named after layers check nothing:
the layers call them where ``is_plain`` returns True, and else go step by step, where arguments are
checked.  Gradients are differentiable any number of times, that of attention once.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.autograd import Function, forward_ad
from torch.nn import Parameter
from torch.nn.functional import linear

from ..errors import UnsupportedError
from ..graph.graph import Graph
from . import attention
from .cbsr import choose_features, spgemm, to_dense
from .engine import checks, library
from .engine.memory import sums_dtype
from .engine.precision import bf16_is_allowed
from .engine.recording import Ctx, recorded, taped
from .matmul import SPMM, aggregated, csr_operands, multiply
from .tensors.prepare import GraphLike, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors

# Sums with a part of each row's own


def aggregate_with_own(
    graph: GraphLike,
    x: Tensor,
    own: Tensor,
    edge_weight: Tensor | None = None,
    *,
    k: int | None = None,
    without: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours, and add a part of its own.

    ``y[i, f] = r[i] * sum_e(a[e] * c[j] * s(x)[j, f]) + own[i] * s(x)[i, f]`` over the stored
    entries ``e = (i, j)`` of row ``i``; ``s`` is ``maxk(x, k)``, chosen once for both parts, or
    nothing without ``k``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, feat)
    own : Tensor, shape (n, 1) or (1,)
        The factor of each vertex's own features, or one for all; floating, on the device of ``x``.
    edge_weight, row_scale, col_scale
        As for ``spmm``.
    k : int, optional
        Features of a row to keep, between 1 and ``feat``; all of them by default.
    without : Tensor, shape (n, 1), bool, optional
        Vertices whose own features add nothing, even where they hold Inf or NaN.

    Returns
    -------
    Tensor, shape (n, feat)
        In the dtype of ``x``, or autocast's; without ``k`` that of ``own`` if it is wider.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``; also if the graph is not square, ``k`` lies outside 1 .. feat, or ``own`` or
        ``without`` is not as above.

    Notes
    -----
    All tensors but ``without`` have gradients, differentiable any number of times.  Nothing dense
    is saved for backward where ``k`` is given.  ``nn.GCNConv`` adds loops this way, and
    ``nn.GINConv`` its ``1 + eps``.
    """
    if isinstance(graph, Shared) and graph.whole is None:
        options = {"without": without, "row_scale": row_scale, "col_scale": col_scale}
        return graph.aggregate_with_own(x, own, edge_weight, k=k, **options)
    tensors = tensors_of(graph, x)
    x, values, r, c = csr_operands(tensors, x, edge_weight, row_scale, col_scale)
    checks.own_part(own, without, tensors)
    if k is None:
        y = multiply(tensors, False, x, values, r, c)
        own = own.to(y.dtype) if own.element_size() == 2 else own
        return torch.addcmul(y, own, x if without is None else x.masked_fill(without, 0))
    feat = x.shape[1]
    columns, chosen = choose_features(x, checks.checked_k(k, feat))
    y = spgemm(tensors, columns, chosen, feat, values, r, c)
    part = chosen if without is None else chosen.masked_fill(without, 0)
    return y + to_dense(columns, (own * part).to(chosen.dtype), feat)


def propagate(
    graph: GraphLike,
    x: Tensor,
    scale: Tensor,
    own: Tensor,
    *,
    edge_weight: Tensor | None = None,
    without: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Propagate features by symmetric constant factors, as GCN does, in one node of autograd's.

    ``y[i, f] = scale[i] * sum_e(a[e] * scale[j] * x[j, f]) + own[i] * x[i, f] + bias[f]`` over the
    stored entries ``e = (i, j)`` of row ``i``; where ``own`` is 0, own features add nothing, even
    if they are Inf or NaN.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, feat)
    edge_weight : Tensor, shape (nnz,), optional
        ``a``.  As for ``spmm``.
    scale : Tensor, shape (n,)
        In the dtype of ``x``.
    own, without
        As for ``aggregate_with_own``.
    bias : Tensor, shape (feat,), optional
        Floating, on the device of ``x``.

    Returns
    -------
    Tensor, shape (n, feat)
        In the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``; also if the graph is not square, ``own``, ``without`` or ``bias`` is not as
        above, or ``scale``, ``own`` or ``edge_weight`` asks for a gradient: ``aggregate_with_own``
        has one.

    Notes
    -----
    ``x`` and ``bias`` have gradients, differentiable any number of times; all else is constant.
    Deterministic, backward too.  ``aggregate_with_own`` computes the same in three nodes and as
    many passes over the result.
    """
    if isinstance(graph, Shared) and graph.whole is None:
        options = {"edge_weight": edge_weight, "without": without, "bias": bias}
        return graph.propagate(x, scale, own, **options)
    tensors = tensors_of(graph, x)
    x, values, _, _ = csr_operands(tensors, x, edge_weight)
    if torch.is_autocast_enabled(tensors.kind):
        scale = library.cast(scale, tensors.kind, x.dtype)
    checks.vector("scale", scale, length=tensors.n_rows, what="rows", x=x, graph=tensors)
    checks.own_part(own, without, tensors)
    if recorded(scale, own, values):
        raise UnsupportedError(
            "scale, own or edge_weight requires a gradient, which propagate does not compute: use "
            "aggregate_with_own, or detach them."
        )
    if bias is not None:
        checks.bias(bias, x, tensors)
        bias = bias.to(x.dtype)
    own = own.to(x.dtype).expand(tensors.n_rows, 1)
    own = own if without is None else own.masked_fill(without, 0)
    own_values = edge_weight is None
    if torch.compiler.is_compiling() or (own_values and values is not tensors.csr_values):  # cast
        parts: Any = {"without": own == 0, "row_scale": scale, "col_scale": scale}
        y = aggregate_with_own(graph, x, own, edge_weight, **parts)
        return y if bias is None else y + bias
    args = scale, own.reshape(-1), tensors, False, False, None if own_values else values
    return taped(_Propagated, _sum_of_maps, (x, None, bias), *args)


def _add_own(
    tensors: GraphTensors,
    transposed: bool,
    x: Tensor,
    values: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    reduce: str,
    *own_part: Any,
) -> Tensor:
    """Multiply and add each row's own part in one kernel, without autograd."""
    side = tensors.columns if transposed else tensors.rows
    perm = None if values is None else side.perm
    y: Tensor = SPMM(side, x, values, perm, *scales, reduce, *own_part)
    return y


# Layers in one node

_TENSORS = (Tensor, Parameter)


def is_plain(graph: object, x: Any, weight: Any, *parameters: Tensor | None) -> bool:
    """Return True if a layer may run as one node, as most calls in eager mode may.

    That is for tensors of one dtype and device, of no subclass: ``x`` (n, in_channels), ``weight``
    (out_channels, in_channels) or (1,), and ``parameters``; for a square graph there, without
    values or with those of that dtype; and outside autocast, transforms and ``torch.compile``.
    """
    if (
        torch.compiler.is_compiling()
        or type(graph) is not Graph
        or type(x) not in _TENSORS
        or type(weight) not in _TENSORS
        or x.dim() != 2
        or forward_ad._current_level >= 0
        or maybe_current_level() is not None
    ):
        return False
    dtype, device = x.dtype, x.device
    for tensor in (x, weight, *parameters):
        if tensor is not None and not (
            type(tensor) in _TENSORS
            and tensor.dtype is dtype
            and tensor.device == device
            and not is_functorch_wrapped_tensor(tensor)  # left behind by a transform
        ):
            return False
    tensors = tensors_of(graph)
    values = tensors.csr_values
    return (
        x.shape[0] == tensors.n_rows == tensors.n_cols
        and (weight.dim() == 1 or x.shape[1] == weight.shape[1])
        and dtype in checks.FLOATING
        and device == tensors.device
        and x.layout is torch.strided
        and (values is None or values.dtype is dtype)
        and not torch.is_autocast_enabled(tensors.kind)
    )


def applied(function: type[Function], *args: Any) -> Tensor:
    """Apply a function to tensors that no transform has left behind, which torch looks for."""
    out: Tensor = super(Function, function).apply(*args)  # type: ignore[misc]
    return out


def propagated(
    graph: GraphLike,
    x: Tensor,
    scale: Tensor | None,
    own: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    one_more: bool = False,
) -> Tensor:
    """Compute ``propagate`` of ``x``, or of ``x W``, in a call that ``is_plain``.

    ``weight`` is ``W`` transposed, (out_channels, in_channels).  ``own`` has shape (n,); with
    ``one_more`` it has one value, and ``1 + own[0]`` is the factor of all; without it, own features
    add nothing where ``own`` is 0, even if they are Inf or NaN.  ``scale`` may be None, for ones.
    """
    return _propagated((x, weight, bias), scale, own, tensors_of(graph), one_more, False, None)


_Maps: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]  # features, weight and bias


def _propagated(inputs: _Maps, *constants: Any) -> Tensor:
    """Propagate ``x W``, or ``x`` if there is no weight, by the graph or its transpose."""
    if recorded(*inputs):  # which refuses a backward pass within vmap
        return applied(_Propagated, *inputs, *constants)
    return _sum_of_maps(*inputs, *constants)


def _sum_of_maps(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    own: Tensor,
    tensors: GraphTensors,
    one_more: bool,
    transposed: bool,
    values: Tensor | None,
) -> Tensor:
    """Compute what ``propagated`` does, without autograd."""
    h = x if weight is None else linear(x, weight)
    values = tensors.csr_values if values is None else values
    own_part = h, own, one_more, bias
    return _add_own(tensors, transposed, h, values, (scale, scale), "sum", *own_part)


class _Propagated(Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor | None, *args: Any) -> Tensor:
        _, scale, own, ctx.tensors, ctx.one_more, ctx.transposed, values = args
        ctx.save_for_backward(None if weight is None else x, weight, scale, own, values)
        return _sum_of_maps(x, weight, *args)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, own, values = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if of_x or of_weight:
            constants = scale, own, ctx.tensors.current(), ctx.one_more, not ctx.transposed, values
            dx = _propagated((grad, None, None), *constants)
            if weight is not None:
                dw = torch.mm(dx.t(), x) if of_weight else None
                dx = torch.mm(dx, weight) if of_x else None
        return dx, dw, grad.sum(0) if of_bias else None, *(None,) * 6


def gin_convolution(
    graph: GraphLike, x: Tensor, eps: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Run GIN's convolution of a call that ``is_plain``: ``((1 + eps) x + A x) W + b``.

    ``eps`` is a constant of shape (1,), and ``weight`` is ``W`` transposed.
    """
    if not maps_first(*weight.shape[::-1], gradient=x.requires_grad):
        return linear(propagated(graph, x, None, eps, one_more=True), weight, bias)
    return propagated(graph, x, None, eps, bias, weight=weight, one_more=True)


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

    ``weight`` and ``own_weight`` are ``W`` and ``V`` transposed.  A mean and ``W`` commute: the map
    comes first, in one product with that of ``V``, where fewer bytes are gathered so.  If ``x`` has
    no gradient, backward aggregates only what was mapped.
    """
    inputs = x, weight, bias, own_weight
    early = maps_first(*weight.shape[::-1], gradient=x.requires_grad)
    if not recorded(*inputs):
        return _sage(tensors_of(graph), early, *inputs)[0]
    return applied(_Sage, *inputs, tensors_of(graph), early)


def _sage(
    tensors: GraphTensors,
    early: bool,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    own_weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the result, and for backward the mean features, or ``early`` the stacked weights."""
    feat = weight.shape[0]
    if early:
        maps = torch.cat([weight, own_weight])
        h, own = linear(x, maps).split_with_sizes([feat, feat], 1)
        own_part = own, None, False, bias
        args = tensors.csr_values, (None, None), "mean", *own_part
        return _add_own(tensors, False, h, *args), maps
    means = aggregated(tensors.rows, x, tensors.csr_values, None, None, "mean")
    return linear(means, weight, bias).addmm_(x, own_weight.t()), means


class _Sage(Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        own_weight, ctx.tensors, ctx.early = args
        y, saved = _sage(ctx.tensors, ctx.early, x, weight, bias, own_weight)
        ctx.save_for_backward(x, weight, own_weight, saved)
        return y

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, of_own = ctx.needs_input_grad[:4]
        x, weight, own_weight, saved = ctx.saved_tensors
        tensors, dx, dw, dv = ctx.tensors.current(), None, None, None
        # To be differentiated once more; ``recorded`` refuses a tangent.
        again = recorded(grad) or torch.is_grad_enabled()
        if ctx.early:
            both = torch.cat([_mean_back(tensors, grad), grad], 1)
            maps = torch.cat([weight, own_weight]) if again else saved
            dx = torch.mm(both, maps) if of_x else None
            if of_weight or of_own:
                dw, dv = torch.mm(both.t(), x).split_with_sizes([len(weight), len(own_weight)])
            return dx, dw, grad.sum(0) if of_bias else None, dv, None, None
        if of_x:
            of_means, own = torch.mm(grad, weight), torch.mm(grad, own_weight)
            if again:
                dx = _mean_back(tensors, of_means) + own
            else:
                scales = None, tensors.rows.inverse_degree(sums_dtype(grad))
                dx = _add_own(tensors, True, of_means, tensors.csr_values, scales, "sum", own)
        if of_weight or of_own:
            args = x, tensors.csr_values, None, None, "mean"
            means = multiply(tensors, False, *args) if again else saved
            dw, dv = torch.mm(grad.t(), means), torch.mm(grad.t(), x)
        return dx, dw, grad.sum(0) if of_bias else None, dv, None, None


def _mean_back(tensors: GraphTensors, grad: Tensor) -> Tensor:
    """Return the gradient of the features of a mean, differentiably."""
    scale = tensors.rows.inverse_degree(sums_dtype(grad))
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
    if recorded(x, weight, *vectors, bias):
        numbers = slope, share, loops
        return applied(_GatLayer, x, weight, *vectors, bias, seed, tensors, numbers)
    options = seed, slope, share, loops
    inputs = linear(x, weight), *vectors, bias, None, None
    out: Tensor = attention.GAT_OF_VECTORS(tensors.rows, *inputs, *options)
    return out


class _GatLayer(Function):
    """A linear map, and attention of scores that vectors make of its result."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        source, target, bias, seed, ctx.tensors, ctx.numbers = args
        ctx.op, ctx.rounds = attention.GAT_OF_VECTORS_WITH_STATISTICS, bf16_is_allowed()
        inputs = linear(x, weight), source, target, bias, None, None, seed
        out, *statistics = ctx.op(ctx.tensors.rows, *inputs, *ctx.numbers)
        ctx.save_for_backward(x, weight, *inputs, attention.unversioned(ctx, out), *statistics)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        of_x, of_weight, _, _, of_bias = ctx.needs_input_grad[:5]
        args = attention.GAT_OF_VECTORS_BACKWARD, grad, saved, False
        dh, d_vectors, *_ = attention.gradients(ctx, "gat_of_vectors", *args, also=(x, weight))
        d_source, d_target, *d_bias = d_vectors.unbind()
        return (
            torch.mm(dh, weight) if of_x else None,
            torch.mm(dh.t(), x) if of_weight else None,
            d_source,
            d_target,
            d_bias[0].view(-1) if of_bias else None,
            *(None,) * 3,
        )
