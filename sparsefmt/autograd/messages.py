"""Messages with a row of features for each edge: their sums, and combinations of both vertices.

Features of edges stay in the user's order, which kernels read through a permutation: a copy in
another order would cost more than the sum.  Each gradient is again a function of this file, or a
product of ``matmul``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import ShapeError
from ..ops.engine.bind import bind, word
from ..ops.engine.table import Arg
from ..ops.messages import api
from .engine import library
from .engine.checks import TENSORS
from .engine.library import LibraryOp
from .engine.memory import sums_dtype
from .engine.recording import Ctx, recorded, taped
from .matmul import SDDMM, dot_products, multiply
from .tensors.order import in_own_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors

MESSAGE_AGGREGATE = LibraryOp("message_aggregate")
MESSAGE_AGGREGATE_BACKWARD = LibraryOp("message_aggregate_backward")
EDGE_COMBINE = LibraryOp("edge_combine")
_OPS = (*api.COMBINATIONS, "dot")
#: Errors name ``edge_features`` by ``x``, where the row has it the other way around.
_X, _EDGES = Arg("x", "cols", (2,)), Arg("edges", "entries", (2,), "x")


def message_aggregate(
    graph: GraphLike,
    x: Tensor | None,
    edge_features: Tensor,
    *,
    message: str = "mul",
    reduce: str = "sum",
) -> Tensor:
    """Aggregate messages of neighbours' and edges' features, differentiably.

    ``y[i, f] = reduce_e m(x[j, f], w[e, f])`` over the stored entries ``e = (i, j)`` of row ``i``;
    0 for a row without any.  No tensor with a message for each edge is made.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  Or an ``edge_index``, as in ``spmm``.
    x : Tensor, shape (n_cols, feat)
        float16 or bfloat16 (summed in float32), float32 or float64.  Rows may have any stride.  Not
        read by "copy_edge", which takes None too.
    edge_features : Tensor, shape (nnz, feat)
        ``w``, in the order of ``graph.structure``: that in which the edges were given.  Of the
        dtype of ``x``.
    message : "mul", "add", "relu_add" or "copy_edge"
        ``x * w``, ``x + w``, ``relu(x + w)`` (GINE) or ``w``.
    reduce : "sum" or "mean"

    Returns
    -------
    Tensor, shape (n_rows, feat)
        In the dtype of ``edge_features``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.
    UnsupportedError
        If there is no such ``message`` or ``reduce`` (``spmm`` has maxima and minima, for one
        weight an edge), a tensor is sparse, or it is called within ``torch.func`` or with a
        tangent.

    Notes
    -----
    Deterministic, backward too, and differentiable any number of times.  Backward makes both
    gradients in one pass, and beside them nothing of the size of the edges' features; but under
    ``create_graph=True``, where that of "relu_add" keeps which sums were positive.
    """
    word("message", message, api.MESSAGES)
    if x is None and isinstance(graph, Tensor):
        raise ShapeError(
            "graph is an edge_index and x is None, so nothing says how many vertices there are: "
            "give Graph.from_edge_index(edge_index, num_nodes=n)."
        )
    tensors = tensors_of(graph, x)
    api.checked_reduction("reduce", reduce)
    x = None if message == "copy_edge" else x
    x, edge_features = library.narrowed(tensors.kind, x, edge_features)
    like = None
    if message != "copy_edge":
        like = "x", TENSORS.check("x", x, _X, tensors, tensors.n_cols, None)
    TENSORS.check("edge_features", edge_features, _EDGES, tensors, tensors.nnz, like)
    return aggregated(tensors, False, x, edge_features, message, reduce)


def edge_combine(graph: GraphLike, left: Tensor, right: Tensor, op: str = "add") -> Tensor:
    """Combine the features of both vertices of each edge, differentiably.

    ``out[e, f] = left[i, f] op right[j, f]`` for the stored entry ``e = (i, j)``; "dot" sums the
    products up, as ``sddmm``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  Or an ``edge_index``, as in ``spmm``.
    left, right : Tensor, shape (n_rows, feat) and (n_cols, feat)
        Of targets and of sources, in one dtype: float16, bfloat16, float32 or float64.
    op : "add", "sub", "mul" or "dot"

    Returns
    -------
    Tensor, shape (nnz, feat), or (nnz,) for "dot"
        In the order of ``graph.structure``: that in which the edges were given.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together.
    UnsupportedError
        If there is no such ``op``, a tensor is sparse, or it is called within ``torch.func`` or
        with a tangent.

    Notes
    -----
    Deterministic, backward too, and differentiable any number of times.
    """
    row = SDDMM.row if word("op", op, _OPS) == "dot" else EDGE_COMBINE.row
    tensors = tensors_of(graph, right, left)
    _, left, right = bind(row, tensors, left=left, right=right)
    if op == "dot":
        return in_own_order(tensors, dot_products(tensors, left, right))
    return combined(tensors, False, left, right, op)


def _places(tensors: GraphTensors, transposed: bool) -> Tensor | None:
    """Return the number that each entry of the rows or columns has in the user's order."""
    side = tensors.side(transposed)
    moves = [perm for perm in (tensors.order, side.perm) if perm is not None]
    dtype = side.indices.dtype
    if len(moves) < 2 and all(perm.dtype is dtype for perm in moves):
        return moves[0] if moves else None

    def make() -> Tensor:
        places = moves[0] if len(moves) == 1 else moves[0].index_select(0, moves[1])
        return places.to(dtype)

    # An index an edge, which each step reads.
    return tensors.cached(("places", transposed), make)


