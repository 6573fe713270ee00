"""The forward pass that ``gat`` and ``pairwise`` share, without checks.

It saves no array with a value for each entry: backward computes the weights again.  Gradients
cannot be differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .engine.library import is_functional
from .tensors.prepare import side_of

_EMPTY = torch.empty(0, device="cpu")


class Attention(Function):
    """Run an op that gives statistics, and save its arguments and results for backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Take the op's tensors, the graph, the op, and the numbers that follow the tensors."""
        *inputs, ctx.graph, ctx.op, ctx.numbers = given
        out, *statistics = ctx.op(side_of(ctx.graph, False), *inputs, *ctx.numbers)
        ctx.save_for_backward(*inputs, unwatched(ctx, out), *statistics)
        found: Tensor = out
        return found


def unwatched(ctx: Any, out: Tensor) -> Tensor:
    """Give a result to save that may be written to in place, and keep the count of such changes.

    Torch refuses to unpack what has changed since it was saved, which ``F.relu_`` behind a layer
    would do.  An empty tensor that shares the count of ``out`` tells; it holds no memory.
    """
    ctx.changes = None
    if torch.compiler.is_dynamo_compiling() or type(out) is not Tensor or is_functional(out):
        return out
    ctx.changes = out.detach()
    ctx.changes.data = _EMPTY
    ctx.first = ctx.changes._version
    return out.data  # the same memory, with a count of its own


def is_changed(ctx: Any) -> bool:
    """Tell whether a result that is ``unwatched`` was written to in place."""
    return ctx.changes is not None and ctx.changes._version != ctx.first


def as_computed(ctx: Any, op: Any, inputs: Sequence[Any], *found: Tensor) -> tuple[Tensor, ...]:
    """Give the results of an op as it gave them: anew, if the first was written to in place."""
    if not is_changed(ctx):
        return found
    again: tuple[Tensor, ...] = op(side_of(ctx.graph, False), *inputs, *ctx.numbers)
    return again
