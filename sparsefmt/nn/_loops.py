"""Loops of a graph, and what adding one to each vertex makes of degrees and softmax."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from ..autograd import as_graph, propagate, sddmm, spmm
from ..autograd.engine.checks import FLOATING
from ..autograd.gcn import unit_scales
from ..autograd.matmul import multiply, operands
from ..autograd.own_parts import with_own
from ..autograd.tensors.order import in_csr_order, in_own_order, own_values
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.shared import Shared
from ..autograd.tensors.tensors import GraphTensors
from ..errors import UnsupportedError
from ._inputs import by_vertex, check_edge_weight
from ._passing import plus


def symmetric(
    tensors: GraphTensors,
    values: Tensor | None,
    dtype: torch.dtype,
    fill: float = 1.0,
    *,
    to_all: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``d[i]^-1/2``, and ``own[i] / d[i]``, the part of a vertex's own features.

    ``d[i] = own[i] + sum_e a[e]`` over the entries of row ``i``, of ``values`` in CSR order or, if
    they are None, the graph's own.  ``own[i]`` is ``fill`` for a vertex without a loop and 0 for
    one with a loop.  Of several loops the last counts alone, as in PyG: ``own[i]`` is minus the
    values of the earlier ones.  With ``to_all``, or a ``fill`` of 0, ``own[i]`` is ``fill`` for
    each vertex and all loops count.  Both results are 0 where ``d[i] <= 0``.

    Differentiable in ``values``; results of the graph's own values are kept with it.  Of a graph
    that processes share, those of the vertices here, of which ``tensors`` are.
    """
    if values is not None:
        scale, loop = _symmetric(tensors, values, fill, to_all)
        return scale.to(dtype), loop.to(dtype)
    by_default = fill == 1 and not to_all
    made = tensors.built_scales() if by_default and dtype is torch.float32 else None
    if made is not None:
        return made

    def make() -> Tensor:
        both = unit_scales(tensors, dtype) if by_default else None
        if both is None:
            both = torch.stack(_symmetric(tensors, None, fill, to_all)).to(dtype)
        return both

    key = ("gcn", dtype) if by_default else ("gcn", dtype, fill, to_all)
    scale, loop = tensors.cached(key, make).unbind()
    return scale, loop


def _is_blind(tensors: GraphTensors) -> bool:
    """Return True during a compile or a capture, when values of tensors cannot be read."""
    if torch.compiler.is_compiling():
        return True
    return tensors.kind == "cuda" and torch.cuda.is_current_stream_capturing()


def _symmetric(
    tensors: GraphTensors, values: Tensor | None, fill: float, to_all: bool
) -> tuple[Tensor, Tensor]:
    """Compute the factors of ``symmetric``, in float32 at least: 2 bytes may not hold a degree."""
    values = tensors.csr_values if values is None else values
    if values is not None and values.dtype.itemsize == 2:
        values = values.float()
    wide = torch.float64 if values is None else values.dtype

    def constants() -> Tensor:
        ones = torch.ones(tensors.n_cols, dtype=wide, device=tensors.device)
        added = ones[: tensors.n_rows] if to_all else missing_loops(tensors).to(wide)
        return torch.cat([ones, fill * added])

    both = tensors.cached(("ones and added loops", wide, fill, to_all), constants)
    ones, own = both.split_with_sizes([tensors.n_cols, tensors.n_rows])
    column = ones[:, None]
    earlier = earlier_loops(tensors) if fill and not to_all else None
    with torch.autocast(tensors.kind, enabled=False):
        if earlier is not None:
            earlier = earlier.to(wide) if values is None else values * earlier.to(wide)
            own = own - multiply(tensors, False, column, earlier, None, None)[:, 0]
        degree = own + multiply(tensors, False, column, values, None, None)[:, 0]
    scale = degree.masked_fill(degree <= 0, inf).rsqrt()
    return scale, own * scale * scale


def earlier_loops(tensors: GraphTensors) -> Tensor | None:
    """Return 1 for a loop with a later one of its vertex, else 0: (nnz,) in CSR order, kept.

    In float64; None where there is no such loop.
    """

    def make(_: Tensor) -> Tensor:
        row, col = rows_and_columns(tensors)
        at, loop = torch.arange(1, tensors.nnz + 1, device=row.device), row == col
        last = at.new_zeros(tensors.n_rows).scatter_reduce(0, row, at * loop, "amax")
        return in_csr_order(tensors, (loop & (at != last.index_select(0, row))).double())

    return _of_loops(tensors, "earlier loops", lambda count: count > 1, make)


def lone_loops(tensors: GraphTensors) -> Tensor | None:
    """Return a mask of the vertices with one loop, to which ``symmetric`` adds none: (n, 1), kept.

    Whatever the loop's value; None where there is no such vertex.
    """
    return _of_loops(tensors, "lone loops", lambda count: count == 1, lambda lone: lone[:, None])


