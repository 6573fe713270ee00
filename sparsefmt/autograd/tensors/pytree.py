"""Graphs as nodes of torch's pytrees: their leaves are the tensors of both sides."""

from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..._caches import store
from ...formats import primitives
from ...formats.arrays import allocating, on_device_of
from ...formats.compressed import COO, CSC, CSR
from ...formats.convert import unpickled
from ...graph.built import GraphBuilt
from ...graph.graph import Graph, restored
from ...interop.torch import from_tensor
from .side import Side
from .tensors import GraphTensors

#: Context of a node: n_rows, n_cols, nnz, whether there are values and an order of the user's.
Context: TypeAlias = tuple[int, int, int, bool, bool]

#: By the identity of its first leaf, so that the same leaves give the same graph back.
_sources: WeakValueDictionary[int, Graph] = store(WeakValueDictionary())


def _flatten(graph: Graph | GraphTensors) -> tuple[list[Any], Context]:
    """Return the tensors of a graph, and its context."""
    tensors: GraphTensors
    if isinstance(graph, Graph):
        graph._fill("torch", True)
        tensors = graph._slots.torch[1 if graph._flipped else 0]
        if torch.compiler.is_compiling():
            tensors.freeze()
        tensors.current()
        _sources[id(tensors.rows.indptr)] = graph
    else:
        tensors = graph
    rows, columns, values, order = tensors.rows, tensors.columns, tensors.csr_values, tensors.order
    leaves = [rows.indptr, rows.indices, columns.indptr, columns.indices, columns.perm]
    leaves += [leaf for leaf in (values, order) if leaf is not None]
    leaves += [*rows.plan, *columns.plan]
    sizes = tensors.n_rows, tensors.n_cols, tensors.nnz
    return leaves, (*sizes, values is not None, order is not None)


def _unflatten(leaves: Any, context: Context) -> Graph | GraphTensors:
    """Return the graph of these leaves; only its tensors where the leaves are a tracer's."""
    leaves = list(leaves)
    weighted, ordered = context[3:]
    source = _sources.get(id(leaves[0]))
    if source is not None:
        count = 5 + weighted
        pairs = zip(_flatten(source)[0][:count], leaves[:count], strict=True)
        if all(mine is leaf for mine, leaf in pairs):
            return source
    if all(type(leaf) is Tensor for leaf in leaves):
        return _graph(leaves, context)
    indptr, indices, t_indptr, t_indices, perm = leaves[:5]
    n_rows, n_cols, nnz = context[:3]
    plan = leaves[5 + weighted + ordered :]
    rows = Side(indptr, indices, n_cols, plan[: len(plan) // 2], None)
    columns = Side(t_indptr, t_indices, n_rows, plan[len(plan) // 2 :], perm)
    values = leaves[5] if weighted else None
    order = leaves[5 + weighted] if ordered else None
    return GraphTensors(rows, values, (n_rows, n_cols, nnz), columns=columns, order=order)


def _graph(leaves: list[Tensor], context: Context) -> Graph:
    """Make a graph over the memory of its leaves."""
    n_rows, n_cols, _, weighted, ordered = context
    indptr, indices, t_indptr, t_indices, perm = (from_tensor("leaf", leaf) for leaf in leaves[:5])
    data = from_tensor("leaf", leaves[5].detach()) if weighted else None
    moved = from_tensor("leaf", leaves[5].detach()[leaves[4]]) if weighted else None
    csr = CSR._trusted(indptr=indptr, indices=indices, data=data, shape=(n_rows, n_cols))
    csc = CSC._trusted(indptr=t_indptr, indices=t_indices, data=moved, shape=(n_rows, n_cols))
    structure: COO | CSR = csr
    order = None
    if ordered:  # the edges as the user gave them
        order = from_tensor("leaf", leaves[5 + weighted])
        with on_device_of(order), allocating(f"{len(order)} edges in their order"):
            places = primitives.inverse(order)
            row = primitives.expand(indptr, len(order))[places]
            values = None if data is None else data[places]
            parts = {"row": row, "col": indices[places], "data": values}
            structure = COO._trusted(**parts, shape=(n_rows, n_cols))
    built = GraphBuilt(structure)
    built.parts["csr", False] = csr, order
    built.parts["csc", False] = csc, perm
    return Graph._on(built, False)


#: What a pickle of ``torch.save`` calls: ``torch.load`` takes it without ``weights_only=False``.
torch.serialization.add_safe_globals([restored, unpickled])

for _node in (Graph, GraphTensors):
    pytree.register_pytree_node(
        _node, _flatten, _unflatten, serialized_type_name=f"sparsefmt.{_node.__name__}"
    )
