"""Features of vertices that other ranks have: asked for once, exchanged in each layer.

The halo of a rank are the vertices that its rows name and other ranks own, in the order of their
numbers, and so by owner.  What it sends are copies of its own rows, for each rank those that rank
has asked for; gradients take the way back, and add up in a fixed order.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..autograd import spmm
from ..errors import UnsupportedError
from ..graph import Graph


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
    """

    def __init__(self, wanted: Tensor, bounds: tuple[int, ...], group: Any = None) -> None:
        self.vertices, self.group = wanted, group
        rank = dist.get_rank(group)
        self.n_local = bounds[rank + 1] - bounds[rank]
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
        self.rows = asked - bounds[rank]
        self._home: Graph | None = None

    @property
    def home(self) -> Graph:
        """The matrix that adds up what others send back to each own row: (n_local, n_sent)."""
        if self._home is None:
            copies = torch.arange(len(self.rows), device=self.rows.device)
            edges, sizes = torch.stack([copies, self.rows]), (len(self.rows), self.n_local)
            self._home = Graph.from_edge_index(edges, num_nodes=sizes)
        return self._home

    def start(self, x: Tensor) -> "Exchange":
        """Begin to receive the rows of ``x``, (n_local, ...), that other ranks own."""
        exchange = Exchange(self)
        exchange.begun = _Start.apply(x, exchange)  # type: ignore[no-untyped-call]
        return exchange

    def exchange(self, x: Tensor) -> Tensor:
        """Receive the rows of ``x`` that other ranks own: (n_halo, ...), differentiable."""
        return self.start(x).finish()

    def _send(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Send copies of own rows to who asked for them."""
        return self._all_to_all(rows, self.received, self.sent)

    def _send_home(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Send what belongs to the halo to its owners."""
        return self._all_to_all(rows, self.sent, self.received)

    def _all_to_all(self, rows: Tensor, there: list[int], here: list[int]) -> tuple[Tensor, Any]:
        into = rows.new_empty((sum(there), *rows.shape[1:]))
        work = dist.all_to_all_single(into, rows, there, here, group=self.group, async_op=True)
        return into, work


class Exchange:
    """One exchange that has begun, and in backward its way back."""

    def __init__(self, halo: Halo) -> None:
        self.halo = halo
        self.begun: Tensor
        self.work: Any = None
        self.held: Any = None  # what is being sent, until it has been
        self.back: tuple[Tensor, Any] | None = None

    def finish(self) -> Tensor:
        """Wait for what is being received: (n_halo, ...); a GPU's stream does, the host goes on."""
        found: Tensor = _Finish.apply(self.begun, self)  # type: ignore[no-untyped-call]
        return found


class _Start(Function):
    """Send own rows; backward adds up what comes home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, halo = exchange, exchange.halo
        exchange.held = x.index_select(0, halo.rows)
        into, exchange.work = halo._send(exchange.held)
        return into

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        exchange = ctx.exchange
        if exchange.back is None:
            raise UnsupportedError("what an exchange receives was not finished: call finish().")
        (received, work), exchange.back = exchange.back, None
        work.wait()
        exchange.held = None
        rows = received.flatten(1) if received.dim() > 1 else received[:, None]
        found = spmm(exchange.halo.home, rows)
        return found.view(-1, *received.shape[1:]), None


class _Finish(Function):
    """Wait for what was sent; backward begins to send gradients home."""

    @staticmethod
    def forward(ctx: Any, begun: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.work.wait()
        exchange.held = exchange.work = None
        return begun.view_as(begun)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.held = grad.contiguous()
        exchange.back = exchange.halo._send_home(exchange.held)
        return grad, None


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

