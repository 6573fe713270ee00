"""Networks behind an aggregation, as GIN and GINE have them: what does not fit is named."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential

from ..autograd.maps import calls_forward_alone, read_map
from ..errors import DeviceError, DtypeError, ShapeError, SparseFmtError, UnsupportedError
from ._inputs import Ends, as_autocast, check_beside, check_flags, check_number
from ._passing import Passing

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


class OfNetwork(Passing):
    """A layer that ends in a network of the user's, which gets ``1 + eps`` of each vertex too."""

    def _add_network(self, nn: Any, eps: float, train_eps: bool) -> None:
        """Take the network, and make ``eps``."""
        if isinstance(nn, type):
            raise DtypeError(
                f"nn is the class {nn.__name__}: give a module, {nn.__name__}(...) for instance."
            )
        if not callable(nn):
            raise DtypeError(f"nn is {nn!r}: give a module, torch.nn.Linear(n, m) for instance.")
        check_number("eps", eps)
        check_flags(train_eps=train_eps)
        self.nn, self.initial_eps = nn, float(eps)
        self.eps: Tensor
        if train_eps:
            self.eps = Parameter(torch.empty(1))
        else:
            self.register_buffer("eps", torch.empty(1))

    def _shown(self) -> list[str]:
        return [f"nn={self.nn}"]

    def reset_parameters(self) -> None:
        """Reset ``nn``, or its parts that can be, and set ``eps`` to what was given."""
        _reset(self.nn)
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
        check_beside("x[1]", own, ends.source)
        own = as_autocast(own)
        return torch.addcmul(y, (1 + self.eps).to(y.dtype), own)


def check_fit(nn: Module, x: Tensor) -> None:
    """Check that ``nn`` can take features like ``x``, where a linear map comes first."""
    while calls_forward_alone(nn, Sequential) and len(nn):  # type: ignore[arg-type]
        nn = nn[0]  # type: ignore[index]
    args = read_map(nn) if isinstance(nn, Linear) else None
    if args is not None:
        weight, width = args[0], args[0].shape[1]
        if x.shape[-1] != width:
            raise ShapeError(
                f"x has {x.shape[-1]} features but nn takes {width}: give (n, {width})."
            )
        check_beside("x", x, weight)


def called(nn: Module, y: Tensor, name: str = "") -> Tensor:
    """Call a network, or the map of features of that name, and name it where torch refuses them."""
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
            f"{'the map of ' + name if name else 'nn'} cannot take features of shape "
            f"{tuple(y.shape)} and dtype {y.dtype} on {y.device}: {error}; give x that fits, or "
            f"another {'map' if name else 'nn'}."
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
