"""GAT and GATv2: attention by learned vectors, in one pass over the edges."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import leaky_relu, linear

from ..autograd import edge_combine, gat_aggregate, gat_of_vectors, gatv2_aggregate
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..errors import DtypeError
from ..model.maps import read_map
from ._attention import LoopedAttention
from ._inputs import Ends, check_flags, in_pair
from ._maps import GLOROT, linear_map
from ._passing import PassingOptions


class GATConv(LoopedAttention):
    """Graph attention: ``y[i, k] = sum_e P[e, k] h[j, k] + b`` over the entries of row i.

    ``h = x W`` with ``heads`` parts of ``out_channels`` features, and ``P[e, k]`` is the softmax
    over the row of ``leaky(<h[j, k], a_src[k]> + <h[i, k], a_dst[k]>)``, where ``leaky(z)`` is
    ``z`` if positive, else ``negative_slope * z``.  With ``edge_dim`` the score has the term
    ``<edge_attr[e] W_edge[k], a_edge[k]>`` too.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, negative_slope, dropout, bias, residual
        As in PyG: -1 for as many features as the first ``x`` has; dropout is a share less than 1.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores.  In a rectangular graph the
        first vertices have one, as many as are both rows and columns.  If not, the loops are those
        of the graph, and a row without entries gives ``b``.
    edge_dim, fill_value
        As in PyG; -1 for as many features as the first ``edge_attr`` has.  Loops that are added get
        those of the row's entries but loops, reduced, 0 where there are none and for "mul" 1.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        PyG's: sums alone; "source_to_target" or, for an ``edge_index`` of targets and sources,
        "target_to_source"; 0; without effect, no array of messages being made; nothing.

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
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, **passing)
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
        self.att_edge: Parameter | None = None if edge_dim is None else self._vectors()
        self._add_options(negative_slope, add_self_loops, fill_value, residual, bias)
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
        """Map (n, in_channels) to (n, heads * out_channels); without ``concat`` (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            As for ``SAGEConv``.  Without ``x_target``, None, scores have no part of the target.
        edge_index : Graph, shape (n, n), or (n_target, n_source), or PyG's
            Only its structure is read.
        edge_attr : Tensor, shape (nnz, edge_dim), or (nnz,) for ``edge_dim=1``, optional
            In the order of ``graph.structure``.  By default edges have no term.
        size : (n_source, n_target), optional
            As for ``SAGEConv``.
        return_attention_weights : bool, optional
            Whether to return ``(y, (edge_index, P))`` as PyG: with ``add_self_loops`` the edges but
            loops, then a loop for each vertex; weights that ``dropout`` leaves out are 0.

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
        if size is None and edge_attr is None and not return_attention_weights:
            y = None if self._plan is None else self._plan(self, x, edge_index)
            if y is not None:
                return y
        ends = self._between(x, edge_index, size)
        if ends.shared is not None and not return_attention_weights and self.lin is not None:
            ends = ends.squared()
        return self._attended(ends, edge_index, edge_attr, return_attention_weights)

    def _projected(self, ends: Ends) -> tuple[Tensor, Tensor | None]:
        """Map features of sources and, if they are given, of targets: (n, heads, out_channels)."""
        of_sources, of_targets = self.lin_src or self.lin, self.lin_dst or self.lin
        assert of_sources is not None  # a layer has one or two
        assert of_targets is not None
        (source,) = self._of_sources(ends, of_sources)
        if ends.target is None:
            return source, None
        if ends.alike and of_sources is of_targets:
            return source, source if ends.shared is None else ends.of_targets(source)
        return source, self._mapped(of_targets, ends.target, "x" if ends.alike else "x[1]")

    def _aggregated(
        self, ends: Ends, h: Tensor, target: Tensor | None, features: Tensor | None
    ) -> Tensor:
        """Aggregate features of sources for targets, join the heads and add the bias."""
        graph, options, edges = ends.graph, self._options(), None
        called = features is not None and read_map(self.lin_edge) is None
        if h is target and not called:  # the same vertices, and loops mapped beside the edges
            own = None
            if features is not None:
                parts = [self._loop_features(ends, features)] if self.add_self_loops else []
                edges, *parts = self._edge_scores(features, *parts)
                own = parts[0] if parts else None
            vectors, bias = (self.att_src, self.att_dst), None
            if self.concat and self.bias is not None:
                bias = self.bias.view_as(self.att_src)
            y = gat_of_vectors(graph, h, *vectors, edges, own, bias, **options)
            return self._biased(y) if bias is None else y.flatten(1)
        el, er = self._scores(h, target, ends.tensors.n_rows)
        if features is not None or ends.tensors.n_rows != ends.tensors.n_cols:
            (graph, features), options["self_loops"] = self._entries(ends, features), False
        edges = None if features is None else self._edge_scores(features)[0]
        return self._biased(gat_aggregate(graph, h, el, er, edges, **options))

    def _scores(self, h: Tensor, target: Tensor | None, n_rows: int) -> tuple[Tensor, Tensor]:
        """Compute the sources' part of the scores and the targets', 0 without their features."""
        el = (h * self.att_src.to(h.dtype)).sum(-1)
        if target is None:
            return el, el.new_zeros(n_rows, self.heads)
        return el, (target * self.att_dst.to(target.dtype)).sum(-1)

    def _edge_scores(self, *features: Tensor) -> list[Tensor]:
        """Compute the terms of edges, (nnz, heads), of each tensor of features."""
        assert self.lin_edge is not None  # the features have been checked beside it
        assert self.att_edge is not None
        att, shape = self.att_edge, (self.heads, self.out_channels, -1)
        args = read_map(self.lin_edge)
        if args is None or args[1] is not None:
            maps = (self._mapped(self.lin_edge, part, "edge_attr") for part in features)
            return [(part * att).sum(-1) for part in maps]
        weight = args[0].view(shape)
        return [linear(part, (weight * att.view(self.heads, -1, 1)).sum(1)) for part in features]

    def _entry_scores(
        self, graph: GraphLike, features: Tensor | None, source: Tensor, target: Tensor | None
    ) -> Tensor:
        """Compute the scores of all entries, (nnz, heads), in float32 at least."""
        edges = None if features is None else self._edge_scores(features)[0]
        dtype = torch.promote_types(source.dtype, torch.float32)
        with torch.autocast(source.device.type, enabled=False):
            wide = None if target is None else target.to(dtype)
            el, er = self._scores(source.to(dtype), wide, tensors_of(graph).n_rows)
            scores = edge_combine(graph, er, el)
            scores = scores if edges is None else scores + edges
            return leaky_relu(scores, self.negative_slope)


class GATv2Conv(LoopedAttention):
    """Dynamic graph attention: ``y[i, k] = sum_e P[e, k] l[j, k] + b`` over the entries of row i.

    ``l = x W_l + b_l`` and ``r = x W_r + b_r`` with ``heads`` parts of ``out_channels`` features,
    and ``P[e, k]`` is the softmax over the row of ``<a[k], leaky(l[j, k] + r[i, k])>``, with
    ``leaky`` as in ``GATConv``.  With ``edge_dim`` the sum has the term ``edge_attr[e] W_edge[k]``
    too.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, negative_slope, dropout, add_self_loops
        As for ``GATConv``.
    edge_dim, fill_value, residual
        As for ``GATConv``.
    bias, share_weights
        As in PyG: whether there are ``b``, ``b_l`` and ``b_r``, and ``W_r`` and ``b_r`` are those
        of sources.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GATConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GATConv``.

    Notes
    -----
    Of a square graph no other one is built, and nothing of the size of the edges; of a rectangular
    one with loops another one is, once.  A gradient can be used but not differentiated.  With edge
    features the sums before the non-linearity are made for each entry, (nnz, heads * out_channels).

    GATv2 (ICLR'22), equation 7.
    """

    __module__ = "sparsefmt.nn"
    _by_entries = True

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
        share_weights: bool = False,
        residual: bool = False,
        **passing: Unpack[PassingOptions],
    ) -> None:
        check_flags(bias=bias, share_weights=share_weights)
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, **passing)
        self.share_weights = share_weights
        of_sources, of_targets = in_pair(in_channels)
        options: dict[str, Any] = {"bias": bias, "draw": GLOROT}
        self.lin_l = linear_map(of_sources, heads * out_channels, **options)
        self.lin_r = self.lin_l
        if not share_weights:
            self.lin_r = linear_map(of_targets, heads * out_channels, **options)
        self.att = self._vectors()
        self._add_options(negative_slope, add_self_loops, fill_value, residual, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights and vectors by Glorot's uniform rule, biases as ``Linear``; ``b`` is 0."""
        self._draw((self.lin_l, self.lin_r), (self.att,))

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
        *,
        size: tuple[int, int] | None = None,
    ) -> Any:
        """Map (n, in_channels) to (n, heads * out_channels); without ``concat`` (n, out_channels).

        Parameters
        ----------
        x, edge_index, edge_attr, return_attention_weights, size
            As for ``GATConv``, but that ``x_target`` is needed.

        Raises
        ------
        ShapeError
            If the graph is not square but ``x`` one tensor, or ``x`` not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.gat_aggregate``; DtypeError also if ``x_target`` is None.
        """
        ends = self._between(x, edge_index, size)
        return self._attended(ends, edge_index, edge_attr, return_attention_weights)

    def _projected(self, ends: Ends) -> tuple[Tensor, Tensor]:
        """Map features of sources and targets, (n, heads, out_channels)."""
        if ends.target is None:
            raise DtypeError("x[1] is None: scores are of both ends, give features of targets.")
        (left,) = self._of_sources(ends, self.lin_l)
        if ends.alike and self.share_weights:
            return left, ends.of_targets(left)
        return left, self._mapped(self.lin_r, ends.target, "x" if ends.alike else "x[1]")

    def _aggregated(self, ends: Ends, left: Tensor, right: Tensor, features: None) -> Tensor:
        """Aggregate features of sources, join the heads and add the bias."""
        graph, options = ends.graph, self._options()
        if self.add_self_loops and len(left) != len(right):
            graph, options["self_loops"] = self._entries(ends, None)[0], False
        return self._biased(gatv2_aggregate(graph, left, right, self.att, **options))

    def _entry_scores(
        self, graph: GraphLike, features: Tensor | None, left: Tensor, right: Tensor
    ) -> Tensor:
        """Compute the scores of all entries, (nnz, heads), in float32 at least."""
        dtype, edges = torch.promote_types(left.dtype, torch.float32), None
        if features is not None:
            assert self.lin_edge is not None  # the features have been checked beside it
            edges = self._mapped(self.lin_edge, features, "edge_attr").to(dtype)
        with torch.autocast(left.device.type, enabled=False):
            both = right.flatten(1).to(dtype), left.flatten(1).to(dtype)
            sums = edge_combine(graph, *both).view(-1, self.heads, self.out_channels)
            sums = leaky_relu(sums if edges is None else sums.add_(edges), self.negative_slope)
            return torch.einsum("ekf,kf->ek", sums, self.att[0].to(dtype))
