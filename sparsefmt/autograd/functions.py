"""What users call: checks, autocast, one call into ``gradients``."""

import torch
from torch import Tensor

from ..errors import ShapeError
from ..graph import Graph
from . import _check, bridge, gradients
from .structure import GraphLike, GraphTensors, order_of, tensors_of, wrong_graph


def spmm(
    graph: GraphLike,
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours, differentiably.

    ``y[i, f] = r[i] * reduce_e(a[e] * c[j] * x[j, f])`` over the stored entries ``e = (i, j)`` of
    row ``i``; 0 for a row without any.  ``mean`` divides by their number.  ``r`` multiplies after
    the reduction, so that a negative one turns a max into the smallest value.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        On the device of ``x``.
    x : Tensor, shape (n_cols, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.  Rows may have any stride.
    edge_weight : Tensor, shape (nnz,), optional
        ``a`` in CSR order: ``edge_values(graph, w)`` leads there from the order in which the edges
        were given.  By default the graph's own values, as constants, and 1 for
        an unweighted graph.
    reduce : "sum", "mean", "max" or "min"
        In a max or min NaN wins, and of equal ones the first entry, which gets the gradient.
    row_scale, col_scale : Tensor, shape (n_rows,) and (n_cols,), optional
        ``r`` and ``c``, in the dtype of ``x``.

    Returns
    -------
    Tensor, shape (n_rows, feat)
        In the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.
    UnsupportedError
        If there is no such ``reduce``, a tensor is sparse, it is called within ``torch.func`` or
        with a tangent or, in backward, the gradient of a max or min is differentiated again.

    Notes
    -----
    All four tensors have gradients, computed only where they are asked for; those of sum and mean
    are differentiable any number of times.  Deterministic, backward too.  On a GPU, with
    ``edge_weight`` but no scale that has a gradient, forward and backward allocate their results
    and nothing of the size of the graph; the first backward builds its transpose.  Forward-mode
    derivatives and ``torch.func`` are refused.  fuseGNN (ICCAD'20), section 3.
    """
    tensors = _tensors(graph)
    _check.tensor("x", x)
    values = tensors.values if edge_weight is None else edge_weight
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        dtype = bridge.autocast_dtype(kind, narrow=True)
        x, values, row_scale, col_scale = (
            bridge.cast(each, kind, dtype) for each in (x, values, row_scale, col_scale)
        )
    _check.reduction(reduce)
    _check.matrix("x", x, rows=tensors.n_cols, axis="columns", graph=tensors)
    if edge_weight is not None:
        _check.vector(
            "edge_weight", values, length=tensors.nnz, what="stored entries", x=x, graph=tensors
        )
    elif values is not None:
        _check.own_values(values, x, tensors)
    if row_scale is not None:
        length = tensors.n_rows
        _check.vector("row_scale", row_scale, length=length, what="rows", x=x, graph=tensors)
    if col_scale is not None:
        length = tensors.n_cols
        _check.vector("col_scale", col_scale, length=length, what="columns", x=x, graph=tensors)
    return gradients.spmm(graph, False, x, values, row_scale, col_scale, reduce)


def sddmm(graph: GraphLike, x: Tensor, y: Tensor) -> Tensor:
    """Dot products of feature rows at the stored entries of the graph, differentiably.

    ``s[e] = sum_f x[i, f] * y[j, f]`` for the stored entry ``e = (i, j)``, in CSR order; with heads
    ``s[e, h] = sum_f x[i, h, f] * y[j, h, f]``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.
    x, y : Tensor, shape (n_rows, feat) and (n_cols, feat), or with heads between
        One dtype: float16 or bfloat16 (summed in float32), float32 or float64.

    Returns
    -------
    Tensor, shape (nnz,) or (nnz, heads)

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        If the arguments do not fit together, or a tensor is sparse.

    Notes
    -----
    Deterministic, differentiable any number of times.  TC-GNN (ATC'23), section 2.1, equation 3.
    """
    tensors = _tensors(graph)
    _check.tensor("x", x)
    _check.tensor("y", y)
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        dtype = bridge.autocast_dtype(kind, narrow=True)
        x, y = bridge.cast(x, kind, dtype), bridge.cast(y, kind, dtype)
    _check.features("x", x, rows=tensors.n_rows, axis="rows", graph=tensors)
    _check.features("y", y, rows=tensors.n_cols, axis="columns", graph=tensors)
    _check.pair(x, y, tensors)
    return gradients.sddmm(graph, x, y)


def edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    """Softmax of the scores over the stored entries of each row, differentiably.

    ``p[e] = exp(s[e] - m) / sum_e' exp(s[e'] - m)`` over the entries of the row of ``e``, whose
    largest score is ``m``; each head by itself.

    Parameters
    ----------
    graph : Graph
        Only its structure is read.
    scores : Tensor, shape (nnz,) or (nnz, heads)
        In CSR order; float16 or bfloat16 (computed in float32), float32 or float64.

    Returns
    -------
    Tensor, shape (nnz,) or (nnz, heads)
        In the dtype of ``scores``, float32 under autocast.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        If there is not one score, or row of heads, per stored entry, or the tensor is sparse.

    Notes
    -----
    Deterministic, differentiable any number of times.  A row of which all scores are -inf gives
    NaN, as in torch.  GAT (ICLR'18), equation 3.
    """
    tensors = _tensors(graph)
    _check.tensor("scores", scores)
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        scores = bridge.cast(scores, kind, bridge.autocast_dtype(kind, narrow=False))
    _check.scores(scores, tensors)
    return gradients.edge_softmax(graph, scores)


def _tensors(graph: object) -> GraphTensors:
    if not isinstance(graph, (Graph, GraphTensors)):
        raise wrong_graph(graph)
    return tensors_of(graph)


def edge_values(graph: GraphLike, values: Tensor) -> Tensor:
    """Edge values from the order in which the user gave the edges to CSR order, differentiably.

    Parameters
    ----------
    graph : Graph
    values : Tensor, shape (nnz,) or (nnz, ...)
        On the device of the graph.

    Returns
    -------
    Tensor, of the same shape
        ``values[graph.csr_perm]``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If there is not one value, or row of values, per stored entry, on the device of the graph.
    """
    tensors = _tensors(graph)
    _check.tensor("values", values)
    _check.place("values", values, tensors)
    if values.dim() < 1 or values.shape[0] != tensors.nnz:
        raise ShapeError(
            f"values has shape {tuple(values.shape)} but the graph stores {tensors.nnz} entries: "
            "give one value, or row of values, per entry."
        )
    order = order_of(graph)
    return values.clone() if order is None else values.index_select(0, order)
