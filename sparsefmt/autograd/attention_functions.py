"""What users call for attention: checks, autocast, one call into ``attention``."""

from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError
from . import _check_attention as check
from . import _library, attention
from .structure import GraphLike, GraphTensors, given_tensors


def gatv2_aggregate(
    graph: GraphLike,
    left: Tensor,
    right: Tensor,
    att: Tensor,
    edge_scores: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by GATv2's attention, differentiably.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] left[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``sum_f att[k, f] leaky(left[j, k, f] + right[i, k, f]) + edge_scores[e, k]``; ``leaky`` and
    ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``left``.
    left : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    right : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``left``.
    att : Tensor, shape (heads, feat) or (1, heads, feat), or (feat,) without heads
        In the dtype of ``left``, or float32 beside 2 bytes.
    edge_scores, negative_slope, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``left``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``.

    Notes
    -----
    ``left``, ``right``, ``att`` and ``edge_scores`` have gradients.  Deterministic, backward too.
    For backward the operands, the result and one number for each row and head are kept; scores are
    computed again.  Autocast narrows ``left`` and ``right`` and takes the others in float32.
    GATv2 (ICLR'22), equation 7.
    """
    tensors = given_tensors(graph)
    (left, right), (att, edge_scores) = _cast(tensors, (left, right), (att, edge_scores))
    check.features("left", left, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.features("right", right, rows=tensors.n_rows, axis="rows", graph=tensors)
    check.alike("right", right, "left", left, tensors)
    like = ("left", left)
    check.vector("att", att, like=like, graph=tensors)
    _check_edges(edge_scores, like=like, graph=tensors)
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    return attention.attend(graph, right, left, None, att, edge_scores, 1.0, options)


def dot_aggregate(
    graph: GraphLike,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    edge_scores: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by dot-product attention.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] values[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``scale <queries[i, k], keys[j, k]> + edge_scores[e, k]``; ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``keys``.
    queries : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``keys``.
    keys : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    values : Tensor, of the shape and dtype of ``keys``, optional
        The keys by default.
    scale : float, optional
        ``1 / sqrt(feat)`` by default.
    edge_scores, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``keys``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``; ShapeError also if ``scale`` is not finite.

    Notes
    -----
    All four tensors have gradients.  Deterministic, backward too.  For backward the operands, the
    result and one number for each row and head are kept; scores are computed again.  Autocast
    narrows all but ``edge_scores``.  Transformer (NeurIPS'17), equation 1, over the edges of a
    graph.
    """
    tensors = given_tensors(graph)
    given, (edge_scores,) = _cast(tensors, (queries, keys, values), (edge_scores,))
    queries, keys, values = given
    check.features("keys", keys, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.features("queries", queries, rows=tensors.n_rows, axis="rows", graph=tensors)
    check.alike("queries", queries, "keys", keys, tensors)
    if values is not None:
        check.features("values", values, rows=tensors.n_cols, axis="columns", graph=tensors)
        check.alike("values", values, "keys", keys, tensors)
    _check_edges(edge_scores, like=("keys", keys), graph=tensors)
    factor = 1 / sqrt(max(keys.shape[-1], 1)) if scale is None else _finite("scale", scale)
    options = check.options(0.0, dropout, seed, self_loops, tensors)
    return attention.attend(graph, queries, keys, values, None, edge_scores, factor, options)


def _finite(name: str, value: Any) -> float:
    number = check.number(name, value)
    if not isfinite(number):
        raise ShapeError(f"{name} is {value!r}: give a finite number, or leave it out.")
    return number


def _check_edges(value: Any, *, like: tuple[str, Tensor], graph: GraphTensors) -> None:
    if value is not None:
        check.scores(
            *("edge_scores", value), rows=graph.nnz, each="stored entry", like=like, graph=graph
        )


def _cast(tensors: GraphTensors, features: tuple[Any, ...], scores: tuple[Any, ...]) -> Any:
    """Features and scores as autocast has them; what is no tensor stays for the checks."""
    kind = tensors.kind
    if not torch.is_autocast_enabled(kind):
        return features, scores
    narrow, wide = (_library.autocast_dtype(kind, narrow=one) for one in (True, False))
    return (
        tuple(_library.cast(one, kind, narrow) for one in features),
        tuple(_library.cast(one, kind, wide) for one in scores),
    )
