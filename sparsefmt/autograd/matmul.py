"""Products of a graph with features, and dot products at its entries, with their gradients.

Public functions take edge values in the user's order and move them to that of the graph's CSR,
where everything else here works: the transposed product reads them through a permutation, and the
sddmm of the transpose is that of the graph with its features exchanged.  So every gradient of sums
and means is again a function of this file; those of max and min cannot be differentiated again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.engine.bind import bind, word
from ..ops.engine.table import SCALES, Op
from ..ops.matmul.api import REDUCTIONS, summed
from .engine.checks import TENSORS
from .engine.library import LibraryOp
from .engine.recording import Ctx, apart, once_differentiable, recorded, taped
from .tensors.order import in_csr_order, in_own_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors, Side

SPMM = LibraryOp("spmm")
AGGREGATE_BACKWARD = LibraryOp("aggregate_backward")
SPMM_ARG = LibraryOp("spmm_arg")
SPMM_ARG_DX = LibraryOp("spmm_arg_dx")
SPMM_ARG_DA = LibraryOp("spmm_arg_da")
SDDMM = LibraryOp("sddmm")
#: Entries, and bytes of a row of features, beyond which a gather of the values costs less than the
#: permutation in the product's kernel, as measured on an H200.
_MANY, _WIDE = 2 * 2**20, 256
#: The error of a max or min that is differentiated twice.
_NOT_AGAIN = (
    "reduce is {name!r}, whose gradient cannot be differentiated again: use "
    'reduce="sum" or "mean", or do without create_graph=True.'
)
#: Features, edge values, and the scales of rows and columns.
Operands: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


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
    the reduction, so that a negative one turns a max into the smallest value.  With heads
    ``y[i, h, f] = r[i] * reduce_e(a[e, h] * c[j] * x[j, h, f])``, in one launch.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        On the device of ``x``.  Or PyG's ``edge_index``, a tensor of integers and shape (2, nnz):
        its graph of as many rows and columns as ``x`` has rows is made once, and remembered until
        the tensor is changed or gone.  So in all functions and layers, where graphs are taken.
    x : Tensor, shape (n_cols, feat) or (n_cols, heads, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.  Rows may have any stride.
    edge_weight : Tensor, shape (nnz,) or (nnz, heads), optional
        ``a`` in the order of ``graph.structure``: that in which the edges were given.  By default
        the graph's own values, as constants, and 1 for an unweighted graph.  Weights of heads take
        a sum or mean, of features of each head, or of shape (n_cols, feat) of all.
    reduce : "sum", "mean", "max" or "min"
        In a max or min NaN wins, and of equal ones the first entry, which gets the gradient.
    row_scale, col_scale : Tensor, shape (n_rows,) and (n_cols,), optional
        ``r`` and ``c``, in the dtype of ``x``.

    Returns
    -------
    Tensor, shape (n_rows, feat) or (n_rows, heads, feat)
        In the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.
    UnsupportedError
        If there is no such ``reduce``, weights of heads come with "max" or "min", a tensor is
        sparse, it is called within ``torch.func`` or with a tangent or, in backward, the gradient
        of a max or min is differentiated again.

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
    if type(reduce) is not str or reduce not in REDUCTIONS:
        word("reduce", reduce, REDUCTIONS)
    if isinstance(graph, Shared) and graph.complete is None:
        scales = {"row_scale": row_scale, "col_scale": col_scale}
        return graph.spmm(x, edge_weight, reduce=reduce, **scales)
    tensors = tensors_of(graph, x)
    of_heads = edge_weight is not None and getattr(edge_weight, "ndim", 1) == 2
    if of_heads:
        summed(reduce)
    x, a, r, c = csr_operands(tensors, x, edge_weight, row_scale, col_scale, SPMM.row)
    if of_heads or x.dim() == 2:
        return multiply(tensors, False, x, a, r, c, reduce)
    out = multiply(tensors, False, x.flatten(1), a, r, c, reduce)  # all heads have the same
    return out.view(out.shape[0], *x.shape[1:])


def operands(
    graph: GraphLike,
    x: Tensor,
    edge_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Operands:
    """Check the operands of ``spmm``, and cast them as autocast would.

    Without ``edge_weight`` the values are the graph's own; they stay in the user's order.
    """
    if isinstance(graph, Shared) and graph.complete is None:
        return graph.operands(x, edge_weight, row_scale, col_scale)
    tensors = tensors_of(graph, x)
    args = {"edge_weight": edge_weight, "row_scale": row_scale, "col_scale": col_scale}
    _, x, values, r, c = bind(SPMM_ARG.row, tensors, x=x, **args)
    return x, in_own_order(tensors, values) if edge_weight is None else values, r, c


def csr_operands(
    tensors: GraphTensors,
    x: Tensor,
    edge_weight: Tensor | None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    row: Op = SPMM_ARG.row,
) -> Operands:
    """Check and cast operands by a row of the table, and move the values to CSR order."""
    args = {"edge_weight": edge_weight, "row_scale": row_scale, "col_scale": col_scale}
    _, x, values, r, c = bind(row, tensors, x=x, **args)
    moves = edge_weight is not None and tensors.order is not None
    return x, in_csr_order(tensors, values) if moves else values, r, c


def check_scales(
    tensors: GraphTensors, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> None:
    """Check for one factor for each row and column, in the dtype of the features."""
    sizes = tensors.n_rows, tensors.n_cols
    for arg, scale, size in zip(SCALES, (row_scale, col_scale), sizes, strict=True):
        if scale is not None:
            TENSORS.check(arg.name, scale, arg, tensors, size, ("x", x))


def multiply(
    tensors: GraphTensors,
    transposed: bool,
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str = "sum",
) -> Tensor:
    """Multiply the graph or its transpose with features, differentiably; nothing is checked.

    Features of shape (n, heads, feat) come with values of shape (nnz, heads), in a sum or mean; so
    may those of shape (n, feat), which all heads have then.
    """
    inputs: tuple[Tensor | None, ...] = x, values, row_scale, col_scale
    if not recorded(*inputs):
        side = tensors.columns if transposed else tensors.rows
        return aggregated(side, x, values, row_scale, col_scale, reduce)
    function: Any = _Spmm if reduce in ("sum", "mean") else _SpmmArg
    if torch.compiler.is_compiling():
        inputs = apart(*inputs)
    out: Tensor = function.apply(*inputs, tensors, transposed, reduce)
    return out


def aggregated(side: Side, x: Tensor, values: Tensor | None, *options: Any) -> Tensor:
    """Multiply as ``multiply`` does, without autograd; ``options`` are its last three arguments."""
    perm = None if values is None else side.perm
    if values is not None and perm is not None and x.is_cuda:
        if values.shape[0] > _MANY or x.shape[-1] * x.element_size() > _WIDE:
            values, perm = values.index_select(0, perm), None
    result: Tensor = SPMM(side, x, values, perm, *options)
    return result


class _Spmm(Function):
    """A sum or mean over the entries of each row."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, *args: Any) -> Tensor:
        *factors, tensors, ctx.transposed, ctx.reduce = args
        read = any(ctx.needs_input_grad[1:4])  # only the gradients of factors read x
        ctx.save_for_backward(x if read else None, *factors)
        ctx.tensors, values = tensors, factors[0]
        ctx.of_heads = values is not None and values.dim() == 2
        ctx.shared = ctx.of_heads and x.dim() == 2
        side = tensors.columns if ctx.transposed else tensors.rows
        return aggregated(side, x, *factors, ctx.reduce)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, transposed, needs = ctx.tensors.current(), ctx.transposed, ctx.needs_input_grad
        x, grad, factors = restored(ctx, ctx.saved_tensors, grad, tensors, transposed)
        values, rows, cols, _ = factors
        both = needs[0] and needs[1] and not any(needs[2:4]) and not ctx.of_heads
        if both and not recorded(grad, x, values, rows, cols):
            side = tensors.rows if transposed else tensors.columns
            # One gather of the gradient's rows serves both: fuseGNN, algorithms 2 and 3.
            dx, dv = AGGREGATE_BACKWARD(side, x, grad, values, side.perm, rows, cols)
            return dx, dv, None, None, None, None, None
        dx = None
        if needs[0]:
            dx = multiply(tensors, not transposed, grad, values, cols, rows)
            dx = dx.sum(1) if ctx.shared else dx
        if ctx.shared and x is not None:
            x = x[:, None].expand(-1, grad.shape[1], -1)

        def products(r: Tensor | None, c: Tensor | None) -> Tensor:
            args = (x, grad, c, r) if transposed else (grad, x, r, c)
            return dot_products(tensors, *args)

        rest = factor_gradients(tensors, transposed, needs[1:4], products, factors)
        return dx, *rest, None, None, None  # autograd casts them to the dtypes of the inputs


