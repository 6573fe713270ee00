"""Features of vertices that other ranks own: their numbers are exchanged once, rows in each layer.

The halo of a rank consists of the vertices that its rows name and other ranks own, in the order of
their numbers, and so by owner.  A rank sends copies of its own rows, to each rank those that this
one has asked for; gradients return to the owners, and add up in a fixed order.
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
#: What cannot be differentiated again, and what can.
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
    """The vertices that a rank reads of others, and those that others read of it.

    ``vertices``, (n_halo,), are numbers of vertices that others own, ascending and distinct;
    ``bounds`` and ``exchange_dtype`` as for ``DistGraph``.  All ranks make theirs at the same time.
    """

    def __init__(
        self,
        vertices: Tensor,
        bounds: tuple[int, ...],
        group: Group,
        exchange_dtype: torch.dtype | None,
    ) -> None:
        self.vertices, self.group, self.exchange_dtype = vertices, group, exchange_dtype
        self.traffic, self.rank = Traffic(), dist.get_rank(group)
        self.n_local = bounds[self.rank + 1] - bounds[self.rank]
        borders = torch.tensor(bounds, device=vertices.device)
        received = torch.searchsorted(vertices, borders).diff()
        sent = torch.empty_like(received)
        dist.all_to_all_single(sent, received, group=group)
        #: Rows from and to each rank.
        self.received: list[int] = received.tolist()  # synchronize!
        self.sent: list[int] = sent.tolist()
        asked = vertices.new_empty(sum(self.sent))
        sizes = self.sent, self.received
        dist.all_to_all_single(asked, vertices.contiguous(), *sizes, group=group)
        #: Own rows to send, by the rank that asked for them.
        self.rows = asked - bounds[self.rank]
        total = torch.tensor(len(vertices), device=vertices.device)
        dist.all_reduce(total, group=group)
        #: Rows that all ranks receive of others.
        self.n_received = int(total)  # synchronize!
        self.gathered: Gathered | None = None
        ranks, most = len(bounds) - 1, max(b - a for a, b in pairwise(bounds))
        if self.n_received and self.n_received >= GATHERED * ranks * (ranks - 1) * most:
            owner = torch.searchsorted(borders[1:], vertices, right=True)
            self.gathered = Gathered(most, ranks, owner * most + vertices - borders[owner])
        self.memory = ReceivedRows(any(a == b for a, b in pairwise(bounds)))

    @cached_property
    def home(self) -> Graph:
        """Return the matrix of ones that sums returned gradients by own row: (n_local, n_sent)."""
        copies = torch.arange(len(self.rows), device=self.rows.device)
        return numbered_graph(copies, self.rows, len(self.rows), self.n_local)

    def start(self, x: Tensor) -> "Exchange":
        """Begin to receive the rows of ``x``, (n_local, ...), that other ranks own, differentiably.

        Those of a constant tensor come once, until it is changed or gone, or eight others came.
        """
        constant = not x.requires_grad and self.memory.accepts(x)
        remembered = self.memory.rows_of(x) if constant else None
        if checks.DEBUG:
            self.compare(x, remembered is not None)
        lasting = constant and not torch.is_inference_mode_enabled()
        exchange = Exchange(self, remembered, x if lasting else None)
        if remembered is None:
            exchange.begun = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
        return exchange

    def compare(self, x: Tensor, remembered: bool) -> None:
        """Raise on all ranks, while debugging, if their exchanges differ."""
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
        """Begin to send own rows to the ranks that asked for them, or all rows to all ranks."""
        if self.gathered is None:
            return self.exchanged(x.index_select(0, self.rows), self.sent, self.received)
        most, ranks, _ = self.gathered
        if len(x) < most:
            x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        return self.exchanged(x.contiguous(), None, [most] * ranks)

    def exchanged(self, rows: Tensor, sent: list[int] | None, received: list[int]) -> "Parcel":
        """Begin to send ``sent[r]`` rows to rank ``r``, all to all for None, and to receive."""
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
        """Wait for rows on their way, and return those of the halo."""
        parcel.work.wait()
        gathered = self.gathered
        return parcel.into if gathered is None else parcel.into.index_select(0, gathered.places)


class Gathered(NamedTuple):
    """An all-gather: ``most`` rows of each of the ``ranks``, and which of them the halo are."""

    most: int
    ranks: int
    places: Tensor


class Parcel(NamedTuple):
    """Rows on their way: the memory of those that come, those that leave, and torch's work."""

    into: Tensor
    rows: Tensor
    work: Any


