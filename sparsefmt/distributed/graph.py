"""A graph whose rows are shared out among the ranks of a process group."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..autograd import gat_aggregate, sampled_aggregate, sddmm, spmm
from ..autograd.cbsr import Largest
from ..autograd.engine import checks as tensor_checks
from ..autograd.engine import library
from ..autograd.tensors.prepare import tensors_of
from ..autograd.tensors.shared import Shared
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..formats import checks
from ..graph.graph import Graph
from ..interop.torch import to_tensor
from ..model.layers import edges_with_loops
from .agreement import Group, on_all_ranks, on_device
from .halo import FLOATING, Halo, check_edges, halo_of, numbered_graph
from .parts.files import Partition, read_part
from .parts.rows import check_ends, checked
from .products import checked_weights, dist_spmm, maxk_product

T = TypeVar("T")

#: A row that is exchanged costs as much as so many that are gathered: 352 GB/s leave an H100, which
#: gathers 3.4 TB/s with ids shuffled and 8.9 with communities in a row.  For layers without a plan,
#: which compare rows with rows; ``NVLINK`` of ``plan/pricing.py`` is the same link in seconds, from
#: a fit to two H200, since a plan adds them to those of other primitives.
ROWS_OF_EXCHANGE = 10
#: Features without a gradient up to which they travel, once, and each rank maps those of the halo
#: again.  A weight of a map takes an H100 0.09 ps of a vertex in both directions; a mapped feature
#: that is received, and whose gradient returns, 26 ps: as long as 290 weights.
MAPPED_AGAIN = 256


class DistGraph(Shared):
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
        bounds: Sequence[int],
        group: Group = None,
        *,
        source_bounds: Sequence[int] | None = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.is_square = source_bounds is None
        halo: Any = None

        def prepare() -> dict[str, Any]:
            nonlocal halo
            ranks = dist.get_world_size(group)
            self.bounds = checked(bounds, ranks)
            borders = self.bounds if source_bounds is None else source_bounds
            self.source_bounds = checked(borders, ranks)
            if exchange_dtype is not None and exchange_dtype not in FLOATING:
                raise DtypeError(
                    f"exchange_dtype is {exchange_dtype!r}: give torch.bfloat16, float16, float32 "
                    "or float64."
                )
            self._targets = slice(*self.bounds[self.rank : self.rank + 2])
            self._sources = slice(*self.source_bounds[self.rank : self.rank + 2])
            check_edges(edge_index, self.source_bounds[-1], self._targets, self.rank)
            columns, halo = halo_of(edge_index[0], self.source_bounds, self.rank)
            self.n_local = self._targets.stop - self._targets.start
            self.n_sources = self._sources.stop - self._sources.start
            rows = edge_index[1] - self._targets.start
            self._build(columns, rows, len(halo))
            ends = columns[~self._is_local] - self.n_sources, rows[~self._is_local]
            #: The graph of the edges whose source is in the halo, and their number.
            self.rest, self.n_rest = numbered_graph(*ends, len(halo), self.n_local), len(ends[0])
            sources = None if self.is_square else self.source_bounds
            alike = {"exchange_dtype": str(exchange_dtype), "SPARSEFMT_DEBUG": checks.DEBUG}
            return {"bounds": self.bounds, "source_bounds": sources, **alike}

        on_all_ranks(prepare, group, getattr(edge_index, "device", None), alike=True)
        self.halo = Halo(halo, self.source_bounds, group, exchange_dtype)
        total = torch.tensor(edge_index.shape[1], device=edge_index.device)
        dist.all_reduce(total, group=group)
        #: Edges of all ranks.
        self.n_edges = int(total)  # synchronize!

    def _build(self, columns: Tensor, rows: Tensor, n_halo: int) -> None:
        """Build the graph of all entries, and that of those whose source is on this rank."""
        #: All entries of the rows: (n_local, n_sources + n_halo), own vertices first.
        self.local = numbered_graph(columns, rows, self.n_sources + n_halo, self.n_local)
        #: The graph itself, if there is one rank only: layers take it then.
        self.complete = self.local if len(self.bounds) == 2 else None
        self._is_local = own = columns < self.n_sources
        #: The graph of the edges whose source is on this rank.
        self.own = numbered_graph(columns[own], rows[own], self.n_sources, self.n_local)

    @classmethod
    def of(
        cls, graph: Graph, bounds: Sequence[int], group: Group = None, **options: Any
    ) -> "DistGraph":
        """Build the rows of this rank from a graph that each rank has complete.

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
            ends = checked(bounds, dist.get_world_size(group))
            check_ends(graph.shape, ends, options.get("source_bounds"))
            first, last = ends[dist.get_rank(group) :][:2]
            coo = graph.structure.tocoo()
            edges = torch.stack([to_tensor(end).long() for end in (coo.col, coo.row)])
            return edges[:, (edges[1] >= first) & (edges[1] < last)]

        edges = on_all_ranks(rows, group, _device_of(getattr(graph, "device", "cpu")))
        return cls(edges, bounds, group, **options)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str] | Partition,
        group: Group = None,
        *,
        device: torch.device | str = "cpu",
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

        edges, bounds = on_all_ranks(read, group, _device_of(device))
        return cls(edges, bounds, group, **options)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the whole graph, (n_targets, n_sources)."""
        return self.bounds[-1], self.source_bounds[-1]

    @cached_property
    def square(self) -> Graph:
        """Return the graph ``local`` with an empty row for each vertex of the halo too."""
        coo = self.local.structure.tocoo()
        n = self.local.shape[1]
        with torch.inference_mode(False):  # training may save its arrays
            return numbered_graph(to_tensor(coo.col), to_tensor(coo.row), n, n)

    def forget(self) -> None:
        """Remove the rows that were received for features without a gradient.

        To be called on all ranks, which exchange them again then.  Needed after a write that torch
        does not count: by a collective of ``torch.distributed``, NumPy, CuPy or ``.data``.
        """
        self.halo.memory.clear()

    @property
    def times_forgotten(self) -> int:
        """Return how often ``forget`` was called: constant results made before are stale."""
        return self.halo.memory.times_cleared

    def rows_of(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with a row for each target."""
        return x[self._targets]

    def sources_of(self, x: Tensor) -> Tensor:
        """Return this rank's rows of a tensor with a row for each source."""
        return x[self._sources]

    def spmm(
        self, x: Tensor, edge_weight: Tensor | None = None, *, reduce: str = "sum", **scales: Any
    ) -> Tensor:
        """Aggregate features by ``dist_spmm``, or for a max or min after the exchange."""
        if reduce in ("sum", "mean"):
            return dist_spmm(self, x, edge_weight, reduce=reduce, **scales)
        return spmm(self.local, self._scaled(x, scales), edge_weight, reduce=reduce, **scales)

    def maxk_aggregate(
        self, x: Tensor | Largest, k: int | None, edge_weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Aggregate the ``k`` largest features, which alone are exchanged."""
        return maxk_product(self, x, k, edge_weight, **options)[0]

    def sampled_aggregate(
        self, x: Tensor, width: int, edge_weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Aggregate a sample of each row, after the exchange."""
        x = self._scaled(x, options)
        return sampled_aggregate(self.local, x, width, edge_weight, **options)

    def aggregate_with_own(
        self, x: Tensor | Largest, own: Tensor, edge_weight: Tensor | None = None, *,
        k: int | None = None, without: Tensor | None = None, **scales: Any,
    ) -> Tensor:  # fmt: skip
        """Aggregate features, and add a part of each vertex's own."""
        if k is None and not isinstance(x, Largest):
            y, part = self.spmm(x, edge_weight, **scales), x
        else:
            y, largest = maxk_product(self, x, k, edge_weight, **scales)
            part = largest.dense()
        part = part.to(y.dtype)
        own = own.to(y.dtype) if own.element_size() == 2 else own
        return torch.addcmul(y, own, part if without is None else part.masked_fill(without, 0))

    def propagate(self, x: Tensor, scale: Tensor, own: Tensor, **options: Any) -> Tensor:
        """Propagate features by symmetric factors, as GCN does."""
        bias, own = options.pop("bias", None), own.to(x.dtype)
        without = options.get("without")
        options["without"] = own == 0 if without is None else without | (own == 0)
        y = self.aggregate_with_own(x, own, row_scale=scale, col_scale=scale, **options)
        return y if bias is None else y + bias.to(y.dtype)

    def gat_aggregate(self, x: Tensor, el: Tensor, er: Tensor, **options: Any) -> Tensor:
        """Aggregate by attention of one head, as ``autograd.gat_aggregate``: (n_local, feat)."""
        if x.requires_grad:  # scores travel with the features; constant features may have come
            both = self.extended(torch.cat([x, el[:, None].to(x.dtype)], 1))
            x, el = both[:, :-1].contiguous(), both[:, -1]  # kernels would copy it, twice
        else:
            x, el = self.extended(x), self.extended(el)
        er = torch.cat([er, er.new_zeros(len(x) - len(er))])
        return gat_aggregate(self.square, x, el, er, **options)[: self.n_local]

    def operands(
        self, x: Tensor, edge_weight: Tensor | None = None, *scales: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Check features, edge values and scales, and cast them as autocast would."""
        both = scales or (None, None)
        checked_weights(self, x, edge_weight, "sum", *both)
        narrow, weight, rows, cols = library.narrowed(x.device.type, x, edge_weight, *both)
        stays = edge_weight is None or not x.requires_grad
        return x if stays else narrow, weight, rows, cols

    def extended(self, x: Tensor) -> Tensor:
        """Join the features of this rank and of its halo: (n_sources + n_halo, ...)."""
        self.check("x", x, dims=None)
        return torch.cat([x, self.halo.start(x).finish()])

    def sends_first(self, x: Tensor, width: int) -> bool:
        """Return True if features travel before they are mapped to that width.

        The narrower ones do, and in training those without a gradient, which travel once, if a
        rank does not map the rows of its halo for longer than it would receive them.
        """
        stays = torch.is_grad_enabled() and not x.requires_grad
        return x.shape[-1] <= (max(width, MAPPED_AGAIN) if stays else width)

    def maps_first(self, x: Tensor, width: int) -> bool:
        """Return True if features are mapped before they travel and are summed.

        Those without a gradient travel once, and are not summed in backward.
        """
        if x.requires_grad:
            return width < x.shape[-1]
        passes = 2 if torch.is_grad_enabled() else 1
        rows = self.n_edges + ROWS_OF_EXCHANGE * self.halo.n_received
        return passes * width * rows < x.shape[-1] * self.n_edges

    def mean_scale(self, like: Tensor, row_scale: Tensor | None) -> Tensor:
        """Return the scale of rows that makes a mean of a sum of features like these."""
        dtype = torch.promote_types(like.dtype, torch.float32)

        def make() -> Tensor:
            degree: Tensor = to_tensor(self.own.in_degree) + to_tensor(self.rest.in_degree)
            return degree.clamp(min=1).double().reciprocal().to(dtype)

        inverse = tensors_of(self.own).cached(("inverse degree of all", dtype), make)
        return inverse if row_scale is None else row_scale * inverse

    def scaled_entries(self, row: Tensor | None, col: Tensor | None) -> Tensor:
        """Multiply the factors of the target and the source of each edge: (n_edges,)."""
        like = cast(Tensor, row if col is None else col)  # a rule gives one of them
        row = like.new_ones(self.n_local) if row is None else row
        col = like.new_ones(self.local.shape[1]) if col is None else self.extended(col)
        return sddmm(self.local, row[:, None], col[:, None])

    def numbered(self, edge_index: Tensor) -> Tensor:
        """Return sources and targets of ``local`` by their numbers in the whole graph."""
        own = torch.arange(self._sources.start, self._sources.stop, device=edge_index.device)
        sources = torch.cat([own, self.halo.vertices])
        return torch.stack([sources[edge_index[0]], edge_index[1] + self._targets.start])

    @cached_property
    def edges(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of edges whose source is on this rank, and of those from the halo."""
        with torch.inference_mode(False):  # training may save them
            return self._is_local.nonzero()[:, 0], (~self._is_local).nonzero()[:, 0]  # synchronize!

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split values of this rank's edges: those whose source it has, and the rest."""
        n_edges = self.local.nnz
        tensor_checks.tensor("edge_weight", values)
        if values.shape[:1] != (n_edges,):
            raise ShapeError(
                f"edge_weight has shape {tuple(values.shape)} but this rank has "
                f"{n_edges} edges: give ({n_edges},), in the order of its edge_index."
            )
        own, rest = self.edges
        return values.index_select(0, own), values.index_select(0, rest)

    def looped(self, which: str) -> "DistGraph":
        """Add loops to vertices, as the planner's ``with_loops``: nothing of them travels.

        The new graph has the same halo, and nothing that was built of this one.
        """
        coo = self.local.structure.tocoo()
        ends = to_tensor(coo.col).long(), to_tensor(coo.row).long()
        (columns, rows), _, _ = edges_with_loops(*ends, self.n_local, which)
        looped, busiest = copy(self), self.busiest
        for name in ("square", "edges"):
            vars(looped).pop(name, None)
        looped._build(columns, rows, len(self.halo.vertices))
        looped.busiest = busiest | {name: busiest[name] + busiest["n"] for name in ("nnz", "own")}
        return looped  # at most so many

    @cached_property
    def busiest(self) -> dict[str, int]:
        """Return the most of rows, entries, exchanged rows and own entries that any rank has.

        To be asked for on all ranks at the same time.
        """
        received, sent = len(self.halo.vertices), sum(self.halo.sent)
        if self.halo.gathered is not None:
            received = sent = (self.halo.gathered.ranks - 1) * self.halo.gathered.most
        counts = self.n_local, self.local.nnz, max(received, sent), self.n_rest
        most = torch.tensor(counts, device=self.halo.vertices.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        n, nnz, exchanged, rest = map(int, most.tolist())  # synchronize!
        return {"n": n, "nnz": nnz, "halo": exchanged, "own": max(0, nnz - rest)}

    def bytes_between(self, x: Tensor) -> int:
        """Return the bytes of a feature of ``x`` on its way to another rank."""
        narrow = self.halo.exchange_dtype
        return x.itemsize if narrow is None else min(x.itemsize, narrow.itemsize)

    def agreed(self, facts: Callable[[], Mapping[str, Any]], own: Callable[[], T]) -> T:
        """Check as ``on_all_ranks`` that facts are alike; return ``own()`` of the first rank."""
        device, answer = self.halo.vertices.device, list[Any]()

        def prepare() -> Any:
            result = facts()
            answer.append(own() if self.rank == 0 else None)
            return result

        on_all_ranks(prepare, self.group, device, alike=True)
        with on_device(device):
            dist.broadcast_object_list(answer, group_src=0, group=self.group)
        return cast(T, answer[0])

    def check(self, name: str, x: Tensor, *, of: str = "sources", dims: int | None = 2) -> None:
        """Check for floating features, a row for each source or target of this rank."""
        tensor_checks.tensor(name, x)
        n = self.n_sources if of == "sources" else self.n_local
        if x.shape[:1] != (n,) or (dims is not None and x.dim() != dims):
            rows = "rows_of" if self.is_square or of == "targets" else "sources_of"
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)} but this rank has {n} {of}: give ({n}, feat), "
                f"graph.{rows}(x) of all features for instance."
            )
        if dims is not None and not x.is_floating_point():
            raise DtypeError(
                f"{name} is {x.dtype}: give floating numbers, {name}.float() for instance."
            )
        if x.device != self.halo.vertices.device:
            tensor_checks.on_device(name, x, self.local, "move one of them")

    def _scaled(self, x: Tensor, scales: dict[str, Any]) -> Tensor:
        """Exchange features, multiplied by the scale of sources, which leaves ``scales``."""
        self.check("x", x)
        scale = scales.pop("col_scale", None)
        return self.extended(x if scale is None else x * scale[:, None].to(x.dtype))

    def __repr__(self) -> str:
        return (
            f"DistGraph(rank {self.rank} of {len(self.bounds) - 1}: {self.n_local} of "
            f"{self.shape[0]} rows, {self.local.nnz} entries, {len(self.halo.vertices)} vertices "
            "of others)"
        )


def _device_of(value: Any) -> torch.device | None:
    """Return a device, or None for what is none, which fails where it is used."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError):
        return None
