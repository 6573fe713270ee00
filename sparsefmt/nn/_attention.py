"""What attention layers share: heads and how they are joined, loops, residuals, weights."""

from math import sqrt
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, init
from torch.nn.functional import dropout

from ..autograd import edge_softmax
from ..autograd.tensors.prepare import GraphLike
from ..errors import ShapeError, UnsupportedError
from ._base import plus
from ._edges import (
    AttentionWeights,
    Entries,
    as_given,
    check_edge_features,
    check_fill,
    entries_with_loops,
    loop_features,
)
from ._inputs import Ends, check_counts, check_flags, check_number, in_pair
from ._linear import GLOROT, draw_map, linear_map, mapped
from ._passing import Passing, PassingOptions


class Attention(Passing):
    """Attention with heads, over edges that may have features.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, dropout, edge_dim
        As for ``GATConv``.
    **passing
        As for ``Passing``.
    """

    _node_dim: ClassVar[int] = 0

    lin_edge: Linear | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        **passing: Unpack[PassingOptions],
    ) -> None:
        super().__init__(**passing)
        in_pair(in_channels)
        check_flags(concat=concat)
        check_counts(out_channels=out_channels, heads=heads)
        check_number("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ShapeError(f"dropout is {dropout!r}: give a share from 0 to less than 1.")
        if edge_dim is not None and edge_dim != -1:
            check_counts(", or -1 for those of the first edge_attr", edge_dim=edge_dim)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.heads, self.concat, self.dropout, self.edge_dim = heads, concat, dropout, edge_dim

    def _shown(self) -> list[str]:
        return [*super()._shown(), f"heads={self.heads}"]

    def _ends(self, x: Any, graph: GraphLike, size: Any = None) -> Ends:
        """Take features with the graph between them; those of a static graph have no heads."""
        for name, one in (("x", x),) if isinstance(x, Tensor) else _named(x):
            refuse_static(name, one, self)
        ends = self._between(x, graph, size).here()
        if ends.away is not None and not ends.away.is_square and self._adds_loops():
            raise UnsupportedError(
                "add_self_loops is True beside a graph that processes share, whose sources are "
                "other vertices than its targets: give add_self_loops=False."
            )
        return ends

    def _adds_loops(self) -> bool:
        """Tell whether vertices get loops."""
        return bool(getattr(self, "add_self_loops", False))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, self.out_channels)

    def _without_heads(self, y: Tensor) -> Tensor:
        """(n, heads, out_channels) to the heads side by side, or their mean."""
        return y.flatten(1) if self.concat or self.heads == 1 else y.mean(1)

    def _mapped(self, layer: Linear, x: Tensor, name: str) -> Tensor:
        """(n, heads, out_channels) Map features, which a lazy layer has not met yet."""
        return self._by_head(mapped(layer, x, name))

    def _of_sources(self, ends: Ends, *layers: Linear) -> list[Tensor]:
        """(n_source, heads, out_channels) Map features of all sources, by each of the maps.

        What other processes have of them comes in one exchange, in the narrower form.
        """
        x, away, name = ends.source, ends.away, "x" if ends.alike else "x[0]"
        width = len(layers) * self.heads * self.out_channels
        if away is None or away.sends_first(x, width):
            x = x if away is None else away.extended(x)
            return [self._mapped(layer, x, name) for layer in layers]
        found = torch.cat([self._mapped(layer, x, name) for layer in layers], 1)
        return list(away.extended(found).split(self.heads, 1))

    def _edge_features(self, edge_attr: Tensor | None, graph: GraphLike) -> Tensor | None:
        """(nnz, edge_dim) Check the features of edges, if there are some."""
        return None if edge_attr is None else check_edge_features(edge_attr, graph, self.lin_edge)

    def _drops(self) -> bool:
        """Tell whether weights are left out now."""
        return self.training and self.dropout > 0

    def _dropped(self, weights: Tensor) -> Tensor:
        """Leave out a share of the weights while it trains, those that PyG's layer leaves out."""
        return dropout(weights, self.dropout, self.training)


def refuse_static(name: str, x: Any, layer: Module) -> None:
    """Refuse features (batch, n, feat), which attention layers do not take, nor PyG's."""
    if isinstance(x, Tensor) and x.dim() > 2:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}: {type(layer).__name__} takes no static features, "
            "as PyG's; give (n, feat), one call for each of them."
        )


