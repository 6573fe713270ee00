"""GATv2: attention by a learned vector and a non-linearity before it, in one pass over the edges.

Parameters have the names and shapes of PyG's layer, so that a ``state_dict`` loads across, and
results agree with its.
"""

from torch import Tensor
from torch.nn import Linear, init

from ..autograd import GraphLike, as_graph, gatv2_aggregate
from ._checks import check_input
from .gat import Attention, glorot


class GATv2Conv(Attention):
    """Dynamic graph attention: ``y[i, k] = sum_e P[e, k] l[j, k] + b`` over the entries of row i.

    ``l = x W_l + b_l`` and ``r = x W_r + b_r`` with ``heads`` parts of ``out_channels`` features,
    and ``P[e, k]`` is the softmax over the row of ``<a[k], leaky(l[j, k] + r[i, k])>``, with
    ``leaky`` as in ``GATConv``.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops
        As for ``GATConv``.
    bias : bool
        Whether there are ``b``, ``b_l`` and ``b_r``.
    share_weights : bool
        Whether ``W_r`` and ``b_r`` are ``W_l`` and ``b_l``.

    Attributes
    ----------
    lin_l.weight, lin_r.weight : (heads * out_channels, in_channels)
        ``W_l`` and ``W_r`` transposed.
    lin_l.bias, lin_r.bias : (heads * out_channels,)
    att : (1, heads, out_channels)
    bias : (heads * out_channels,), or (out_channels,) without ``concat``

    Raises
    ------
    DtypeError, ShapeError
        As ``GATConv``.

    Notes
    -----
    No other graph is built, and nothing of the size of the edges.  A gradient can be used but not
    differentiated.  Bipartite graphs and edge features are not supported.

    GATv2 (ICLR'22), equation 7.
    """

    __module__ = "sparsefmt.nn"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        *,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        bias: bool = True,
        share_weights: bool = False,
    ) -> None:
        shared = heads, concat, negative_slope, dropout, add_self_loops
        super().__init__(in_channels, out_channels, *shared)
        self.share_weights = share_weights
        self.lin_l = Linear(in_channels, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l
        if not share_weights:
            self.lin_r = Linear(in_channels, heads * out_channels, bias=bias)
        self.att = self._vectors()
        self.bias = self._own_bias(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and vectors by Glorot's uniform rule, biases as ``Linear``; ``b`` is 0."""
        for each in (self.lin_l, self.lin_r):
            each.reset_parameters()
            init.xavier_uniform_(each.weight)
        glorot(self.att)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: Tensor, graph: GraphLike) -> Tensor:
        """(n, in_channels) to (n, heads * out_channels), or (n, out_channels) without ``concat``.

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
        graph : Graph, shape (n, n)
            Only its structure is read.

        Raises
        ------
        ShapeError
            If the graph is not square, or ``x`` not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``.
        """
        graph = as_graph(graph, x)
        check_input(x, graph, self.lin_l.weight)
        left = self._by_head(self.lin_l(x))
        right = left if self.share_weights else self._by_head(self.lin_r(x))
        y = gatv2_aggregate(graph, left, right, self.att, **self._options())
        return self._joined(y)
