"""What layers of ``sparsefmt.nn`` call of a graph that ranks share: see ``nn.shared``."""

from typing import Any

import torch
from torch import Tensor

from ..autograd import sampled_aggregate, spmm
from ..autograd.cbsr import to_dense
from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ..graph.graph import Graph
from .halo import Halo
from .planning import Plannable
from .products import dist_spmm, maxk_product, narrowed, split_and_checked

#: A row that is exchanged costs as much as so many that are gathered: 352 GB/s leave an H100, which
#: gathers 3.4 TB/s with ids shuffled and 8.9 with communities in a row.  For layers without a plan,
#: which compare rows with rows; ``NVLINK`` of ``plan/pricing.py`` is the same link in seconds, from
#: a fit to two H200, since a plan adds them to those of other primitives.
ROWS_OF_EXCHANGE = 10
#: Features without a gradient up to which they travel, once, and each rank maps those of others
#: again.  A weight of a map takes an H100 0.09 ps of a vertex in both directions; a mapped feature
#: that is received, and whose gradient goes home, 26 ps: as long as 290 weights.
MAPPED_AGAIN = 256


def sends_first(features: int, width: int, *, gradient: bool) -> bool:
    """Tell whether so many features travel before they are mapped to that width."""
    return features <= width or (not gradient and features <= MAPPED_AGAIN)


class Aggregation(Plannable):
    """The aggregations of a ``DistGraph``, by the names and arguments of ``autograd``'s."""

    local: Graph
    halo: Halo
    is_square: bool
    n_local: int
    n_sources: int
    n_edges: int
    rank: int
    bounds: tuple[int, ...]

    def spmm(
        self, x: Tensor, edge_weight: Tensor | None = None, *, reduce: str = "sum", **scales: Any
    ) -> Tensor:
        """Aggregate features by ``dist_spmm``, or for a max or min after the exchange."""
        if reduce in ("sum", "mean"):
            return dist_spmm(self._itself, x, edge_weight, reduce=reduce, **scales)
        return spmm(self.local, self._beside(x, scales), edge_weight, reduce=reduce, **scales)

    def maxk_aggregate(
        self, x: Tensor, k: int, edge_weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Aggregate the ``k`` largest features, which alone are exchanged."""
        return maxk_product(self._itself, x, k, edge_weight, **options)[0]

    def sampled_aggregate(
        self, x: Tensor, width: int, edge_weight: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Aggregate a sample of each row, after the exchange."""
        x = self._beside(x, options)
        return sampled_aggregate(self.local, x, width, edge_weight, **options)

    def aggregate_with_own(
        self,
        x: Tensor,
        own: Tensor,
        edge_weight: Tensor | None = None,
        *,
        k: int | None = None,
        without: Tensor | None = None,
        **scales: Any,
    ) -> Tensor:
        """Aggregate features, and add a part of each vertex's own."""
        if k is None:
            y, part = self.spmm(x, edge_weight, **scales), x
        else:
            y, columns, kept = maxk_product(self._itself, x, k, edge_weight, **scales)
            part = to_dense(columns, kept, x.shape[1])
        part = part.to(y.dtype)
        own = own.to(y.dtype) if own.element_size() == 2 else own
        return torch.addcmul(y, own, part if without is None else part.masked_fill(without, 0))

    def propagate(
        self,
        x: Tensor,
        scale: Tensor,
        own: Tensor,
        *,
        without: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Propagate features by symmetric factors, as GCN does."""
        scales: dict[str, Any] = {"row_scale": scale, "col_scale": scale}
        y = self.aggregate_with_own(x, own.to(x.dtype), without=without, **scales)
        return y if bias is None else y + bias.to(y.dtype)

    def operands(
        self, x: Tensor, edge_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        """Check features and edge values, and cast them as autocast would."""
        self.check("x", x)
        if edge_weight is None:
            return x, None, None, None
        split_and_checked(self._itself, x, edge_weight, None, None)
        return narrowed(x) if x.requires_grad else x, narrowed(edge_weight), None, None

    def extended(self, x: Tensor) -> Tensor:
        """Put the features of a rank's halo behind its own: (n_sources + n_halo, ...)."""
        self.check("x", x, dims=None)
        return torch.cat([x, self.halo.exchange(x)])

    def sends_first(self, x: Tensor, width: int) -> bool:
        """Tell whether features travel before they are mapped to that width.

        The narrower ones do, and in training those without a gradient, which travel once, if a
        rank does not map the rows of others for longer than it would receive them.
        """
        stays = torch.is_grad_enabled() and not x.requires_grad
        return sends_first(x.shape[-1], width, gradient=not stays)

    def maps_first(self, x: Tensor, width: int) -> bool:
        """Tell whether features are mapped before they travel and are summed.

        Those without a gradient travel once, and are not summed in backward.
        """
        if x.requires_grad:
            return width < x.shape[-1]
        passes = 2 if torch.is_grad_enabled() else 1
        away = ROWS_OF_EXCHANGE * self.halo.n_received
        return passes * width * (self.n_edges + away) < x.shape[-1] * self.n_edges

    def numbered(self, edge_index: Tensor) -> Tensor:
        """Give sources and targets of ``local`` their numbers in the whole graph."""
        first, graph = self.bounds[self.rank], self._itself
        begin = graph.source_bounds[self.rank]
        own = torch.arange(begin, begin + self.n_sources, device=edge_index.device)
        sources = torch.cat([own, self.halo.vertices])
        return torch.stack([sources[edge_index[0]], edge_index[1] + first])

    def check(self, name: str, x: Any, *, of: str = "sources", dims: int | None = 2) -> None:
        """Check for a row of floating features for each source, or target, of this rank.

        ``dims`` are its axes, None for any number.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            If it is something else, or elsewhere.
        """
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} is a {type(x).__name__}: give a torch.Tensor.")
        if x.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} has layout {x.layout}: give a dense tensor, {name}.to_dense() for "
                "instance."
            )
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
        device = self.halo.vertices.device
        if x.device != device:
            raise DeviceError(
                f"{name} is on {x.device} but the graph is on {device}: move one of them."
            )

    def _beside(self, x: Tensor, scales: dict[str, Any]) -> Tensor:
        """Exchange features, multiplied by the scale of sources, which is taken out."""
        self.check("x", x)
        scale = scales.pop("col_scale", None)
        return self.extended(x if scale is None else x * scale[:, None].to(x.dtype))
