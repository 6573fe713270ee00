"""Converters from and to PyG's ``edge_index``, ``Data`` and ``HeteroData``.

They store edges as (source, target); here the target is the row and the source the column.
Objects are read by their attributes, so that no library is imported to read from it.
"""

from typing import Any, TypeAlias

from ..errors import ShapeError, UnsupportedError
from ..formats import checks, foreign
from ..formats.arrays import Array, DType, contiguous, on_device_of
from ..formats.base import Format, FormatName
from ..formats.compressed import COO, CSC, CSR
from .scipy import as_exchangeable, imported, index_pair, wrong_kind
from .torch import as_plain_array, from_torch, is_tensor, stacked, to_tensor

#: A ``Data`` or ``HeteroData`` of PyG, which is read by its attributes.
Data: TypeAlias = Any
#: The number of vertices, or (n_source, n_target); None to infer it.
NumNodes: TypeAlias = int | tuple[int, int] | None


def from_edge_index(
    edge_index: object,
    edge_weight: object = None,
    *,
    num_nodes: NumNodes = None,
    format: FormatName = "coo",
    dtype: DType = None,
    index_dtype: DType = None,
) -> Any:
    """Build a matrix from PyG's arrays: ``edge_index[0]`` are sources, ``edge_index[1]`` targets.

    Parameters
    ----------
    edge_index : array or tensor, shape (2, n_edges), or a tuple of two of shape (n_edges,)
        Integers.  The COO's ``row`` is ``edge_index[1]`` and its ``col`` is ``edge_index[0]``,
        not copied where they are contiguous and of int32 or int64.
    edge_weight : array or tensor, shape (n_edges,), optional
        Shared with the COO; without it the matrix is unweighted.
    num_nodes : int or (n_source, n_target), optional
        A pair for a bipartite graph.  By default the sizes that PyG's ``EdgeIndex`` carries, else
        the largest index plus one, which on a GPU synchronises.
    format : "coo", "csr", "csc" or "sgt"
        COO keeps the order of the edges.
    dtype : float16, bfloat16, float32 or float64, optional
        For the values.  By default floats keep theirs; integers and booleans become float64.
    index_dtype : int32 or int64, optional
        By default that of ``edge_index``.

    Returns
    -------
    COO, CSR, CSC or SGT, shape (n_target, n_source)

    Raises
    ------
    ShapeError, DtypeError, IndexRangeError, DeviceError
        If the arrays do not form such a graph.
    UnsupportedError
        If a tensor requires grad (see ``from_torch``).
    """
    source, target = edge_ends(edge_index, index_dtype)
    n_source, n_target = vertex_counts(num_nodes, edge_index, source, target)
    data = None
    if edge_weight is not None:
        data = edge_values("edge_weight", edge_weight, len(source), dtype)
    shape = checks.shape((n_target, n_source))
    A = COO._trusted(row=contiguous(target), col=contiguous(source), data=data, shape=shape)
    A.check("cheap")
    checks.in_range("edge_index[0]", A.col, n_source, "source vertices")
    checks.in_range("edge_index[1]", A.row, n_target, "target vertices")
    return A.asformat(format)


def to_edge_index(A: Format) -> tuple[Array, Array | None]:
    """Return PyG's arrays ``(edge_index, edge_weight)`` of a matrix, on its device.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR
        Edges come in its own order; those of an SGT in CSR order.

    Returns
    -------
    edge_index : array of int64, shape (2, nnz)
        Sources (columns), then targets (rows).  Shared where ``A`` came from such an array, else
        a copy.
    edge_weight : array, shape (nnz,), or None
        The values, shared; None where ``A`` is unweighted.

    Notes
    -----
    NumPy or CuPy arrays: ``torch.from_dlpack`` makes tensors of them, ``to_pyg`` a ``Data``.
    """
    coo = as_exchangeable("to_edge_index", A).tocoo()
    return stacked(coo.col, coo.row), coo.data