def _of_loops(
    tensors: GraphTensors,
    key: str,
    wanted: Callable[[Tensor], Tensor],
    make: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Return ``make(mask)`` of the vertices with a wanted number of loops, kept; None without any.

    Where the build of the graph has told, or will tell, whether there are loops, nobody waits for
    it; other graphs are looked at once.
    """
    # Not read by a tracer, which remembers what it read.
    if not torch.compiler.is_compiling() and tensors.loops is False and not _is_blind(tensors):
        return None

    def look() -> Tensor:
        mask = wanted(tensors.cached("loops of rows", lambda: loops(tensors)[1]))
        blind = _is_blind(tensors) or tensors.pending
        return make(mask) if blind or mask.any() else mask[:0]  # synchronize!

    result = tensors.cached(key, look)
    return None if result.shape[0] == 0 else result


def missing_loops(tensors: GraphTensors) -> Tensor:
    """Return 1 for a vertex without a loop, else 0: (n,) in float64, kept with the graph."""

    def make() -> Tensor:
        return (tensors.cached("loops of rows", lambda: loops(tensors)[1]) == 0).double()

    return tensors.cached("loops missing", make)


def loops(tensors: GraphTensors) -> tuple[Tensor, Tensor]:
    """Return 1 for a loop, else 0, (nnz,), and the loops of each row, (n_rows,), in float64."""
    row, col = rows_and_columns(tensors)
    counted = (row == col).double()
    return counted, spmm(tensors, counted.new_ones(tensors.n_cols, 1), counted)[:, 0]


def rows_and_columns(tensors: GraphTensors) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each entry, (nnz,) in int64, in the user's order."""
    options = {"dtype": torch.float64, "device": tensors.device}
    rows, cols = (torch.arange(n, **options)[:, None] for n in (tensors.n_rows, tensors.n_cols))
    row, col = (
        sddmm(tensors, rows, torch.ones_like(cols)),
        sddmm(tensors, torch.ones_like(rows), cols),
    )
    return row.long(), col.long()


def entries_as_columns(tensors: GraphTensors) -> GraphLike:
    """Return the cached graph with a column for each entry, stored in that entry's row."""

    def make() -> Tensor:
        rows = rows_and_columns(tensors)[0]
        return torch.stack([torch.arange(len(rows), device=rows.device), rows])

    edges, size = tensors.cached("entries as columns", make), (tensors.nnz, tensors.n_rows)
    graph: GraphLike = as_graph(edges, None, size=size)
    return graph


def with_loops(tensors: GraphTensors) -> tuple[Tensor, Tensor]:
    """Return an ``edge_index`` with one loop of each vertex that is row and column, kept.

    It has the entries that are no loops, then the loops; and which entries of the graph these are.
    """

    def places() -> Tensor:
        row, col = rows_and_columns(tensors)
        return (row != col).nonzero()[:, 0]  # synchronize!

    rest = tensors.cached("others than loops", places)

    def edges() -> Tensor:
        row, col = rows_and_columns(tensors)
        own = torch.arange(min(tensors.n_rows, tensors.n_cols), device=tensors.device)
        return torch.stack([torch.cat([end[rest], own]) for end in (col, row)])

    return tensors.cached("edges with loops", edges), rest


def log_sums(tensors: GraphTensors, scores: Tensor, p: Tensor) -> Tensor:
    """Compute the logarithm of each row's sum of ``exp(scores)``, (n,); ``p`` is the softmax."""
    with torch.autocast(tensors.kind, enabled=False):
        # log Z = scores - log p at each entry of a row: their mean, weighted with p.
        log_z = scores - p.clamp(min=torch.finfo(p.dtype).tiny).log()
        log_z = spmm(tensors, p.new_ones(tensors.n_cols, 1), p * log_z)[:, 0]
    indptr = tensors.rows.indptr
    return log_z.masked_fill(indptr[1:] == indptr[:-1], -inf)


#: Features (n, feat), and a bias to add, to the same shape.
Step: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]


