"""A graph whose rows are shared out among the ranks of a process group."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd.tensors.prepare import graph_tensors
from ..errors import DtypeError, IndexRangeError, ShapeError, UnsupportedError
from ..formats import checks
from ..graph.graph import Graph
from ..interop.torch import to_tensor
from .aggregation import Aggregation
from .agreement import on_all_ranks
from .halo import Halo, check_exchange_dtype, halo_of, numbered_graph
from .parts.files import read_part
from .parts.rows import checked


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
        Bounds of the sources, if they are other vertices than the targets.
    exchange_dtype : torch.dtype, optional
        Dtype for travel: wider features and gradients are cast to it, ``torch.bfloat16`` for
        instance.  By default they travel as they are.  The same on all ranks.

    Raises
    ------
    DtypeError, ShapeError, IndexRangeError
        If ``edge_index``, ``bounds`` or another argument is not as above, on all ranks alike.
    RankError
        If arguments are wrong on some ranks, or differ between them: on all ranks, with the number
        of the rank.  Also on the other ranks if one fails by another error, such as MemoryError,
        which is raised as it is on its own.

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
        self.group, self.rank = group, dist.get_rank(group)
        self.is_square = source_bounds is None

        wanted: Any = None

        def prepare() -> dict[str, Any]:
            nonlocal wanted
            ranks = dist.get_world_size(group)
            self.bounds = checked(bounds, ranks)
            self.source_bounds = self.bounds if self.is_square else checked(source_bounds, ranks)
            check_exchange_dtype(exchange_dtype)
            self._check_edges(edge_index, *self.bounds[self.rank : self.rank + 2])
            wanted = self._number(edge_index)
            sources = None if self.is_square else self.source_bounds
            alike: dict[str, Any] = {"bounds": self.bounds, "source_bounds": sources}
            alike |= {"exchange_dtype": str(exchange_dtype), "SPARSEFMT_DEBUG": checks.DEBUG}
            return alike

        on_all_ranks(prepare, group, getattr(edge_index, "device", None), alike=True)
        self.halo = Halo(wanted, self.source_bounds, group, exchange_dtype)
        self.n_edges = _sum(edge_index.shape[1], edge_index, group)

    def _number(self, edge_index: Tensor) -> Tensor:
        """Make the graphs of this rank's edges; the vertices that it reads of others."""
        first, last = self.bounds[self.rank : self.rank + 2]
        begin, end = self.source_bounds[self.rank : self.rank + 2]
        columns, wanted = halo_of(edge_index[0], self.source_bounds, self.rank)
        self.n_local, self.n_sources = last - first, end - begin
        rows, n_sources, n_halo = edge_index[1] - first, end - begin, len(wanted)
        #: All entries of the rows: (n_local, n_sources + n_halo), own vertices first.
        self.local = numbered_graph(columns, rows, n_sources + n_halo, self.n_local)
        self._is_own = own = columns < n_sources
        #: The graphs of the edges whose source is on this rank, and of the others.
        self.own = numbered_graph(columns[own], rows[own], n_sources, self.n_local)
        ends = columns[~own] - n_sources, rows[~own]
        self.rest = numbered_graph(ends[0], ends[1], n_halo, self.n_local)
        return wanted

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
        DtypeError, ShapeError
            If it is no Graph, or bounds do not end with its rows and columns.
        UnsupportedError
            If the graph has values.
        RankError
            As ``DistGraph``.
        """

        def rows() -> Tensor:
            if not isinstance(graph, Graph):
                raise DtypeError(
                    f"graph is a {type(graph).__name__}: give a sparsefmt.Graph, or use "
                    "DistGraph(edge_index, bounds) for the edges of this rank."
                )
            if graph.weighted:
                raise UnsupportedError(
                    "graph has values, which a DistGraph has not: give graph.with_data(None), and "
                    "to layers the values of this rank's edges as edge_weight."
                )
            rank = dist.get_rank(group)
            ends = checked(bounds, dist.get_world_size(group))
            _check_ends(graph.shape, ends, options.get("source_bounds"))
            first, last = ends[rank : rank + 2]
            coo = graph.structure.tocoo()
            edges = torch.stack([to_tensor(end).long() for end in (coo.col, coo.row)])
            return edges[:, (edges[1] >= first) & (edges[1] < last)]

        edges = on_all_ranks(rows, group, _device(getattr(graph, "device", "cpu")))
        return cls(edges, bounds, group, **options)

    @classmethod
    def load(
        cls,
        folder: Any,
        group: Any = None,
        *,
        device: Any = "cpu",
        weights: bool = True,
        **options: Any,
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
        weights : bool
            Whether edge weights of the folder count: a DistGraph has none, so that a folder with
            some is refused unless this is False, and layers get them as ``edge_weight``.

        Raises
        ------
        ShapeError, FileFormatError, UnsupportedError, OSError
            As ``read_part``, on all ranks alike; UnsupportedError also for ``weights``.
        RankError
            If that is so on some ranks, or as ``DistGraph``.
        """

        def read() -> Any:
            part = read_part(folder, dist.get_rank(group), dist.get_world_size(group))
            if weights and part.edge_weight is not None:
                raise UnsupportedError(
                    "the folder has edge weights, which a DistGraph has not: give weights=False, "
                    "and to layers those of read_part(folder, rank, ranks) as edge_weight."
                )
            return torch.tensor(part.edge_index, device=device), part.bounds

        edges, bounds = on_all_ranks(read, group, _device(device))
        return cls(edges, bounds, group, **options)

    @property
    def shape(self) -> tuple[int, int]:
        """(n_targets, n_sources) of the whole graph."""
        return self.bounds[-1], self.source_bounds[-1]

    @cached_property
    def square(self) -> Graph:
        """``local`` with a row, without entries, for each vertex of the halo too."""
        coo = self.local.structure.tocoo()
        n = self.local.shape[1]
        with torch.inference_mode(False):  # training may save its arrays
            return numbered_graph(to_tensor(coo.col), to_tensor(coo.row), n, n)

    @property
    def whole(self) -> Graph | None:
        """The graph itself, if there is one rank only: layers then run as ever."""
        return self.local if len(self.bounds) == 2 else None

    def forget(self) -> None:
        """Forget the rows of others that were received for features without a gradient.

        To be called on all ranks, which exchange them again then.  Needed after a write that torch
        does not count: by a collective of ``torch.distributed``, NumPy, CuPy or ``.data``.
        """
        self.halo.memory.clear()

    @cached_property
    def edges(self) -> tuple[Tensor, Tensor]:
        """The numbers of the edges whose source is on this rank, and of the others."""
        with torch.inference_mode(False):  # training may save them
            own, rest = self._is_own.nonzero(), (~self._is_own).nonzero()  # synchronize!
            return own[:, 0], rest[:, 0]

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Part values of this rank's edges: those whose source it has, and the others."""
        n_edges = self.local.nnz
        if not isinstance(values, Tensor):
            raise DtypeError(f"edge_weight is a {type(values).__name__}: give a torch.Tensor.")
        if values.shape[:1] != (n_edges,):
            raise ShapeError(
                f"edge_weight has shape {tuple(values.shape)} but this rank has "
                f"{n_edges} edges: give ({n_edges},), in the order of its edge_index."
            )
        own, rest = self.edges
        return values.index_select(0, own), values.index_select(0, rest)

    @cached_property
    def _degree(self) -> Tensor:
        found: Tensor = to_tensor(self.own.in_degree) + to_tensor(self.rest.in_degree)
        return found

    def inverse_degree(self, like: Tensor) -> Tensor:
        """Return one over the number of entries of each row, 1 for an empty one.

        In the dtype in which features like these are summed, float32 at least.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)

        def make() -> Tensor:
            return self._degree.clamp(min=1).double().reciprocal().to(dtype)

        return graph_tensors(self.own).kept(("inverse degree of all", dtype), make)

    def rows_of(self, x: Tensor) -> Tensor:
        """Take this rank's rows of a tensor with a row for each target."""
        return x[self.bounds[self.rank] : self.bounds[self.rank + 1]]

    def sources_of(self, x: Tensor) -> Tensor:
        """Take this rank's rows of a tensor with a row for each source."""
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


def _device(given: Any) -> torch.device | None:
    """Give a device, or None for what is none, which fails where it is used."""
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        return None


def _check_ends(shape: tuple[int, int], bounds: tuple[int, ...], source_bounds: Any) -> None:
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


def _sum(count: int, like: Tensor, group: Any) -> int:
    """Add up a number of each rank."""
    total = torch.tensor(count, device=like.device)
    dist.all_reduce(total, group=group)
    return int(total)  # synchronize!
