"""Checks of tensors: one quick test each, and an error that says what is wrong once it fails."""

import operator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ...graph.graph import Graph
from ...ops.engine.bind import Arrays, Named, count_of_features, register_library
from ...ops.engine.table import Arg, Op
from ..tensors.tensors import GraphTensors
from . import library

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tensor(name: str, value: object) -> None:
    """Check for a dense tensor."""
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{name} is a {type(value).__name__}: give a torch.Tensor; NumPy and CuPy arrays go "
            "to sparsefmt.ops."
        )
    if value.layout is not torch.strided:
        raise UnsupportedError(f"{name} has layout {value.layout}: give a dense tensor.")


def floating(name: str, value: Tensor) -> None:
    """Check for floating numbers."""
    if value.dtype not in FLOATING:
        raise DtypeError(
            f"{name} is {value.dtype}: give float16, bfloat16, float32 or float64, "
            f"{name}.float() for instance."
        )


def floating_on_device(name: str, value: Tensor, graph: GraphTensors) -> None:
    """Check that a tensor has a floating dtype and is on the device of the graph."""
    if value.dtype not in FLOATING:
        floating(name, value)
    if value.device != graph.device:
        known = value.device.type in ("cpu", "cuda")
        on_device(name, value, graph, "" if known else f"make {name} on {graph.device}")


def on_device(name: str, value: Tensor, graph: Graph | GraphTensors, mend: str = "") -> None:
    """Raise DeviceError if a tensor is on another device than a graph; ``mend`` is the advice."""
    device = graph.device
    if value.device != (torch.device(device) if isinstance(device, str) else device):
        mend = mend or f'move one of them, graph.to("{value.device}") for instance'
        raise DeviceError(f"{name} is on {value.device} but the graph is on {device}: {mend}.")


def _autocast(graph: GraphTensors) -> str:
    """Return the words of an error that say autocast has changed the user's dtypes."""
    cast = torch.is_autocast_enabled(graph.kind)
    return " under autocast, which narrows all but float64" if cast else ""


def checked_k(k: Any, feat: int | None) -> int:
    """Return ``k`` as an int; raise unless it is 1 to ``feat``, if that is not None."""
    if isinstance(k, bool) or (isinstance(k, Tensor) and k.dtype is torch.bool):
        raise DtypeError(f"k is {k}: give an integer.")
    try:
        count = operator.index(k)
    except TypeError as error:
        raise DtypeError(f"k is a {type(k).__name__}: give an integer.") from error
    if feat is None and count < 1:
        raise ShapeError(f"k is {k}: give 1 or more.")
    if feat is not None and not 1 <= count <= feat:
        count_of_features(count, feat)
    return count


def seed(value: Any, graph: GraphTensors) -> None:
    """Check for None, an integer or a tensor of one."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise DtypeError(f"seed is {value!r}: give an integer, or an int64 tensor of one.")
        return
    if value.dtype is not torch.int64:
        raise DtypeError(f"seed is {value.dtype}: give int64, seed.long() for instance.")
    if value.numel() != 1:
        raise ShapeError(f"seed has shape {tuple(value.shape)}: give one integer.")
    on_device("seed", value, graph, "make it there, or give an int")


def seed_on_device(value: Any, graph: GraphTensors) -> Tensor:
    """Return a seed tensor on the graph's device: a copy of a tensor, an integer's, or a drawn one.

    A captured CUDA graph draws, or copies, at each replay.
    """
    if isinstance(value, Tensor):
        return value.clone()  # the caller may write to it before backward reads it
    if value is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=graph.device)
    signed = (int(value) + 2**63) % 2**64 - 2**63
    return torch.full((1,), signed, dtype=torch.int64, device=graph.device)


def own_part(own: Any, without: Any, graph: GraphTensors) -> None:
    """Check the factors of vertices' own features, and which vertices add none."""
    n = graph.n_rows
    if n != graph.n_cols:
        raise ShapeError(
            f"graph has shape {(n, graph.n_cols)}: a vertex takes part in its own result, give as "
            "many columns as rows."
        )
    tensor("own", own)
    floating_on_device("own", own, graph)
    if own.shape != (n, 1) and own.shape != (1,):
        raise ShapeError(f"own has shape {tuple(own.shape)}: give {(n, 1)} or (1,).")
    if without is None:
        return
    tensor("without", without)
    if without.dtype is not torch.bool:
        raise DtypeError(f"without is {without.dtype}: give torch.bool.")
    if without.shape != (n, 1):
        raise ShapeError(f"without has shape {tuple(without.shape)}: give {(n, 1)}.")
    on_device("without", without, graph, "move one of them")


