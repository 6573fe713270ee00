"""Steps along the edges of a graph: features times its matrix, normalised as in GCN or not."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, Unpack

import torch
from torch import Tensor

from ..autograd import as_graph
from ..autograd.tensors.order import own_values
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from ..errors import DtypeError, ShapeError, UnsupportedError
from ._base import plus
from ._inputs import by_vertex, check_counts, check_edge_weight, check_in_channels, check_input
from ._loops import (
    earlier_loops,
    ends,
    loops,
    missing_loops,
    stored,
    symmetric,
    with_loops,
)
from ._passing import Passing, PassingOptions
from .shared import aggregate_with_own, operands, propagate, shared, spmm

#: Features (n, feat), and a bias to add, to the same shape.
Step: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]


class Normalisation(NamedTuple):
    """What PyG's ``gcn_norm`` makes of a graph.

    ``fill`` is the value of the loop that each vertex without one gets, 0 for none, and None for a
    graph that stays as it is; ``reduction`` is that of ``spmm``; ``to_all`` tells that vertices
    with a loop get another one too.
    """

    fill: float | None = 1.0
    reduction: str = "sum"
    to_all: bool = False


class HopConvolution(Passing):
    """A layer of ``K`` steps."""

    _reductions_known = ("sum", "mean", "max", "min")

    def __init__(
        self, in_channels: int, out_channels: int, K: int, **options: Unpack[PassingOptions]
    ) -> None:
        check_in_channels(in_channels)
        check_counts(out_channels=out_channels)
        super().__init__(**options)
        if isinstance(K, bool) or not isinstance(K, int):
            raise DtypeError(f"K is {K!r}: give an integer, 0 or more.")
        if K < 0:
            raise ShapeError(f"K is {K}: give 0 or more.")
        self.in_channels, self.out_channels, self.K = in_channels, out_channels, K

    def _shown(self) -> list[str]:
        return [*super()._shown(), f"K={self.K}"]

    def _steps(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None, fill: float | None
    ) -> list[Callable[[Tensor], Tensor]]:
        """Give the ``K`` steps, which share their factors, for features like ``x``."""
        graph = self._turned(as_graph(edge_index, by_vertex(x), name="edge_index"), edge_index)
        check_input(x, graph, edge_index)
        check_edge_weight(edge_weight, graph)
        probe, values, _, _ = operands(graph, by_vertex(x).flatten(1)[:, :1], edge_weight)
        weight = None if edge_weight is None else values
        norm = Normalisation(fill, self._reductions[0], bool(fill) and gets_all_loops(edge_index))
        one = hop(graph, weight, probe.dtype, norm)
        return [lambda h: over_vertices(lambda rows: one(rows, None), h)] * self.K


def gets_all_loops(given: Any) -> bool:
    """Tell whether ``gcn_norm`` adds a loop to vertices that have one: of torch's sparse tensors.

    PyG adds only the missing ones to an ``edge_index`` and to a torch_sparse.SparseTensor.
    """
    return isinstance(given, Tensor) and given.layout is not torch.strided


def hop(
    graph: GraphLike, edge_weight: Tensor | None, dtype: torch.dtype, norm: Normalisation
) -> Step:
    """Give the function that takes features of that dtype one step along the edges.

    ``y = D^-1/2 (A + fill I) D^-1/2 x + bias``, where ``I`` adds a loop to the vertices that have
    none, or to all, and ``D`` is the diagonal of the rows' sums of ``A + fill I``; or
    ``y = A x + bias``.
    """
    fill, reduction, to_all = norm
    if fill is not None and reduction != "sum":
        _refuse_shared(graph, reduction)
        graph, edge_weight = _explicit(graph, edge_weight, dtype, fill, to_all)
        fill = None
    if fill is None:
        return lambda x, bias: plus(spmm(graph, x, edge_weight, reduce=reduction), bias)
    scale, loop = symmetric(graph, edge_weight, dtype, fill, to_all=to_all)
    scales: dict[str, Any] = {"row_scale": scale, "col_scale": scale}
    own = loop[:, None]
    if fill == 0:
        return lambda x, bias: plus(spmm(graph, x, edge_weight, **scales), bias)
    # Traced, a Function that writes in place loses its gradients (torch 2.11).
    if edge_weight is None and not torch.compiler.is_compiling():
        missing = None if to_all else stored(graph, dtype)
        return lambda x, bias: propagate(graph, x, scale, own, without=missing, bias=bias)
    scales["without"] = own == 0
    return lambda x, bias: plus(aggregate_with_own(graph, x, own, edge_weight, **scales), bias)


def _refuse_shared(graph: GraphLike, reduction: str) -> None:
    """Refuse a normalised graph that processes share, but for sums."""
    if shared(graph) is not None:
        raise UnsupportedError(
            f"aggr is {reduction!r} of a normalised graph that processes share: give 'sum', or the "
            "layer normalize=False."
        )


def _explicit(
    graph: GraphLike, edge_weight: Tensor | None, dtype: torch.dtype, fill: float, to_all: bool
) -> tuple[GraphLike, Tensor]:
    """Give the graph with its loops and each edge's normalised value, for other reductions."""
    scale, _ = symmetric(graph, edge_weight, dtype, fill, to_all=to_all)
    given = own_values(graph) if edge_weight is None else edge_weight
    weight = scale.new_ones(graph_tensors(graph).nnz) if given is None else given.to(dtype)
    row, col = (end.long() for end in ends(graph))
    values = scale[row] * weight * scale[col]
    if fill == 0:
        return graph, values
    looped = with_loops(graph)
    counted, _ = loops(graph)
    earlier = None if to_all else earlier_loops(graph)
    counted = (counted if earlier is None else counted - earlier).to(dtype)
    own = spmm(graph, counted.new_ones(scale.shape[0], 1), weight * counted)[:, 0]
    added = fill if to_all else fill * missing_loops(graph).to(dtype)
    own = (own + added) * scale * scale
    n = scale.shape[0]
    graph = as_graph(looped.edges, None, size=(n, n))
    return graph, torch.cat([values[looped.others], own])


def over_vertices(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Take a step with (n, feat), or with features (..., n, feat) side by side in rows."""
    if x.dim() == 2:
        return step(x)
    first = x.movedim(-2, 0)
    y = step(first.flatten(1))
    return y.reshape(y.shape[0], *first.shape[1:]).movedim(0, -2)
