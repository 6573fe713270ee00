"""One number for each stored entry: dot products and softmax."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .engine import checks, library
from .engine.library import LibraryOp
from .engine.recording import apart, recorded
from .matmul import multiply, scaled
from .tensors.edge_index import as_graph
from .tensors.order import in_csr_order, in_own_order
from .tensors.prepare import GraphLike, graph_tensors, on_rows, side_of

SDDMM = LibraryOp("sddmm")
EDGE_SOFTMAX = LibraryOp("edge_softmax")
EDGE_SOFTMAX_BACKWARD = LibraryOp("edge_softmax_backward")


def sddmm(graph: GraphLike, x: Tensor, y: Tensor) -> Tensor:
    """Dot products of feature rows at the stored entries of the graph, differentiably.

    ``s[e] = sum_f x[i, f] * y[j, f]`` for the stored entry ``e = (i, j)``; with heads
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
        In the order of ``graph.structure``: that in which the edges were given.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        If the arguments do not fit together, or a tensor is sparse.

    Notes
    -----
    Deterministic, differentiable any number of times.  TC-GNN (ATC'23), section 2.1, equation 3.
    """
    graph = as_graph(graph, y, x)
    tensors = graph_tensors(graph)
    checks.tensor("x", x)
    checks.tensor("y", y)
    x, y = library.narrowed(tensors.kind, x, y)
    checks.features("x", x, rows=tensors.n_rows, axis="rows", graph=tensors)
    checks.features("y", y, rows=tensors.n_cols, axis="columns", graph=tensors)
    checks.pair(x, y, tensors)
    return in_own_order(graph, dot_products(graph, x, y))


def edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    """Softmax of the scores over the stored entries of each row, differentiably.

    ``p[e] = exp(s[e] - m) / sum_e' exp(s[e'] - m)`` over the entries of the row of ``e``, whose
    largest score is ``m``; each head by itself.

    Parameters
    ----------
    graph : Graph
        Only its structure is read.
    scores : Tensor, shape (nnz,) or (nnz, heads)
        In the order of ``graph.structure``; float16 or bfloat16 (computed in float32), float32
        or float64.

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
    graph = as_graph(graph, None)
    tensors = graph_tensors(graph)
    checks.tensor("scores", scores)
    kind = tensors.kind
    if torch.is_autocast_enabled(kind):
        scores = library.cast(scores, kind, library.autocast_dtype(kind, narrow=False))
    checks.scores(scores, tensors)
    ordered = in_csr_order(graph, scores)
    if not recorded(ordered):
        return in_own_order(graph, on_rows(EDGE_SOFTMAX, graph, ordered))
    found: Tensor = _EdgeSoftmax.apply(ordered, graph)  # type: ignore[no-untyped-call]
    return in_own_order(graph, found)


def dot_products(
    graph: GraphLike, x: Tensor, y: Tensor, r: Tensor | None = None, c: Tensor | None = None
) -> Tensor:
    """Compute ``r[i] c[j] <x[i], y[j]>`` at the entries, differentiably; nothing is checked."""
    if recorded(r, c):
        return scaled(graph, False, dot_products(graph, x, y), r, c)
    if not recorded(x, y):
        return on_rows(SDDMM, graph, x, y, r, c)
    found: Tensor = _Sddmm.apply(*apart(x, y, r, c), graph)  # type: ignore[no-untyped-call]
    return found


class _Sddmm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, *given: Any) -> Tensor:
        *scales, ctx.graph = given
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if needs[1] else None, y if needs[0] else None, *scales)
        return on_rows(SDDMM, ctx.graph, x, y, *scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, row_scale, col_scale = ctx.saved_tensors
        dx = dy = None
        if ctx.needs_input_grad[0]:
            dx = multiply(ctx.graph, False, y, grad, row_scale, col_scale)
        if ctx.needs_input_grad[1]:
            dy = multiply(ctx.graph, True, x, grad, col_scale, row_scale)
        return dx, dy, None, None, None


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, graph: GraphLike) -> Tensor:
        out = on_rows(EDGE_SOFTMAX, graph, scores)
        ctx.save_for_backward(out)
        ctx.graph = graph
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (probabilities,) = ctx.saved_tensors
        return _softmax_gradient(ctx.graph, probabilities, grad), None


def _softmax_gradient(graph: GraphLike, probabilities: Tensor, grad: Tensor) -> Tensor:
    """Compute ``p (grad - sum over the row of p grad)``, differentiably."""
    if not recorded(probabilities, grad):
        return on_rows(EDGE_SOFTMAX_BACKWARD, graph, probabilities, grad)
    found: Tensor = _SoftmaxGradient.apply(probabilities, grad, graph)  # type: ignore[no-untyped-call]
    return found


class _SoftmaxGradient(Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, grad: Tensor, graph: GraphLike) -> Tensor:
        ctx.save_for_backward(probabilities, grad)
        ctx.graph = graph
        return on_rows(EDGE_SOFTMAX_BACKWARD, graph, probabilities, grad)

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
    """Give each entry the sum of its row's values."""
    n_cols = side_of(graph, False).n_cols
    sums = multiply(graph, False, values.new_ones(n_cols, 1), values, None, None)
    return dot_products(graph, sums, values.new_ones(n_cols, *sums.shape[1:]))
