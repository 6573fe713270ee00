"""MaxK, and convolutions with it or over a sample of each row: GCN, GraphSAGE, GIN.

Parameters have the names and shapes of PyG's layers of the same name, so that a ``state_dict``
loads across, and without ``k`` and samples results agree with theirs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, init
from torch.nn.functional import linear

from ..autograd.functions import (
    aggregate_with_own,
    features_to_keep,
    maxk,
    maxk_aggregate,
    operands,
    propagate,
    spmm,
)
from ..autograd.sampling import checked_strategy, sample_width, sampled_aggregate
from ..autograd.structure import GraphLike
from ..errors import UnsupportedError
from ._checks import check_counts, check_input, check_square
from ._loops import stored, symmetric


class _Balanced(Module):
    """A module that keeps ``k`` features of each row, or all of them where it is None."""

    def __init__(self, k: int | None, feat: int | None = None) -> None:
        super().__init__()
        self.k = None if k is None else features_to_keep(k, feat)

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        return f"k={self.k}"


class _Convolution(_Balanced):
    """A layer that goes over a sample of each row where ``_width()`` tells how many entries."""

    def __init__(
        self,
        k: int | None,
        sample: int | None,
        training_sample: int | None,
        strategy: str,
        feat: int | None = None,
    ) -> None:
        super().__init__(k, feat)
        self.sample = _checked_width("sample", sample, self.k)
        self.training_sample = _checked_width("training_sample", training_sample, self.k)
        self.strategy = checked_strategy(strategy)

    def extra_repr(self) -> str:
        """What the ``repr`` shows."""
        widths = {"sample": self.sample, "training_sample": self.training_sample}
        given = [f"{name}={width}" for name, width in widths.items() if width is not None]
        if self.sample is not None:
            given.append(f"strategy={self.strategy!r}")
        return ", ".join([super().extra_repr(), *given])

    def _width(self) -> int | None:
        if self.training:
            return _checked_width("training_sample", self.training_sample, self.k)
        return _checked_width("sample", self.sample, self.k)

    def _aggregate(
        self,
        graph: GraphLike,
        x: Tensor,
        width: int,
        edge_weight: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Of a sample, drawn anew at each call while it trains."""
        strategy = "random" if self.training else self.strategy
        return sampled_aggregate(graph, x, width, edge_weight, strategy=strategy, **options)


def _checked_width(name: str, width: int | None, k: int | None) -> int | None:
    if width is None:
        return None
    found = sample_width(name, width)
    if k is not None:
        raise UnsupportedError(
            f"{name} is {found} and k is {k}: no kernel samples rows of what MaxK keeps, use one "
            "of them."
        )
    return found


class MaxK(_Balanced):
    """Keep the ``k`` largest features of each row: a non-linearity, in the place of ReLU.

    ``y[i, f] = x[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere: ``autograd.maxk``.
    Before an aggregation use the layer's own ``k``, which spares the dense result.

    Parameters
    ----------
    k : int
        Between 1 and the number of features, which is known when it is called.

    Raises
    ------
    DtypeError, ShapeError
        If ``k`` is no integer, or less than 1.

    Notes
    -----
    MaxK-GNN (ASPLOS'24), section 3.1.
    """

    k: int

    def __init__(self, k: int) -> None:
        super().__init__(features_to_keep(k))

    def forward(self, x: Tensor) -> Tensor:
        """(n, feat) to (n, feat)."""
        return maxk(x, self.k)


