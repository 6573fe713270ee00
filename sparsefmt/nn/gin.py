"""GIN's convolution, with MaxK or over a sample of each row.

Parameters have the names and shapes of PyG's layer of the same name, so that a ``state_dict`` loads
across, and without ``k`` and samples results agree with its.
"""

import re

import torch
from torch import Tensor
from torch.nn import LazyLinear, Linear, Module, Parameter, Sequential

from ..autograd import (
    GraphLike,
    aggregate_with_own,
    as_graph,
    gin_convolution,
    is_bare,
    is_plain,
    maxk,
    maxk_aggregate,
    propagated,
    spmm,
)
from ..errors import DeviceError, DtypeError, ShapeError, SparseFmtError, UnsupportedError
from ._base import Convolution, is_one_each
from ._checks import Ends, as_autocast, check_beside, check_number, ends_of

#: Faults of the machine, which pass as they are, whatever else they say.
_MACHINE = re.compile(r"CUDA error|CU\w+_STATUS|cuDNN error|out of memory|not enough memory")
#: What torch says of tensors that do not fit, and the error that is raised instead.
_REFUSALS = (
    (UnsupportedError, re.compile(r"not implemented for '")),
    (DeviceError, re.compile(r"same device|expected device")),
    (DtypeError, re.compile(r"\bdtypes?\b|scalar types?\b|(input|weight|bias|data) type\b", re.I)),
    (
        ShapeError,
        re.compile(
            r"\bshapes?\b|\bdimensions?\b|normalized_shape|size mismatch|input_size|channel size"
            r"|(input|weight) of size|sizes? of tensor|sizes \[|contain \d+ elements|matrices"
            r"|to have \d+ channels|(expected|must be a) \dD\b|does not broadcast",
            re.I,
        ),
    ),
)


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
        ``1 + eps`` is rounded to the dtype of ``x``.

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
        if isinstance(nn, type):
            raise DtypeError(
                f"nn is the class {nn.__name__}: give a module, {nn.__name__}(...) for instance."
            )
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

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        graph: GraphLike,
        edge_weight: Tensor | None = None,
        *,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """(n, feat) to what ``nn`` makes of it; arguments are those of ``SAGEConv``.

        Features of sources and targets are of one width.  Without ``x_target`` a vertex takes no
        part in its own result.

        Raises
        ------
        ShapeError, DtypeError, DeviceError, UnsupportedError
            As ``SAGEConv``; also if ``nn`` cannot take ``x``, or both ends are not of one width.
        """
        if isinstance(x, Tensor) and size is None:
            graph = as_graph(graph, x)
            constant = self.eps.shape == (1,) and not self.eps.requires_grad
            if edge_weight is None and self._is_whole() and constant:
                first, rest = _parts(self.nn)
                if first is None and is_plain(graph, x, self.eps):
                    _check_fit(self.nn, x)
                    return _called(self.nn, propagated(graph, x, None, self.eps, one_more=True))
                if (
                    first is not None
                    and is_one_each(first.bias, first.weight)
                    and is_plain(graph, x, first.weight, first.bias, self.eps)
                ):
                    y = gin_convolution(graph, x, self.eps, first.weight, first.bias)
                    for module in rest:
                        y = _called(module, y)
                    return y
        ends = ends_of(x, graph, size)
        _check_fit(self.nn, ends.source)
        if not ends.alike:
            return _called(self.nn, self._between(ends, edge_weight))
        graph = ends.graph
        x = as_autocast(ends.source)  # for both parts
        width, own = self._width(), (1 + self.eps).to(x.dtype)  # a wider one would widen the sum
        if width is not None:
            y = self._aggregate(graph, x, width, edge_weight, rescale=True)
            y = torch.addcmul(y, own, x)
        else:
            y = aggregate_with_own(graph, x, own, edge_weight, k=self.k)
        return _called(self.nn, y)

    def _between(self, ends: Ends, edge_weight: Tensor | None) -> Tensor:
        """Aggregate features of sources, and add a part of the targets' own."""
        graph, x = ends.graph, as_autocast(ends.source)
        width = self._width()
        if width is not None:
            y = self._aggregate(graph, x, width, edge_weight, rescale=True)
        elif self.k is not None:
            y = maxk_aggregate(graph, x, self.k, edge_weight)
        else:
            y = spmm(graph, x, edge_weight)
        if ends.target is None:
            return y
        if ends.target.shape[1] != x.shape[1]:
            raise ShapeError(
                f"x[1] has {ends.target.shape[1]} features but x[0] has {x.shape[1]}: both are "
                "added up, give them one width."
            )
        check_beside("x[1]", ends.target, ends.source)
        own = as_autocast(ends.target)
        own = own if self.k is None else maxk(own, self.k)
        return torch.addcmul(y, (1 + self.eps).to(x.dtype), own)


def _parts(nn: Module) -> tuple[Linear | None, list[Module]]:
    """Give the linear map that comes first, where nobody sees its calls, and what follows it."""
    parts = [*nn] if isinstance(nn, Sequential) and is_bare(nn, Sequential) else [nn]
    first = parts[0] if parts else nn
    return (first, parts[1:]) if is_bare(first) and isinstance(first, Linear) else (None, [])


def _check_fit(nn: Module, x: Tensor) -> None:
    """Check that ``nn`` can take features like ``x``, where a linear map comes first."""
    while isinstance(nn, Sequential) and len(nn):
        nn = nn[0]
    if isinstance(nn, Linear) and not isinstance(nn, LazyLinear):
        if x.shape[1] != nn.in_features:
            raise ShapeError(
                f"x has {x.shape[1]} features but nn takes {nn.in_features}: give "
                f"(n, {nn.in_features})."
            )
        check_beside("x", x, nn.weight)


def _called(nn: Module, y: Tensor) -> Tensor:
    """Call ``nn``, and name it in what torch says of features that do not fit."""
    out: Tensor
    if torch.compiler.is_compiling():
        out = nn(y)
        return out
    try:
        out = nn(y)
    except RuntimeError as error:
        kind = _refusal(error)
        if kind is None:
            raise
        raise kind(
            f"nn cannot take features of shape {tuple(y.shape)} and dtype {y.dtype} on "
            f"{y.device}: {error}; give x that fits, or another nn."
        ) from error
    return out


def _refusal(error: RuntimeError) -> type[SparseFmtError] | None:
    """Give the error to raise where torch refused a tensor; None for any other error."""
    words = str(error)
    if type(error) not in (RuntimeError, NotImplementedError) or _MACHINE.search(words):
        return None
    return next((kind for kind, said in _REFUSALS if said.search(words)), None)


def _reset(module: Module) -> None:
    """Reset the module itself if it can, else its children, as PyG does."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for child in module.children():
        _reset(child)
