"""Products of a graph with features: sum and mean, differentiable any number of times.

Public functions take edge values in the user's order and bring them to that of the graph's CSR,
where everything else here works: the transposed product reads them through a permutation, and the
sddmm of the transpose is that of the graph with its features exchanged.  So every gradient is again
a function of this file or of ``edges``, which imports it: what is needed of ``edges`` here is
imported when called.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.engine import checks
from ..ops.matmul.api import REDUCTIONS
from .engine import checks as _check
from .engine import library
from .engine.library import LibraryOp
from .engine.recording import apart, recorded
from .tensors.edge_index import as_graph
from .tensors.order import given_in_csr_order, in_own_order
from .tensors.prepare import GraphLike, graph_tensors, side_of
from .tensors.tensors import GraphTensors, Side

SPMM = LibraryOp("spmm")
AGGREGATE_BACKWARD = LibraryOp("aggregate_backward")
#: Entries, and bytes of a row of features, beyond which a gather of the values costs less than the
#: permutation in the product's kernel, as measured on an H200.
_MANY, _WIDE = 2 * 2**20, 256


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
    checks.word("reduce", reduce, REDUCTIONS)
    graph = as_graph(graph, x)
    tensors = graph_tensors(graph)
    if getattr(x, "ndim", 2) == 3 or getattr(edge_weight, "ndim", 1) == 2:
        from .heads import spmm_of_heads

        return spmm_of_heads(graph, x, edge_weight, reduce, row_scale, col_scale)
    x, values, r, c = _operands(tensors, x, edge_weight, row_scale, col_scale)
    if edge_weight is not None:
        values = given_in_csr_order(graph, tensors, values)
    if library.unheard(tensors.rows, (x, values, r, c)):
        found: Tensor = SPMM.at_once(tensors.rows, x, values, None, r, c, reduce)
        return found
    return multiply(graph, False, x, values, r, c, reduce)


def operands(
    graph: GraphLike,
    x: Tensor,
    edge_weight: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Check the operands of a product, and cast them as autocast would.

    Parameters
    ----------
    graph, x, edge_weight, row_scale, col_scale
        As for ``spmm``.

    Returns
    -------
    x, values, row_scale, col_scale : Tensor
        In one dtype, autocast's where it is at work; ``values`` are the graph's own where no
        ``edge_weight`` is given, in the same order.  None for what there is not.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``, in the names of these arguments.

    Notes
    -----
    For layers that compute with their operands before they aggregate.
    """
    graph = as_graph(graph, x)
    tensors = graph_tensors(graph)
    x, values, r, c = _operands(tensors, x, edge_weight, row_scale, col_scale)
    if edge_weight is None and values is not None:
        values = in_own_order(graph, values)
    return x, values, r, c