class ReceivedRows:
    """The rows received for the last few tensors without a gradient.

    All ranks decide alike what is here: by the order of calls, never by when memory is freed.  If
    ``some_empty``, a rank has no vertices: its views of one tensor look alike, and no rank
    remembers views.
    """

    def __init__(self, some_empty: bool) -> None:
        self.some_empty = some_empty
        self.cleared = 0  #: how often
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        """Count the tensors whose rows are remembered."""
        return sum(bool(entry.rows) for entry in self._entries)

    def __deepcopy__(self, memo: object) -> "ReceivedRows":
        """Return a memory without rows."""
        return ReceivedRows(self.some_empty)

    def accepts(self, x: Tensor) -> bool:
        """Return True if rows of this constant tensor may be remembered; not in a CUDA graph."""
        if x.is_inference() or (self.some_empty and x._base is not None):
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Return the rows of a tensor if they are remembered; the current stream may read them."""
        for place, entry in enumerate(self._entries):
            if entry.is_of(x) and entry.state == state_of(x):
                self._entries.append(self._entries.pop(place))
                return entry.read()
        return None

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Remember the rows of a tensor, and forget those they replace and the oldest."""
        entries = [entry for entry in self._entries if not entry.is_of(x)]
        self._entries = [*entries[1 - REMEMBERED :], _Entry(x, rows)]

    def clear(self) -> None:
        """Remove all rows that were received for tensors without a gradient."""
        self._entries = []
        self.cleared += 1


class _Entry:
    """A tensor, its state when its rows were exchanged, and those rows."""

    def __init__(self, x: Tensor, rows: Tensor) -> None:
        #: Empty once the tensor is gone.
        self.rows = alive = [rows]
        base, self.view = _identity(x)
        self.tensor, self.state = ref(base, lambda _: alive.clear()), state_of(x)
        self.stream: Any = torch.cuda.current_stream(rows.device) if rows.is_cuda else None
        self.made: Any = None if self.stream is None else self.stream.record_event()

    def is_of(self, x: Tensor) -> bool:
        """Return True if the rows are or were those of this tensor."""
        base, view = _identity(x)
        return self.tensor() is base and self.view == view

    def read(self) -> Tensor:
        """Return the rows to the current stream, which waits for the one that made them."""
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

    ``begun`` is a tensor without values that ties both ends together for autograd.
    """

    halo: Halo
    remembered: Tensor | None = None  #: rows of the halo that need not travel
    constant: Tensor | None = None  #: the tensor whose rows are to be remembered
    forth: Parcel | None = None
    back: Parcel | None = None
    begun: Tensor | None = None

    def finish(self) -> Tensor:
        """Wait for the rows of the halo: (n_halo, ...); a GPU's stream does, the host goes on."""
        if self.remembered is not None:
            return self.remembered
        begun, self.begun = self.begun, None  # its node holds this: a cycle would keep the tape
        received: Tensor = _Finish.apply(begun, self)  # type: ignore[no-untyped-call]
        if self.constant is not None:
            self.halo.memory.put(self.constant, received)
            self.constant = None
        return received

    def add_up(self, like: Tensor) -> Tensor:
        """Wait for the gradients of own rows, and add them up in the dtype of a tensor."""
        if self.back is None:
            raise UnsupportedError("what an exchange receives was not finished: call finish().")
        parcel, self.back = self.back, None
        parcel.work.wait()
        received = parcel.into.to(like.dtype)
        rows = received.flatten(1) if received.dim() > 1 else received[:, None]
        total = spmm(self.halo.home, rows)
        return total.view(len(total), *received.shape[1:])


class _Start(Function):
    """Send own rows; backward adds up the gradients that return."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.forth = exchange.halo.send(x.detach())
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Ctx, like: Tensor) -> tuple[Tensor, None]:
        return once_differentiable(EXCHANGED, ctx.exchange.add_up, like, instead=INSTEAD), None


class _Finish(Function):
    """Wait for the rows that were sent; backward begins to send their gradients home."""

    @staticmethod
    def forward(ctx: Ctx, begun: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, parcel = exchange, cast(Parcel, exchange.forth)
        exchange.forth = None
        return exchange.halo.receive(parcel).to(begun.dtype)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor, None]:
        def send_home(grad: Tensor) -> Tensor:
            halo = ctx.exchange.halo
            ctx.exchange.back = halo.exchanged(grad.contiguous(), halo.received, halo.sent)
            return grad.new_empty(0)

        return once_differentiable(EXCHANGED, send_home, grad, instead=INSTEAD), None


def check_edges(edge_index: object, n_sources: int, targets: slice, rank: int) -> None:
    """Check that sources are vertices of the graph, and targets those of a rank."""
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
                f"{low} to {high - 1}: give each rank the edges that lead to its own vertices."
            )


def halo_of(columns: Tensor, bounds: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of a rank's columns, own vertices first, and its halo, ascending."""
    first, last = bounds[rank], bounds[rank + 1]
    own = (columns >= first) & (columns < last)
    halo = torch.unique(columns[~own])  # synchronize!
    outside = torch.searchsorted(halo, columns) + (last - first)
    return torch.where(own, columns - first, outside), halo


def numbered_graph(columns: Tensor, rows: Tensor, n_cols: int, n_rows: int) -> Graph:
    """Build a graph of vertices that a rank has numbered: in int32, if that holds them."""
    edges = torch.stack([columns, rows])
    if max(n_cols, n_rows, len(rows)) < 2**31:
        edges = edges.int()
    return Graph.from_edge_index(edges, num_nodes=(n_cols, n_rows))
