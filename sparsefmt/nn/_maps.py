"""Linear maps and networks of layers: drawn as PyG draws them, made lazily, read or called."""

import math
import re
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import LazyLinear, Linear, Module, Parameter, init
from torch.nn.functional import linear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ..model.maps import read_map
from ._inputs import check_like

#: How a map draws its weights: Glorot's uniform ones, or those of ``torch.nn.Linear``.
GLOROT, KAIMING = "glorot", "kaiming_uniform"
#: What ``read_map`` returns.
ReadMap: TypeAlias = tuple[Tensor, Tensor | None] | None


class LazyMap(LazyLinear):
    """A linear map whose input width the first features tell; from then on a ``Linear``.

    Values of a bias come with the weights, as in PyG; ``draw`` is as for ``linear_map``.
    """

    def __init__(self, out_features: int, bias: bool, draw: str) -> None:
        super().__init__(out_features, bias=False)
        self.draw = draw
        if bias:
            # torch's own would be uninitialised too, and PyG's states could not be loaded.
            self.bias: Any = Parameter(torch.empty(out_features))

    def reset_parameters(self) -> None:
        """Draw the parameters, if there are any yet."""
        if "draw" in vars(self):  # not while torch's constructor makes an empty map
            draw_map(self, self.draw)

    def initialize_parameters(self, x: Tensor) -> None:
        """Build parameters for features like ``x``; those that were loaded stay."""
        self.in_features = x.shape[-1]
        if isinstance(self.weight, UninitializedParameter):
            self.weight.materialize((self.out_features, self.in_features))
            self.reset_parameters()
        self.in_features = self.weight.shape[1]
        del self.draw  # which torch's class, that it becomes, does not have


def linear_map(
    in_channels: int, out_channels: int, *, bias: bool = True, draw: str = KAIMING
) -> Linear:
    """Build a linear map, drawn once as PyG's constructor does, or a lazy one of -1 channels."""
    if in_channels < 0:
        return LazyMap(out_channels, bias, draw)
    made = Linear(in_channels, out_channels, bias=False)
    if bias:
        made.bias = Parameter(torch.empty(out_channels))
        draw_bias(made)
    return made


def draw_map(layer: Linear | None, draw: str = KAIMING) -> None:
    """Draw a map's weights and its bias, with the numbers that PyG draws at the same seed."""
    if layer is None or isinstance(layer.weight, UninitializedParameter):
        return
    if draw == GLOROT:
        draw_glorot(layer.weight)
    else:  # as ``torch.nn.Linear``, rounded as PyG's
        bound = math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * layer.weight.shape[1]))
        init.uniform_(layer.weight, -bound, bound)
    draw_bias(layer)


def draw_bias(layer: Linear) -> None:
    """Draw the bias of a map, if it has one, as ``torch.nn.Linear`` does."""
    if layer.bias is not None:
        bound = 1.0 / math.sqrt(layer.weight.shape[1])
        init.uniform_(layer.bias, -bound, bound)


def draw_glorot(weight: Tensor | None) -> None:
    """Draw weights by Glorot's uniform rule, if there are any."""
    if weight is not None:
        bound = math.sqrt(6.0 / (weight.shape[-2] + weight.shape[-1]))
        init.uniform_(weight, -bound, bound)


def set_to_zero(bias: Tensor | None) -> None:
    """Set a bias to 0, if there is one."""
    if bias is not None:
        init.zeros_(bias)


def settle(layer: Module, width: int) -> None:
    """Build the parameters of a lazy map that meets its first features, of that width."""
    if isinstance(layer, LazyLinear):
        like = layer.weight
        with torch.inference_mode(False):  # whose tensors could not be trained later
            layer(torch.empty(0, width, dtype=like.dtype, device=like.device))


def check_map(layer: Module, x: Tensor, name: str, times: int = 1) -> ReadMap:
    """Check features for a map and return ``read_map`` of it; a lazy map is made for them.

    The map multiplies them ``times`` times side by side.  One that has to be called may take any.
    """
    args, width = read_map(layer), x.shape[-1] * times
    if args is None:
        settle(layer, width)
        args = read_map(layer)
    if args is None:
        return None
    weight = args[0]
    if width != weight.shape[1]:
        takes = weight.shape[1] // times
        raise ShapeError(
            f"{name} has {x.shape[-1]} features but the layer takes {takes}: give (n, {takes})."
        )
    if x.dtype is not weight.dtype or x.device != weight.device:
        check_like(name, x, weight)
    return args


def mapped(layer: Module, x: Tensor, name: str) -> Tensor:
    """Compute a map of features, which errors call by this name."""
    args = read_map(layer)
    if (
        args is None
        or x.shape[-1] != args[0].shape[1]
        or x.dtype is not args[0].dtype
        or x.device != args[0].device
    ):
        args = check_map(layer, x, name)
    return called(layer, x, name) if args is None else linear(x, *args)


def product_and_bias(layer: Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute ``x W``, and return it and the bias apart, of a ``Linear`` with or without hooks.

    Of any other map the result of its call, which may contain a bias, and None.
    """
    args = read_map(layer)
    if args is not None:
        return linear(x, args[0]), args[1]
    of_torch = type(layer) is Linear or (isinstance(layer, Linear) and is_parametrized(layer))
    bias = layer._parameters.get("bias") if of_torch else None
    if bias is None:
        return called(layer, x, "x"), None
    y: Tensor = functional_call(layer, {"bias": torch.zeros_like(bias)}, (x,))
    return y, bias


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


def called(nn: Module, x: Tensor, name: str = "") -> Tensor:
    """Call a network, or the map of features of that name, and name it where torch refuses them."""
    y: Tensor
    if torch.compiler.is_compiling():
        y = nn(x)
        return y
    try:
        y = nn(x)
    except RuntimeError as error:
        words = str(error)
        of_torch = type(error) in (RuntimeError, NotImplementedError) and not _MACHINE.search(words)
        kind = next((kind for kind, said in _REFUSALS if of_torch and said.search(words)), None)
        if kind is None:
            raise
        raise kind(
            f"{'the map of ' + name if name else 'nn'} cannot take features of shape "
            f"{tuple(x.shape)} and dtype {x.dtype} on {x.device}: {error}; give x that fits, or "
            f"another {'map' if name else 'nn'}."
        ) from error
    return y
