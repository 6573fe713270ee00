"""Edges of several types: a graph for each group of types, made once of a graph and its types."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._caches import store
from ...errors import DtypeError, IndexRangeError, ShapeError
from ...formats.arrays import Array, finish
from ...graph.built import slot
from ...graph.graph import Graph
from ...interop.torch import to_tensor
from ..engine import checks
from ..engine.recording import refuse_transforms, untraced
from .edge_index import Remembered

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
_INT32 = 2**31 - 1
#: A type that has edges from one of so many vertices, or fewer, has columns for these alone.
FEW_SOURCES = 4


class Group(NamedTuple):
    """The edges of ``length`` types from ``first`` on, as a graph that tells them apart by columns.

    An edge (i, j) of type t has column ``j * length + t - first``; of ids, which are columns of a
    table for each type, ``(t - first) * n_ids + id``.  Where one type has few ``sources``, which
    ascend and are distinct, its columns are their numbers.
    """

    first: int
    length: int
    graph: Graph
    sources: Tensor | None = None


class Grouping(NamedTuple):
    """How edges are grouped: ``together`` of ``n_types``, by columns or by ids.

    With ``values`` an edge has 1 over the edges of its type and row, in that dtype.
    """

    n_types: int
    together: int
    values: torch.dtype | None = None
    n_ids: int | None = None


def groups_of(
    graph: Graph, edge_type: Tensor | None, grouping: Grouping, ids: Tensor | None = None
) -> tuple[Group, ...]:
    """Group the edges of a graph by their types; the groups that have edges are kept with both.

    ``edge_type`` has a type for each edge, in the user's order, by default the graph's own values.
    ``ids`` stand in the place of each column; with ``grouping.n_ids``.
    """
    if edge_type is not None:
        check_types(graph, edge_type)
    make = partial(_make, graph, edge_type, grouping, ids)
    tensors = [tensor for tensor in (edge_type, ids) if tensor is not None]
    graph._fill("typed")
    cache = graph._slots.typed[graph._flipped]
    groups: tuple[Group, ...] = cache.ask((grouping, ids is None), tensors, make)
    return groups


slot("typed", lambda graph: Remembered())


def check_types(graph: Graph, edge_type: Any) -> None:
    """Check that ``edge_type`` holds an integer for each edge, on the device of the graph."""
    if not isinstance(edge_type, Tensor):
        raise DtypeError(
            f"edge_type is a {type(edge_type).__name__}: give a torch.Tensor of integers, one for "
            "each edge."
        )
    if edge_type.dtype not in _INTEGERS:
        raise DtypeError(f"edge_type is {edge_type.dtype}: give integers, edge_type.long().")
    if edge_type.shape != (graph.nnz,):
        mend = ", edge_type.view(-1) for instance" if edge_type.numel() == graph.nnz else ""
        raise ShapeError(
            f"edge_type has shape {tuple(edge_type.shape)} but the graph has {graph.nnz} edges: "
            f"give ({graph.nnz},){mend}."
        )
    checks.on_device("edge_type", edge_type, graph)


#: Ids that were found to be in their range.
_in_range = store(Remembered())


def check_ids(name: str, ids: Tensor, count: int, what: str) -> None:
    """Check ids from 0 to ``count - 1``, once for each unchanged tensor; waits for a GPU."""
    check = _check_ids_outside if torch.compiler.is_compiling() else _check_ids
    check(name, ids, count, what)


def _check_ids(name: str, ids: Tensor, count: int, what: str) -> None:
    """Check ids as ``check_ids`` does, outside a trace."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{name} is {ids.dtype}: give floating features or ids, {name}.long().")
    if ids.dim() != 1:
        raise ShapeError(f"{name} has shape {tuple(ids.shape)}: give ids of shape (n,).")
    _in_range.ask(count, [ids], partial(_check_range, name, ids, count, what))


_check_ids_outside: Any = untraced(_check_ids)


def _make(
    graph: Graph, edge_type: Tensor | None, grouping: Grouping, ids: Tensor | None
) -> tuple[Group, ...]:
    """Check types and ids, and group the edges; not within torch.func, which wraps what is made."""
    refuse_transforms(graph)
    with torch.inference_mode(False), torch.no_grad():
        coo = graph.structure.tocoo()
        finish(coo.row)  # synchronize!
        rows, cols = to_tensor(coo.row), to_tensor(coo.col)
        types = _own_types(coo.data) if edge_type is None else edge_type.detach().long()
        _check_range("edge_type", types, grouping.n_types, "relations")
        n_cols = graph.shape[1]
        if ids is not None:
            n_cols = grouping.n_ids or 0
            _check_range("x", ids, n_cols, "in_channels")
            cols = ids.detach()[cols.long()]
        sizes, edges = (graph.shape[0], n_cols), (rows, cols, types)
        return tuple(
            _group(first, grouping, ids is not None, sizes, *(array[part] for array in edges))
            for first, part in _parts(types, grouping)
        )


def _own_types(values: Array | None) -> Tensor:
    """Convert the values of a graph to types of its edges."""
    numbers = None if values is None else to_tensor(values)
    if numbers is None or not bool((numbers.long() == numbers).all()):  # synchronize!
        none, wrong = " has no values that could be types", "'s own values are no integers"
        wrong = none if numbers is None else wrong
        raise DtypeError(
            f"edge_type is None and the graph{wrong}: give edge_type, an integer for each edge."
        )
    return numbers.long()


def _check_range(name: str, numbers: Tensor, count: int, what: str) -> None:
    """Check for numbers from 0 on and below ``count``; synchronises."""
    if not numbers.numel():
        return
    least, most = map(int, torch.aminmax(numbers))
    if least < 0 or most >= count:
        wrong = least if least < 0 else most
        raise IndexRangeError(
            f"{name} holds {wrong} but there are {count} {what}: give numbers from 0 to "
            f"{count - 1}."
        )


def _parts(types: Tensor, grouping: Grouping) -> Iterator[tuple[int, Any]]:
    """Yield the first type of each group that has edges, and where they are."""
    if not types.numel():
        return
    if grouping.together >= grouping.n_types:
        yield 0, slice(None)
        return
    number = torch.div(types, grouping.together, rounding_mode="floor")
    order = torch.argsort(number, stable=True)
    begin = 0
    for i, size in enumerate(torch.bincount(number).tolist()):  # synchronize!
        if size:
            yield i * grouping.together, order[begin : begin + size]
        begin += size


def _group(
    first: int, grouping: Grouping, by_ids: bool, sizes: tuple[int, int], *edges: Tensor
) -> Group:
    """Make the graph of a group's edges: their rows, columns or ids, and types."""
    (n_rows, n_cols), (rows, cols, types) = sizes, edges
    count = min(grouping.together, grouping.n_types - first)
    small = max(n_cols * count, n_rows, len(rows)) <= _INT32
    weight = sources = None
    if count == 1 and not by_ids:
        unique, numbers = torch.unique(cols, return_inverse=True)
        if len(unique) * FEW_SOURCES <= n_cols:
            sources, cols, n_cols = unique, numbers, len(unique)
    if count > 1:
        local = types - first
        if grouping.values is not None:
            places = rows.long() * count + local
            counts = torch.bincount(places, minlength=n_rows * count)
            weight = counts[places].double().reciprocal().to(grouping.values)
        cols = local * n_cols + cols if by_ids else cols.long() * count + local
    ends = torch.stack((cols.long(), rows.long())).to(torch.int32 if small else torch.int64)
    sizes = n_cols * count, n_rows
    return Group(first, count, Graph.from_edge_index(ends, weight, num_nodes=sizes), sources)
