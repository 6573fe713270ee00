"""GIN's convolution, with MaxK or over a sample of each row.

Parameters have the names and shapes of PyG's layer of the same name, so that a ``state_dict`` loads
across, and without ``k`` and samples results agree with its.
"""

import torch
from torch import Tensor
from torch.nn import LazyLinear, Linear, Module, Parameter, Sequential

from ..autograd import GraphLike, aggregate_with_own
from ..errors import DtypeError, ShapeError
from ._base import Convolution
from ._checks import check_beside, check_number, check_square


class GINConv(Convolution):
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

    Raises
    ------
    DtypeError, ShapeError, UnsupportedError
        As ``GCNConv``, if ``k``, a sample or the strategy is not as above, ``nn`` cannot be called
        or ``eps`` is no finite number; in forward also if ``nn`` begins with a linear map that does
        not fit.

    Notes
    -----
    GIN (ICLR'19), equation 4.1; MaxK-GNN (ASPLOS'24), section 3.1.
    """

    __module__ = "sparsefmt.nn"

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
        if not callable(nn):
            raise DtypeError(
                f"nn is a {type(nn).__name__}: give a module, torch.nn.Linear(n, m) for instance."
            )
        check_number("eps", eps)
        self.nn, self.initial_eps = nn, float(eps)
        value = torch.tensor([self.initial_eps])
        if train_eps:
            self.eps = Parameter(value)
        else:
            self.register_buffer("eps", value)

    def reset_parameters(self) -> None:
        """Reset ``nn``, or its parts that can be, and set ``eps`` to what was given."""
        _reset(self.nn)
        with torch.no_grad():
            self.eps.fill_(self.initial_eps)

    def forward(self, x: Tensor, graph: GraphLike, edge_weight: Tensor | None = None) -> Tensor:
        """(n, feat) to what ``nn`` makes of it; arguments are those of ``GCNConv``.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``autograd.spmm``; also if the graph is not square.
        """
        check_square(graph)
        width = self._width()
        if width is not None:
            y = self._aggregate(graph, x, width, edge_weight, rescale=True)
            y = torch.addcmul(y, 1 + self.eps, x)
        else:
            y = aggregate_with_own(graph, x, 1 + self.eps, edge_weight, k=self.k)
        _check_fit(self.nn, y)
        out: Tensor = self.nn(y)
        return out


def _check_fit(nn: Module, y: Tensor) -> None:
    """Check that ``nn`` can take what was aggregated of ``x``, where a linear map comes first."""
    while isinstance(nn, Sequential) and len(nn):
        nn = nn[0]
    if isinstance(nn, Linear) and not isinstance(nn, LazyLinear):
        if y.shape[1] != nn.in_features:
            raise ShapeError(
                f"x has {y.shape[1]} features but nn takes {nn.in_features}: give "
                f"(n, {nn.in_features})."
            )
        check_beside("x", y, nn.weight)


def _reset(module: Module) -> None:
    """Reset the module itself if it can, else its children, as PyG does."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)
