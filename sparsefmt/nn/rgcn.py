"""The relational convolution: weights of their own for each type of edges."""

from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Parameter

from ..autograd import as_graph, relational_aggregate
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.shared import shared
from ..autograd.tensors.types import check_ids
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..model.state import is_graph
from ._inputs import check_counts, check_flags, check_like, in_pair
from ._maps import draw_glorot, set_to_zero
from ._passing import FORWARD, Direction, Passing


class RGCNConv(Passing):
    """R-GCN: ``y = sum_t mean_j(x[j]) W_t + x W + b`` over the in-neighbours ``j`` of each type.

    Parameters
    ----------
    in_channels, out_channels, num_relations, num_bases, num_blocks, root_weight, is_sorted, bias
        As in PyG; ``is_sorted`` has no effect.
    aggr : "mean", "add", "sum", "max" or "min"
        What is taken over the neighbours of each type.
    flow, node_dim, decomposed_layers, aggr_kwargs
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``; also if both ``num_bases`` and ``num_blocks`` are given, or a number of
        channels is no multiple of ``num_blocks``.

    Notes
    -----
    No array with features for each type, or with those of each edge, is made; see
    ``autograd.relational_aggregate``.  R-GCN (ESWC'18), section 2.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known: ClassVar[tuple[str, ...]] = ("sum", "mean", "max", "min")
    _node_dim = 0
    _shown = ("num_relations",)

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: Any = "mean",
        root_weight: bool = True,
        is_sorted: bool = False,
        bias: bool = True,
        **options: Unpack[Direction],
    ) -> None:
        super().__init__(aggr, **options)
        check_counts(out_channels=out_channels, num_relations=num_relations)
        check_flags(root_weight=root_weight, is_sorted=is_sorted, bias=bias)
        sources, targets = in_pair(in_channels)
        check_counts(**{"in_channels of sources": sources, "in_channels of targets": targets})
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_relations, self.num_bases, self.num_blocks = num_relations, num_bases, num_blocks
        self.is_sorted, self.in_channels_l = is_sorted, sources
        self.weight = Parameter(torch.empty(self._shape_of_weight()))
        self.comp = None if num_bases is None else Parameter(torch.empty(num_relations, num_bases))
        self.root = Parameter(torch.empty(targets, out_channels)) if root_weight else None
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self._all_ids: dict[torch.device, Tensor] = {}
        self.reset_parameters()

    def _shape_of_weight(self) -> tuple[int, ...]:
        """Return the shape of the weights, of which there may be bases or blocks; check both."""
        rows, columns = self.in_channels_l, self.out_channels
        bases, blocks = self.num_bases, self.num_blocks
        if bases is not None:
            check_counts(num_bases=bases)
        if blocks is not None:
            check_counts(num_blocks=blocks)
        if bases is not None and blocks is not None:
            raise ShapeError(
                f"num_bases is {bases} and num_blocks is {blocks}: weights are made of bases or "
                "of blocks, leave one out."
            )
        if bases is not None:
            return bases, rows, columns
        if blocks is None:
            return self.num_relations, rows, columns
        if rows % blocks or columns % blocks:
            raise ShapeError(
                f"num_blocks is {blocks} but weights are {rows} by {columns}: give a divisor of "
                "both numbers of channels."
            )
        return self.num_relations, blocks, rows // blocks, columns // blocks

    def reset_parameters(self) -> None:
        """Draw the weights by Glorot's rule, and set the bias to 0."""
        for weight in (self.weight, self.comp, self.root):
            draw_glorot(weight)
        set_to_zero(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor | None, Tensor] | None,
        edge_index: GraphLike,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or of integers and shape (n,), or None
            Features of vertices; or ids of those whose features are one-hot, None for all
            ``in_channels`` in their order.  A tuple of two has those of sources and of targets.
        edge_index : Graph or Tensor
            As for ``GCNConv``.
        edge_type : Tensor of integers, shape (nnz,), optional
            In the order of the edges.  The values of an ``adj_t`` are types, and so are those of a
            ``Graph`` where this is left out.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, IndexRangeError, UnsupportedError
            As ``autograd.relational_aggregate``.
        """
        source, target = self._ends(x)
        graph: Any = edge_index
        dist = shared(graph)
        if dist is not None and dist.complete is None:
            graph, source, target = self._local_part(graph, source, target)
        size = None if target is None else (len(source), len(target))
        if not is_graph(graph):  # nor remembered
            as_graph(graph, source, target, size=size, name="edge_index")
        if self.flow != FORWARD:
            graph = self._turned(as_graph(edge_index, source, target), edge_index)
        own = None if self.root is None else self._of_root(source, target)
        weight: Tensor = self.weight
        if self.comp is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
        args, reduce = (graph, source, weight, edge_type), self._reductions[0]
        y = relational_aggregate(*args, reduce=reduce, own=own, size=size)
        if dist is not None and source.requires_grad:
            y = y + source[:0].sum()  # backward is that of all processes, without edges too
        return y if self.bias is None or own is not None else y + self.bias.to(y.dtype)

    def _ends(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Check features or ids of sources and, if they are others, of targets."""
        pair = isinstance(x, tuple | list)
        if pair and len(x) != 2:
            raise ShapeError(f"x has {len(x)} parts: give (x, x_target), those of both ends.")
        source, target = x if pair else (x, None)
        if source is None:  # ids of all vertices, always one tensor: edges are grouped by it once
            device = self.weight.device
            if device not in self._all_ids:
                with torch.inference_mode(False):
                    self._all_ids[device] = torch.arange(self.in_channels_l, device=device)
            source = self._all_ids[device]
        if pair and not isinstance(target, Tensor):
            raise DtypeError(
                f"x[1] is a {type(target).__name__}: give features or ids of targets, a tensor."
            )
        for name, end in (("x[0]" if pair else "x", source), ("x[1]", target)):
            if end is None:
                continue
            if not isinstance(end, Tensor):
                raise DtypeError(f"{name} is a {type(end).__name__}: give a torch.Tensor.")
            if not end.dim():
                raise ShapeError(
                    f"{name} has shape (): give features, (n, in_channels), or ids, (n,)."
                )
            if end.is_floating_point():
                check_like(name, end, self.weight)
            if end.is_floating_point() != source.is_floating_point():
                raise DtypeError(
                    f"x has {source.dtype} and {end.dtype}: give features of both ends, or ids."
                )
        return source, target

    def _local_part(self, graph: Any, source: Tensor, target: Tensor | None) -> tuple[Any, ...]:
        """Return this process's graph, features of sources with the halo, and those of targets."""
        self._turned(graph, graph)  # refuses the other direction
        if source is self._all_ids.get(source.device):
            raise UnsupportedError(
                "x is None, the ids of all vertices, which processes share out: give those of this "
                "one's, graph.sources_of(torch.arange(graph.shape[1])) for instance."
            )
        if target is None and not graph.is_square:
            raise ShapeError("x is one tensor but the graph is not square: give (x, x_target).")
        return graph.local, graph.extended(source), source if target is None else target

    def _of_root(self, source: Tensor, target: Tensor | None) -> Tensor:
        """Compute what a vertex has of its own: its mapped features and the bias."""
        root: Any = self.root
        name, target = ("x", source) if target is None else ("x[1]", target)
        if not target.is_floating_point():
            check_ids(name, target, root.shape[0], "in_channels of targets")
            rows: Tensor = root[target]
            return rows if self.bias is None else rows + self.bias
        if target.dim() != 2 or target.shape[1] != root.shape[0]:
            raise ShapeError(
                f"features of targets have shape {tuple(target.shape)}: give (n, {root.shape[0]})."
            )
        return target @ root if self.bias is None else torch.addmm(self.bias, target, root)


class FastRGCNConv(RGCNConv):
    """``RGCNConv`` under the other name that it has in PyG, which has no maxima and minima.

    With ids it differs from PyG's, which takes the weights of a source by its place in ``x``, not
    by its id there: results agree where ``x`` is None or ids stand in their order.

    Parameters
    ----------
    in_channels, out_channels, num_relations, num_bases, num_blocks, root_weight, is_sorted, bias
        As for ``RGCNConv``.
    aggr : "mean", "add" or "sum"
    flow, node_dim, decomposed_layers, aggr_kwargs
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``RGCNConv``.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean")
