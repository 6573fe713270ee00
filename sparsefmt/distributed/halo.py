"""Features of vertices that other ranks own: their numbers are exchanged once, rows in each layer.

The halo of a rank are the vertices of other ranks whose features it needs, in the order of their
numbers, and so by owner: each rank owns a range of numbers.  Each layer sends copies of own rows to
the ranks that asked for them; backward sends gradients of the copies back to the owners, which add
them up in a fixed order.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..autograd import spmm
from ..autograd.engine.recording import once_differentiable
from ..autograd.tensors.edge_index import state_of
from ..errors import DtypeError, IndexRangeError, ShapeError, UnsupportedError
from ..formats import checks
from ..graph.graph import Graph
from .agreement import Group, debugging, on_all_ranks

#: Contexts of autograd's functions, on which attributes are set.
Ctx: TypeAlias = Any
#: Dtypes in which features may travel.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Tensors without a gradient whose received rows a graph remembers at a time.
REMEMBERED = 8
#: Share of the rows that an all-gather would bring, from which on it replaces the exchange of the
#: rows that each rank asked for.
GATHERED = 0.8
#: For the error of a second derivative: what has none, and what to do instead.
EXCHANGED = "features that ranks exchange"
INSTEAD = "compute on one process, with a Graph"
#: torch 2.13 has renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass
class Traffic:
    """Counts of what a rank has sent: ``exchanges`` begun, and their ``nbytes``."""

    exchanges: int = 0
    nbytes: int = 0


class Halo:
    """The vertices whose features a rank needs from others, and those that others need from it.

    ``vertices``, (n_halo,), are numbers of vertices that others own, ascending and distinct.  Rank
    r owns the numbers from ``bounds[r]`` to below ``bounds[r + 1]``.  Wider features travel as
    ``exchange_dtype``, if given.  All ranks make their halos at the same time, or wait for ever.
    """

    def __init__(
        self, vertices: Tensor, bounds: tuple[int, ...], group: Group,
        exchange_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.vertices, self.group, self.exchange_dtype = vertices, group, exchange_dtype
        self.traffic, self.rank = Traffic(), dist.get_rank(group)
        self.n_local = bounds[self.rank + 1] - bounds[self.rank]
        borders = torch.tensor(bounds, device=vertices.device)
        received = torch.searchsorted(vertices, borders).diff()
        sent = torch.empty_like(received)
        dist.all_to_all_single(sent, received, group=group)
        #: How many rows come from each rank, and go to each.
        self.received: list[int] = received.tolist()  # synchronize!
        self.sent: list[int] = sent.tolist()
        asked = vertices.new_empty(sum(self.sent))
        sizes = self.sent, self.received
        dist.all_to_all_single(asked, vertices.contiguous(), *sizes, group=group)
        #: Places of own rows to send, sorted by the rank that asked for them; some repeat.
        self.rows = asked - bounds[self.rank]
        total = torch.tensor(len(vertices), device=vertices.device)
        dist.all_reduce(total, group=group)
        #: How many rows all ranks together receive: all of them decide by the same number.
        self.n_received = int(total)  # synchronize!
        self.gathered: Gathered | None = None
        ranks, most = len(bounds) - 1, max(b - a for a, b in pairwise(bounds))
        if self.n_received and self.n_received >= GATHERED * ranks * (ranks - 1) * most:
            owner = torch.searchsorted(borders[1:], vertices, right=True)
            self.gathered = Gathered(most, ranks, owner * most + vertices - borders[owner])
        self.memory = ReceivedRows(any(a == b for a, b in pairwise(bounds)))

    @cached_property
    def ones(self) -> Graph:
        """Return the matrix of ones that adds returned gradients to own rows: (n_local, n_sent)."""
        copies = torch.arange(len(self.rows), device=self.rows.device)
        return numbered_graph(copies, self.rows, len(self.rows), self.n_local)

    def start(self, x: Tensor) -> "Exchange":
        """Begin to send rows of ``x``, (n_local, ...), and to receive the halo's, differentiably.

        Rows of a tensor without a gradient are remembered, and do not travel again until it is
        changed or gone, or eight others were used since.  Write nothing to ``x`` before ``finish``.
        """
        constant = not x.requires_grad and self.memory.accepts(x)
        remembered = self.memory.rows_of(x) if constant else None
        if checks.DEBUG:
            self.compare(x, remembered is not None)
        exchange = Exchange(self, remembered)
        if remembered is None:
            if constant and not torch.is_inference_mode_enabled():
                exchange.constant = x, state_of(x)
            exchange.link = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
        return exchange

    def compare(self, x: Tensor, remembered: bool) -> None:
        """Raise on all ranks, with SPARSEFMT_DEBUG=1, if their exchanges differ."""
        if debugging(x.device):
            facts = {
                "the call": "an exchange",
                "x.dtype": str(x.dtype),
                "x.shape[1:]": tuple(x.shape[1:]),
                "x.requires_grad": x.requires_grad,
                "torch.is_grad_enabled()": torch.is_grad_enabled(),
                "whether x is as it was exchanged": remembered,
            }
            on_all_ranks(lambda: facts, self.group, x.device, alike=True)

    def send(self, x: Tensor) -> "Parcel":
        """Begin to send own rows to the ranks that asked for them, or all of them to all ranks."""
        if self.gathered is None:
            return self.exchange_rows(x.index_select(0, self.rows), self.sent, self.received)
        most, ranks, _ = self.gathered
        if len(x) < most:
            x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        return self.exchange_rows(x.contiguous(), None, [most] * ranks)

    def exchange_rows(self, rows: Tensor, sent: list[int] | None, received: list[int]) -> "Parcel":
        """Begin to send ``sent[r]`` rows to rank r, or all rows to all for None, and to receive."""
        narrow = self.exchange_dtype
        if narrow is not None and rows.is_floating_point() and rows.itemsize > narrow.itemsize:
            rows = rows.to(narrow)
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        self.traffic.exchanges += 1
        options: Any = {"group": self.group, "async_op": True}
        if sent is None:
            self.traffic.nbytes += (len(received) - 1) * rows.nbytes
            return Parcel(into, rows, _all_gather(into, rows, **options))
        self.traffic.nbytes += rows.nbytes
        work = dist.all_to_all_single(into, rows, received, sent, **options)
        return Parcel(into, rows, work)

    def receive(self, parcel: "Parcel") -> Tensor:
        """Wait for the rows of a parcel, and return those of the halo."""
        parcel.work.wait()
        gathered = self.gathered
        return parcel.into if gathered is None else parcel.into.index_select(0, gathered.places)


class Gathered(NamedTuple):
    """An all-gather of ``most`` rows from each of the ``ranks``; ``places`` of the halo in them."""

    most: int
    ranks: int
    places: Tensor


class Parcel(NamedTuple):
    """Rows on their way: memory for those that come, those that leave, and torch's ``Work``."""

    into: Tensor
    rows: Tensor
    work: Any


