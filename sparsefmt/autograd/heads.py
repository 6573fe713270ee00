"""Products with several heads: features of each, and a value of each for every edge."""

from torch import Tensor

from ..errors import ShapeError
from ..ops.matmul.heads import summed
from .engine import checks, library
from .matmul import check_scales, multiply, spmm
from .tensors.order import given_in_csr_order
from .tensors.prepare import GraphLike, graph_tensors


def spmm_of_heads(
    graph: GraphLike,
    x: Tensor,
    edge_weight: Tensor | None,
    reduce: str,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """Run ``spmm`` of features with heads, or of weights with heads, or of both."""
    tensors = graph_tensors(graph)
    checks.tensor("x", x)
    if edge_weight is not None:
        checks.tensor("edge_weight", edge_weight)
    if edge_weight is None or edge_weight.dim() != 2:  # all heads have the same
        checks.features("x", x, rows=tensors.n_cols, axis="columns", graph=tensors)
        flat = x.reshape(x.shape[0], x.shape[1] * x.shape[2])
        given = {"row_scale": row_scale, "col_scale": col_scale}
        found = spmm(graph, flat, edge_weight, reduce=reduce, **given)
        return found.view(found.shape[0], *x.shape[1:])
    summed(reduce)
    operands = x, edge_weight, row_scale, col_scale
    x, edge_weight, row_scale, col_scale = library.narrowed(tensors.kind, *operands)
    checks.features("x", x, rows=tensors.n_cols, axis="columns", graph=tensors)
    checks.of_heads("edge_weight", edge_weight, tensors, x)
    if x.dim() > 3 or (x.dim() == 3 and x.shape[1] != edge_weight.shape[1]):
        raise ShapeError(
            f"x has shape {tuple(x.shape)} but edge_weight has {edge_weight.shape[1]} heads: give "
            f"(rows, {edge_weight.shape[1]}, feat), or (rows, feat) for all heads."
        )
    check_scales(tensors, x, row_scale, col_scale)
    values = given_in_csr_order(graph, tensors, edge_weight)
    return multiply(graph, False, x, values, row_scale, col_scale, reduce)
