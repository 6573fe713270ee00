"""Sums over the neighbours of each relation, whose features a matrix of its own maps.

Features are mapped before they are gathered: a group of relations in one product, then one sum over
its edges, to which the groups before it are added in the kernel.  So there is neither a copy of the
features for each relation nor one for each edge, nothing of either is kept for backward, and each
pass gathers ``out_channels`` values an edge.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import DtypeError, ShapeError
from ..graph.graph import Graph
from ..interop.adjacency import is_adj_t
from ..ops.engine.bind import word
from ..ops.matmul.api import REDUCTIONS
from .engine import checks as _check
from .engine import library
from .engine.memory import sums_dtype
from .engine.recording import Ctx, taped, untraced
from .matmul import SPMM, multiply
from .tensors.edge_index import as_graph, wrong_graph
from .tensors.prepare import GraphLike, tensors_of
from .tensors.tensors import GraphTensors
from .tensors.types import Group, Grouping, groups_of

#: Bytes of mapped features that a group of relations may have: they stay in the L2 of a GPU, and
#: memory is bounded by them.
RESIDENT_BYTES = 32 << 20
#: Bytes of whole matrices that weights of blocks become: a product of blocks, eight of 16 by 16 for
#: each of 8 types and 169,000 vertices, took 18 times as long backward (H100).
MOST_OF_WHOLE = 32 << 20


def relational_aggregate(
    graph: GraphLike,
    x: Tensor,
    weight: Tensor,
    edge_type: Tensor | None = None,
    *,
    reduce: str = "mean",
    own: Tensor | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Aggregate mapped features of neighbours over each relation, and add these up.

    ``y[i] = own[i] + sum_t reduce_e(x[j]) W_t`` over the entries ``e = (i, j)`` of type ``t``; 0
    for a row without any of a type.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Or an ``edge_index``, as in ``spmm``.
    x : Tensor, shape (n_cols, in_channels), or of integers and shape (n_cols,)
        Features, or for each column the row of ``W_t`` that is its mapped feature.
    weight : Tensor, shape (n_types, in_channels, out_channels)
        ``W``; or (n_types, n_blocks, in_channels / n_blocks, out_channels / n_blocks), the blocks
        on the diagonals of matrices.
    edge_type : Tensor of integers, shape (nnz,), optional
        In the order of ``graph.structure``: that in which the edges were given.  By default the
        graph's own values, which of an ``adj_t`` go before it.
    reduce : "sum", "mean", "max" or "min"
    own : Tensor, shape (n_rows, out_channels), optional
    size : (n_cols, n_rows), optional
        Of an ``edge_index``, if ``x`` and ``own`` do not tell.

    Returns
    -------
    Tensor, shape (n_rows, out_channels)

    Raises
    ------
    ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arguments do not fit together, a type is none of ``n_types``, or an id none of
        ``in_channels``.
    UnsupportedError
        If there is no such ``reduce``, or it is called within ``torch.func`` or with a tangent.

    Notes
    -----
    ``x``, ``weight`` and ``own`` have gradients; those of sums and means are differentiable any
    number of times.  Deterministic.  The groups of edges are made once of a graph and the tensor
    ``edge_type``, as long as both are there and unchanged: keep them.  ``torch.compile`` breaks its
    graph here.  R-GCN (ESWC'18), equations 2 to 4.
    """
    word("reduce", reduce, REDUCTIONS)
    edge_type = None if is_adj_t(graph) else edge_type
    run = _related_outside if torch.compiler.is_compiling() else _related
    out: Tensor = run(as_graph(graph, x, own, size=size), x, weight, edge_type, reduce, own)
    return out


