"""Filters of a graph's spectrum, and Cluster-GCN's sums: ChebConv, ARMAConv, ClusterGCNConv."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Unpack, cast

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList, Parameter, ReLU
from torch.nn.functional import dropout as dropped

from ...autograd import sddmm, spmm
from ...autograd.matmul import multiply
from ...autograd.own_parts import with_own
from ...autograd.tensors.order import in_csr_order
from ...autograd.tensors.prepare import GraphLike
from ...errors import ShapeError, UnsupportedError
from .._inputs import (
    as_autocast,
    check_counts,
    check_flags,
    check_in_channels,
    check_number,
    check_share,
    refuse_pair,
)
from .._loops import loops, over_vertices, rows_and_columns
from .._maps import (
    GLOROT,
    called,
    check_map,
    draw_glorot,
    draw_map,
    linear_map,
    mapped,
    set_to_zero,
)
from .._passing import FORWARD, SUM, Passing, PassingOptions, plus
from ..sg import Norm, Stepping
from .propagation import check_fits, entries_of

RELU = ReLU()  #: PyG's default.


class ChebConv(Stepping):
    """Chebyshev filters: ``y = sum_k Z_k W_k + b``, where ``Z_k = 2 L Z_{k-1} - Z_{k-2}``.

    ``Z_0 = x``, ``Z_1 = L x`` and ``k`` runs from 0 to ``K - 1``.  ``L = 2 / lambda_max M - I``,
    where ``M`` is ``I - D^-1/2 A D^-1/2`` for "sym", ``I - A D^-1`` for "rw" and ``D - A`` without
    normalization; loops do not count, and ``D`` is the diagonal of the sums over the entries that
    leave a vertex.

    Parameters
    ----------
    in_channels, out_channels, K, normalization, bias
        As in PyG; ``K`` is 1 or more.
    aggr : "add" or "sum"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``; also if there is no such normalization.

    Notes
    -----
    Values of ``L`` that depend on the graph alone are kept with it.  Where a sum is 0, or
    negative in "sym", its power is 0.  Defferrard et al. (NIPS'16, arXiv 1606.09375), equation 4.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = SUM
    _shown = ("K", "normalization")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        K: int,
        normalization: str | None = "sym",
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_in_channels(in_channels)
        check_counts(out_channels=out_channels, K=K)
        check_flags(bias=bias)
        super().__init__(**options)
        if normalization not in (None, "sym", "rw"):
            raise UnsupportedError(f"normalization is {normalization!r}: give 'sym', 'rw' or None.")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.normalization = normalization
        self.lins = ModuleList(
            linear_map(in_channels, out_channels, bias=False, draw=GLOROT) for _ in range(K)
        )
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    @property
    def K(self) -> int:
        """Return the number of filters."""
        return len(self.lins)

    def reset_parameters(self) -> None:
        """Draw Glorot's uniform weights, and set the bias to 0."""
        for layer in self.lins:
            draw_map(cast(Linear, layer), GLOROT)
        set_to_zero(self.bias)

    def forward(
        self,
        x: Tensor,
        edge_index: GraphLike,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        lambda_max: float | Tensor | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x, edge_index, edge_weight
            As for ``GCNConv``; ``x`` may not be sparse.
        batch : Tensor, shape (n,), optional
            The graph of each vertex, beside a ``lambda_max`` for each graph.
        lambda_max : float or Tensor, optional
            The largest eigenvalue of ``M``; by default twice its largest value.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``GCNConv``.
        """
        norm = self._norm(x, edge_index, edge_weight, None)
        make = partial(self._laplacian, norm, batch, lambda_max)
        if norm.edge_weight is None and lambda_max is None:
            key = "laplacian", self.normalization, norm.dtype, self.flow
            made = norm.tensors.cached(key, lambda: torch.cat(make()))
            weight, own = made.split_with_sizes([norm.tensors.nnz, norm.tensors.n_rows])
        else:
            weight, own = make()

        def step(h: Tensor) -> Tensor:
            return (
                over_vertices(partial(spmm, norm.graph, edge_weight=weight), h) + own[:, None] * h
            )

        for layer in self.lins:
            check_map(layer, x, "x")
        first, *rest = self.lins
        y, before, z = called(first, x, "x"), x, x
        for k, layer in enumerate(rest):
            before, z = z, step(z) if k == 0 else 2 * step(z) - before
            y = y + called(layer, z, "x")
        return plus(y, self.bias)

    def _laplacian(
        self, norm: Norm, batch: Tensor | None, lambda_max: float | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute the values of ``L``: at entries, (nnz,) as the user has them, and diagonal."""
        tensors, forward = norm.tensors, self.flow == FORWARD
        weight = entries_of(norm)[1].to(torch.promote_types(norm.dtype, torch.float32))
        row, col = rows_and_columns(tensors)
        weight = weight.masked_fill(row == col, 0)
        own = ones = weight.new_ones(tensors.n_rows, 1)

        def products_of_ends(leaving: Tensor, reached: Tensor) -> Tensor:
            return sddmm(tensors, *((reached, leaving) if forward else (leaving, reached)))

        values = in_csr_order(tensors, weight)
        degree = multiply(tensors, forward, ones, values, None, None)
        if self.normalization is None:
            own = degree
        else:
            symmetric = self.normalization == "sym"
            none = degree <= 0 if symmetric else degree == 0
            power = degree.masked_fill(none, inf).pow(-0.5 if symmetric else -1)
            weight = weight * products_of_ends(power, power if symmetric else ones)
        if lambda_max is None:
            largest = torch.cat([-weight, own[:, 0]])
            lambda_max = 2 * (largest.max() if len(largest) else 1)
        factor = 2 / torch.as_tensor(lambda_max, dtype=weight.dtype, device=weight.device)
        if factor.numel() > 1:
            self._check_batch(batch, tensors.n_rows)
            factor = factor[batch][:, None]
            weight = weight * products_of_ends(factor, ones)
        else:
            weight = weight * factor
        weight, own = (v.masked_fill(v.abs() == inf, 0) for v in (-weight, (own * factor)[:, 0]))
        return weight.to(norm.dtype), (own - 1).to(norm.dtype)

    @staticmethod
    def _check_batch(batch: object, n: int) -> None:
        """Check for the graph of each vertex."""
        if not isinstance(batch, Tensor) or batch.shape != (n,) or batch.is_floating_point():
            raise ShapeError(
                f"lambda_max has a number for each graph: give batch, integers of shape ({n},), "
                "or one number."
            )


class ARMAConv(Stepping):
    """ARMA filters: ``y = mean_k h_k``, where ``h <- act(P h W + x V + b)`` in each stack ``k``.

    ``P = D^-1/2 A D^-1/2``, of the diagonal ``D`` of the rows' sums of ``A``; ``h`` is ``x`` at
    first, and there are ``num_layers`` steps.

    Parameters
    ----------
    in_channels, out_channels, num_stacks, num_layers, shared_weights, act, dropout, bias
        As in PyG, but not -1 channels; ``dropout`` is of ``x`` before ``V``, in training.
    aggr, flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    Bianchi et al. (TPAMI'21, arXiv 1901.01343), equation 11.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("num_stacks", "num_layers")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_stacks: int = 1,
        num_layers: int = 1,
        shared_weights: bool = False,
        act: Callable[[Tensor], Tensor] | None = RELU,
        dropout: float = 0.0,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        counts = {"in_channels": in_channels, "out_channels": out_channels}
        check_counts(**counts, num_stacks=num_stacks, num_layers=num_layers)
        check_flags(shared_weights=shared_weights, bias=bias)
        check_share("dropout", dropout)
        super().__init__(**options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.num_stacks, self.num_layers, self.act = num_stacks, num_layers, act
        self.shared_weights, self.dropout = shared_weights, dropout
        layers = 1 if shared_weights else num_layers
        shape = num_stacks, in_channels, out_channels
        inner = num_stacks, out_channels, out_channels
        self.weight = Parameter(torch.empty(max(1, layers - 1), *inner))
        self.init_weight = Parameter(torch.empty(shape))
        self.root_weight = Parameter(torch.empty(layers, *shape))
        self.bias = Parameter(torch.empty(layers, num_stacks, 1, out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot's uniform weights, and set the bias to 0."""
        for weight in (self.weight, self.init_weight, self.root_weight):
            draw_glorot(weight)
        set_to_zero(self.bias)

    def forward(
        self, x: Tensor, edge_index: GraphLike, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels); arguments and errors are ``APPNP``'s."""
        step = self._step(self._norm(x, edge_index, edge_weight, 0.0))
        check_fits("x", x, self.in_channels, self.init_weight)
        h = x = x.unsqueeze(-3)
        for t in range(self.num_layers):
            of_layer = 0 if self.shared_weights else t
            h = step(h @ (self.weight[max(of_layer - 1, 0)] if t else self.init_weight))
            h = h + dropped(x, self.dropout, self.training) @ self.root_weight[of_layer]
            h = plus(h, None if self.bias is None else self.bias[of_layer])
            h = h if self.act is None else self.act(h)
        return h.mean(-3)


class ClusterGCNConv(Passing):
    """Cluster-GCN: ``y = (P + diag_lambda diag(P)) x W_out + b + x W_root``.

    ``P = D^-1 (A + I)``, where the loops of ``A`` do not count, and ``D`` has the entries of each
    row of ``A + I``.  Without ``add_self_loops`` it is ``P = D^-1 A``, loops included.

    Parameters
    ----------
    in_channels, out_channels, diag_lambda, add_self_loops, bias
        As in PyG.
    aggr : "add" or "sum"
    flow, node_dim, decomposed_layers, aggr_kwargs : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``.

    Notes
    -----
    Values of ``P`` are kept with the graph, in the dtype of ``x``; PyG's are float32.  Cluster-GCN
    (KDD'19, arXiv 1905.07953), equation 11.
    """

    __module__ = "sparsefmt.nn"
    _shown = ("diag_lambda",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        diag_lambda: float = 0.0,
        add_self_loops: bool = True,
        bias: bool = True,
        **options: Unpack[PassingOptions],
    ) -> None:
        check_in_channels(in_channels)
        check_counts(out_channels=out_channels)
        check_number("diag_lambda", diag_lambda)
        check_flags(add_self_loops=add_self_loops, bias=bias)
        super().__init__(**options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.diag_lambda, self.add_self_loops = diag_lambda, add_self_loops
        self.lin_out = linear_map(in_channels, out_channels, bias=bias, draw=GLOROT)
        self.lin_root = linear_map(in_channels, out_channels, bias=False, draw=GLOROT)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as PyG does."""
        draw_map(self.lin_out, GLOROT)
        draw_map(self.lin_root, GLOROT)

    def forward(self, x: Tensor, edge_index: GraphLike) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Only the structure of a graph is read; else arguments and errors are those of ``APPNP``.
        """
        refuse_pair(x)
        ends = self._between(x, edge_index).gathered()
        tensors, h = ends.tensors, as_autocast(ends.source)

        def make() -> Tensor:
            (row, col), (loop, count) = rows_and_columns(tensors), loops(tensors)
            side, end = (tensors.rows, row) if self.flow == FORWARD else (tensors.columns, col)
            degree = side.indptr.diff() + (1 - count if self.add_self_loops else 0)
            share = degree.double().clamp(min=1).reciprocal()
            values, own = share[end], (1 + self.diag_lambda - count) * share
            if not self.add_self_loops:
                values, own = values * (1 + self.diag_lambda * loop), torch.zeros_like(own)
            return torch.cat([in_csr_order(tensors, values), own]).to(h.dtype)

        key = "shares of entries", self.diag_lambda, self.add_self_loops, self.flow, h.dtype
        values, own = tensors.cached(key, make).split_with_sizes([tensors.nnz, tensors.n_rows])
        target = None if ends.shared is None else as_autocast(x)
        product = partial(with_own, tensors, (values, None, None, own), own=target)
        y = mapped(self.lin_out, over_vertices(product, h), "x")
        return y + mapped(self.lin_root, x, "x")
