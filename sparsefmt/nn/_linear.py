"""Linear maps of layers: drawn as PyG draws them, and made at the first features where asked to."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import LazyLinear, Linear, Module, Parameter
from torch.nn.functional import linear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from ..autograd.maps import read_map
from ._inputs import check_width
from ._maps import called

#: How a map draws its weights: Glorot's uniform ones, or those of ``torch.nn.Linear``.
GLOROT, KAIMING = "glorot", "kaiming_uniform"


class LazyMap(LazyLinear):
    """A linear map whose input width the first features tell; from then on a ``Linear``.

    Parameters
    ----------
    out_features : int
    bias : bool
        Its values come with the weights, as in PyG.
    draw : "glorot" or "kaiming_uniform"
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
        """Make parameters for features like ``x``; those that were loaded stay."""
        self.in_features = x.shape[-1]
        if _is_uninitialised(self):
            self.weight.materialize((self.out_features, self.in_features))
            self.reset_parameters()
        self.in_features = self.weight.shape[1]
        del self.draw  # which torch's class, that it becomes, does not have


def linear_map(
    in_channels: int, out_channels: int, *, bias: bool = True, draw: str = KAIMING
) -> Linear:
    """Make a linear map, drawn once as PyG's constructor does, or a lazy one of -1 channels."""
    if in_channels < 0:
        return LazyMap(out_channels, bias, draw)
    made = Linear(in_channels, out_channels, bias=False)
    if bias:
        made.bias = Parameter(torch.empty(out_channels))
        draw_bias(made)
    return made


def draw_map(layer: Linear, draw: str = KAIMING) -> None:
    """Draw a map's weights and its bias, with the numbers that PyG draws at the same seed."""
    if _is_uninitialised(layer):
        return
    rows, columns = layer.weight.shape
    with torch.no_grad():
        bound = math.sqrt(6.0 / (rows + columns)) if draw == GLOROT else _least_bound(columns)
        layer.weight.uniform_(-bound, bound)
    draw_bias(layer)


def _least_bound(fan: int) -> float:
    """Give the bound of ``torch.nn.Linear``'s weights, rounded as PyG's."""
    return math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * fan))


def draw_bias(layer: Linear) -> None:
    """Draw the bias of a map, if it has one, as ``torch.nn.Linear`` does."""
    if layer.bias is not None:
        bound = 1.0 / math.sqrt(layer.weight.shape[1])
        with torch.no_grad():
            layer.bias.uniform_(-bound, bound)


def _is_uninitialised(layer: Linear) -> bool:
    return isinstance(layer.weight, UninitializedParameter)


def settle(layer: Module, width: int) -> None:
    """Make the parameters of a lazy map that meets its first features, of that width."""
    if isinstance(layer, LazyLinear):
        like = layer.weight
        with torch.inference_mode(False):  # whose tensors could not be trained later
            layer(torch.empty(0, width, dtype=like.dtype, device=like.device))


def check_map(layer: Module, x: Tensor, name: str, times: int = 1) -> None:
    """Check features for a linear map, and make a lazy one; a map that has to be called may differ.

    The map multiplies them ``times`` times side by side.
    """
    settle(layer, x.shape[-1] * times)
    args = read_map(layer)
    if args is not None:
        check_width(name, x, args[0], times)


def mapped(layer: Module, x: Tensor, name: str) -> Tensor:
    """Compute a map of features that are checked by this name: every map is called."""
    check_map(layer, x, name)
    return called(layer, x, name)


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
