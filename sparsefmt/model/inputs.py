"""The tensors among the arguments of a step."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import DeviceError, DtypeError, ShapeError, UnsupportedError
from .state import is_graph


class Inputs:
    """Tensors that are checked to be like those of an example."""

    def __init__(self, examples: tuple[Any, ...]) -> None:
        leaves, self._spec = tree_flatten(examples, is_leaf=is_graph)
        for number, value in enumerate(leaves):
            self._check_tensor(number, value)
        self.examples: list[Tensor | None] = leaves
        self._flat = all(isinstance(value, Tensor | None) for value in examples)

    def _check_tensor(self, number: int, value: object) -> None:
        """Check for a dense tensor, or None."""
        if is_graph(value) and not isinstance(value, Tensor):
            raise UnsupportedError(
                f"input {number} is a graph, which a replay cannot exchange: let step close over "
                "it, and capture one function for each graph."
            )
        if value is not None and not isinstance(value, Tensor):
            raise DtypeError(
                f"input {number} is a {type(value).__name__}: give a tensor, or let step close "
                "over it (functools.partial)."
            )
        if value is not None and value.layout is not torch.strided:
            raise UnsupportedError(
                f"input {number} has layout {value.layout}: give a dense tensor."
            )

    def refuse_graphs(self, tensors: list[Tensor | None]) -> None:
        """Raise if there is an ``edge_index`` among inputs, of which a layer has made a graph."""
        for number, value in enumerate(tensors):
            if value is not None and is_graph(value):
                raise UnsupportedError(
                    f"input {number} is an edge_index of which a layer makes a graph, and replays "
                    "would go on with the first one: let step close over it and capture one "
                    "function for each graph, or pad graphs to one."
                )

    def checked(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Check that arguments are like the example, and return their tensors."""
        if self._flat and len(arguments) == len(self.examples):
            leaves: list[Any] = [*arguments]
        else:
            leaves, spec = tree_flatten(arguments, is_leaf=is_graph)
            if spec != self._spec:
                raise ShapeError(
                    "the arguments have tensors in other places than the example inputs "
                    f"({len(leaves)} and {len(self.examples)}): give the like, or capture again."
                )
        for number, (value, like) in enumerate(zip(leaves, self.examples, strict=True)):
            if value is not like:
                self._check_like(number, value, like)
        return leaves

    def _check_like(self, number: int, value: Any, like: Tensor | None) -> None:
        """Check that an argument has the shape, dtype and device of its example."""
        self._check_tensor(number, value)
        if value is None or like is None:
            if value is not like:
                raise DtypeError(
                    f"input {number} is {'None' if value is None else 'a tensor'}, not so in the "
                    "example inputs: capture one function for each."
                )
            return
        for what, actual, expected, error in (
            ("shape", tuple(value.shape), tuple(like.shape), ShapeError),
            ("dtype", value.dtype, like.dtype, DtypeError),
            ("device", value.device, like.device, DeviceError),
        ):
            if actual != expected:
                pad = " (pad it, for instance)" if what == "shape" else ""
                raise error(
                    f"input {number} has {what} {actual}, but {expected} in the example inputs: "
                    f"give that {what}{pad}, or capture another function."
                )

    def tree(self, leaves: list[Any]) -> Any:
        """Build arguments of these tensors, in the form of the example."""
        return tree_unflatten(leaves, self._spec)
