"""Entries that attention goes over: loops with features of their own, weights, what a user gets."""

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear

from ..autograd import as_graph, message_aggregate, sddmm, spmm
from ..autograd.maps import read_map
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from ..errors import DtypeError, ShapeError, UnsupportedError
from ._inputs import check_beside, check_number
from ._linear import settle
from ._loops import ends, loops, with_loops
from .shared import shared

#: How a loop's features come from those of its row's entries: PyG's words, torch's reductions.
FILLS = {"mean": "mean", "add": "sum", "sum": "sum", "min": "amin", "max": "amax", "mul": "prod"}


class Entries(NamedTuple):
    """A graph's entries, and their features in its order, if they have some."""

    graph: GraphLike
    features: Tensor | None


class AttentionWeights(NamedTuple):
    """A graph's entries, and the weights of attention in its order, (nnz, heads)."""

    graph: GraphLike
    weights: Tensor

    def sums(self, x: Tensor) -> Tensor:
        """(n_rows, heads, feat) Sum features of sources, (n_cols, heads, feat), by the weights."""
        with torch.autocast(x.device.type, enabled=False):
            return spmm(self.graph, x, self.weights.to(x.dtype))


def check_fill(fill_value: Any) -> None:
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


def entries_with_loops(graph: GraphLike, features: Tensor | None, own: Tensor | None) -> Entries:
    """Give each vertex that is a row and a column one loop, behind the entries that are none.

    So PyG orders them: the other entries in the user's order, then loops by vertices, whose
    features are ``own``.
    """
    looped, tensors = with_loops(graph), graph_tensors(graph)
    if features is not None and own is not None:
        features = torch.cat([features[looped.others], own])
    sizes = tensors.n_cols, tensors.n_rows
    return Entries(as_graph(looped.edges, None, size=sizes), features)


def loop_features(graph: GraphLike, features: Tensor, fill_value: Any) -> Tensor:
    """(n_loops, width) Features of the loops of vertices that are both rows and columns."""
    tensors = graph_tensors(graph)
    shape = min(tensors.n_rows, tensors.n_cols), features.shape[1]
    if isinstance(fill_value, str):
        return _reduced(graph, features, fill_value)[: shape[0]]
    if not isinstance(fill_value, Tensor):
        return features.new_full(shape, fill_value)
    try:
        return fill_value.to(features.device, features.dtype).expand(shape)
    except RuntimeError as error:
        raise ShapeError(
            f"fill_value has shape {tuple(fill_value.shape)} but edges have {shape[1]} features: "
            f"give ({shape[1]},), the features of a loop."
        ) from error


def _reduced(graph: GraphLike, features: Tensor, fill_value: str) -> Tensor:
    """(n, width) Reduce features of each row's entries but loops; of none to 0, a product to 1."""
    tensors, reduce = graph_tensors(graph), FILLS[fill_value]
    if reduce not in ("mean", "sum"):
        # torch's, whose gradients are PyG's: shared by equal ones.
        kept = with_loops(graph).others
        rows = tensors.kept("rows of others than loops", lambda: ends(graph)[0].long()[kept])
        others, product = features[kept], reduce == "prod"
        made = features.new_full((tensors.n_rows, features.shape[1]), float(product))
        at = rows[:, None].expand_as(others)
        return made.scatter_reduce(0, at, others, reduce, include_self=product)
    wide = torch.promote_types(features.dtype, torch.float32)
    stored = tensors.kept("loops", lambda: loops(graph)[0].bool())
    with torch.autocast(tensors.kind, enabled=False):
        others = features.to(wide).masked_fill(stored[:, None], 0)
        sums = message_aggregate(graph, None, others, message="copy_edge")
        if reduce == "mean":
            sums = sums * _share(graph, stored).to(wide)[:, None]
    return sums.to(features.dtype)


def _share(graph: GraphLike, stored: Tensor) -> Tensor:
    """(n,) One over the number of a row's entries but loops, or 1."""
    tensors = graph_tensors(graph)

    def make() -> Tensor:
        ones = stored.new_ones(tensors.n_cols, 1, dtype=torch.float64)
        return spmm(graph, ones, (~stored).double())[:, 0].clamp(min=1).reciprocal()

    return tensors.kept("share of an entry but loops", make)


