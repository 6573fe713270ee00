"""What a trace takes for constant: attributes of a model, as a key that changes when they do.

Containers and objects are keyed by what they hold, tensors by identity and version, and functions,
classes and graphs by identity.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, partial
from logging import Logger
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from ..autograd.tensors.shared import Shared
from ..errors import UnsupportedError
from ..graph.graph import Graph

#: What containers hold together, how deep, and bytes of an array, beyond which nothing is traced.
MAX_PARTS, MAX_DEPTH, MAX_BYTES = 2048, 12, 4096
#: Modules of these are called, not looked into; of the latter also what users derive from them.
LIBRARIES = ("torch.nn.", "torch_geometric.nn.", "sparsefmt.nn")
LAYERS = ("torch_geometric.nn.conv.", "sparsefmt.nn")

#: Where a module keeps what is called with its arguments, results and gradients.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_PLAIN = frozenset({bool, int, str, bytes, complex, NoneType, torch.dtype, torch.device})
_SEQUENCES, _SETS = (list, tuple, deque), (set, frozenset)
_SAME = (
    *(Graph, Shared, type, FunctionType, BuiltinFunctionType, ModuleType, Enum, Logger),
    *(MemberDescriptorType, GetSetDescriptorType, property, staticmethod, classmethod),
)
_NAMED = frozenset({FunctionType, BuiltinFunctionType, ModuleType, type})
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_WITHOUT_VALUE: tuple[Any, ...] = (None, object.__hash__)
#: What every module of torch has, whose use does not change with it; and the planned forward.
OF_MODULES = frozenset({*vars(Module()), "forward"}) - {"training"}


class Key:
    """The parts of a key, and the objects and containers that they were read from."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.objects: list[Any] = []  #: known by their identity
        self.held: list[tuple[str, Any]] = []  #: tensors, containers and objects, with a name
        self._name, self._size = "", 0
        self._seen: dict[int, int] = {}

    def now(self) -> tuple[Any, ...]:
        """Give the key."""
        return tuple(self.parts)

    def model(self, model: Module) -> None:
        """Add what the modules are, and their attributes."""
        parts = self.parts
        for module in model.modules():
            held = vars(module)
            parts += (id(module), *(len(held[name]) for name in HOOKS))
            if is_leaf(module):
                for name, value in held.items():
                    if name not in OF_MODULES and type(value) in _PLAIN:
                        parts += (name, value)
                    elif type(value) is float:
                        parts += (name, value or str(value))
                    elif name.endswith("_hooks") and name not in OF_MODULES:  # PyG's own
                        parts += (name, len(value))
            else:
                self._attributes(module)

    def outside(self, values: Iterable[Any], name_of: Callable[[Any], str]) -> None:
        """Add what the code of the forward reads beside the model."""
        self._name = "a value outside of it"
        for value in values:
            if type(value) in _NAMED:
                self.parts.append(id(value))
                self.objects.append(value)
            else:
                try:
                    self.add(value)
                except UnsupportedError as error:
                    raise UnsupportedError(
                        f"the forward reads {name_of(value)}, and {error}"
                    ) from None

    def _attributes(self, module: Module) -> None:
        parts, held = self.parts, vars(module)
        for name, value in held.items():
            if name in OF_MODULES:
                continue
            kind = type(value)
            if kind in _PLAIN:
                parts += (name, kind, value)
            else:
                parts.append(name)
                self._name = name
                try:
                    self.add(value)
                except UnsupportedError as error:
                    raise UnsupportedError(
                        f"the forward may read {type(module).__name__}.{name}, and {error}"
                    ) from None
        for kept in (held["_parameters"], held["_buffers"]):
            parts += [name for name, value in kept.items() if value is None]

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value, and what it holds."""
        kind, parts = type(value), self.parts
        if kind in _PLAIN:
            parts += (kind, value)
        elif kind is float:
            parts += (kind, value or str(value))  # 0.0 is not -0.0
        elif isinstance(value, _SAME):
            parts.append(id(value))
            self.objects.append(value)
        elif isinstance(value, Tensor):
            parts += (id(value), -1 if value.is_inference() else value._version)
            self.objects.append(value)
            self.held.append((self._name, value))
        elif id(value) in self._seen:
            parts += ("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self.objects.append(kind)
            parts.append(id(kind))
            self._inner(value, depth + 1)

    def _inner(self, value: Any, depth: int) -> None:
        found = _held(value)
        if found is None:
            self._whole(value)
            return
        self._size += len(found)
        if depth > MAX_DEPTH or self._size > MAX_PARTS:
            raise UnsupportedError("it holds too much to be compared at each call.")
        self.held.append((self._name, value))
        self.parts.append(len(found))
        for inner in found:
            self.add(inner, depth)

    def _whole(self, value: Any) -> None:
        """Add what holds nothing that can be looked at."""
        kind = type(value)
        if isinstance(value, _RANDOM):
            raise UnsupportedError("numbers that it draws would be drawn once.")
        if isinstance(value, np.ndarray) and value.dtype != object:
            if value.nbytes > MAX_BYTES:
                raise UnsupportedError(
                    f"it is an array of {value.nbytes} bytes, too much to be compared at each "
                    "call: make it a buffer."
                )
            self.parts += (value.dtype, value.shape, value.tobytes())
        elif kind.__module__.partition(".")[0] == "torch":
            self.parts.append(id(value))
            self.objects.append(value)
        elif kind.__hash__ not in _WITHOUT_VALUE:
            self.parts.append(value)
        else:
            raise UnsupportedError(f"changes of a {kind.__name__} cannot be seen.")


def _held(value: Any) -> Any:
    """Give what a container or an object holds; None of what holds nothing."""
    found: list[Any] | None = None
    if isinstance(value, Module):
        return [held for name, held in vars(value).items() if name not in OF_MODULES]
    if isinstance(value, _RANDOM):
        return None
    if isinstance(value, _SEQUENCES):
        found = [*value]
    elif isinstance(value, dict):
        found = [one for pair in value.items() for one in pair]
    elif isinstance(value, _SETS):
        found = sorted(value, key=lambda one: (type(one).__name__, hash(one)))
    elif isinstance(value, slice):
        found = [value.start, value.stop, value.step]
    elif isinstance(value, partial):
        found = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        found = [value.__func__, value.__self__]
    elif isinstance(value, ReferenceType):
        found = [value()]
    of_object = [*getattr(value, "__dict__", {}).items()]
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        named = (slots,) if isinstance(slots, str) else slots
        of_object += [(n, getattr(value, n)) for n in named if n[:2] != "__" and hasattr(value, n)]
    if of_object or hasattr(value, "__dict__"):
        found = [*(found or ()), *(one for pair in of_object for one in pair)]
    return found


def is_leaf(module: Module) -> bool:
    """Tell whether a module is called as it is, not looked into: torch's, and kinds of layers."""
    cls: Any = type(module)
    return _is_leaf(cls)


@cache
def _is_leaf(cls: type) -> bool:
    if issubclass(cls, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        return False
    layer = any(base.__module__.startswith(LAYERS) for base in cls.__mro__)
    return layer or bool(cls.__module__.startswith(LIBRARIES))


def has_hooks(module: Module) -> bool:
    """Tell whether somebody sees, or changes, what a call of the module is given and gives."""
    held = vars(module)
    return any(held[name] for name in HOOKS)


def hooked(module: Module) -> bool:
    """Tell whether a call has hooks, or another forward than the module's class."""
    return "forward" in vars(module) or has_hooks(module)


def hold(objects: list[Any], gone: Callable[[], None]) -> list[Any]:
    """Keep objects from giving their identity to others: say when one has gone, or hold it."""
    return [_reference(one, gone) for one in objects]


def _reference(one: Any, gone: Callable[[], None]) -> Any:
    try:
        return ref(one, lambda _: gone())
    except TypeError:
        return one
