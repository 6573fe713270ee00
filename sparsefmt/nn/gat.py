"""GAT: attention by learned vectors, in one pass over the edges; and what GATv2 shares with it.

Parameters have the names and shapes of PyG's layers of the same name, so that a ``state_dict``
loads across, and results agree with theirs.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, init
from torch.nn.functional import leaky_relu, linear

from .._lazy import resolver
from ..autograd import (
    GraphLike,
    as_graph,
    edge_softmax,
    gat_convolution,
    gat_of_vectors,
    graph_tensors,
    is_bare,
    is_plain,
    sddmm,
    spmm,
)
from ..errors import DtypeError, ShapeError
from ._checks import check_beside, check_counts, check_input, check_number
from ._loops import log_sums, loops

#: Score of an entry that is left out: finite, so that a row of them alone gives no NaN.
_LEFT_OUT = -1e30


#: Pickles of earlier versions look for GATv2Conv here.
__getattr__ = resolver(f"{__package__}", {"GATv2Conv": "gatv2"})


class Attention(Module):
    """The base of both layers: heads, how they are joined, and the bias."""

    bias: Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels, heads=heads)
        check_number("negative_slope", negative_slope)
        check_number("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ShapeError(f"dropout is {dropout!r}: give a share from 0 to less than 1.")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.heads, self.concat, self.negative_slope = heads, concat, negative_slope
        self.dropout, self.add_self_loops = dropout, add_self_loops

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"

    def _own_bias(self, wanted: bool) -> Parameter | None:
        """Make the bias, which comes behind the vectors in PyG's order of parameters."""
        width = self.out_channels * (self.heads if self.concat else 1)
        return Parameter(torch.empty(width)) if wanted else None

    def _vectors(self) -> Parameter:
        """Make a vector for each head."""
        return Parameter(torch.empty(1, self.heads, self.out_channels))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.heads, self.out_channels)

    def _options(self) -> dict[str, Any]:
        """Options of the aggregation; nothing is dropped in evaluation."""
        return {
            "negative_slope": self.negative_slope,
            "dropout": self.dropout if self.training else 0.0,
            "self_loops": self.add_self_loops,
        }

    def _joined(self, y: Tensor) -> Tensor:
        """(n, heads, out_channels) to the result of the layer."""
        y = y.flatten(1) if self.concat or self.heads == 1 else y.mean(1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class GATConv(Attention):
    """Graph attention: ``y[i, k] = sum_e P[e, k] h[j, k] + b`` over the entries of row i.

    ``h = x W`` with ``heads`` parts of ``out_channels`` features, and ``P[e, k]`` is the softmax
    over the row of ``leaky(<h[j, k], a_src[k]> + <h[i, k], a_dst[k]>)``, where ``leaky(z)`` is
    ``z`` if positive, else ``negative_slope * z``.  With ``edge_dim`` the score has the term
    ``<edge_attr[e] W_edge[k], a_edge[k]>`` too.

    Parameters
    ----------
    in_channels, out_channels : int
    heads : int
    concat : bool
        Whether the result has the heads side by side, or their mean.
    negative_slope : float
    dropout : float
        Share of the weights ``P`` that is left out in training, the others being divided by what
        stays; from 0 to less than 1.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores; the edge term of a loop is
        the mean of those of the row's other entries, or 0.  If not, the loops are those of the
        graph, and a row without entries gives ``b``.
    edge_dim : int, optional
        Features of an edge.
    bias : bool

    Attributes
    ----------
    lin.weight : (heads * out_channels, in_channels)
        ``W`` transposed.
    att_src, att_dst : (1, heads, out_channels)
        Of sources and targets.
    lin_edge.weight : (heads * out_channels, edge_dim)
    att_edge : (1, heads, out_channels)
    bias : (heads * out_channels,), or (out_channels,) without ``concat``

    Raises
    ------
    DtypeError, ShapeError
        If a number is no number of its kind, or out of its range.

    Notes
    -----
    No other graph is built, and without edge features nothing of the size of the edges.  Edge
    features meet ``W_edge`` and ``a_edge`` multiplied with each other, ``edge_dim`` numbers a head,
    so that only scores are made of them.  Scores add up in float32 at least.  A gradient can be
    used but not differentiated.  Bipartite graphs, with features of targets apart from those of
    sources, are not supported.

    GAT (ICLR'18), equations 1 to 6; fuseGNN (ICCAD'20), section 3.
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
        edge_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        shared = heads, concat, negative_slope, dropout, add_self_loops
        super().__init__(in_channels, out_channels, *shared)
        self.edge_dim = edge_dim
        self.lin = Linear(in_channels, heads * out_channels, bias=False)
        self.att_src, self.att_dst = self._vectors(), self._vectors()
        self.lin_edge: Linear | None = None
        self.att_edge: Parameter | None = None
        if edge_dim is not None:
            check_counts(edge_dim=edge_dim)
            self.lin_edge = Linear(edge_dim, heads * out_channels, bias=False)
            self.att_edge = self._vectors()
        self.bias = self._own_bias(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and vectors by Glorot's uniform rule; the bias is 0."""
        for each in (self.lin, self.lin_edge):
            if each is not None:
                init.xavier_uniform_(each.weight)
        for vectors in (self.att_src, self.att_dst, self.att_edge):
            glorot(vectors)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        graph: GraphLike,
        edge_attr: Tensor | None = None,
        *,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(n, in_channels) to (n, heads * out_channels), or (n, out_channels) without ``concat``.

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
        graph : Graph, shape (n, n)
            Only its structure is read.
        edge_attr : Tensor, shape (nnz, edge_dim), or (nnz,) for ``edge_dim=1``, optional
            In the order of ``graph.structure``.  By default edges have no term.
        return_attention : bool
            Whether to return ``P``, too: (nnz, heads) in that order, before anything is left out of
            it.  With ``add_self_loops`` it is 0 at stored loops, and what a row lacks to 1 is
            the weight of its loop.

        Raises
        ------
        ShapeError
            If the graph is not square, or a tensor not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``.
        """
        graph = as_graph(graph, x)
        if edge_attr is None and not return_attention and self._is_plain(x, graph):
            vectors = self.att_src, self.att_dst
            options = self._options()
            return gat_convolution(graph, x, self.lin.weight, vectors, self.bias, **options)
        check_input(x, graph, self.lin.weight)
        edges = None if edge_attr is None else self._edge_scores(graph, edge_attr)
        own = None
        if edges is not None and self.add_self_loops:
            own = _means_without_loops(graph, edges)
        h = self._by_head(self.lin(x))
        vectors = self.att_src, self.att_dst
        bias = self.bias.view_as(self.att_src) if self.concat and self.bias is not None else None
        y = gat_of_vectors(graph, h, *vectors, edges, own, bias, **self._options())
        y = self._joined(y) if bias is None else y.flatten(1)
        return (y, self._weights(graph, h, edges, own)) if return_attention else y

    def _is_plain(self, x: Tensor, graph: GraphLike) -> bool:
        """Tell whether the layer may run as one node of autograd's."""
        joined = self.concat or self.heads == 1
        others = self.att_src, self.att_dst, self.bias
        return joined and is_bare(self.lin) and is_plain(graph, x, self.lin.weight, *others)

    def _edge_scores(self, graph: GraphLike, edge_attr: Tensor) -> Tensor:
        """(nnz, heads) The edges' terms."""
        nnz, width = graph_tensors(graph).nnz, self.edge_dim
        if self.lin_edge is None or self.att_edge is None:
            raise ShapeError("edge_attr is given to a layer without edge_dim: give it one.")
        if not isinstance(edge_attr, Tensor):
            raise DtypeError(f"edge_attr is a {type(edge_attr).__name__}: give a torch.Tensor.")
        given = edge_attr
        if given.dim() == 1:
            edge_attr = given[:, None]
        if edge_attr.shape != (nnz, width):
            raise ShapeError(
                f"edge_attr has shape {tuple(given.shape)}: give {(nnz, width)}, the features "
                "of each edge, in the order of graph.structure."
            )
        check_beside("edge_attr", edge_attr, self.lin_edge.weight)
        weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
        vectors = (weight * self.att_edge.view(self.heads, -1, 1)).sum(1)
        return linear(edge_attr, vectors)

    def _weights(
        self, graph: GraphLike, h: Tensor, edges: Tensor | None, own: Tensor | None
    ) -> Tensor:
        """(nnz, heads) ``P``."""
        with torch.autocast(h.device.type, enabled=False):
            h = h.to(torch.promote_types(h.dtype, torch.float32))
            el, er = ((h * att.to(h.dtype)).sum(-1) for att in (self.att_src, self.att_dst))
            ones = torch.ones_like(el)
            scores = sddmm(graph, torch.stack([er, ones], -1), torch.stack([ones, el], -1))
            scores = scores if edges is None else scores + edges
            scores = leaky_relu(scores, self.negative_slope)
            if not self.add_self_loops:
                return edge_softmax(graph, scores)
            of_loops = el + er if own is None else el + er + own
            return _beside_loops(graph, scores, leaky_relu(of_loops, self.negative_slope))


def glorot(vectors: Tensor | None) -> None:
    """Draw uniformly, as PyG: bounded by the root of 6 over heads and features."""
    if vectors is not None:
        bound = sqrt(6 / (vectors.shape[-2] + vectors.shape[-1]))
        init.uniform_(vectors, -bound, bound)


def _means_without_loops(graph: GraphLike, scores: Tensor) -> Tensor:
    """(n, heads) The mean over each row's entries but loops; 0 where there are none."""
    tensors = graph_tensors(graph)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    ones = scores.new_ones(tensors.n_cols, 1, dtype=dtype)
    others = tensors.kept("entries but loops", lambda: 1 - loops(graph)[0])
    with torch.autocast(tensors.kind, enabled=False):
        share = tensors.kept(
            "share of an entry but loops",
            lambda: spmm(graph, ones.double(), others)[:, 0].clamp(min=1).reciprocal(),
        ).to(dtype)
        heads = (scores.to(dtype) * others[:, None].to(dtype)).unbind(1)
        return torch.cat([spmm(graph, ones, head, row_scale=share) for head in heads], 1)


def _beside_loops(graph: GraphLike, scores: Tensor, own: Tensor) -> Tensor:
    """(nnz, heads) Weights of entries but stored loops, beside loops whose scores are ``own``."""
    stored = graph_tensors(graph).kept("entries but loops", lambda: 1 - loops(graph)[0]) == 0
    scores = scores.masked_fill(stored[:, None], _LEFT_OUT)
    p = edge_softmax(graph, scores)
    heads = range(scores.shape[1])
    log_z = torch.stack([log_sums(graph, scores[:, k], p[:, k]) for k in heads], 1)
    others = torch.sigmoid(log_z - own)[..., None]
    return p * sddmm(graph, others, torch.ones_like(others))
