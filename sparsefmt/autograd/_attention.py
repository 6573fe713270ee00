"""The forward pass that ``gat`` and ``pairwise`` share, without checks.

It saves no array with a value for each entry: backward computes the weights again.  Gradients
cannot be differentiated again.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from .structure import side_of


class Attention(Function):
    """Run an op that gives statistics, and save its arguments and results for backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Take the op's tensors, the graph, the op, and the numbers that follow the tensors."""
        *inputs, ctx.graph, op, ctx.numbers = given
        found = op(side_of(ctx.graph, False), *inputs, *ctx.numbers)
        ctx.save_for_backward(*inputs, *found)
        out: Tensor = found[0]
        return out