class _SpmmArg(Function):
    """A max or min over the entries of each row; the gradient goes to the entries that won."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, *args: Any) -> Tensor:
        *factors, ctx.tensors, _, ctx.reduce = args
        out: Tensor
        out, arg = SPMM_ARG(ctx.tensors.rows, x, *factors, ctx.reduce)
        saved = x if any(ctx.needs_input_grad[1:4]) else None
        ctx.save_for_backward(saved, *factors, arg)
        return out

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *factors, arg = ctx.saved_tensors
        tensors, needs = ctx.tensors.current(), ctx.needs_input_grad
        gradient = partial(once_differentiable, ctx.reduce, refusal=_NOT_AGAIN)
        dx = dv = dr = dc = None
        if needs[0]:
            side = tensors.columns
            dx = gradient(SPMM_ARG_DX, side, side.perm, grad, arg, *factors)
        if needs[1] and not needs[2] and not needs[3]:
            dv = gradient(SPMM_ARG_DA, tensors.rows, x, grad, arg, *factors[1:])
        elif any(needs[1:4]):
            # Sums over rows, for the scales, are not made of values rounded to 2 bytes.
            wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
            x, grad = x.to(wide), grad.to(wide)
            a, r, c = (None if each is None else each.to(wide) for each in factors)
            products = gradient(SPMM_ARG_DA, tensors.rows, x, grad, arg, None, None)
            weighted = products if a is None else products * a
            lost = products == 0  # factors of entries that did not win may be infinite
            if needs[1]:
                dv = scaled(tensors, False, products, r, c).masked_fill(lost, 0)
            if needs[2]:
                shares = scaled(tensors, False, weighted, None, c).masked_fill(lost, 0)
                dr = segment_sums(tensors, False, shares, None, None)
            if needs[3]:
                shares = scaled(tensors, False, weighted, r, None).masked_fill(lost, 0)
                dc = segment_sums(tensors, True, shares, None, None)
        return dx, dv, dr, dc, None, None, None  # autograd casts them to the inputs' dtypes


class Factors(NamedTuple):
    """What multiplies at an entry: its value, and the scales of its row and column."""

    values: Tensor | None
    rows: Tensor | None  #: for a mean divided by the number of the row's entries
    cols: Tensor | None
    inverse: Tensor | None  #: 1 over that number


def restored(
    ctx: Ctx, saved: Any, grad: Tensor, tensors: GraphTensors, transposed: bool = False
) -> tuple[Any, Tensor, Factors]:
    """Return features, gradient and factors in backward's dtypes; ``saved`` are inputs 0 to 3."""
    wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
    inputs = *saved, grad
    # Sums over rows, for the scales, are not made of values that have been rounded to 2 bytes.
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        inputs = tuple(None if tensor is None else tensor.to(wide) for tensor in inputs)
    x, values, rows, cols, grad = inputs
    inverse = None
    if ctx.reduce == "mean":
        inverse = tensors.side(transposed).inverse_degree(wide)
        rows = inverse if rows is None else rows.to(wide) * inverse
    return x, grad, Factors(values, rows, cols, inverse)