# Primitives: nothing is checked; each is differentiable by the others


def aggregated(
    tensors: GraphTensors,
    transposed: bool,
    x: Tensor | None,
    edges: Tensor,
    message: str,
    reduce: str = "sum",
) -> Tensor:
    """Aggregate messages along the graph or its transpose, differentiably."""
    return taped(_Aggregate, _aggregated, (x, edges), tensors, transposed, message, reduce)


def combined(
    tensors: GraphTensors, transposed: bool, left: Tensor, right: Tensor | None, op: str
) -> Tensor:
    """Combine at the entries of the graph or its transpose, differentiably."""
    return taped(_Combine, _combined, (left, right), tensors, transposed, op)


def _aggregated(
    x: Tensor | None,
    edges: Tensor,
    tensors: GraphTensors,
    transposed: bool,
    message: str,
    reduce: str,
) -> Tensor:
    """Aggregate messages without a gradient."""
    side, places = tensors.side(transposed), _places(tensors, transposed)
    out: Tensor = MESSAGE_AGGREGATE(side, x, edges, places, message, reduce)
    return out


def _combined(
    left: Tensor,
    right: Tensor | None,
    tensors: GraphTensors,
    transposed: bool,
    op: str,
    scale: Tensor | None = None,
) -> Tensor:
    """Combine at the entries without a gradient; ``scale`` has a factor for each row."""
    side, places = tensors.side(transposed), _places(tensors, transposed)
    out: Tensor = EDGE_COMBINE(side, left, right, places, scale, op)
    return out


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor | None, edges: Tensor, *args: Any) -> Tensor:
        ctx.tensors, ctx.transposed, ctx.message, ctx.reduce = args
        reads = ctx.message in ("mul", "relu_add")
        ctx.save_for_backward(x if reads else None, edges if reads else None)
        return _aggregated(x, edges, *args)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, scale = ctx.tensors.current(), None
        if ctx.reduce == "mean":
            scale = tensors.side(ctx.transposed).inverse_degree(sums_dtype(grad))
        compute = _recorded_gradients if recorded(*ctx.saved_tensors, grad) else _gradients
        return *compute(ctx, tensors, grad, scale), None, None, None, None


def _gradients(
    ctx: Ctx, tensors: GraphTensors, grad: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients that are needed, in one pass over the edges."""
    (x, edges), (of_x, of_edges, *_) = ctx.saved_tensors, ctx.needs_input_grad
    message, transposed = ctx.message, ctx.transposed
    if message == "copy_edge" or (message in ("add", "mul") and not of_x):
        op = "mul" if message == "mul" else "left"
        return None, _combined(grad, x, tensors, transposed, op, scale)
    if message == "add" and not of_edges:
        return multiply(tensors, not transposed, grad, None, None, scale), None
    side, places = tensors.side(not transposed), _places(tensors, not transposed)
    dx, de = MESSAGE_AGGREGATE_BACKWARD(side, x, edges, grad, places, scale, message, of_edges)
    return dx if of_x else None, de if of_edges else None


def _recorded_gradients(
    ctx: Ctx, tensors: GraphTensors, grad: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients that are needed by functions that can be differentiated again."""
    (x, edges), (of_x, of_edges, *_) = ctx.saved_tensors, ctx.needs_input_grad
    transposed = ctx.transposed
    if scale is not None:
        grad = (grad * scale[:, None]).to(grad.dtype)
    dx = de = None
    if ctx.message == "relu_add":
        with torch.no_grad():
            sums = _combined(x.detach(), None, tensors, not transposed, "left") + edges.detach()
        de = combined(tensors, transposed, grad, None, "left").masked_fill(sums <= 0, 0)
        dx = aggregated(tensors, not transposed, None, de, "copy_edge") if of_x else None
        return dx, de if of_edges else None
    if of_x:
        if edges is None:
            dx = multiply(tensors, not transposed, grad, None, None, None)
        else:
            dx = aggregated(tensors, not transposed, grad, edges, "mul")
    if of_edges:
        de = combined(tensors, transposed, grad, x, "left" if x is None else "mul")
    return dx, de


class _Combine(Function):
    @staticmethod
    def forward(ctx: Ctx, left: Tensor, right: Tensor | None, *args: Any) -> Tensor:
        ctx.tensors, ctx.transposed, ctx.op = args
        needs, product = ctx.needs_input_grad, ctx.op == "mul"
        ctx.save_for_backward(
            left if product and needs[1] else None, right if product and needs[0] else None
        )
        return _combined(left, right, *args)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (left, right), tensors = ctx.saved_tensors, ctx.tensors.current()
        message = "mul" if ctx.op == "mul" else "copy_edge"
        dleft = dright = None
        if ctx.needs_input_grad[0]:
            dleft = aggregated(tensors, ctx.transposed, right, grad, message)
        if ctx.needs_input_grad[1]:
            dright = aggregated(tensors, not ctx.transposed, left, grad, message)
            dright = -dright if ctx.op == "sub" else dright
        return dleft, dright, None, None, None
