"""GCN's convolution, with MaxK or over a sample of each row, and MaxK itself."""

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear

from ..autograd import aggregate_with_own, as_graph, maxk, maxk_aggregate
from ..autograd.cbsr import features_to_keep
from ..autograd.tensors.order import in_csr_order
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.shared import Shared
from ..autograd.tensors.tensors import GraphTensors
from ..errors import ShapeError
from ._inputs import by_vertex, check_counts, check_flags, check_in_channels, check_input
from ._loops import (
    as_operands,
    first_graph,
    gets_all_loops,
    hop,
    lone_loops,
    over_vertices,
    symmetric,
)
from ._maps import GLOROT, called, check_map, draw_map, linear_map, set_to_zero
from ._passing import FORWARD, SUM, Convolution, Options, plus


class GCNConv(Convolution):
    """Graph convolution: ``y = D^-1/2 (A + I) D^-1/2 s(x) W + b``.

    ``s`` is ``MaxK(k)``, in the place of the activation before the layer, or nothing without ``k``;
    with ``maxk_on="mapped"`` it is ``s(x W)``.  ``D`` is the diagonal of the rows' sums of
    ``A + I``; ``I`` adds a loop to the vertices that have none.

    Parameters
    ----------
    in_channels, out_channels, improved, cached, add_self_loops, normalize, bias
        As in PyG: -1 for as many features as the first ``x`` has; without ``normalize``,
        ``y = A s(x) W + b``.
    k : int, optional
        Features of ``x``, or of ``x W``, to keep: 1 or more, at most as many as there are.
    maxk_on : "input" or "mapped"
        Of which features ``k`` keeps some: of ``x``, or of ``x W``.
    dropout : float
        Share of the features that MaxK keeps that training sets to 0, from 0 to less than 1; the
        others are divided by one minus it.  Nothing dense is made for it.  Not without ``k``.
    sample : int, optional
        Entries of each row that the layer goes over in evaluation; all of them by default.  The sum
        over the neighbours is multiplied by the entries of the row over the sampled ones; ``D``
        and the loops that are added stay those of the whole graph.  Not with ``k``.
    training_sample : int, optional
        As ``sample``, while it trains: other entries at each call, which the strategy "random" of
        ``autograd.sampled_aggregate`` draws.
    strategy : "bucket", "fastrand" or "random"
        Which entries of a longer row ``sample`` takes: the first ones, those at fixed steps, or a
        random sample; see ``autograd.sampled_aggregate``.
    aggr : "add", "sum", "mean", "max" or "min"
        How the weighted features of neighbours and loop are put together; other than sums not
        beside ``k`` or samples.
    flow : "source_to_target" or "target_to_source"
        Whether ``edge_index[0]`` are sources, or targets.
    node_dim, decomposed_layers, aggr_kwargs : optional
        PyG's: -2; 1 or more, without effect, since no array of messages is made; nothing.

    Raises
    ------
    DtypeError, ShapeError
        If a number is no integer, or out of its range, or loops are to be added and nothing
        normalised.
    UnsupportedError
        If there is no such strategy, a sample is asked for beside ``k``, or what only PyG's layer
        can do.

    Notes
    -----
    Of several loops of one vertex the last counts, as in PyG; all of them without
    ``add_self_loops``, and in torch's sparse tensors, where vertices with a loop get one more.  The
    factors of a graph's own values are kept with the graph; those of ``edge_weight`` are computed
    at each call and have gradients, as in code that ``torch.compile`` has compiled.  GCN (ICLR'17),
    equation 2; MaxK-GNN (ASPLOS'24), section 3.1; ES-SpMM (arXiv 2104.10716); DropEdge (ICLR'20).
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean", "max", "min")
    _defaults: ClassVar = {
        **Convolution._defaults,
        **{"normalize": True, "add_self_loops": True, "improved": False},
    }

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        **options: Unpack[Options],
    ) -> None:
        check_counts(out_channels=out_channels)
        check_in_channels(in_channels)
        check_flags(improved=improved, cached=cached, normalize=normalize, bias=bias)
        if add_self_loops is not None:
            check_flags(add_self_loops=add_self_loops)
        super().__init__((in_channels, out_channels), **options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.cached, self.normalize = improved, cached, normalize
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        if self.add_self_loops and not normalize:
            raise ShapeError(
                "add_self_loops is True and normalize is False: GCNConv does not support adding "
                "self-loops that it does not normalise; leave one of them out, or give a graph "
                "with loops."
            )
        self.lin = linear_map(in_channels, out_channels, bias=False, draw=GLOROT)
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot's uniform weights, set the bias to 0, and forget the cached graph."""
        draw_map(self.lin, GLOROT)
        set_to_zero(self.bias)
        self._cached_edge_index = self._cached_adj_t = None

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
            Or (..., n, in_channels), features of one graph; or a sparse matrix.
        edge_index : Graph, shape (n, n)
            Or PyG's ``edge_index``, ``EdgeIndex`` or ``adj_t``.
        edge_weight : Tensor, shape (nnz,), optional
            In the order of ``graph.structure``, that of the edges; by default the graph's own
            values, or 1.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if the graph is not square.
        """
        if self._plan is not None and edge_weight is None:
            planned: Tensor | None = self._plan(self, x, edge_index)
            if planned is not None:
                return planned
        to_all = gets_all_loops(edge_index)
        if self.cached and self.normalize:
            edge_index, edge_weight, to_all = first_graph(self, x, edge_index, edge_weight)
        rows = x if isinstance(x, Tensor) and x.dim() == 2 else by_vertex(x)
        graph = as_graph(edge_index, rows, name="edge_index")
        if self.flow != FORWARD:
            graph = self._turned(graph, edge_index)
        tensors = check_input(x, graph, edge_index, sparse=True)
        lin, width = check_map(self.lin, x, "x"), self._width()
        if x.dim() > 2:
            self._check_no_batch(x)
        product = lin is not None and lin[1] is None  # of features and a weight, and nothing else
        chooses = self.k is not None
        if chooses and self.maxk_on == "input" and not product:  # the map has to come first
            x, chooses = self._largest(x).dense(), False

        def aggregated(h: Tensor, bias: Tensor | None = None) -> Tensor:
            rows, weight = as_operands(graph, tensors, h, edge_weight)
            fill = 0.0 if self.normalize else None
            if self.normalize and self.add_self_loops:
                weighted = weight is not None or tensors.csr_values is not None
                fill = 2.0 if self.improved and weighted else 1.0
            operands = graph, tensors, weight, rows.dtype, fill
            if width is not None or chooses:
                return plus(self._of_parts_of_rows(rows, width, *operands, to_all=to_all), bias)
            return hop(*operands, reduction=self._reductions[0], to_all=to_all)(rows, bias)

        if chooses and self.maxk_on == "input":
            return plus(called(self.lin, aggregated(x), "x"), self.bias)
        if product and not chooses and self._reductions == SUM and isinstance(graph, Shared):
            if not graph.maps_first(x, self.out_channels):
                return plus(self.lin(over_vertices(aggregated, x)), self.bias)
        h = called(self.lin, x, "x") if lin is None else linear(x, *lin)
        if x.dim() == 2:
            return aggregated(h, self.bias)
        return plus(over_vertices(aggregated, h), self.bias)

    def _of_parts_of_rows(
        self,
        h: Tensor,
        width: int | None,
        graph: GraphLike,
        tensors: GraphTensors,
        weight: Tensor | None,
        dtype: torch.dtype,
        fill: float | None,
        *,
        to_all: bool,
    ) -> Tensor:
        """Aggregate samples of rows or what MaxK keeps; with ``fill`` normalise, add own parts."""
        if fill is None:
            if width is not None:
                return self._aggregate(graph, h, width, weight, rescale=True)
            return maxk_aggregate(graph, self._largest(h), None, weight)
        values = in_csr_order(tensors, weight)
        scale, loop = symmetric(tensors, values, dtype, fill, to_all=to_all)
        scales, own = {"row_scale": scale, "col_scale": scale}, loop[:, None]
        without = lone_loops(tensors) if fill and not to_all else None
        if width is None:
            operands: Any = {"edge_weight": weight, "without": without, **scales}
            return aggregate_with_own(graph, self._largest(h), own, **operands)
        y = self._aggregate(graph, h, width, weight, rescale=True, **scales)
        return torch.addcmul(y, own, h if without is None else h.masked_fill(without, 0))


class MaxK(Module):
    """Keep the ``k`` largest features of each row: a non-linearity, in the place of ReLU.

    ``y[i, f] = x[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere: ``autograd.maxk``.
    Before an aggregation use the layer's own ``k``, which spares the dense result.

    Parameters
    ----------
    k : int
        Between 1 and the number of features, which is known when it is called.

    Raises
    ------
    DtypeError, ShapeError
        If ``k`` is no integer, or less than 1.

    Notes
    -----
    MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = features_to_keep(k)

    def extra_repr(self) -> str:
        """Return what the ``repr`` shows."""
        return f"k={self.k}"

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, feat) to (n, feat)."""
        return maxk(x, self.k)
