"""GIN's convolution, with MaxK or over a sample of each row, and GINE's, with features of edges."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sequential
from torch.nn.functional import linear

from ..autograd import aggregate_with_own, maxk_aggregate, message_aggregate, spmm
from ..autograd.engine import checks
from ..autograd.matmul import csr_operands
from ..autograd.own_parts import with_own
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.tensors import GraphTensors
from ..errors import DtypeError, ShapeError
from ..model.maps import calls_forward_alone, maps_first, read_map
from ._inputs import (
    Ends,
    as_autocast,
    check_counts,
    check_edge_weight,
    check_flags,
    check_in_channels,
    check_like,
    check_number,
)
from ._loops import over_vertices
from ._maps import called, draw_map, linear_map, mapped
from ._passing import SUM, Convolution, Options, Passing, PassingOptions


class OfNetwork(Passing):
    """A layer that ends in a network of the user's, which gets ``1 + eps`` of each vertex too."""

    _shown = ("nn",)

    def _add_network(self, nn: Any, eps: float, train_eps: bool) -> None:
        """Keep the network, and build ``eps``."""
        check_network(nn)
        check_number("eps", eps)
        check_flags(train_eps=train_eps)
        self.nn, self.initial_eps = nn, float(eps)
        self.eps: Tensor
        if train_eps:
            self.eps = Parameter(torch.empty(1))
        else:
            self.register_buffer("eps", torch.empty(1))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; of a number for ``eps`` make the tensor that the layer reads."""
        if name == "eps" and isinstance(value, float | int):
            like = next(self.parameters(), torch.empty(0))
            value = torch.tensor([float(value)], device=like.device)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Reset ``nn``, or its parts that can be, and set ``eps`` to what was given."""
        reset_network(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def _with_own(self, y: Tensor, ends: Ends, own: Tensor | None) -> Tensor:
        """Add ``1 + eps`` of a vertex's own features to those of its neighbours."""
        if own is None:
            return y
        width = ends.source.shape[-1]
        if own.shape[-1] != width:
            raise ShapeError(
                f"x[1] has {own.shape[-1]} features but x[0] has {width}: both are added up, give "
                "them one width."
            )
        check_like("x[1]", own, ends.source)
        own = as_autocast(own)
        return torch.addcmul(y, (1 + self.eps).to(y.dtype), own)


class GINConv(OfNetwork, Convolution):
    """Graph isomorphism: ``y = nn((1 + eps) s(x) + A s(x))``.

    ``s`` is ``MaxK(k)``, or nothing without ``k``: the non-linearity of the layer before, which
    ends in a linear one.

    Parameters
    ----------
    nn : Module
        From the features of ``x`` to those of the result.  Its parameters are drawn anew, as in
        PyG: load those that are to stay afterwards.
    eps : float
    train_eps : bool
        Whether ``eps`` is a parameter, or a buffer.
    aggr : "add", "sum", "mean", "max" or "min"
        What takes the place of the sum over neighbours; other than sums not beside ``k`` or
        samples.
    k, maxk_on, dropout : optional
        As for ``GCNConv``; there are no mapped features to choose from.
    sample, training_sample, strategy
        As for ``GCNConv``; the sum is multiplied as there.
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``, if ``k``, a sample or the strategy is not as above, ``nn`` cannot be called
        or ``eps`` is no finite number; in forward also if ``nn`` cannot take features of that
        shape, dtype and device.  Errors of ``nn`` that are about something else pass as they are.

    Notes
    -----
    GIN (ICLR'19), equation 4.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean", "max", "min")
    _maxk_on_known = ("input",)

    def __init__(
        self,
        nn: Module,
        eps: float = 0.0,
        train_eps: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self._add_network(nn, eps, train_eps)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        size: tuple[int, int] | None = None,
        *,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Aggregate features, and map the sums by ``nn``; arguments are those of ``SAGEConv``.

        Features of sources and targets are of one width.  Without ``x_target`` a vertex takes no
        part in its own result.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``SAGEConv``; also if ``nn`` cannot take ``x``, or both ends are not of one width.
        """
        if size is None and edge_weight is None:
            y: Tensor | None = None if self._plan is None else self._plan(self, x, edge_index)
            if y is not None:
                return y
        ends = self._between(x, edge_index, size)
        if edge_weight is not None:
            check_edge_weight(edge_weight, ends.tensors)
        check_fit(self.nn, ends.source)
        if self._is_one_sum(ends):
            x, parts = ends.source, [*self.nn] if calls_forward_alone(self.nn, Sequential) else []
            first, *rest = parts or [self.nn]
            args = read_map(first)
            if args and maps_first(*args[0].shape[::-1], gradient=x.requires_grad):
                y = self._sum(ends.tensors, linear(x, args[0]), edge_weight, args[1])
                for module in rest:
                    y = called(module, y)
                return y
        return called(self.nn, self._aggregated(ends, edge_weight))

    def _is_one_sum(self, ends: Ends) -> bool:
        """Return True if one kernel adds up all neighbours of a vertex and its own part."""
        one_factor = self.k is None and self._reductions == SUM and self.eps.shape == (1,)
        local = ends.alike and ends.shared is None and ends.source.dim() == 2
        return one_factor and local and self._width() is None

    def _has_defaults(self) -> bool:
        """Return True if all options are unset, and ``eps`` is a constant."""
        return super()._has_defaults() and not self.eps.requires_grad and self.eps.shape == (1,)

    def _sum(
        self,
        tensors: GraphTensors,
        x: Tensor,
        edge_weight: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Add up features of neighbours, ``1 + eps`` of a vertex's own, and a bias."""
        x, values, _, _ = csr_operands(tensors, x, edge_weight)
        if self.eps.device != x.device:
            checks.own_part(self.eps, None, tensors)
        return with_own(tensors, (values, None, None, self.eps), x, bias, one_more=True)

    def _aggregated(self, ends: Ends, edge_weight: Tensor | None) -> Tensor:
        """Aggregate features of sources, and add a part of the targets' own."""
        graph, x, width = ends.graph, as_autocast(ends.source), self._width()
        self._check_no_batch(x)
        if self._is_one_sum(ends):
            return self._sum(ends.tensors, x, edge_weight)
        if ends.alike and width is None and x.dim() == 2 and self._reductions == SUM:
            factor = (1 + self.eps).to(x.dtype)  # a wider one would widen the sum
            features = x if self.k is None else self._largest(x)
            return aggregate_with_own(graph, features, factor, edge_weight)

        def reduced(h: Tensor) -> Tensor:
            if width is not None:
                return self._aggregate(graph, h, width, edge_weight, rescale=True)
            if self.k is not None:
                return maxk_aggregate(graph, self._largest(h), None, edge_weight)
            return spmm(graph, h, edge_weight, reduce=self._reductions[0])

        own = ends.target
        if own is not None and self.k is not None:
            own = self._largest(own).dense()
        return self._with_own(over_vertices(reduced, x), ends, own)


class GINEConv(OfNetwork):
    """Graph isomorphism with features of edges: ``y[i] = nn((1 + eps) x[i] + sum_e m[e])``.

    ``m[e] = relu(x[j] + w[e])`` for each edge ``e`` from ``j`` to ``i``, where ``w`` are the
    features of the edges or, with ``edge_dim``, a linear map of them.

    Parameters
    ----------
    nn, eps, train_eps
        As for ``GINConv``.
    edge_dim : int, optional
        Features of an edge, if they are to be mapped to the width of ``x``, which ``nn`` or its
        first part tells by ``in_features`` or ``in_channels``; -1 for those of the first edges.
    aggr : "add", "sum" or "mean"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GINConv``; also if ``edge_dim`` is given and ``nn`` does not tell its width.

    Notes
    -----
    Hu et al. (ICLR'20), "Strategies for Pre-training Graph Neural Networks", section 5.  Written
    with ``autograd.message_aggregate``: no tensor has a message for each edge, forward or backward.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean")

    def __init__(
        self,
        nn: Module,
        eps: float = 0.0,
        train_eps: bool = False,
        edge_dim: int | None = None,
        **options: Unpack[PassingOptions],
    ) -> None:
        super().__init__(**options)
        self._add_network(nn, eps, train_eps)
        self.lin = None
        if edge_dim is not None:
            check_in_channels(edge_dim, "edge_dim")
            self.lin = linear_map(edge_dim, _width_of(nn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset ``nn`` and ``eps`` as ``GINConv`` does, and draw the map of the edges' features."""
        super().reset_parameters()
        draw_map(self.lin)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Map (n, feat) to the features that ``nn`` returns.

        Parameters
        ----------
        x, edge_index, size
            As for ``SAGEConv``.  Only the structure of a graph is read.
        edge_attr : Tensor, shape (nnz, feat), or (nnz, edge_dim)
            ``w`` in the order of ``graph.structure``, that of the edges.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``GINConv``; also if there are no features of edges, or not as many as those of
            ``x`` and no ``edge_dim``.
        """
        ends = self._between(x, edge_index, size).gathered()
        check_fit(self.nn, ends.source)
        features = self._of_edges(edge_attr, ends)
        source, reduction = as_autocast(ends.source), self._reductions[0]

        def summed(h: Tensor) -> Tensor:
            if h.dim() > 2:  # in turn: side by side they would repeat the features of edges
                if not len(h):
                    return h.new_zeros(*h.shape[:-2], ends.tensors.n_rows, h.shape[-1])
                return torch.stack([summed(features) for features in h])
            return message_aggregate(ends.graph, h, features, message="relu_add", reduce=reduction)

        return called(self.nn, self._with_own(summed(source), ends, ends.target))

    def _of_edges(self, edge_attr: object, ends: Ends) -> Tensor:
        """Check the features of edges, and map them where there is a map."""
        if edge_attr is None:
            raise DtypeError(
                "edge_attr is None: GINEConv adds features of edges to those of their sources; "
                "give a row for each edge, or use GINConv."
            )
        if not isinstance(edge_attr, Tensor):
            raise DtypeError(f"edge_attr is a {type(edge_attr).__name__}: give a torch.Tensor.")
        nnz = ends.tensors.nnz
        if edge_attr.dim() != 2 or edge_attr.shape[0] != nnz:
            mend = ", edge_attr[:, None] for instance" * (edge_attr.dim() == 1)
            raise ShapeError(
                f"edge_attr has shape {tuple(edge_attr.shape)} but the graph stores {nnz} entries: "
                f"give a row for each edge{mend}."
            )
        if self.lin is not None:
            return mapped(self.lin, edge_attr, "edge_attr")
        width = ends.source.shape[-1]
        if edge_attr.shape[1] != width:
            name = "x" if ends.alike else "x[0]"
            raise ShapeError(
                f"edge_attr has {edge_attr.shape[1]} features but {name} has {width}: give both "
                f"the same, or the layer edge_dim={edge_attr.shape[1]}, which maps them."
            )
        check_like("edge_attr", edge_attr, ends.source)
        return as_autocast(edge_attr)


def _width_of(nn: Any) -> int:
    """Return the number of features that a network takes, as its first part tells."""
    first = nn[0] if isinstance(nn, Sequential) and len(nn) else nn
    width = getattr(first, "in_features", getattr(first, "in_channels", None))
    if width is None:
        raise ShapeError(
            f"edge_dim is given but nn begins with a {type(first).__name__}, which does not tell "
            "how many features it takes: begin with a linear map, or map edge_attr yourself."
        )
    check_counts(**{"nn's in_features": width})
    return int(width)


def check_fit(nn: Module, x: Tensor, times: int = 1) -> None:
    """Check that ``nn`` can take features like ``x``, where a linear map comes first.

    It takes ``times`` of them side by side.
    """
    while calls_forward_alone(nn, Sequential) and len(nn):  # type: ignore[arg-type]
        nn = nn[0]  # type: ignore[index]
    args = read_map(nn)
    if args is not None:
        width = args[0].shape[1]
        if x.shape[-1] * times != width:
            raise ShapeError(
                f"x has {x.shape[-1]} features but nn takes {width}: give (n, {width // times})."
            )
        check_like("x", x, args[0])


def check_network(nn: Any) -> None:
    """Check for a module or another function, not a class."""
    if isinstance(nn, type):
        raise DtypeError(
            f"nn is the class {nn.__name__}: give a module, {nn.__name__}(...) for instance."
        )
    if not callable(nn):
        raise DtypeError(f"nn is {nn!r}: give a module, torch.nn.Linear(n, m) for instance.")


def reset_network(module: Module) -> None:
    """Reset the module itself if it can, else its children, as PyG does."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
        return
    for child in module.children() if isinstance(module, Module) else ():
        reset_network(child)
