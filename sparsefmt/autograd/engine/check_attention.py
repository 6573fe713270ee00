"""Check the tensors that attention takes, and cast them as autocast would.

Numbers have the checks of ``ops.attention``.
"""

from typing import Any

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ...ops.attention import score as checks
from ...ops.attention.score import Options
from ...ops.engine import checks as engine_checks
from ..tensors.tensors import GraphTensors
from . import checks as _check
from . import library


def features(name: str, x: Tensor, *, rows: int, axis: str, graph: GraphTensors) -> None:
    """Check features of shape (rows, feat) or (rows, heads, feat)."""
    if (
        isinstance(x, Tensor)
        and 2 <= x.dim() <= 3
        and x.shape[0] == rows
        and x.dtype in _check.FLOATING
        and x.device == graph.device
        and x.layout is torch.strided
    ):
        return
    _check.tensor(name, x)
    _check.features(name, x, rows=rows, axis=axis, graph=graph)
    if x.dim() > 3:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)}: give (rows, heads, feat), {name}.flatten(2) for "
            "instance."
        )


def alike(name: str, x: Tensor, other: str, like: Tensor, graph: GraphTensors) -> None:
    """Check that features have the dtype, the heads and the width of others."""
    _same_dtype(name, x, other, like, graph)
    if x.shape[1:] != like.shape[1:]:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)} and {other} {tuple(like.shape)}: give both as many "
            "heads, and features of each."
        )


def scores(
    name: str, value: Any, *, rows: int, each: str, like: tuple[str, Tensor], graph: GraphTensors
) -> None:
    """Check one score a head for ``each`` source, target or stored entry."""
    x = like[1]
    heads = x.shape[1:-1]
    if _fits(value, (rows, *heads), x, graph):
        return
    shapes = [(rows,), (rows, 1)] if not heads or heads == (1,) else [(rows, *heads)]
    _beside(name, value, shapes, f"one score per {each} and head", like, graph)


def edges(value: Any, *, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    """Check ``edge_scores``, or None for none."""
    if value is not None:
        each = "stored entry"
        scores("edge_scores", value, rows=graph.nnz, each=each, like=like, graph=graph)


def vector(name: str, value: Any, *, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    """Check one vector a head; its heads may follow one more axis, as in PyG."""
    row = like[1].shape[1:]
    if _fits(value, (1, *row), like[1], graph):
        return
    _beside(name, value, [tuple(row), (1, *row)], "one vector per head", like, graph)


def _fits(value: Any, shape: tuple[int, ...], x: Tensor, graph: GraphTensors) -> bool:
    """Tell whether it is what most callers give: of that shape and the features' dtype."""
    return (
        isinstance(value, Tensor)
        and value.shape == shape
        and value.dtype is x.dtype
        and value.device == graph.device
        and value.layout is torch.strided
    )


def _beside(
    name: str,
    value: Any,
    shapes: list[tuple[int, ...]],
    what: str,
    like: tuple[str, Tensor],
    graph: GraphTensors,
) -> None:
    """Check shape and dtype: that of the features, or float32 beside 2 bytes."""
    other, x = like
    _check.tensor(name, value)
    _check.place(name, value, graph)
    # Not ``in``, which dynamo answers without a look at symbolic sizes.
    if value.shape != shapes[0] and value.shape != shapes[-1]:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}: give {shapes[0]}, {what} ({other}.shape == "
            f"{tuple(x.shape)}, graph.shape == {(graph.n_rows, graph.n_cols)}, graph.nnz == "
            f"{graph.nnz})."
        )
    if not (x.dtype.itemsize == 2 and value.dtype is torch.float32):
        _same_dtype(name, value, other, x, graph)


def _same_dtype(name: str, value: Tensor, other: str, like: Tensor, graph: GraphTensors) -> None:
    if value.dtype is not like.dtype:
        cast = " under autocast" if torch.is_autocast_enabled(graph.kind) else ""
        raise DtypeError(
            f"{name} is {value.dtype} but {other} is {like.dtype}{cast}: give both in one dtype, "
            f"{name}.to({like.dtype}) for instance."
        )


def options(
    negative_slope: Any, dropout: Any, seed: Any, self_loops: Any, graph: GraphTensors
) -> Options:
    """Check the numbers, and put the seed on the device of the graph."""
    slope, share, self_loops = numbers(negative_slope, dropout, self_loops)
    if self_loops:
        square("self_loops is True", graph)
    _check.seed(seed, graph)
    drawn = _check.seed_on_device(seed, graph) if share else None
    return Options(drawn, slope, share, self_loops)


def numbers(negative_slope: Any, dropout: Any, self_loops: Any) -> tuple[float, float, bool]:
    """Check the numbers that need no graph, and return them."""
    slope, share = checks.number("negative_slope", negative_slope), checks.share(dropout)
    engine_checks.flag("self_loops", self_loops)
    return slope, share, self_loops


def square(why: str, graph: GraphTensors) -> None:
    """Check that the graph is square; the error tells why it must be."""
    if graph.n_rows != graph.n_cols:
        raise ShapeError(
            f"{why} but the graph has shape {(graph.n_rows, graph.n_cols)}: give a square one."
        )


def autocast(graph: GraphTensors, features: tuple[Any, ...], scores: tuple[Any, ...]) -> Any:
    """Cast features and scores as autocast would; what is no tensor stays for the checks."""
    kind = graph.kind
    if not torch.is_autocast_enabled(kind):
        return features, scores
    narrow, wide = (library.autocast_dtype(kind, narrow=narrow) for narrow in (True, False))
    return (
        tuple(library.cast(value, kind, narrow) for value in features),
        tuple(library.cast(value, kind, wide) for value in scores),
    )