def _related(
    graph: Graph,
    x: Tensor,
    weight: Tensor,
    edge_type: Tensor | None,
    reduce: str,
    own: Tensor | None,
) -> Tensor:
    """Aggregate along a graph, after the arguments are known to be what they should be."""
    if not isinstance(graph, Graph):
        raise wrong_graph(graph)
    x, weight, own = _operands(graph, x, weight, own)
    weight = _joined_blocks(weight)
    n_types, blocks, rows, columns = weight.shape
    by_ids, summed = not x.is_floating_point(), reduce in ("sum", "mean")
    count = n_types if summed else 1  # relations of a group
    if summed and not by_ids:
        nbytes = graph.shape[1] * blocks * columns * weight.element_size()
        count = max(min(RESIDENT_BYTES // max(nbytes, 1), n_types), 1)
        if reduce == "mean" and weight.element_size() == 2:
            count = 1  # shares of a mean would be rounded
    values = weight.dtype if reduce == "mean" and count > 1 else None
    grouping = Grouping(n_types, count, values, rows if by_ids else None)
    groups = groups_of(graph, edge_type, grouping, x if by_ids else None)
    if by_ids or not summed:
        return _unmapped(x, weight, own, graph, groups, reduce)
    return taped(_Relational, _summed, (x, weight, own), graph, groups, reduce)


_related_outside: Any = untraced(_related)


def _operands(
    graph: Graph, x: Tensor, weight: Tensor, own: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the operands, and cast them as autocast would."""
    x, weight, own = library.narrowed(torch.device(graph.device).type, x, weight, own)
    for name, value in (("x", x), ("weight", weight), ("own", own)):
        if value is not None:
            _check.tensor(name, value)
            _check.on_device(name, value, graph)
    _check.floating("weight", weight)
    if weight.dim() not in (3, 4) or not len(weight):
        raise ShapeError(
            f"weight has shape {tuple(weight.shape)}: give (n_types, in_channels, out_channels), "
            "or blocks of these."
        )
    n_cols, blocks = graph.shape[1], weight.dim() == 4
    times = weight.shape[1] if blocks else 1
    width, wanted = weight.shape[-2] * times, (graph.shape[0], weight.shape[-1] * times)
    if own is not None and own.shape != wanted:
        raise ShapeError(f"own has shape {tuple(own.shape)}: give {wanted}.")
    by_ids = not x.is_floating_point()
    for name, value in (("own", own), ("x", None if by_ids else x)):
        if value is not None and value.dtype is not weight.dtype:
            raise DtypeError(
                f"{name} is {value.dtype} but weight is {weight.dtype}: give both in one dtype, "
                f"{name}.to({weight.dtype}) for instance."
            )
    if by_ids and blocks:
        raise DtypeError(
            f"x is {x.dtype} but weight has blocks, which ids cannot choose rows of: give "
            "floating features, or weights without blocks."
        )
    known = x.dtype in (torch.int64, torch.int32)
    if by_ids and not (known and x.shape == (n_cols,)):
        raise (ShapeError if known else DtypeError)(
            f"x is {x.dtype} of shape {tuple(x.shape)}: give floating features, or ids in "
            f"torch.int64 of shape ({n_cols},)."
        )
    if not by_ids and x.shape != (n_cols, width):
        raise ShapeError(
            f"x has shape {tuple(x.shape)}: give {(n_cols, width)}, a row for each column of the "
            f"graph, of graph.shape == {graph.shape}, as wide as weight takes."
        )
    return x, weight, own


# Products with weights: all as blocks, of which most have one


def _joined_blocks(weight: Tensor) -> Tensor:
    """Return matrices as one block each, also of diagonal blocks where that takes little memory."""
    if weight.dim() == 3:
        return weight.unsqueeze(1)
    types, blocks, rows, columns = weight.shape
    if weight.nbytes * blocks > MOST_OF_WHOLE:
        return weight
    spread = torch.diag_embed(weight.permute(0, 2, 3, 1), dim1=1, dim2=3)
    return spread.reshape(types, 1, blocks * rows, blocks * columns)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply block by block; torch's product of one splits long sums among the GPU's cores."""
    return torch.mm(a[0], b[0])[None] if len(a) == 1 else torch.bmm(a, b)


def _blocks(weight: Tensor, group: Group) -> Tensor:
    """Join the weights of a group side by side: (n_blocks, in, count * out)."""
    weights = weight[group.first : group.first + group.length]
    _, blocks, rows, columns = weights.shape
    return weights.permute(1, 2, 0, 3).reshape(blocks, rows, group.length * columns)


def _by_blocks(x: Tensor, blocks: int) -> Tensor:
    """Convert (n, blocks * feat) to (blocks, n, feat)."""
    return x.reshape(x.shape[0], blocks, x.shape[1] // max(blocks, 1)).transpose(0, 1)


def _sources(x: Tensor, group: Group) -> Tensor:
    """Choose the features (blocks, n, feat) of the vertices that a group has columns for."""
    return x if group.sources is None else x.index_select(1, group.sources)


def _of_relations(z: Tensor, count: int) -> Tensor:
    """Convert (blocks, n, count * out) to (n * count, blocks * out), a row for each relation."""
    blocks, n, width = z.shape
    z = z.view(blocks, n, count, width // count).permute(1, 2, 0, 3)
    return z.reshape(n * count, blocks * (width // count))


def _summed(
    x: Tensor,
    weight: Tensor,
    own: Tensor | None,
    graph: Graph,
    groups: tuple[Group, ...],
    reduce: str,
) -> Tensor:
    """Map the features for each group, and add up its edges and what there is already."""
    x, y = _by_blocks(x, weight.shape[1]), own
    for group in groups:
        z = _of_relations(_product(_sources(x, group), _blocks(weight, group)), group.length)
        tensors = tensors_of(group.graph)
        args = z, tensors.csr_values, None, None, None, _reduction(tensors, reduce)
        y = SPMM(tensors.rows, *args, *(() if y is None else (y, None, False, None)))
    if y is None:
        return _zeros_of_rows(graph, weight)
    return y.clone() if y is own else y


def _zeros_of_rows(graph: Graph, weight: Tensor) -> Tensor:
    """Return the result of a graph without edges."""
    return weight.new_zeros(graph.shape[0], weight.shape[1] * weight.shape[3])


def _reduction(tensors: GraphTensors, reduce: str) -> str:
    """Return the reduction of a group, whose values may be the shares of a mean already."""
    return "sum" if tensors.csr_values is not None else reduce


class _Relational(Function):
    @staticmethod
    def forward(ctx: Ctx, x: Tensor, weight: Tensor, own: Tensor | None, *args: Any) -> Tensor:
        _, ctx.groups, ctx.reduce = args
        ctx.save_for_backward(x, weight)
        return _summed(x, weight, own, *args)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_own = ctx.needs_input_grad[:3]
        blocks = weight.shape[1]
        dx: Tensor | None = None
        dw: Tensor | None
        parts, end = list[Tensor](), 0
        for group in ctx.groups if of_x or of_weight else ():
            tensors, count = tensors_of(group.graph), group.length
            mean = _reduction(tensors, ctx.reduce) == "mean"
            scale = tensors.rows.inverse_degree(sums_dtype(grad)) if mean else None
            dz = multiply(tensors, True, grad, tensors.csr_values, None, scale)
            shape = dz.shape[0] // count, count, blocks, dz.shape[1] // blocks
            dz = dz.reshape(shape).permute(2, 0, 1, 3).reshape(blocks, shape[0], count * shape[3])
            if of_weight:
                parts += _zeros(weight, group.first - end)
                h = _sources(_by_blocks(x, blocks), group)
                dw = _product(h.transpose(1, 2), dz)
                dw = dw.view(*dw.shape[:2], count, dw.shape[2] // count)
                parts.append(dw.permute(2, 0, 1, 3))
                end = group.first + count
            if of_x:
                dx = _plus_features(dx, x, _blocks(weight, group).transpose(1, 2), group, dz)
        dw = None
        if of_weight:
            parts += _zeros(weight, len(weight) - end)
            dw = parts[0] if len(parts) == 1 else torch.cat(parts)
        if of_x:
            dx = torch.zeros_like(x) if dx is None else dx.transpose(0, 1).reshape(x.shape)
        return dx, dw, grad if of_own else None, None, None, None


def _plus_features(dx: Tensor | None, x: Tensor, maps: Tensor, group: Group, dz: Tensor) -> Tensor:
    """Add a group's gradient of features; in place unless it is to be differentiated again."""
    sources, again = group.sources, torch.is_grad_enabled()
    if sources is None and dx is not None and not again:
        return dx[0].addmm_(dz[0], maps[0])[None] if len(dz) == 1 else dx.baddbmm_(dz, maps)
    part = _product(dz, maps)  # of some vertices, each once: nothing depends on an order
    if sources is None:
        return part if dx is None else dx + part
    if dx is None:
        dx = part.new_zeros(part.shape[0], x.shape[0], part.shape[2])
    return dx.index_add(1, sources, part) if again else dx.index_add_(1, sources, part)


def _zeros(weight: Tensor, count: int) -> list[Tensor]:
    """Return the gradient of types that no edge has."""
    return [weight.new_zeros(count, *weight.shape[1:])] if count else []


# Rows of the weights in the place of mapped features, and reductions of features as they are


def _unmapped(
    x: Tensor,
    weight: Tensor,
    own: Tensor | None,
    graph: Graph,
    groups: tuple[Group, ...],
    reduce: str,
) -> Tensor:
    """Aggregate the rows of the weights that ids choose, or features before they are mapped.

    The sum of such rows over all relations is one product, with a table of all of them.
    """
    by_ids, y = not x.is_floating_point(), own
    if not groups:  # gradients of zeros
        zeros = _zeros_of_rows(graph, weight) + weight[:0].sum() + (0 if by_ids else x[:0].sum())
        return zeros if own is None else own + zeros
    for group in groups:
        features = weight.flatten(0, 2) if group.length > 1 else weight[group.first, 0]
        features = features if by_ids else x
        features = features if group.sources is None else features[group.sources]
        tensors = tensors_of(group.graph)
        kind = _reduction(tensors, reduce)
        out = multiply(tensors, False, features, tensors.csr_values, None, None, kind)
        if not by_ids:
            maps = _blocks(weight, group)
            out = _of_relations(_product(_by_blocks(out, len(maps)), maps), 1)
        y = out if y is None else y + out
    return cast(Tensor, y)