def check_edge_features(edge_attr: Any, graph: GraphLike, layer: Linear | None) -> Tensor:
    """(nnz, edge_dim) Check features of edges beside a layer's map; one a piece may lack its axis.

    A lazy map is made for them.
    """
    nnz = graph_tensors(graph).nnz
    if not isinstance(edge_attr, Tensor):
        raise DtypeError(f"edge_attr is a {type(edge_attr).__name__}: give a torch.Tensor.")
    if layer is None:
        width = edge_attr.shape[1] if edge_attr.dim() == 2 else 1
        raise ShapeError(
            f"edge_attr has shape {tuple(edge_attr.shape)} but the layer has no edge_dim and would "
            f"not read it: make the layer with edge_dim={width}, or leave edge_attr out."
        )
    found = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
    if found.dim() == 2 and found.shape[0] == nnz:
        settle(layer, found.shape[1])
    args = read_map(layer)
    width = found.shape[-1] if args is None else args[0].shape[1]  # another map may take any
    if found.shape != (nnz, width):
        raise ShapeError(
            f"edge_attr has shape {tuple(edge_attr.shape)}: give {(nnz, width)}, the features "
            "of each edge, in the order of graph.structure."
        )
    if args is not None:
        check_beside("edge_attr", found, args[0])
    return found


def at_edges(graph: GraphLike, x: Tensor, features: Tensor) -> Tensor:
    """(nnz, heads) Dot products of each entry's features with its target's, in each head.

    ``x`` is (n_rows, heads, width), and ``features`` (nnz, width), of all heads, or
    (nnz, heads, width).
    """
    places = _places(graph)
    if features.dim() == 3:
        return sddmm(places, x, features)
    # One product for each head: one of all heads would copy the features for each of them.
    return torch.stack([sddmm(places, one, features) for one in x.unbind(1)], 1)


def sums_of_edges(graph: GraphLike, features: Tensor, weights: Tensor) -> Tensor:
    """(n_rows, heads, width) Sum features of each row's entries, each head by its own weights.

    ``features`` is as for ``at_edges``, and ``weights`` (nnz, heads).
    """
    places = _places(graph)
    if features.dim() == 3:
        return spmm(places, features, weights)
    # As above: the gradient of all heads' weights at once is such a product.
    return torch.stack([spmm(places, features, weight) for weight in weights.unbind(1)], 1)


def _places(graph: GraphLike) -> GraphLike:
    """Give the graph of targets and entries, (n_rows, nnz): each entry is a column of its own.

    Products with it read features of edges where they are, and gather none.
    """
    tensors = graph_tensors(graph)

    def make() -> Tensor:
        rows = ends(graph)[0].long()
        return torch.stack([torch.arange(len(rows), device=rows.device), rows])

    found: GraphLike = as_graph(
        tensors.kept("entries as columns", make), None, size=(tensors.nnz, tensors.n_rows)
    )
    return found


def as_given(given: Any, graph: GraphLike, weights: Tensor, *, looped: bool = False) -> Any:
    """Give the edges and their weights, as PyG's layers do for such a graph.

    Parameters
    ----------
    given : Graph, Tensor or SparseTensor
        What the user gave.
    graph : Graph
        Of the entries that have ``weights``, (nnz, heads), in its order.
    looped : bool
        Whether its loops are others than those of ``given``.

    Returns
    -------
    (edge_index, weights), or of a sparse tensor (that with weights as values, its values), or of a
    SparseTensor that with them
    """
    if hasattr(given, "set_diag"):
        found = given.set_diag() if looped else given
        return found.set_value(_sorted(graph, weights, torch.sparse_csr)[2], layout="coo")
    if not isinstance(given, Tensor) or given.layout is torch.strided:
        whole = isinstance(given, Tensor) and not looped
        edges = given if whole else edge_index_of(graph)
        return edges if shared(given) is None else given.numbered(edges), weights
    pointers, minor, values = _sorted(graph, weights, given.layout)
    tensors = graph_tensors(graph)
    size = tensors.n_rows, tensors.n_cols, weights.shape[1]
    if given.layout is not torch.sparse_coo:
        made = torch.sparse_compressed_tensor(pointers, minor, values, size, layout=given.layout)
        return made, values
    counts = pointers[1:] - pointers[:-1]
    major = torch.arange(tensors.n_rows, device=minor.device).repeat_interleave(counts)
    places = torch.stack([major, minor])
    return torch.sparse_coo_tensor(places, values, size, is_coalesced=True), values


def edge_index_of(graph: GraphLike) -> Tensor:
    """(2, nnz) Sources and targets of the entries, in the user's order."""
    tensors = graph_tensors(graph)
    return tensors.kept("edge_index", lambda: torch.stack(ends(graph)[::-1]).long())


def _sorted(
    graph: GraphLike, weights: Tensor, layout: torch.layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort entries by rows, of CSC by columns: pointers, the other ends, and weights."""
    tensors, (col, row) = graph_tensors(graph), edge_index_of(graph)
    of_columns = layout is torch.sparse_csc
    major, minor = (col, row) if of_columns else (row, col)
    n, other = tensors.n_rows, tensors.n_cols
    n, other = (other, n) if of_columns else (n, other)
    order = tensors.kept(
        ("sorted", of_columns), lambda: torch.argsort(major * other + minor, stable=True)
    )
    pointers = torch.searchsorted(major[order], torch.arange(n + 1, device=major.device))
    return pointers, minor[order], weights[order]
