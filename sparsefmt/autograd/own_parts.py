"""Sums of neighbours' features with a part of each vertex's own, in one node of autograd's.

On a small graph a training step takes host time, and each node of autograd's, each launch and each
small operation of torch's takes its part of that.  So a product, the part of each row's own and a
bias are one node and one launch where the factors are constants, and else three of each.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.engine.bind import bind
from .cbsr import Largest, largest_operands, spgemm
from .engine import checks
from .engine.memory import sums_dtype
from .engine.recording import Ctx, recorded, taped
from .matmul import SPMM_ARG, aggregated, csr_operands, multiply
from .tensors.order import in_csr_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors


def aggregate_with_own(
    graph: GraphLike,
    x: Tensor | Largest,
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
        Or what ``cbsr.keep_largest`` has kept, without ``k``.
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
    is saved for backward where ``k`` is given, but by the dense product of ``maxk_aggregate`` for a
    ``row_scale`` with a gradient.  ``nn.GCNConv`` adds loops so, ``nn.GINConv`` its ``1 + eps``.
    """
    scales = {"row_scale": row_scale, "col_scale": col_scale}
    if isinstance(graph, Shared) and graph.complete is None:
        return graph.aggregate_with_own(x, own, edge_weight, k=k, without=without, **scales)
    if k is None and not isinstance(x, Largest):
        tensors = tensors_of(graph, x)
        x, values, r, c = csr_operands(tensors, x, edge_weight, row_scale, col_scale)
        checks.own_part(own, without, tensors)
        y = multiply(tensors, False, x, values, r, c)
        own = own.to(y.dtype) if own.element_size() == 2 else own
        return torch.addcmul(y, own, x if without is None else x.masked_fill(without, 0))
    operands = largest_operands(graph, x, k, edge_weight, row_scale, col_scale)
    tensors, largest, factors = operands
    checks.own_part(own, without, tensors)
    y = spgemm(tensors, *largest, *factors)
    part = largest.data if without is None else largest.data.masked_fill(without, 0)
    return y + largest._replace(data=(own * part).to(largest.data.dtype)).dense()


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
    """Propagate features by symmetric factors, as GCN does, and add a bias.

    ``y[i, f] = scale[i] * sum_e(a[e] * scale[j] * x[j, f]) + own[i] * x[i, f] + bias[f]`` over the
    stored entries ``e = (i, j)`` of row ``i``; where an ``own`` without a gradient is 0, own
    features add nothing, even if they are Inf or NaN.

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
        As ``spmm``; also if the graph is not square, or ``own``, ``without`` or ``bias`` is not as
        above.

    Notes
    -----
    All tensors but ``without`` have gradients, differentiable any number of times.  Deterministic,
    backward too.  Where ``edge_weight``, ``scale`` and ``own`` ask for none, one node of autograd's
    and one pass over the result do all; else three.
    """
    if isinstance(graph, Shared) and graph.complete is None:
        options = {"edge_weight": edge_weight, "without": without, "bias": bias}
        return graph.propagate(x, scale, own, **options)
    tensors = tensors_of(graph, x)
    args = {"x": x, "edge_weight": edge_weight, "scale": scale}
    _, x, values, scale = bind(SPMM_ARG.row, tensors, **args)
    if edge_weight is not None and tensors.order is not None:
        values = in_csr_order(tensors, values)
    checks.own_part(own, without, tensors)
    factors = values, scale, scale, own.to(x.dtype).expand(tensors.n_rows, 1)[:, 0]
    return with_own(tensors, factors, x, bias, without=without)