def csr_operands(
    graph: GraphLike, x: Tensor, edge_weight: Tensor | None, *scales: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Check and cast as ``operands``, with the values in CSR order."""
    tensors = graph_tensors(graph)
    x, values, r, c = _operands(tensors, x, edge_weight, *scales)
    if edge_weight is not None:
        values = given_in_csr_order(graph, tensors, values)
    return x, values, r, c


def _operands(
    tensors: GraphTensors,
    x: Tensor,
    edge_weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    values = tensors.csr_values if edge_weight is None else edge_weight
    operands = x, values, row_scale, col_scale
    x, values, row_scale, col_scale = library.narrowed(tensors.kind, *operands)
    _check.matrix("x", x, rows=tensors.n_cols, axis="columns", graph=tensors)
    if edge_weight is not None:
        _check.vector(
            "edge_weight", values, length=tensors.nnz, what="stored entries", x=x, graph=tensors
        )
    elif values is not None:
        _check.own_values(values, x, tensors)
    if row_scale is not None or col_scale is not None:
        check_scales(tensors, x, row_scale, col_scale)
    return x, values, row_scale, col_scale


def check_scales(
    tensors: GraphTensors, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> None:
    """Check for one factor for each row and column, in the dtype of the features."""
    if row_scale is not None:
        length = tensors.n_rows
        _check.vector("row_scale", row_scale, length=length, what="rows", x=x, graph=tensors)
    if col_scale is not None:
        length = tensors.n_cols
        _check.vector("col_scale", col_scale, length=length, what="columns", x=x, graph=tensors)


def multiply(
    graph: GraphLike,
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
    inputs = x, values, row_scale, col_scale
    if not recorded(*inputs):
        return aggregated(graph, transposed, *inputs, reduce)
    if reduce not in ("sum", "mean"):
        from .extrema import best

        return best(graph, reduce, *inputs)
    found: Tensor = _Spmm.apply(*apart(*inputs), graph, transposed, reduce)  # type: ignore[no-untyped-call]
    return found


def aggregated(
    graph: GraphLike, transposed: bool, x: Tensor, values: Tensor | None, *others: Any
) -> Tensor:
    """Multiply as ``multiply`` does, of sums and means, and record nothing."""
    side = side_of(graph, transposed)
    perm = None if values is None else side.perm
    if values is not None and perm is not None and x.is_cuda and _gathers_first(values, x):
        values, perm = values.index_select(0, perm), None
    out: Tensor = SPMM(side, x, values, perm, *others)
    return out


def _gathers_first(values: Tensor, x: Tensor) -> bool:
    """Tell whether values are best brought in order, rather than read by each slice of features."""
    return values.shape[0] > _MANY or x.shape[-1] * x.element_size() > _WIDE


class _Spmm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        *factors, ctx.graph, ctx.transposed, ctx.reduce = given
        read = any(ctx.needs_input_grad[1:4])  # only the gradients of factors read x
        ctx.save_for_backward(x if read else None, *factors)
        values = factors[0]
        ctx.of_heads = values is not None and values.dim() == 2
        ctx.shared = ctx.of_heads and x.dim() == 2
        return aggregated(ctx.graph, ctx.transposed, x, *factors, ctx.reduce)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        graph, transposed, needs = ctx.graph, ctx.transposed, ctx.needs_input_grad
        x, grad, factors = restored(ctx, ctx.saved_tensors, grad, side_of(graph, transposed))
        both = needs[0] and needs[1] and not any(needs[2:4]) and not ctx.of_heads
        if both and not recorded(grad, x, *factors.of_products):
            side = side_of(graph, not transposed)
            given = factors.values, side.perm, factors.rows, factors.cols
            # One gather of the gradient's rows serves both: fuseGNN, algorithms 2 and 3.
            dx, dv = AGGREGATE_BACKWARD(side, x, grad, *given)
            return dx, dv, None, None, None, None, None
        dx = None
        if needs[0]:
            dx = multiply(graph, not transposed, grad, factors.values, factors.cols, factors.rows)
            dx = dx.sum(1) if ctx.shared else dx
        if ctx.shared and x is not None:
            x = x[:, None].expand(-1, grad.shape[1], -1)
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

    @property
    def of_products(self) -> tuple[Tensor | None, ...]:
        """Values and both scales."""
        return self.values, self.rows, self.cols


def restored(ctx: Any, saved: Any, grad: Tensor, side: Side) -> tuple[Any, Tensor, Factors]:
    """Give features, the gradient of the result and the factors as backward computes with them.

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
    """Compute the gradients of edge values and both scales, where ``needs`` says so.

    ``products(r, c)`` are ``r[i] c[j] <grad[i], x[j]>`` at the entries.
    """
    values, rows, cols, inverse = factors
    if not needs[1] and not needs[2]:
        return products(rows, cols) if needs[0] else None, None, None
    plain = products(None, None)
    weighted = plain if values is None else plain * values
    if weighted.dim() == 2:  # of heads, which share the scales
        weighted = weighted.sum(1)
    dv = dr = dc = None
    if needs[0]:
        dv = scaled(graph, transposed, plain, rows, cols)
    if needs[1]:
        dr = segment_sums(graph, transposed, weighted, inverse, cols)
    if needs[2]:
        dc = segment_sums(graph, not transposed, weighted, None, rows)
    return dv, dr, dc


def segment_sums(
    graph: GraphLike, transposed: bool, values: Tensor, r: Tensor | None, c: Tensor | None
) -> Tensor:
    """Sum ``r[i] values[e] c[j]`` over the entries of each row: (n_rows,)."""
    x = values.new_ones(side_of(graph, transposed).n_cols) if c is None else c
    return multiply(graph, transposed, x[:, None], values, r, None)[:, 0]


def _products(
    graph: GraphLike, transposed: bool, x: Tensor, y: Tensor, r: Tensor | None, c: Tensor | None
) -> Tensor:
    """Compute ``r[i] c[j] <x[i], y[j]>`` at the entries of the graph or its transpose."""
    from .edges import dot_products

    return dot_products(graph, y, x, c, r) if transposed else dot_products(graph, x, y, r, c)


def scaled(
    graph: GraphLike, transposed: bool, values: Tensor, r: Tensor | None, c: Tensor | None
) -> Tensor:
    """Scale values of entries: ``r[i] values[e] c[j]``, differentiable in all three."""
    rows = side_of(graph, False)
    if transposed:
        r, c = c, r
    if r is None and c is None:
        return values
    from .edges import dot_products

    one = values.new_ones(1)
    r = one.expand(rows.indptr.shape[0] - 1) if r is None else r
    c = one.expand(rows.n_cols) if c is None else c
    factors = dot_products(graph, r[:, None], c[:, None])
    return values * (factors if values.dim() == 1 else factors[:, None])
