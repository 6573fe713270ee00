"""Check the tensors that attention takes, by the description of its scores, and cast them.

Numbers have the checks of ``ops.attention``.
"""

from typing import Any

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ...ops.attention import score
from ...ops.attention.score import OF_VECTORS, Options, Score
from ...ops.engine import checks as engine_checks
from ..tensors.tensors import GraphTensors
from . import checks as _check
from . import library


def operands(
    kind: Score, graph: GraphTensors, values: tuple[Any, ...], edges: Any, loops: Any = None
) -> list[Any]:
    """Check operands and the scores of entries and loops; return all, cast as autocast would."""
    values, device = [*values, edges, loops], graph.kind  # type: ignore[assignment]
    if torch.is_autocast_enabled(device):
        narrow, wide = (library.autocast_dtype(device, narrow=narrow) for narrow in (True, False))
        narrowed = [kind is OF_VECTORS or each.kind == "features" for each in kind]
        dtypes = [narrow if each else wide for each in (*narrowed, False, False)]
        values = [library.cast(*pair, device) for pair in zip(values, dtypes, strict=True)]  # type: ignore[assignment]
    *given, edges, loops = values
    like = kind[0].name.lower(), given[0]
    _features(*like, rows=graph.n_cols, axis="columns", graph=graph)
    if kind is OF_VECTORS:
        square("h is of sources and targets", graph)
    for (name, what, end), value in zip(kind[1:], given[1:], strict=True):
        rows, axis = (graph.n_rows, "rows") if end == "target" else (graph.n_cols, "columns")
        if what == "scores":
            _scores(name, value, rows, f"one score per {end} and head", like, graph)
        elif value is None and name in ("values", "bias"):
            pass
        elif what == "vectors":
            _vector(name, value, like, graph)
        else:
            _features(name, value, rows=rows, axis=axis, graph=graph)
            _alike(name, value, like, graph)
    if edges is not None:
        what = "one score per stored entry and head"
        _scores("edge_scores", edges, graph.nnz, what, like, graph)
    if loops is not None:
        _scores("loop_scores", loops, graph.n_rows, "one score per vertex and head", like, graph)
    return values  # type: ignore[return-value]


def _features(name: str, x: Tensor, *, rows: int, axis: str, graph: GraphTensors) -> None:
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


def _alike(name: str, x: Tensor, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    """Check that features have the dtype, the heads and the width of others."""
    _same_dtype(name, x, like, graph)
    other, y = like
    if x.shape[1:] != y.shape[1:]:
        raise ShapeError(
            f"{name} has shape {tuple(x.shape)} and {other} {tuple(y.shape)}: give both as many "
            "heads, and features of each."
        )


def _scores(
    name: str, value: Any, rows: int, what: str, like: tuple[str, Tensor], graph: GraphTensors
) -> None:
    """Check one score a head for each source, target or stored entry."""
    heads = like[1].shape[1:-1]
    if not _fits(value, (rows, *heads), like[1], graph):
        shapes = [(rows,), (rows, 1)] if not heads or heads == (1,) else [(rows, *heads)]
        _beside(name, value, shapes, what, like, graph)


def _vector(name: str, value: Any, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    """Check one vector a head; its heads may follow one more axis, as in PyG."""
    row = like[1].shape[1:]
    if not _fits(value, (1, *row), like[1], graph):
        _beside(name, value, [tuple(row), (1, *row)], "one vector per head", like, graph)


def _fits(value: Any, shape: tuple[int, ...], x: Tensor, graph: GraphTensors) -> bool:
    """Return True for what most callers give: that shape, and the dtype of the features."""
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
        _same_dtype(name, value, like, graph)


def _same_dtype(name: str, value: Tensor, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    other, x = like
    if value.dtype is not x.dtype:
        cast = " under autocast" if torch.is_autocast_enabled(graph.kind) else ""
        raise DtypeError(
            f"{name} is {value.dtype} but {other} is {x.dtype}{cast}: give both in one dtype, "
            f"{name}.to({x.dtype}) for instance."
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
    slope, share = score.number("negative_slope", negative_slope), score.share(dropout)
    engine_checks.flag("self_loops", self_loops)
    return slope, share, self_loops


def square(why: str, graph: GraphTensors) -> None:
    """Check that the graph is square; the error tells why it must be."""
    if graph.n_rows != graph.n_cols:
        raise ShapeError(
            f"{why} but the graph has shape {(graph.n_rows, graph.n_cols)}: give a square one."
        )
