"""Transformer and AGNN: attention by dot products, in one pass over the edges."""

from math import sqrt
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import dropout

from ..autograd import as_graph, dot_aggregate, edge_softmax, sddmm, spmm
from ..autograd.tensors.prepare import GraphLike, has_tiles
from ..autograd.tensors.shared import shared
from ..autograd.tensors.tensors import GraphTensors
from ..errors import DtypeError, ShapeError
from ..model.maps import read_map
from ._attention import (
    Attention,
    check_edge_features,
    entries_with_loops,
    in_form_of,
    weighted_sums,
)
from ._inputs import Ends, check_flags, check_input, in_pair, refuse_static
from ._loops import entries_as_columns, log_sums, loops, missing_loops, rows_and_columns
from ._maps import called, draw_map, linear_map, mapped
from ._passing import FORWARD, Passing, PassingOptions


class _Term(NamedTuple):
    """The edges' part of keys and values: features, and the map of each head, applied last.

    ``<q, e W> = <q W', e>`` and ``sum(P (e W)) = (sum P e) W``, so that no ``e W`` is made.
    Products go along ``places``, where each entry is a column of its own: (n_rows, nnz).  They read
    features of edges where they are, head by head: one of all heads would copy them for each.
    """

    places: GraphLike
    features: Tensor  #: (nnz, edge_dim), or without a weight (nnz, heads, out_channels)
    weight: Tensor | None  #: (heads, out_channels, edge_dim)

    def products(self, query: Tensor) -> Tensor:
        """Multiply each entry's term with the query of its target: (nnz, heads)."""
        features = self.features.to(query.dtype)
        if self.weight is None:
            return sddmm(self.places, query, features)
        query = torch.einsum("nkf,kfd->nkd", query, self.weight.to(query.dtype))
        return torch.stack([sddmm(self.places, head, features) for head in query.unbind(1)], 1)

    def sums(self, weights: Tensor) -> Tensor:
        """Sum the terms of each row's entries by their weights: (n_rows, heads, out_channels)."""
        with torch.autocast(self.features.device.type, enabled=False):
            weights = weights.to(self.features.dtype)
            if self.weight is None:
                return spmm(self.places, self.features, weights)
            parts = [spmm(self.places, self.features, head) for head in weights.unbind(1)]
            y = torch.stack(parts, 1)
            return torch.einsum("nkd,kfd->nkf", y, self.weight.to(y.dtype))


