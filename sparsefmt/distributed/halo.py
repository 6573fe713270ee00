"""Features of vertices that other ranks have: asked for once, exchanged in each layer.

The halo of a rank consists of the vertices that its rows name and other ranks own, in the order of
their numbers, and so by owner.  A rank sends copies of its own rows, to each rank those that this
one has asked for; gradients take the way back, and add up in a fixed order.
"""

from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..autograd import spmm
from ..autograd.engine.recording import once
from ..errors import DtypeError, UnsupportedError
from ..graph.graph import Graph
from .agreement import debugging, on_all_ranks

#: Dtypes in which features may travel.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Tensors without a gradient whose rows a graph remembers at a time.
REMEMBERED = 8
#: Share of the rows that an all-gather would bring, from which on it takes the place of sending
#: each rank what it asked for.
GATHERED = 0.8
#: What cannot be differentiated again, and what can.
EXCHANGED = "features that ranks exchange"
ONE_PROCESS = "compute on one process, with a Graph"
#: torch 2.13 has renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Traffic:
    """What a rank has sent to others: ``exchanges`` begun, and their ``nbytes``."""

    def __init__(self) -> None:
        self.exchanges = self.nbytes = 0

    def count(self, rows: int, like: Tensor) -> None:
        """Count an exchange of so many rows like those of a tensor."""
        self.exchanges += 1
        self.nbytes += rows * like.shape[1:].numel() * like.element_size()


