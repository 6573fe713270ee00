"""``torch.autograd.Function``s of graph attention.

What is kept for backward has no value an entry: weights are computed again.  A gradient can be
used but not differentiated.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..ops.attention.operands import Options
from . import bridge_attention as bridge
from ._recording import apart, once, recorded
from .structure import GraphLike, Side, side_of


def gat(
    graph: GraphLike,
    h: Tensor,
    el: Tensor,
    er: Tensor,
    edges: Tensor | None,
    loop_edges: Tensor | None,
    options: Options,
) -> Tensor:
    """``gat_aggregate``; nothing is checked.

    ``loop_edges``, (n,) or (n, heads), are the edge scores of the loops that ``options`` ask for.
    """
    inputs = h, el, er, edges, loop_edges
    found: Tensor
    if not recorded(*inputs):
        found = bridge.GAT(side_of(graph, False), None, *inputs, *options)
        return found
    found = _Gat.apply(*apart(*inputs), graph, *options)  # type: ignore[no-untyped-call]
    return found


class _Gat(Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        el: Tensor,
        er: Tensor,
        edges: Tensor | None,
        loop_edges: Tensor | None,
        graph: GraphLike,
        seed: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        inputs = h, el, er, edges, loop_edges, seed
        found = bridge.GAT_WITH_STATISTICS(side_of(graph, False), None, *inputs, *numbers)
        ctx.save_for_backward(*inputs, *found)
        ctx.graph, ctx.numbers = graph, numbers
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, plus, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad
        args = grad, out, plus, stats, needs[3], *inputs, *ctx.numbers
        found = once("gat_aggregate", bridge.GAT_BACKWARD, *_sides(ctx.graph), *args)
        dh, dell, der, dloop, dedges = found
        return dh, dell, der, *_asked(needs[3:5], dedges, dloop), *(None,) * 5


def gat_of_vectors(
    graph: GraphLike,
    h: Tensor,
    source: Tensor,
    target: Tensor,
    edges: Tensor | None,
    loop_edges: Tensor | None,
    options: Options,
    bias: Tensor | None = None,
) -> Tensor:
    """``gat`` with the scores ``<h, source>`` and ``<h, target>`` of each head, on a square graph.

    ``bias``, of heads * feat values, is added to each row.  As one Function: no two parts of the
    gradient of ``h`` have to be added up, and the bias costs no launch.
    """
    inputs = h, source, target, edges, loop_edges, bias
    found: Tensor
    if not recorded(*inputs):
        el, er = bridge.GAT_SCORES(h, source, target)
        found = bridge.GAT(side_of(graph, False), bias, h, el, er, edges, loop_edges, *options)
        return found
    found = _GatOfVectors.apply(*apart(*inputs), graph, *options)  # type: ignore[no-untyped-call]
    return found


class _GatOfVectors(Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        source: Tensor,
        target: Tensor,
        edges: Tensor | None,
        loop_edges: Tensor | None,
        bias: Tensor | None,
        graph: GraphLike,
        seed: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        scores = bridge.GAT_SCORES(h, source, target)
        inputs = bias, h, *scores, edges, loop_edges, seed
        found = bridge.GAT_WITH_STATISTICS(side_of(graph, False), *inputs, *numbers)
        ctx.save_for_backward(source, target, *inputs, *found)
        ctx.graph, ctx.numbers = graph, numbers
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, plus, stats = ctx.saved_tensors
        needs, (source, target, bias) = ctx.needs_input_grad, inputs[:3]
        args = grad, out, plus, stats, needs[3], *inputs, *ctx.numbers
        sides = _sides(ctx.graph)
        found = once("gat_aggregate", bridge.GAT_OF_VECTORS_BACKWARD, *sides, *args)
        dh, dvectors, dloop, dedges = found
        vectors = zip(dvectors, (source, target, bias), strict=False)  # a bias may be None
        dvectors = [one.view(vector.shape) for one, vector in vectors]
        others = _asked(needs[3:5], dedges, dloop)
        dbias = dvectors[2] if needs[5] else None
        return dh, dvectors[0], dvectors[1], *others, dbias, *(None,) * 5


def _sides(graph: GraphLike) -> tuple[Side, Side]:
    return side_of(graph, False), side_of(graph, True)


def _asked(needs: tuple[bool, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients, None for what was not given."""
    return tuple(one if need else None for one, need in zip(gradients, needs, strict=True))
