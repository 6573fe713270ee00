"""Values of edges between the order in which the user gave the edges and CSR order."""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from ..engine.recording import Ctx, taped
from .prepare import GraphLike, tensors_of
from .tensors import GraphTensors

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def in_csr_order(tensors: GraphTensors, values: MaybeTensor, to_csr: bool = True) -> MaybeTensor:
    """Move values of edges, or rows of them, to CSR order or back, differentiably; None stays."""
    if values is None or tensors.order is None:
        return values
    # A tracer reads the graph's sizes anew in a Function, and gathers have gradients of their own.
    if torch.compiler.is_compiling():
        return _gathered(values, tensors, to_csr)
    return taped(_Moved, _gathered, (values,), tensors, to_csr)


#: Moves values in CSR order to the order in which the user gave the edges, differentiably.
in_own_order = partial(in_csr_order, to_csr=False)


def own_values(graph: GraphLike) -> Tensor | None:
    """Return the graph's own edge values, in the order of ``graph.structure``, or None."""
    tensors = tensors_of(graph)
    return in_own_order(tensors, tensors.csr_values)


def _gathered(values: Tensor, tensors: GraphTensors, to_csr: bool) -> Tensor:
    """Move values to CSR order or back, without a gradient."""
    order = tensors.order
    if order is None:  # the build has reported since that the edges came in it
        return values
    if to_csr:
        return values.index_select(0, order)
    if torch.compiler.is_compiling():  # which keeps no inverse
        return torch.empty_like(values).index_copy(0, order.long(), values)  # which takes no int32
    return values.index_select(0, tensors.inverse())


class _Moved(Function):
    """A gather, whose gradient is the gather by the inverse: no sums, no atomics."""

    @staticmethod
    def forward(ctx: Ctx, values: Tensor, tensors: GraphTensors, to_csr: bool) -> Tensor:
        ctx.tensors, ctx.to_csr = tensors, to_csr
        return _gathered(values, tensors, to_csr)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return in_csr_order(ctx.tensors.current(), grad, not ctx.to_csr), None, None
