"""GIN's convolution, with MaxK or over a sample of each row."""

from typing import Unpack

from torch import Tensor
from torch.nn import Linear, Module, Sequential

from ..autograd import aggregate_with_own, maxk, maxk_aggregate, spmm
from ..autograd.layers import gin_convolution, is_plain, propagated
from ..autograd.maps import calls_forward_alone, read_map
from ..autograd.tensors.prepare import GraphLike, graph_tensors
from ..autograd.tensors.shared import local_of
from ._inputs import Ends, as_autocast, check_edge_weight
from ._loops import over_vertices
from ._maps import OfNetwork, called, check_fit
from ._passing import FORWARD, SUM, Convolution, Options


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
    k : int, optional
        Features of ``x`` to keep.
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
        """Map (n, feat) to what ``nn`` makes of it; arguments are those of ``SAGEConv``.

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
            if isinstance(x, Tensor) and self._is_usual():
                y = self._in_one_node(x, self._graph(x, edge_index))
            if y is not None:
                return y
        ends = self._between(x, edge_index, size)
        check_edge_weight(edge_weight, graph_tensors(local_of(ends.graph)))
        check_fit(self.nn, ends.source)
        return called(self.nn, self._aggregated(ends, edge_weight))

    def _in_one_node(self, x: Tensor, graph: GraphLike) -> Tensor | None:
        """Run the sums, with a map that comes first, as one node of autograd's; None if not so."""
        nn, eps = self.nn, self.eps
        first, *rest = [*nn] if calls_forward_alone(nn, Sequential) and len(nn) else [nn]
        args = read_map(first) if isinstance(first, Linear) else None
        if args is None:
            if not is_plain(graph, x, eps):
                return None
            check_fit(nn, x)
            return called(nn, propagated(graph, x, None, eps, one_more=True))
        if not is_plain(graph, x, *args, eps):
            return None
        y = gin_convolution(graph, x, eps, *args)
        for module in rest:
            y = called(module, y)
        return y

    def _is_usual(self) -> bool:
        """Return True if all options that need other code are as they are by default."""
        return (
            self._is_whole()
            and self.flow == FORWARD
            and self._reductions == SUM
            and not (eps := self.eps).requires_grad
            and eps.shape == (1,)
        )

    def _aggregated(self, ends: Ends, edge_weight: Tensor | None) -> Tensor:
        """Aggregate features of sources, and add a part of the targets' own."""
        graph, x, width = ends.graph, as_autocast(ends.source), self._width()
        if self.k is not None:
            self._check_no_batch(x)
        if ends.alike and width is None and x.dim() == 2 and self._reductions == SUM:
            factor = (1 + self.eps).to(x.dtype)  # a wider one would widen the sum
            return aggregate_with_own(graph, x, factor, edge_weight, k=self.k)

        def reduced(h: Tensor) -> Tensor:
            if width is not None:
                return self._aggregate(graph, h, width, edge_weight, rescale=True)
            if self.k is not None:
                return maxk_aggregate(graph, h, self.k, edge_weight)
            return spmm(graph, h, edge_weight, reduce=self._reductions[0])

        own = ends.target
        if own is not None and self.k is not None:
            own = maxk(as_autocast(own), self.k)
        return self._with_own(over_vertices(reduced, x), ends, own)
