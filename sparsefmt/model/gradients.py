"""The gradients that a captured graph adds to and leaves, in the place of ``p.grad``."""

from typing import NamedTuple

import torch
from torch import Tensor


class Gradient(NamedTuple):
    """A parameter's gradient in a graph: what it adds to, if to any, and what it ends as."""

    of: Tensor
    start: Tensor | None
    end: Tensor | None


class Gradients:
    """The gradients of parameters, from the recorded run of a step on."""

    def __init__(self, parameters: list[Tensor], receive: set[int]) -> None:
        """Give zeros to the parameters without a gradient that backward adds to."""
        for parameter in parameters:
            if id(parameter) in receive and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._starts = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
        self._found: list[Gradient] = []

    def end(self) -> None:
        """Note what the recorded run has made of the gradients that it found."""
        for parameter, start, version in self._starts:
            read = start is not None and (parameter.grad is start or start._version != version)
            if read or parameter.grad is not None:
                self._found.append(Gradient(parameter, start if read else None, parameter.grad))
        self._starts = []

    def put(self) -> None:
        """Put the gradients that there are where a replay adds to them."""
        for one in self._found:
            if one.start is not None and one.of.grad is not one.start:
                with torch.no_grad():
                    one.start.zero_() if one.of.grad is None else one.start.copy_(one.of.grad)
                one.of.grad = one.start

    def show(self) -> None:
        """Show the gradients that a replay has left."""
        for one in self._found:
            if one.of.grad is not one.end:
                one.of.grad = one.end
