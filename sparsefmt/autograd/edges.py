"""``torch.autograd.Function``s of the softmax over rows, differentiable any number of times."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._library import LibraryOp
from ._recording import recorded
from .matmul import sddmm, segment_sums
from .structure import GraphLike, side_of

EDGE_SOFTMAX = LibraryOp("edge_softmax")
EDGE_SOFTMAX_BACKWARD = LibraryOp("edge_softmax_backward")


def edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    """Softmax over the entries of each row, differentiable; nothing is checked."""
    if not recorded(scores):
        return _edge_softmax(graph, scores)
    found: Tensor = _EdgeSoftmax.apply(scores, graph)  # type: ignore[no-untyped-call]
    return found


def _edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    out: Tensor = EDGE_SOFTMAX(side_of(graph, False), scores)
    return out


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, graph: GraphLike) -> Tensor:
        out = _edge_softmax(graph, scores)
        ctx.save_for_backward(out)
        ctx.graph = graph
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        return _softmax_gradient(ctx.graph, probabilities, grad), None


def _softmax_gradient(graph: GraphLike, probabilities: Tensor, grad: Tensor) -> Tensor:
    """``p (grad - sum over the row of p grad)``."""
    found: Tensor
    if recorded(probabilities, grad):
        found = _SoftmaxGradient.apply(probabilities, grad, graph)  # type: ignore[no-untyped-call]
        return found
    return _softmax_backward(graph, probabilities, grad)


def _softmax_backward(graph: GraphLike, probabilities: Tensor, grad: Tensor) -> Tensor:
    out: Tensor = EDGE_SOFTMAX_BACKWARD(side_of(graph, False), probabilities, grad)
    return out


class _SoftmaxGradient(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, grad: Tensor, graph: GraphLike) -> Tensor:
        ctx.save_for_backward(probabilities, grad)
        ctx.graph = graph
        return _softmax_backward(graph, probabilities, grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, inner = ctx.saved_tensors
        dp = dinner = None
        if ctx.needs_input_grad[0]:
            # out = p (g - S) with S = sum p g, so dp = h (g - S) - g T with T = sum p h.
            S, T = (_sums_at_entries(ctx.graph, p * each) for each in (inner, grad))
            dp = grad * (inner - S) - inner * T
        if ctx.needs_input_grad[1]:
            dinner = _softmax_gradient(ctx.graph, p, grad)
        return dp, dinner, None


def _sums_at_entries(graph: GraphLike, values: Tensor) -> Tensor:
    """The sum of each row's values, at each of its entries."""
    if values.dim() == 2:
        heads = [_sums_at_entries(graph, values[:, h]) for h in range(values.shape[1])]
        return torch.stack(heads, dim=1) if heads else values
    sums = segment_sums(graph, False, values, None, None)
    return sddmm(graph, sums[:, None], values.new_ones(side_of(graph, False).n_cols, 1))
