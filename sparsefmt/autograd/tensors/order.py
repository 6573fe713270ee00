"""Values of edges between the order in which the user gave the edges and CSR order."""

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function

from ..engine.recording import recorded
from .edge_index import as_graph
from .prepare import GraphLike, graph_tensors, order_of, tensors_of
from .tensors import GraphTensors


@overload
def in_csr_order(graph: GraphLike, values: Tensor) -> Tensor: ...
@overload
def in_csr_order(graph: GraphLike, values: Tensor | None) -> Tensor | None: ...
def in_csr_order(graph: GraphLike, values: Tensor | None) -> Tensor | None:
    """Bring values of edges, or rows of them, to CSR order, differentiably."""
    if values is None or order_of(graph) is None:
        return values
    return _moved(values, graph, True)


def given_in_csr_order(
    graph: GraphLike, tensors: GraphTensors, values: Tensor | None
) -> Tensor | None:
    """Bring given values to CSR order; at once where ``tensors`` say that they came in it."""
    # A trace must not depend on whether the order has been looked for.
    known_in_csr_order = (
        not torch.compiler.is_compiling() and tensors.ordered and tensors.order is None
    )
    return values if known_in_csr_order else in_csr_order(graph, values)


def in_own_order(graph: GraphLike, values: Tensor) -> Tensor:
    """Bring values in CSR order to the order in which the user gave the edges, differentiably."""
    return values if order_of(graph) is None else _moved(values, graph, False)


def own_values(graph: GraphLike) -> Tensor | None:
    """Return the graph's own edge values.

    Parameters
    ----------
    graph : Graph

    Returns
    -------
    Tensor, shape (nnz,), or None
        In the order of ``graph.structure``; None for a graph without values.

    Raises
    ------
    DtypeError
        If ``graph`` is no Graph.
    """
    graph = as_graph(graph, None)
    values = graph_tensors(graph).csr_values
    return None if values is None else in_own_order(graph, values)


def _moved(values: Tensor, graph: GraphLike, to_csr: bool) -> Tensor:
    # A tracer reads the graph's sizes anew in a Function, and gathers have gradients of their own.
    if torch.compiler.is_compiling() or not recorded(values):
        return _gathered(values, graph, to_csr)
    found: Tensor = _Moved.apply(values, graph, to_csr)  # type: ignore[no-untyped-call]
    return found


def _gathered(values: Tensor, graph: GraphLike, to_csr: bool) -> Tensor:
    order = order_of(graph)
    if order is None:  # the build has told since that the edges came in it
        return values
    if to_csr:
        return values.index_select(0, order)
    if torch.compiler.is_compiling():  # which keeps no inverse
        return torch.empty_like(values).index_copy(0, order, values)
    return values.index_select(0, tensors_of(graph).inverse())


class _Moved(Function):
    """A gather, whose gradient is the gather by the inverse: no sums, no atomics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, graph: GraphLike, to_csr: bool) -> Tensor:
        ctx.graph, ctx.to_csr = graph, to_csr
        return _gathered(values, graph, to_csr)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(grad, ctx.graph, not ctx.to_csr), None, None
