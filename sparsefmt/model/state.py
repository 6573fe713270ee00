"""What a step or a model holds: found in values and in code, copied, put back and compared."""

import dis
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList, Sequential
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..autograd.tensors.edge_index import is_remembered
from ..autograd.tensors.tensors import GraphTensors
from ..errors import UnsupportedError
from ..graph.graph import Graph

#: Items of a container, and how deep, beyond which nothing is looked for.
MAX_ITEMS, MAX_DEPTH = 4096, 12
#: Functions and classes that are read, at most.
MAX_READ = 512
#: Modules whose functions give another value at each call, and such names of others.
CHANGING = {"time", "random", "datetime", "secrets", "uuid", "numpy.random"}
CHANGING_OF = {"os": {"environ", "getenv", "urandom"}, "builtins": {"open", "input"}}
#: Packages whose functions are called, and not read.
KNOWN = {"torch", "torch_geometric", "sparsefmt", "numpy", "scipy", "cupy"}
#: Modules of these are called, not read; of the latter also what users derive from them.
LIBRARIES = ("torch.nn.", "torch_geometric.nn.", "sparsefmt.nn")
LAYERS = ("torch_geometric.nn.conv.", "sparsefmt.nn")
#: Largest difference between a replay and a step, in the largest number of a tensor's kind.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE = 2e-2  # of floats of two bytes
#: What every module of torch has.
OF_MODULES = frozenset(vars(Module())) - {"training"}

_MISSING = type("missing", (), {})


def is_graph(value: object) -> bool:
    """Return True for a graph, or what a layer has taken for one, an ``edge_index``."""
    return isinstance(value, Graph | GraphTensors) or is_remembered(value)


# Values


@dataclass
class Holdings:
    """The things that a step holds, each once, in the order in which they were found."""

    modules: list[Module] = field(default_factory=list)  #: without those inside of another one
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)  #: those that are enabled
    generators: list[torch.Generator] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  #: of no module and no optimizer
    reached: list[Any] = field(default_factory=list)  #: every value, graphs too


def holdings(step: Callable[..., Any] | None, state: Iterable[Any] = ()) -> Holdings:
    """Return what a function changes or reads, apart from its arguments.

    ``step`` is a function, a method, a module or a ``partial``: its closure, defaults, the globals
    that its code names and the object that it is bound to are looked through, and so on from there.
    With ``state``, modules, optimizers and whatever else holds some, it may be None.

    Raises
    ------
    UnsupportedError
        If the code of ``step`` calls a clock or a generator of Python's or NumPy's, too many
        functions to be read, or names a container of too many modules.
    """
    walk = _Walk(getattr(step, "__module__", None) or "")
    for value in state:
        walk.add(value, 0)
    if step is not None:
        walk.read(step)
    result = walk.result
    inner = {id(m) for module in result.modules for m in module.modules() if m is not module}
    result.modules = [module for module in result.modules if id(module) not in inner]
    known = [t for module in result.modules for t in (*module.parameters(), *module.buffers())]
    known += [p for o in result.optimizers for g in o.param_groups for p in g["params"]]
    of_modules = {id(t) for t in known}
    result.tensors = [t for t in result.tensors if id(t) not in of_modules]
    result.reached = list(walk.seen.values())
    return result