class Halo:
    """The vertices that a rank reads of others, and those that others read of it.

    Parameters
    ----------
    wanted : Tensor of int64, shape (n_halo,)
        Numbers of vertices that others own, ascending and distinct.
    bounds : tuple of int
        The first vertex of each rank, and the number of vertices.
    group : ProcessGroup, optional
        All ranks of it make theirs at the same time.
    exchange_dtype : torch.dtype, optional
        Dtype for travel: wider floating features and gradients are cast to it.
    """

    def __init__(
        self,
        wanted: Tensor,
        bounds: tuple[int, ...],
        group: Any = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        self.vertices, self.group, self.exchange_dtype = wanted, group, exchange_dtype
        self.traffic, self.rank = Traffic(), dist.get_rank(group)
        self.n_local = bounds[self.rank + 1] - bounds[self.rank]
        borders = torch.tensor(bounds, device=wanted.device)
        ends = torch.searchsorted(wanted, borders)
        received = ends.diff()
        sent = torch.empty_like(received)
        dist.all_to_all_single(sent, received, group=group)
        #: Rows from and to each rank.
        self.received: list[int] = received.tolist()  # synchronize!
        self.sent: list[int] = sent.tolist()
        asked = wanted.new_empty(sum(self.sent))
        dist.all_to_all_single(asked, wanted.contiguous(), self.sent, self.received, group=group)
        #: Own rows to send, by the rank that asked for them.
        self.rows = asked - bounds[self.rank]
        self.gathered = self._gathered(bounds)
        self._home: Graph | None = None
        self.memory = Memory(any(a == b for a, b in pairwise(bounds)))

    def _gathered(self, bounds: tuple[int, ...]) -> "Gathered | None":
        """Use an all-gather if it brings few rows more than the halo."""
        borders = torch.tensor(bounds, device=self.vertices.device)
        ranks, most = len(bounds) - 1, max(b - a for a, b in pairwise(bounds))
        total = torch.tensor(len(self.vertices), device=self.vertices.device)
        dist.all_reduce(total, group=self.group)
        #: Rows that all ranks receive of others.
        self.n_received = int(total)  # synchronize!
        if not self.n_received or self.n_received < GATHERED * ranks * (ranks - 1) * most:
            return None
        owner = torch.searchsorted(borders[1:], self.vertices, right=True)
        return Gathered(most, ranks, owner * most + self.vertices - borders[owner])

    @property
    def home(self) -> Graph:
        """Matrix of ones that sums returned gradients by own row: (n_local, n_sent)."""
        if self._home is None:
            copies = torch.arange(len(self.rows), device=self.rows.device)
            self._home = numbered_graph(copies, self.rows, len(self.rows), self.n_local)
        return self._home

    def start(self, x: Tensor) -> "Exchange":
        """Begin to receive the rows of ``x``, (n_local, ...), that other ranks own.

        Of a tensor without a gradient this happens once, until it is changed or gone, or eight
        others have come since.
        """
        exchange = self.prepared(x)
        if exchange.found is None:
            exchange.begun = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
        return exchange

    def prepared(self, x: Tensor) -> "Exchange":
        """Make an exchange of the rows of ``x`` that has not begun.

        It has ``found`` them if they are remembered; if not, ``constant`` is ``x`` where they are
        to be.
        """
        exchange = Exchange(self)
        may_hold = self.memory.holds(x)
        exchange.found = self.memory.rows_of(x) if may_hold else None
        if debugging(x.device):
            self._check_alike(x, exchange.found is not None)
        if exchange.found is None and may_hold and not torch.is_inference_mode_enabled():
            exchange.constant = x
        return exchange

    def _check_alike(self, x: Tensor, is_remembered: bool) -> None:
        """Compare with other ranks what decides whether and how rows travel, and gradients."""
        facts = {
            "the call": "an exchange",
            "x.dtype": str(x.dtype),
            "x.shape[1:]": tuple(x.shape[1:]),
            "x.requires_grad": x.requires_grad,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "whether x is as it was exchanged": is_remembered,
        }
        on_all_ranks(lambda: facts, self.group, x.device, alike=True)

    def exchange(self, x: Tensor) -> Tensor:
        """Receive the rows of ``x`` that other ranks own: (n_halo, ...), differentiable."""
        return self.start(x).finish()

    def _on_the_way(self, rows: Tensor) -> Tensor:
        """Cast rows to the dtype in which they travel."""
        narrow = self.exchange_dtype
        if narrow is None or not rows.is_floating_point() or rows.itemsize <= narrow.itemsize:
            return rows
        return rows.to(narrow)

    def _send(self, x: Tensor) -> "Parcel":
        """Send own rows to who asked for them, or all to all."""
        if self.gathered is None:
            rows = self._on_the_way(x.index_select(0, self.rows))
            return self._all_to_all(rows, self.received, self.sent)
        most, ranks, _ = self.gathered
        rows = self._on_the_way(x)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        rows, into = rows.contiguous(), rows.new_empty(ranks * most, *rows.shape[1:])
        self.traffic.count((ranks - 1) * most, rows)
        work = _all_gather(into, rows, group=self.group, async_op=True)
        return Parcel(into, rows, work)

    def _of_halo(self, received: Tensor) -> Tensor:
        """Give the rows of the halo out of those that came."""
        gathered = self.gathered
        return received if gathered is None else received.index_select(0, gathered.places)

    def _send_home(self, rows: Tensor) -> "Parcel":
        """Send what belongs to the halo to its owners."""
        return self._all_to_all(self._on_the_way(rows.contiguous()), self.sent, self.received)

    def _all_to_all(self, rows: Tensor, there: list[int], here: list[int]) -> "Parcel":
        into = rows.new_empty((sum(there), *rows.shape[1:]))
        self.traffic.count(sum(here), rows)
        work = dist.all_to_all_single(into, rows, there, here, group=self.group, async_op=True)
        return Parcel(into, rows, work)


class Gathered(NamedTuple):
    """An all-gather: ``most`` rows of each of the ``ranks``, and which of them the halo are."""

    most: int
    ranks: int
    places: Tensor


class Parcel(NamedTuple):
    """Rows on the way: those that come, those that leave, which are held, and torch's work."""

    into: Tensor
    rows: Tensor
    work: Any

    def arrived(self) -> Tensor:
        """Wait for what comes; a GPU's stream does, the host goes on."""
        self.work.wait()
        return self.into


class Memory:
    """The rows received for the last few tensors without a gradient.

    All ranks decide alike what is here: by the order of calls, never by when memory is freed.

    Parameters
    ----------
    some_empty : bool
        Whether a rank has no vertices.  There views of one tensor look alike, and no rank
        remembers them.
    """

    def __init__(self, some_empty: bool) -> None:
        self.some_empty = some_empty
        self.cleared = 0  #: how often
        self._known: list[_Known] = []

    def __len__(self) -> int:
        """Count the tensors whose rows are held."""
        return sum(bool(known.rows) for known in self._known)

    def __deepcopy__(self, memo: Any) -> "Memory":
        """Begin a copy without rows."""
        return Memory(self.some_empty)

    def holds(self, x: Tensor) -> bool:
        """Tell whether rows of this tensor may be remembered; in a CUDA graph they may not."""
        if x.requires_grad or x.is_inference() or (self.some_empty and x._base is not None):
            return False
        return not (x.is_cuda and torch.cuda.is_current_stream_capturing())

    def rows_of(self, x: Tensor) -> Tensor | None:
        """Give the rows of a tensor that is remembered; the current stream may read them."""
        for place, known in enumerate(self._known):
            if known.fits(x):
                self._known.append(self._known.pop(place))
                return known.read()
        return None

    def put(self, x: Tensor, rows: Tensor) -> None:
        """Remember the rows of a tensor, and forget what they replace and the oldest."""
        new = _Known(x, rows)
        others = [one for one in self._known if not one.is_of(x)]
        self._known = [*others[1 - REMEMBERED :], new]

    def clear(self) -> None:
        """Forget all rows."""
        self._known = []
        self.cleared += 1


class _Known:
    """A tensor, its version and place in memory when its rows were exchanged, and those rows."""

    def __init__(self, x: Tensor, rows: Tensor) -> None:
        #: Empty once the tensor is gone.
        self.rows = held = [rows]
        self.tensor = ref(_base_of(x), lambda _: held.clear())
        self.layout, self.version, self.place = _layout_of(x), x._version, x.data_ptr()
        self.stream: Any = torch.cuda.current_stream(rows.device) if rows.is_cuda else None
        self.made: Any = None if self.stream is None else self.stream.record_event()

    def is_of(self, x: Tensor) -> bool:
        """Tell whether the rows are or were those of this tensor."""
        return self.tensor() is _base_of(x) and self.layout == _layout_of(x)

    def fits(self, x: Tensor) -> bool:
        """Tell whether the rows are still those of this tensor."""
        return self.is_of(x) and self.version == x._version and self.place == x.data_ptr()

    def read(self) -> Tensor:
        """Give the rows to the current stream, which waits for the one that made them."""
        (rows,) = self.rows
        if self.stream is not None:
            current = torch.cuda.current_stream(rows.device)
            if current != self.stream:
                current.wait_event(self.made)
                rows.record_stream(current)
        return rows


def _base_of(x: Tensor) -> Tensor:
    """Give the tensor that lives as long as the memory of ``x`` is this one's."""
    return x if x._base is None else x._base


def _layout_of(x: Tensor) -> Any:
    return x.storage_offset(), x.shape, x.stride(), x.dtype


class Exchange:
    """One exchange that has begun, and in backward its way back."""

    def __init__(self, halo: Halo) -> None:
        self.halo = halo
        self.begun: Tensor  #: without values: ties both ends together for autograd
        self.found: Tensor | None = None
        self.constant: Tensor | None = None  #: the tensor to remember
        self.there: Parcel | None = None
        self.back: Parcel | None = None

    def send(self, x: Tensor) -> Tensor:
        """Send own rows, and give a tensor without values that stands for what will come."""
        self.there = self.halo._send(x.detach())
        return x.new_empty(0)

    def sent_back(self, like: Tensor) -> Tensor:
        """Wait for the gradients of rows that were sent, in the dtype of a tensor: (n_sent, ...).

        Raises
        ------
        UnsupportedError
            If nobody has waited for what was received.
        """
        if self.back is None:
            raise UnsupportedError("what an exchange receives was not finished: call finish().")
        received, self.back = self.back.arrived().to(like.dtype), None
        return received

    def finish(self) -> Tensor:
        """Wait for what is being received: (n_halo, ...); a GPU's stream does, the host goes on."""
        if self.found is not None:
            return self.found
        begun = self.begun
        del self.begun  # its node holds this: a cycle would keep what lies upstream
        found: Tensor = _Finish.apply(begun, self)  # type: ignore[no-untyped-call]
        if self.constant is not None:
            self.halo.memory.put(self.constant, found)
            self.constant = None
        return found

    def send_home(self, grad: Tensor) -> Tensor:
        """Begin to send gradients to their owners; without values, as ``begun``."""
        self.back = self.halo._send_home(grad)
        return grad.new_empty(0)

    def add_up(self, like: Tensor) -> Tensor:
        """Wait for the gradients of own rows, and add them up in this dtype."""
        received = self.sent_back(like)
        rows = received.flatten(1) if received.dim() > 1 else received[:, None]
        found = spmm(self.halo.home, rows)
        return found.view(len(found), *received.shape[1:])


class _Start(Function):
    """Send own rows; backward adds up what comes home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(x)

    @staticmethod
    def backward(ctx: Any, like: Tensor) -> tuple[Tensor, None]:
        return once(EXCHANGED, ctx.exchange.add_up, like, instead=ONE_PROCESS), None


class _Finish(Function):
    """Wait for what was sent; backward begins to send gradients home."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        parcel: Any = exchange.there
        exchange.there = None
        return exchange.halo._of_halo(parcel.arrived()).to(begun.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return once(EXCHANGED, ctx.exchange.send_home, grad, instead=ONE_PROCESS), None


def halo_of(columns: Tensor, bounds: tuple[int, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Number the columns of a rank's rows: its own vertices first, then its halo.

    Returns
    -------
    numbers : Tensor of int64
        Of each column in ``columns``.
    halo : Tensor of int64, shape (n_halo,)
        The numbers of the halo's vertices in the whole graph, ascending.
    """
    first, last = bounds[rank], bounds[rank + 1]
    own = (columns >= first) & (columns < last)
    halo = torch.unique(columns[~own])  # synchronize!
    outside = torch.searchsorted(halo, columns) + (last - first)
    return torch.where(own, columns - first, outside), halo


def numbered_graph(columns: Tensor, rows: Tensor, n_cols: int, n_rows: int) -> Graph:
    """Make a graph of vertices that a rank has numbered: in int32, if that holds them."""
    edges = torch.stack([columns, rows])
    if max(n_cols, n_rows, len(rows)) < 2**31:
        edges = edges.int()
    return Graph.from_edge_index(edges, num_nodes=(n_cols, n_rows))


def check_exchange_dtype(exchange_dtype: Any) -> None:
    """Check for a dtype that every backend sends, or None.

    Raises
    ------
    DtypeError
        If it is another one.
    """
    if exchange_dtype is not None and exchange_dtype not in FLOATING:
        raise DtypeError(
            f"exchange_dtype is {exchange_dtype!r}: give torch.bfloat16, float16, float32 or "
            "float64."
        )
