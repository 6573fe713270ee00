"""PyG's ``edge_index`` in the place of a graph, which is made once of each and remembered."""

from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..graph import Graph
from ._tensors import GraphTensors


class _Memory(NamedTuple):
    """A tensor, its version and place in memory when its graph was made, and the graph.

    That holds an alias or a copy of the tensor, not the tensor itself.
    """

    tensor: "ref[Tensor]"
    state: Any
    graph: Graph


#: By the identity of the tensor; a dictionary of weak keys takes ten times as long.
_graphs: dict[int, _Memory] = {}


def as_graph(given: Any, of_columns: Any, of_rows: Any = None) -> Any:
    """Give the graph of an ``edge_index``, the same one until the tensor is changed or gone.

    Parameters
    ----------
    given : Graph or Tensor
        A tensor of int32 or int64 and shape (2, n_edges), sources then targets, where the features
        are.
    of_columns, of_rows : Tensor or None
        Tensors with a row for each source and, unless these are all vertices, each target: the
        sizes of the graph.  If ``of_columns`` is None the sizes of the graph that is remembered,
        or else the largest index decides, for which a GPU is waited for.

    Returns
    -------
    Graph
        What is no such tensor comes back as it is, for others to refuse.

    Raises
    ------
    IndexRangeError
        If an id is negative or too large; of CUDA tensors as ``Graph.from_edge_index`` says.

    Notes
    -----
    The tensor is known by its identity and its version, which counts changes in place.  Tensors of
    inference mode have none: their graph is made at each call.  ``torch.compile`` breaks its graph
    here: give it a ``Graph``.
    """
    if isinstance(given, Graph | GraphTensors) or not _is_edge_index(given):
        return given
    if torch.compiler.is_compiling():
        return _remembered_outside(given, of_columns, of_rows)
    return _remembered(given, of_columns, of_rows)


def is_remembered(given: Tensor) -> bool:
    """Tell whether a graph was made of that tensor."""
    found = _graphs.get(id(given))
    return found is not None and found.tensor() is given


def _is_edge_index(given: object) -> bool:
    return (
        isinstance(given, Tensor)
        and given.dtype in (torch.int64, torch.int32)
        and given.layout is torch.strided
        and given.dim() == 2
        and given.shape[0] == 2
    )


def _remembered(given: Tensor, of_columns: Any, of_rows: Any) -> Graph:
    n_cols = _length(of_columns)
    n_rows = n_cols if of_rows is None else _length(of_rows)
    if given.is_inference():
        return _graph(given, n_cols, n_rows)
    state = given._version, given.data_ptr(), given.shape
    found = _graphs.get(id(given))
    if found is not None and found.state == state and found.tensor() is given:
        n = n_rows if n_cols is None else n_cols
        if n is None or found.graph.shape == (n_rows, n_cols):
            return found.graph
    graph = _graph(given, n_cols, n_rows)
    _graphs[id(given)] = _Memory(ref(given, partial(_forget, id(given))), state, graph)
    return graph


def _forget(key: int, tensor: "ref[Tensor]") -> None:
    """Drop the graph of a tensor that is gone; another one may have its identity by now."""
    found = _graphs.get(key)
    if found is not None and found.tensor is tensor:
        del _graphs[key]


_remembered_outside: Any = torch.compiler.disable(_remembered)  # type: ignore[no-untyped-call]


def _length(value: Any) -> int | None:
    shape = value.shape if isinstance(value, Tensor) else ()
    return shape[0] if shape else None


def _graph(given: Tensor, n_cols: int | None, n_rows: int | None) -> Graph:
    sizes = None if n_cols is None or n_rows is None else (n_cols, n_rows)
    # A graph over the tensor's memory would keep it, and so itself, alive: CUDA's has an alias.
    plain = given.is_cuda and type(given) is Tensor and given.shape[1] > 0
    return Graph.from_edge_index(given if plain else given.clone(), num_nodes=sizes)
