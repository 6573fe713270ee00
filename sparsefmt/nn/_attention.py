"""What attention layers share: heads and how they are joined, loops, residuals, weights."""

from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import dropout

from ..autograd import as_graph, edge_softmax, spmm
from ..autograd.messages import aggregated
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..autograd.tensors.shared import Shared
from ..autograd.tensors.tensors import GraphTensors
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..model.maps import read_map
from ._inputs import Ends, check_counts, check_flags, check_like, check_number, check_share, in_pair
from ._loops import loops, rows_and_columns, with_loops
from ._maps import GLOROT, draw_glorot, draw_map, linear_map, mapped, set_to_zero, settle
from ._passing import FORWARD, Passing, PassingOptions, joined

#: How a loop's features come from those of its row's entries: PyG's words, torch's reductions.
FILLS = {"mean": "mean", "add": "sum", "sum": "sum", "min": "amin", "max": "amax", "mul": "prod"}


def weighted_sums(graph: GraphLike, weights: Tensor, x: Tensor) -> Tensor:
    """Sum features of sources, (n_cols, heads, feat), by weights: (n_rows, heads, feat)."""
    with torch.autocast(x.device.type, enabled=False):
        return spmm(graph, x, weights.to(x.dtype))


def check_fill(fill_value: object) -> None:
    """Check for a word, a number or a tensor that gives loops their features."""
    if isinstance(fill_value, Tensor) or (isinstance(fill_value, str) and fill_value in FILLS):
        return
    if isinstance(fill_value, bool) or not isinstance(fill_value, Real):
        kind = UnsupportedError if isinstance(fill_value, str) else DtypeError
        raise kind(
            f"fill_value is {fill_value!r}: give one of {', '.join(map(repr, FILLS))}, a number, "
            "or a tensor of edge_dim values."
        )
    check_number("fill_value", fill_value)


def entries_with_loops(
    ends: Ends, features: Tensor | None, own: Tensor | None
) -> tuple[GraphLike, Tensor | None]:
    """Return the graph of entries but loops, then one loop for each vertex, and their features.

    Vertices are rows and columns.  Features of their loops are ``own``; the order is PyG's.
    """
    (edges, entries), tensors = with_loops(ends.tensors), ends.tensors
    if features is not None and own is not None:
        features = joined(features[entries], own)
    return as_graph(edges, None, size=(tensors.n_cols, tensors.n_rows)), features


def _reduced(tensors: GraphTensors, features: Tensor, reduce: str) -> Tensor:
    """Reduce features of each row's entries but loops, (n, width): none to 0, a product to 1."""
    # By torch, whose gradients are PyG's: equal ones share them.
    entries = with_loops(tensors)[1]
    rows = tensors.cached("rows but loops", lambda: rows_and_columns(tensors)[0][entries])
    features, product = features[entries], reduce == "prod"
    made = features.new_full((tensors.n_rows, features.shape[1]), float(product))
    at = rows[:, None].expand_as(features)
    return made.scatter_reduce(0, at, features, reduce, include_self=product)


def _sums(tensors: GraphTensors, features: Tensor, reduce: str) -> Tensor:
    """Add features of each row's entries but loops, or average them: (n, width), none to 0."""
    wide = torch.promote_types(features.dtype, torch.float32)
    stored = tensors.cached("loops", lambda: loops(tensors)[0].bool()[:, None])

    def share() -> Tensor:
        counts = tensors.rows.indptr.diff() - loops(tensors)[1]
        return counts.clamp(min=1).reciprocal()[:, None]

    values = features.to(wide).masked_fill(stored, 0)
    with torch.autocast(tensors.kind, enabled=False):
        sums = aggregated(tensors, False, None, values, "copy_edge")
    if reduce == "mean":
        sums = sums * tensors.cached("share of an entry but loops", share).to(wide)
    return sums.to(features.dtype)


def check_edge_features(edge_attr: object, tensors: GraphTensors, layer: Linear | None) -> Tensor:
    """Check features of edges, (nnz, edge_dim) or (nnz,), beside their map; make a lazy one."""
    if not isinstance(edge_attr, Tensor):
        raise DtypeError(f"edge_attr is a {type(edge_attr).__name__}: give a torch.Tensor.")
    if layer is None:
        width = edge_attr.shape[1] if edge_attr.dim() == 2 else 1
        raise ShapeError(
            f"edge_attr has shape {tuple(edge_attr.shape)} but the layer has no edge_dim and would "
            f"not read it: make the layer with edge_dim={width}, or leave edge_attr out."
        )
    features, nnz = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr, tensors.nnz
    args = read_map(layer)
    if args is None and features.dim() == 2 and features.shape[0] == nnz:
        settle(layer, features.shape[1])
        args = read_map(layer)
    width = features.shape[-1] if args is None else args[0].shape[1]  # another map may take any
    if features.shape != (nnz, width):
        raise ShapeError(
            f"edge_attr has shape {tuple(edge_attr.shape)}: give {(nnz, width)}, the features "
            "of each edge, in the order of graph.structure."
        )
    if args is not None and (features.dtype, features.device) != (args[0].dtype, args[0].device):
        check_like("edge_attr", features, args[0])
    return features


