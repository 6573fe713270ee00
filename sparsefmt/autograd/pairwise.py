"""Attention whose scores are of two rows, for torch: ``gatv2_aggregate`` and ``dot_aggregate``."""

from typing import Any

from torch import Tensor

from ..ops.attention import score as checks
from ..ops.attention.score import Options
from ._attention import Attention, as_computed
from .engine import check_attention as check
from .engine.library import LibraryOp
from .engine.recording import apart, once, recorded
from .tensors.edge_index import as_graph
from .tensors.order import in_csr_order
from .tensors.prepare import GraphLike, graph_tensors, side_of

ATTEND = LibraryOp("attend")
ATTEND_WITH_STATISTICS = LibraryOp("attend_with_statistics")
ATTEND_BACKWARD = LibraryOp("attend_backward")


def gatv2_aggregate(
    graph: GraphLike,
    left: Tensor,
    right: Tensor,
    att: Tensor,
    edge_scores: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by GATv2's attention, differentiably.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] left[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``sum_f att[k, f] leaky(left[j, k, f] + right[i, k, f]) + edge_scores[e, k]``; ``leaky`` and
    ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``left``.
    left : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    right : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``left``.
    att : Tensor, shape (heads, feat) or (1, heads, feat), or (feat,) without heads
        In the dtype of ``left``, or float32 beside 2 bytes.
    edge_scores, negative_slope, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``left``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``.

    Notes
    -----
    ``left``, ``right``, ``att`` and ``edge_scores`` have gradients.  Deterministic, backward too.
    For backward the operands, the result and one number for each row and head are kept; scores are
    computed again.  Autocast narrows ``left`` and ``right`` and takes the others in float32.
    GATv2 (ICLR'22), equation 7.
    """
    graph = as_graph(graph, left, right)
    tensors = graph_tensors(graph)
    (left, right), (att, edge_scores) = check.autocast(tensors, (left, right), (att, edge_scores))
    check.features("left", left, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.features("right", right, rows=tensors.n_rows, axis="rows", graph=tensors)
    check.alike("right", right, "left", left, tensors)
    like = ("left", left)
    check.vector("att", att, like=like, graph=tensors)
    check.edges(edge_scores, like=like, graph=tensors)
    options = check.options(negative_slope, dropout, seed, self_loops, tensors)
    edges = in_csr_order(tensors, edge_scores)
    return _pairwise(graph, options, 1.0, right, left, None, att, edges)


def dot_aggregate(
    graph: GraphLike,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    edge_scores: Tensor | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    self_loops: bool = False,
) -> Tensor:
    """Aggregate the features of each vertex's in-neighbours by dot-product attention.

    ``y[i, k, :] = sum_e M[e, k] P[e, k] values[j, k, :]`` for head ``k`` over the stored entries
    ``e = (i, j)`` of row ``i``, where ``P[e, k]`` is the softmax over the row of
    ``scale <queries[i, k], keys[j, k]> + edge_scores[e, k]``; ``M`` as in ``gat_aggregate``.

    Parameters
    ----------
    graph : Graph, shape (n_rows, n_cols)
        Only its structure is read.  On the device of ``keys``.
    queries : Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        Of targets, in the dtype of ``keys``.
    keys : Tensor, shape (n_cols, heads, feat) or (n_cols, feat)
        Of sources; float16 or bfloat16 (summed in float32), float32 or float64.
    values : Tensor, of the shape and dtype of ``keys``, optional
        The keys by default.
    scale : float, optional
        ``1 / sqrt(feat)`` by default.
    edge_scores, dropout, seed, self_loops
        As for ``gat_aggregate``.

    Returns
    -------
    Tensor, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``keys``, or autocast's; 0 for a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat_aggregate``; ShapeError also if ``scale`` is not finite.

    Notes
    -----
    All four tensors have gradients.  Deterministic, backward too.  For backward the operands, the
    result and one number for each row and head are kept; scores are computed again.  Autocast
    narrows all but ``edge_scores``.
    Transformer (NeurIPS'17), equation 1, over the edges of a graph.
    """
    graph = as_graph(graph, keys, queries)
    tensors = graph_tensors(graph)
    given, (edge_scores,) = check.autocast(tensors, (queries, keys, values), (edge_scores,))
    queries, keys, values = given
    check.features("keys", keys, rows=tensors.n_cols, axis="columns", graph=tensors)
    check.features("queries", queries, rows=tensors.n_rows, axis="rows", graph=tensors)
    check.alike("queries", queries, "keys", keys, tensors)
    if values is not None:
        check.features("values", values, rows=tensors.n_cols, axis="columns", graph=tensors)
        check.alike("values", values, "keys", keys, tensors)
    check.edges(edge_scores, like=("keys", keys), graph=tensors)
    factor = checks.scale(scale, keys.shape[-1])
    options = check.options(0.0, dropout, seed, self_loops, tensors)
    edges = in_csr_order(tensors, edge_scores)
    return _pairwise(graph, options, factor, queries, keys, values, None, edges)


# Without checks


def _pairwise(graph: GraphLike, options: Options, scale: float, *inputs: Tensor | None) -> Tensor:
    """Run attention on queries, keys, values, ``att`` and edge scores, unchecked.

    Without ``att`` the scores are dot products; without values the keys are the values.
    """
    seed, *numbers = options.with_scale(scale)
    found: Tensor
    if not recorded(*inputs):
        found = ATTEND(side_of(graph, False), *inputs, seed, *numbers)
        return found
    given = *apart(*inputs), seed, graph, ATTEND_WITH_STATISTICS, numbers
    found = _Pairwise.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _Pairwise(Attention):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, statistics = ctx.saved_tensors
        of_values, of_att, of_edges = ctx.needs_input_grad[2:5]
        name = "dot_aggregate" if inputs[3] is None else "gatv2_aggregate"
        sides = side_of(ctx.graph, False), side_of(ctx.graph, True)
        results = as_computed(ctx, ctx.op, inputs, out, statistics)
        args = grad, *results, of_edges, *inputs, *ctx.numbers
        dqueries, dkeys, dvalues, datt, dedges = once(name, ATTEND_BACKWARD, *sides, *args)
        optional = (dvalues, of_values), (datt, of_att), (dedges, of_edges)
        return dqueries, dkeys, *(d if asked else None for d, asked in optional), *(None,) * 4
