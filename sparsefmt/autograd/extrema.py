"""Maxima and minima over each row: their gradients cannot be differentiated again."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .engine.library import LibraryOp
from .engine.recording import apart, once
from .matmul import scaled, segment_sums
from .tensors.prepare import GraphLike, side_of

SPMM_ARG = LibraryOp("spmm_arg")
SPMM_ARG_DX = LibraryOp("spmm_arg_dx")
SPMM_ARG_DA = LibraryOp("spmm_arg_da")

_REFUSAL = (
    "reduce is {name!r}, whose gradient cannot be differentiated again: use "
    'reduce="sum" or "mean", or do without create_graph=True.'
)


def best(graph: GraphLike, reduce: str, *inputs: Tensor | None) -> Tensor:
    """Reduce by max or min, differentiably; nothing is checked.

    ``inputs`` are features, edge values, and the scales of rows and columns.
    """
    found: Tensor = _Best.apply(*apart(*inputs), graph, reduce)  # type: ignore[no-untyped-call]
    return found


class _Best(Function):
    """Reduce by max or min; the gradient goes to the entries that won."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        *factors, ctx.graph, ctx.reduce = given
        out: Tensor
        out, arg = SPMM_ARG(side_of(ctx.graph, False), x, *factors, ctx.reduce)
        saved = x if any(ctx.needs_input_grad[1:4]) else None
        ctx.save_for_backward(saved, *factors, arg)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, row_scale, col_scale, arg = ctx.saved_tensors
        graph, needs = ctx.graph, ctx.needs_input_grad
        dx = dv = dr = dc = None
        if needs[0]:
            side = side_of(graph, True)
            args = grad, arg, values, row_scale, col_scale
            dx = _gradient(ctx.reduce, SPMM_ARG_DX, side, side.perm, *args)
        side = side_of(graph, False)
        if needs[1] and not needs[2] and not needs[3]:
            args = x, grad, arg, row_scale, col_scale
            dv = _gradient(ctx.reduce, SPMM_ARG_DA, side, *args)
        elif any(needs[1:4]):
            # Sums over rows, for the scales, are not made of values rounded to 2 bytes.
            wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
            x, grad = x.to(wide), grad.to(wide)
            given = values, row_scale, col_scale
            a, r, c = (None if one is None else one.to(wide) for one in given)
            products = _gradient(ctx.reduce, SPMM_ARG_DA, side, x, grad, arg, None, None)
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
    """Give the shares, and 0 to entries that have won nothing: their factors may be infinite."""
    return torch.where(products == 0, 0, shares)


def _gradient(reduce: str, op: LibraryOp, *args: Any) -> Any:
    """Compute a gradient that cannot be differentiated again."""
    return once(reduce, op, *args, refusal=_REFUSAL)
