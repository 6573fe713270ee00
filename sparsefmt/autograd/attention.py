"""``torch.autograd.Function``s of attention: graph attention, and attention between whole rows.

What is kept for backward has no value an entry: weights are computed again.  A gradient can be
used but not differentiated.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import UnsupportedError
from . import bridge_attention as bridge
from ._recording import apart, recorded
from .structure import GraphLike, Side, side_of


class Options(NamedTuple):
    """What shapes scores and masks; ``seed`` is None where nothing is dropped."""

    seed: Tensor | None
    slope: float
    dropout: float
    loops: bool


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
        found = _once("gat_aggregate", bridge.GAT_BACKWARD, *_sides(ctx.graph), *args)
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
        found = _once("gat_aggregate", bridge.GAT_OF_VECTORS_BACKWARD, *sides, *args)
        dh, dvectors, dloop, dedges = found
        vectors = zip(dvectors, (source, target, bias), strict=False)  # a bias may be None
        dvectors = [one.view(vector.shape) for one, vector in vectors]
        others = _asked(needs[3:5], dedges, dloop)
        dbias = dvectors[2] if needs[5] else None
        return dh, dvectors[0], dvectors[1], *others, dbias, *(None,) * 5


def attend(
    graph: GraphLike,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    att: Tensor | None,
    edges: Tensor | None,
    scale: float,
    options: Options,
) -> Tensor:
    """``gatv2_aggregate`` where ``att`` is given, else ``dot_aggregate``; nothing is checked.

    Queries are of targets and keys of sources; without ``values`` the keys are the values.
    """
    inputs = queries, keys, values, att, edges
    found: Tensor
    seed, slope, *others = options
    numbers = seed, slope, scale, *others
    if not recorded(*inputs):
        found = bridge.ATTEND(side_of(graph, False), *inputs, *numbers)
        return found
    found = _Attend.apply(*apart(*inputs), graph, *numbers)  # type: ignore[no-untyped-call]
    return found


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        att: Tensor | None,
        edges: Tensor | None,
        graph: GraphLike,
        seed: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        inputs = queries, keys, values, att, edges, seed
        found = bridge.ATTEND_WITH_STATISTICS(side_of(graph, False), *inputs, *numbers)
        ctx.save_for_backward(*inputs, *found)
        ctx.graph, ctx.numbers = graph, numbers
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, statistics = ctx.saved_tensors
        needs, additive = ctx.needs_input_grad, inputs[3] is not None
        args = grad, out, statistics, needs[4], *inputs, *ctx.numbers
        name = "gatv2_aggregate" if additive else "dot_aggregate"
        dqueries, dkeys, *others = _once(name, bridge.ATTEND_BACKWARD, *_sides(ctx.graph), *args)
        return dqueries, dkeys, *_asked(needs[2:5], *others), *(None,) * 6


def _sides(graph: GraphLike) -> tuple[Side, Side]:
    return side_of(graph, False), side_of(graph, True)


def _asked(needs: tuple[bool, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients, None for what was not given."""
    return tuple(one if need else None for one, need in zip(gradients, needs, strict=True))


def _once(name: str, compute: Any, *args: Any) -> Any:
    """What is computed of those arguments, which can be used but not differentiated."""
    tensors = (one for one in args if isinstance(one, Tensor))
    if not recorded(*tensors) and not torch.is_grad_enabled():
        return compute(*args)
    return _Once.apply(name, compute, *args)  # type: ignore[no-untyped-call]


class _Once(Function):
    @staticmethod
    def forward(ctx: Any, name: str, compute: Any, *args: Any) -> Any:
        ctx.name = name
        return compute(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"the gradient of {ctx.name} cannot be differentiated again: do without "
            "create_graph=True, or compose sddmm, edge_softmax and spmm, whose gradients can be."
        )
