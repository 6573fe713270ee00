"""GraphSAGE's convolution, with MaxK or over a sample of each row."""

from functools import partial
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from ..autograd import maxk_aggregate, spmm
from ..autograd.matmul import csr_operands
from ..autograd.own_parts import with_own
from ..autograd.tensors.prepare import GraphLike
from ..errors import ShapeError
from ..model.maps import maps_first, read_map
from ._inputs import Ends, check_counts, check_edge_weight, check_flags, in_pair
from ._loops import gathered, over_vertices
from ._maps import (
    ReadMap,
    called,
    check_map,
    draw_map,
    linear_map,
    product_and_bias,
    settle,
)
from ._passing import MEAN, SUM, Convolution, PartOptions, check_aggr_kwargs, joined, plus


class SAGEConv(Convolution):
    """GraphSAGE: ``y = mean_j(s(x)[j]) W_l + b + s(x) W_r`` over the in-neighbours ``j``.

    ``s`` is ``MaxK(k)``, in the place of the activation before the layer, or nothing without ``k``.
    With ``maxk_on="mapped"`` it is ``y = mean_j(MaxK(x W_l, k)[j]) + b + x W_r``; of a ``lin_l`` of
    your own that is no ``Linear`` MaxK then keeps features of what it returns.

    Parameters
    ----------
    in_channels, out_channels, normalize, root_weight, project
        As in PyG: a pair is of sources and targets, -1 for as many features as the first ``x`` has.
    aggr : "mean", "add", "sum", "max" or "min", or a list of them
        What takes the place of the mean; of a list all of them, side by side before ``W_l``.  Only
        means and sums beside ``k`` or samples.  Where PyG is installed also what its resolver
        knows, "lstm" or "softmax" for instance: it gets the features of each edge's source, in an
        array of its own.
    bias, sample, training_sample, strategy
        As for ``GCNConv``; the mean is that of the sample.
    k : int, optional
        Features of ``x``, or of ``x W_l``, to keep: 1 or more, at most as many as there are.
    maxk_on, dropout : optional
        As for ``GCNConv``.
    aggr_kwargs : dict, optional
        Arguments of PyG's aggregation.
    flow, node_dim, decomposed_layers : optional
        As for ``GCNConv``.

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``; also if there is a projection of features whose number is not known yet.

    Notes
    -----
    Edge weights multiply inside the mean, which divides by the number of entries.  Beside a list or
    a module in ``aggr``, values of torch's sparse tensors do not count, as in PyG.  GraphSAGE
    (NIPS'17), section 3.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"
    _reductions_known = ("sum", "mean", "max", "min")
    _takes_all = True
    _shown = ("aggr",)
    _of_parts = (SUM, MEAN)
    _defaults: ClassVar = {
        **Convolution._defaults,
        **{"_reductions": MEAN, "root_weight": True, "project": False},
    }

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: Any = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        **options: Unpack[PartOptions],
    ) -> None:
        check_counts(out_channels=out_channels)
        of_sources, of_targets = in_pair(in_channels)
        check_flags(normalize=normalize, root_weight=root_weight, project=project, bias=bias)
        if isinstance(aggr, str) and aggr == "lstm":
            check_aggr_kwargs(options.get("aggr_kwargs"))
            widths = {"in_channels": of_sources, "out_channels": of_sources}
            options["aggr_kwargs"] = widths | (options.get("aggr_kwargs") or {})
        super().__init__((min(of_sources, of_targets), out_channels), aggr, **options)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        if project:
            if of_sources < 0:
                raise ShapeError(
                    "in_channels is -1 and project is True: SAGEConv does not support lazy "
                    "initialization with `project=True`; give the features of sources."
                )
            self.lin = linear_map(of_sources, of_sources)
        wide = self._width_of_neighbours(of_sources) if of_sources > 0 else -1
        self.lin_l = linear_map(wide, out_channels, bias=bias)
        if root_weight:
            self.lin_r = linear_map(of_targets, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as ``torch.nn.Linear`` does."""
        if not self._reductions:
            cast(Any, self.aggr_module).reset_parameters()
        if self.project:
            draw_map(self.lin)
        draw_map(self.lin_l)
        if self.root_weight:
            draw_map(self.lin_r)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: GraphLike,
        size: tuple[int, int] | None = None,
        *,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """Map (n, in_channels) to (n, out_channels).

        Parameters
        ----------
        x : Tensor, shape (n, in_channels), or a tuple of two
            Features of all vertices, or ``(x, x_target)``: those of sources and of targets, between
            which the graph is rectangular.  Without ``x_target``, None, there is no ``x W_r``, and
            of an ``edge_index`` as many targets as sources.  Each may be (..., n, in_channels),
            features of one graph.
        edge_index, edge_weight
            As for ``GCNConv``.
        size : (n_source, n_target), optional
            The sizes of the graph of an ``edge_index``, if ``x`` does not tell.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if ``x`` is one tensor and the graph is not square, or
            ``size`` is not that of the graph.
        """
        if size is None and edge_weight is None:
            # ``optimize`` may have set a plan, where nothing is normalised; None: run this code.
            y: Tensor | None = None if self._plan is None else self._plan(self, x, edge_index)
            if y is not None:
                return y
        ends = self._between(x, edge_index, size)
        if edge_weight is not None:
            check_edge_weight(edge_weight, ends.tensors)
        neighbours, own = self._fit(ends)
        if self.k is not None:
            y = self._of_largest(ends, edge_weight)
            return normalize(y, dim=-1) if self.normalize else y
        y = self._of_one_product(ends, edge_weight, neighbours, own)
        if y is not None:
            return normalize(y, dim=-1) if self.normalize else y
        y = self._of_neighbours(ends, edge_weight, neighbours)
        target = ends.target if self.root_weight else None
        if target is not None:
            # Into ``y`` if only this layer has seen it, and autocast has changed no dtype.
            unseen = neighbours is not None and y.dim() == target.dim() == 2
            fits = own is not None and own[1] is None and y.dtype == target.dtype == own[0].dtype
            if unseen and own is not None and fits:
                y = y.addmm_(target, own[0].t())
            else:
                y = y + called(self.lin_r, target, "x")
        return normalize(y, dim=-1) if self.normalize else y

    def _of_one_product(
        self, ends: Ends, edge_weight: Tensor | None, lin: ReadMap, own: ReadMap
    ) -> Tensor | None:
        """Map features by both weights in one product, and aggregate one half, if that pays.

        A mean and its map commute: so less is gathered where the map makes features fewer.  None
        where the aggregation has to come first.
        """
        x = ends.source
        if lin is None or own is None or own[1] is not None or lin[0].shape != own[0].shape:
            return None
        if not self._has_defaults() or not ends.alike or ends.shared is not None or x.dim() != 2:
            return None
        out_width, width = lin[0].shape
        if not maps_first(width, out_width, gradient=x.requires_grad):
            return None
        h, part = linear(x, joined(lin[0], own[0])).chunk(2, 1)
        h, values, _, _ = csr_operands(ends.tensors, h, edge_weight)
        factors = values, None, None, None
        return with_own(ends.tensors, factors, h, lin[1], reduce="mean", own=part)

    def _fit(self, ends: Ends) -> tuple[ReadMap, ReadMap]:
        """Check the features of both ends, for which lazy maps make their parameters; read maps."""
        names = ("x", "x") if ends.alike else ("x[0]", "x[1]")
        own = None
        if self.project:
            check_map(self.lin, ends.source, names[0])
        if self._reductions:
            neighbours = check_map(self.lin_l, ends.source, names[0], len(self._reductions))
        else:
            settle(self.lin_l, self._width_of_neighbours(ends.source.shape[-1]))
            neighbours = read_map(self.lin_l)
        if self.root_weight and ends.target is not None:
            own = check_map(self.lin_r, ends.target, names[1])
        return neighbours, own

    def _width_of_neighbours(self, width: int) -> int:
        """Return the width behind the aggregation: of each reduction, or as PyG's module tells."""
        if self._reductions:
            return width * len(self._reductions)
        out = getattr(self.aggr_module, "get_out_channels", None)
        return width if out is None else int(out(width))

    def _of_largest(self, ends: Ends, edge_weight: Tensor | None) -> Tensor:
        """Aggregate what MaxK keeps of features of sources, and add the part of the targets."""
        target, (reduction,) = ends.target if self.root_weight else None, self._reductions
        self._check_no_batch(ends.source)
        self._width()  # refuses a sample beside ``k``
        source = called(self.lin, ends.source, "x").relu() if self.project else ends.source
        product = partial(maxk_aggregate, k=None, edge_weight=edge_weight, reduce=reduction)
        if self.maxk_on == "mapped":
            h, bias = product_and_bias(self.lin_l, source)
            y = plus(product(ends.graph, self._largest(h)), bias)
        else:
            largest = self._largest(source)
            y = called(self.lin_l, product(ends.graph, largest), "x")
            if target is not None:  # the same vertices lose the same features
                alike = ends.alike and not self.project
                target = (largest if alike else self._largest(target)).dense()
        return y if target is None else y + called(self.lin_r, target, "x")

    def _of_neighbours(self, ends: Ends, edge_weight: Tensor | None, lin: ReadMap) -> Tensor:
        """Aggregate the features of sources and map them, with the bias."""
        graph, source, width = ends.graph, ends.source, self._width()
        if self.project:
            source = called(self.lin, source, "x").relu()
        if not self._reductions:
            ends = ends._replace(source=source).gathered()
            y = gathered(self.aggr_module, ends.tensors, ends.source, edge_weight)
            return called(self.lin_l, y, "x")

        def reduced(h: Tensor, reduction: str) -> Tensor:
            if width is None:
                return spmm(graph, h, edge_weight, reduce=reduction)
            options = {"mean" if reduction == "mean" else "rescale": True}
            return self._aggregate(graph, h, width, edge_weight, **options)

        if ends.shared is not None and self._reductions in self._of_parts:
            if lin is not None and ends.shared.maps_first(source, self.out_channels):
                h, reduction = linear(source, lin[0]), self._reductions[0]
                return plus(over_vertices(lambda h: reduced(h, reduction), h), lin[1])
        parts = [
            over_vertices(partial(reduced, reduction=reduction), source)
            for reduction in self._reductions
        ]
        return called(self.lin_l, parts[0] if len(parts) == 1 else torch.cat(parts, -1), "x")
