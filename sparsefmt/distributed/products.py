"""Products of a graph that ranks share, with features that they share likewise."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..autograd import spmm
from ..autograd.cbsr import choose_features, features_to_keep, spgemm
from ..autograd.engine import checks, library
from ..autograd.engine.recording import once
from ..autograd.matmul import SPMM, check_scales, csr_operands, multiply
from ..autograd.tensors.prepare import graph_tensors, side_of
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..nn.shared import shared
from .agreement import debugging, on_all_ranks
from .halo import EXCHANGED, ONE_PROCESS, Exchange

if TYPE_CHECKING:
    from ..graph.graph import Graph
    from .graph import DistGraph


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
    of this rank.  What lies here is multiplied while the rest is on its way, and in backward
    gradients go home while the own ones are computed.

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
    if shared(graph) is None:
        raise DtypeError(
            f"graph is a {type(graph).__name__}: give a DistGraph, or use autograd.spmm."
        )
    scales = {"row_scale": row_scale, "col_scale": col_scale}
    if graph.whole is not None:
        _check_product(graph, x, edge_weight, reduce)
        return spmm(graph.whole, x, edge_weight, reduce=reduce, **scales)
    weights = _agreed(graph, x, edge_weight, {"reduce": reduce, "k": None, **scales})
    x = narrowed(x) if x.requires_grad else x  # what is exchanged once stays the same tensor
    x, col_scale, of_halo = _scaled(graph, x, col_scale)
    rows = row_scale_of(graph, x, reduce, row_scale)
    multiplied = _mean if reduce == "mean" else _sum
    if edge_weight is None and x.requires_grad and _is_constant(x, rows, col_scale):
        exchange = graph.halo.prepared(x)
        begun = _OwnBegun.apply(x, exchange, graph.own, rows, col_scale)  # type: ignore[no-untyped-call]
        own, exchange.begun = begun
    else:
        exchange = graph.halo.start(x)
        own = multiplied(graph.own, x, weights[0], rows, col_scale)
    received = exchange.finish()
    if edge_weight is None and _fits_beside(graph.rest, received, own, rows, of_halo):
        found: Tensor = _Beside.apply(received, own, graph.rest, rows, of_halo)  # type: ignore[no-untyped-call]
        return found
    total: Tensor = own.add_(multiplied(graph.rest, received, weights[1], rows, of_halo))
    return total


def _check_product(graph: "DistGraph", x: Tensor, edge_weight: Any, reduce: str) -> None:
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(f"reduce is {reduce!r}: give 'sum' or 'mean'.")
    graph.check("x", x)
    if reduce == "mean" and isinstance(edge_weight, Tensor) and edge_weight.dim() > 1:
        raise ShapeError(
            f"edge_weight has shape {tuple(edge_weight.shape)} but a mean takes one value of each "
            f"edge: give ({graph.local.nnz},)."
        )


def _agreed(
    graph: "DistGraph", x: Tensor, edge_weight: Tensor | None, given: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Check the arguments of a product and part edge weights; debugging, compare them over ranks.

    Raises
    ------
    RankError
        While debugging, if arguments are wrong on some ranks only, or differ between them.
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``dist_spmm``.
    """
    weights: tuple[Tensor | None, Tensor | None] = None, None
    device = graph.halo.vertices.device
    compares = debugging(device)

    def check() -> dict[str, Any]:
        nonlocal weights
        _check_product(graph, x, edge_weight, given["reduce"])
        scales = given["row_scale"], given["col_scale"]
        weights = split_and_checked(graph, x, edge_weight, *scales)
        return _described({"edge_weight": edge_weight, **given, "x": x}) if compares else {}

    if compares:
        on_all_ranks(check, graph.group, device, alike=True)
    else:
        check()
    return weights


def _described(given: dict[str, Any]) -> dict[str, Any]:
    """Say of arguments of a product what all ranks must have alike: of tensors dtype and rows."""
    return {"the call": "a product"} | {
        name: f"{one.dtype} with rows of shape {tuple(one.shape[1:])}"
        if isinstance(one, Tensor)
        else one
        for name, one in given.items()
    }


def split_and_checked(
    graph: "DistGraph", x: Tensor, edge_weight: Tensor | None, *scales: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Check factors before anything travels, and part edge weights as ``DistGraph.split``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``autograd.spmm``.
    """
    tensors = graph_tensors(graph.own)
    like, row_scale, col_scale = library.narrowed(tensors.kind, x[:0], *scales)
    check_scales(tensors, like, row_scale, col_scale)
    if edge_weight is None:
        return None, None
    weights = graph.split(edge_weight)
    weight = library.narrowed(tensors.kind, weights[0])[0]
    if weight.dim() == 1:
        given: Any = {"length": graph.own.nnz, "what": "stored entries", "x": like}
        checks.vector("edge_weight", weight, graph=tensors, **given)
    return weights


def _sum(
    graph: "Graph", x: Tensor, weight: Tensor | None, rows: Tensor | None, cols: Tensor | None
) -> Tensor:
    return spmm(graph, x, weight, row_scale=rows, col_scale=cols)


def _mean(
    graph: "Graph", x: Tensor, weight: Tensor | None, rows: Tensor | None, cols: Tensor | None
) -> Tensor:
    """Multiply with a scale of rows that is float32 beside features of two bytes."""
    tensors = graph_tensors(graph)
    x, values, _, cols = csr_operands(tensors, x, weight, None, cols)
    with torch.autocast(x.device.type, enabled=False):  # which would narrow the scale too
        return multiply(tensors, False, x, values, rows, cols)


def _fits_beside(graph: "Graph", x: Tensor, own: Tensor, *scales: Tensor | None) -> bool:
    """Tell whether the kernel of a product may add a result that is there, in its one pass."""
    return graph.nnz > 0 and x.dtype is own.dtype and _is_constant(x, *scales)


def _is_constant(x: Tensor, *scales: Tensor | None) -> bool:
    """Tell whether a kernel may take scales as they are, beside features of four bytes or more."""
    constant = (one is None or (not one.requires_grad and one.dtype is x.dtype) for one in scales)
    return all(constant) and x.dtype.itemsize >= 4


class _OwnBegun(Function):
    """Begin an exchange and multiply own features meanwhile, as one node.

    So in backward one kernel adds what comes home to the gradient that is there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, *given: Any) -> tuple[Tensor, Tensor]:
        ctx.exchange, (ctx.graph, *scales) = exchange, given
        ctx.save_for_backward(*scales)
        begun = exchange.send(x)
        return SPMM(side_of(ctx.graph, False), x, None, None, *scales, "sum"), begun

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return once(EXCHANGED, partial(_added_up, ctx), grad, instead=ONE_PROCESS), *(None,) * 4


