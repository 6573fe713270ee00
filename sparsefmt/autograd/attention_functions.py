"""What users call for attention: checks, autocast, one call into ``attention``."""

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from . import _check_attention as check
from . import _library, attention
from .structure import GraphLike, GraphTensors, given_tensors


def gat_aggregate(
    graph: GraphLike,
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edge_scores: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by graph attention, differentiably.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] h[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``leaky(el[j, k] + er[i, k] + edge_scores[e, k])``, and ``leaky(z)`` is ``z`` where positive,
    else ``negative_slope * z``.  ``M`` is 0 with probability ``dropout``, else
    ``1 / (1 - dropout)``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``h``.
    h : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.
    el : Tensor, shape (n_cols, heads) or (n_cols,)
        The sources' part of the scores: of the dtype of ``h``, or float32 beside 2 bytes.
    er : Tensor, shape (n_rows, heads) or (n_rows,)
        The targets' part.
    edge_scores : Tensor, shape (nnz, heads) or (nnz,), optional
        The entries' own part, in CSR order: ``edge_values(graph, s)`` leads there.
    negative_slope : float
    dropout : float
        From 0 to less than 1; 0 draws nothing.
    seed : int or Tensor of one int64, optional
        Of ``M``, which depends on it, the entry's number in CSR order and the head alone.  By
        default it is drawn from torch's generator of the device at each call, also at each replay
        of a CUDA graph.
    self_loops : bool
        As if each vertex of a square graph had exactly one loop: stored entries with ``i == j`` are
        left out, and each row has one more entry ``(i, i)``, without a part of its own.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``h``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError
        If rows, columns or heads do not fit together, ``dropout`` lies outside its range, ``seed``
        is not one integer, or ``self_loops`` is asked of a graph that is not square.
    DtypeError, DeviceError
        If dtypes or devices do not fit together, or an argument is of another kind.
    UnsupportedError
        If a tensor is sparse, it is called within ``torch.func`` or with a tangent or, in backward,
        its gradient is differentiated again.

    Notes
    -----
    ``h``, ``el``, ``er`` and ``edge_scores`` have gradients.  Deterministic, backward too.  For
    backward ``h``, the result, the part of it whose scores are positive, and six numbers for each
    row and head are kept, and nothing of the size of the entries; only the gradient of
    ``edge_scores`` allocates that.  It is made of products rounded to the dtype of ``h``.  Autocast
    narrows ``h`` and takes scores in float32.  ``M`` is by Philox4x32-10, as in ``ops.gat``.
    GAT (ICLR'18), equations 1 to 4; fuseGNN (ICCAD'20), section 3.
    """
    tensors = given_tensors(graph)
    (h,), (el, er, edge_scores) = _cast(tensors, (h,), (el, er, edge_scores))
    check.features("h", h, rows=tensors.n_cols, axis="columns", graph=tensors)
    like = ("h", h)
    check.scores("el", el, rows=tensors.n_cols, each="source", like=like, graph=tensors)
    check.scores("er", er, rows=tensors.n_rows, each="target", like=like, graph=tensors)
    _check_edges(edge_scores, like=like, graph=tensors)
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    return attention.gat(graph, h, el, er, edge_scores, None, options)


def gat_of_vectors(
    graph: GraphLike,
    h: Tensor,
    source: Tensor,
    target: Tensor,
    edge_scores: Tensor | None = None,
    loop_scores: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """``gat_aggregate`` with ``el = <h, source>`` and ``er = <h, target>``, on a square graph.

    The vectors are (heads, feat) or (1, heads, feat); ``loop_scores`` of (n, heads) or (n,) are the
    edge scores of the loops that ``self_loops`` makes, refused with UnsupportedError without it;
    ``bias``, shaped as a vector, is added to each row.
    """
    tensors = given_tensors(graph)
    if loop_scores is not None and self_loops is False:
        raise UnsupportedError(
            "loop_scores are given but self_loops is False: there are no loops whose scores they "
            "were, give self_loops=True or leave them out."
        )
    narrow, wide = (h, source, target, bias), (edge_scores, loop_scores)
    (h, source, target, bias), (edge_scores, loop_scores) = _cast(tensors, narrow, wide)
    check.features("h", h, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.square("h is of sources and targets", tensors)
    like = ("h", h)
    check.vector("source", source, like=like, graph=tensors)
    check.vector("target", target, like=like, graph=tensors)
    if bias is not None:
        check.vector("bias", bias, like=like, graph=tensors)
    _check_edges(edge_scores, like=like, graph=tensors)
    if loop_scores is not None:
        check.scores(
            "loop_scores", loop_scores, rows=tensors.n_rows, each="vertex", like=like, graph=tensors
        )
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    scores = source, target, edge_scores, loop_scores
    return attention.gat_of_vectors(graph, h, *scores, options, bias)


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
