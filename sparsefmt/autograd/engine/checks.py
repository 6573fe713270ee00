"""Checks of tensors: one quick test each, and an error that says what is wrong once it fails."""

import operator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from ...graph.graph import Graph
from ...ops.engine.bind import ENDS, Arrays, Named, count_of_features, register_library
from ...ops.engine.bind import bind as bind
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


def features(name: str, x: Tensor, *, rows: int, axis: str, graph: GraphTensors) -> None:
    """Check for features, (rows, feat) or (rows, heads, feat), where the graph is."""
    floating_on_device(name, x, graph)
    if x.dim() < 2:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}: give (rows, feat), such as {name}[:, None]."
        )
    if x.shape[0] != rows:
        raise ShapeError(
            f"{name} has {x.shape[0]} rows but the graph has {rows} {axis}: {name} needs one row "
            f"for each of them ({name}.shape == {tuple(x.shape)}, graph.shape == "
            f"{(graph.n_rows, graph.n_cols)})."
        )


def two_axes(name: str, x: Tensor) -> None:
    """Check for two axes."""
    if x.dim() != 2:
        mend = f"{name}[:, None] for instance"
        if x.dim() > 2:
            mend = f"{name}.flatten(1) where rows come first, or one call for each {name}[k]"
        raise ShapeError(f"{name} has shape {tuple(x.shape)}: give (rows, feat), {mend}.")


def vector(
    name: str, value: Any, *, length: int, what: str, x: Tensor, graph: GraphTensors
) -> None:
    """Check for (length,), of the dtype of x, which has been checked."""
    if (
        isinstance(value, Tensor)
        and value.shape == (length,)
        and value.dtype is x.dtype
        and value.device == graph.device
        and value.layout is torch.strided
    ):
        return
    tensor(name, value)
    floating_on_device(name, value, graph)
    if value.shape != (length,):
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)} but the graph has {length} {what}: give one "
            f"value each, shape ({length},)."
        )
    _same_dtype(name, value, x, graph)


def of_heads(name: str, value: Tensor, graph: GraphTensors, x: Tensor) -> None:
    """Check for (nnz, heads), of the dtype of x, where the graph is."""
    floating_on_device(name, value, graph)
    if value.shape[0] != graph.nnz:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)} but the graph has {graph.nnz} stored entries: "
            f"give ({graph.nnz},) or ({graph.nnz}, heads)."
        )
    _same_dtype(name, value, x, graph)


