"""Aggregation of neighbours' features with a vertex's own, as graph convolutions do."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import UnsupportedError
from .cbsr import choose_features, spgemm, to_dense
from .engine import checks, library
from .engine.recording import apart, recorded
from .matmul import SPMM, csr_operands, multiply, spmm
from .tensors.edge_index import as_graph
from .tensors.prepare import GraphLike, graph_tensors, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors


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
        As ``spmm``; also if the graph is not square, ``k`` lies outside 1 .. feat, or ``own`` or
        ``without`` is not as above.

    Notes
    -----
    All tensors but ``without`` have gradients, differentiable any number of times.  Nothing dense
    is saved for backward where ``k`` is given.  ``nn.GCNConv`` adds loops this way, and
    ``nn.GINConv`` its ``1 + eps``.
    """
    if isinstance(graph, Shared) and graph.whole is None:
        options = {"without": without, "row_scale": row_scale, "col_scale": col_scale}
        return graph.aggregate_with_own(x, own, edge_weight, k=k, **options)
    graph = as_graph(graph, x)
    if k is None:
        y = spmm(graph, x, edge_weight, row_scale=row_scale, col_scale=col_scale)
        checks.own_part(own, without, graph_tensors(graph))
        x, own = x.to(y.dtype), own.to(y.dtype) if own.element_size() == 2 else own
        return torch.addcmul(y, own, x if without is None else x.masked_fill(without, 0))
    tensors = graph_tensors(graph)
    x, values, r, c = csr_operands(tensors, x, edge_weight, row_scale, col_scale)
    checks.own_part(own, without, tensors)
    feat = x.shape[1]
    columns, kept = choose_features(x, checks.kept(k, feat))
    y = spgemm(tensors, columns, kept, feat, values, r, c)
    part = kept if without is None else kept.masked_fill(without, 0)
    return y + to_dense(columns, (own * part).to(kept.dtype), feat)


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
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``; also if the graph is not square, ``own``, ``without`` or ``bias`` is not as
        above, or ``scale`` or ``own`` asks for a gradient: ``aggregate_with_own`` has one.

    Notes
    -----
    ``x`` and ``bias`` have gradients, differentiable any number of times; all else is constant.
    Deterministic, backward too.  ``aggregate_with_own`` computes the same in three nodes and as
    many passes over the result.
    """
    if isinstance(graph, Shared) and graph.whole is None:
        return graph.propagate(x, scale, own, without=without, bias=bias)
    tensors = tensors_of(graph, x)
    x, values, _, _ = csr_operands(tensors, x, None, None, None)
    if torch.is_autocast_enabled(tensors.kind):
        scale = library.cast(scale, tensors.kind, x.dtype)
    checks.vector("scale", scale, length=tensors.n_rows, what="rows", x=x, graph=tensors)
    checks.own_part(own, without, tensors)
    if torch.is_grad_enabled() and (scale.requires_grad or own.requires_grad):
        raise UnsupportedError(
            "scale or own requires a gradient, which propagate does not compute: use "
            "aggregate_with_own, or detach them."
        )
    if bias is not None:
        checks.bias(bias, x, tensors)
        bias = bias.to(x.dtype)
    own = own.to(x.dtype)
    if torch.compiler.is_compiling():  # traced, a Function that writes in place loses its gradients
        y = aggregate_with_own(graph, x, own, without=without, row_scale=scale, col_scale=scale)
        return y if bias is None else y + bias
    constants = values, scale, own, without
    if not recorded(x, bias):
        return _propagate(tensors, x, bias, *constants)
    found: Tensor = _Propagate.apply(*apart(x, bias), *constants, tensors)  # type: ignore[no-untyped-call]
    return found


def _propagate(tensors: GraphTensors, x: Tensor, bias: Tensor | None, *constants: Any) -> Tensor:
    values, scale, own, without = constants
    out: Tensor = SPMM(tensors.rows, x, values, None, scale, scale, "sum")
    out = out.addcmul_(own, x if without is None else x.masked_fill(without, 0))
    return out if bias is None else out.add_(bias)


class _Propagate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        *constants, ctx.tensors = given
        ctx.save_for_backward(*constants)
        return _propagate(ctx.tensors, x, bias, *constants)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, own, without = ctx.saved_tensors
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = multiply(ctx.tensors.current(), True, grad, values, scale, scale)
            dx = torch.addcmul(dx, own, grad if without is None else grad.masked_fill(without, 0))
        if ctx.needs_input_grad[1]:
            db = grad.sum(0)
        return dx, db, None, None, None, None, None
