"""PyG's graphs in the place of ours, which is made once of each and remembered.

An ``edge_index``, an ``EdgeIndex``, or an ``adj_t`` whose rows are targets.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
from torch import Tensor

from ..._caches import store
from ...errors import DtypeError, UnsupportedError
from ...graph.graph import Graph
from ...interop.adjacency import is_adj_t, is_edge_index, known_sizes
from ..engine.recording import refuse_transforms, untraced
from .shared import Shared
from .tensors import GraphTensors

#: Sources and targets, None where they are not known.
Sizes: TypeAlias = tuple[int | None, int | None]


class _Entry(NamedTuple):
    """Tensors, their versions and places in memory when something was made of them, and that.

    It does not hold the tensors themselves, but aliases, so that nothing else comes to lie at their
    places.  ``shape`` is that of the graph of an ``edge_index``.
    """

    tensors: "tuple[ref[Tensor], ...]"
    state: Any
    made: Any
    aliases: tuple[Tensor, ...] = ()
    shape: tuple[int, int] | None = None


class Remembered(dict[Hashable, _Entry]):
    """What was made of tensors, by their identity; it goes when they do.

    A dictionary of weak keys takes ten times as long.
    """

    def entry(self, key: Hashable, *tensors: Tensor) -> _Entry | None:
        """Return the entry of that key if it is of these tensors."""
        entry = self.get(key)
        if entry is None or any(a() is not b for a, b in zip(entry.tensors, tensors, strict=True)):
            return None
        return entry

    def keep(self, key: Hashable, tensors: Sequence[Tensor], *fields: Any) -> Any:
        """Keep what was made of tensors; ``fields`` are the last ones of an ``_Entry``."""
        this = ref(self)

        def forget(tensor: object) -> None:
            # The last tensors go when names of modules have gone already.
            cache: dict[Hashable, _Entry] = this() or {}
            entry = cache.get(key)
            if entry is not None and any(weak is tensor for weak in entry.tensors):
                del cache[key]

        self[key] = entry = _Entry(tuple(ref(tensor, forget) for tensor in tensors), *fields)
        return entry.made

    def ask(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """Return what was made of the tensors as they are now, or make it."""
        if any(tensor.is_inference() for tensor in tensors):  # which has no version
            return make()
        name = key, *map(id, tensors)
        state = [state_of(tensor) for tensor in tensors]
        entry = self.entry(name, *tensors)
        if entry is not None and entry.state == state:
            return entry.made
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if started and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "types of edges, or ids, are new in the capture of a CUDA graph, which cannot wait "
                "to look at them: keep their tensors outside of the step, and run it once before."
            )
        aliases = tuple(tensor.detach() for tensor in tensors)
        return self.keep(name, tensors, state, make(), aliases)


_graphs = store(Remembered())


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
    The tensor is known by its identity and its version, which counts changes in place; not those
    by ``.data``, ``apply_``, ``map_``, NumPy, CuPy, DLPack and ``torch.distributed``: give a new
    tensor after these, or call ``sparsefmt.clear_caches()``.  Tensors of inference mode have no
    version: their graph is made at each call.  ``torch.compile`` breaks its graph here: give it a
    ``Graph``.
    """
    if type(edge_index) is Graph:
        return edge_index
    if size is None and not torch.compiler.is_dynamo_compiling():
        entry = _graphs.get(id(edge_index))
        if entry is not None and _fits(entry, edge_index, of_columns, of_rows):
            return entry.made
    if isinstance(edge_index, Graph | GraphTensors):
        return edge_index
    if isinstance(edge_index, Shared):
        return edge_index if edge_index.complete is None else edge_index.complete
    of_edges = _is_edge_tensor(edge_index)
    if not (of_edges or is_adj_t(edge_index) or is_edge_index(edge_index)):
        if name:
            raise wrong_graph(edge_index, name)
        return edge_index
    n_cols, n_rows = size or (None, None)
    n_cols = _length(of_columns) if n_cols is None else n_cols
    if n_rows is None:
        n_rows = n_cols if of_rows is None else _length(of_rows)
    return _graph_of(edge_index, (n_cols, n_rows), of_edges)


def _fits(entry: _Entry, value: object, of_columns: Tensor | None, of_rows: Tensor | None) -> bool:
    """Return True if a remembered graph still fits; False may mean "ask again"."""
    if entry.shape is None or entry.tensors[0]() is not value or entry.state != state_of(value):
        return False
    shape = of_columns.shape if type(of_columns) is Tensor else ()
    n = shape[0] if shape else _length(of_columns)
    return entry.shape == (n if of_rows is None else _length(of_rows), n)


def turned(graph: Any, edge_index: Any) -> Any:
    """Return the transpose of ``as_graph(edge_index)``, its edges in the same order."""
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


def wrong_graph(value: object, name: str = "graph") -> DtypeError | UnsupportedError:
    """Return the error for what is no graph, in an argument of that name."""
    if isinstance(value, Shared):
        return UnsupportedError(
            f"{name} is a {type(value).__name__}, which of sparsefmt.autograd only spmm, "
            "aggregate_with_own, propagate, maxk_aggregate and sampled_aggregate take: "
            "use a layer of sparsefmt.nn, such as GATConv for attention."
        )
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
    return key is not None and _graphs.entry(id(key), key) is not None


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


def _graph_of(value: Any, sizes: Sizes, of_edges: bool) -> Graph:
    """Return the remembered graph of an ``edge_index``, ``EdgeIndex`` or ``adj_t``, or make it."""
    if torch.compiler.is_compiling():  # asked here: a compiler may begin with this function
        return cast(Graph, _graph_of_outside(value, sizes, of_edges))
    num_nodes = _known(sizes)
    if not of_edges:
        strided = isinstance(value, Tensor) and value.layout is torch.strided
        num_nodes = (known_sizes(value) or num_nodes) if strided else None
    key = _key_of(value)
    if key is None or key.is_inference():  # which has no version
        return _made(value, num_nodes)
    if of_edges:
        state, shape = state_of(value), sizes[::-1]
    else:
        sizes_of = () if isinstance(value, Tensor) else tuple(value.sparse_sizes())
        state = (*sizes_of, *map(state_of, _parts_of(value)))
        shape = (None, None) if num_nodes is None else num_nodes[::-1]
    entry = _graphs.entry(id(key), key)
    if entry is not None and entry.state == state and shape in ((None, None), entry.made.shape):
        return cast(Graph, entry.made)
    graph = _made(value, num_nodes)
    alias = ((value.detach(),), graph.shape) if of_edges else ()
    return cast(Graph, _graphs.keep(id(key), [key], state, graph, *alias))


_graph_of_outside: Any = untraced(_graph_of)


def _known(sizes: Sizes) -> tuple[int, int] | None:
    """Return both sizes, None if one is not known."""
    n_cols, n_rows = sizes
    return None if n_cols is None or n_rows is None else (n_cols, n_rows)


def _made(value: Any, num_nodes: tuple[int, int] | None) -> Graph:
    """Make a graph that does not keep the tensor alive; not within torch.func, which wraps it."""
    refuse_transforms(value)
    if isinstance(value, Tensor) and not value.requires_grad:
        if value.layout is not torch.strided:
            value = value.detach()  # which its parts would hold
            if value.layout is torch.sparse_coo:
                value = value.coalesce()  # the same matrix: torch adds up what repeats
        # A graph over the tensor's memory would keep it, and so itself, alive: of CUDA tensors it
        # has an alias, unless they are empty or of an unknown class.
        elif not value.is_cuda or not (
            value.shape[1] if type(value) is Tensor else is_edge_index(value)
        ):
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