def _same_dtype(name: str, value: Tensor, x: Tensor, graph: GraphTensors, of_x: str = "x") -> None:
    """Check for the dtype of x, which ``of_x`` names."""
    if value.dtype is not x.dtype:
        raise DtypeError(
            f"{name} is {value.dtype} but {of_x} is {x.dtype}{_autocast(graph)}: give both in one "
            f"dtype, {name}.to({x.dtype}) for instance."
        )


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
    if feat is not None:
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

    kind = Tensor
    floats = frozenset(FLOATING)
    layout = torch.strided

    def cast(self, op: Op, A: Any, args: dict[str, Any]) -> dict[str, Any]:
        """Cast arguments as autocast does before the operation."""
        if not torch.is_autocast_enabled(A.kind):
            return args
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

    def check(self, name: str, value: Any, arg: Arg, A: Any, size: int, like: Named | None) -> Any:
        """Check an argument that needs ``size`` rows; raise what is wrong."""
        return getattr(self, arg.check)(name, value, arg, A, size, like)

    def features(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named | None
    ) -> Any:
        """Check for (size, feat) or (size, heads, feat)."""
        tensor(name, value)
        floating_on_device(name, value, A)
        if 3 not in arg.axes:
            two_axes(name, value)
        axis = "rows" if arg.rows == "rows" else "columns"
        features(name, value, rows=size, axis=axis, graph=A)
        if value.dim() > 3:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}: give (rows, heads, feat), "
                f"{name}.flatten(2) for instance."
            )
        return self.alike(name, value, arg, A, like)

    def alike(self, name: str, value: Tensor, arg: Arg, A: GraphTensors, like: Named | None) -> Any:
        """Check for the dtype, and the shape behind the rows, of another argument."""
        if like is None:
            return value
        _same_dtype(name, value, like[1], A, like[0])
        if arg.behind and value.shape[1:] != like[1].shape[1:]:
            wrong, other = tuple(value.shape), tuple(like[1].shape)
            text = f"{name} has shape {wrong} and {like[0]} {other}: give both as many heads, and "
            text += "features of each."
            if arg.axes == (2,):
                text = f"{name} has {wrong[1]} features but {like[0]} has {other[1]}: give both "
                text += "the same, by a linear layer for instance."
            elif like[0] == "x":  # of dot products
                text = f"x has shape {other} and {name} {wrong}: give (n_rows, feat) and (n_cols, "
                text += "feat), or (n_rows, heads, feat) and (n_cols, heads, feat)."
            raise ShapeError(text)
        return value

    def factor(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named | None
    ) -> Any:
        """Check for one factor of each row or column."""
        if like is not None:
            what = "rows" if arg.rows == "rows" else "columns"
            vector(name, value, length=size, what=what, x=like[1], graph=A)
        return value

    def entries(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named | None
    ) -> Any:
        """Check for one value, or a row of them, at each stored entry."""
        tensor(name, value)
        if arg.alike == "dtype" and like is not None:
            if value.dim() == 2 and 2 in arg.axes:
                of_heads(name, value, A, like[1])
            else:
                vector(name, value, length=size, what="stored entries", x=like[1], graph=A)
            return value
        floating_on_device(name, value, A)
        if value.dim() not in arg.axes or value.shape[0] != size:
            shapes = f"({size},) or ({size}, heads)" if 1 in arg.axes else f"({size}, feat)"
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)} but the graph stores {size} entries: "
                f"give {shapes}."
            )
        return self.alike(name, value, arg, A, like)

    def scores(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named | None
    ) -> Any:
        """Check for one score of each head; float32 will do beside 2-byte features."""
        tensor(name, value)
        floating_on_device(name, value, A)
        if like is None:
            return value
        heads = tuple(like[1].shape[arg.behind])
        shapes = [(size,), (size, 1)] if heads in ((), (1,)) else [(size, *heads)]
        return self._shaped(
            name, value, shapes, f"one score per {ENDS[arg.rows]} and head", A, like
        )

    def vectors(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named
    ) -> Any:
        """Check for one vector of each head; its heads may follow one more axis, as in PyG."""
        tensor(name, value)
        floating_on_device(name, value, A)
        row = tuple(like[1].shape[1:])
        return self._shaped(name, value, [row, (1, *row)], "one vector per head", A, like)

    def _shaped(
        self, name: str, value: Tensor, shapes: list[Any], what: str, A: GraphTensors, like: Named
    ) -> Any:
        """Check for one of two shapes, and the dtype of others or float32 beside 2 bytes."""
        other, x = like
        # Not ``in``, which dynamo answers without a look at symbolic sizes.
        if value.shape != shapes[0] and value.shape != shapes[-1]:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}: give {shapes[0]}, {what} ({other}.shape "
                f"== {tuple(x.shape)}, graph.shape == {(A.n_rows, A.n_cols)}, graph.nnz == "
                f"{A.nnz})."
            )
        if not (x.dtype.itemsize == 2 and value.dtype is torch.float32):
            _same_dtype(name, value, x, A, other)
        return value

    def balanced(
        self, name: str, value: Any, arg: Arg, A: GraphTensors, size: int, like: Named | None
    ) -> Any:
        """Return it: tensors have no class for row-balanced features."""
        return value


TENSORS = Tensors()
register_library(GraphTensors, TENSORS)
