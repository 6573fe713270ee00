"""Converters from and to graphs of DGL and NetworkX.

Their edges run from source to target; here the target is the row and the source the column.
Objects are read by their attributes, so that no library is imported to read from it.
"""

from typing import Any

import numpy as np

from ..errors import DtypeError, FormatError, UnsupportedError
from ..formats.arrays import Array, DType
from ..formats.base import Format, FormatName
from ..formats.compressed import COO, CSC, CSR
from .pyg import edge_values, from_edge_index, square
from .scipy import as_exchangeable, imported, index_pair, on_cpu, wrong_kind
from .torch import as_plain_array, to_tensor


def from_dgl(
    g: Any,
    *,
    weight: str | None = None,
    format: FormatName = "coo",
    dtype: DType = None,
    index_dtype: DType = None,
) -> Any:
    """Convert a DGL graph with one edge type to a matrix; rows are its destination nodes.

    Parameters
    ----------
    g : dgl.DGLGraph
        Homogeneous, bipartite, or a block.
    weight : str, optional
        Name in ``g.edata`` of a 1-D feature that becomes the values; by default unweighted.
    format : "coo", "csr", "csc" or "sgt"
        COO keeps the order of edge IDs.  CSR and CSC take over the arrays that DGL keeps for
        message passing (its ``"csc"`` and ``"csr"``: DGL's rows are sources).
    dtype, index_dtype : optional
        As in ``from_edge_index``.

    Returns
    -------
    COO, CSR, CSC or SGT, shape (num_dst_nodes, num_src_nodes)

    Raises
    ------
    UnsupportedError
        If ``g`` is no DGL graph or has several edge types, or a tensor requires grad.
    FormatError
        If ``g.edata`` has no ``weight``.
    """
    if not hasattr(g, "adj_tensors") or not hasattr(g, "canonical_etypes"):
        raise wrong_kind("from_dgl", g, "give a dgl.DGLGraph (DGL 1.1 or newer)")
    if len(g.canonical_etypes) != 1:
        raise UnsupportedError(
            f"g has {len(g.canonical_etypes)} edge types: choose one, as in from_dgl(g[etype])."
        )
    source_type, _, target_type = g.canonical_etypes[0]
    sizes = (int(g.num_src_nodes(source_type)), int(g.num_dst_nodes(target_type)))
    if weight is not None and weight not in g.edata:
        raise FormatError(f"weight is {weight!r} but g.edata holds {sorted(g.edata)}.")
    values = None if weight is None else g.edata[weight]
    if format in ("csr", "csc"):
        return _from_dgl_compressed(g, format, sizes, values, dtype, index_dtype)
    dtypes = {"dtype": dtype, "index_dtype": index_dtype}
    edges = tuple(g.edges(order="eid"))
    return from_edge_index(edges, values, num_nodes=sizes, format=format, **dtypes)


def to_dgl(A: Format, *, weight: str = "weight") -> Any:
    """Convert a square matrix to a homogeneous DGL graph, on the device of ``A``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, n)
        DGL keeps the given format, SGT and CBSR as CSR; edge IDs count its entries in order.
    weight : str
        Edge feature that gets the values; unweighted graphs have none.

    Returns
    -------
    dgl.DGLGraph

    Raises
    ------
    ShapeError
        If ``A`` is not square.
    UnsupportedError
        If dgl is not installed.
    """
    dgl = imported("dgl", "to_dgl needs DGL: see https://www.dgl.ai/pages/start.html.")
    A = as_exchangeable("to_dgl", A)
    square("to_dgl", A, "use dgl.heterograph for two sets of nodes")
    if isinstance(A, COO):
        structure: Any = (to_tensor(A.col), to_tensor(A.row))
    else:
        # DGL's rows are sources, and no edge IDs mean 0, 1, 2, ...
        indptr, indices = to_tensor(A.indptr), to_tensor(A.indices)
        structure = ("csc" if isinstance(A, CSR) else "csr", (indptr, indices, indices[:0]))
    g = dgl.graph(structure, num_nodes=A.n_rows)
    if A.data is not None:
        g.edata[weight] = to_tensor(A.data)
    return g