class GCNConv(_Convolution):
    """Graph convolution: ``y = D^-1/2 (A + I) D^-1/2 s(x W) + b``.

    ``s`` is ``MaxK(k)``, or nothing without ``k``.  ``D`` is the diagonal of the rows' sums of
    ``A + I``; ``I`` adds a loop to the vertices that have none.

    Parameters
    ----------
    in_channels, out_channels : int
    bias : bool
    k : int, optional
        Features of ``x W`` to keep, between 1 and ``out_channels``.
    sample : int, optional
        Entries of each row that the layer goes over in evaluation; all of them by default.  The sum
        over the neighbours is multiplied by the entries of the row over the sampled ones; ``D``
        and the loops that are added stay those of the whole graph.  Not with ``k``.
    training_sample : int, optional
        As ``sample``, while it trains: other entries at each call, which the strategy "random" of
        ``autograd.sampled_aggregate`` draws.
    strategy : "bucket", "fastrand" or "random"
        Which entries ``sample`` means, as in ``autograd.sampled_aggregate``.

    Attributes
    ----------
    lin.weight : (out_channels, in_channels)
        ``W`` transposed.
    bias : (out_channels,)

    Raises
    ------
    DtypeError, ShapeError
        If a number is no integer, or out of its range.
    UnsupportedError
        If there is no such strategy, or a sample is asked for beside ``k``.

    Notes
    -----
    Several loops of one vertex count each; PyG keeps the last.  The factors of a graph's own values
    are kept with the graph; those of ``edge_weight`` are computed at each call and have gradients,
    as in code that ``torch.compile`` has compiled.  GCN (ICLR'17), equation 2; MaxK-GNN
    (ASPLOS'24), section 3.1; ES-SpMM (arXiv 2104.10716); DropEdge (ICLR'20).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = True,
        k: int | None = None,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels)
        super().__init__(k, sample, training_sample, strategy, out_channels)
        self.lin = Linear(in_channels, out_channels, bias=False)
        self.bias = Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform weights, no bias."""
        init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels)
        graph : Graph, shape (n, n)
        edge_weight : Tensor, shape (nnz,), optional
            In CSR order; by default the graph's own values, or 1.

        Raises
        ------
        ShapeError, DtypeError, DeviceError
            As ``autograd.spmm`` and ``maxk_aggregate``; and if the graph is not square.
        """
        check_input(x, graph, self.lin.weight)
        h = self.lin(x)
        h, values, _, _ = operands(graph, h, edge_weight)  # named as they were given, if refused
        scale, loop = symmetric(graph, edge_weight, h.dtype)
        width = self._width()
        if width is not None:
            return self._of_sample(graph, h, width, edge_weight, scale, loop[:, None])
        # Traced, a Function that writes in place loses its gradients (torch 2.11).
        if self.k is None and edge_weight is None and not torch.compiler.is_compiling():
            without = stored(graph, h.dtype)
            return propagate(graph, h, scale, loop[:, None], without=without, bias=self.bias)
        weight, own = None if edge_weight is None else values, loop[:, None]
        scales = {"row_scale": scale, "col_scale": scale}
        y = aggregate_with_own(graph, h, self.k, weight, own, without=own == 0, **scales)
        return _plus(y, self.bias)

    def _of_sample(
        self,
        graph: GraphLike,
        h: Tensor,
        width: int,
        edge_weight: Tensor | None,
        scale: Tensor,
        own: Tensor,
    ) -> Tensor:
        factors = {"rescale": True, "row_scale": scale, "col_scale": scale}
        y = self._aggregate(graph, h, width, edge_weight, **factors)
        kept = edge_weight is None and not torch.compiler.is_compiling()
        without = stored(graph, h.dtype) if kept else own == 0
        part = h if without is None else h.masked_fill(without, 0)
        return _plus(torch.addcmul(y, own, part), self.bias)


class SAGEConv(_Convolution):
    """GraphSAGE with means: ``y = mean_j(x[j]) W_l + b + x W_r`` over the in-neighbours ``j``.

    With ``k`` the non-linearity stands between the neighbours' weights and the aggregation:
    ``y = mean_j(MaxK(x W_l, k)[j]) + b + x W_r``.  With ``k = out_channels`` that is the layer
    without it, since the mean and ``W_l`` commute.

    Parameters
    ----------
    in_channels, out_channels : int
    bias : bool
    k : int, optional
        Features of ``x W_l`` to keep, between 1 and ``out_channels``.
    sample, training_sample, strategy
        As for ``GCNConv``; the mean is that of the sample.

    Attributes
    ----------
    lin_l.weight, lin_r.weight : (out_channels, in_channels)
        ``W_l`` and ``W_r`` transposed.
    lin_l.bias : (out_channels,)

    Notes
    -----
    Edge weights multiply inside the mean, which divides by the number of entries.  GraphSAGE
    (NIPS'17), section 3.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = True,
        k: int | None = None,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
    ) -> None:
        check_counts(in_channels=in_channels, out_channels=out_channels)
        super().__init__(k, sample, training_sample, strategy, out_channels)
        self.lin_l = Linear(in_channels, out_channels, bias=bias)
        self.lin_r = Linear(in_channels, out_channels, bias=False)

    def reset_parameters(self) -> None:
        """Those of ``torch.nn.Linear``."""
        self.lin_l.reset_parameters()
        self.lin_r.reset_parameters()

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, in_channels) to (n, out_channels); arguments and errors are those of ``GCNConv``."""
        check_input(x, graph, self.lin_l.weight)
        width = self._width()
        y: Tensor
        if width is not None:
            y = self.lin_l(self._aggregate(graph, x, width, edge_weight, mean=True))
        elif self.k is None:
            y = self.lin_l(spmm(graph, x, edge_weight, reduce="mean"))
        else:
            h = linear(x, self.lin_l.weight)
            y = _plus(maxk_aggregate(graph, h, self.k, edge_weight, reduce="mean"), self.lin_l.bias)
        own: Tensor = self.lin_r(x)
        return y + own


class GINConv(_Convolution):
    """Graph isomorphism: ``y = nn((1 + eps) s(x) + A s(x))``.

    ``s`` is ``MaxK(k)``, or nothing without ``k``: the non-linearity of the layer before, which
    ends in a linear one.

    Parameters
    ----------
    nn : Module
        From the features of ``x`` to those of the result.
    eps : float
    train_eps : bool
        Whether ``eps`` is a parameter, or a buffer.
    k : int, optional
        Features of ``x`` to keep.
    sample, training_sample, strategy
        As for ``GCNConv``; the sum is multiplied as there.

    Attributes
    ----------
    nn : Module
    eps : (1,)

    Notes
    -----
    GIN (ICLR'19), equation 4.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    def __init__(
        self,
        nn: Module,
        eps: float = 0.0,
        train_eps: bool = False,
        *,
        k: int | None = None,
        sample: int | None = None,
        training_sample: int | None = None,
        strategy: str = "fastrand",
    ) -> None:
        super().__init__(k, sample, training_sample, strategy)
        self.nn, self.initial_eps = nn, float(eps)
        value = torch.tensor([self.initial_eps])
        if train_eps:
            self.eps = Parameter(value)
        else:
            self.register_buffer("eps", value)

    def reset_parameters(self) -> None:
        """Those of ``nn``, or of its parts that can be reset, and ``eps`` as it was given."""
        _reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, feat) to what ``nn`` makes of it; the rest as for ``GCNConv``."""
        check_square(graph)
        width = self._width()
        if width is not None:
            y = self._aggregate(graph, x, width, edge_weight, rescale=True)
            y = torch.addcmul(y, 1 + self.eps, x)
        else:
            y = aggregate_with_own(graph, x, self.k, edge_weight, 1 + self.eps)
        out: Tensor = self.nn(y)
        return out


def _reset(module: Module) -> None:
    """As PyG: the module itself if it can, else its children."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """In the dtype of ``y``, which autocast may have narrowed."""
    return y if bias is None else y + bias.to(y.dtype)
