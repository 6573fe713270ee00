"""Features of vertices that other ranks have: asked for once, exchanged in each layer.

The halo of a rank are the vertices that its rows name and other ranks own, in the order of their
numbers, and so by owner.  What it sends are copies of its own rows, for each rank those that rank
has asked for; gradients take the way back, and add up in a fixed order.
"""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..autograd import spmm
from ..errors import DtypeError, UnsupportedError
from ..graph import Graph

#: Share of the rows that an all-gather would bring, from which on it takes the place of sending
#: each rank what it asked for.
GATHERED = 0.8
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
        That in which wider floating features and gradients travel.
    """

    def __init__(
        self,
        wanted: Tensor,
        bounds: tuple[int, ...],
        group: Any = None,
        exchange_dtype: torch.dtype | None = None,
    ) -> None:
        if exchange_dtype is not None and not getattr(exchange_dtype, "is_floating_point", False):
            raise DtypeError(
                f"exchange_dtype is {exchange_dtype!r}: give a floating one, torch.bfloat16 for "
                "instance."
            )
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
        self._known: dict[Any, _Known] = {}

    def _gathered(self, bounds: tuple[int, ...]) -> "Gathered | None":
        """Tell where rows are that an all-gather brings, where that is hardly more of them."""
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
        """The matrix that adds up what others send back to each own row: (n_local, n_sent)."""
        if self._home is None:
            copies = torch.arange(len(self.rows), device=self.rows.device)
            edges, sizes = torch.stack([copies, self.rows]), (len(self.rows), self.n_local)
            self._home = Graph.from_edge_index(edges, num_nodes=sizes)
        return self._home

    def start(self, x: Tensor) -> "Exchange":
        """Begin to receive the rows of ``x``, (n_local, ...), that other ranks own.

        Of a tensor without a gradient this happens once, until it is changed or gone.
        """
        exchange = Exchange(self)
        key = None if x.requires_grad or x.is_inference() else _key_of(x)
        known = self._known.get(key) if key is not None else None
        if known is not None and known.fits(x):
            exchange.found = known.rows
            return exchange
        exchange.remember = None if key is None else partial(self._remember, key, x)
        exchange.begun = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
        return exchange

    def exchange(self, x: Tensor) -> Tensor:
        """Receive the rows of ``x`` that other ranks own: (n_halo, ...), differentiable."""
        return self.start(x).finish()

    def _remember(self, key: Any, x: Tensor, rows: Tensor) -> None:
        base = _base_of(x)
        gone = ref(base, partial(_forget, self._known, key))
        self._known[key] = _Known(gone, x._version, x.data_ptr(), rows)

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


class _Known(NamedTuple):
    """A tensor, its version and place in memory when its rows were exchanged, and those rows."""

    tensor: "ref[Tensor]"
    version: int
    place: int
    rows: Tensor

    def fits(self, x: Tensor) -> bool:
        """Tell whether the rows are still those of this tensor."""
        same = self.tensor() is _base_of(x) and self.version == x._version
        return same and self.place == x.data_ptr()


def _base_of(x: Tensor) -> Tensor:
    """Give the tensor that lives as long as the memory of ``x`` is this one's."""
    return x if x._base is None else x._base


def _key_of(x: Tensor) -> Any:
    return id(_base_of(x)), x.storage_offset(), x.shape, x.stride(), x.dtype


def _forget(known: dict[Any, _Known], key: Any, tensor: "ref[Tensor]") -> None:
    """Drop the rows of a tensor that is gone; another one may have its identity by now."""
    found = known.get(key)
    if found is not None and found.tensor is tensor:
        del known[key]


class Exchange:
    """One exchange that has begun, and in backward its way back."""

    def __init__(self, halo: Halo) -> None:
        self.halo = halo
        self.begun: Tensor  #: without values: ties both ends together for autograd
        self.found: Tensor | None = None
        self.remember: Any = None
        self.there: Parcel | None = None
        self.back: Parcel | None = None

    def finish(self) -> Tensor:
        """Wait for what is being received: (n_halo, ...); a GPU's stream does, the host goes on."""
        if self.found is not None:
            return self.found
        begun = self.begun
        del self.begun  # its node holds this: a cycle would keep what lies upstream
        found: Tensor = _Finish.apply(begun, self)  # type: ignore[no-untyped-call]
        if self.remember is not None:
            self.remember(found)
            self.remember = None
        return found


class _Start(Function):
    """Send own rows; backward adds up what comes home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.there = exchange.halo._send(x.detach())
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, like: Tensor) -> tuple[Tensor | None, None]:
        exchange = ctx.exchange
        if exchange.back is None:
            raise UnsupportedError("what an exchange receives was not finished: call finish().")
        received, exchange.back = exchange.back.arrived().to(like.dtype), None
        rows = received.flatten(1) if received.dim() > 1 else received[:, None]
        found = spmm(exchange.halo.home, rows)
        return found.view(len(found), *received.shape[1:]), None


class _Finish(Function):
    """Wait for what was sent; backward begins to send gradients home."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        parcel: Any = exchange.there
        exchange.there = None
        return exchange.halo._of_halo(parcel.arrived()).to(begun.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.back = ctx.exchange.halo._send_home(grad)
        return grad.new_empty(0), None


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