def factor_gradients(
    tensors: GraphTensors,
    transposed: bool,
    needs: tuple[bool, ...],
    products: Callable[[Tensor | None, Tensor | None], Tensor],
    factors: Factors,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of edge values and both scales, where ``needs`` is True.

    ``products(r, c)`` are ``r[i] c[j] <grad[i], x[j]>`` at the entries.
    """
    values, rows, cols, inverse = factors
    if not needs[1] and not needs[2]:
        return products(rows, cols) if needs[0] else None, None, None
    dots = products(None, None)
    weighted = dots if values is None else dots * values
    if weighted.dim() == 2:  # of heads, which share the scales
        weighted = weighted.sum(1)
    dv = dr = dc = None
    if needs[0]:
        dv = scaled(tensors, transposed, dots, rows, cols)
    if needs[1]:
        dr = segment_sums(tensors, transposed, weighted, inverse, cols)
    if needs[2]:
        dc = segment_sums(tensors, not transposed, weighted, None, rows)
    return dv, dr, dc


def segment_sums(
    tensors: GraphTensors, transposed: bool, values: Tensor, r: Tensor | None, c: Tensor | None
) -> Tensor:
    """Sum ``r[i] values[e] c[j]`` over the entries of each row: (n_rows,)."""
    x = values.new_ones(tensors.side(transposed).n_cols) if c is None else c
    return multiply(tensors, transposed, x[:, None], values, r, None)[:, 0]


def scaled(
    tensors: GraphTensors, transposed: bool, values: Tensor, r: Tensor | None, c: Tensor | None
) -> Tensor:
    """Scale values of entries: ``r[i] values[e] c[j]``, differentiable in all three."""
    if transposed:
        r, c = c, r
    if r is None and c is None:
        return values
    unit = values.new_ones(1)
    r = unit.expand(tensors.rows.indptr.shape[0] - 1) if r is None else r
    c = unit.expand(tensors.rows.n_cols) if c is None else c
    factors = dot_products(tensors, r[:, None], c[:, None])
    return values * (factors if values.dim() == 1 else factors[:, None])


def dot_products(
    tensors: GraphTensors,
    x: Tensor,
    y: Tensor,
    r: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """Compute ``r[i] c[j] <x[i], y[j]>`` at the entries, differentiably; nothing is checked."""
    if recorded(r, c):
        return scaled(tensors, False, dot_products(tensors, x, y), r, c)
    return taped(_Sddmm, _dot_products, (x, y, r, c), tensors)


def _dot_products(
    x: Tensor, y: Tensor, r: Tensor | None, c: Tensor | None, tensors: GraphTensors
) -> Tensor:
    out: Tensor = SDDMM(tensors.rows, x, y, r, c)
    return out


class _Sddmm(Function):
    """Dot products at the entries; the scales have no gradient here."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, y: Tensor, *args: Any) -> Tensor:
        *scales, ctx.tensors = args
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, y if needs[0] else None, *scales)
        return _dot_products(x, y, *args)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, row_scale, col_scale = ctx.saved_tensors
        tensors = ctx.tensors.current()
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = multiply(tensors, False, y, grad, row_scale, col_scale)
        if ctx.needs_input_grad[1]:
            dy = multiply(tensors, True, x, grad, col_scale, row_scale)
        return dx, dy, None, None, None
