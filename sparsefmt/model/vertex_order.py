"""The vertices of a model's graph in another order, while the model gives and takes the user's."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd.engine.recording import recorded
from ..autograd.tensors.lifetimes import note
from ..graph.graph import Graph
from ..interop.torch import to_tensor
from ..reorder import Order
from .composition import Settings, capturing, is_stamped, stamp

#: Tensors that stay, whose rows are kept in the new order.
MAX_KEPT = 8


class VertexOrder:
    """A graph in another order, and the way of rows there and back."""

    def __init__(self, given: Any, graph: Graph, order: Order, settings: Settings) -> None:
        self.settings, self._given = settings, ref(given)
        self._version = given._version if isinstance(given, Tensor) else 0
        self.perm, self.inverse = to_tensor(order.perm), to_tensor(order.inverse)
        renamed = isinstance(given, Tensor)  # an edge_index
        self.graph: Any = self.inverse[given].to(given.dtype) if renamed else graph
        self.moved = 0  #: bytes that moving rows has read and written
        self._kept: list[tuple[Any, Tensor]] = []

    def __len__(self) -> int:
        return len(self.perm)

    @property
    def given(self) -> Any:
        """The graph in the user's order, as it was; None once it is gone or was written to."""
        found = self._given()
        written = isinstance(found, Tensor) and found._version != self._version
        return None if written else found

    def graph_of(self, given: Any) -> Any:
        """Give the graph in the new order."""
        return self.graph

    def into(self, x: Tensor) -> Tensor:
        """Bring rows to the new order; those of constant features stay there."""
        if self.settings.is_constant(x):
            return self.kept(x)
        return self._rows(x, self.perm, self.inverse)

    def back(self, y: Tensor) -> Tensor:
        """Bring rows back to the user's order."""
        return self._rows(y, self.inverse, self.perm)

    def kept(self, x: Tensor) -> Tensor:
        """Bring rows to the new order once, for as long as nobody writes to them."""
        if x.requires_grad or x.is_inference() or capturing(x):
            return self._rows(x, self.perm, self.inverse)
        for given, made in self._kept:
            if is_stamped(x, given):
                note(made)
                return made
        with torch.inference_mode(False), torch.no_grad():
            made = x.index_select(0, self.perm)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()  # synchronize!
        live = [pair for pair in self._kept if pair[0][0]() is not None]
        self._kept = [*live[1 - MAX_KEPT :], (stamp(x), made)]
        self.settings.moved = tuple(stamp(one) for _, one in self._kept)
        return made

    def _rows(self, x: Tensor, places: Tensor, back: Tensor) -> Tensor:
        self.moved += 2 * x.nbytes
        if not recorded(x):
            return x.index_select(0, places)
        found: Tensor = _Rows.apply(x, places, back)  # type: ignore[no-untyped-call]
        return found


class _Rows(Function):
    """A gather of rows, whose gradient is the gather back: no sums, no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.places = places, back
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places, back = ctx.places
        apply: Callable[..., Tensor] = _Rows.apply
        return apply(grad, back, places), None, None