def _from_dgl_compressed(
    g: Any,
    format: FormatName,
    sizes: tuple[int, int],
    values: object,
    dtype: DType,
    index_dtype: DType,
) -> CSR | CSC:
    n_source, n_target = sizes
    make, theirs = (CSR, "csc") if format == "csr" else (CSC, "csr")
    parts = g.adj_tensors(theirs)
    indptr, indices, edge = (as_plain_array(f"g.adj_tensors({theirs!r})", a) for a in parts)
    indptr, indices = index_pair(indptr=indptr, indices=indices, index_dtype=index_dtype)
    data = None if values is None else edge_values("g.edata", values, len(indices), dtype)
    if data is not None and len(edge):
        data = data[edge]
    return make(indptr, indices, data, shape=(n_target, n_source))


def from_networkx(
    G: Any,
    *,
    weight: str | None = "weight",
    format: FormatName = "coo",
    dtype: DType = None,
    index_dtype: DType = np.int32,
) -> Any:
    """Convert a NetworkX graph to a matrix: an edge ``u -> v`` is the entry (row v, column u).

    Parameters
    ----------
    G : networkx.Graph, DiGraph, MultiGraph or MultiDiGraph
        Vertex ``i`` is the i-th of ``G.nodes``.  Each edge of an undirected graph becomes two
        entries, a self loop one; parallel edges stay apart.
    weight : str, optional
        Edge attribute that becomes the values.  Edges without it weigh 1; if no edge has it, or
        with None, the matrix is unweighted.
    format : "coo", "csr", "csc" or "sgt"
        COO has the order of ``G.edges``, those of an undirected graph followed by their reverse.
    dtype : float16, bfloat16, float32 or float64, optional
        For the values; by default float64.
    index_dtype : int32 or int64

    Returns
    -------
    COO, CSR, CSC or SGT, shape (n, n), on the CPU
        Always a copy.

    Raises
    ------
    UnsupportedError
        If ``G`` is no NetworkX graph, or weights are complex.
    DtypeError
        If a weight is no number.
    """
    if not hasattr(G, "is_multigraph") or not hasattr(G, "edges"):
        raise wrong_kind("from_networkx", G, "give a networkx.Graph")
    place = {node: i for i, node in enumerate(G.nodes)}
    edges = list(G.edges(data=False if weight is None else weight))
    ends = np.array([(place[edge[0]], place[edge[1]]) for edge in edges], np.int64).reshape(-1, 2)
    source, target = ends.T
    values = _networkx_values(edges, weight)
    if not G.is_directed():
        back = source != target
        source, target = np.append(source, target[back]), np.append(target, source[back])
        values = None if values is None else np.append(values, values[back])
    dtypes = {"dtype": dtype, "index_dtype": index_dtype}
    n = len(place)
    return from_edge_index((source, target), values, num_nodes=n, format=format, **dtypes)


def to_networkx(A: Format, *, weight: str = "weight", multigraph: bool = False) -> Any:
    """Convert a square matrix to a directed NetworkX graph: the entry (v, u) is ``u -> v``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, n), on the CPU
    weight : str
        Edge attribute that gets the values, as Python floats; unweighted graphs have none.
    multigraph : bool
        Whether entries of one cell may repeat.

    Returns
    -------
    networkx.DiGraph, or networkx.MultiDiGraph
        Nodes are 0 .. n - 1, edges in the order of the entries; a copy.

    Raises
    ------
    ShapeError
        If ``A`` is not square.
    FormatError
        If entries of one cell repeat and ``multigraph`` is False.
    DeviceError
        If ``A`` is on a GPU.
    UnsupportedError
        If networkx is not installed.
    """
    networkx = imported("networkx", "to_networkx needs networkx: pip install networkx.")
    coo = as_exchangeable("to_networkx", A).tocoo()
    square("to_networkx", A, "NetworkX knows one set of nodes")
    on_cpu("to_networkx", A)
    G = networkx.MultiDiGraph() if multigraph else networkx.DiGraph()
    G.add_nodes_from(range(A.n_rows))
    source, target = coo.col.tolist(), coo.row.tolist()
    if coo.data is None:
        G.add_edges_from(zip(source, target, strict=True))
    else:
        values = coo.data.astype(np.float64).tolist()
        G.add_weighted_edges_from(zip(source, target, values, strict=True), weight=weight)
    if G.number_of_edges() != A.nnz:
        raise FormatError(
            f"A stores {A.nnz} entries in {G.number_of_edges()} cells: use multigraph=True to "
            "keep those that repeat."
        )
    return G


def _networkx_values(edges: list[Any], weight: str | None) -> Array | None:
    if weight is None or all(edge[2] is None for edge in edges):
        return None
    try:
        return np.array([1 if edge[2] is None else edge[2] for edge in edges])
    except ValueError as error:
        raise DtypeError(f"{weight!r} of some edges is not one number: {error}.") from error
