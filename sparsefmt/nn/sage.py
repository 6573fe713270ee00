"""GraphSAGE's convolution by means, with MaxK or over a sample of each row.

Parameters have the names and shapes of PyG's layer of the same name, so that a ``state_dict`` loads
across, and without ``k`` and samples results agree with its.
"""

from typing import Any

from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from ..autograd import (
    GraphLike,
    as_graph,
    is_bare,
    is_plain,
    maxk_aggregate,
    sage_convolution,
    spmm,
)
from ._base import LinearConvolution, is_one_each, plus
from ._checks import check_width, ends_of, in_pair


class SAGEConv(LinearConvolution):
    """GraphSAGE with means: ``y = mean_j(x[j]) W_l + b + x W_r`` over the in-neighbours ``j``.

    With ``k`` the non-linearity stands between the neighbours' weights and the aggregation:
    ``y = mean_j(MaxK(x W_l, k)[j]) + b + x W_r``.  With ``k = out_channels`` that is the layer
    without it, since the mean and ``W_l`` commute.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features of a vertex; a pair for those of sources and those of targets.
    out_channels, bias, sample, training_sample, strategy
        As for ``GCNConv``; the mean is that of the sample.
    k : int, optional
        Features of ``x W_l`` to keep, between 1 and ``out_channels``.

    Attributes
    ----------
    lin_l.weight, lin_r.weight : (out_channels, in_channels)
        ``W_l``, of sources, and ``W_r``, of targets, transposed.
    lin_l.bias : (out_channels,)

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    Edge weights multiply inside the mean, which divides by the number of entries.  GraphSAGE
    (NIPS'17), section 3.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"

    def _check_channels(self, in_channels: Any) -> None:
        in_pair(in_channels)

    def _add_parameters(self, in_channels: Any, out_channels: int, bias: bool) -> None:
        of_sources, of_targets = in_pair(in_channels)
        self.lin_l = Linear(of_sources, out_channels, bias=bias)
        self.lin_r = Linear(of_targets, out_channels, bias=False)

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        self.lin_l.reset_parameters()
        self.lin_r.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        graph: GraphLike,
        edge_weight: Tensor | None = None,
        *,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """(n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            Features of all vertices, or ``(x, x_target)``: those of sources and of targets, between
            which the graph is rectangular.  Without ``x_target``, None, there is no ``x W_r``, and
            of an ``edge_index`` as many targets as sources.
        graph, edge_weight
            As for ``GCNConv``.
        size : (n_source, n_target), optional
            The sizes of the graph of an ``edge_index``, if ``x`` does not tell.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if ``x`` is one tensor and the graph is not square, or
            ``size`` is not that of the graph.
        """
        if isinstance(x, Tensor) and size is None:
            graph = as_graph(graph, x)
            if edge_weight is None and self._is_whole() and self._is_plain(x, graph):
                weight, bias = self.lin_l.weight, self.lin_l.bias
                return sage_convolution(graph, x, weight, bias, self.lin_r.weight)
        ends = ends_of(x, graph, size)
        graph, source = ends.graph, ends.source
        check_width("x" if ends.alike else "x[0]", source, self.lin_l.weight)
        if ends.target is not None:
            check_width("x" if ends.alike else "x[1]", ends.target, self.lin_r.weight)
        width = self._width()
        y: Tensor
        if width is not None:
            y = self.lin_l(self._aggregate(graph, source, width, edge_weight, mean=True))
        elif self.k is None:
            y = self.lin_l(spmm(graph, source, edge_weight, reduce="mean"))
        else:
            h = linear(source, self.lin_l.weight)
            y = plus(maxk_aggregate(graph, h, self.k, edge_weight, reduce="mean"), self.lin_l.bias)
        if ends.target is None:
            return y
        own: Tensor = self.lin_r(ends.target)
        return y + own

    def _is_plain(self, x: Tensor, graph: GraphLike) -> bool:
        """Tell whether the layer may run as one node of autograd's."""
        own, other = self.lin_l, self.lin_r
        return (
            is_bare(own)
            and is_bare(other)
            and is_plain(graph, x, own.weight, own.bias, other.weight)
            and other.weight.shape == own.weight.shape
            and is_one_each(own.bias, own.weight)
            and other.bias is None
        )
