"""The ``torch.autograd.Function`` of a graph convolution: aggregate, own part and bias in one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._recording import apart, recorded
from .matmul import SPMM, spmm
from .structure import GraphLike, side_of


def propagate(
    graph: GraphLike,
    x: Tensor,
    values: Tensor | None,
    scale: Tensor,
    own: Tensor,
    without: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """``diag(s) A diag(s) x + diag(own) x + b``, differentiable in ``x`` and ``b``.

    All else is constant: no node of autograd's is spent on it.  Nothing is checked.
    """
    inputs = x, bias
    if not recorded(*inputs):
        return _propagate(graph, *inputs, values, scale, own, without)
    factors = values, scale, own, without
    found: Tensor = _Propagate.apply(*apart(*inputs), *factors, graph)  # type: ignore[no-untyped-call]
    return found


def _propagate(
    graph: GraphLike,
    x: Tensor,
    bias: Tensor | None,
    values: Tensor | None,
    scale: Tensor,
    own: Tensor,
    without: Tensor | None,
) -> Tensor:
    side = side_of(graph, False)
    out: Tensor = SPMM(side, x, values, None, scale, scale, "sum")
    out = out.addcmul_(own, x if without is None else x.masked_fill(without, 0))
    return out if bias is None else out.add_(bias)


class _Propagate(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        values: Tensor | None,
        scale: Tensor,
        own: Tensor,
        without: Tensor | None,
        graph: GraphLike,
    ) -> Tensor:
        ctx.save_for_backward(values, scale, own, without)
        ctx.graph = graph
        return _propagate(graph, x, bias, values, scale, own, without)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, own, without = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = spmm(ctx.graph, True, grad, values, scale, scale)
            dx = torch.addcmul(dx, own, grad if without is None else grad.masked_fill(without, 0))
        if ctx.needs_input_grad[1]:
            db = grad.sum(0)
        return dx, db, None, None, None, None, None
