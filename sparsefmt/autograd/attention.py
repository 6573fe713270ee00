"""``torch.autograd.Function``s of attention between whole rows.

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
        dqueries, dkeys, *others = once(name, bridge.ATTEND_BACKWARD, *_sides(ctx.graph), *args)
        return dqueries, dkeys, *_asked(needs[2:5], *others), *(None,) * 6


def _sides(graph: GraphLike) -> tuple[Side, Side]:
    return side_of(graph, False), side_of(graph, True)


def _asked(needs: tuple[bool, ...], *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients, None for what was not given."""
    return tuple(one if need else None for one, need in zip(gradients, needs, strict=True))
