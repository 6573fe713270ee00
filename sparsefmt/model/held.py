"""What a training step holds: modules, optimizers and tensors that its code reaches."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..autograd.tensors.edge_index import is_remembered
from ..autograd.tensors.tensors import GraphTensors
from ..errors import UnsupportedError
from ..graph.graph import Graph
from .reads import Reads
from .state import OF_MODULES, is_leaf

#: Items of a container, and how deep, beyond which nothing is looked for.
MAX_ITEMS, MAX_DEPTH = 4096, 12
_CONTAINERS = (list, tuple, deque, set, frozenset)
_READ_AS_CODE = (type, ModuleType, BuiltinFunctionType)


@dataclass
class Holdings:
    """Each thing once, in the order in which it was found."""

    modules: list[Module] = field(default_factory=list)  #: without those inside of another one
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)  #: those that are enabled
    generators: list[torch.Generator] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  #: of no module and no optimizer
    reached: list[Any] = field(default_factory=list)  #: every value, graphs too


def holdings(step: Callable[..., Any] | None, state: Iterable[Any] = ()) -> Holdings:
    """Find what a function changes or reads, beside its arguments.

    Parameters
    ----------
    step : callable or None
        A function, a method, a module or a ``partial``.  Its closure, defaults, the globals that
        its code names and the object that it is bound to are looked through, and so on from there.
    state : iterable
        Modules, optimizers and whatever else holds some; with it, ``step`` may be None.

    Returns
    -------
    Holdings

    Raises
    ------
    UnsupportedError
        If the code of ``step`` calls a clock or a generator of Python's or NumPy's, too many
        functions to be read, or names a container of too many modules.
    """
    walk = _Walk()
    for one in state:
        walk.add(one, 0)
    if step is not None:
        walk.read(step)
    inner = {id(m) for one in walk.found.modules for m in one.modules() if m is not one}
    walk.found.modules = [one for one in walk.found.modules if id(one) not in inner]
    held = [t for one in walk.found.modules for t in (*one.parameters(), *one.buffers())]
    held += [p for one in walk.found.optimizers for g in one.param_groups for p in g["params"]]
    known = {id(t) for t in held}
    walk.found.tensors = [t for t in walk.found.tensors if id(t) not in known]
    walk.found.reached = walk.reached()
    return walk.found


def is_graph(value: Any) -> bool:
    """Tell whether a value is a graph, or what a layer has taken for one, an ``edge_index``.

    Parameters
    ----------
    value : object

    Returns
    -------
    bool
    """
    return isinstance(value, Graph | GraphTensors) or is_remembered(value)


class _Walk:
    """A walk through values, and through the code of functions among them."""

    def __init__(self) -> None:
        self.found = Holdings()
        self._seen: dict[int, Any] = {}
        self._code: list[Any] = []  # functions and classes to be read

    def reached(self) -> list[Any]:
        """Give all that was seen."""
        return [*self._seen.values()]

    def read(self, step: Any) -> None:
        reads = Reads(own=[getattr(step, "__module__", None) or ""])
        self.add(step, 0)
        read = -1
        try:
            while read != (read := len(self._code)) or reads.read((), ()):
                reads.read((), self._code)
                for value in [*reads.values()]:
                    self.add(value, 0)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"what step holds cannot be read: {error} If a replay may go without it, give "
                "capture(..., state=(model, optimizer))."
            ) from error

    def add(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > MAX_DEPTH:
            return
        self._seen[id(value)] = value
        kinds: tuple[tuple[Any, list[Any]], ...] = (
            (Tensor, self.found.tensors),
            (Optimizer, self.found.optimizers),
            (LRScheduler, self.found.schedulers),
            (torch.Generator, self.found.generators),
            (Module, self.found.modules),
        )
        for kind, found in kinds:
            if isinstance(value, kind):
                found.append(value)
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            self.found.scalers.append(value)
        if not isinstance(value, Tensor | Optimizer | Graph | torch.Generator):
            for inner in self._inner(value):
                self.add(inner, depth + 1)

    def _inner(self, value: Any) -> Iterable[Any]:
        """Give what a value holds, and note the code that it may run."""
        if isinstance(value, Module):
            modules = [*value.modules()]
            self._code += {type(m): None for m in modules if not is_leaf(m)}
            held = [v for m in modules for k, v in vars(m).items() if k not in OF_MODULES]
            return [*modules[1:], *held]
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, FunctionType):
            self._code.append(value)
            return vars(value).values()  # a decorator keeps there what it has wrapped
        if isinstance(value, dict):
            return _items([*value.values()])
        if isinstance(value, _CONTAINERS):
            return _items([*value])
        if isinstance(value, _READ_AS_CODE) or not hasattr(value, "__dict__"):
            return ()
        self._code.append(type(value))
        return [*vars(value).values()]


def _items(values: list[Any]) -> list[Any]:
    """Give the items of a container, of a long one the first; refuse to miss any that counts."""
    if any(isinstance(one, Module | Optimizer) for one in values[MAX_ITEMS:]):
        raise UnsupportedError(f"a container has {len(values)} items, more than {MAX_ITEMS}.")
    return values[:MAX_ITEMS]
