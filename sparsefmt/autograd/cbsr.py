"""MaxK, and the products of a graph with the features that it chooses.

Those are ``columns``, which have no gradient, and ``data``, both (n, k), as in a CBSR.  With the
columns fixed, ``sum_e r[i] a[e] c[j] <grad[i], data[j]>`` is linear in each factor, and its
gradient in any of them is again one of the functions here: all can be differentiated any number of
times.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import dropout as drop

from ..errors import ShapeError
from ..ops.cbsr.api import REDUCTIONS
from ..ops.engine.bind import word
from .engine import checks as _check
from .engine.library import LibraryOp, narrowed
from .engine.recording import recorded, taped
from .matmul import Factors, csr_operands, factor_gradients, multiply, restored, scaled
from .tensors.prepare import GraphLike, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors

MAXK = LibraryOp("maxk")
CBSR_TO_DENSE = LibraryOp("cbsr_to_dense")
DENSE_TO_CBSR = LibraryOp("dense_to_cbsr")
SPGEMM = LibraryOp("spgemm")
SSPMM = LibraryOp("sspmm")
SSPMM_OUTER = LibraryOp("sspmm_outer")
SDDMM_CBSR = LibraryOp("sddmm_cbsr")


class Largest(NamedTuple):
    """The ``k`` largest features of each row: columns and values, (n, k), of ``feat`` columns."""

    columns: Tensor
    data: Tensor
    feat: int

    def dense(self) -> Tensor:
        """Convert the features to a dense tensor, (n, feat), 0 where none was kept."""
        return to_dense(self.columns, self.data, self.feat)


def keep_largest(x: Tensor, k: int, dropout: float = 0.0) -> Largest:
    """Keep the ``k`` largest features of each row; set a share of what is kept to 0."""
    _check.tensor("x", x)
    x = narrowed(x.device.type, x)[0]
    columns, data = choose_features(x, _check.checked_k(k, x.shape[1]))
    return Largest(columns, drop(data, dropout) if dropout else data, x.shape[1])


def largest_operands(
    graph: GraphLike,
    x: Tensor | Largest,
    k: int | None,
    edge_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> tuple[GraphTensors, Largest, list[Tensor | None]]:
    """Check the operands of a product, and keep ``k`` features of each row where ``x`` is dense.

    Returns the graph's tensors, the features, and the factors in the order of the arguments.
    """
    of_vertices = x.data if isinstance(x, Largest) else x
    tensors = tensors_of(graph, of_vertices)
    data, *factors = csr_operands(tensors, of_vertices, edge_weight, row_scale, col_scale)
    if isinstance(x, Largest):
        return tensors, x._replace(data=data), factors
    feat = data.shape[1]
    return tensors, Largest(*choose_features(data, _check.checked_k(k, feat)), feat), factors


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
    if x.dim() != 2:
        mend = "x[:, None]" if x.dim() < 2 else "x.flatten(1) where rows come first"
        raise ShapeError(f"x has shape {tuple(x.shape)}: give (rows, feat), {mend} for instance.")
    columns, data = choose_features(x, _check.checked_k(k, x.shape[1]))
    return to_dense(columns, data, x.shape[1])


def maxk_aggregate(
    graph: GraphLike,
    x: Tensor | Largest,
    k: int | None,
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
        As for ``spmm``; ``x`` may be what ``keep_largest`` has kept.
    k : int
        Between 1 and ``feat``; ties and NaN as in ``maxk``.  None where ``x`` was kept before.
    reduce : "sum" or "mean"
        ``mean`` divides by the number of entries of the row.

    Returns
    -------
    Tensor, shape (n_rows, feat)
        Dense, in the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm`` and ``maxk``.

    Notes
    -----
    All four tensors have gradients, differentiable any number of times; those of ``x`` are 0 where
    a feature was not kept.  On a GPU the gradient of ``x`` adds up by atomics, in no fixed order,
    unless ``torch.use_deterministic_algorithms(True)``, which is slower where k is small; all else
    is deterministic.  What an implicit zero of ``maxk(x, k)`` meets, Inf or NaN, adds nothing.  For
    the gradient of ``x`` only the columns are saved, ``n_cols * k`` bytes up to 256 features; for
    those of the others, the values too.  Autocast narrows before the choice is made.

    Without weights and ``col_scale`` a GPU multiplies dense features where that was measured to be
    faster: float32 with k > 64 and k >= feat / 4, 2-byte dtypes with k >= 64 and k >= feat / 8.
    This takes the memory of dense features and of their gradient, and backward the transpose.
    MaxK-GNN (ASPLOS'24), sections 3 and 4.
    """
    if type(reduce) is not str or reduce not in REDUCTIONS:
        word("reduce", reduce, REDUCTIONS)
    if isinstance(graph, Shared) and graph.complete is None:
        scales = {"row_scale": row_scale, "col_scale": col_scale}
        return graph.maxk_aggregate(x, k, edge_weight, reduce=reduce, **scales)
    operands = largest_operands(graph, x, k, edge_weight, row_scale, col_scale)
    tensors, largest, factors = operands
    return spgemm(tensors, *largest, *factors, reduce=reduce)


