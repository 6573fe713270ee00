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
    gat_aggregate,
    gat_convolution,
    gat_of_vectors,
    graph_tensors,
    is_bare,
    is_plain,
    sddmm,
    spmm,
)
from ..errors import DtypeError, ShapeError
from ._base import is_one_each
from ._checks import (
    Ends,
    check_beside,
    check_counts,
    check_number,
    check_width,
    ends_of,
    in_pair,
)
from ._loops import log_sums, loops, with_loops

#: Score of an entry that is left out: finite, so that a row of them alone gives no NaN.
_LEFT_OUT = -1e30


#: Pickles of earlier versions look for GATv2Conv here.
__getattr__ = resolver(f"{__package__}", {"GATv2Conv": "gatv2"})


class Attention(Module):
    """The base of both layers: heads, how they are joined, and the bias."""

    bias: Parameter | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        negative_slope: float,
        dropout: float,
        add_self_loops: bool,
    ) -> None:
        super().__init__()
        in_pair(in_channels)
        check_counts(out_channels=out_channels, heads=heads)
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
    in_channels : int or (int, int)
        Features of a vertex; a pair for those of sources and those of targets, each with a weight
        of its own.
    out_channels, heads : int
    concat : bool
        Whether the result has the heads side by side, or their mean.
    negative_slope : float
    dropout : float
        Share of the weights ``P`` that is left out in training, the others being divided by what
        stays; from 0 to less than 1.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores; the edge term of a loop is
        the mean of those of the row's other entries, or 0.  In a rectangular graph the first
        vertices have one, as many as are both rows and columns.  If not, the loops are those of
        the graph, and a row without entries gives ``b``.
    edge_dim : int, optional
        Features of an edge.
    bias : bool

    Attributes
    ----------
    lin.weight : (heads * out_channels, in_channels)
        ``W`` transposed; with a pair ``lin_src.weight`` and ``lin_dst.weight`` in its place.
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
    Of a square graph no other one is built, and without edge features nothing of the size of the
    edges; of a rectangular one with loops another one is, once.  Edge features meet ``W_edge`` and
    ``a_edge`` multiplied with each other, ``edge_dim`` numbers a head, so that only scores are made
    of them.  Scores add up in float32 at least.  A gradient can be used but not differentiated.

    GAT (ICLR'18), equations 1 to 6; fuseGNN (ICCAD'20), section 3.
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
        edge_dim: int | None = None,
        bias: bool = True,
    ) -> None:
        shared = heads, concat, negative_slope, dropout, add_self_loops
        super().__init__(in_channels, out_channels, *shared)
        self.edge_dim = edge_dim
        self.lin: Linear | None = None
        self.lin_src: Linear | None = None
        self.lin_dst: Linear | None = None
        width = heads * out_channels
        if isinstance(in_channels, tuple | list):
            of_sources, of_targets = in_channels
            self.lin_src = Linear(of_sources, width, bias=False)
            self.lin_dst = Linear(of_targets, width, bias=False)
        else:
            self.lin = Linear(in_channels, width, bias=False)
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
        for each in (self.lin, self.lin_src, self.lin_dst, self.lin_edge):
            if each is not None:
                init.xavier_uniform_(each.weight)
        for vectors in (self.att_src, self.att_dst, self.att_edge):
            glorot(vectors)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        graph: GraphLike,
        edge_attr: Tensor | None = None,
        *,
        size: tuple[int, int] | None = None,
        return_attention: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(n, in_channels) to (n, heads * out_channels), or (n, out_channels) without ``concat``.

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            Features of all vertices, or ``(x, x_target)`` as for ``SAGEConv``.  Without
            ``x_target``, None, scores have no part of the target.
        graph : Graph, shape (n, n), or (n_target, n_source)
            Only its structure is read.
        edge_attr : Tensor, shape (nnz, edge_dim), or (nnz,) for ``edge_dim=1``, optional
            In the order of ``graph.structure``.  By default edges have no term.
        size : (n_source, n_target), optional
            As for ``SAGEConv``.
        return_attention : bool
            Whether to return ``P``, too: (nnz, heads) in that order, before anything is left out of
            it.  With ``add_self_loops`` it is 0 at stored loops, and what a row lacks to 1 is
            the weight of its loop.

        Raises
        ------
        ShapeError
            If the graph is not square but ``x`` one tensor, or a tensor not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``.
        """
        if isinstance(x, Tensor) and size is None:
            graph = as_graph(graph, x)
            if edge_attr is None and not return_attention and self._is_plain(x, graph):
                assert self.lin is not None  # as _is_plain says
                vectors = self.att_src, self.att_dst
                options = self._options()
                return gat_convolution(graph, x, self.lin.weight, vectors, self.bias, **options)
        ends = ends_of(x, graph, size)
        graph = ends.graph
        edges = None if edge_attr is None else self._edge_scores(graph, edge_attr)
        own = None
        if edges is not None and self.add_self_loops:
            own = _means_without_loops(graph, edges)
        if ends.alike and self.lin is not None:
            check_width("x", ends.source, self.lin.weight)
            h = self._by_head(self.lin(ends.source))
            y = self._of_vertices(graph, h, edges, own)
            both: tuple[Tensor, Tensor | None] = h, h
        else:
            both = self._projected(ends)
            y = self._joined(self._between(graph, both, edges, own))
        return (y, self._weights(graph, both, edges, own)) if return_attention else y

    def _of_vertices(
        self, graph: GraphLike, h: Tensor, edges: Tensor | None, own: Tensor | None
    ) -> Tensor:
        """Aggregate where sources and targets are the same vertices."""
        vectors = self.att_src, self.att_dst
        bias = self.bias.view_as(self.att_src) if self.concat and self.bias is not None else None
        y = gat_of_vectors(graph, h, *vectors, edges, own, bias, **self._options())
        return self._joined(y) if bias is None else y.flatten(1)

    def _projected(self, ends: Ends) -> tuple[Tensor, Tensor | None]:
        """(n_source, heads, out_channels) and (n_target, heads, out_channels), or None."""
        of_sources, of_targets = self.lin_src or self.lin, self.lin_dst or self.lin
        assert of_sources is not None  # a layer has one or two
        assert of_targets is not None
        check_width("x" if ends.alike else "x[0]", ends.source, of_sources.weight)
        source = self._by_head(of_sources(ends.source))
        if ends.target is None:
            return source, None
        check_width("x" if ends.alike else "x[1]", ends.target, of_targets.weight)
        return source, self._by_head(of_targets(ends.target))

    def _between(
        self,
        graph: GraphLike,
        both: tuple[Tensor, Tensor | None],
        edges: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        """(n_target, heads, out_channels) Aggregate features of sources for targets."""
        h, tensors = both[0], graph_tensors(graph)
        el, er = self._scores(both, tensors.n_rows)
        options = self._options()
        if self.add_self_loops and (edges is not None or tensors.n_rows != tensors.n_cols):
            looped, options["self_loops"] = with_loops(graph), False
            if edges is not None and own is not None:
                edges = torch.cat([edges[looped.others], own[: looped.n_loops].to(edges.dtype)])
            graph = looped.edges
        return gat_aggregate(graph, h, el, er, edges, **options)

    def _scores(self, both: tuple[Tensor, Tensor | None], n_rows: int) -> tuple[Tensor, Tensor]:
        """Give the sources' part of the scores and the targets', which may be 0."""
        el, er = (
            None if h is None else (h * att.to(h.dtype)).sum(-1)
            for h, att in zip(both, (self.att_src, self.att_dst), strict=True)
        )
        assert el is not None  # there are sources
        return el, el.new_zeros(n_rows, self.heads) if er is None else er

    def _is_plain(self, x: Tensor, graph: GraphLike) -> bool:
        """Tell whether the layer may run as one node of autograd's."""
        joined = self.concat or self.heads == 1
        if self.lin is None or not joined or not is_bare(self.lin):
            return False
        weight, vectors = self.lin.weight, (self.att_src, self.att_dst)
        if any(one.shape != (1, self.heads, self.out_channels) for one in vectors):
            return False
        fit = weight.shape[0] == self.heads * self.out_channels and is_one_each(self.bias, weight)
        return fit and is_plain(graph, x, weight, *vectors, self.bias)

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
        self,
        graph: GraphLike,
        both: tuple[Tensor, Tensor | None],
        edges: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        """(nnz, heads) ``P``."""
        dtype = torch.promote_types(both[0].dtype, torch.float32)
        source, target = (None if h is None else h.to(dtype) for h in both)
        assert source is not None  # the target may be missing
        with torch.autocast(source.device.type, enabled=False):
            el, er = self._scores((source, target), graph_tensors(graph).n_rows)
            ones = torch.ones_like
            pairs = torch.stack([er, ones(er)], -1), torch.stack([ones(el), el], -1)
            scores = sddmm(graph, *pairs)
            scores = scores if edges is None else scores + edges
            scores = leaky_relu(scores, self.negative_slope)
            if not self.add_self_loops:
                return edge_softmax(graph, scores)
            count = min(len(el), len(er))
            of_loops = el[:count] + er[:count]
            of_loops = of_loops if own is None else of_loops + own[:count]
            of_loops = leaky_relu(of_loops, self.negative_slope)
            without = of_loops.new_full((len(er) - count, self.heads), _LEFT_OUT)
            return _beside_loops(graph, scores, torch.cat([of_loops, without]))


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
    ones = others.new_ones(graph_tensors(graph).n_cols, *others.shape[1:])
    return p * sddmm(graph, others, ones)