def bias(value: Any, x: Tensor, graph: GraphTensors) -> None:
    """Check that a bias is a floating tensor beside the graph, with a value for each feature."""
    tensor("bias", value)
    floating_on_device("bias", value, graph)
    if value.shape != x.shape[1:]:
        raise ShapeError(
            f"bias has shape {tuple(value.shape)} but x has {tuple(x.shape)}: give "
            f"{tuple(x.shape[1:])}, one value for each feature."
        )


class Tensors(Arrays):
    """Torch's tensors as ``bind`` checks them beside the tensors of a graph."""

    array_class = Tensor
    floats = frozenset(FLOATING)
    layout = torch.strided
    casts = staticmethod(torch.is_autocast_enabled)  #: whether ``cast`` has a task
    matrix, code = "the graph", "graph"
    order = "in the order of graph.structure"

    def cast(self, op: Op, A: Any, args: dict[str, Any]) -> dict[str, Any]:
        """Cast arguments as autocast does before the operation."""
        names, narrowed = op.named, op.narrowed or ()
        wide, narrow = (library.autocast_dtype(A.kind, narrow=narrow) for narrow in (False, True))
        return {
            name: library.cast(
                value, A.kind, narrow if {"*", names[name].name} & {*narrowed} else wide
            )
            for name, value in args.items()
        }

    def own_values(self, op: Op, A: Any, values: Any, like: Named) -> Any:
        """Cast the graph's own values as autocast does; check that they have the dtype of x."""
        (values,) = library.narrowed(A.kind, values)
        dtype = like[1].dtype
        if values.dtype is not dtype:
            raise DtypeError(
                f"x is {dtype} but the graph's own edge values are {values.dtype}{_autocast(A)}: "
                f"give x.to({values.dtype}), or edge_weight in the dtype of x."
            )
        return values

    def dense(self, name: str, value: Any, A: Any) -> Any:
        """Return ``value`` if it is a dense torch tensor, else raise; ``A`` is not read."""
        tensor(name, value)
        return value

    def kind_and_device(self, name: str, array: Any, A: Any) -> None:
        """Check for a floating dtype, and the device of the graph."""
        floating_on_device(name, array, A)

    def is_float32(self, array: Any, arg: Arg) -> bool:
        """Return True if an argument is float32, as scores may be beside features of 2 bytes."""
        return array.dtype is torch.float32 and arg.check != "factor"

    def same_dtype(self, name: str, array: Any, like: Named, A: Any) -> None:
        """Check for the dtype of another argument."""
        x, dtype = like[0], like[1].dtype
        if array.dtype is not dtype:
            raise DtypeError(
                f"{name} is {array.dtype} but {x} is {dtype}{_autocast(A)}: give both in one "
                f"dtype, {name}.to({dtype}) for instance."
            )

    def finished(self, name: str, array: Any, arg: Arg, narrow: bool) -> Any:
        """Return a checked tensor as it is."""
        return array

    def shapes_of_vectors(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of vectors of features; heads may follow one more axis, as in PyG."""
        return [row, (1, *row)]


TENSORS = Tensors()
register_library(GraphTensors, TENSORS)
