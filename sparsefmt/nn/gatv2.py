"""GATv2: attention by a learned vector and a non-linearity before it, in one pass over the edges.

Parameters have the names and shapes of PyG's layer, so that a ``state_dict`` loads across, and
results agree with its.
"""

from torch import Tensor
from torch.nn import Linear, init

from ..autograd import GraphLike, gatv2_aggregate, graph_tensors
from ..errors import DtypeError
from ._checks import check_width, ends_of, in_pair
from ._loops import with_loops
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
        ``W_l``, of sources, and ``W_r``, of targets, transposed.
    lin_l.bias, lin_r.bias : (heads * out_channels,)
    att : (1, heads, out_channels)
    bias : (heads * out_channels,), or (out_channels,) without ``concat``

    Raises
    ------
    DtypeError, ShapeError
        As ``GATConv``.

    Notes
    -----
    Of a square graph no other one is built, and nothing of the size of the edges; of a rectangular
    one with loops another one is, once.  A gradient can be used but not differentiated.  Edge
    features are not supported.

    GATv2 (ICLR'22), equation 7.
    """

    __module__ = "sparsefmt.nn"

    def __init__(
        self,
        in_channels: int | tuple[int, int],
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
        of_sources, of_targets = in_pair(in_channels)
        self.lin_l = Linear(of_sources, heads * out_channels, bias=bias)
        self.lin_r = self.lin_l
        if not share_weights:
            self.lin_r = Linear(of_targets, heads * out_channels, bias=bias)
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

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        graph: GraphLike,
        *,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """(n, in_channels) to (n, heads * out_channels), or (n, out_channels) without ``concat``.

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            Features of all vertices, or ``(x, x_target)``: those of sources and of targets.
        graph : Graph, shape (n, n), or (n_target, n_source)
            Only its structure is read.
        size : (n_source, n_target), optional
            As for ``SAGEConv``.

        Raises
        ------
        ShapeError
            If the graph is not square but ``x`` one tensor, or ``x`` not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``; DtypeError also if ``x_target`` is None.
        """
        ends = ends_of(x, graph, size)
        graph, options = ends.graph, self._options()
        if ends.target is None:
            raise DtypeError("x[1] is None: scores are of both ends, give features of targets.")
        check_width("x" if ends.alike else "x[0]", ends.source, self.lin_l.weight)
        left = self._by_head(self.lin_l(ends.source))
        if ends.alike and self.share_weights:
            right = left
        else:
            check_width("x" if ends.alike else "x[1]", ends.target, self.lin_r.weight)
            right = self._by_head(self.lin_r(ends.target))
        tensors = graph_tensors(graph)
        if self.add_self_loops and tensors.n_rows != tensors.n_cols:
            graph, options["self_loops"] = with_loops(graph).edges, False
        return self._joined(gatv2_aggregate(graph, left, right, self.att, **options))
