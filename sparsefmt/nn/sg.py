"""SGC's and TAG's convolutions: several steps along the edges, and linear maps."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Unpack, cast

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList, Parameter

from ..autograd import as_graph
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.tensors import GraphTensors
from ..errors import DtypeError, ShapeError
from ._inputs import by_vertex, check_counts, check_flags, check_in_channels, check_input
from ._loops import as_operands, first_graph, gets_all_loops, hop, over_vertices
from ._maps import called, check_map, draw_map, linear_map, mapped, set_to_zero
from ._passing import Passing, PassingOptions, plus


class Norm(NamedTuple):
    """Arguments of ``hop``, in its order, whatever features it is to take along the edges."""

    graph: GraphLike
    tensors: GraphTensors
    edge_weight: Tensor | None
    dtype: torch.dtype
    fill: float | None
    to_all: bool


class Stepping(Passing):
    """A layer of steps along the edges of one graph, which share their factors."""

    _reductions_known: ClassVar[tuple[str, ...]] = ("sum", "mean", "max", "min")

    def _norm(
        self,
        x: Tensor,
        edge_index: GraphLike,
        edge_weight: Tensor | None,
        fill: float | None,
        *,
        cached: bool = False,
    ) -> Norm:
        """Check features and graph, that of the first call if it is ``cached``."""
        to_all = gets_all_loops(edge_index)
        if cached and fill is not None:
            edge_index, edge_weight, to_all = first_graph(self, x, edge_index, edge_weight)
        rows = by_vertex(x)
        graph = self._turned(as_graph(edge_index, rows, name="edge_index"), edge_index)
        tensors, column = check_input(x, graph, edge_index), rows.flatten(1)[:, :1]
        column, weight = as_operands(graph, tensors, column, edge_weight)
        return Norm(graph, tensors, weight, column.dtype, fill, to_all)

    def _step(self, norm: Norm) -> Callable[[Tensor], Tensor]:
        """Return the function that takes features one step along the edges."""
        step = hop(*norm[:5], reduction=self._reductions[0], to_all=norm.to_all)
        return lambda h: over_vertices(lambda rows: step(rows, None), h)


def check_steps(steps: int, name: str = "K") -> None:
    """Check for an integer, 0 or more."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise DtypeError(f"{name} is {steps!r}: give an integer, 0 or more.")
    if steps < 0:
        raise ShapeError(f"{name} is {steps}: give 0 or more.")


class HopConvolution(Stepping):
    """A layer of ``K`` steps."""

    _shown: ClassVar[tuple[str, ...]] = ("K",)
    #: Computes the layer, of features, a graph and edge weights.
    _computed: ClassVar[Callable[..., Tensor]]

    def __init__(
        self, in_channels: int, out_channels: int, K: int, **options: Unpack[PassingOptions]
    ) -> None:
        check_in_channels(in_channels)
        check_counts(out_channels=out_channels)
        super().__init__(**options)
        check_steps(K)
        self.in_channels, self.out_channels, self.K = in_channels, out_channels, K

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels); arguments and errors are those of ``GCNConv``.

        ``x`` may not be sparse.
        """
        if self._plan is not None and edge_weight is None:
            planned: Tensor | None = self._plan(self, x, edge_index)
            if planned is not None:
                return planned
        return self._computed(x, edge_index, edge_weight)

    def _steps(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None, fill: float | None
    ) -> list[Callable[[Tensor], Tensor]]:
        """Return the ``K`` steps, which share their factors, for features like ``x``."""
        return [self._step(self._norm(x, edge_index, edge_weight, fill))] * self.K


class SGConv(HopConvolution):
    """Simple graph convolution: ``y = (D^-1/2 (A + I) D^-1/2)^K x W + b``.

    ``D`` is the diagonal of the rows' sums of ``A + I``; ``I`` adds a loop to the vertices that
    have none.

    Parameters
    ----------
    in_channels, out_channels, K, cached, add_self_loops, bias
        As in PyG; ``K`` may be 0.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    Loops and factors as in ``GCNConv``, those of torch's sparse tensors too.  SGC (ICML'19),
    equation 6.
    """

    __module__ = "sparsefmt.nn"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: int = 1,
        cached: bool = False,
        add_self_loops: bool = True,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, K, **options)
        check_flags(cached=cached, add_self_loops=add_self_loops, bias=bias)
        self.cached, self.add_self_loops = cached, add_self_loops
        self.lin = linear_map(in_channels, out_channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does, and forget what was aggregated."""
        draw_map(self.lin)
        self._cached_x: Tensor | None = None

    def _computed(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None) -> Tensor:
        """Propagate ``x`` by ``K`` steps, or read the cached result, and map it by ``lin``."""
        if self._cached_x is not None:
            return called(self.lin, self._cached_x.detach(), "x")
        fill = 1.0 if self.add_self_loops else 0.0
        for step in self._steps(x, edge_index, edge_weight, fill):
            x = step(x)
        if self.cached and self.K:
            self._cached_x = x
        return mapped(self.lin, x, "x")


class TAGConv(HopConvolution):
    """Topology adaptive graph convolution: ``y = sum_k (D^-1/2 A D^-1/2)^k x W_k + b``.

    ``k`` runs from 0 to ``K``; ``D`` is the diagonal of the rows' sums of ``A``.

    Parameters
    ----------
    in_channels, out_channels, K, bias, normalize
        As in PyG; ``K`` may be 0.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    TAGCN (arXiv 1710.10370), equation 5.
    """

    __module__ = "sparsefmt.nn"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: int = 3,
        bias: bool = True,
        normalize: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, K, **options)
        check_flags(bias=bias, normalize=normalize)
        self.normalize = normalize
        self.lins = ModuleList(
            linear_map(in_channels, out_channels, bias=False) for _ in range(K + 1)
        )
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.Linear`` does, and set the bias to 0."""
        for layer in self.lins:
            draw_map(cast(Linear, layer))
        set_to_zero(self.bias)

    def _computed(self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None) -> Tensor:
        """Map the features of each step, and add them up."""
        steps = self._steps(x, edge_index, edge_weight, 0.0 if self.normalize else None)
        first, *rest = self.lins
        for layer in self.lins:
            check_map(layer, x, "x")
        y = called(first, x, "x")
        for layer, step in zip(rest, steps, strict=True):
            x = step(x)
            y = y + called(layer, x, "x")
        return plus(y, self.bias)
