"""Steps of a normalised adjacency matrix: APPNP, SSGConv, LGConv, GCN2Conv and MixHopConv."""

from collections.abc import Callable, Sequence
from functools import partial
from math import log
from typing import Unpack, cast

import torch
from torch import Tensor
from torch.nn import Identity, Linear, ModuleList, Parameter
from torch.nn.functional import dropout as dropped

from ...autograd import spmm
from ...autograd.tensors.order import own_values
from ...autograd.tensors.prepare import GraphLike
from ...autograd.tensors.shared import Shared
from ...errors import DtypeError, ShapeError, UnsupportedError
from .._inputs import (
    as_autocast,
    check_counts,
    check_flags,
    check_in_channels,
    check_like,
    check_number,
    check_share,
)
from .._loops import explicit, over_vertices
from .._maps import called, draw_glorot, draw_map, linear_map, mapped, set_to_zero
from .._passing import PassingOptions, plus
from ..sg import HopConvolution, Norm, Stepping, check_steps


class Normalised(Stepping):
    """A layer without linear maps whose steps may add loops, and may normalise."""

    cached: bool = False
    normalize: bool
    add_self_loops: bool = False

    def _set_loops(self, cached: bool, add_self_loops: bool, normalize: bool) -> None:
        """Check and keep the options of loops and factors."""
        check_flags(cached=cached, add_self_loops=add_self_loops, normalize=normalize)
        self.cached, self.add_self_loops, self.normalize = cached, add_self_loops, normalize
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the cached graph."""
        self._cached_edge_index = self._cached_adj_t = None

    def _norm_of(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None) -> Norm:
        """Check features and graph, and return what its steps share."""
        fill = float(self.add_self_loops) if self.normalize else None
        return self._norm(x, edge_index, edge_weight, fill, cached=self.cached)


class APPNP(Normalised):
    """Personalised propagation: ``y_k = (1 - alpha) D^-1/2 (A + I) D^-1/2 y_{k-1} + alpha x``.

    ``y_0 = x``, and the result is ``y_K``; ``D`` is the diagonal of the rows' sums of ``A + I``,
    and ``I`` adds a loop to the vertices that have none.

    Parameters
    ----------
    K, alpha, dropout, cached, add_self_loops, normalize
        As in PyG; in training each step leaves out a share ``dropout`` of the entries, besides
        those that steps before it have left out.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    Loops and factors as in ``GCNConv``.  APPNP (ICLR'19, arXiv 1810.05997), equation 4.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("K", "alpha")

    def __init__(
        self,
        K: int,
        alpha: float,
        dropout: float = 0.0,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_steps(K)
        check_number("alpha", alpha)
        check_share("dropout", dropout)
        super().__init__(**options)
        self.K, self.alpha, self.dropout = K, alpha, dropout
        self._set_loops(cached, add_self_loops, normalize)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, feat) to (n, feat); arguments and errors are those of ``GCNConv``.

        ``x`` may not be sparse.
        """
        norm = self._norm_of(x, edge_index, edge_weight)
        step, first = self._step(norm), as_autocast(x)
        if self.training and self.dropout:
            step = self._dropping(norm)
        x = first
        for _ in range(self.K):
            x = (1 - self.alpha) * step(x) + self.alpha * first
        return x

    def _dropping(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Return a step that leaves out a share of the entries that the one before it had."""
        graph, weight = entries_of(norm)

        def step(h: Tensor) -> Tensor:
            nonlocal weight
            weight = dropped(weight, self.dropout)
            product = partial(spmm, graph, edge_weight=weight, reduce=self._reductions[0])
            return over_vertices(product, h)

        return step


def entries_of(norm: Norm) -> tuple[GraphLike, Tensor]:
    """Return a graph with the loops that a layer adds, and the values of its entries."""
    graph, tensors, weight, dtype, fill, to_all = norm
    if isinstance(graph, Shared):
        raise UnsupportedError(
            "processes share the graph, and the layer needs a value for each of its entries: give "
            "the whole graph, or another layer."
        )
    if fill is not None:
        looped, values = explicit(tensors, weight, dtype, fill, to_all)
        return looped if fill else graph, values
    weight = own_values(tensors) if weight is None else weight
    if weight is None:
        weight = torch.ones(tensors.nnz, dtype=dtype, device=tensors.device)
    return graph, weight


class SSGConv(HopConvolution):
    """Simple spectral convolution: ``y = 1/K sum_k ((1 - alpha) P^k x + alpha x) W + b``.

    ``k`` runs from 1 to ``K``; ``P = D^-1/2 (A + I) D^-1/2`` is that of ``GCNConv``.

    Parameters
    ----------
    in_channels, out_channels, alpha, K, cached, add_self_loops, bias
        As in PyG; with ``K`` of 0 ``y = alpha x W + b``.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    SSGC (ICLR'21), equation 8.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("K", "alpha")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        alpha: float,
        K: int = 1,
        cached: bool = False,
        add_self_loops: bool = True,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, K, **options)
        check_number("alpha", alpha)
        check_flags(cached=cached, add_self_loops=add_self_loops, bias=bias)
        self.alpha, self.cached, self.add_self_loops = alpha, cached, add_self_loops
        self.lin = linear_map(in_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does, and forget what was aggregated."""
        draw_map(self.lin)
        self._cached_h: Tensor | None = None

    def _computed(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None) -> Tensor:
        """Add up the features of all steps, or read the cached sum, and map it by ``lin``."""
        if self._cached_h is not None:
            return called(self.lin, self._cached_h.detach(), "x")
        steps = self._steps(x, edge_index, edge_weight, float(self.add_self_loops))
        h = self.alpha * x
        for step in steps:
            x = step(x)
            h = h + (1 - self.alpha) / self.K * x
        if self.cached:
            self._cached_h = h
        return mapped(self.lin, h, "x")


class LGConv(Normalised):
    """LightGCN's convolution: ``y = D^-1/2 A D^-1/2 x``, or ``A x`` without ``normalize``.

    ``D`` is the diagonal of the rows' sums of ``A``; no loops are added.

    Parameters
    ----------
    normalize
        As in PyG.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    LightGCN (SIGIR'20, arXiv 2002.02126), equation 7.
    """

    __module__ = "sparsefmt.nn"

    def __init__(self, normalize: bool = True, **options: Unpack[PassingOptions]) -> None:
        super().__init__(**options)
        self._set_loops(False, False, normalize)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, feat) to (n, feat); arguments and errors are those of ``APPNP``."""
        return self._step(self._norm_of(x, edge_index, edge_weight))(x)


class GCN2Conv(Normalised):
    """GCNII: ``y = h ((1 - beta) I + beta W1)``, where ``h = (1 - alpha) P x + alpha x_0``.

    ``P = D^-1/2 (A + I) D^-1/2`` is that of ``GCNConv``.  Without ``shared_weights`` ``alpha x_0``
    has a weight ``W2`` in the place of ``W1``.

    Parameters
    ----------
    channels, alpha, theta, layer, shared_weights, cached, add_self_loops, normalize
        As in PyG: ``beta = log(theta / layer + 1)`` where both are given, else 1.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    GCNII (ICML'20, arXiv 2007.02133), equation 5.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("alpha", "beta")

    weight2: Parameter | None

    def __init__(
        self,
        channels: int,
        alpha: float,
        theta: float | None = None,
        layer: int | None = None,
        shared_weights: bool = True,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_counts(channels=channels)
        check_number("alpha", alpha)
        check_flags(shared_weights=shared_weights)
        super().__init__(**options)
        self.channels, self.alpha, self.beta = channels, alpha, 1.0
        if theta is not None or layer is not None:
            check_number("theta", theta)
            check_counts(layer=layer)
            self.beta = log(cast(float, theta) / cast(int, layer) + 1)
        self.weight1 = Parameter(torch.empty(channels, channels))
        weight2 = None if shared_weights else Parameter(torch.empty(channels, channels))
        self.register_parameter("weight2", weight2)
        self._set_loops(cached, add_self_loops, normalize)

    def reset_parameters(self) -> None:
        """Draw Glorot's uniform weights, and forget the cached graph."""
        draw_glorot(self.weight1)
        draw_glorot(self.weight2)
        super().reset_parameters()

    def forward(
        self, x: Tensor, x_0: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, channels) to (n, channels).

        Parameters
        ----------
        x, x_0 : Tensor, shape (n, channels)
            Features, and those of the first layer.
        edge_index, edge_weight
            As for ``GCNConv``.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``GCNConv``.
        """
        step = self._step(self._norm_of(x, edge_index, edge_weight))
        check_first(x_0, x)
        for name, features in (("x", x), ("x_0", x_0)):
            check_fits(name, features, self.channels, self.weight1)
        h, first = (1 - self.alpha) * step(as_autocast(x)), self.alpha * as_autocast(x_0)
        if self.weight2 is None:
            h = h + first
            return (1 - self.beta) * h + self.beta * (h @ self.weight1)
        y = (1 - self.beta) * (h + first)
        return y + self.beta * (h @ self.weight1 + first @ self.weight2)


def check_first(x_0: object, x: Tensor) -> None:
    """Check features of the first layer, which are added to ``x``."""
    if not isinstance(x_0, Tensor) or x_0.shape != x.shape:
        shape = tuple(x_0.shape) if isinstance(x_0, Tensor) else type(x_0).__name__
        raise ShapeError(f"x_0 is {shape} but x {tuple(x.shape)}: give features of one shape.")


def check_fits(name: str, x: Tensor, width: int, weight: Tensor) -> None:
    """Check features for a weight that takes that many of them."""
    if x.shape[-1] != width:
        raise ShapeError(
            f"{name} has {x.shape[-1]} features but the layer takes {width}: give (n, {width})."
        )
    check_like(name, x, weight)


class MixHopConv(Stepping):
    """Mixed hops: ``y = [P^p x W_p for p in powers] + b``, side by side.

    ``P = D^-1/2 (A + I) D^-1/2`` is that of ``GCNConv``.

    Parameters
    ----------
    in_channels, out_channels, powers, add_self_loops, bias
        As in PyG; ``powers`` are 0, 1 and 2 by default.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``; also if ``powers`` are none.

    Notes
    -----
    MixHop (ICML'19, arXiv 1905.00067), equation 2.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("powers",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        powers: Sequence[int] | None = None,
        add_self_loops: bool = True,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_in_channels(in_channels)
        check_counts(out_channels=out_channels)
        check_flags(add_self_loops=add_self_loops, bias=bias)
        super().__init__(**options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.powers, self.add_self_loops = [0, 1, 2] if powers is None else powers, add_self_loops
        if not isinstance(self.powers, list | tuple) or not self.powers:
            raise DtypeError(f"powers is {powers!r}: give a list of integers, 0 or more.")
        for power in self.powers:
            check_steps(power, "powers")
        self.lins = ModuleList(
            linear_map(in_channels, out_channels, bias=False) if p in self.powers else Identity()
            for p in range(max(self.powers) + 1)
        )
        width = len(self.powers) * out_channels
        self.bias = Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.Linear`` does, and set the bias to 0."""
        for layer in self.lins:
            if not isinstance(layer, Identity):
                draw_map(cast(Linear, layer))
        set_to_zero(self.bias)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, in_channels) to (n, len(powers) * out_channels); arguments as ``APPNP``'s."""
        step = self._step(self._norm(x, edge_index, edge_weight, float(self.add_self_loops)))
        parts = [mapped(self.lins[0], x, "x")]
        for layer in [*self.lins][1:]:
            x = step(x)
            parts.append(mapped(layer, x, "x"))
        return plus(torch.cat([parts[p] for p in self.powers], -1), self.bias)
