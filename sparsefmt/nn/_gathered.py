"""Aggregations that no kernel has: those of PyG, of an array with the features of each edge."""

from importlib import import_module
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..autograd import GraphLike, graph_tensors, own_values
from ..errors import UnsupportedError
from ._loops import ends


def module_of(aggr: Any, aggr_kwargs: dict[str, Any] | None, mend: str) -> Module:
    """Make PyG's module of an aggregation.

    Raises
    ------
    UnsupportedError
        If PyG has none of that name, or is not installed; ``mend`` says what else may be given.
    """
    where = f"aggr is {aggr!r}, which no kernel computes: give {mend}, or "
    try:
        resolver = import_module("torch_geometric.nn.resolver")
    except ImportError as error:
        raise UnsupportedError(f"{where}pip install torch-geometric.") from error
    try:
        made: Module = resolver.aggregation_resolver(aggr, **(aggr_kwargs or {}))
    except ValueError as error:
        raise UnsupportedError(f"{where}an aggregation that PyG has: {error}") from error
    return made


def gathered(module: Module, graph: GraphLike, x: Tensor, edge_weight: Tensor | None) -> Tensor:
    """Aggregate features of sources by PyG's module, edges in the user's order, as PyG does."""
    row, col = ends(graph)
    weight = own_values(graph) if edge_weight is None else edge_weight
    messages = x.index_select(-2, col.long())
    if weight is not None:
        messages = messages * weight[:, None]
    n = graph_tensors(graph).n_rows
    y: Tensor = module(messages, row.long(), ptr=None, dim_size=n, dim=-2)
    return y


def width_of(module: Module, width: int) -> int:
    """Give the number of features that come out where ``width`` go in."""
    out = getattr(module, "get_out_channels", None)
    return width if out is None else int(out(width))