def _named(x: Any) -> list[tuple[str, Any]]:
    """Give both parts of a tuple, by their names."""
    return [(f"x[{i}]", one) for i, one in enumerate(x)] if isinstance(x, tuple | list) else []


class LoopedAttention(Attention):
    """Attention that may give each vertex one loop, and add a map of its own features.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops, edge_dim
        As for ``GATConv``.
    fill_value
        As for ``GATConv``.
    **passing
        As for ``Passing``.
    """

    bias: Parameter | None
    res: Linear | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
        edge_dim: int | None,
        fill_value: float | Tensor | str,
        **passing: Unpack[PassingOptions],
    ) -> None:
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, **passing)
        check_flags(add_self_loops=add_self_loops)
        check_number("negative_slope", negative_slope)
        check_fill(fill_value)
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value = fill_value

    def _vectors(self) -> Parameter:
        """Make a vector for each head."""
        return Parameter(torch.empty(1, self.heads, self.out_channels))

    def _add_edges(self, edge_dim: int | None) -> None:
        """Make the map of edge features."""
        self.lin_edge = None
        if edge_dim is not None:
            width = self.heads * self.out_channels
            self.lin_edge = linear_map(edge_dim, width, bias=False, draw=GLOROT)

    def _add_own(self, residual: bool, bias: bool) -> None:
        """Make what is added to the joined heads, which comes last in PyG's order."""
        check_flags(residual=residual, bias=bias)
        width = self.out_channels * (self.heads if self.concat else 1)
        self.residual, self.res = residual, None
        if residual:
            of_targets = in_pair(self.in_channels)[1]
            self.res = linear_map(of_targets, width, bias=False, draw=GLOROT)
        self.bias = Parameter(torch.empty(width)) if bias else None

    def _draw(self, maps: tuple[Linear | None, ...], vectors: tuple[Tensor | None, ...]) -> None:
        """Draw maps and vectors by Glorot's uniform rule, in this order; the bias is 0."""
        for layer in (*maps, self.lin_edge, self.res):
            if layer is not None:
                draw_map(layer, GLOROT)
        for each in vectors:
            if each is not None:
                bound = sqrt(6 / (each.shape[-2] + each.shape[-1]))
                init.uniform_(each, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)

    def _options(self) -> dict[str, Any]:
        """Options of the aggregation; nothing is dropped in evaluation."""
        return {
            "negative_slope": self.negative_slope,
            "dropout": self.dropout if self.training else 0.0,
            "self_loops": self.add_self_loops,
        }

    def _residual(self, ends: Ends) -> Tensor | None:
        """(n_target, width) The map of the targets' own features."""
        if self.res is None or ends.target is None:
            return None
        return mapped(self.res, ends.target, "x" if ends.alike else "x[1]")

    def _entries(self, graph: GraphLike, features: Tensor | None) -> Entries:
        """Give the entries that attention goes over, loops included."""
        if not self.add_self_loops:
            return Entries(graph, features)
        own = None if features is None else self._loop_features(graph, features)
        return entries_with_loops(graph, features, own)

    def _loop_features(self, graph: GraphLike, features: Tensor) -> Tensor:
        """(n_loops, edge_dim) Features of loops, by ``edge_index[1]`` whatever flows, as in PyG."""
        return loop_features(self._turned(graph, None), features, self.fill_value)

    def _edges_and_weights(self, given: Any, found: AttentionWeights, dtype: torch.dtype) -> Any:
        """Give the edges and their weights, in the form in which PyG gives them."""
        graph = self._turned(found.graph, None)  # that along which messages flow
        return as_given(given, graph, found.weights.to(dtype), looped=self.add_self_loops)

    def _attention(self, entries: Entries, scores: Tensor) -> AttentionWeights:
        """Compute the weights from scores, 0 for those that dropout leaves out."""
        with torch.autocast(scores.device.type, enabled=False):
            return AttentionWeights(
                entries.graph, self._dropped(edge_softmax(entries.graph, scores))
            )

    def _biased(self, y: Tensor) -> Tensor:
        """Join the heads, and add the bias."""
        return plus(self._without_heads(y), self.bias)
