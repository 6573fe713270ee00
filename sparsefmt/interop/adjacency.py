"""PyG's sorted graphs: ``EdgeIndex``, and ``adj_t`` whose rows are targets.

Objects are read by their attributes, so that no library is imported to read from it.
"""

from typing import Any

import numpy as np

from ..errors import DtypeError, FormatError, ShapeError, UnsupportedError
from ..formats import checks, primitives
from ..formats.arrays import Array
from ..formats.base import Format
from ..formats.compressed import CSC, CSR
from .pyg import NumNodes, edge_ends, edge_values, from_adj_t, vertex_counts
from .torch import as_plain_array, is_tensor


def is_adj_t(value: object) -> bool:
    """Return True for a sparse tensor, or a ``SparseTensor`` of torch_sparse."""
    if is_tensor(value):
        return str(value.layout).startswith("torch.sparse_")
    return hasattr(value, "csr") and hasattr(value, "sparse_sizes")


def is_edge_index(value: object) -> bool:
    """Return True for PyG's ``EdgeIndex``, which wraps a tensor."""
    return is_tensor(value) and hasattr(value, "sort_order") and hasattr(value, "sparse_size")


def known_sizes(edge_index: Any) -> tuple[int, int] | None:
    """Return ``(n_source, n_target)`` of an ``EdgeIndex``, None where it does not carry both."""
    n_source, n_target = edge_index.sparse_size()
    return None if n_source is None or n_target is None else (int(n_source), int(n_target))


def structure_of(adj_t: Any, edge_weight: object, num_nodes: NumNodes) -> Format:
    """Convert an ``adj_t`` to the format of its layout.

    Raises
    ------
    UnsupportedError
        If ``edge_weight`` is given, too.
    ShapeError
        If ``num_nodes`` differs from its sizes.
    """
    if edge_weight is not None:
        raise UnsupportedError(
            "edge_weight is given with an adj_t, which has values of its own: leave it out, or "
            "give graph.with_data(edge_weight)."
        )
    A = from_adj_t(adj_t)
    pair = num_nodes if isinstance(num_nodes, tuple | list | None) else (num_nodes, num_nodes)
    if pair is not None and tuple(pair) != A.shape[::-1]:
        raise ShapeError(
            f"num_nodes is {num_nodes} but adj_t has shape {A.shape}, targets and sources: leave "
            "num_nodes out."
        )
    return A


def sorted_structure(edge_index: Any, edge_weight: object, num_nodes: NumNodes) -> CSR | CSC | None:
    """Convert a sorted ``EdgeIndex`` on the CPU: to CSR if by targets, to CSC if by sources.

    None for one that is not sorted.

    Raises
    ------
    FormatError
        If its ids do not ascend as its ``sort_order`` says.
    SparseFmtError
        Any other that ``from_edge_index`` raises.
    """
    order = edge_index.sort_order
    if order is None or edge_index.is_cuda:
        return None
    source, target = edge_ends(edge_index, None)
    n_source, n_target = vertex_counts(num_nodes, edge_index, source, target)
    shape = checks.shape((n_target, n_source))
    checks.sizes_fit(shape, len(source), source.dtype)
    checks.in_range("edge_index[0]", source, n_source, "source vertices")
    checks.in_range("edge_index[1]", target, n_target, "target vertices")
    data = None
    if edge_weight is not None:
        data = edge_values("edge_weight", edge_weight, len(source), None)
    if order == "col":
        indptr = _pointers(edge_index, target, n_target)
        return CSR._trusted(indptr=indptr, indices=source, data=data, shape=shape)
    indptr = _pointers(edge_index, source, n_source)
    return CSC._trusted(indptr=indptr, indices=target, data=data, shape=shape)


def _pointers(edge_index: Any, major: Array, n_major: int) -> Array:
    """Return PyG's pointers if they fit, else search for them; raise if the ids are not sorted."""
    cached = getattr(edge_index, "_indptr", None)
    if cached is not None:
        indptr = as_plain_array("edge_index.get_indptr()", cached).astype(major.dtype, copy=False)
        if len(indptr) == n_major + 1 and _leads_to(indptr, major):
            return indptr
    if not primitives.is_ascending(major):
        name = "targets" if edge_index.sort_order == "col" else "sources"
        raise FormatError(
            f"edge_index has sort_order={edge_index.sort_order!r} but its {name} do not ascend: "
            "make it anew, EdgeIndex(edge_index.as_tensor()).sort_by(...) for instance."
        )
    return primitives.pointers(major, n_major, major.dtype)


def _leads_to(indptr: Array, major: Array) -> bool:
    """Return True if pointers are those of the sorted ids; PyG may keep those of former edges."""
    lengths = np.diff(indptr)
    if indptr[0] != 0 or indptr[-1] != len(major) or (lengths < 0).any():
        return False
    return bool((primitives.expand(indptr, len(major)) == major).all())


def vertices_of(batch: object, num_nodes: NumNodes) -> int:
    """Check PyG's ``batch`` and return its number of vertices.

    Raises
    ------
    DtypeError, ShapeError
        If it is no vector of integers, or not as long as ``num_nodes`` says.
    """
    graphs = as_plain_array("batch", batch)
    if graphs.ndim != 1:
        raise ShapeError(f"batch has shape {graphs.shape}: give the number of each vertex's graph.")
    if graphs.dtype.kind not in "iu":
        raise DtypeError(f"batch is {graphs.dtype}: give integers, the number of each graph.")
    pair = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
    if num_nodes is not None and any(count != len(graphs) for count in pair):
        raise ShapeError(
            f"num_nodes is {num_nodes} but batch has {len(graphs)} vertices: leave num_nodes out."
        )
    return len(graphs)


def refuse_crossing(A: Format, batch: object) -> None:
    """Raise for an edge between vertices of two graphs; synchronises.

    Raises
    ------
    FormatError
        If there is one.
    """
    graphs, coo = as_plain_array("batch", batch), A.tocoo()
    crossing = checks.first_true(graphs[coo.row] != graphs[coo.col])  # synchronize!
    if crossing >= 0:
        row, col = int(coo.row[crossing]), int(coo.col[crossing])
        raise FormatError(
            f"edge_index leads from vertex {col} of graph {int(graphs[col])} to vertex {row} of "
            f"graph {int(graphs[row])}: give the batch of these edges."
        )