def in_form_of(
    edge_index: Any, graph: GraphLike, weights: Tensor, shared: Shared | None, *, looped: bool
) -> Any:
    """Return edges and weights in the form that PyG's layers have for such an ``edge_index``.

    ``graph`` is that of ``weights``, (nnz, heads) or (nnz,), in its order, and ``shared`` that of
    which processes share it; ``looped`` tells that its loops are others than those of
    ``edge_index``.  Sparse tensors get the weights as values.
    """
    sparse = isinstance(edge_index, Tensor) and edge_index.layout is not torch.strided
    if isinstance(edge_index, Tensor) and not sparse and not looped:
        return edge_index, weights
    tensors = tensors_of(graph)
    edges = tensors.cached("edge_index", lambda: torch.stack(rows_and_columns(tensors)[::-1]))
    if shared is not None:
        return shared.numbered(edges), weights
    if not sparse and not hasattr(edge_index, "set_diag"):
        return edges, weights
    col, row = edges
    order = tensors.cached("sorted", lambda: torch.argsort(row * tensors.n_cols + col, stable=True))
    values = weights[order]
    if not sparse:
        matrix = edge_index.set_diag() if looped else edge_index
        return matrix.set_value(values, layout="coo")
    size = tensors.n_rows, tensors.n_cols, *weights.shape[1:]
    made = torch.sparse_coo_tensor(edges.flip(0)[:, order], values, size, is_coalesced=True)
    if edge_index.layout is not torch.sparse_coo:
        made = made.to_sparse(layout=edge_index.layout)
    return made, made.values()


class Attention(Passing):
    """Attention with heads, over edges that may have features."""

    _node_dim: ClassVar[int] = 0
    _has_heads = True
    _shown = ("heads",)

    lin_edge: Linear | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        **passing: Unpack[PassingOptions],
    ) -> None:
        super().__init__(**passing)
        in_pair(in_channels)
        check_flags(concat=concat)
        check_counts(out_channels=out_channels, heads=heads)
        check_share("dropout", dropout)
        if edge_dim is not None and edge_dim != -1:
            check_counts(", or -1 for those of the first edge_attr", edge_dim=edge_dim)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.heads, self.concat, self.dropout, self.edge_dim = heads, concat, dropout, edge_dim

    def _mapped(self, layer: Module, x: Tensor, name: str) -> Tensor:
        """Map features to all heads, (n, heads, out_channels)."""
        return mapped(layer, x, name).reshape(x.shape[0], self.heads, self.out_channels)

    def _of_sources(self, ends: Ends, *layers: Linear) -> list[Tensor]:
        """Map features of all sources, (n_source, heads, out_channels), by each of the maps.

        What other processes have of them comes in one exchange, in the narrower form.
        """
        x, shared, heads = ends.source, ends.shared, self.heads
        if shared is not None and shared.sends_first(x, len(layers) * heads * self.out_channels):
            x, shared = shared.extended(x), None
        name, shape = "x" if ends.alike else "x[0]", (x.shape[0], heads, self.out_channels)
        parts = [mapped(layer, x, name).reshape(shape) for layer in layers]
        if shared is None:
            return parts
        return [*shared.extended(torch.cat(parts, 1)).chunk(len(layers), 1)]