def from_pyg(
    data: Data, *, format: FormatName | None = None, dtype: DType = None, index_dtype: DType = None
) -> Any:
    """Convert a PyG ``Data`` to a matrix, or a ``HeteroData`` to one for each edge type.

    Parameters
    ----------
    data : torch_geometric.data.Data or HeteroData
        Read from ``adj_t`` (a sparse tensor or a ``SparseTensor``, whose rows are targets as they
        are here) if it has one, else from ``edge_index`` with ``edge_weight``, or with
        ``edge_attr`` where that is 1-D.  Wider edge features are no values of a matrix: without
        others it is unweighted.
    format : "coo", "csr", "csc" or "sgt", optional
        By default COO from ``edge_index``, in its order, and the format that ``adj_t`` has.
    dtype, index_dtype : optional
        As in ``from_edge_index``.

    Returns
    -------
    COO, CSR, CSC or SGT, shape (num_nodes, num_nodes)
        Memory is shared as in ``from_edge_index`` and ``from_torch``.  Of a ``HeteroData`` a dict:
        for each edge type ``(source, relation, target)`` that has edges its matrix, of as many rows
        as there are targets and columns as there are sources.

    Raises
    ------
    UnsupportedError
        If ``data`` is no graph, or a tensor requires grad.
    ShapeError, DtypeError, IndexRangeError, DeviceError
        If the tensors do not form a graph, or a node type has no number of nodes.
    """
    options: dict[str, Any] = {"format": format, "dtype": dtype, "index_dtype": index_dtype}
    if not is_hetero(data):
        return _matrix(data, getattr(data, "num_nodes", None), **options)
    stores = stores_of(data).items()
    return {edge_type: _matrix(store, sizes, **options) for edge_type, (store, sizes) in stores}


def _matrix(store: Any, num_nodes: NumNodes, *, format: FormatName | None, **dtypes: DType) -> Any:
    """Convert a ``Data``, or the store of an edge type, to a matrix."""
    edges, weight = edges_of_store(store)
    if getattr(store, "adj_t", None) is not None:
        A = from_adj_t(edges, **dtypes)
        return A if format is None else A.asformat(format)
    return from_edge_index(edges, weight, num_nodes=num_nodes, format=format or "coo", **dtypes)


def is_hetero(data: object) -> bool:
    """Return True for a ``HeteroData``."""
    return hasattr(data, "edge_types")


def stores_of(data: Data) -> dict[tuple[str, str, str], tuple[Any, Any]]:
    """Return the store and ``(n_source, n_target)`` of each edge type of a ``HeteroData``.

    None stands for the sizes of an ``adj_t``, which carries them.
    """
    stores: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    for edge_type in data.edge_types:
        store = data[edge_type]
        if getattr(store, "adj_t", None) is not None:
            stores[edge_type] = store, None
        elif getattr(store, "edge_index", None) is not None:
            stores[edge_type] = store, _sizes_of(data, edge_type)
    if not stores:
        raise UnsupportedError(
            "data is a HeteroData without edges: give one whose edge types have an edge_index or "
            "an adj_t."
        )
    return stores


def _sizes_of(data: Data, edge_type: tuple[str, str, str]) -> tuple[int, int]:
    """Return ``(n_source, n_target)`` of an edge type."""
    sizes = []
    for name in edge_type[::2]:
        size = data[name].num_nodes if name in data.node_types else None
        if size is None:
            raise ShapeError(
                f"data[{name!r}] does not tell how many nodes it has: set its x, or "
                f"data[{name!r}].num_nodes."
            )
        sizes.append(int(size))
    return sizes[0], sizes[1]


def parts_of(data: Data) -> tuple[Any, Any, Any]:
    """Return ``adj_t`` or ``edge_index`` of a ``Data``, its edge weights and ``num_nodes``.

    With an ``adj_t``, which has both, these are None.
    """
    edges, weight = edges_of_store(data)
    if getattr(data, "adj_t", None) is not None:
        return edges, None, None
    return edges, weight, getattr(data, "num_nodes", None)


def edges_of_store(store: Any) -> tuple[Any, Any]:
    """Return ``adj_t`` and None, or ``edge_index`` and its edge weights or None."""
    adj_t, edge_index = (getattr(store, name, None) for name in ("adj_t", "edge_index"))
    if adj_t is not None:
        return adj_t, None
    if edge_index is None:
        raise wrong_kind("from_pyg", store, "it has neither edge_index nor adj_t, give a graph")
    weight = getattr(store, "edge_weight", None)
    if weight is None:
        attr = getattr(store, "edge_attr", None)
        weight = attr if getattr(attr, "ndim", 0) == 1 else None
    return edge_index, weight


