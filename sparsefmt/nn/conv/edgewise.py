"""Messages that both ends of an edge make: FAConv, ResGatedGraphConv and EdgeConv."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sigmoid
from torch.nn.functional import dropout as dropped

from ...autograd import edge_combine, message_aggregate, spmm
from ...autograd.messages import combined
from ...autograd.tensors.prepare import GraphLike
from ...autograd.tensors.tensors import GraphTensors
from ...errors import DtypeError, ShapeError
from .._attention import in_form_of
from .._inputs import (
    Ends,
    as_autocast,
    check_counts,
    check_flags,
    check_in_channels,
    check_like,
    check_number,
    check_share,
    in_pair,
    refuse_static,
)
from .._loops import entries_as_columns, over_vertices
from .._maps import called, draw_map, linear_map, mapped, set_to_zero
from .._passing import Direction, Passing, PassingOptions, plus
from ..gin import check_fit, check_network, reset_network
from .propagation import Normalised, check_first, entries_of
from .sums import needed

SIGMOID = Sigmoid()  #: PyG's default.


def at_entries(tensors: GraphTensors, x: Tensor, *, sources: bool) -> Tensor:
    """Return features of each entry's source or target, (..., nnz, feat), in the user's order."""
    rows = partial(combined, tensors, sources, right=None, op="left")
    return over_vertices(lambda h: rows(left=h), as_autocast(x))


def reduced(tensors: GraphTensors, messages: Tensor, reduction: str) -> Tensor:
    """Reduce messages, (nnz, feat), over the entries of each row: (n_rows, feat)."""
    if reduction in ("sum", "mean"):
        return message_aggregate(tensors, None, messages, message="copy_edge", reduce=reduction)
    return spmm(entries_as_columns(tensors), messages, reduce=reduction)


class FAConv(Normalised):
    """Frequency adaptive convolution: ``y[i] = sum_e p[e] tanh(<a_r, x[i]> + <a_l, x[j]>) x[j]``.

    To it ``eps x_0[i]`` is added.  ``p`` are the values of ``D^-1/2 (A + I) D^-1/2``, that of
    ``GCNConv``, or ``edge_weight`` without ``normalize``; ``e = (i, j)`` are its entries.

    Parameters
    ----------
    channels, eps, dropout, cached, add_self_loops, normalize
        As in PyG: -1 for as many channels as the first ``x`` has; ``dropout`` is that of the factor
        ``tanh`` in training.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    FAGCN (AAAI'21, arXiv 2101.00797), equations 4 and 5.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("eps",)
    #: PyG's layer holds its factors here while it runs; this one has no such state.
    _alpha: None = None

    def __init__(
        self,
        channels: int,
        eps: float = 0.1,
        dropout: float = 0.0,
        cached: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_in_channels(channels, "channels")
        check_number("eps", eps)
        check_share("dropout", dropout)
        super().__init__(**options)
        self.channels, self.eps, self.dropout = channels, eps, dropout
        self.att_l = linear_map(channels, 1, bias=False)
        self.att_r = linear_map(channels, 1, bias=False)
        self._set_loops(cached, add_self_loops, normalize)

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.Linear`` does, and forget the cached graph."""
        draw_map(self.att_l)
        draw_map(self.att_r)
        super().reset_parameters()

    def forward(
        self,
        x: Tensor,
        x_0: Tensor,
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Map (n, channels) to (n, channels).

        Parameters
        ----------
        x, x_0 : Tensor, shape (n, channels)
            Features, and those of the first layer.
        edge_index
            As for ``GCNConv``.
        edge_weight : Tensor, shape (nnz,), optional
            ``p`` in the order of the edges, for a layer without ``normalize`` alone.
        return_attention_weights : bool, optional
            If it is given, the result is ``(y, (edge_index, alpha))`` as in PyG: the edges with the
            loops that are added, and the factor ``tanh`` of each, (nnz,), before dropout.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``GCNConv``; ShapeError also if there are edge weights beside ``normalize``, or none
            without.
        """
        refuse_static(x, self)
        norm = self._norm_of(x, edge_index, edge_weight)
        check_first(x_0, x)
        graph, weight = entries_of(norm)
        has_weight = edge_weight is not None
        missing = not has_weight and norm.tensors.csr_values is None
        if has_weight if self.normalize else missing:
            raise ShapeError(
                f"edge_weight is {'given' if self.normalize else 'None'} and normalize is "
                f"{self.normalize}: the layer computes its weights, or takes yours; change one."
            )
        left, right = mapped(self.att_l, x, "x"), mapped(self.att_r, x, "x")
        alpha = edge_combine(graph, right, left)[:, 0].tanh()
        share = dropped(alpha, self.dropout, self.training)
        y = spmm(graph, x, share * weight.to(alpha.dtype), reduce=self._reductions[0])
        y = y + (self.eps * x_0).to(y.dtype) if self.eps else y
        if return_attention_weights is None:
            return y
        looped = self.normalize and self.add_self_loops
        return y, in_form_of(edge_index, self._turned(graph, None), alpha, None, looped=looped)


class ResGatedGraphConv(Passing):
    """Gated convolution: ``y[i] = sum_e act(k[i] + q[j]) v[j] + x[i] W_skip + b``.

    ``k = x W_key + b_key``, and so queries ``q`` and values ``v``; ``e = (i, j)`` are the entries
    of row ``i``.  With ``edge_dim`` the three maps read ``[x, edge_attr[e]]``.

    Parameters
    ----------
    in_channels, out_channels, act, edge_dim, root_weight, bias
        As in PyG: -1 for as many features as the first ``x`` has, but not beside ``edge_dim``.
    aggr : "add", "sum", "mean", "max" or "min"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``SAGEConv``.

    Notes
    -----
    Gates are numbers of the size of the edges; messages are not made but for ``edge_dim``, maxima
    and minima.  Bresson and Laurent (arXiv 1711.07553), equation 11.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean", "max", "min")

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        act: Callable[[Tensor], Tensor] = SIGMOID,
        edge_dim: int | None = None,
        root_weight: bool = True,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        of_sources, of_targets = in_pair(in_channels)
        check_counts(
            out_channels=out_channels, **({} if edge_dim is None else {"edge_dim": edge_dim})
        )
        check_flags(root_weight=root_weight, bias=bias)
        super().__init__(**options)
        if not callable(act):
            raise DtypeError(f"act is {act!r}: give a function, torch.nn.Sigmoid() for instance.")
        if edge_dim is not None and -1 in (of_sources, of_targets):
            raise ShapeError(
                f"in_channels is {in_channels!r} beside edge_dim={edge_dim}: maps of both are made "
                "at once; give the number of features."
            )
        self.in_channels, self.out_channels, self.act = in_channels, out_channels, act
        self.edge_dim, self.root_weight, more = edge_dim, root_weight, edge_dim or 0
        self.lin_key = linear_map(of_targets + more, out_channels)
        self.lin_query = linear_map(of_sources + more, out_channels)
        self.lin_value = linear_map(of_sources + more, out_channels)
        self.lin_skip = linear_map(of_targets, out_channels, bias=False) if root_weight else None
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the maps as ``torch.nn.Linear`` does, and set the bias to 0."""
        for layer in (self.lin_key, self.lin_query, self.lin_value, self.lin_skip):
            draw_map(layer)
        set_to_zero(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphLike,
        edge_attr: Tensor | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x, edge_index
            As for ``SAGEConv``, but that ``x_target`` is needed.  Only the structure is read.
        edge_attr : Tensor, shape (nnz, edge_dim)
            In the order of the edges, for a layer with ``edge_dim`` alone.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``SAGEConv``; also if features of edges do not fit ``edge_dim``.
        """
        ends = self._between(x, edge_index).gathered()
        target, name = needed(ends), "x" if ends.alike else "x[1]"
        check_features(edge_attr, ends, self.edge_dim)
        y = in_turn(partial(self._gated, ends, edge_attr), ends.source, target)
        if self.lin_skip is not None:
            y = y + mapped(self.lin_skip, target, name)
        return plus(y, self.bias)

    def _gated(
        self, ends: Ends, edge_attr: Tensor | None, source: Tensor, target: Tensor
    ) -> Tensor:
        """Reduce the gated values of sources."""
        tensors, (reduction,) = ends.tensors, self._reductions
        if edge_attr is not None:  # maps read both
            source, target = (
                torch.cat([at_entries(tensors, end, sources=of), as_autocast(edge_attr)], 1)
                for end, of in ((source, True), (target, False))
            )
        names = ("x", "x") if ends.alike else ("x[1]", "x[0]")
        key = mapped(self.lin_key, target, names[0])
        query, value = (mapped(lin, source, names[1]) for lin in (self.lin_query, self.lin_value))
        gate = key + query if edge_attr is not None else edge_combine(tensors, key, query)
        gate = self.act(gate)
        if edge_attr is None and reduction in ("sum", "mean"):
            return message_aggregate(tensors, value, gate, reduce=reduction)
        value = value if edge_attr is not None else at_entries(tensors, value, sources=True)
        return reduced(tensors, gate * value, reduction)


def in_turn(step: Callable[..., Tensor], *x: Tensor) -> Tensor:
    """Run a step with features (n, feat), or with each of (batch, n, feat) after the other."""
    if x[0].dim() == 2:
        return step(*x)
    return torch.stack([in_turn(step, *parts) for parts in zip(*x, strict=True)])


def check_features(edge_attr: Any, ends: Ends, width: int | None) -> None:
    """Check features of edges, (nnz, width), for a layer that needs them, or takes none."""
    if width is None and edge_attr is None:
        return
    if not isinstance(edge_attr, Tensor | None):
        raise DtypeError(f"edge_attr is a {type(edge_attr).__name__}: give a torch.Tensor.")
    shape = None if edge_attr is None else tuple(edge_attr.shape)
    if edge_attr is None or width is None or shape != (ends.tensors.nnz, width):
        raise ShapeError(
            f"edge_attr has shape {shape} but the layer has edge_dim={width} and the graph "
            f"{ends.tensors.nnz} entries: give (nnz, edge_dim), or leave both out."
        )
    check_like("edge_attr", edge_attr, ends.source)


class EdgeConv(Passing):
    """Edge convolution: ``y[i] = max_e nn([x[i], x[j] - x[i]])`` over the entries of row ``i``.

    Parameters
    ----------
    nn : Module
        Maps twice the features of a vertex, for each entry.
    aggr : "max", "min", "mean", "add" or "sum"
        What takes the place of the maximum.
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GINConv``.

    Notes
    -----
    Features of both ends of each edge are made for ``nn``.  DGCNN (TOG'19, arXiv 1801.07829),
    equations 7 and 8.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean", "max", "min")
    _shown: ClassVar[tuple[str, ...]] = ("nn",)

    def __init__(self, nn: Module, aggr: Any = "max", **options: Unpack[Direction]) -> None:
        super().__init__(aggr, **options)
        check_network(nn)
        self.nn = nn
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset ``nn``, or its parts that can be."""
        reset_network(self.nn)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: GraphLike) -> Tensor:
        """Map (n, feat) to the features that ``nn`` returns.

        Both ends have one width, and ``x_target`` is needed; else arguments and errors are those of
        ``GINConv``.  Only the structure of a graph is read.
        """
        ends = self._between(x, edge_index).gathered()
        tensors, source, target = ends.tensors, ends.source, needed(ends)
        if source.shape[-1] != target.shape[-1]:
            raise ShapeError(
                f"x[1] has {target.shape[-1]} features but x[0] has {source.shape[-1]}: their "
                "difference is read, give them one width."
            )
        check_like("x[1]", target, source)
        check_fit(self.nn, source, 2)
        x_i = at_entries(tensors, target, sources=False)
        x_j = at_entries(tensors, source, sources=True)
        messages = called(self.nn, torch.cat([x_i, x_j - x_i], -1))
        return over_vertices(lambda h: reduced(tensors, h, self._reductions[0]), messages)
