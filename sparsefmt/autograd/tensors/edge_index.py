"""PyG's graphs in the place of ours, which is made once of each and remembered.

An ``edge_index``, an ``EdgeIndex``, or an ``adj_t`` whose rows are targets.
"""

from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..._caches import store
from ...errors import DtypeError, UnsupportedError
from ...graph.graph import Graph
from ...interop.adjacency import is_adj_t, is_edge_index, known_sizes
from ..engine.recording import untraced
from .shared import Shared
from .tensors import GraphTensors

#: Sources and targets, None where they are not known.
Sizes: TypeAlias = tuple[int | None, int | None]


class _Entry(NamedTuple):
    """A tensor, its version and place in memory when its graph was made, and the graph.

    The graph holds an alias or a copy of the tensor, not the tensor itself.  Of an ``edge_index``
    there are the graph's ``shape``, and an alias, so that nothing else comes to lie at its place.
    """

    tensor: "ref[Tensor]"
    state: Any
    graph: Graph
    shape: tuple[int, int] | None = None
    alias: Tensor | None = None


#: By the identity of the tensor; a dictionary of weak keys takes ten times as long.
_graphs: dict[int, _Entry] = store({})


def as_graph(
    edge_index: Any,
    of_columns: Tensor | None,
    of_rows: Tensor | None = None,
    *,
    size: Sizes | None = None,
    name: str = "",
) -> Any:
    """Return the graph of an ``edge_index`` or ``adj_t``, the same until that is changed or gone.

    Parameters
    ----------
    edge_index : Graph, Tensor or SparseTensor
        A tensor of int32 or int64 and shape (2, n_edges), sources then targets, where the features
        are; PyG's ``EdgeIndex``; or a sparse tensor of shape (n_target, n_source), torch's or one
        of torch_sparse.
    of_columns, of_rows : Tensor or None
        Tensors with a row for each source and, unless these are all vertices, each target: the
        sizes of the graph.  If ``of_columns`` is None the sizes of the graph that is remembered,
        or else the largest index decides, for which a GPU is waited for.
    size : (n_source, n_target), optional
        Sizes that go before these; either may be None.  What carries its own sizes keeps them.
    name : str, optional
        Of the argument: what is no graph is refused by it.

    Returns
    -------
    Graph
        Without a name what is no such thing comes back as it is, for others to refuse; of a graph
        that one process shares with nobody, its ``whole``.

    Raises
    ------
    DtypeError
        If there is a name, and ``edge_index`` is no such thing.
    IndexRangeError
        If an id is negative or too large; of CUDA tensors as ``Graph.from_edge_index`` says.
    FormatError, UnsupportedError
        If an ``EdgeIndex`` is not sorted as it says, or values of an ``adj_t`` require grad.

    Notes
    -----
    The tensor is known by its identity and its version, which counts changes in place.  Tensors of
    inference mode have none: their graph is made at each call.  ``torch.compile`` breaks its graph
    here: give it a ``Graph``.
    """
    if type(edge_index) is Graph:
        return edge_index
    if size is None and not torch.compiler.is_dynamo_compiling():
        entry = _graphs.get(id(edge_index))
        if entry is not None and _fits(entry, edge_index, of_columns, of_rows):
            return entry.graph
    if isinstance(edge_index, Graph | GraphTensors):
        return edge_index
    if isinstance(edge_index, Shared):
        return edge_index if edge_index.whole is None else edge_index.whole
    if _is_edge_tensor(edge_index):
        run, outside = _of_edge_tensor, _of_edge_tensor_outside
    elif is_adj_t(edge_index) or is_edge_index(edge_index):
        run, outside = _of_pyg, _of_pyg_outside
    elif name:
        raise wrong_graph(edge_index, name)
    else:
        return edge_index
    n_cols = _length(of_columns)
    n_rows = n_cols if of_rows is None else _length(of_rows)
    if size is not None:
        n_cols = n_cols if size[0] is None else size[0]
        n_rows = n_cols if of_rows is None else n_rows
        n_rows = n_rows if size[1] is None else size[1]
    sizes = n_cols, n_rows
    return outside(edge_index, sizes) if torch.compiler.is_compiling() else run(edge_index, sizes)


def _fits(entry: _Entry, value: object, of_columns: Tensor | None, of_rows: Tensor | None) -> bool:
    """Return True if a remembered graph still fits; False may mean "ask again"."""
    if entry.shape is None or entry.tensor() is not value or entry.state != state_of(value):
        return False
    shape = of_columns.shape if type(of_columns) is Tensor else ()
    n = shape[0] if shape else _length(of_columns)
    return entry.shape == (n if of_rows is None else _length(of_rows), n)


def turned(graph: Any, edge_index: Any) -> Any:
    """Return the graph whose messages flow the other way, its edges in the same order.

    ``graph`` is that of ``edge_index``, from ``as_graph``; anything else comes back as it is.
    """
    if is_adj_t(edge_index):
        raise UnsupportedError(
            "flow is 'target_to_source' but edge_index is a sparse matrix, whose rows are targets: "
            "give its transpose, adj_t.t(), and leave flow out."
        )
    if isinstance(graph, Shared):
        raise UnsupportedError(
            "flow is 'target_to_source' beside a graph that processes share by the targets of its "
            "edges: make it of edge_index.flip(0), and leave flow out."
        )
    if isinstance(graph, GraphTensors):
        raise UnsupportedError(
            "flow is 'target_to_source' within a transformation: give graph.transposed, and leave "
            "flow out."
        )
    return graph.transposed if isinstance(graph, Graph) else graph