class LoopedAttention(Attention):
    """Attention that may give each vertex one loop, and add a map of its own features."""

    #: Whether features of edges make a sum over entries of weights for each of them.
    _by_entries: ClassVar[bool] = False
    #: Maps features of both ends, (n, heads, out_channels).
    _projected: ClassVar[Callable[..., tuple[Tensor, Any]]]
    #: Aggregates what was mapped in one pass, joins the heads and adds the bias.
    _aggregated: ClassVar[Callable[..., Tensor]]
    #: Computes the scores of all entries, (nnz, heads), in float32 at least.
    _entry_scores: ClassVar[Callable[..., Tensor]]
    bias: Parameter | None
    res: Linear | None

    def _vectors(self) -> Parameter:
        """Build a vector for each head."""
        return Parameter(torch.empty(1, self.heads, self.out_channels))

    def _add_options(
        self,
        negative_slope: float,
        add_self_loops: bool,
        fill_value: float | Tensor | str,
        residual: bool,
        bias: bool,
    ) -> None:
        """Check options, and build the map of edge features and what is added to joined heads."""
        check_flags(add_self_loops=add_self_loops, residual=residual, bias=bias)
        check_number("negative_slope", negative_slope)
        check_fill(fill_value)
        self.negative_slope, self.add_self_loops = negative_slope, add_self_loops
        self.fill_value, self.residual, self.lin_edge, self.res = fill_value, residual, None, None
        if self.edge_dim is not None:
            width = self.heads * self.out_channels
            self.lin_edge = linear_map(self.edge_dim, width, bias=False, draw=GLOROT)
        width = self.out_channels * (self.heads if self.concat else 1)
        if residual:
            of_targets = in_pair(self.in_channels)[1]
            self.res = linear_map(of_targets, width, bias=False, draw=GLOROT)
        self.bias = Parameter(torch.empty(width)) if bias else None

    def _draw(self, maps: tuple[Linear | None, ...], vectors: tuple[Tensor | None, ...]) -> None:
        """Draw maps, ``lin_edge``, ``res`` and vectors by Glorot's rule; set the bias to 0."""
        for layer in (*maps, self.lin_edge, self.res):
            draw_map(layer, GLOROT)
        for vector in vectors:
            draw_glorot(vector)
        set_to_zero(self.bias)

    def _options(self) -> dict[str, Any]:
        """Return the options of the aggregation; nothing is dropped in evaluation."""
        return {
            "negative_slope": self.negative_slope,
            "dropout": self.dropout if self.training else 0.0,
            "self_loops": self.add_self_loops,
        }

    def _attended(
        self, ends: Ends, edge_index: Any, edge_attr: Tensor | None, with_weights: bool | None
    ) -> Any:
        """Compute the layer between ends, and return its weights too if it is asked for them."""
        residual, features, weights = None, None, None
        if self.res is not None and ends.target is not None:
            residual = mapped(self.res, ends.target, "x" if ends.alike else "x[1]")
        source, target = self._projected(ends)
        if edge_attr is not None:
            features = check_edge_features(edge_attr, ends.tensors, self.lin_edge)
        by_entries = self._by_entries and features is not None
        if with_weights or by_entries:
            graph, terms = self._entries(ends, features)
            scores = self._entry_scores(graph, terms, source, target)
            with torch.autocast(scores.device.type, enabled=False):  # 0 are left out, as in PyG
                weights = dropout(edge_softmax(graph, scores), self.dropout, self.training)
        if weights is not None and (by_entries or (self.training and self.dropout)):
            y = self._biased(weighted_sums(graph, weights, source))
        else:
            y = self._aggregated(ends, source, target, features)
        y = y if ends.shared is None else y[: ends.shared.n_local]
        y = y if residual is None else y + residual
        if weights is None or not with_weights:
            return y
        graph = self._turned(graph, None)  # that along which messages flow
        weights, looped = weights.to(y.dtype), self.add_self_loops
        return y, in_form_of(edge_index, graph, weights, ends.shared, looped=looped)

    def _entries(self, ends: Ends, features: Tensor | None) -> tuple[GraphLike, Tensor | None]:
        """Return the entries that attention goes over, loops included, and their features."""
        if not self.add_self_loops:
            return ends.graph, features
        own = None if features is None else self._loop_features(ends, features)
        return entries_with_loops(ends, features, own)

    def _loop_features(self, ends: Ends, features: Tensor) -> Tensor:
        """Compute features of loops, (n_loops, width), by ``edge_index[1]`` as PyG does."""
        if self.flow != FORWARD:
            ends = ends.along(self._turned(ends.graph, None))
        tensors, fill = ends.tensors, self.fill_value
        shape = min(tensors.n_rows, tensors.n_cols), features.shape[1]
        if isinstance(fill, str):
            reduced = _sums if FILLS[fill] in ("mean", "sum") else _reduced
            return reduced(tensors, features, FILLS[fill])[: shape[0]]
        if not isinstance(fill, Tensor):
            return features.new_full(shape, fill)
        try:
            return fill.to(features.device, features.dtype).expand(shape)
        except RuntimeError as error:
            raise ShapeError(
                f"fill_value has shape {tuple(fill.shape)} but edges have {shape[1]} features: "
                f"give ({shape[1]},), the features of a loop."
            ) from error

    def _biased(self, y: Tensor) -> Tensor:
        """Join the heads, and add the bias."""
        y = y.flatten(1) if self.concat or self.heads == 1 else y.mean(1)
        return y if self.bias is None else y + self.bias.to(y.dtype)
