"""Values of edges between the order in which the user gave the edges and CSR order."""

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function

from ..engine.recording import recorded
from .prepare import GraphLike, tensors_of
from .tensors import GraphTensors


@overload
def in_csr_order(tensors: GraphTensors, values: Tensor) -> Tensor: ...
@overload
def in_csr_order(tensors: GraphTensors, values: Tensor | None) -> Tensor | None: ...
def in_csr_order(tensors: GraphTensors, values: Tensor | None) -> Tensor | None:
    """Move values of edges, or rows of them, to CSR order, differentiably."""
    if values is None or tensors.order is None:
        return values
    return _moved(values, tensors, True)


def in_own_order(tensors: GraphTensors, values: Tensor) -> Tensor:
    """Move values in CSR order to the order in which the user gave the edges, differentiably."""
    return values if tensors.order is None else _moved(values, tensors, False)


def own_values(graph: GraphLike) -> Tensor | None:
    """Return the graph's own edge values, in the order of ``graph.structure``, or None."""
    tensors = tensors_of(graph)
    values = tensors.csr_values
    return None if values is None else in_own_order(tensors, values)


def _moved(values: Tensor, tensors: GraphTensors, to_csr: bool) -> Tensor:
    """Move values to CSR order or back, differentiably."""
    # A tracer reads the graph's sizes anew in a Function, and gathers have gradients of their own.
    if torch.compiler.is_compiling() or not recorded(values):
        return _gathered(values, tensors, to_csr)
    moved: Tensor = _Moved.apply(values, tensors, to_csr)  # type: ignore[no-untyped-call]
    return moved


def _gathered(values: Tensor, tensors: GraphTensors, to_csr: bool) -> Tensor:
    """Move values to CSR order or back, without a gradient."""
    order = tensors.order
    if order is None:  # the build has reported since that the edges came in it
        return values
    if to_csr:
        return values.index_select(0, order)
    if torch.compiler.is_compiling():  # which keeps no inverse
        return torch.empty_like(values).index_copy(0, order, values)
    return values.index_select(0, tensors.inverse())


class _Moved(Function):
    """A gather, whose gradient is the gather by the inverse: no sums, no atomics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tensors: GraphTensors, to_csr: bool) -> Tensor:
        ctx.tensors, ctx.to_csr = tensors, to_csr
        return _gathered(values, tensors, to_csr)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grad, ctx.tensors.current(), not ctx.to_csr), None, None