def features_to_keep(k: int, feat: int | None = None) -> int:
    """Check how many features of each row MaxK keeps, before there are features."""
    return _check.checked_k(k, feat)


def choose_features(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose the ``k`` largest of each row: columns and values; nothing is checked."""
    run: Any = _Maxk.apply if recorded(x) else MAXK
    columns, data = run(x, k)
    return columns, data


class _Maxk(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        columns, data = MAXK(x, k)
        ctx.mark_non_differentiable(columns)
        ctx.set_materialize_grads(False)  # of the columns
        ctx.save_for_backward(columns)
        ctx.feat = x.shape[1]
        return columns, data

    @staticmethod
    def backward(ctx: Any, _: None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (columns,) = ctx.saved_tensors
        return None if grad is None else to_dense(columns, grad, ctx.feat), None


def to_dense(columns: Tensor, data: Tensor, feat: int) -> Tensor:
    """Convert row-balanced features to dense ones, (n, feat), 0 at the columns not chosen."""
    run: Any = _ToDense.apply if recorded(data) else CBSR_TO_DENSE
    x: Tensor = run(columns, data, feat)
    return x


class _ToDense(Function):
    @staticmethod
    def forward(ctx: Any, columns: Tensor, data: Tensor, feat: int) -> Tensor:
        ctx.save_for_backward(columns)
        x: Tensor = CBSR_TO_DENSE(columns, data, feat)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (columns,) = ctx.saved_tensors
        return None, from_dense(grad, columns), None


def from_dense(x: Tensor, columns: Tensor) -> Tensor:
    """Return the values of ``x``, (n, feat), at the columns: (n, k)."""
    run: Any = _FromDense.apply if recorded(x) else DENSE_TO_CBSR
    data: Tensor = run(x, columns)
    return data


class _FromDense(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(columns)
        ctx.feat = x.shape[1]
        data: Tensor = DENSE_TO_CBSR(x, columns)
        return data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (columns,) = ctx.saved_tensors
        return to_dense(columns, grad, ctx.feat), None


def spgemm(
    tensors: GraphTensors,
    columns: Tensor,
    data: Tensor,
    feat: int,
    *factors: Tensor | None,
    reduce: str = "sum",
) -> Tensor:
    """Multiply the graph with row-balanced features: (n_rows, feat); nothing is checked.

    ``factors`` are edge values, and the scales of rows and columns.
    """
    values, rows, cols = factors
    if data.shape[1] >= 64 and values is None and cols is None and dense_is_faster(data, feat):
        # Without factors no zero meets Inf: it is added, not multiplied.
        dense = to_dense(columns, data, feat)
        return multiply(tensors, False, dense, None, rows, None, reduce)
    return taped(_Spgemm, _spgemm, (data, *factors), columns, feat, tensors, reduce)


def dense_is_faster(data: Tensor, feat: int) -> bool:
    """Return True if a dense product takes less time, as measured on an H200; k is 64 at least."""
    k = data.shape[1]
    pays = {2: 8 * k >= feat, 4: k > 64 and 4 * k >= feat}  # by bytes of a value
    return data.is_cuda and pays.get(data.itemsize, False)


def _spgemm(data: Tensor, *args: Any) -> Tensor:
    *factors, columns, feat, tensors, reduce = args
    out: Tensor = SPGEMM(tensors.rows, columns, data, feat, *factors, reduce)
    return out


class _Spgemm(Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, *args: Any) -> Tensor:
        *factors, columns, _, ctx.tensors, ctx.reduce = args
        read = any(ctx.needs_input_grad[1:4])  # only the gradients of factors read it
        ctx.save_for_backward(data if read else None, *factors, columns)
        return _spgemm(data, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (*saved, columns), tensors = ctx.saved_tensors, ctx.tensors.current()
        data, grad, factors = restored(ctx, saved, grad, tensors)
        ddata = None
        if ctx.needs_input_grad[0]:
            ddata = sspmm(tensors, columns, grad, *factors[:3])
        rest = _of_factors(ctx, grad, columns, data, factors)
        return ddata, *rest, None, None, None, None


def sspmm(tensors: GraphTensors, columns: Tensor, grad: Tensor, *factors: Tensor | None) -> Tensor:
    """Multiply the transpose with ``grad``, at the columns: (n_cols, k); nothing is checked.

    ``factors`` are those of ``spgemm``: the scale of rows has one factor for each row of ``grad``.
    """
    return taped(_Sspmm, _sspmm, (grad, *factors), columns, tensors)


def _sspmm(grad: Tensor, *args: Any) -> Tensor:
    """Run ``sspmm`` without a gradient: by atomics on a GPU, unless they are ruled out."""
    *factors, columns, tensors = args
    out: Tensor
    if grad.is_cuda and not torch.are_deterministic_algorithms_enabled():
        out = SSPMM_OUTER(tensors.rows, columns, grad, *factors)
    else:
        side, (values, *scales) = tensors.columns, factors
        out = SSPMM(side, columns, grad, values, side.perm, *scales)
    return out


class _Sspmm(Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, *args: Any) -> Tensor:
        *factors, columns, ctx.tensors = args
        read = any(ctx.needs_input_grad[1:4])
        ctx.save_for_backward(grad if read else None, *factors, columns)
        ctx.feat, ctx.reduce = grad.shape[1], "sum"
        return _sspmm(grad, *args)

    @staticmethod
    def backward(ctx: Any, data: Tensor) -> tuple[Tensor | None, ...]:
        (*saved, columns), tensors = ctx.saved_tensors, ctx.tensors.current()
        x, data, factors = restored(ctx, saved, data, tensors)
        dgrad = None
        if ctx.needs_input_grad[0]:
            dgrad = spgemm(tensors, columns, data, ctx.feat, *factors[:3])
        return dgrad, *_of_factors(ctx, x, columns, data, factors), None, None


def _of_factors(
    ctx: Any, x: Tensor, columns: Tensor, data: Tensor, factors: Factors
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of edge values and scales: inputs 1 to 3."""
    products = partial(sddmm_cbsr, ctx.tensors, x, columns, data)
    return factor_gradients(ctx.tensors, False, ctx.needs_input_grad[1:4], products, factors)


def sddmm_cbsr(
    tensors: GraphTensors,
    x: Tensor,
    columns: Tensor,
    data: Tensor,
    r: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """Compute ``r[i] c[j] sum_t x[i, columns[j, t]] data[j, t]``: (nnz,); nothing is checked."""
    if recorded(r, c):
        return scaled(tensors, False, sddmm_cbsr(tensors, x, columns, data), r, c)
    return taped(_SddmmCbsr, _sddmm_cbsr, (x, data, r, c), columns, tensors)


def _sddmm_cbsr(x: Tensor, data: Tensor, *args: Any) -> Tensor:
    *scales, columns, tensors = args
    out: Tensor = SDDMM_CBSR(tensors.rows, x, columns, data, *scales)
    return out


class _SddmmCbsr(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor, *args: Any) -> Tensor:
        *scales, columns, ctx.tensors = args
        needs = ctx.needs_input_grad
        saved = x if needs[1] else None, data if needs[0] else None
        ctx.save_for_backward(*saved, *scales, columns)
        ctx.feat = x.shape[1]
        return _sddmm_cbsr(x, data, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, data, *scales, columns), tensors = ctx.saved_tensors, ctx.tensors.current()
        dx = ddata = None
        if ctx.needs_input_grad[0]:
            dx = spgemm(tensors, columns, data, ctx.feat, grad, *scales)
        if ctx.needs_input_grad[1]:
            ddata = sspmm(tensors, columns, x, grad, *scales)
        return dx, ddata, None, None, None, None