class _Walk:
    """A walk through values, and through what the code of functions among them may read.

    Code reads globals, class attributes and variables of closures; a function that it calls is read
    too, a library's is not.
    """

    def __init__(self, package: str) -> None:
        self.result = Holdings()
        self.seen: dict[int, Any] = {}
        self._code: list[Any] = []  # functions and classes to be read
        self._read: set[Any] = set()  #: functions that were
        self._named: dict[tuple[int, str], Any] = {}  # values by namespace and name
        self._cells: list[Any] = []
        self._defaults: list[Any] = []
        self._spaces: dict[int, tuple[Any, Mapping[str, Any]]] = {}  # of classes and modules
        self._used: set[str] = set()  # as global names and attributes
        self._package = {package.partition(".")[0]} - KNOWN
        self._place = "the forward"

    def read(self, step: object) -> None:
        """Add the values that ``step`` refers to, those that its code names, and so on."""
        self.add(step, 0)
        size = -1
        try:
            while size != (size := len(self._code) + len(self._named) + len(self._spaces)):
                for value in [*self._code]:
                    self._see(value)
                for _, space in [*self._spaces.values()]:
                    for name in self._used & space.keys():
                        self._name(space, name)
                for value in (*self._named.values(), *self._cells, *self._defaults):
                    self.add(value, 0)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"what step holds cannot be read: {error} If a replay may go without it, give "
                "capture(..., state=(model, optimizer))."
            ) from error

    def add(self, value: object, depth: int) -> None:
        """Add a value, and those that it refers to."""
        if id(value) in self.seen or depth > MAX_DEPTH:
            return
        self.seen[id(value)] = value
        kinds: tuple[tuple[Any, list[Any]], ...] = (
            (Tensor, self.result.tensors),
            (Optimizer, self.result.optimizers),
            (LRScheduler, self.result.schedulers),
            (torch.Generator, self.result.generators),
            (Module, self.result.modules),
        )
        for kind, values in kinds:
            if isinstance(value, kind):
                values.append(value)
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
            self.result.scalers.append(value)
        if not isinstance(value, Tensor | Optimizer | Graph | torch.Generator):
            for inner in self._inner(value):
                self.add(inner, depth + 1)

    def _inner(self, value: object) -> Iterable[Any]:
        """Return the values that a value refers to, and record the code that it may run."""
        if isinstance(value, Module):
            modules = [*value.modules()]
            self._code += {type(m): None for m in modules if not _is_library_module(m)}
            return [*modules[1:], *(v for m in modules for v in attributes(m).values())]
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, FunctionType):
            self._code.append(value)
            return vars(value).values()  # a decorator keeps there what it has wrapped
        if isinstance(value, dict):
            return _items([*value.values()])
        if isinstance(value, list | tuple | deque | set | frozenset):
            return _items([*value])
        code = isinstance(value, type | ModuleType | BuiltinFunctionType)
        if code or not hasattr(value, "__dict__"):
            return ()
        self._code.append(type(value))
        return [*vars(value).values()]

    def _name(self, space: Mapping[str, Any], name: str) -> None:
        """Add the value of a name, and read its code."""
        if (id(space), name) not in self._named:
            self._named[id(space), name] = space[name]
            self._see(space[name])

    def _see(self, value: object) -> None:
        """Read the code of a function, class or module; a library's is not read."""
        if len(self._read) + len(self._spaces) > MAX_READ:
            raise UnsupportedError(f"{self._place} calls more functions than can be compared.")
        self._refuse_changing(value)
        if isinstance(value, MethodType | staticmethod | classmethod):
            self._see(value.__func__)
        elif isinstance(value, property):
            self._see(value.fget)
        elif isinstance(value, partial):
            self._see(value.func)
        elif isinstance(value, FunctionType):
            if value not in self._read and not self._is_library(value):
                self._read.add(value)
                self._function(value, value.__code__)
        elif isinstance(value, type):
            for cls in value.__mro__:
                if not self._is_library(cls):
                    self._spaces.setdefault(id(cls), (cls, cls.__dict__))
        elif isinstance(value, ModuleType) and not self._is_library(value):
            self._spaces.setdefault(id(value), (value, vars(value)))

    def _function(self, function: FunctionType, code: CodeType) -> None:
        """Read what a function names, and the functions that are written within it."""
        self._used |= {*code.co_names}
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
                line = step.positions.lineno if step.positions else 0
                self._place = f"{code.co_filename}:{line}, in {code.co_name}"
                self._load(function, str(step.argval), step.opname == "IMPORT_NAME", code)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._function(function, inner)
        if code is function.__code__:
            self._cells += [cell_contents(cell) for cell in function.__closure__ or ()]
            self._defaults += [*(function.__defaults__ or ())]
            self._defaults += [*(function.__kwdefaults__ or {}).values()]

    def _load(self, function: FunctionType, name: str, imported: bool, code: CodeType) -> None:
        """Read a global, or an import, of that name; raise for a clock or a generator."""
        names = function.__globals__
        value = sys.modules.get(name) if imported else names.get(name, _MISSING)
        builtin = value is _MISSING and name in CHANGING_OF["builtins"]
        if builtin or (imported and name in CHANGING):
            self._refuse(name)
        if isinstance(value, ModuleType):
            for used in code.co_names:
                if used in CHANGING_OF.get(value.__name__, ()):
                    self._refuse(f"{name}.{used}")
                if isinstance(inner := vars(value).get(used), ModuleType):
                    self._refuse_changing(inner)
        if imported:
            self._see(value)
        elif value is not _MISSING:
            self._name(names, name)

    def _refuse_changing(self, value: object) -> None:
        """Refuse clocks and generators, and their functions."""
        if isinstance(value, ModuleType):
            name = value.__name__
        elif isinstance(value, BuiltinFunctionType | MethodType | FunctionType | type):
            bound = getattr(value, "__self__", None)
            if bound is not None and not isinstance(bound, ModuleType | type):
                bound = type(bound)
            name = value.__module__ or getattr(bound, "__module__", None) or ""
            name = "numpy.random" if name.startswith("numpy.random") else name
        else:
            return
        if name in CHANGING:
            self._refuse(getattr(value, "__name__", name))

    def _refuse(self, name: str) -> None:
        """Raise for a function or module whose values change from call to call."""
        raise UnsupportedError(
            f"{self._place} uses {name}, which may give another value at each call."
        )

    def _is_library(self, value: object) -> bool:
        """Return True for a function, class or module that is called, and not read."""
        name = (value.__name__ if isinstance(value, ModuleType) else value.__module__) or ""
        root = name.partition(".")[0]
        if root in KNOWN or root in sys.stdlib_module_names or root == "builtins":
            return True
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        return root not in self._package and ("site-packages" in file or "dist-packages" in file)


