"""GraphSAGE's convolution by means, with MaxK or over a sample of each row.

Parameters have the names and shapes of PyG's layer of the same name, so that a ``state_dict`` loads
across, and without ``k`` and samples results agree with its.
"""

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
from ._base import LinearConvolution, plus
from ._checks import check_input


class SAGEConv(LinearConvolution):
    """GraphSAGE with means: ``y = mean_j(x[j]) W_l + b + x W_r`` over the in-neighbours ``j``.

    With ``k`` the non-linearity stands between the neighbours' weights and the aggregation:
    ``y = mean_j(MaxK(x W_l, k)[j]) + b + x W_r``.  With ``k = out_channels`` that is the layer
    without it, since the mean and ``W_l`` commute.

    Parameters
    ----------
    in_channels, out_channels, bias, sample, training_sample, strategy
        As for ``GCNConv``; the mean is that of the sample.
    k : int, optional
        Features of ``x W_l`` to keep, between 1 and ``out_channels``.

    Attributes
    ----------
    lin_l.weight, lin_r.weight : (out_channels, in_channels)
        ``W_l`` and ``W_r`` transposed.
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

    def _add_parameters(self, in_channels: int, out_channels: int, bias: bool) -> None:
        self.lin_l = Linear(in_channels, out_channels, bias=bias)
        self.lin_r = Linear(in_channels, out_channels, bias=False)

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        self.lin_l.reset_parameters()
        self.lin_r.reset_parameters()

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, in_channels) to (n, out_channels); arguments are those of ``GCNConv``.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if the graph is not square.
        """
        graph = as_graph(graph, x)
        if edge_weight is None and self._is_whole() and self._is_plain(x, graph):
            weight, bias = self.lin_l.weight, self.lin_l.bias
            return sage_convolution(graph, x, weight, bias, self.lin_r.weight)
        check_input(x, graph, self.lin_l.weight)
        width = self._width()
        y: Tensor
        if width is not None:
            y = self.lin_l(self._aggregate(graph, x, width, edge_weight, mean=True))
        elif self.k is None:
            y = self.lin_l(spmm(graph, x, edge_weight, reduce="mean"))
        else:
            h = linear(x, self.lin_l.weight)
            y = plus(maxk_aggregate(graph, h, self.k, edge_weight, reduce="mean"), self.lin_l.bias)
        own: Tensor = self.lin_r(x)
        return y + own

    def _is_plain(self, x: Tensor, graph: GraphLike) -> bool:
        """Tell whether the layer may run as one node of autograd's."""
        own, other = self.lin_l, self.lin_r
        return (
            is_bare(own)
            and is_bare(other)
            and is_plain(graph, x, own.weight, own.bias, other.weight)
            and other.weight.shape == own.weight.shape
            and other.bias is None
        )
