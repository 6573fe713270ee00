"""What layers refuse, before torch does in the words of its own products."""

from math import isfinite
from numbers import Integral, Real

import torch
from torch import Tensor

from ..autograd import GraphLike, graph_tensors, spmm
from ..errors import DeviceError, DtypeError, ShapeError


def check_number(name: str, value: object) -> None:
    """Check for a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} is {value!r}: give a number.")
    try:
        finite = isfinite(value)
    except OverflowError as error:  # its digits may be too many to be shown
        raise ShapeError(
            f"{name} is beyond the range of a float: give a finite number, 0.5 for instance."
        ) from error
    if not finite:
        raise ShapeError(f"{name} is {value!r}: give a finite number.")


def check_counts(**counts: object) -> None:
    """Check for integers, 1 or more, by their names."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise DtypeError(f"{name} is {value!r}: give an integer, 1 or more.")
        if value < 1:
            raise ShapeError(f"{name} is {value}: give 1 or more.")


def check_square(graph: GraphLike) -> None:
    """Check for a square graph, whose vertices each take part in their own result."""
    tensors = graph_tensors(graph)
    if tensors.n_rows != tensors.n_cols:
        raise ShapeError(
            f"graph has shape {(tensors.n_rows, tensors.n_cols)}: a layer needs as many columns as "
            "rows, since a vertex takes part in its own result."
        )


def check_features(x: Tensor, graph: GraphLike) -> None:
    """Check the features of a graph's vertices, by the name that the user knows them by."""
    tensors = graph_tensors(graph)
    dense = isinstance(x, Tensor) and x.layout is torch.strided and x.is_floating_point()
    if not (dense and x.dim() == 2 and x.shape[0] == tensors.n_rows and x.device == tensors.device):
        spmm(graph, x)  # refuses it


def check_input(x: Tensor, graph: GraphLike, weight: Tensor) -> None:
    """Check for features that a layer's ``weight``, (out_channels, in_channels), can multiply."""
    check_square(graph)
    check_features(x, graph)
    if x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"x has {x.shape[1]} features but the layer takes {weight.shape[1]}: give "
            f"(n, {weight.shape[1]})."
        )
    check_beside("x", x, weight)


def check_beside(name: str, value: Tensor, weight: Tensor) -> None:
    """Check that a tensor has the device and the dtype of a layer's weights."""
    if value.device != weight.device:
        raise DeviceError(
            f"{name} is on {value.device} but the layer's weights are on {weight.device}: move "
            f"one, layer.to({name}.device) for instance."
        )
    if not value.is_floating_point():
        raise DtypeError(
            f"{name} is {value.dtype}: give floating numbers, {name}.to({weight.dtype}) for "
            "instance."
        )
    # Autocast makes one dtype of all but float64, which it leaves as it is.
    cast = torch.is_autocast_enabled(value.device.type)
    if value.dtype != weight.dtype and not (
        cast and value.dtype != torch.float64 and weight.dtype != torch.float64
    ):
        raise DtypeError(
            f"{name} is {value.dtype} but the layer's weights are {weight.dtype}: give both in one "
            f"dtype, layer.to({name}.dtype) for instance."
        )


def as_autocast(x: Tensor) -> Tensor:
    """Cast features as autocast would for a product; it leaves float64."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.element_size() == 8:
        return x
    return x.to(torch.get_autocast_dtype(kind))