class ReceivedRows:
    """The rows received for the last few tensors without a gradient.

    A tensor is known by the memory that it views and by ``state_of``: its version and address.  All
    ranks must remember the same, or some would wait for ever: so they write to their tensors alike,
    and forget by the order of calls, never by when memory is freed.  If ``some_empty``, a rank has
    no vertices and cannot tell views of one tensor apart: then no rank remembers views.
    """

    def __init__(self, some_empty: bool) -> None:
        self.some_empty = some_empty
        self.times_cleared = 0  #: results for constant features made before it rose are stale
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        """Count the tensors whose rows are remembered."""
        return sum(bool(entry.rows) for entry in self._entries)

    def __deepcopy__(self, memo: object) -> "ReceivedRows":
        """Return a memory without rows."""
        return ReceivedRows(self.some_empty)

    def accepts(self, x: Tensor) -> bool:
        """Return True if rows of such a tensor may be remembered; not in a CUDA graph's capture."""
        if x.is_inference() or (self.some_empty and x._base is not None):
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Return the rows of a tensor, for the current stream to read, or None."""
        for place, entry in enumerate(self._entries):
            if entry.is_of(x) and entry.state == state_of(x):
                self._entries.append(self._entries.pop(place))
                return entry.read()
        return None

    def put(self, x: Tensor, state: Any, rows: Tensor) -> None:
        """Remember rows of a tensor, and its state when they were sent; forget the oldest rows."""
        entries = [entry for entry in self._entries if not entry.is_of(x)]
        self._entries = [*entries[1 - REMEMBERED :], _Entry(x, state, rows)]

    def clear(self) -> None:
        """Remove all rows that were received for tensors without a gradient."""
        self._entries = []
        self.times_cleared += 1


class _Entry:
    """A tensor, its state when its rows were sent, and the rows received for it."""

    def __init__(self, x: Tensor, state: Any, rows: Tensor) -> None:
        #: Empty once the tensor is gone; the entry stays and counts, as on the other ranks.
        self.rows = alive = [rows]
        base, self.view = _identity(x)
        self.tensor, self.state = ref(base, lambda _: alive.clear()), state
        self.stream: Any = torch.cuda.current_stream(rows.device) if rows.is_cuda else None
        self.made: Any = None if self.stream is None else self.stream.record_event()

    def is_of(self, x: Tensor) -> bool:
        """Return True if the entry is of this tensor, in whatever state."""
        base, view = _identity(x)
        return self.tensor() is base and self.view == view

    def read(self) -> Tensor:
        """Return the rows; the current stream waits for the one that received them."""
        (rows,) = self.rows
        if self.stream is not None:
            current = torch.cuda.current_stream(rows.device)
            if current != self.stream:
                current.wait_event(self.made)
                rows.record_stream(current)
        return rows


def _identity(x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the tensor that owns the memory of ``x``, and what tells its views apart."""
    base = x if x._base is None else x._base
    return base, (x.storage_offset(), x.shape, x.stride(), x.dtype)


