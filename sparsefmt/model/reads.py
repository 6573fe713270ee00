"""Globals, class attributes and variables of closures that the code of a forward may read."""

import dis
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..errors import UnsupportedError

#: Modules whose functions give another value at each call, and such names of others.
CHANGING = {"time", "random", "datetime", "secrets", "uuid", "numpy.random"}
CHANGING_OF = {"os": {"environ", "getenv", "urandom"}, "builtins": {"open", "input"}}
#: What code asks of its arguments, for which a trace has stand-ins, and of torch's modes.
ASKING = {"type", "hasattr", "callable"}
ASKING_TORCH = {
    *("is_tensor", "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled"),
    "get_default_dtype",
}
#: Steps of byte code that ask it: ``match`` with a class, and ``except`` with one.
ASKING_STEPS = {"MATCH_CLASS", "CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"}
#: Packages whose functions are called, and not read.
KNOWN = {"torch", "torch_geometric", "sparsefmt", "numpy", "scipy", "cupy"}
#: Functions and classes that are read, at most.
MAX_READ = 512
_MISSING = type("missing", (), {})
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")


class Reads:
    """The values outside of a model that the code of its forward names."""

    def __init__(self, own: Iterable[str] = (), *, traced: bool = False) -> None:
        self._traced = traced  # whether what the code asks of its arguments is refused
        self.names: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.cells: dict[int, Any] = {}
        self.defaults: list[Any] = []
        self._functions: dict[FunctionType, None] = {}
        self._spaces: dict[int, tuple[Any, Mapping[str, Any]]] = {}
        self._used: set[str] = set()  # as global names and attributes
        # Packages of the model's classes, and of those modules that are given.
        self._own = {name.partition(".")[0] for name in own} - KNOWN
        self._place = "the forward"

    def values(self) -> Iterator[Any]:
        """Give each value as it is now."""
        for space, name in self.names.values():
            yield space.get(name, _MISSING)
        for cell in self.cells.values():
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                yield _MISSING
        yield from self.defaults

    def name_of(self, value: Any) -> str:
        """Name a value that the code reads."""
        found = [name for space, name in self.names.values() if space.get(name) is value]
        return found[0] if found else f"a {type(value).__name__} of a closure or a default"

    def read(self, classes: Iterable[type], objects: Iterable[Any]) -> bool:
        """Read the code of a model's classes and of what it calls; tell whether more was found."""
        before = len(self.names), len(self.cells), len(self.defaults)
        classes = list(classes)
        self._own |= {_root(cls) for cls in classes} - KNOWN
        for one in (*classes, *objects):
            self._see(one)
        found = -1
        while found != (found := len(self.names) + len(self._spaces)):
            for _, space in [*self._spaces.values()]:
                for name in self._used & space.keys():
                    self._name(space, name)
        return before != (len(self.names), len(self.cells), len(self.defaults))

    def _name(self, space: Mapping[str, Any], name: str) -> None:
        if (id(space), name) not in self.names:
            self.names[id(space), name] = space, name
            self._see(space[name])

    def _see(self, value: Any) -> None:
        if len(self._functions) + len(self._spaces) > MAX_READ:
            raise UnsupportedError(f"{self._place} calls more functions than can be compared.")
        self._refuse_changing(value)
        if isinstance(value, _WRAPPERS):
            self._see(value.__func__)
        elif isinstance(value, property):
            self._see(value.fget)
        elif isinstance(value, partial):
            self._see(value.func)
        elif isinstance(value, FunctionType):
            if value not in self._functions and not self._is_library(value):
                self._functions[value] = None
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
        lines = [*dis.findlinestarts(code)]
        for step in dis.get_instructions(code):
            if step.opname in _LOADS or step.opname in ASKING_STEPS:
                line = max((n for at, n in lines if at <= step.offset and n), default=0)
                self._place = f"{code.co_filename}:{line}, in {code.co_name}"
            if step.opname in ASKING_STEPS:
                self._refuse_asking("match" if step.opname == "MATCH_CLASS" else "except")
            if step.opname in _LOADS:
                self._load(function, str(step.argval), step.opname == "IMPORT_NAME", code)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._function(function, inner)
        if code is function.__code__:
            for cell in function.__closure__ or ():
                self.cells[id(cell)] = cell
            self.defaults += [*(function.__defaults__ or ())]
            self.defaults += [*(function.__kwdefaults__ or {}).values()]

    def _load(self, function: FunctionType, name: str, imported: bool, code: CodeType) -> None:
        names = function.__globals__
        value = sys.modules.get(name) if imported else names.get(name, _MISSING)
        if value is _MISSING and name in ASKING:
            self._refuse_asking(name)
        builtin = value is _MISSING and name in CHANGING_OF["builtins"]
        if builtin or (imported and name in CHANGING):
            self._refuse(name)
        if isinstance(value, ModuleType):
            for used in ASKING_TORCH.intersection(code.co_names if name == "torch" else ()):
                self._refuse_asking(f"torch.{used}")
            for used in code.co_names:
                if used in CHANGING_OF.get(value.__name__, ()):
                    self._refuse(f"{name}.{used}")
                if isinstance(inner := vars(value).get(used), ModuleType):
                    self._refuse_changing(inner)
        if imported:
            self._see(value)
        elif value is not _MISSING:
            self._name(names, name)

    def _refuse_changing(self, value: Any) -> None:
        """Refuse clocks and generators, and their functions."""
        if isinstance(value, ModuleType):
            found = value.__name__
        elif isinstance(value, BuiltinFunctionType | MethodType | FunctionType | type):
            of = getattr(value, "__self__", None)
            given = of if of is None or isinstance(of, ModuleType | type) else type(of)
            found = value.__module__ or getattr(given, "__module__", None) or ""
            found = "numpy.random" if found.startswith("numpy.random") else found
        else:
            return
        if found in CHANGING:
            self._refuse(getattr(value, "__name__", found))

    def _refuse(self, name: str) -> None:
        raise UnsupportedError(
            f"{self._place} uses {name}, which may give another value at each call."
        )

    def _refuse_asking(self, name: str) -> None:
        if self._traced:
            raise UnsupportedError(
                f"{self._place} uses {name}, which a trace answers for its stand-ins, or once for "
                "all."
            )

    def _is_library(self, value: Any) -> bool:
        """Tell whether a function, class or module is called, and not read."""
        name, root = _module(value), _root(value)
        if root in KNOWN or root in sys.stdlib_module_names or root == "builtins":
            return True
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        return root not in self._own and ("site-packages" in file or "dist-packages" in file)


_WRAPPERS = (MethodType, staticmethod, classmethod)


def _module(value: Any) -> str:
    found = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return found or ""


def _root(value: Any) -> str:
    return _module(value).partition(".")[0]
