"""Sums over neighbours and linear maps: GraphConv, SimpleConv, LEConv and GatedGraphConv."""

from functools import partial
from math import sqrt
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor
from torch.nn import GRUCell, Parameter, init
from torch.nn.functional import linear, pad

from ...autograd import as_graph, spmm
from ...autograd.tensors.order import own_values
from ...autograd.tensors.prepare import GraphLike
from ...errors import DtypeError, ShapeError, UnsupportedError
from ...model.maps import maps_first
from .._inputs import (
    Ends,
    as_autocast,
    check_counts,
    check_edge_weight,
    check_flags,
    check_like,
    in_pair,
    refuse_pair,
    refuse_static,
)
from .._loops import gathered, over_vertices, rows_and_columns
from .._maps import called, check_map, draw_map, linear_map, mapped
from .._passing import Direction, Passing, PassingOptions, plus


class Reducing(Passing):
    """A layer that reduces weighted features of each row's entries."""

    _reductions_known: ClassVar[tuple[str, ...]] = ("sum", "mean", "max", "min")

    def _valued(self, graph: GraphLike, edge_index: object) -> GraphLike:
        """Return the graph of ``edge_index`` with all its values, which PyG reads as weights."""
        return graph

    def _reduced(self, ends: Ends, x: Tensor, edge_weight: Tensor | None) -> Tensor:
        """Reduce features of sources, in each of the ways of the layer, side by side."""
        if edge_weight is not None:
            check_edge_weight(edge_weight, ends.tensors, exact=not self._reductions)
        if not self._reductions:
            ends = ends._replace(source=x).gathered()
            return gathered(cast(Any, self.aggr_module), ends.tensors, ends.source, edge_weight)
        product = partial(spmm, ends.graph, edge_weight=edge_weight)
        parts = [over_vertices(partial(product, reduce=word), x) for word in self._reductions]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class GraphConv(Reducing):
    """Higher-order graph convolution: ``y[i] = sum_e a[e] x[j] W_rel + b + x[i] W_root``.

    The sum goes over the entries ``e = (i, j)`` of row ``i``; ``a`` are ``edge_weight``.

    Parameters
    ----------
    in_channels, out_channels, bias
        As in PyG: a pair is of sources and targets, -1 for as many features as the first ``x`` has.
    aggr : "add", "sum", "mean", "max" or "min"
        What takes the place of the sum.
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``SAGEConv``.

    Notes
    -----
    Features are mapped first where that makes them fewer.  Morris et al. (AAAI'19, arXiv
    1810.02244), equation 5.
    """

    __module__ = "sparsefmt.nn"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: Any = "add",
        bias: bool = True,
        **options: Unpack[Direction],
    ) -> None:
        of_sources, of_targets = in_pair(in_channels)
        check_counts(out_channels=out_channels)
        check_flags(bias=bias)
        super().__init__(aggr, **options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin_rel = linear_map(of_sources, out_channels, bias=bias)
        self.lin_root = linear_map(of_targets, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        draw_map(self.lin_rel)
        draw_map(self.lin_root)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels); arguments and errors are ``SAGEConv``'s."""
        ends = self._between(x, edge_index, size)
        x, name = ends.source, "x" if ends.alike else "x[0]"
        args = check_map(self.lin_rel, x, name)
        linear_reduction = self._reductions[0] in ("sum", "mean")
        if args and linear_reduction and maps_first(*args[0].shape[::-1], gradient=x.requires_grad):
            y = plus(self._reduced(ends, linear(x, args[0]), edge_weight), args[1])
        else:
            y = called(self.lin_rel, self._reduced(ends, x, edge_weight), name)
        if ends.target is None:
            return y
        return y + mapped(self.lin_root, ends.target, "x" if ends.alike else "x[1]")


class SimpleConv(Reducing):
    """Propagation without weights: ``y[i] = reduce_e(a[e] x[j])`` over the entries of row ``i``.

    Parameters
    ----------
    aggr : "add", "sum", "mean", "max" or "min", or a list of them
        Where PyG is installed also what its resolver knows, as for ``SAGEConv``.
    combine_root : "sum", "cat" or "self_loop", optional
        What becomes of a vertex's own features: they are added to the result, stand before it, or
        count as a neighbour's of weight 1.
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``SAGEConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``SAGEConv``; also if there is no such ``combine_root``.

    Notes
    -----
    PyG's layer of the same name, which is of no paper.
    """

    __module__ = "sparsefmt.nn"
    _takes_all = True

    def __init__(
        self, aggr: Any = "sum", combine_root: str | None = None, **options: Unpack[Direction]
    ) -> None:
        super().__init__(aggr, **options)
        if combine_root not in (None, "sum", "cat", "self_loop"):
            raise UnsupportedError(
                f"combine_root is {combine_root!r}: give 'sum', 'cat', 'self_loop' or None."
            )
        self.combine_root = combine_root

    def reset_parameters(self) -> None:
        """Reset PyG's aggregation, if there is one."""
        if not self._reductions:
            cast(Any, self.aggr_module).reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Map (n, feat) to (n, feat), or wider; arguments and errors are those of ``SAGEConv``."""
        ends = self._between(x, edge_index, size)
        if self.combine_root == "self_loop":
            ends, edge_weight = self._looped(ends, edge_weight)
        y = self._reduced(ends, ends.source, edge_weight)
        if ends.target is None or self.combine_root in (None, "self_loop"):
            return y
        own = as_autocast(ends.target)
        return y + own if self.combine_root == "sum" else torch.cat([own, y], -1)

    def _looped(self, ends: Ends, weight: Tensor | None) -> tuple[Ends, Tensor | None]:
        """Add one loop more to each vertex, behind the entries that there are."""
        if not ends.alike:
            raise UnsupportedError(
                "combine_root is 'self_loop' beside features of two ends, which share no vertex: "
                "give one tensor, or combine_root='sum'."
            )
        ends = ends.gathered()
        tensors = ends.tensors

        def edges() -> Tensor:
            own = torch.arange(tensors.n_rows, device=tensors.device)
            return torch.stack([torch.cat([e, own]) for e in rows_and_columns(tensors)[::-1]])

        made, size = tensors.cached("edges and loops", edges), (tensors.n_cols, tensors.n_rows)
        weight = own_values(tensors) if weight is None else weight
        if weight is not None:
            weight = torch.cat([weight, weight.new_ones(tensors.n_rows)])
        return ends._replace(shared=None).along(as_graph(made, None, size=size)), weight


class LEConv(Reducing):
    """Local extrema: ``y[i] = sum_e a[e] (x[j] W1 + b1 - x[i] W2) + x[i] W3 + b3``.

    The sum goes over the entries ``e = (i, j)`` of row ``i``; ``a`` are ``edge_weight``.

    Parameters
    ----------
    in_channels, out_channels, bias
        As for ``GraphConv``.
    aggr : "add", "sum" or "mean"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GraphConv``.

    Notes
    -----
    ASAP (AAAI'20, arXiv 1911.07979), equation 7.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        of_sources, of_targets = in_pair(in_channels)
        check_counts(out_channels=out_channels)
        check_flags(bias=bias)
        super().__init__(**options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin1 = linear_map(of_sources, out_channels, bias=bias)
        self.lin2 = linear_map(of_targets, out_channels, bias=False)
        self.lin3 = linear_map(of_targets, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        for layer in (self.lin1, self.lin2, self.lin3):
            draw_map(layer)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        ``x_target`` is needed; else arguments and errors are those of ``GraphConv``.
        """
        ends = self._between(x, edge_index)
        target, name = needed(ends), "x" if ends.alike else "x[1]"
        h = mapped(self.lin1, ends.source, "x" if ends.alike else "x[0]")
        y = self._reduced(ends, h, edge_weight)
        ones = torch.ones_like(h if h.dim() == 2 else h.flatten(0, -3)[0])[:, :1]
        share = self._reduced(ends, ones, edge_weight).to(y.dtype)
        return y - share * mapped(self.lin2, target, name) + mapped(self.lin3, target, name)


def needed(ends: Ends) -> Tensor:
    """Return features of targets, or refuse to go without."""
    if ends.target is None:
        raise DtypeError("x[1] is None: a message is of both ends, give features of targets.")
    return ends.target


class GatedGraphConv(Reducing):
    """Gated graph sequences: ``h_{l+1} = GRU(sum_e a[e] h_l[j] W_l, h_l)``, and ``h_0 = [x, 0]``.

    ``x`` is filled up with zeros to ``out_channels``; the result is ``h`` after ``num_layers``.

    Parameters
    ----------
    out_channels, num_layers, bias
        As in PyG.
    aggr : "add", "sum", "mean", "max" or "min"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    GGNN (ICLR'16, arXiv 1511.05493), section 3.2.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("num_layers",)

    def __init__(
        self,
        out_channels: int,
        num_layers: int,
        aggr: Any = "add",
        bias: bool = True,
        **options: Unpack[Direction],
    ) -> None:
        check_counts(out_channels=out_channels, num_layers=num_layers)
        check_flags(bias=bias)
        super().__init__(aggr, **options)
        self.out_channels, self.num_layers = out_channels, num_layers
        self.weight = Parameter(torch.empty(num_layers, out_channels, out_channels))
        self.rnn = GRUCell(out_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters from ``-1 / sqrt(out_channels) .. 1 / sqrt(out_channels)``."""
        bound = 1 / sqrt(self.out_channels)
        init.uniform_(self.weight, -bound, bound)
        self.rnn.reset_parameters()

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, feat) to (n, out_channels); arguments and errors are those of ``GCNConv``.

        ``x`` may not be sparse, and has at most ``out_channels`` features.
        """
        refuse_pair(x)
        refuse_static(x, self)
        ends = self._between(x, edge_index)
        h = ends.source
        if h.shape[1] > self.out_channels:
            raise ShapeError(
                f"x has {h.shape[1]} features but the layer takes {self.out_channels} at most: "
                f"give (n, {self.out_channels})."
            )
        check_like("x", h, self.weight)
        h = pad(as_autocast(h), (0, self.out_channels - h.shape[1]))
        for weight in self.weight:
            h = as_autocast(self.rnn(self._reduced(ends, h @ weight, edge_weight), h))
        return h