class TransformerConv(Attention):
    """Attention by dot products: ``y[i, k] = sum_e P[e, k] v[j, k] + x[i] W_skip + b_skip``.

    ``q = x W_query + b_query``, and so keys ``k`` and values ``v``, with ``heads`` parts of
    ``out_channels`` features; ``P[e, k]`` is the softmax over the entries of row ``i`` of
    ``<q[i, k], k[j, k]> / sqrt(out_channels)``.  With ``edge_dim`` the key and the value of an
    entry have the term ``edge_attr[e] W_edge[k]`` too.

    Parameters
    ----------
    in_channels, out_channels, heads, concat, beta, dropout, bias, root_weight
        As in PyG: -1 for as many features as the first ``x`` has; dropout is a share less than 1.
        With ``beta`` the result is ``B r + (1 - B) m`` of the sum ``m`` and the map ``r`` of the
        targets' own features, where ``B = sigmoid([m, r, m - r] W_beta)``.
    edge_dim : int, optional
        As for ``GATConv``.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GATConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GATConv``.

    Notes
    -----
    Without edge features scores, softmax and sums are one pass, ``autograd.dot_aggregate``, and
    nothing of the size of the edges is made; a gradient can be used but not differentiated.  With
    them weights are made, a number for each entry and head, by products with the features of edges,
    but no map of these; gradients are then differentiable any number of times.

    UniMP (IJCAI'21, arXiv 2009.03509), equations 3 to 5; Transformer (NeurIPS'17), equation 1.
    """

    __module__ = "sparsefmt.nn"

    #: PyG's layer holds its weights here while it runs; this one has no such state.
    _alpha: None = None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        **passing: Unpack[PassingOptions],
    ) -> None:
        check_flags(beta=beta, bias=bias, root_weight=root_weight)
        super().__init__(in_channels, out_channels, heads, concat, dropout, edge_dim, **passing)
        self.beta, self.root_weight = beta and root_weight, root_weight
        of_sources, of_targets = in_pair(in_channels)
        width = heads * out_channels
        out_width = width if concat else out_channels
        self.lin_key = linear_map(of_sources, width, bias=bias)
        self.lin_query = linear_map(of_targets, width, bias=bias)
        self.lin_value = linear_map(of_sources, width, bias=bias)
        self.lin_edge = None if edge_dim is None else linear_map(edge_dim, width, bias=False)
        self.lin_skip = linear_map(of_targets, out_width, bias=bias)
        self.lin_beta: Linear | None = None
        if self.beta:
            self.lin_beta = linear_map(3 * out_width, 1, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters as ``torch.nn.Linear`` does."""
        maps = self.lin_key, self.lin_query, self.lin_value, self.lin_edge
        for layer in (*maps, self.lin_skip, self.lin_beta):
            draw_map(layer)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Map (n, in_channels) to (n, heads * out_channels); without ``concat`` (n, out_channels).

        Parameters
        ----------
        x, edge_index, edge_attr
            As for ``GATConv``, but that ``x_target`` is needed, and ``edge_attr`` with
            ``edge_dim``.
        return_attention_weights : bool, optional
            If it is given, True or False as in PyG, the result is ``(y, (edge_index, P))``: the
            edges as they were given, and the weight of each, (nnz, heads), before dropout.

        Raises
        ------
        ShapeError
            If the graph is not square but ``x`` one tensor, a tensor not of that shape, or there
            are no ``edge_attr`` for a layer with ``edge_dim``.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.dot_aggregate``; DtypeError also if ``x_target`` is None.
        """
        ends = self._between(x, edge_index)
        target, graph = ends.target, ends.graph
        if target is None:
            raise DtypeError("x[1] is None: queries are of targets, give their features.")
        query = self._mapped(self.lin_query, target, "x" if ends.alike else "x[1]")
        key, value = self._of_sources(ends, self.lin_key, self.lin_value)
        term = self._term(edge_attr, ends)
        weights = None
        if term is not None or return_attention_weights is not None:
            weights = self._weights(graph, query, key, term)
        share = self.dropout if self.training else 0.0
        if weights is not None and (term is not None or share):
            dropped = dropout(weights, self.dropout, self.training)
            y = weighted_sums(graph, dropped, value)
            y = y if term is None else y + term.sums(dropped).to(y.dtype)
        else:
            y = dot_aggregate(graph, query, key, value, dropout=share)
        y = self._with_own(y, target)
        if weights is None or return_attention_weights is None:
            return y
        if isinstance(edge_index, Tensor):
            return y, (edge_index, weights.to(y.dtype))
        weights, graph = weights.to(y.dtype), self._turned(graph, None)
        return y, in_form_of(edge_index, graph, weights, ends.shared, looped=False)

    def _term(self, edge_attr: Tensor | None, ends: Ends) -> _Term | None:
        """Return the edges' part of keys and values, which a layer with ``edge_dim`` needs."""
        if edge_attr is None and self.lin_edge is None:
            return None
        if edge_attr is None:
            raise ShapeError(
                f"edge_attr is None but the layer has edge_dim={self.edge_dim}: give the features "
                "of each edge."
            )
        features = check_edge_features(edge_attr, ends.tensors, self.lin_edge)
        assert self.lin_edge is not None  # the features have been checked beside it
        args, places = read_map(self.lin_edge), entries_as_columns(ends.tensors)
        if args is None or args[1] is not None:
            return _Term(places, self._mapped(self.lin_edge, features, "edge_attr"), None)
        return _Term(places, features, args[0].view(self.heads, self.out_channels, -1))

    def _weights(self, graph: GraphLike, query: Tensor, key: Tensor, term: _Term | None) -> Tensor:
        """Compute the weights of all entries, (nnz, heads), in float32 at least."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query = query.to(dtype) / sqrt(self.out_channels)
            scores = sddmm(graph, query, key.to(dtype))
            if term is not None:
                scores = scores + term.products(query)
            return edge_softmax(graph, scores)

    def _with_own(self, y: Tensor, target: Tensor) -> Tensor:
        """Join the heads, and add the part of the targets' own features."""
        y = y.flatten(1) if self.concat or self.heads == 1 else y.mean(1)
        if not self.root_weight:
            return y
        own = mapped(self.lin_skip, target, "x")
        if self.lin_beta is None:
            return y + own
        share = called(self.lin_beta, torch.cat([y, own, y - own], -1), "x").sigmoid()
        return share * own + (1 - share) * y


#: The least length that a row is divided by: what ``torch.nn.functional.normalize`` has.
LEAST_LENGTH = 1e-12


class AGNNConv(Passing):
    """Attention by cosines: ``y[i] = sum_e P[e] x[j]`` over the entries ``e = (i, j)`` of row i.

    ``P[e] = exp(beta cos(x[i], x[j])) / sum_e' exp(beta cos(x[i], x[j']))``, where
    ``cos(a, b) = <a, b> / (max(|a|, 1e-12) max(|b|, 1e-12))``: 0 for a row of zeros.

    Parameters
    ----------
    requires_grad : bool
        Whether ``beta`` is a parameter, or a buffer.
    add_self_loops : bool
        Whether each vertex has one loop, however many the graph stores.  If not, the loops are
        those of the graph, each counts, and a row without entries gives 0.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GATConv``, ``node_dim`` being -2.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GATConv``.

    Notes
    -----
    Scores, softmax and aggregation are one pass over the entries, ``autograd.dot_aggregate``: no
    other graph is built, and nothing of the size of the entries.  Its gradient can be used but not
    differentiated.  Lengths and scores are computed in float32 at least, from rows in the dtype of
    ``x``.  In float16 a row is divided by 2**-14 at least, since the gradient of a row of zeros is
    divided by it too.

    A graph on a GPU that has tiles, ``prepare(graph, tile=...)``, goes by ``sddmm``,
    ``edge_softmax`` and ``spmm``, whose products may be the tensor cores', where that is faster: of
    100 000 entries or more, but not with over 64 entries a row and below 256 bytes of features.
    Only then gradients can be differentiated.  A missing loop is added to the result, and of
    ``c`` loops each has 1 / c of the part of one.  What is needed for that, a value for each entry,
    is kept with the graph, but computed at each call in code that ``torch.compile`` has compiled.
    Where each vertex has one loop, ``add_self_loops=False`` gives the same for less.

    AGNN (Thekumparampil et al. 2018, arXiv 1803.03735); TC-GNN (ATC'23), section 2.1.
    """

    __module__ = "sparsefmt.nn"

    beta: Tensor

    def __init__(
        self,
        requires_grad: bool = True,
        add_self_loops: bool = True,
        **passing: Unpack[PassingOptions],
    ) -> None:
        check_flags(requires_grad=requires_grad, add_self_loops=add_self_loops)
        super().__init__(**passing)
        self.requires_grad, self.add_self_loops = requires_grad, add_self_loops
        if requires_grad:
            self.beta = Parameter(torch.ones(1))
        else:
            self.register_buffer("beta", torch.ones(1))

    def reset_parameters(self) -> None:
        """Set a ``beta`` that is trained to 1; a fixed one stays, as in PyG."""
        if self.requires_grad:
            with torch.no_grad():
                self.beta.fill_(1)

    def forward(self, x: Tensor, edge_index: GraphLike) -> Tensor:
        """Map (n, feat) to (n, feat), in the dtype of ``x``, or autocast's.

        Parameters
        ----------
        x : Tensor, shape (n, feat)
            float16, bfloat16, float32 or float64.
        edge_index : Graph, shape (n, n), or PyG's
            Only its structure is read.

        Raises
        ------
        ShapeError
            If the graph is not square, or ``x`` not of that shape.
        DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``.
        """
        refuse_static(x, self)
        graph = as_graph(edge_index, x, name="edge_index")
        ends = Ends(graph, x, x, True, check_input(x, graph, edge_index), shared(graph))
        if self.flow != FORWARD:
            ends = ends.along(self._turned(graph, edge_index))
        ends = ends.gathered()
        graph, x = ends.graph, ends.source
        wide = torch.promote_types(x.dtype, torch.float32)
        unit, least = x.to(wide), max(LEAST_LENGTH, torch.finfo(x.dtype).tiny)
        # Of length one, with finite derivatives even of a row of zeros.
        unit = unit * unit.square().sum(1, keepdim=True).clamp(min=least**2).rsqrt()
        beta, add = self.beta.to(wide), self.add_self_loops
        if _composing_pays(ends, x):
            return _composed(ends, unit, beta, add)
        queries, keys = (beta * ends.of_targets(unit)).to(x.dtype), unit.to(x.dtype)
        if add and len(queries) != len(keys):
            graph, add = entries_with_loops(ends, None, None)[0], False
        return dot_aggregate(graph, queries, keys, x, scale=1.0, self_loops=add)


def _composing_pays(ends: Ends, x: Tensor) -> bool:
    """Return True if there are tiles and three operations take less time (measured on an H200)."""
    if not has_tiles(ends.graph):
        return False
    nnz, is_narrow = ends.tensors.nnz, x.shape[1] * x.itemsize < 256
    return nnz >= 100_000 and not (is_narrow and nnz > 64 * ends.tensors.n_rows)


def _composed(ends: Ends, unit: Tensor, beta: Tensor, add_self_loops: bool) -> Tensor:
    """Compose the layer of ``sddmm``, ``edge_softmax`` and ``spmm``."""
    graph, tensors, x = ends.graph, ends.tensors, ends.source
    wide, narrow = unit.dtype, unit.to(x.dtype)
    scores = beta * sddmm(graph, narrow, narrow).to(wide)
    if add_self_loops:
        scores = scores + _loop_scores(tensors, wide)
    p = edge_softmax(graph, scores)
    y = spmm(graph, x, p.to(x.dtype))
    if add_self_loops:
        missing = missing_loops(tensors).to(wide)
        # The part of a missing loop: exp(own) / (exp(own) + Z), of its score and the row's sum.
        own = beta * unit.square().sum(1) - log_sums(tensors, scores, p)
        own = torch.sigmoid(own) * missing
        y = torch.lerp(y, x.to(y.dtype), own[:, None].to(y.dtype))
    return y


def _loop_scores(tensors: GraphTensors, dtype: torch.dtype) -> Tensor:
    """Compute ``-log(c)`` at each loop of a vertex with ``c`` of them, 0 elsewhere: (nnz,)."""

    def make() -> Tensor:
        counted, count = loops(tensors)
        logs = count.clamp(min=1).log()
        return (-counted * logs[rows_and_columns(tensors)[0]]).to(dtype)

    return tensors.cached(("loop scores", dtype), make)
