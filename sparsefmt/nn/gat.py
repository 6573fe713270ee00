"""GAT: attention by learned vectors, in one pass over the edges.

Parameters have the names and shapes of PyG's layer, so that a ``state_dict`` loads across, and
results agree with its.
"""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import leaky_relu, linear

from .._lazy import resolver
from ..autograd import as_graph, edge_combine, gat_aggregate, gat_of_vectors
from ..autograd.layers import gat_convolution
from ..autograd.maps import read_map
from ..autograd.plain import is_plain
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from ._attention import LoopedAttention
from ._base import is_one_each
from ._edges import AttentionWeights, Entries
from ._inputs import Ends, check_square
from ._linear import GLOROT, linear_map, mapped
from ._maps import called
from ._passing import FORWARD, PassingOptions

#: Pickles of earlier versions look for GATv2Conv here.
__getattr__ = resolver(f"{__package__}", {"GATv2Conv": "gatv2"})

#: Features of sources and, if they are given, of targets.
Both = tuple[Tensor, Tensor | None]


class GATConv(LoopedAttention):
    """Graph attention: ``y[i, k] = sum_e P[e, k] h[j, k] + b`` over the entries of row i.

    ``h = x W`` with ``heads`` parts of ``out_channels`` features, and ``P[e, k]`` is the softmax
    over the row of ``leaky(<h[j, k], a_src[k]> + <h[i, k], a_dst[k]>)``, where ``leaky(z)`` is
    ``z`` if positive, else ``negative_slope * z``.  With ``edge_dim`` the score has the term
    ``<edge_attr[e] W_edge[k], a_edge[k]>`` too.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features of a vertex; a pair for those of sources and those of targets, each with a weight
        of its own.  -1 for as many as the first ``x`` has.
    out_channels, heads : int
    concat : bool
        Whether the result has the heads side by side, or their mean.
    negative_slope : float
    dropout : float
        Share of the weights ``P`` that is left out in training, the others being divided by what
        stays; from 0 to less than 1.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores.  In a rectangular graph the
        first vertices have one, as many as are both rows and columns.  If not, the loops are those
        of the graph, and a row without entries gives ``b``.
    edge_dim : int, optional
        Features of an edge, -1 for as many as the first ``edge_attr`` has.
    fill_value : "mean", "add", "min", "max", "mul", float or Tensor of shape (edge_dim,)
        Features of the loops that are added: those of the row's entries but loops, reduced, 0 where
        there are none and for "mul" 1; or these.
    bias : bool
    residual : bool
        Whether a map of the targets' features is added to the result.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        PyG's: sums alone; "source_to_target" or, for an ``edge_index`` of targets and sources,
        "target_to_source"; 0; without effect, no array of messages being made; nothing.

    Attributes
    ----------
    lin.weight : (heads * out_channels, in_channels)
        ``W`` transposed; with a pair ``lin_src.weight`` and ``lin_dst.weight`` in its place.
    att_src, att_dst : (1, heads, out_channels)
        Of sources and targets.
    lin_edge.weight : (heads * out_channels, edge_dim)
    att_edge : (1, heads, out_channels)
    res.weight : (heads * out_channels, in_channels), or (out_channels, in_channels)
    bias : (heads * out_channels,), or (out_channels,) without ``concat``

    Raises
    ------
    DtypeError, ShapeError
        If a number is no number of its kind, or out of its range.
    UnsupportedError
        If an option is one that only PyG's layer can do; the text says what to do instead.

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
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        **passing: Unpack[PassingOptions],
    ) -> None:
        shared = heads, concat, negative_slope, dropout, add_self_loops, edge_dim, fill_value
        super().__init__(in_channels, out_channels, *shared, **passing)
        self.lin: Linear | None = None
        self.lin_src: Linear | None = None
        self.lin_dst: Linear | None = None
        options: dict[str, Any] = {"bias": False, "draw": GLOROT}
        if isinstance(in_channels, tuple | list):
            of_sources, of_targets = in_channels
            self.lin_src = linear_map(of_sources, heads * out_channels, **options)
            self.lin_dst = linear_map(of_targets, heads * out_channels, **options)
        else:
            self.lin = linear_map(in_channels, heads * out_channels, **options)
        self.att_src, self.att_dst = self._vectors(), self._vectors()
        self._add_edges(edge_dim)
        self.att_edge: Parameter | None = None if edge_dim is None else self._vectors()
        self._add_own(residual, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and vectors by Glorot's uniform rule; the bias is 0."""
        vectors = self.att_src, self.att_dst, self.att_edge
        self._draw((self.lin, self.lin_src, self.lin_dst), vectors)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """(n, in_channels) to (n, heads * out_channels), or (n, out_channels) without ``concat``.

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            Features of all vertices, or ``(x, x_target)`` as for ``SAGEConv``.  Without
            ``x_target``, None, scores have no part of the target.
        edge_index : Graph, shape (n, n), or (n_target, n_source), or PyG's
            Only its structure is read.
        edge_attr : Tensor, shape (nnz, edge_dim), or (nnz,) for ``edge_dim=1``, optional
            In the order of ``graph.structure``.  By default edges have no term.
        size : (n_source, n_target), optional
            As for ``SAGEConv``.
        return_attention_weights : bool, optional
            Whether to return ``(y, (edge_index, P))``: the edges that attention goes over, with
            ``add_self_loops`` those given but loops, then a loop for each vertex, and the weight of
            each, (nnz, heads), of which those left out by ``dropout`` are 0.  Of a sparse matrix
            the first is that with ``P`` as its values, and ``P`` has its order.

        Raises
        ------
        ShapeError
            If the graph is not square but ``x`` one tensor, or a tensor not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``.

        Notes
        -----
        With the weights the layer is composed of ``edge_softmax`` and ``spmm``, over a graph with
        loops of its own that is made once, and leaves out weights as PyG's layer at the same seed.
        """
        if (
            self._plan is not None
            and edge_attr is None
            and size is None
            and not return_attention_weights
        ):
            planned = self._plan(self, x, edge_index)
            if planned is not None:
                return planned
        given = edge_index
        if isinstance(x, Tensor) and size is None and x.dim() == 2:
            edge_index = as_graph(given, x, name="edge_index")
            usual = edge_attr is None and not return_attention_weights
            at_once = self._at_once(x, edge_index) if usual else None
            if at_once is not None:
                return at_once
            check_square(edge_index, given)
        ends = self._ends(x, edge_index, size)
        if not return_attention_weights and self.lin is not None:
            ends = ends.squared()
        residual, both = self._residual(ends), self._projected(ends)
        features = self._edge_features(edge_attr, ends.graph)
        found = None
        if return_attention_weights:
            entries = self._entries(ends.graph, features)
            found = self._attention(entries, self._entry_scores(entries, both))
        y = ends.rows_here(self._aggregated(ends.graph, both, features, found))
        y = y if residual is None else y + residual
        return y if found is None else (y, self._edges_and_weights(given, found, both[0].dtype))

    def _at_once(self, x: Tensor, graph: GraphLike) -> Tensor | None:
        """Run the layer as one node of autograd's; None if it may not."""
        heads, feat, lin = self.heads, self.out_channels, read_map(self.lin)
        if lin is None or lin[1] is not None or self.flow != FORWARD:
            return None
        if not (self.concat or heads == 1):
            return None
        source, target, bias = self.att_src, self.att_dst, self.bias
        weight, shape = lin[0], (1, heads, feat)
        fit = source.shape == target.shape == shape and weight.shape[0] == heads * feat
        if not (fit and is_one_each(bias, weight)):
            return None
        if not is_plain(graph, x, weight, source, target, bias):
            return None
        y = gat_convolution(graph, x, weight, (source, target), bias, **self._options())
        return y if self.res is None else y + mapped(self.res, x, "x")

    def _projected(self, ends: Ends) -> Both:
        """(n_source, heads, out_channels) and (n_target, heads, out_channels), or None."""
        of_sources, of_targets = self.lin_src or self.lin, self.lin_dst or self.lin
        assert of_sources is not None  # a layer has one or two
        assert of_targets is not None
        (source,) = self._of_sources(ends, of_sources)
        if ends.target is None:
            return source, None
        if ends.alike and of_sources is of_targets:
            return source, ends.of_targets(source)
        return source, self._mapped(of_targets, ends.target, "x" if ends.alike else "x[1]")

    def _aggregated(
        self, graph: GraphLike, both: Both, features: Tensor | None, found: AttentionWeights | None
    ) -> Tensor:
        """(n_target, width) Aggregate features of sources for targets, and add the bias."""
        if found is not None and self._drops():
            return self._biased(found.sums(both[0]))
        if both[0] is not both[1]:
            return self._biased(self._of_two_sets(graph, both, features))
        bias = self.bias.view_as(self.att_src) if self.concat and self.bias is not None else None
        y = self._of_vertices(graph, both[0], features, bias)
        return self._biased(y) if bias is None else y.flatten(1)

    def _of_vertices(
        self, graph: GraphLike, h: Tensor, features: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Aggregate where sources and targets are the same vertices, and add a bias."""
        edges = own = None
        if features is not None:
            edges = self._edge_scores(features)
            if self.add_self_loops:
                own = self._edge_scores(self._loop_features(graph, features))
        vectors = self.att_src, self.att_dst
        return gat_of_vectors(graph, h, *vectors, edges, own, bias, **self._options())

    def _of_two_sets(self, graph: GraphLike, both: Both, features: Tensor | None) -> Tensor:
        """(n_target, heads, out_channels) Aggregate features of sources for targets."""
        h, tensors, options = both[0], graph_tensors(graph), self._options()
        el, er = self._scores(both, tensors.n_rows)
        if features is not None or tensors.n_rows != tensors.n_cols:
            (graph, features), options["self_loops"] = self._entries(graph, features), False
        edges = None if features is None else self._edge_scores(features)
        return gat_aggregate(graph, h, el, er, edges, **options)

    def _scores(self, both: Both, n_rows: int) -> tuple[Tensor, Tensor]:
        """Give the sources' part of the scores and the targets', which may be 0."""
        el, er = (
            None if h is None else (h * att.to(h.dtype)).sum(-1)
            for h, att in zip(both, (self.att_src, self.att_dst), strict=True)
        )
        assert el is not None  # there are sources
        return el, el.new_zeros(n_rows, self.heads) if er is None else er

    def _edge_scores(self, features: Tensor) -> Tensor:
        """(nnz, heads) The edges' terms."""
        assert self.lin_edge is not None  # the features have been checked beside it
        assert self.att_edge is not None
        args = read_map(self.lin_edge)
        if args is None or args[1] is not None:
            edges = called(self.lin_edge, features, "edge_attr")
            return (self._by_head(edges) * self.att_edge).sum(-1)
        weight = args[0].view(self.heads, self.out_channels, -1)
        return linear(features, (weight * self.att_edge.view(self.heads, -1, 1)).sum(1))

    def _entry_scores(self, entries: Entries, both: Both) -> Tensor:
        """(nnz, heads) The scores of all entries, in float32 at least."""
        edges = None if entries.features is None else self._edge_scores(entries.features)
        dtype = torch.promote_types(both[0].dtype, torch.float32)
        wide = both[0].to(dtype), None if both[1] is None else both[1].to(dtype)
        with torch.autocast(wide[0].device.type, enabled=False):
            el, er = self._scores(wide, graph_tensors(entries.graph).n_rows)
            scores = edge_combine(entries.graph, er, el)
            scores = scores if edges is None else scores + edges
            return leaky_relu(scores, self.negative_slope)
