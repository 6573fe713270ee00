"""Products of a graph that ranks share, with features that they share likewise."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import spmm
from ..autograd.cbsr import Largest, keep_largest, spgemm
from ..autograd.engine import library
from ..autograd.engine.checks import TENSORS
from ..autograd.engine.recording import once_differentiable
from ..autograd.matmul import SPMM, check_scales, csr_operands, multiply
from ..autograd.tensors.prepare import tensors_of
from ..autograd.tensors.shared import Shared
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..formats import checks
from ..ops.matmul.api import VALUES
from .agreement import debugging, on_all_ranks
from .halo import EXCHANGED, INSTEAD, Ctx

if TYPE_CHECKING:
    from ..graph.graph import Graph
    from .graph import DistGraph

#: Edge weights of the entries whose source is on this rank, and of those of the halo.
Weights = tuple[Tensor | None, Tensor | None]


def dist_spmm(
    graph: "DistGraph",
    x: Tensor,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours, those of other ranks too.

    ``y[i, f] = r[i] * reduce_e(a[e] * c[j] * x[j, f])`` as ``autograd.spmm``, over the rows ``i``
    of this rank.  Own features are multiplied while those of the halo are on their way, and in
    backward gradients return to their owners while own ones are computed.

    Parameters
    ----------
    graph : DistGraph
    x : Tensor, shape (n_sources, feat)
        Of the sources of this rank: in a square graph its vertices.
    edge_weight : Tensor, shape (n_edges,), optional
        ``a`` of the edges of this rank, in the order of its ``edge_index``; 1 by default.
    reduce : "sum" or "mean"
    row_scale, col_scale : Tensor, shape (n_local,) and (n_sources,), optional
        ``r`` and ``c`` of the targets and of the sources of this rank.

    Returns
    -------
    Tensor, shape (n_local, feat)

    Raises
    ------
    UnsupportedError
        If ``reduce`` is another one.
    ShapeError, DtypeError, DeviceError
        As ``autograd.spmm``; DtypeError also if ``graph`` is no DistGraph.

    Notes
    -----
    All tensors have gradients, which all ranks compute at the same time, and which cannot be
    differentiated again.  Deterministic: a row adds up its own part first.  Features without a
    gradient are exchanged once, and again when the tensor has been changed in place, which all
    ranks must do alike; the last eight tensors are remembered, none within a CUDA graph.  What
    collectives of ``torch.distributed``, NumPy, CuPy or ``.data`` write is not noticed: give a new
    tensor, or call ``graph.forget()`` on all ranks.
    """
    if not isinstance(graph, Shared):
        raise DtypeError(
            f"graph is a {type(graph).__name__}: give a DistGraph, or use autograd.spmm."
        )
    if graph.complete is not None:
        checked_weights(graph, x, edge_weight, reduce, split=False)
        scales = {"row_scale": row_scale, "col_scale": col_scale}
        return spmm(graph.complete, x, edge_weight, reduce=reduce, **scales)
    weights = _agreed(graph, x, edge_weight, reduce, None, row_scale, col_scale)
    if x.requires_grad:  # a constant tensor that is exchanged once stays the same
        (x,) = library.narrowed(x.device.type, x)
    of_halo = None
    if col_scale is not None:
        x, col_scale, of_halo = _scaled(graph, x, col_scale)
    rows = graph.mean_scale(x, row_scale) if reduce == "mean" else row_scale
    factors = [factor for factor in (rows, col_scale) if factor is not None]
    # A kernel takes factors as they are if they are constants in the dtype of x.
    unfit = [factor for factor in factors if factor.requires_grad or factor.dtype is not x.dtype]
    fused = edge_weight is None and x.dtype.itemsize >= 4 and not unfit
    if fused and x.requires_grad:
        if checks.DEBUG:
            graph.halo.compare(x, False)
        y: Tensor = _Product.apply(x, graph, rows, col_scale, of_halo)  # type: ignore[no-untyped-call]
        return y
    exchange = graph.halo.start(x)
    y = _multiplied(graph.own, x, weights[0], rows, col_scale, reduce)
    received = exchange.finish()
    if fused and graph.n_rest and received.dtype is y.dtype:
        side, sums = tensors_of(graph.rest).rows, (None, None, rows, of_halo, "sum")
        y = SPMM(side, received, *sums, y, None, False, None)
        return y
    return y.add_(_multiplied(graph.rest, received, weights[1], rows, of_halo, reduce))


