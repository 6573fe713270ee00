"""Products of matrices in a module that a user wrote: found by torch.fx, and planned.

A region is a tree of ``@``, linear layers, ``spmm``, row factors ``d[:, None] * X`` and sums, with
one product with a graph at least.  All else, such as biases and activations, stays as it is.
"""

import inspect
import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module, Parameter

from ..errors import UnsupportedError
from ..graph import Graph
from ..plan.expression import Expression
from .composition import Composition, Settings
from .regions import regions

#: What running a forward on stand-ins for tensors may raise.
FAILURES = (
    *(fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError),
    *(LookupError, AssertionError, ArithmeticError, NameError),
)
#: States of a model, such as training and evaluation, whose traces are kept.
MAX_TRACES = 16
#: Modules of these are called, not looked into; of the latter also what users derive from them.
LIBRARIES = ("torch.nn.", "torch_geometric.nn.", "sparsefmt.nn")
LAYERS = ("torch_geometric.nn.conv.", "sparsefmt.nn")


class TracedForward:
    """The forward of a model whose products run as planned; traced for each state of the model."""

    def __init__(self, model: Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.takes = takes(model)
        self.made: dict[Any, Callable[..., Any] | None] = {}
        self.compositions: dict[str, Composition] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copy traces and plans anew."""
        return {"model": self.model, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; the next call traces."""
        self.__init__(state["model"], state["settings"])  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; a call with what the trace left out runs as it is written."""
        if kwargs:
            named = [kwargs[name] for name in self.takes[len(args) :] if name in kwargs]
            whole = len(named) == len(kwargs)
            args, kwargs = ((*args, *named), {}) if whole else (args, kwargs)
        if kwargs or len(args) != len(self.takes) or torch.compiler.is_compiling():
            return type(self.model).forward(self.model, *args, **kwargs)
        state = state_of(self.model)
        if state not in self.made:
            self.trace()
        function = self.made[state]
        if function is None:
            return type(self.model).forward(self.model, *args)
        return function(self.model, *args)

    def trace(self) -> bool:
        """Trace the model as it is, and tell whether that worked."""
        if len(self.made) >= MAX_TRACES:
            self.made.clear()
        made = self.made[state_of(self.model)] = self.traced()
        return made is not None

    def traced(self) -> Callable[..., Any] | None:
        """Trace the model as it is now; None, after a warning, if that fails."""
        try:
            with _unchanged(self.model):
                graph = _Tracer().trace(self.model)
        except FAILURES as error:
            warnings.warn(_stopped(error), stacklevel=4)
            return None
        found = list(regions(graph, self.model))
        for region in reversed(found):  # a later one may take what an earlier one gives
            name, expression = region.root.name, region.expression
            region.composition = self.composition(name, expression, region.written[1:-1])
            region.replace_in(graph)
        # No GraphModule: it copies buffers, which ``to`` replaces, and refuses some names.
        code = graph.python_code("self")
        exec(code.src, code.globals)
        forward: Callable[..., Any] = code.globals["forward"]
        return forward

    def composition(self, name: str, expression: Expression, written: str) -> Composition:
        """Give the composition of a region, which other states of the model share."""
        found = self.compositions.get(name)
        if found is None or found.default != written or found.expression != expression:
            found = self.compositions[name] = Composition(expression, written, self.settings)
        return found


def takes(model: Module) -> tuple[str, ...]:
    """Name the arguments that have no default."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    _, *named = [p.name for p in parameters if p.default is p.empty and p.kind not in _MANY]
    return tuple(named)


_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PLAIN = (bool, int, float, str, type(None))


def state_of(model: Module) -> Any:
    """Give what a trace takes for constant: plain attributes, and what modules are."""
    return tuple(
        (id(m), bool(m._forward_hooks or m._forward_pre_hooks), m.training)
        if is_leaf(m)
        else (
            *(id(m), len(m._forward_hooks), len(m._forward_pre_hooks)),
            *(v if isinstance(v, _PLAIN) else id(v) for v in _attributes(m)),
        )
        for m in model.modules()
    )


def _attributes(module: Module) -> list[Any]:
    """Give the attributes that a trace reads once; tensors and graphs are read at each call."""
    held = {name: v for name, v in vars(module).items() if name != "forward"}
    return [value for value in held.values() if not isinstance(value, Tensor | Graph)]


def is_leaf(module: Module) -> bool:
    """Tell whether a module is called as it is, not looked into: torch's, and kinds of layers."""
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
        return False
    layer = any(base.__module__.startswith(LAYERS) for base in type(module).__mro__)
    return layer or type(module).__module__.startswith(LIBRARIES)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self) -> None:
        package = sys.modules[__package__]
        for name in package.__all__:  # names that were not used yet cannot be seen
            getattr(package, name)
        super().__init__(autowrap_modules=(math, package))  # type: ignore[arg-type]

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Stand in for arguments without a default; others have it, also in the trace."""
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise UnsupportedError("forward takes any number of arguments (*args).")
        named = [p.name for p in parameters if p.default is p.empty and p.kind not in _MANY]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in named]
        return root_fn, [self.root, *proxies]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Graph):
            return self.create_node("get_attr", _path(self.root, a), (), {})
        if isinstance(a, Tensor) and not isinstance(a, Parameter) and a not in self.tensor_attrs:
            base = a._base  # of d[:, None], where d is an attribute that is no buffer
            if base is None or base not in self.tensor_attrs or a.shape != (*base.shape, 1):
                raise UnsupportedError(
                    "forward makes a tensor that depends on none of its arguments."
                )
            held = self.create_node("get_attr", self.tensor_attrs[base], (), {})
            return self.create_node("call_method", "unsqueeze", (held, -1), {})
        return super().create_arg(a)


def _path(model: Module, value: object) -> str:
    """Name the attribute that holds a graph."""
    for prefix, module in model.named_modules():
        for name, found in vars(module).items():
            if found is value:
                return f"{prefix}.{name}" if prefix else name
    raise UnsupportedError("forward uses a graph that is neither an argument nor an attribute.")


@contextmanager
def _unchanged(model: Module) -> Iterator[None]:
    """Restore what the forward writes or draws while it is traced, and refuse to trace that."""
    held = ("_parameters", "_buffers", "_modules")
    inner = [(vars(m), {**vars(m)}) for m in model.modules()]
    inner += [(vars(m)[name], {**vars(m)[name]}) for m in model.modules() for name in held]
    drawn = torch.get_rng_state(), random.getstate()
    changed = False
    try:
        yield
    finally:
        for now, before in inner:
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in before):
                changed = True
                now.clear()
                now.update(before)
        if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
            changed = True
            torch.set_rng_state(drawn[0])
            random.setstate(drawn[1])
    if changed:
        raise UnsupportedError("forward writes to the model, or draws numbers outside of torch.")


def _stopped(error: BaseException) -> str:
    """Say where the trace stopped: in the last line that is neither torch's nor ours."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules[_ROOT]))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    at = [
        f"{f.filename}:{f.lineno}, in {f.name}: {f.line}" for f in frames if "<" not in f.filename
    ]
    place = f" at {at[-1]}" if at else ""
    return (
        f"the model runs as it did, since its trace stopped{place} ({type(error).__name__}: "
        f"{error}). A forward that is planned does not branch on tensors, and takes lengths from "
        "shapes."
    )


_ROOT = __name__.partition(".")[0]