def _added_up(ctx: Any, grad: Tensor) -> Tensor:
    """Give the gradient of features: of own rows, and what other ranks send home."""
    (rows, cols), exchange = ctx.saved_tensors, ctx.exchange
    dx: Tensor = SPMM(side_of(ctx.graph, True), grad, None, None, cols, rows, "sum")
    received, home = exchange.sent_back(dx), exchange.halo.home
    if home.nnz:
        given, beside = (received, *(None,) * 4, "sum"), (dx, None, False, None)
        dx = SPMM(side_of(home, False), *given, *beside)
    return dx


class _Beside(Function):
    """``own[i, f] + r[i] * sum_e(c[j] * x[j, f])`` over the entries of a graph, as a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, *given: Any) -> Tensor:
        ctx.graph, *scales = given
        ctx.save_for_backward(*scales)
        side, beside = side_of(ctx.graph, False), (own, None, False, None)
        found: Tensor = SPMM(side, x, None, None, *scales, "sum", *beside)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx = None
        if ctx.needs_input_grad[0]:
            rows, cols = ctx.saved_tensors
            given = side_of(ctx.graph, True), grad, None, None, cols, rows, "sum"
            dx = once(EXCHANGED, SPMM, *given, instead=ONE_PROCESS)
        return dx, grad, None, None, None


def maxk_product(
    graph: "DistGraph",
    x: Tensor,
    k: int,
    edge_weight: Tensor | None = None,
    *,
    reduce: str = "sum",
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Aggregate the ``k`` largest features of each in-neighbour: ``autograd.maxk_aggregate``.

    Ranks exchange ``k`` values and column numbers of a vertex, one or two bytes each, and in
    backward ``k`` gradients.

    Returns
    -------
    y : Tensor, shape (n_local, feat)
    columns, kept : Tensor, shape (n_sources, k)
        The features of own sources that were chosen.
    """
    scales = {"row_scale": row_scale, "col_scale": col_scale}
    weights = _agreed(graph, x, edge_weight, {"reduce": reduce, "k": k, **scales})
    x, feat = narrowed(x), x.shape[1]
    columns, kept = choose_features(x, features_to_keep(k, feat))
    data, col_scale, of_halo = _scaled(graph, kept, col_scale)
    rows = row_scale_of(graph, x, reduce, row_scale)
    numbers = graph.halo.start(as_bytes(columns))
    exchange = graph.halo.start(data)

    def product(part: Any, columns: Tensor, data: Tensor, weight: Any, scale: Any) -> Tensor:
        tensors = graph_tensors(part)
        data, values, _, scale = csr_operands(tensors, data, weight, None, scale)
        with torch.autocast(x.device.type, enabled=False):  # which would narrow the scale too
            return spgemm(tensors, columns, data, feat, values, rows, scale)

    own = product(graph.own, columns, data, weights[0], col_scale)
    received = numbers.finish().view(columns.dtype)
    y = own + product(graph.rest, received, exchange.finish(), weights[1], of_halo)
    return y, columns, kept


def as_bytes(columns: Tensor) -> Tensor:
    """View column numbers as what each backend sends."""
    if columns.dtype is not torch.uint16:
        return columns
    if not columns.numel():  # which may have strides of 0
        columns = columns.new_empty(columns.shape)
    return columns.view(torch.uint8)


def row_scale_of(
    graph: "DistGraph", x: Tensor, reduce: str, row_scale: Tensor | None
) -> Tensor | None:
    """Give the scale of rows of a sum, which divides by the number of entries for a mean."""
    if reduce != "mean":
        return row_scale
    inverse = graph.inverse_degree(x)
    return inverse if row_scale is None else row_scale * inverse


def narrowed(x: Tensor) -> Tensor:
    """Cast features as autocast will, before they travel."""
    found: Tensor = library.narrowed(x.device.type, x)[0]
    return found


def _scaled(
    graph: "DistGraph", x: Tensor, col_scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Give features, and the factors of own sources and of others, which are exchanged once."""
    if col_scale is None:
        return x, None, None
    if col_scale.requires_grad:
        return x * col_scale[:, None], None, None
    return x, col_scale, graph.halo.exchange(col_scale)