def maxk_product(
    graph: "DistGraph",
    x: Tensor | Largest,
    k: int | None,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> tuple[Tensor, Largest]:
    """Aggregate the ``k`` largest features of each in-neighbour: ``autograd.maxk_aggregate``.

    Returns (n_local, feat), and what own sources keep, which ranks exchange.
    """
    of_sources = x.data if isinstance(x, Largest) else x
    weights = _agreed(graph, of_sources, edge_weight, reduce, k, row_scale, col_scale)
    largest = x if isinstance(x, Largest) else keep_largest(x, cast(int, k))
    columns, data, feat = largest
    of_halo = None
    if col_scale is not None:
        data, col_scale, of_halo = _scaled(graph, data, col_scale)
    rows = graph.mean_scale(largest.data, row_scale) if reduce == "mean" else row_scale
    sent = columns
    if columns.dtype is torch.uint16:  # not sent by all backends; strides may be 0 if it is empty
        sent = columns if columns.numel() else columns.new_empty(columns.shape)
        sent = sent.view(torch.uint8)
    numbers = graph.halo.start(sent)
    exchange = graph.halo.start(data)

    def product(
        part: "Graph", columns: Tensor, data: Tensor, weight: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        tensors = tensors_of(part)
        data, values, _, scale = csr_operands(tensors, data, weight, None, scale)
        with torch.autocast(data.device.type, enabled=False):  # which would narrow the scale too
            return spgemm(tensors, columns, data, feat, values, rows, scale)

    own = product(graph.own, columns, data, weights[0], col_scale)
    received = numbers.finish().view(columns.dtype)
    return own + product(graph.rest, received, exchange.finish(), weights[1], of_halo), largest


def _agreed(
    graph: "DistGraph", x: Tensor, edge_weight: Tensor | None, reduce: str, k: int | None,
    *scales: Tensor | None,
) -> Weights:  # fmt: skip
    """Check the arguments of a product and split edge weights; while debugging, over all ranks."""
    device = graph.halo.vertices.device
    if not (checks.DEBUG and debugging(device)):
        return checked_weights(graph, x, edge_weight, reduce, *scales)
    weights: Weights = None, None

    def described() -> dict[str, Any]:
        nonlocal weights
        weights = checked_weights(graph, x, edge_weight, reduce, *scales)
        args: dict[str, Any] = {"edge_weight": edge_weight, "reduce": reduce, "k": k}
        args |= {"row_scale": scales[0], "col_scale": scales[1], "x": x}
        return {"the call": "a product"} | {
            name: f"{value.dtype} with rows of shape {tuple(value.shape[1:])}"
            if isinstance(value, Tensor)
            else value
            for name, value in args.items()
        }

    on_all_ranks(described, graph.group, device, alike=True)
    return weights


def checked_weights(
    graph: "DistGraph", x: Tensor, edge_weight: Tensor | None, reduce: str, *scales: Tensor | None,
    split: bool = True,
) -> Weights:  # fmt: skip
    """Check the arguments of a product before anything travels, and split edge weights."""
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(f"reduce is {reduce!r}: give 'sum' or 'mean'.")
    graph.check("x", x)
    if reduce == "mean" and isinstance(edge_weight, Tensor) and edge_weight.dim() > 1:
        raise ShapeError(
            f"edge_weight has shape {tuple(edge_weight.shape)} but a mean takes one value of each "
            f"edge: give ({graph.local.nnz},)."
        )
    if not split or not [factor for factor in (edge_weight, *scales) if factor is not None]:
        return None, None
    tensors = tensors_of(graph.own)
    like, row_scale, col_scale = library.narrowed(tensors.kind, x[:0], *scales)
    check_scales(tensors, like, row_scale, col_scale)
    if edge_weight is None:
        return None, None
    weights = graph.split(edge_weight)
    (own,) = library.narrowed(tensors.kind, weights[0])
    if own.dim() == 1:
        TENSORS.check("edge_weight", own, VALUES, tensors, tensors.nnz, ("x", like))
    return weights


def _scaled(
    graph: "DistGraph", x: Tensor, col_scale: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return features, and the scales of own sources and of the halo's, which travel once."""
    if col_scale.requires_grad:
        return x * col_scale[:, None], None, None
    return x, col_scale, graph.halo.start(col_scale).finish()


def _multiplied(
    graph: "Graph", x: Tensor, weight: Tensor | None, rows: Tensor | None, cols: Tensor | None,
    reduce: str,
) -> Tensor:  # fmt: skip
    """Multiply a part of the graph; a mean's scale is float32 for features of 2 bytes."""
    if reduce == "sum":
        return spmm(graph, x, weight, row_scale=rows, col_scale=cols)
    tensors = tensors_of(graph)
    x, values, _, cols = csr_operands(tensors, x, weight, None, cols)
    with torch.autocast(x.device.type, enabled=False):  # which would narrow the scale too
        return multiply(tensors, False, x, values, rows, cols)


class _Product(Function):
    """A product with constant factors, whose backward adds returned gradients in one kernel."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, graph: "DistGraph", *scales: Tensor | None) -> Tensor:
        ctx.graph, halo = graph, graph.halo
        ctx.save_for_backward(*scales)
        rows, cols, of_halo = scales
        parcel = halo.send(x.detach())
        own = SPMM(tensors_of(graph.own).rows, x, None, None, rows, cols, "sum")
        received = halo.receive(parcel).to(x.dtype)
        side, sums = tensors_of(graph.rest).rows, (None, None, rows, of_halo, "sum")
        y: Tensor = SPMM(side, received, *sums, own, None, False, None)
        return y

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        def gradient(grad: Tensor) -> Tensor:
            (rows, cols, of_halo), graph = ctx.saved_tensors, ctx.graph
            halo, product = graph.halo, (grad, None, None)
            sent = SPMM(tensors_of(graph.rest).columns, *product, of_halo, rows, "sum")
            parcel = halo.exchange_rows(sent.contiguous(), halo.received, halo.sent)
            dx: Tensor = SPMM(tensors_of(graph.own).columns, *product, cols, rows, "sum")
            parcel.work.wait()
            received, sums = parcel.into.to(dx.dtype), (None,) * 4
            if len(received):  # what other ranks have sent back
                dx = SPMM(tensors_of(halo.ones).rows, received, *sums, "sum", dx, None, False, None)
            return dx

        return once_differentiable(EXCHANGED, gradient, grad, instead=INSTEAD), *(None,) * 4