@dataclass(eq=False)
class Exchange:
    """One exchange of own rows for those of the halo, and in backward of their gradients.

    Call ``finish`` once.  Autograd knows by ``link``, an empty tensor, that ``_Finish`` is behind
    ``_Start``.  Backward sends gradients in ``_Finish``, and waits for them in ``_Start``.
    """

    halo: Halo
    remembered: Tensor | None = None  #: rows of the halo that need not travel
    #: The tensor whose rows are to be remembered, and its state when they were sent.
    constant: tuple[Tensor, Any] | None = None
    features: Parcel | None = None  #: from ``_Start`` to ``_Finish``, in forward
    gradients: Parcel | None = None  #: from ``_Finish`` to ``_Start``, in backward
    link: Tensor | None = None

    def finish(self) -> Tensor:
        """Wait for the rows of the halo, (n_halo, ...): with NCCL the stream does, not the host."""
        if self.remembered is not None:
            return self.remembered
        link, self.link = self.link, None  # it holds this exchange: a cycle would stay in memory
        received: Tensor = _Finish.apply(link, self)  # type: ignore[no-untyped-call]
        if self.constant is not None:
            self.halo.memory.put(*self.constant, received)
            self.constant = None
        return received

    def add_up(self, like: Tensor) -> Tensor:
        """Wait for gradients of copies of own rows; add them to one for each row, in that dtype."""
        if self.gradients is None:
            raise UnsupportedError("what an exchange receives was not finished: call finish().")
        parcel, self.gradients = self.gradients, None
        parcel.work.wait()
        received = parcel.into.to(like.dtype)
        rows = received.flatten(1) if received.dim() > 1 else received[:, None]
        total = spmm(self.halo.ones, rows)
        return total.view(len(total), *received.shape[1:])


class _Start(Function):
    """Begin to send own rows; backward waits for their gradients and adds them up."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.features = exchange.halo.send(x.detach())
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Ctx, like: Tensor) -> tuple[Tensor, None]:
        return once_differentiable(EXCHANGED, ctx.exchange.add_up, like, instead=INSTEAD), None


class _Finish(Function):
    """Wait for the rows of the halo; backward begins to send their gradients to the owners."""

    @staticmethod
    def forward(ctx: Ctx, link: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, parcel = exchange, cast(Parcel, exchange.features)
        exchange.features = None
        return exchange.halo.receive(parcel).to(link.dtype)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor, None]:
        def send_back(grad: Tensor) -> Tensor:
            halo = ctx.exchange.halo
            ctx.exchange.gradients = halo.exchange_rows(grad.contiguous(), halo.received, halo.sent)
            return grad.new_empty(0)

        return once_differentiable(EXCHANGED, send_back, grad, instead=INSTEAD), None


def check_edges(edge_index: object, n_sources: int, targets: slice, rank: int) -> None:
    """Check that sources are vertices of the graph, and targets vertices of this rank."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype is not torch.int64:
        kind = getattr(edge_index, "dtype", type(edge_index).__name__)
        raise DtypeError(f"edge_index is {kind}: give a tensor of torch.int64.")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ShapeError(
            f"edge_index has shape {tuple(edge_index.shape)}: give (2, n_edges), sources and "
            "targets."
        )
    of_targets = edge_index[1], f"a target of rank {rank}", targets.start, targets.stop
    for end, name, low, high in ((edge_index[0], "a source", 0, n_sources), of_targets):
        if len(end) and not (low <= int(end.min()) and int(end.max()) < high):  # synchronize!
            raise IndexRangeError(
                f"edge_index names {int(end.min())} to {int(end.max())} where {name} lies from "
                f"{low} to {high - 1}: give each rank the edges to its vertices, by global ids."
            )


def halo_of(columns: Tensor, bounds: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Number columns anew, own vertices before the halo; return them, and the halo, ascending."""
    first, last = bounds[rank], bounds[rank + 1]
    own = (columns >= first) & (columns < last)
    halo = torch.unique(columns[~own])  # synchronize!
    outside = torch.searchsorted(halo, columns) + (last - first)
    return torch.where(own, columns - first, outside), halo


def numbered_graph(columns: Tensor, rows: Tensor, n_cols: int, n_rows: int) -> Graph:
    """Build a graph of edges between vertices in this rank's numbers, in int32 if that will do."""
    edges = torch.stack([columns, rows])
    if max(n_cols, n_rows, len(rows)) < 2**31:
        edges = edges.int()
    return Graph.from_edge_index(edges, num_nodes=(n_cols, n_rows))