def with_own(
    tensors: GraphTensors,
    factors: Sequence[Tensor | None],
    x: Tensor,
    bias: Tensor | None = None,
    *,
    reduce: str = "sum",
    own: Tensor | None = None,
    one_more: bool = False,
    without: Tensor | None = None,
) -> Tensor:
    """Aggregate features, and add a part of each vertex's own and a bias, differentiably.

    ``y[i, f] = r[i] * reduce_e(a[e] * c[j] * x[j, f]) + scale[i] * own[i, f] + bias[f]``.  Nothing
    but ``bias`` is checked.

    Parameters
    ----------
    factors : sequence of four
        ``a`` in CSR order, ``r``, ``c`` and ``scale``, (n,), each of which may be None, for ones.
        Where a constant ``scale`` is 0, own features add nothing, even if they are Inf or NaN.
    own : Tensor, shape (n, feat), optional
        ``x`` by default.
    one_more : bool
        ``scale`` has one value, and ``1 + scale[0]`` multiplies all own features.
    without : Tensor, shape (n, 1), bool, optional
        Vertices whose own features add nothing.
    """
    values, r, c, scale = factors
    if bias is not None and not (
        isinstance(bias, Tensor)
        and (bias.shape, bias.dtype, bias.device) == (x.shape[1:], x.dtype, x.device)
        and bias.layout is torch.strided
    ):
        checks.bias(bias, x, tensors)
        bias = bias.to(x.dtype)
    if _are_constant(x.dtype, *factors):
        if without is not None and scale is not None:
            scale = scale.masked_fill(without[:, 0], 0)
        constants = values, r, c, scale, tensors, False, reduce, one_more
        return taped(_WithOwn, _sums, (x, own, bias), constants)
    y = multiply(tensors, False, x, values, r, c, reduce)
    own = x if own is None else own
    if scale is None:
        y = y + own
    elif one_more:
        y = torch.addcmul(y, (1 + scale).to(y.dtype), own)
    else:
        if not scale.requires_grad:
            without = (scale[:, None] == 0) | (False if without is None else without)
        own = own if without is None else own.masked_fill(without, 0)
        with torch.autocast(tensors.kind, enabled=False):  # takes no 2-byte floats but its own
            y = torch.addcmul(y, scale[:, None], own)
    return y if bias is None else y + bias


def _are_constant(dtype: torch.dtype, *factors: Tensor | None) -> bool:
    """Return True if one launch takes these factors, and autograd need not hear of them.

    Traced, a Function that writes in place loses its gradients (torch 2.11).
    """
    scale = factors[-1]
    fits = scale is None or scale.dtype is dtype
    return fits and not torch.compiler.is_compiling() and not recorded(*factors)


def _sums(x: Tensor, own: Tensor | None, bias: Tensor | None, constants: Any) -> Tensor:
    """Compute what ``with_own`` does in one launch, without autograd."""
    values, r, c, scale, tensors, transposed, reduce, one_more = constants
    side = tensors.columns if transposed else tensors.rows
    own_part = x if own is None else own, scale, one_more, bias
    return aggregated(side, x, values, r, c, reduce, *own_part)


class _WithOwn(Function):
    """A sum or mean over the entries of each row, with a part of the row's own and a bias."""

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, own: Tensor | None, bias: Tensor | None, constants: Any
    ) -> Tensor:
        *factors, ctx.tensors, ctx.transposed, ctx.reduce, ctx.one_more = constants
        ctx.save_for_backward(*factors)
        ctx.own_is_x = own is None
        return _sums(x, own, bias, constants)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, r, c, scale = ctx.saved_tensors
        tensors, transposed, one_more = ctx.tensors.current(), ctx.transposed, ctx.one_more
        of_x, of_own, of_bias, _ = ctx.needs_input_grad
        if ctx.reduce == "mean":
            inverse = tensors.side(transposed).inverse_degree(sums_dtype(grad))
            r = inverse if r is None else r * inverse
        dx = d_own = None
        if of_x and ctx.own_is_x:
            constants = values, c, r, scale, tensors, not transposed, "sum", one_more
            dx = taped(_WithOwn, _sums, (grad, None, None), constants)
        elif of_x:
            dx = multiply(tensors, not transposed, grad, values, c, r)
        if of_own:
            d_own = grad if scale is None else grad * (1 + scale if one_more else scale[:, None])
        return dx, d_own, grad.sum(0) if of_bias else None, None