def wrong_graph(value: object, name: str = "graph") -> DtypeError:
    """Return the error for what is no graph, in an argument of that name."""
    kind, mend = f"a {type(value).__name__}", ""
    if isinstance(value, Tensor):
        kind = f"a {value.layout} tensor of {value.dtype} and shape {tuple(value.shape)}"
    elif isinstance(value, list | tuple) or hasattr(value, "__array_interface__"):
        mend = "; of lists and arrays torch.as_tensor(...) makes one"
    return DtypeError(
        f"{name} is {kind}: give a sparsefmt.Graph, such as Graph(A) of a format, or PyG's "
        f"edge_index, a torch.int64 tensor of shape (2, edges){mend}."
    )


def is_remembered(value: Any) -> bool:
    """Return True if a graph was made of that tensor."""
    key = value if isinstance(value, Tensor) else _key_of(value)
    return key is not None and _entry_of(key) is not None


def state_of(part: Tensor | None) -> Any:
    """Return what changes with a strided tensor: assigning to ``data`` counts no version."""
    if part is None:
        return None
    return part._version, part.data_ptr(), part.shape, part.stride(), part.dtype


def _length(value: object) -> int | None:
    """Return the number of rows, None of what has none."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else None


def _is_edge_tensor(value: object) -> bool:
    """Return True for an ``edge_index`` in memory of its own."""
    return (
        isinstance(value, Tensor)
        and value.dtype in (torch.int64, torch.int32)
        and value.layout is torch.strided
        and value.dim() == 2
        and value.shape[0] == 2
        and (type(value) is Tensor or not is_edge_index(value))
    )


def _of_edge_tensor(value: Tensor, sizes: Sizes) -> Graph:
    """Return the remembered graph of an ``edge_index``, or make it."""
    inference = value.is_inference()  # which has no version
    state = None if inference else state_of(value)
    entry = None if inference else _entry_of(value)
    if entry is not None and entry.state == state:
        n_cols, n_rows = sizes
        n = n_rows if n_cols is None else n_cols
        if n is None or entry.graph.shape == (n_rows, n_cols):
            return entry.graph
    # A graph over the tensor's memory would keep it, and so itself, alive: CUDA's has an alias.
    own = value.is_cuda and type(value) is Tensor and value.shape[1] > 0
    graph = Graph.from_edge_index(value if own else value.clone(), num_nodes=_known(sizes))
    return graph if inference else _remember(value, state, graph, graph.shape, value.detach())


def _of_pyg(value: Any, sizes: Sizes) -> Graph:
    """Return the remembered graph of an ``EdgeIndex`` or an ``adj_t``, or make it."""
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    num_nodes = (known_sizes(value) or _known(sizes)) if strided else None
    key = _key_of(value)
    if key is None or key.is_inference():
        return _made(value, num_nodes)
    sizes_of = () if isinstance(value, Tensor) else tuple(value.sparse_sizes())
    state = (*sizes_of, *map(state_of, _parts_of(value)))
    entry = _entry_of(key)
    if entry is not None and entry.state == state:
        if num_nodes is None or entry.graph.shape == num_nodes[::-1]:
            return entry.graph
    return _remember(key, state, _made(value, num_nodes))


_of_edge_tensor_outside: Any = untraced(_of_edge_tensor)
_of_pyg_outside: Any = untraced(_of_pyg)


def _entry_of(key: Tensor) -> _Entry | None:
    """Return the entry of a tensor."""
    entry = _graphs.get(id(key))
    return entry if entry is not None and entry.tensor() is key else None


def _remember(key: Tensor, state: Any, graph: Graph, *fields: Any) -> Graph:
    """Keep the graph of a tensor; ``fields`` are the last ones of an ``_Entry``."""
    _graphs[id(key)] = _Entry(ref(key, partial(_forget, id(key))), state, graph, *fields)
    return graph


def _forget(key: int, tensor: "ref[Tensor]", graphs: dict[int, _Entry] = _graphs) -> None:
    """Drop the graph of a tensor that is gone; another one may have its identity by now.

    The last tensors go when names of modules have gone already: ``graphs`` is bound here.
    """
    entry = graphs.get(key)
    if entry is not None and entry.tensor is tensor:
        del graphs[key]


def _known(sizes: Sizes) -> tuple[int, int] | None:
    """Return both sizes, None if one is not known."""
    n_cols, n_rows = sizes
    return None if n_cols is None or n_rows is None else (n_cols, n_rows)


def _made(value: Any, num_nodes: tuple[int, int] | None) -> Graph:
    """Make a graph that does not keep the tensor alive."""
    if isinstance(value, Tensor) and not value.requires_grad:
        if value.layout is not torch.strided:
            value = value.detach()  # which its parts would hold
            if value.layout is torch.sparse_coo:
                value = value.coalesce()  # the same matrix: torch adds up what repeats
        elif not value.is_cuda:
            value = value.clone()
    return Graph.from_edge_index(value, num_nodes=num_nodes)


def _key_of(value: Any) -> Tensor | None:
    """Return the tensor by which a graph is remembered; of a SparseTensor its columns."""
    if isinstance(value, Tensor):
        return value
    key = value.csr()[1] if is_adj_t(value) else None
    return key if isinstance(key, Tensor) else None


def _parts_of(value: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that hold a graph."""
    if not isinstance(value, Tensor):
        return tuple(value.csr())
    if value.layout is torch.strided:
        return value, value.as_tensor()  # type: ignore[attr-defined]
    if value.layout is torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout is torch.sparse_csr:
        return value.crow_indices(), value.col_indices(), value.values()
    if value.layout is torch.sparse_csc:
        return value.ccol_indices(), value.row_indices(), value.values()
    return ()  # refused by who reads it
