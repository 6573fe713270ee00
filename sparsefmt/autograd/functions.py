"""What users call: checks, autocast, one call into the Functions."""

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from . import _check, _library, cbsr, edges, matmul, propagation
from .structure import GraphLike, given_tensors, order_of


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
    and nothing of the size of the graph; the first backward builds its transpose.  Where the graph
    has tiles (``prepare``), sums and means go to tensor cores, and a copy of ``edge_weight`` in
    their order is made for each product.  Forward-mode derivatives and ``torch.func`` are refused.
    fuseGNN (ICCAD'20), section 3.
    """
    _check.reduction(reduce)
    checked = operands(graph, x, edge_weight, row_scale, col_scale)
    return matmul.spmm(graph, False, *checked, reduce)


def operands(
    graph: GraphLike,
    x: Tensor,
    edge_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Check the operands of a product, and cast them as autocast would.

    Parameters
    ----------
    graph, x, edge_weight, row_scale, col_scale
        As for ``spmm``.

    Returns
    -------
    x, values, row_scale, col_scale : Tensor
        In one dtype, autocast's where it is at work; ``values`` are the graph's own where no
        ``edge_weight`` is given.  None for what there is not.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``, in the names of these arguments.

    Notes
    -----
    For layers that compute with their operands before they aggregate.
    """
    tensors = given_tensors(graph)
    _check.tensor("x", x)
    values = tensors.values if edge_weight is None else edge_weight
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        dtype = _library.autocast_dtype(kind, narrow=True)
        x, values, row_scale, col_scale = (
            _library.cast(each, kind, dtype) for each in (x, values, row_scale, col_scale)
        )
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
    return x, values, row_scale, col_scale


def maxk(x: Tensor, k: int) -> Tensor:
    """Keep the ``k`` largest features of each row and set the others to 0, differentiably.

    ``y[i, f] = x[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere; the gradient goes the
    same way.  Ties go to the lowest column, and NaN counts as the largest value.

    Parameters
    ----------
    x : Tensor, shape (n, feat)
        float16, bfloat16, float32 or float64.  Rows may have any stride.
    k : int
        Between 1 and ``feat``.

    Returns
    -------
    Tensor, shape (n, feat)
        In the dtype of ``x``, also under autocast.

    Raises
    ------
    ShapeError
        If ``x`` is not 2-D or ``k`` lies outside 1 .. feat.
    DtypeError
        If ``x`` holds no floating numbers or ``k`` is no integer.
    UnsupportedError
        If ``x`` is sparse, or it is called within ``torch.func`` or with a tangent.

    Notes
    -----
    Deterministic, differentiable any number of times.  Saves columns only: ``n * k`` bytes up to
    256 features, twice that up to 65 536.  MaxK-GNN (ASPLOS'24), section 3.1.
    """
    _check.tensor("x", x)
    _check.floating("x", x)
    _check.two_axes("x", x)
    columns, kept = cbsr.maxk(x, _check.kept(k, x.shape[1]))
    return cbsr.to_dense(columns, kept, x.shape[1])


def maxk_aggregate(
    graph: GraphLike,
    x: Tensor,
    k: int,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the ``k`` largest features of each vertex's in-neighbours, differentiably.

    ``y[i, f] = r[i] * reduce_e(a[e] * c[j] * maxk(x, k)[j, f])`` over the stored entries
    ``e = (i, j)`` of row ``i``: ``spmm(graph, maxk(x, k), ...)``, but forward and backward read the
    ``k`` features that were kept of a row, and no others.

    Parameters
    ----------
    graph, x, edge_weight, row_scale, col_scale
        As for ``spmm``.
    k : int
        Between 1 and ``feat``; ties and NaN as in ``maxk``.
    reduce : "sum" or "mean"
        ``mean`` divides by the number of entries of the row.

    Returns
    -------
    Tensor, shape (n_rows, feat)
        Dense, in the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together, or ``k`` lies outside 1 .. feat.
    UnsupportedError
        If there is no such ``reduce``, a tensor is sparse, or it is called within ``torch.func`` or
        with a tangent.

    Notes
    -----
    All four tensors have gradients, differentiable any number of times; those of ``x`` are 0 where
    a feature was not kept.  On a GPU the gradient of ``x`` adds up by atomics, in no fixed order,
    unless ``torch.use_deterministic_algorithms(True)``, which is slower where k is small; all else
    is deterministic.  What an implicit zero of ``maxk(x, k)`` meets, Inf or NaN, adds nothing.  For
    the gradient of ``x`` only the columns are saved, ``n_cols * k`` bytes up to 256 features; for
    those of the others, the values too.  Autocast narrows before the choice is made.  MaxK-GNN
    (ASPLOS'24), sections 3 and 4.
    """
    _check.reduction(reduce, _check.REDUCTIONS[:2])
    x, values, r, c = operands(graph, x, edge_weight, row_scale, col_scale)
    k = _check.kept(k, x.shape[1])
    return cbsr.maxk_spgemm(graph, x, k, values, r, c, reduce)


def aggregate_with_own(
    graph: GraphLike,
    x: Tensor,
    own: Tensor,
    edge_weight: Tensor | None = None,
    *,
    k: int | None = None,
    without: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours, and add a part of its own.

    ``y[i, f] = r[i] * sum_e(a[e] * c[j] * s(x)[j, f]) + own[i] * s(x)[i, f]`` over the stored
    entries ``e = (i, j)`` of row ``i``; ``s`` is ``maxk(x, k)``, chosen once for both parts, or
    nothing without ``k``.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, feat)
    own : Tensor, shape (n, 1) or (1,)
        The factor of each vertex's own features, or one for all; floating, on the device of ``x``.
    edge_weight, row_scale, col_scale
        As for ``spmm``.
    k : int, optional
        Features of a row to keep, between 1 and ``feat``; all of them by default.
    without : Tensor, shape (n, 1), bool, optional
        Vertices whose own features add nothing, even where they hold Inf or NaN.

    Returns
    -------
    Tensor, shape (n, feat)
        In the dtype of ``x``, or autocast's; without ``k`` that of ``own`` if it is wider.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm`` and, with ``k``, ``maxk_aggregate``; and if the graph is not square, or ``own``
        or ``without`` not as above.

    Notes
    -----
    All tensors but ``without`` have gradients, differentiable any number of times.  Nothing dense
    is saved for backward where ``k`` is given.  ``nn.GCNConv`` adds loops this way, and
    ``nn.GINConv`` its ``1 + eps``.
    """
    if k is None:
        y = spmm(graph, x, edge_weight, row_scale=row_scale, col_scale=col_scale)
        _check.own_part(own, without, given_tensors(graph))
        return torch.addcmul(y, own, x if without is None else x.masked_fill(without, 0))
    x, values, r, c = operands(graph, x, edge_weight, row_scale, col_scale)
    _check.own_part(own, without, given_tensors(graph))
    feat = x.shape[1]
    columns, kept = cbsr.maxk(x, _check.kept(k, feat))
    y = cbsr.spgemm(graph, columns, kept, feat, values, r, c)
    part = kept if without is None else kept.masked_fill(without, 0)
    return y + cbsr.to_dense(columns, (own * part).to(kept.dtype), feat)


def propagate(
    graph: GraphLike,
    x: Tensor,
    scale: Tensor,
    own: Tensor,
    *,
    without: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Propagate features by symmetric constant factors, as GCN does, in one node of autograd's.

    ``y[i, f] = scale[i] * sum_e(a[e] * scale[j] * x[j, f]) + own[i] * x[i, f] + bias[f]`` over the
    stored entries ``e = (i, j)`` of row ``i``; ``a`` are the graph's own values, or 1.

    Parameters
    ----------
    graph : Graph, shape (n, n)
    x : Tensor, shape (n, feat)
        As for ``spmm``.
    scale : Tensor, shape (n,)
        In the dtype of ``x``.
    own, without
        As for ``aggregate_with_own``.
    bias : Tensor, shape (feat,), optional
        Floating, on the device of ``x``.

    Returns
    -------
    Tensor, shape (n, feat)
        In the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``aggregate_with_own``, or if ``bias`` is not as above.
    UnsupportedError
        As ``spmm``; and if ``scale`` or ``own`` ask for a gradient: ``aggregate_with_own`` has one.

    Notes
    -----
    ``x`` and ``bias`` have gradients, differentiable any number of times; all else is constant.
    Deterministic, backward too.  ``aggregate_with_own`` computes the same in three nodes and as
    many passes over the result.
    """
    x, values, _, _ = operands(graph, x)
    tensors = given_tensors(graph)
    if torch.is_autocast_enabled(tensors.kind):
        scale = _library.cast(scale, tensors.kind, x.dtype)
    _check.vector("scale", scale, length=tensors.n_rows, what="rows", x=x, graph=tensors)
    _check.own_part(own, without, tensors)
    if torch.is_grad_enabled() and (scale.requires_grad or own.requires_grad):
        raise UnsupportedError(
            "scale or own requires a gradient, which propagate does not compute: use "
            "aggregate_with_own, or detach them."
        )
    if bias is not None:
        _check.bias(bias, x, tensors)
        bias = bias.to(x.dtype)
    own = own.to(x.dtype)
    if torch.compiler.is_compiling():  # traced, a Function that writes in place loses its gradients
        y = aggregate_with_own(graph, x, own, without=without, row_scale=scale, col_scale=scale)
        return y if bias is None else y + bias
    return propagation.propagate(graph, x, values, scale, own, without, bias)


def features_to_keep(k: int, feat: int | None = None) -> int:
    """Check how many features of each row MaxK is to keep, before there are features.

    Parameters
    ----------
    k : int
    feat : int, optional
        Features of a row, where that is known.

    Returns
    -------
    int
        ``k``.

    Raises
    ------
    DtypeError
        If ``k`` is no integer.
    ShapeError
        If ``k`` is less than 1, or more than ``feat``.
    """
    return _check.kept(k, feat)


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
    tensors = given_tensors(graph)
    _check.tensor("x", x)
    _check.tensor("y", y)
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        dtype = _library.autocast_dtype(kind, narrow=True)
        x, y = _library.cast(x, kind, dtype), _library.cast(y, kind, dtype)
    _check.features("x", x, rows=tensors.n_rows, axis="rows", graph=tensors)
    _check.features("y", y, rows=tensors.n_cols, axis="columns", graph=tensors)
    _check.pair(x, y, tensors)
    return matmul.sddmm(graph, x, y)


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
    tensors = given_tensors(graph)
    _check.tensor("scores", scores)
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        scores = _library.cast(scores, kind, _library.autocast_dtype(kind, narrow=False))
    _check.scores(scores, tensors)
    return edges.edge_softmax(graph, scores)


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
    tensors = given_tensors(graph)
    _check.tensor("values", values)
    _check.place("values", values, tensors)
    if values.dim() < 1 or values.shape[0] != tensors.nnz:
        raise ShapeError(
            f"values has shape {tuple(values.shape)} but the graph stores {tensors.nnz} entries: "
            "give one value, or row of values, per entry."
        )
    order = order_of(graph)
    return values.clone() if order is None else values.index_select(0, order)
