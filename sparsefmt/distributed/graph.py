"""A graph whose rows are shared out among the ranks of a process group."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import graph_tensors
from ..errors import DtypeError, IndexRangeError, ShapeError, UnsupportedError
from ..graph import Graph
from ..interop.torch import to_tensor
from .aggregation import Aggregation
from .files import read_part
from .halo import Halo, halo_of
from .rows import checked


class DistGraph(Aggregation):
    """The rows that one rank has of a graph, and what it reads of other ranks.

    Each rank makes its own, all at the same time, of the edges that lead to its vertices.  Features
    are shared out as the rows are: a rank has those of its own vertices.  Layers of
    ``sparsefmt.nn`` take it in the place of a graph, with the features of the rank's vertices.

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
    source_bounds : sequence of int, length ranks + 1, optional
        The same of sources, where these are other vertices than targets.
    exchange_dtype : torch.dtype, optional
        That in which features and gradients of a wider dtype travel, such as ``torch.bfloat16``.
        By default they travel as they are.

    Raises
    ------
    DtypeError, ShapeError, IndexRangeError
        If ``edge_index``, ``bounds`` or another argument is not as above.

    Notes
    -----
    Nowhere lies more of the graph than the rows of a rank.  The numbers of vertices that ranks read
    of each other are exchanged once, here.  Where ranks read nearly all rows of all others, forward
    sends all to all by one all-gather.  ``halo.traffic`` counts the exchanges of a rank, and the
    bytes that it has sent.
    """

    def __init__(
        self,
        edge_index: Tensor,
        bounds: Any,
        group: Any = None,
        *,
        source_bounds: Any = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        ranks = dist.get_world_size(group)
        self.bounds = checked(bounds, ranks)
        self.is_square = source_bounds is None
        self.source_bounds = self.bounds if self.is_square else checked(source_bounds, ranks)
        self.group, self.rank = group, dist.get_rank(group)
        first, last = self.bounds[self.rank : self.rank + 2]
        self._check_edges(edge_index, first, last)
        columns, wanted = halo_of(edge_index[0], self.source_bounds, self.rank)
        self.halo = Halo(wanted, self.source_bounds, group, exchange_dtype)
        rows, n_sources = edge_index[1] - first, self.halo.n_local
        self.n_local, self.n_sources = last - first, n_sources
        n_halo, own = len(wanted), columns < n_sources
        #: All entries of the rows: (n_local, n_sources + n_halo), own vertices first.
        self.local = _graph(columns, rows, n_sources + n_halo, self.n_local)
        #: The edges whose source is on this rank and the others, and their graphs.
        self.edges = own.nonzero()[:, 0], (~own).nonzero()[:, 0]  # synchronize!
        self.own = _graph(columns[own], rows[own], n_sources, self.n_local)
        ends = columns[~own] - n_sources, rows[~own]
        self.rest = _graph(ends[0], ends[1], n_halo, self.n_local)
        self.n_edges = _sum(edge_index.shape[1], edge_index, group)

    @classmethod
    def of(cls, graph: Graph, bounds: Any, group: Any = None, **options: Any) -> "DistGraph":
        """Take the rows of this rank out of a graph that each rank has whole.

        Parameters
        ----------
        graph : Graph, shape (n, n), or (n_targets, n_sources) with ``source_bounds``
            Without values.
        bounds, group, **options
            As for ``DistGraph``.

        Raises
        ------
        UnsupportedError
            If the graph has values.
        """
        if graph.weighted:
            raise UnsupportedError(
                "graph has values, which a DistGraph has not: give graph.with_data(None), and to "
                "layers the values of this rank's edges as edge_weight."
            )
        bounds = checked(bounds, dist.get_world_size(group))
        rank = dist.get_rank(group)
        coo = graph.structure.tocoo()
        edges = torch.stack([to_tensor(end).long() for end in (coo.col, coo.row)])
        mine = (edges[1] >= bounds[rank]) & (edges[1] < bounds[rank + 1])
        return cls(edges[:, mine], bounds, group, **options)

    @classmethod
    def load(
        cls, folder: Any, group: Any = None, *, device: Any = "cpu", **options: Any
    ) -> "DistGraph":
        """Read the rows of this rank from a folder of ``write_partition``.

        Parameters
        ----------
        folder : path or Partition
            Of as many parts as there are ranks, or more: see ``read_part``, which has features,
            labels and edge weights too.
        group, **options
            As for ``DistGraph``.
        device : torch.device or str
            Where this rank computes.

        Raises
        ------
        ShapeError, FileFormatError, UnsupportedError, OSError
            As ``read_part``.
        """
        part = read_part(folder, dist.get_rank(group), dist.get_world_size(group))
        edges = torch.tensor(part.edge_index, device=device)
        return cls(edges, part.bounds, group, **options)

    @property
    def shape(self) -> tuple[int, int]:
        """(n_targets, n_sources) of the whole graph."""
        return self.bounds[-1], self.source_bounds[-1]

    @property
    def whole(self) -> Graph | None:
        """The graph itself, if there is one rank only: layers then run as ever."""
        return self.local if len(self.bounds) == 2 else None

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Part values of this rank's edges: those whose source it has, and the others."""
        n_edges = self.local.nnz
        if not isinstance(values, Tensor) or values.shape[:1] != (n_edges,):
            raise ShapeError(
                f"edge_weight has shape {tuple(getattr(values, 'shape', ()))} but this rank has "
                f"{n_edges} edges: give ({n_edges},), in the order of its edge_index."
            )
        own, rest = self.edges
        return values.index_select(0, own), values.index_select(0, rest)

    @cached_property
    def _degree(self) -> Tensor:
        found: Tensor = to_tensor(self.own.in_degree) + to_tensor(self.rest.in_degree)
        return found

    def inverse_degree(self, like: Tensor) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one, in that dtype."""

        def make() -> Tensor:
            return self._degree.clamp(min=1).double().reciprocal().to(like.dtype)

        return graph_tensors(self.own).kept(("inverse degree of all", like.dtype), make)

    def rows_of(self, x: Tensor) -> Tensor:
        """Give the rows of this rank of what has one for each target of the graph."""
        return x[self.bounds[self.rank] : self.bounds[self.rank + 1]]

    def sources_of(self, x: Tensor) -> Tensor:
        """Give the rows of this rank of what has one for each source of the graph."""
        return x[self.source_bounds[self.rank] : self.source_bounds[self.rank + 1]]

    def __repr__(self) -> str:
        return (
            f"DistGraph(rank {self.rank} of {len(self.bounds) - 1}: {self.n_local} of "
            f"{self.shape[0]} rows, {self.local.nnz} entries, {len(self.halo.vertices)} vertices "
            "of others)"
        )

    def _check_edges(self, edge_index: Any, first: int, last: int) -> None:
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
            ((0, self.source_bounds[-1]), (first, last)),
            ("a source", f"a target of rank {self.rank}"),
            strict=True,
        ):
            if len(end) and not (low <= int(end.min()) and int(end.max()) < high):  # synchronize!
                raise IndexRangeError(
                    f"edge_index names {int(end.min())} to {int(end.max())} where {what} lies from "
                    f"{low} to {high - 1}: give each rank the edges that lead to its own vertices."
                )


def _graph(columns: Tensor, rows: Tensor, n_cols: int, n_rows: int) -> Graph:
    """Make a graph of vertices that a rank has numbered: in int32, if that holds them."""
    edges = torch.stack([columns, rows])
    if max(n_cols, n_rows, len(rows)) < 2**31:
        edges = edges.int()
    return Graph.from_edge_index(edges, num_nodes=(n_cols, n_rows))


def _sum(count: int, like: Tensor, group: Any) -> int:
    """Add up a number of each rank."""
    total = torch.tensor(count, device=like.device)
    dist.all_reduce(total, group=group)
    return int(total)  # synchronize!
