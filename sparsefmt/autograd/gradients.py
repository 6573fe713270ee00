"""``torch.autograd.Function``s around the library ops, and what they share.

Edge values stay in the order of the graph's CSR throughout: the transposed product reads them
through a permutation, and the sddmm of the transpose is that of the graph with its features
exchanged.  So every gradient is again one of the functions here, and sum, mean, sddmm and softmax
can be differentiated any number of times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from ..errors import UnsupportedError
from . import bridge
from ._recording import recorded
from .structure import GraphLike, side_of


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
    if not recorded(x, values, row_scale, col_scale):
        return _spmm(graph, transposed, x, values, row_scale, col_scale, reduce)
    found: Tensor
    if reduce in ("sum", "mean"):
        found = _Spmm.apply(x, values, row_scale, col_scale, graph, transposed, reduce)  # type: ignore[no-untyped-call]
        return found
    found = _Best.apply(x, values, row_scale, col_scale, graph, reduce)  # type: ignore[no-untyped-call]
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
    out: Tensor = bridge.SPMM(side, x, values, perm, row_scale, col_scale, reduce)
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
        given = (*ctx.saved_tensors, grad)
        wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
        # Sums over rows, for the scales, are not made of values that have been rounded to 2 bytes.
        if needs[2] or needs[3]:
            given = tuple(None if one is None else one.to(wide) for one in given)
        x, values, row_scale, col_scale, grad = given
        rows, inverse = row_scale, None
        if ctx.reduce == "mean":
            inverse = side_of(graph, transposed).inverse_degree(wide)
            rows = inverse if row_scale is None else row_scale.to(wide) * inverse
        dx = dv = dr = dc = None
        if needs[0]:
            dx = spmm(graph, not transposed, grad, values, col_scale, rows)
        if needs[1] and not needs[2] and not needs[3]:
            dv = _products(graph, transposed, grad, x, rows, col_scale)
        elif any(needs[1:4]):
            products = _products(graph, transposed, grad, x, None, None)
            weighted = products if values is None else products * values
            if needs[1]:
                dv = _scaled(graph, transposed, products, rows, col_scale)
            if needs[2]:
                dr = _segment_sums(graph, transposed, weighted, inverse, col_scale)
            if needs[3]:
                dc = _segment_sums(graph, not transposed, weighted, None, rows)
        return dx, dv, dr, dc, None, None, None  # autograd casts them to the dtypes of the inputs


def _segment_sums(
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


def _scaled(
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
        return _scaled(graph, False, sddmm(graph, x, y), row_scale, col_scale)
    if not recorded(x, y):
        return _sddmm(graph, x, y, row_scale, col_scale)
    found: Tensor = _Sddmm.apply(x, y, row_scale, col_scale, graph)  # type: ignore[no-untyped-call]
    return found


def _sddmm(
    graph: GraphLike, x: Tensor, y: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    out: Tensor = bridge.SDDMM(side_of(graph, False), x, y, row_scale, col_scale)
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
        out, arg = bridge.SPMM_ARG(side, x, values, row_scale, col_scale, reduce)
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
            dx = _once(bridge.SPMM_ARG_DX, ctx.reduce, grad, side, side.perm, *args)
        side = side_of(graph, False)
        if needs[1] and not needs[2] and not needs[3]:
            args = x, grad, arg, row_scale, col_scale
            dv = _once(bridge.SPMM_ARG_DA, ctx.reduce, grad, side, *args)
        elif any(needs[1:4]):
            # Sums over rows, for the scales, are not made of values rounded to 2 bytes.
            wide = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
            x, grad = x.to(wide), grad.to(wide)
            given = values, row_scale, col_scale
            a, r, c = (None if one is None else one.to(wide) for one in given)
            products = _once(bridge.SPMM_ARG_DA, ctx.reduce, grad, side, x, grad, arg, None, None)
            weighted = products if a is None else products * a
            if needs[1]:
                dv = _where_won(products, _scaled(graph, False, products, r, c))
            if needs[2]:
                shares = _where_won(products, _scaled(graph, False, weighted, None, c))
                dr = _segment_sums(graph, False, shares, None, None)
            if needs[3]:
                shares = _where_won(products, _scaled(graph, False, weighted, r, None))
                dc = _segment_sums(graph, True, shares, None, None)
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


def edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    """Softmax over the entries of each row, differentiable; nothing is checked."""
    if not recorded(scores):
        return _edge_softmax(graph, scores)
    found: Tensor = _EdgeSoftmax.apply(scores, graph)  # type: ignore[no-untyped-call]
    return found


def _edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    out: Tensor = bridge.EDGE_SOFTMAX(side_of(graph, False), scores)
    return out


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, graph: GraphLike) -> Tensor:
        out = _edge_softmax(graph, scores)
        ctx.save_for_backward(out)
        ctx.graph = graph
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        return _softmax_gradient(ctx.graph, probabilities, grad), None


def _softmax_gradient(graph: GraphLike, probabilities: Tensor, grad: Tensor) -> Tensor:
    """``p (grad - sum over the row of p grad)``."""
    found: Tensor
    if recorded(probabilities, grad):
        found = _SoftmaxGradient.apply(probabilities, grad, graph)  # type: ignore[no-untyped-call]
        return found
    return _softmax_backward(graph, probabilities, grad)


def _softmax_backward(graph: GraphLike, probabilities: Tensor, grad: Tensor) -> Tensor:
    out: Tensor = bridge.EDGE_SOFTMAX_BACKWARD(side_of(graph, False), probabilities, grad)
    return out


class _SoftmaxGradient(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, grad: Tensor, graph: GraphLike) -> Tensor:
        ctx.save_for_backward(probabilities, grad)
        ctx.graph = graph
        return _softmax_backward(graph, probabilities, grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, inner = ctx.saved_tensors
        dp = dinner = None
        if ctx.needs_input_grad[0]:
            # out = p (g - S) with S = sum p g, so dp = h (g - S) - g T with T = sum p h.
            S, T = (_sums_at_entries(ctx.graph, p * each) for each in (inner, grad))
            dp = grad * (inner - S) - inner * T
        if ctx.needs_input_grad[1]:
            dinner = _softmax_gradient(ctx.graph, p, grad)
        return dp, dinner, None


def _sums_at_entries(graph: GraphLike, values: Tensor) -> Tensor:
    """The sum of each row's values, at each of its entries."""
    if values.dim() == 2:
        heads = [_sums_at_entries(graph, values[:, h]) for h in range(values.shape[1])]
        return torch.stack(heads, dim=1) if heads else values
    sums = _segment_sums(graph, False, values, None, None)
    return sddmm(graph, sums[:, None], values.new_ones(side_of(graph, False).n_cols, 1))
