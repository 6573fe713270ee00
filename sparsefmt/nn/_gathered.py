"""Aggregations that no kernel has: those of PyG, of an array with the features of each edge."""

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..autograd.tensors.order import own_values
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from ..errors import DtypeError, UnsupportedError
from ._loops import ends


def module_of(aggr: Any, aggr_kwargs: dict[str, Any] | None, mend: str) -> Module:
    """Make PyG's module of an aggregation.

    Raises
    ------
    DtypeError
        If it is neither a word nor a module of PyG's, or a list of them.
    UnsupportedError
        If PyG has none of that name, or is not installed, or it does not take ``aggr_kwargs``;
        ``mend`` says what else may be given.
    """
    where = f"aggr is {aggr!r}, which no kernel computes: give {mend}, or "
    for one in aggr if isinstance(aggr, list | tuple) else [aggr]:
        if not isinstance(one, str) and not _is_pygs(one):
            raise DtypeError(
                f"aggr is {aggr!r}: give {mend}, a module of torch_geometric.nn.aggr, or a list "
                "of them."
            )
    try:
        resolver = import_module("torch_geometric.nn.resolver")
    except ImportError as error:
        raise UnsupportedError(f"{where}pip install torch-geometric.") from error
    try:
        made: Module = resolver.aggregation_resolver(aggr, **(aggr_kwargs or {}))
    except ValueError as error:
        raise UnsupportedError(f"{where}an aggregation that PyG has: {error}") from error
    except TypeError as error:
        raise UnsupportedError(
            f"aggr_kwargs is {aggr_kwargs!r}, which PyG's aggregation {aggr!r} does not take: "
            f"{error}; give arguments of its constructor."
        ) from error
    return made


def _is_pygs(aggr: Any) -> bool:
    """Tell whether an object is a module of PyG's aggregations, which is there if PyG is."""
    base = getattr(sys.modules.get("torch_geometric.nn.aggr"), "Aggregation", None)
    return base is not None and isinstance(aggr, base)


def check_aggr_kwargs(value: Any) -> None:
    """Check for a dict, or None."""
    if value is not None and not isinstance(value, dict):
        raise DtypeError(
            f"aggr_kwargs is {value!r}: give a dict of arguments of PyG's aggregation, "
            "{'p': 2.0} for instance, or leave it out."
        )


def gathered(module: Module, graph: GraphLike, x: Tensor, edge_weight: Tensor | None) -> Tensor:
    """Aggregate features of sources by PyG's module: edges by their targets, as some need them.

    Those of one target stay in the user's order.
    """
    order, row, col = _by_targets(graph)
    weight = own_values(graph) if edge_weight is None else edge_weight
    messages = x.index_select(-2, col)
    if weight is not None:
        messages = messages * weight.index_select(0, order)[:, None]
    n = graph_tensors(graph).n_rows
    y: Tensor = module(messages, row, ptr=None, dim_size=n, dim=-2)
    return y


def _by_targets(graph: GraphLike) -> tuple[Tensor, Tensor, Tensor]:
    """Give the entries sorted by rows, and the row and the column of each; once for each graph."""

    def made() -> Tensor:
        row, col = (end.long() for end in ends(graph))
        row, order = row.sort(stable=True)
        return torch.stack([order, row, col.index_select(0, order)])

    order, row, col = graph_tensors(graph).kept("by targets", made).unbind()
    return order, row, col


def width_of(module: Module, width: int) -> int:
    """Give the number of features that come out where ``width`` go in."""
    out = getattr(module, "get_out_channels", None)
    return width if out is None else int(out(width))
