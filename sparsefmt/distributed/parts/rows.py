"""Contiguous rows of a graph for each rank, by the vertices where they begin.

Nothing here needs torch.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np
import scipy.sparse

from ...errors import ShapeError, UnsupportedError
from ...formats import checks
from ...formats.arrays import Array, namespace, to_device
from ...formats.compressed import CSR
from ...graph.graph import Graph
from ...reorder import Order

#: The vertex at which each part begins, and the number of vertices: parts + 1, ascending from 0.
Bounds: TypeAlias = tuple[int, ...]
#: Parts of a graph, and ranks of a job: beyond it no reader would be done in seconds.
MOST_PARTS = 1 << 13


class Partitioner(Protocol):
    """A function that cuts the rows of a graph into parts."""

    def __call__(self, graph: Graph, parts: int) -> Bounds | tuple[Order, Bounds]:
        """Return the bounds of contiguous parts, or an order of the vertices and bounds in it."""


def balanced(graph: Graph, parts: int) -> tuple[int, ...]:
    """Split the rows of a graph into parts with about as many entries.

    Parameters
    ----------
    graph : Graph, shape (n, n_cols)
    parts : int
        At least 1; parts beyond the number of rows are empty.

    Returns
    -------
    tuple of int
        The first row of each part, ascending from 0, and ``n`` at the end.

    Raises
    ------
    ShapeError
        If ``parts`` is less than 1.

    Notes
    -----
    Part ``p`` begins at the row whose entries reach the share ``p / parts`` of all; of the two
    borders around it, the nearer one.  A row counts as one entry more than it has, so that rows
    without entries are shared out too.  Synchronises with a GPU.
    """
    checks.integer("parts", parts, least=1)
    return bounds_of_degrees(graph.csr.lengths, parts)


def bounds_of_degrees(degrees: Array, parts: int) -> Bounds:
    """Split rows of ``degrees`` entries each as ``balanced`` does; return parts + 1 bounds."""
    xp, n = namespace(degrees), len(degrees)
    ends = xp.zeros(n + 1, np.int64)
    xp.cumsum(degrees, out=ends[1:])
    ends += xp.arange(n + 1)
    shares = xp.asarray([int(ends[-1]) * p / parts for p in range(1, parts)])  # synchronize!
    after = xp.searchsorted(ends, shares)
    before = xp.maximum(after - 1, 0)
    nearer = xp.where(shares - ends[before] < ends[after] - shares, before, after)
    return (0, *map(int, nearer.tolist()), n)  # synchronize!


def metis(graph: Graph, parts: int) -> tuple[Order, Bounds]:
    """Split the vertices of a graph into parts between which few edges lead, by METIS.

    Parameters
    ----------
    graph : Graph, shape (n, n)
        METIS sees an edge between ``i`` and ``j`` where there is an entry (i, j) or (j, i); values,
        directions and loops do not count.
    parts : int
        At least 1.

    Returns
    -------
    order : Order
        The vertices part by part, ascending in each; position ``p`` holds the old vertex
        ``order.perm[p]``.
    bounds : tuple of int
        The first position of each part, ascending from 0, and ``n`` at the end.

    Raises
    ------
    ShapeError
        If ``parts`` is less than 1 or the graph is not square.
    UnsupportedError
        If pymetis is not installed, or has been built with 32-bit indices for a graph beyond them.

    Notes
    -----
    Parts are balanced by stored entries, of which a vertex counts one more than it has.  Vertices
    without edges, which METIS would leave to one part, go to the lightest parts.  On the CPU,
    where the graph lies whole.  Karypis and Kumar, SIAM J. Sci. Comput. 20 (1998) 359.
    """
    checks.integer("parts", parts, least=1)
    if graph.shape[0] != graph.shape[1]:
        raise ShapeError(f"graph has shape {graph.shape}: parts of vertices need a square one.")
    csr = graph.csr.to("cpu")
    n = csr.n_rows
    weights = csr.lengths.astype(np.int64) + 1
    indptr, indices = _undirected(csr)
    linked = np.flatnonzero(np.diff(indptr))
    part = np.full(n, -1, np.int64)
    if parts == 1:
        part[:] = 0
    elif len(linked):
        part[linked] = _metis_parts(indptr, indices, linked, weights, parts)
    alone = np.flatnonzero(part < 0)
    loads = np.bincount(part[part >= 0], weights[part >= 0], minlength=parts)
    part[alone] = _fill(loads, weights[alone])
    perm = np.argsort(part, kind="stable").astype(csr.index_dtype)
    ends = np.cumsum(np.bincount(part, minlength=parts))
    return Order(to_device(perm, graph.csr.device)), (0, *map(int, ends))


def _undirected(csr: CSR) -> tuple[Array, Array]:
    """Return ``indptr`` and ``indices`` of ``A + A.T`` without duplicates and loops."""
    arrays = np.ones(csr.nnz, bool), csr.indices, csr.indptr
    A = scipy.sparse.csr_array(arrays, shape=csr.shape)
    both = (A + A.T).tocoo()
    off = both.row != both.col
    entries = both.data[off], (both.row[off], both.col[off])
    result = scipy.sparse.coo_array(entries, shape=csr.shape).tocsr()
    return result.indptr, result.indices


def _metis_parts(indptr: Array, indices: Array, linked: Array, weights: Array, parts: int) -> Array:
    """Choose a part for each vertex of ``linked``, those that have edges."""
    try:
        import pymetis
    except ImportError as error:
        raise UnsupportedError(
            "METIS is not installed: pip install 'sparsefmt[metis]', or take parts by 'balanced'."
        ) from error
    dtype = np.dtype(pymetis.zero_copy_dtype())
    if len(indices) > np.iinfo(dtype).max:
        raise UnsupportedError(
            f"the graph has {len(indices)} edges and pymetis is built for {dtype}: take parts by "
            "'balanced'."
        )
    numbers = np.full(len(indptr) - 1, -1, dtype)
    numbers[linked] = np.arange(len(linked), dtype=dtype)
    starts = np.append(indptr[linked], indptr[-1]).astype(dtype)
    adjacency = pymetis.CSRAdjacency(starts, numbers[indices])
    result = pymetis.part_graph(parts, adjacency, vweights=weights[linked].astype(dtype))
    return np.asarray(result.vertex_part, np.int64)


def _fill(loads: Array, weights: Array) -> Array:
    """Choose parts for vertices of these weights, so that the lightest parts get them."""
    levels = np.sort(loads)
    total = weights.sum()
    # the level to which parts fill up: as of water over uneven ground
    filled = (total + np.cumsum(levels)) / np.arange(1, len(levels) + 1)
    room = np.maximum(filled[filled <= np.append(levels[1:], np.inf)][:1] - loads, 0)
    return np.searchsorted(np.cumsum(room)[:-1], np.cumsum(weights) - weights, side="right")


def check_count(name: str, count: int) -> None:
    """Raise ShapeError for more parts or ranks than there may be."""
    if count > MOST_PARTS:
        raise ShapeError(f"{name} is {count} but {MOST_PARTS} are the most: take fewer.")


def checked(bounds: Iterable[int], ranks: int) -> tuple[int, ...]:
    """Return ``ranks`` + 1 bounds as integers; raise ShapeError unless they ascend from 0."""
    try:
        result = tuple(map(checks.as_index, bounds))
    except (TypeError, ValueError, RuntimeError):  # the last one is torch's
        result = ()
    if len(result) != ranks + 1 or result[:1] != (0,) or any(b < a for a, b in pairwise(result)):
        raise ShapeError(
            f"bounds is {bounds!r}: give the first row of each of the {ranks} ranks, ascending "
            "from 0, and the number of rows at the end, as distributed.balanced(graph, ranks) does."
        )
    return result


def check_ends(shape: tuple[int, int], bounds: Bounds, source_bounds: Sequence[int] | None) -> None:
    """Check that bounds end with the rows of a graph, and those of sources with its columns."""
    n_rows, n_cols = shape
    if bounds[-1] != n_rows:
        raise ShapeError(
            f"bounds end at {bounds[-1]} but graph has {n_rows} rows: give {n_rows} last."
        )
    if source_bounds is None and n_rows != n_cols:
        raise ShapeError(
            f"graph has shape {shape} but source_bounds is not given: give those of its {n_cols} "
            "columns."
        )
    if source_bounds is not None and checked(source_bounds, len(bounds) - 1)[-1] != n_cols:
        raise ShapeError(
            f"source_bounds is {source_bounds!r} but graph has {n_cols} columns: give {n_cols} "
            "last."
        )
