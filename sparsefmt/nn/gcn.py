"""GCN's convolution, with MaxK or over a sample of each row.

Parameters have the names and shapes of PyG's layer of the same name, so that a ``state_dict`` loads
across, and without ``k`` and samples results agree with its.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter, init

from ..autograd import (
    GraphLike,
    aggregate_with_own,
    as_graph,
    gcn_convolution,
    is_bare,
    is_plain,
    operands,
    propagate,
)
from ._base import LinearConvolution, is_one_each, plus
from ._checks import check_input
from ._loops import stored, symmetric


class GCNConv(LinearConvolution):
    """Graph convolution: ``y = D^-1/2 (A + I) D^-1/2 s(x W) + b``.

    ``s`` is ``MaxK(k)``, or nothing without ``k``.  ``D`` is the diagonal of the rows' sums of
    ``A + I``; ``I`` adds a loop to the vertices that have none.

    Parameters
    ----------
    in_channels, out_channels : int
    bias : bool
    k : int, optional
        Features of ``x W`` to keep, between 1 and ``out_channels``.
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

    Attributes
    ----------
    lin.weight : (out_channels, in_channels)
        ``W`` transposed.
    bias : (out_channels,)

    Raises
    ------
    DtypeError, ShapeError
        If a number is no integer, or out of its range.
    UnsupportedError
        If there is no such strategy, or a sample is asked for beside ``k``.

    Notes
    -----
    Several loops of one vertex count each; PyG keeps the last.  The factors of a graph's own values
    are kept with the graph; those of ``edge_weight`` are computed at each call and have gradients,
    as in code that ``torch.compile`` has compiled.  GCN (ICLR'17), equation 2; MaxK-GNN
    (ASPLOS'24), section 3.1; ES-SpMM (arXiv 2104.10716); DropEdge (ICLR'20).
    """

    __module__ = "sparsefmt.nn"

    def _add_parameters(self, in_channels: Any, out_channels: int, bias: bool) -> None:
        self.lin = Linear(in_channels, out_channels, bias=False)
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot's uniform weights, and set the bias to 0."""
        init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
        graph : Graph, shape (n, n)
        edge_weight : Tensor, shape (nnz,), optional
            In the order of ``graph.structure``; by default the graph's own values, or 1.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if the graph is not square.
        """
        graph = as_graph(graph, x)
        if edge_weight is None and self._is_whole() and is_bare(self.lin):
            given = x, self.lin.weight
            if is_plain(graph, *given, self.bias) and is_one_each(self.bias, self.lin.weight):
                return gcn_convolution(graph, *given, *symmetric(graph, None, x.dtype), self.bias)
        check_input(x, graph, self.lin.weight)
        h = self.lin(x)
        h, values, _, _ = operands(graph, h, edge_weight)  # named as they were given, if refused
        scale, loop = symmetric(graph, edge_weight, h.dtype)
        width = self._width()
        if width is not None:
            return self._of_sample(graph, h, width, edge_weight, scale, loop[:, None])
        # Traced, a Function that writes in place loses its gradients (torch 2.11).
        if self.k is None and edge_weight is None and not torch.compiler.is_compiling():
            without = stored(graph, h.dtype)
            return propagate(graph, h, scale, loop[:, None], without=without, bias=self.bias)
        weight, own = None if edge_weight is None else values, loop[:, None]
        scales = {"row_scale": scale, "col_scale": scale}
        y = aggregate_with_own(graph, h, own, weight, k=self.k, without=own == 0, **scales)
        return plus(y, self.bias)

    def _of_sample(
        self,
        graph: GraphLike,
        h: Tensor,
        width: int,
        edge_weight: Tensor | None,
        scale: Tensor,
        own: Tensor,
    ) -> Tensor:
        factors = {"rescale": True, "row_scale": scale, "col_scale": scale}
        y = self._aggregate(graph, h, width, edge_weight, **factors)
        kept = edge_weight is None and not torch.compiler.is_compiling()
        without = stored(graph, h.dtype) if kept else own == 0
        part = h if without is None else h.masked_fill(without, 0)
        return plus(torch.addcmul(y, own, part), self.bias)