def _items(values: list[Any]) -> list[Any]:
    """Return at most MAX_ITEMS items; raise if a later one is a module or optimizer."""
    if any(isinstance(value, Module | Optimizer) for value in values[MAX_ITEMS:]):
        raise UnsupportedError(f"a container has {len(values)} items, more than {MAX_ITEMS}.")
    return values[:MAX_ITEMS]


def attributes(module: Module) -> dict[str, Any]:
    """Return the attributes that a module has beside those of every module."""
    return {name: value for name, value in vars(module).items() if name not in OF_MODULES}


def _is_library_module(module: Module) -> bool:
    """Return True for torch's modules and layers of libraries, whose code is not read."""
    kind = type(module)
    if issubclass(kind, Sequential | ModuleList | ModuleDict):
        return False
    layer = any(base.__module__.startswith(LAYERS) for base in kind.__mro__)
    return layer or kind.__module__.startswith(LIBRARIES)


def cell_contents(cell: CellType) -> Any:
    """Return the value of a closure's variable, None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# Copies


class Snapshot:
    """The tensors, gradients, attributes and containers of a model, as they were."""

    def __init__(self, model: Module) -> None:
        values = holdings(None, (model,)).reached
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [value for value in values if isinstance(value, Tensor)]
        unique = {id(t): t for t in tensors if not (is_lazy(t) or t.is_inference() or t.is_meta)}
        self._tensors = [(t, t.detach().clone()) for t in unique.values()]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        places = [*values, *(module._buffers for module in model.modules())]
        pairs = ((place, _contents(place)) for place in places)
        self._places = [(place, before) for place, before in pairs if before is not None]

    def restore(self) -> None:
        """Restore the tensors, gradients and contents that have changed."""
        for place, before in self._places:
            if not _same(_contents(place), before):
                _fill(place, before)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, before in self._tensors:
                if tensor.layout is not torch.strided or not _same_values(tensor, before).all():
                    tensor.copy_(before)


def _contents(place: object) -> Any:
    """Copy the contents of a module, container or object; None if it cannot be written to."""
    if isinstance(place, Module):
        return None if _is_library_module(place) else attributes(place)
    if isinstance(place, Tensor | Graph | GraphTensors | FunctionType | ModuleType | type):
        return None
    if isinstance(place, list | deque):
        return [*place]
    if isinstance(place, set):
        return {*place}
    if isinstance(place, bytearray):
        return bytes(place)
    if isinstance(place, np.ndarray):
        return place.copy() if place.flags.writeable else None
    contents = place if isinstance(place, dict) else getattr(place, "__dict__", None)
    return dict(contents) if isinstance(contents, dict) else None


def _same(now: Any, before: Any) -> bool:
    """Return True if a place holds the same objects as before, in their order."""
    if isinstance(before, set):
        return bool(now == before)
    if isinstance(before, bytes | np.ndarray):
        return False  # cheaper written to than compared
    if isinstance(before, dict):
        return [*now] == [*before] and all(now[key] is before[key] for key in before)
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _fill(place: Any, before: Any) -> None:
    """Write former contents to a module, a container or an object."""
    if isinstance(place, Module):
        for name in attributes(place):
            del vars(place)[name]
        vars(place).update(before)
        return
    if isinstance(before, bytes | np.ndarray):
        place[... if isinstance(before, np.ndarray) else slice(None)] = before
        return
    into: Any = place if isinstance(place, list | deque | dict | set) else vars(place)
    into.clear()
    (into.extend if isinstance(before, list) else into.update)(before)


class Randomness:
    """The states of the generators of Python, NumPy and torch on the CPU, and of more."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = [torch.default_generator, *generators]
        self._before = self._now()

    def _now(self) -> tuple[Any, Any, list[Tensor]]:
        states = [generator.get_state() for generator in self._generators]
        return random.getstate(), np.random.get_state(), states  # noqa: NPY002

    def restore(self) -> None:
        """Restore the states of all generators."""
        python, numpy, states = self._before
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def was_drawn_on_host(self) -> bool:
        """Return True if a generator on the CPU has drawn since this object read their states."""
        (python, numpy, states), now = self._before, self._now()
        pairs = zip(self._generators, states, now[2], strict=True)
        return (
            python != now[0]
            or not np.array_equal(numpy[1], now[1][1])
            or numpy[2:] != now[1][2:]
            or any(g.device.type == "cpu" and not torch.equal(a, b) for g, a, b in pairs)
        )