def to_pyg(A: Format) -> Any:
    """Convert a square matrix to a ``torch_geometric.data.Data``, on the device of ``A``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, n)

    Returns
    -------
    torch_geometric.data.Data
        ``edge_index``, ``num_nodes``, and ``edge_weight`` where ``A`` is weighted; memory is
        shared as in ``to_edge_index``.

    Raises
    ------
    ShapeError
        If ``A`` is not square.
    UnsupportedError
        If torch_geometric is not installed.
    """
    needed = "to_pyg needs torch_geometric: pip install torch-geometric."
    data = imported("torch_geometric.data", needed)
    edge_index, edge_weight = to_edge_index(A)
    square("to_pyg", A, "use to_edge_index and a HeteroData")
    graph = data.Data(edge_index=to_tensor(edge_index), num_nodes=A.n_rows)
    if edge_weight is not None:
        graph.edge_weight = to_tensor(edge_weight)
    return graph


def edge_ends(edge_index: object, index_dtype: DType) -> tuple[Array, Array]:
    """Return sources and targets in one dtype; rows of one array stay rows of one."""
    if isinstance(edge_index, tuple):
        if len(edge_index) != 2:
            raise ShapeError(f"edge_index has {len(edge_index)} parts: give (source, target).")
        source, target = (as_plain_array("edge_index", part) for part in edge_index)
        if source.ndim != 1 or source.shape != target.shape:
            raise ShapeError(
                f"edge_index has parts of shape {source.shape} and {target.shape}: give two 1-D "
                "arrays of one length."
            )
        return index_pair(source=source, target=target, index_dtype=index_dtype)
    edges = as_plain_array("edge_index", edge_index)
    if edges.ndim != 2 or edges.shape[0] != 2:
        raise ShapeError(
            f"edge_index has shape {edges.shape}: give (2, n_edges), sources then targets."
        )
    edges = contiguous(foreign.indices("edge_index", edges, index_dtype))
    return edges[0], edges[1]


def vertex_counts(
    num_nodes: NumNodes, edge_index: object, source: Array, target: Array
) -> tuple[int, int]:
    """Return ``(n_source, n_target)``: as given, as ``edge_index`` carries them, or counted."""
    if num_nodes is None:
        known: tuple[Any, Any] = getattr(edge_index, "sparse_size", lambda: (None, None))()
        if None not in known:
            return int(known[0]), int(known[1])
        if not len(source):
            return 0, 0
        with on_device_of(source):
            most = max(int(source.max()), int(target.max()))  # synchronize!
        num_nodes = max(most + 1, 0)
    pair = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
    try:
        n_source, n_target = (checks.as_index(count) for count in pair)
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"num_nodes is {num_nodes!r}: give an integer or (n_source, n_target)."
        ) from error
    if n_source < 0 or n_target < 0:
        raise ShapeError(f"num_nodes is {num_nodes!r}: counts cannot be negative.")
    return n_source, n_target


def edge_values(name: str, values: object, n_edges: int, dtype: DType) -> Array:
    """Convert edge values to an array; raise unless there is one per edge."""
    data = as_plain_array(name, values)
    if data.shape != (n_edges,):
        raise ShapeError(
            f"{name} has shape {data.shape}, expected ({n_edges},): give one value per edge."
        )
    return foreign.values(name, data, dtype)


def from_adj_t(adj_t: Any, dtype: DType = None, index_dtype: DType = None) -> COO | CSR | CSC:
    """Convert a sparse tensor, or a ``SparseTensor``, whose rows are targets."""
    if is_tensor(adj_t):
        return from_torch(adj_t, dtype=dtype, index_dtype=index_dtype)
    if not hasattr(adj_t, "csr") or not hasattr(adj_t, "sparse_sizes"):
        raise wrong_kind("from_pyg", adj_t, "adj_t is a sparse tensor or a SparseTensor")
    rowptr, col, value = adj_t.csr()
    indptr, indices = index_pair(
        indptr=as_plain_array("adj_t.rowptr", rowptr),
        indices=as_plain_array("adj_t.col", col),
        index_dtype=index_dtype,
    )
    data = None if value is None else edge_values("adj_t.value", value, len(indices), dtype)
    return CSR(indptr, indices, data, shape=tuple(adj_t.sparse_sizes()))


def square(function: str, A: Format, mend: str) -> None:
    """Raise for a rectangular matrix where the other library has one set of vertices."""
    if A.n_rows != A.n_cols:
        raise ShapeError(f"{function}: A has shape {A.shape} but must be square: {mend}.")
