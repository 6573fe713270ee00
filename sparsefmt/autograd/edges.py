"""One number for each stored entry: dot products and softmax."""

from torch import Tensor
from torch.autograd import Function

from ..ops.engine.bind import bind
from .engine.library import LibraryOp
from .engine.recording import Ctx, taped
from .matmul import SDDMM, dot_products, multiply
from .tensors.order import in_csr_order, in_own_order
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors

EDGE_SOFTMAX = LibraryOp("edge_softmax")
EDGE_SOFTMAX_BACKWARD = LibraryOp("edge_softmax_backward")


def sddmm(graph: GraphLike, x: Tensor, y: Tensor) -> Tensor:
    """Compute dot products of feature rows at the stored entries of the graph, differentiably.

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
    tensors = tensors_of(graph, y, x)
    _, x, y = bind(SDDMM.row, tensors, x=x, y=y)
    return in_own_order(tensors, dot_products(tensors, x, y))


def edge_softmax(graph: GraphLike, scores: Tensor) -> Tensor:
    """Compute the softmax of scores over the stored entries of each row, differentiably.

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
    tensors = tensors_of(graph)
    _, scores = bind(EDGE_SOFTMAX.row, tensors, scores=scores)
    ordered = in_csr_order(tensors, scores)
    return in_own_order(tensors, taped(_EdgeSoftmax, _softmax, (ordered,), tensors))


def _softmax(scores: Tensor, tensors: GraphTensors) -> Tensor:
    out: Tensor = EDGE_SOFTMAX(tensors.rows, scores)
    return out


class _EdgeSoftmax(Function):
    """A softmax over the entries of each row."""

    @staticmethod
    def forward(ctx: Ctx, scores: Tensor, tensors: GraphTensors) -> Tensor:
        out = _softmax(scores, tensors)
        ctx.save_for_backward(out)
        ctx.tensors = tensors
        return out

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = *ctx.saved_tensors, grad
        return taped(_SoftmaxGradient, _softmax_gradient, inputs, ctx.tensors.current()), None


def _softmax_gradient(p: Tensor, grad: Tensor, tensors: GraphTensors) -> Tensor:
    """Compute ``p (grad - sum over the row of p grad)``."""
    out: Tensor = EDGE_SOFTMAX_BACKWARD(tensors.rows, p, grad)
    return out


class _SoftmaxGradient(Function):
    """The gradient of a softmax, to be differentiated again."""

    @staticmethod
    def forward(ctx: Ctx, p: Tensor, grad: Tensor, tensors: GraphTensors) -> Tensor:
        ctx.save_for_backward(p, grad)
        ctx.tensors = tensors
        return _softmax_gradient(p, grad, tensors)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, inner = ctx.saved_tensors
        tensors = ctx.tensors.current()
        dp = dinner = None
        if ctx.needs_input_grad[0]:
            # out = p (g - S) with S = sum p g, so dp = h (g - S) - g T with T = sum p h.
            S, T = (_sums_at_entries(tensors, p * each) for each in (inner, grad))
            dp = grad * (inner - S) - inner * T
        if ctx.needs_input_grad[1]:
            dinner = taped(_SoftmaxGradient, _softmax_gradient, (p, grad), tensors)
        return dp, dinner, None


def _sums_at_entries(tensors: GraphTensors, values: Tensor) -> Tensor:
    """Compute the sum of the row's values for each entry."""
    n_cols = tensors.rows.n_cols
    sums = multiply(tensors, False, values.new_ones(n_cols, 1), values, None, None)
    return dot_products(tensors, sums, values.new_ones(n_cols, *sums.shape[1:]))
