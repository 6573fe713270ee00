"""``torch.autograd.Function``s around the products, and what they share.

Edge values stay in the order of the graph's CSR throughout: the transposed product reads them
through a permutation, and the sddmm of the transpose is that of the graph with its features
exchanged.  So every gradient is again one of the functions here, and sum, mean and sddmm can be
differentiated any number of times.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ..errors import UnsupportedError
from ._library import LibraryOp
from ._recording import apart, recorded
from .structure import GraphLike, Side, side_of

SPMM = LibraryOp("spmm")
SPMM_ARG = LibraryOp("spmm_arg")
SPMM_ARG_DX = LibraryOp("spmm_arg_dx")
SPMM_ARG_DA = LibraryOp("spmm_arg_da")
AGGREGATE_BACKWARD = LibraryOp("aggregate_backward")
SDDMM = LibraryOp("sddmm")


def spmm(
    graph: GraphLike,
    transposed: bool,
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str = "sum",
) -> Tensor:
    """The product with the graph or its transpose, differentiable; nothing is checked."""
    inputs = x, values, row_scale, col_scale
    if not recorded(*inputs):
        return _spmm(graph, transposed, *inputs, reduce)
    found: Tensor
    if reduce in ("sum", "mean"):
        found = _Spmm.apply(*apart(*inputs), graph, transposed, reduce)  # type: ignore[no-untyped-call]
        return found
    found = _Best.apply(*apart(*inputs), graph, reduce)  # type: ignore[no-untyped-call]
    return found


def _spmm(
    graph: GraphLike,
    transposed: bool,
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> Tensor:
    side = side_of(graph, transposed)
    perm = None if values is None else side.perm
    out: Tensor = SPMM(side, x, values, perm, row_scale, col_scale, reduce)
    return out


class _Spmm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        graph: GraphLike,
        transposed: bool,
        reduce: str,
    ) -> Tensor:
        factors = any(ctx.needs_input_grad[1:4])  # only their gradients read x
        ctx.save_for_backward(x if factors else None, values, row_scale, col_scale)
        ctx.graph, ctx.transposed, ctx.reduce = graph, transposed, reduce
        return _spmm(graph, transposed, x, values, row_scale, col_scale, reduce)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, transposed, needs = ctx.graph, ctx.transposed, ctx.needs_input_grad
        x, grad, factors = restored(ctx, ctx.saved_tensors, grad, side_of(graph, transposed))
        if needs[0] and needs[1] and not any(needs[2:4]) and not recorded(grad, x, *factors[:3]):
            side = side_of(graph, not transposed)
            given = factors.values, side.perm, factors.rows, factors.cols
            # One gather of the gradient's rows serves both: fuseGNN, algorithms 2 and 3.
            dx, dv = AGGREGATE_BACKWARD(side, x, grad, *given)
            return dx, dv, None, None, None, None, None
        dx = None
        if needs[0]:
            dx = spmm(graph, not transposed, grad, factors.values, factors.cols, factors.rows)
        products = partial(_products, graph, transposed, grad, x)
        others = factor_gradients(graph, transposed, needs[1:4], products, factors)
        return dx, *others, None, None, None  # autograd casts them to the dtypes of the inputs


class Factors(NamedTuple):
    """What multiplies at an entry: its value, and the scales of its row and column.

    ``rows`` is divided by the number of the row's entries for a mean, and ``inverse`` is 1 over it.
    """

    values: Tensor | None
    rows: Tensor | None
    cols: Tensor | None
    inverse: Tensor | None


def restored(ctx: Any, saved: Any, grad: Tensor, side: Side) -> tuple[Any, Tensor, Factors]:
    """The features, the gradient of the result and the factors, as backward computes with them.

    ``saved`` are features, values and both scales; inputs 1 to 3 are the last three.
    """
    wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
    given = *saved, grad
    # Sums over rows, for the scales, are not made of values that have been rounded to 2 bytes.
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        given = tuple(None if one is None else one.to(wide) for one in given)
    x, values, rows, cols, grad = given
    inverse = None
    if ctx.reduce == "mean":
        inverse = side.inverse_degree(wide)
        rows = inverse if rows is None else rows.to(wide) * inverse
    return x, grad, Factors(values, rows, cols, inverse)


def factor_gradients(
    graph: GraphLike,
    transposed: bool,
    needs: tuple[bool, ...],
    products: Callable[[Tensor | None, Tensor | None], Tensor],
    factors: Factors,
) -> tuple[Tensor | None, ...]:
    """Gradients of edge values and both scales, where ``needs`` says so.

    ``products(r, c)`` are ``r[i] c[j] <grad[i], x[j]>`` at the entries.
    """
    values, rows, cols, inverse = factors
    if not needs[1] and not needs[2]:
        return products(rows, cols) if needs[0] else None, None, None
    plain = products(None, None)
    weighted = plain if values is None else plain * values
    dv = dr = dc = None
    if needs[0]:
        dv = scaled(graph, transposed, plain, rows, cols)
    if needs[1]:
        dr = segment_sums(graph, transposed, weighted, inverse, cols)
    if needs[2]:
        dc = segment_sums(graph, not transposed, weighted, None, rows)
    return dv, dr, dc


def segment_sums(
    graph: GraphLike,
    transposed: bool,
    values: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """(n_rows,) ``r[i] * sum of values[e] c[j]`` over the entries of each row: width one."""
    n_cols = side_of(graph, transposed).n_cols
    x = values.new_ones(n_cols) if col_scale is None else col_scale
    return spmm(graph, transposed, x[:, None], values, row_scale, None)[:, 0]


def _products(
    graph: GraphLike,
    transposed: bool,
    x: Tensor,
    y: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """``r[i] c[j] <x[i], y[j]>`` at the entries of the graph or its transpose, in CSR order."""
    if transposed:
        x, y, row_scale, col_scale = y, x, col_scale, row_scale
    return sddmm(graph, x, y, row_scale, col_scale)


def scaled(
    graph: GraphLike,
    transposed: bool,
    values: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """``r[i] values[e] c[j]``, differentiable in all three."""
    rows = side_of(graph, False)
    r, c = (col_scale, row_scale) if transposed else (row_scale, col_scale)
    if r is None and c is None:
        return values
    one = values.new_ones(1)
    r = one.expand(rows.indptr.shape[0] - 1) if r is None else r
    c = one.expand(rows.n_cols) if c is None else c
    return values * sddmm(graph, r[:, None], c[:, None])


def sddmm(
    graph: GraphLike,
    x: Tensor,
    y: Tensor,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """``r[i] c[j] <x[i], y[j]>`` at the entries of the graph; nothing is checked."""
    if recorded(row_scale, col_scale):
        return scaled(graph, False, sddmm(graph, x, y), row_scale, col_scale)
    if not recorded(x, y):
        return _sddmm(graph, x, y, row_scale, col_scale)
    found: Tensor = _Sddmm.apply(*apart(x, y, row_scale, col_scale), graph)  # type: ignore[no-untyped-call]
    return found


def _sddmm(
    graph: GraphLike, x: Tensor, y: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    out: Tensor = SDDMM(side_of(graph, False), x, y, row_scale, col_scale)
    return out


class _Sddmm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        graph: GraphLike,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        saved = (x if needs[1] else None, y if needs[0] else None)
        ctx.save_for_backward(*saved, row_scale, col_scale)
        ctx.graph = graph
        return _sddmm(graph, x, y, row_scale, col_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, row_scale, col_scale = ctx.saved_tensors
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = _spmm_of_heads(ctx.graph, False, y, grad, row_scale, col_scale)
        if ctx.needs_input_grad[1]:
            dy = _spmm_of_heads(ctx.graph, True, x, grad, col_scale, row_scale)
        return dx, dy, None, None, None


def _spmm_of_heads(
    graph: GraphLike,
    transposed: bool,
    x: Tensor,
    values: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    if values.dim() == 1:
        return spmm(graph, transposed, x, values, row_scale, col_scale)
    heads = [
        spmm(graph, transposed, x[:, h], values[:, h], row_scale, col_scale)
        for h in range(values.shape[1])
    ]
    if not heads:
        return x.new_zeros(side_of(graph, transposed).indptr.shape[0] - 1, *x.shape[1:])
    return torch.stack(heads, dim=1)


class _Best(Function):
    """max and min: the entries that won have the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor | None,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        graph: GraphLike,
        reduce: str,
    ) -> Tensor:
        side = side_of(graph, False)
        out: Tensor
        out, arg = SPMM_ARG(side, x, values, row_scale, col_scale, reduce)
        kept = x if any(ctx.needs_input_grad[1:4]) else None
        ctx.save_for_backward(kept, values, row_scale, col_scale, arg)
        ctx.graph, ctx.reduce = graph, reduce
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, row_scale, col_scale, arg = ctx.saved_tensors
        graph, needs = ctx.graph, ctx.needs_input_grad
        dx = dv = dr = dc = None
        if needs[0]:
            side = side_of(graph, True)
            args = grad, arg, values, row_scale, col_scale
            dx = _once(SPMM_ARG_DX, ctx.reduce, grad, side, side.perm, *args)
        side = side_of(graph, False)
        if needs[1] and not needs[2] and not needs[3]:
            args = x, grad, arg, row_scale, col_scale
            dv = _once(SPMM_ARG_DA, ctx.reduce, grad, side, *args)
        elif any(needs[1:4]):
            # Sums over rows, for the scales, are not made of values rounded to 2 bytes.
            wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
            x, grad = x.to(wide), grad.to(wide)
            given = values, row_scale, col_scale
            a, r, c = (None if one is None else one.to(wide) for one in given)
            products = _once(SPMM_ARG_DA, ctx.reduce, grad, side, x, grad, arg, None, None)
            weighted = products if a is None else products * a
            if needs[1]:
                dv = _where_won(products, scaled(graph, False, products, r, c))
            if needs[2]:
                shares = _where_won(products, scaled(graph, False, weighted, None, c))
                dr = segment_sums(graph, False, shares, None, None)
            if needs[3]:
                shares = _where_won(products, scaled(graph, False, weighted, r, None))
                dc = segment_sums(graph, True, shares, None, None)
        return dx, dv, dr, dc, None, None  # autograd casts them to the dtypes of the inputs


def _where_won(products: Tensor, shares: Tensor) -> Tensor:
    """The shares, 0 where an entry has won nothing, whose factors may be infinite."""
    return torch.where(products == 0, 0, shares)


def _once(op: Any, reduce: str, grad: Tensor, *args: Any) -> Tensor:
    """The op, whose result can be used but not differentiated."""
    if not recorded(grad) and not torch.is_grad_enabled():
        found: Tensor = op(*args)
        return found
    found = _Once.apply(op, reduce, *args)  # type: ignore[no-untyped-call]
    return found


class _Once(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, op: Any, reduce: str, *args: Any) -> Tensor:
        ctx.reduce = reduce  # type: ignore[attr-defined]
        found: Tensor = op(*args)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"reduce is {ctx.reduce!r}, whose gradient cannot be differentiated again: use "
            'reduce="sum" or "mean", or do without create_graph=True.'
        )