def as_operands(
    graph: GraphLike, tensors: GraphTensors, x: Tensor, edge_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return features and weights in the dtype of their product, or refuse them by their names."""
    values = tensors.csr_values if edge_weight is None else edge_weight
    if not torch.is_autocast_enabled(tensors.kind) and (
        x.dtype in FLOATING
        if values is None
        else (
            isinstance(values, Tensor)
            and values.shape == (tensors.nnz,)
            and values.dtype is x.dtype
            and values.device == tensors.device
            and values.layout is torch.strided
        )
    ):
        return x, edge_weight
    check_edge_weight(edge_weight, tensors)
    x, values, _, _ = operands(graph, x, edge_weight)
    return x, None if edge_weight is None else values


def gets_all_loops(edge_index: object) -> bool:
    """Return True if ``gcn_norm`` adds a loop to vertices that have one: of torch's sparse tensors.

    PyG adds only the missing ones to an ``edge_index`` and to a torch_sparse.SparseTensor.
    """
    return isinstance(edge_index, Tensor) and edge_index.layout is not torch.strided


def first_graph(layer: Any, x: Any, edge_index: Any, edge_weight: Tensor | None) -> Any:
    """Return graph and edge weights of a layer's first call, and True if all vertices get loops."""
    sparse = not isinstance(edge_index, Tensor) and hasattr(edge_index, "sparse_sizes")
    name = "_cached_adj_t" if sparse else "_cached_edge_index"
    if getattr(layer, name) is None:
        graph = as_graph(edge_index, by_vertex(x), name="edge_index")
        layer._turned(graph, edge_index)  # which an adj_t cannot be
        if isinstance(edge_weight, Tensor):
            edge_weight = edge_weight.clone()  # which later changes in place do not reach
        setattr(layer, name, (graph, edge_weight, gets_all_loops(edge_index)))
    return getattr(layer, name)


def hop(
    graph: GraphLike,
    tensors: GraphTensors,
    edge_weight: Tensor | None,
    dtype: torch.dtype,
    fill: float | None,
    *,
    reduction: str,
    to_all: bool,
) -> Step:
    """Return the function that takes features of that dtype one step along the edges.

    ``y = D^-1/2 (A + fill I) D^-1/2 x + bias``, where ``I`` adds a loop to the vertices that have
    none, or ``to_all``, and ``D`` is the diagonal of the rows' sums of ``A + fill I``; or with a
    ``fill`` of None ``y = A x + bias``.
    """
    if fill is not None and reduction != "sum":
        if isinstance(graph, Shared):
            raise UnsupportedError(
                f"aggr is {reduction!r} of a normalised graph that processes share: give 'sum', or "
                "the layer normalize=False."
            )
        graph, edge_weight = explicit(tensors, edge_weight, dtype, fill, to_all)
        fill = None
    if fill is None:
        return lambda x, bias: plus(spmm(graph, x, edge_weight, reduce=reduction), bias)
    values = None if edge_weight is None else in_csr_order(tensors, edge_weight)
    scale, loop = symmetric(tensors, values, dtype, fill, to_all=to_all)
    if fill == 0:
        scales: dict[str, Any] = {"row_scale": scale, "col_scale": scale}
        return lambda x, bias: plus(spmm(graph, x, edge_weight, **scales), bias)
    args: dict[str, Any] = {}
    if loop.requires_grad and not to_all:  # 0 times an infinite feature is NaN
        args["without"] = lone_loops(tensors)
    if isinstance(graph, Shared):
        own, args["edge_weight"] = loop[:, None], edge_weight
        return lambda x, bias: propagate(graph, x, scale, own, bias=bias, **args)
    values = tensors.csr_values if values is None else values
    if values is not None and values.dtype is not dtype:  # which autocast has left
        values = values.to(dtype)
    return partial(with_own, tensors, (values, scale, scale, loop), **args)


def explicit(
    tensors: GraphTensors,
    edge_weight: Tensor | None,
    dtype: torch.dtype,
    fill: float,
    to_all: bool,
) -> tuple[GraphLike, Tensor]:
    """Build the graph with its loops and each edge's normalised value, for other reductions."""
    values = in_csr_order(tensors, edge_weight)
    scale, _ = symmetric(tensors, values, dtype, fill, to_all=to_all)
    n, stated = scale.shape[0], own_values(tensors) if edge_weight is None else edge_weight
    weight = scale.new_ones(tensors.nnz) if stated is None else stated.to(dtype)
    row, col = rows_and_columns(tensors)
    values = scale[row] * weight * scale[col]
    if fill == 0:
        return tensors, values
    edges, entries = with_loops(tensors)
    counted, _ = loops(tensors)
    earlier = None if to_all else in_own_order(tensors, earlier_loops(tensors))
    counted = (counted if earlier is None else counted - earlier).to(dtype)
    own = spmm(tensors, counted.new_ones(n, 1), weight * counted)[:, 0]
    added = fill if to_all else fill * missing_loops(tensors).to(dtype)
    own = (own + added) * scale * scale
    return as_graph(edges, None, size=(n, n)), torch.cat([values[entries], own])


def over_vertices(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a step with (n, feat), or with features (..., n, feat) side by side in rows."""
    if x.dim() == 2:
        return step(x)
    first = x.movedim(-2, 0)
    y = step(first.flatten(1))
    return y.reshape(y.shape[0], *first.shape[1:]).movedim(0, -2)


def gathered(
    module: Module, tensors: GraphTensors, x: Tensor, edge_weight: Tensor | None
) -> Tensor:
    """Aggregate features of sources by PyG's module, which gets the edges by their targets."""

    def by_targets() -> Tensor:
        row, col = rows_and_columns(tensors)
        row, order = row.sort(stable=True)
        return torch.stack([order, row, col.index_select(0, order)])

    order, row, col = tensors.cached("by targets", by_targets).unbind()
    weight = own_values(tensors) if edge_weight is None else edge_weight
    messages = x.index_select(-2, col)
    if weight is not None:
        messages = messages * weight.index_select(0, order)[:, None]
    y: Tensor = module(messages, row, ptr=None, dim_size=tensors.n_rows, dim=-2)
    return y