# Comparisons


def difference(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> str:
    """Return the first tensor that differs by more than rounding, and by how much; else "".

    Steps that add up by atomics differ from one run to the ``again``: what these two do, others
    may, and some more.
    """
    kinds = _largest_of_kinds(expected)
    for name, value in expected.items():
        result = tensors.get(name)
        if result is None:
            return f"{name} is missing"
        same = _same_values(value, result)
        if same.all():
            continue
        allowed = 0.0
        if value.is_floating_point():
            noise = _largest(value.double() - again[name].double())
            allowed = TOLERANCE.get(value.dtype, COARSE) * kinds[_kind(name)] + 8 * noise
        apart = (value.double() - result.double()).masked_fill(same, 0).abs()
        if not (apart <= allowed).all():
            size = f"{float(apart.max()):.1e}, where it is {_largest(value):.1e} at most"
            return f"{name} differs by {size}"
    return ""


def unsteady(first: Mapping[str, Tensor], again: Mapping[str, Tensor], trained: set[str]) -> str:
    """Return a tensor that differs between two runs by more than atomics can; else "".

    Those ``trained`` are left out: an optimizer makes a whole step of the sign of a small gradient.
    """
    kinds = _largest_of_kinds(first)
    for name, value in first.items():
        apart = _largest(value.double() - again[name].double())
        if name not in trained and apart > COARSE * kinds[_kind(name)]:
            return f"{name} differs by {apart:.1e}, where it is {_largest(value):.1e} at most"
    return ""


def _largest_of_kinds(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute value of the tensors of each kind."""
    kinds: dict[str, float] = {}
    for name, value in tensors.items():
        kinds[_kind(name)] = max(kinds.get(_kind(name), 0.0), _largest(value))
    return kinds


def _same_values(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors are equal, or both NaN."""
    return (a == b) | ((a != a) & (b != b))


def _kind(name: str) -> str:
    """Return the group whose tensors share a scale, as "exp_avg" of all parameters; else a name."""
    return name.partition(" of ")[0] if " of " in name else name


def _largest(values: Tensor) -> float:
    """Return the largest absolute value, 0 of an empty tensor."""
    return float(values.double().nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
