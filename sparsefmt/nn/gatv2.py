"""GATv2: attention by a learned vector behind a non-linearity, in one pass over the edges."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ..autograd import edge_combine, gatv2_aggregate
from ..autograd.tensors.prepare import GraphLike
from ..errors import DtypeError
from ._attention import Entries, LoopedAttention, check_edge_features
from ._inputs import check_flags, in_pair
from ._maps import GLOROT, linear_map
from ._passing import PassingOptions


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
        shared = heads, concat, negative_slope, dropout, add_self_loops, edge_dim, fill_value
        check_flags(bias=bias, share_weights=share_weights)
        super().__init__(in_channels, out_channels, *shared, **passing)
        self.share_weights = share_weights
        of_sources, of_targets = in_pair(in_channels)
        options: dict[str, Any] = {"bias": bias, "draw": GLOROT}
        self.lin_l = linear_map(of_sources, heads * out_channels, **options)
        self.lin_r = self.lin_l
        if not share_weights:
            self.lin_r = linear_map(of_targets, heads * out_channels, **options)
        self.att = self._vectors()
        self._add_edges_and_own(edge_dim, residual, bias)
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
        ends = self._ends(x, edge_index, size)
        graph, target = ends.graph, ends.target
        if target is None:
            raise DtypeError("x[1] is None: scores are of both ends, give features of targets.")
        residual, (left,) = self._residual(ends), self._of_sources(ends, self.lin_l)
        if ends.alike and self.share_weights:
            right = ends.of_targets(left)
        else:
            right = self._mapped(self.lin_r, target, "x" if ends.alike else "x[1]")
        features = check_edge_features(edge_attr, graph, self.lin_edge)
        attention = None
        if features is not None or return_attention_weights:
            entries = self._entries(graph, features)
            attention = self._attention(entries, self._entry_scores(entries, left, right))
        if attention is not None and (features is not None or self._drops()):
            y = attention.sums(left)
        else:
            options = self._options()
            if self.add_self_loops and len(left) != len(right):
                graph, options["self_loops"] = self._entries(graph, None).graph, False
            y = gatv2_aggregate(graph, left, right, self.att, **options)
        y = self._biased(y) if residual is None else self._biased(y) + residual
        if attention is None or not return_attention_weights:
            return y
        return self._with_weights(y, edge_index, attention)

    def _entry_scores(self, entries: Entries, left: Tensor, right: Tensor) -> Tensor:
        """Compute the scores of all entries, (nnz, heads), in float32 at least."""
        dtype = torch.promote_types(left.dtype, torch.float32)
        edges = None
        if entries.features is not None:
            assert self.lin_edge is not None  # the features have been checked beside it
            edges = self._mapped(self.lin_edge, entries.features, "edge_attr").to(dtype)
        with torch.autocast(left.device.type, enabled=False):
            both = right.flatten(1).to(dtype), left.flatten(1).to(dtype)
            sums = edge_combine(entries.graph, *both).view(-1, self.heads, self.out_channels)
            sums = leaky_relu(sums if edges is None else sums.add_(edges), self.negative_slope)
            return torch.einsum("ekf,kf->ek", sums, self.att[0].to(dtype))
