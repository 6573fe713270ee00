"""Leaves of an expression: which there are, what their values say of them, and their sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..autograd.tensors.shared import Shared
from ..graph.graph import Graph
from ..plan.expression import Apply, Broadcast, Expression, Hop, Leaf, Product, Sum


def leaves_of(expression: Expression) -> list[Leaf]:
    """Give the leaves of an expression."""
    match expression:
        case Leaf():
            return [expression]
        case Broadcast(vector, matrix):
            return [vector, *leaves_of(matrix)]
        case Product(parts) | Sum(parts) | Apply(arguments=parts) | Hop(parts):
            return [leaf for part in parts for leaf in leaves_of(part)]


def rebuilt(expression: Expression, leaves: Mapping[str, Leaf]) -> Expression:
    """Put other leaves in the place of those of the same names."""
    match expression:
        case Leaf(name):
            return leaves[name]
        case Broadcast(vector, matrix):
            return replace(expression, vector=leaves[vector.name], matrix=rebuilt(matrix, leaves))
        case Product(parts):
            return Product(tuple(rebuilt(part, leaves) for part in parts))
        case Sum(parts):
            return Sum(tuple(rebuilt(part, leaves) for part in parts))
        case Hop(factors):
            return Hop(tuple(leaves[factor.name] for factor in factors))
        case Apply(arguments=parts):
            return replace(expression, arguments=tuple(rebuilt(p, leaves) for p in parts))


def bound_leaf(leaf: Leaf, value: Any, constant: bool) -> Leaf:
    """Say of a leaf what is known once there is a value."""
    if isinstance(value, Shared):
        return replace(leaf, kind="unweighted")
    if isinstance(value, Graph):
        return replace(leaf, kind="weighted" if value.weighted else "unweighted")
    constant = (constant or leaf.constant) and not value.requires_grad
    return replace(leaf, constant=constant, grad=value.requires_grad)


def sizes_of(leaves: Mapping[str, Leaf], values: Mapping[str, Any]) -> dict[str, int]:
    """Give the number behind each name; of a graph that processes share what they agree on."""
    sizes = {"heads": 1}
    for name, value in values.items():
        leaf = leaves.get(name)
        names = ("n", "n") if leaf is None else (leaf.rows, leaf.cols)
        sizes |= dict(zip(names, value.shape, strict=False))
        if isinstance(value, Graph):
            sizes["nnz" if leaf is None else leaf.entries] = value.nnz
    away = shared_of(values)
    return sizes if away is None else sizes | away.busiest


def shared_of(values: Mapping[str, Any]) -> Any:
    """Give the graph that processes share, if they do."""
    return next((value for value in values.values() if isinstance(value, Shared)), None)
