"""A graph whose rows are shared out among the ranks of a process group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DtypeError, IndexRangeError, ShapeError
from ..graph import Graph
from ..interop.torch import to_tensor
from .halo import Halo, halo_of
from .rows import checked


class DistGraph:
    """The rows that one rank has of a square graph, and what it reads of other ranks.

    Each rank makes its own, all at the same time, of the edges that lead to its vertices.  Features
    are shared out as the rows are: a rank has those of its own vertices.

    Parameters
    ----------
    edge_index : Tensor of int64, shape (2, n_edges)
        Sources, any vertices of the graph, and targets, vertices of this rank, by their numbers in
        the whole graph; on the device where this rank computes.
    bounds : sequence of int, length ranks + 1
        The first vertex of each rank, ascending, and the number of vertices at the end: what
        ``balanced`` gives.  The same on all ranks.
    group : ProcessGroup, optional
        By default all processes.

    Raises
    ------
    DtypeError, ShapeError, IndexRangeError
        If ``edge_index`` or ``bounds`` are not as above.

    Notes
    -----
    Nowhere lies more of the graph than the rows of a rank.  The numbers of vertices that ranks read
    of each other are exchanged once, here.
    """

    def __init__(self, edge_index: Tensor, bounds: Any, group: Any = None) -> None:
        self.bounds = checked(bounds, dist.get_world_size(group))
        self.group, self.rank = group, dist.get_rank(group)
        first, last = self.bounds[self.rank], self.bounds[self.rank + 1]
        self._check(edge_index, first, last)
        columns, wanted = halo_of(edge_index[0], self.bounds, self.rank)
        self.halo = Halo(wanted, self.bounds, group)
        rows, own = edge_index[1] - first, columns < last - first
        n_local, n_halo = last - first, len(wanted)
        #: All entries of the rows: (n_local, n_local + n_halo), own vertices first.
        self.local = _graph(columns, rows, n_local + n_halo, n_local)
        #: Which edges have their source on this rank, and the graphs of those and of the others.
        self.is_own = own
        self.own = _graph(columns[own], rows[own], n_local, n_local)
        self.rest = _graph(columns[~own] - n_local, rows[~own], n_halo, n_local)

    @classmethod
    def of(cls, graph: Graph, bounds: Any, group: Any = None) -> "DistGraph":
        """Take the rows of this rank out of a graph that each rank has whole.

        Parameters
        ----------
        graph : Graph, shape (n, n)
        bounds, group
            As for ``DistGraph``.
        """
        bounds = checked(bounds, dist.get_world_size(group))
        rank = dist.get_rank(group)
        coo = graph.structure.tocoo()
        edges = torch.stack([to_tensor(end).long() for end in (coo.col, coo.row)])
        mine = (edges[1] >= bounds[rank]) & (edges[1] < bounds[rank + 1])
        return cls(edges[:, mine], bounds, group)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, n) of the whole graph."""
        return self.bounds[-1], self.bounds[-1]

    @property
    def n_local(self) -> int:
        """Vertices of this rank."""
        return self.halo.n_local

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Part values of this rank's edges: those of edges between its vertices, and the others."""
        return values[self.is_own], values[~self.is_own]

    def inverse_degree(self, like: Tensor) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one, in that dtype."""
        degree = self.local.in_degree
        return to_tensor(degree).clamp(min=1).to(like.dtype).reciprocal()

    def rows_of(self, x: Tensor) -> Tensor:
        """Give the rows of this rank of what has one for each vertex of the graph."""
        return x[self.bounds[self.rank] : self.bounds[self.rank + 1]]

    def __repr__(self) -> str:
        return (
            f"DistGraph(rank {self.rank} of {len(self.bounds) - 1}: {self.n_local} of "
            f"{self.shape[0]} rows, {self.local.nnz} entries, {len(self.halo.vertices)} vertices "
            "of others)"
        )

    def _check(self, edge_index: Any, first: int, last: int) -> None:
        if not isinstance(edge_index, Tensor) or edge_index.dtype is not torch.int64:
            kind = getattr(edge_index, "dtype", type(edge_index).__name__)
            raise DtypeError(f"edge_index is {kind}: give a tensor of torch.int64.")
        if edge_index.dim() != 2 or edge_index.shape[0] != 2:
            raise ShapeError(
                f"edge_index has shape {tuple(edge_index.shape)}: give (2, n_edges), sources and "
                "targets."
            )
        for end, (low, high), what in zip(
            edge_index,
            ((0, self.bounds[-1]), (first, last)),
            ("a vertex", f"a vertex of rank {self.rank}"),
            strict=True,
        ):
            if len(end) and not (low <= int(end.min()) and int(end.max()) < high):  # synchronize!
                raise IndexRangeError(
                    f"edge_index names {int(end.min())} to {int(end.max())} where {what} lies from "
                    f"{low} to {high - 1}: give each rank the edges that lead to its own vertices."
                )


def _graph(columns: Tensor, rows: Tensor, n_cols: int, n_rows: int) -> Graph:
    return Graph.from_edge_index(torch.stack([columns, rows]), num_nodes=(n_cols, n_rows))
