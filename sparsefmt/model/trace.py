"""Products of matrices in a module that a user wrote: found by torch.fx, and planned.

A region is a tree of ``@``, linear layers, ``spmm``, row factors ``d[:, None] * X`` and sums, with
one product with a graph at least.  All else, such as biases and activations, stays as it is.
"""

import inspect
import math
import random
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import Module, Parameter
from torch.nn.modules import module as _every

from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..plan.expression import Expression
from .composition import Composition, Settings, capturing
from .reads import Reads
from .regions import attribute, regions, writes
from .snapshot import Snapshot
from .state import Key, hold, is_leaf
from .vertex_order import VertexOrder
from .vertices import Seen, reordered

#: What running a forward on stand-ins for tensors may raise.
FAILURES = (
    *(fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError),
    *(LookupError, AssertionError, ArithmeticError, NameError),
)
#: States of a model, such as training and evaluation, whose traces are kept.
MAX_TRACES = 16
#: Traces that stop before no more are made.
MAX_STOPS = 4


@dataclass
class _Made:
    """A trace as a function; None where it stopped."""

    function: Callable[..., Any] | None
    objects: list[Any] = field(default_factory=list)  #: whose identity the key has
    graph: fx.Graph | None = None  #: as it was traced
    #: The same in the new order of vertices, by what it was run with; None where it has none.
    ordered: dict[Any, Callable[..., Any] | None] = field(default_factory=dict)


class TracedForward:
    """The forward of a model whose products run as planned; traced for each state of the model."""

    def __init__(self, model: Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.takes = takes(model)
        self.made: dict[Any, _Made] = {}
        self.reads, self.latest, self.stops = Reads(traced=True), _Made(None), 0
        self.compositions: dict[str, Composition] = {}
        self.order: VertexOrder | None = None
        self.why_as_given = ""  #: why the latest trace has no other order

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
        tracing = self.stops < MAX_STOPS and not torch.compiler.is_compiling()
        left_out = kwargs or len(args) != len(self.takes) or any(one is None for one in args)
        if left_out or not tracing:
            return type(self.model).forward(self.model, *args, **kwargs)
        made = self.current()
        watched = _every._has_any_global_hook()  # type: ignore[no-untyped-call]
        if self.order is not None and not watched:
            ordered = self.ordered(made, args, self.order)
            if ordered is not None:
                return ordered(self.model, *args, self.order)
        if made.function is None:
            return type(self.model).forward(self.model, *args)
        return made.function(self.model, *args)

    def current(self) -> _Made:
        """Give what was traced of the model as it is, traced now if it was not."""
        try:
            found = self.made.get(self.state())
        except UnsupportedError:  # the trace says so
            found = None
        if found is None:
            self.trace()
            found = self.latest
        return found

    def ordered(
        self, made: _Made, args: tuple[Any, ...], order: VertexOrder
    ) -> Callable[..., Any] | None:
        """Give the traced forward in another order of vertices, written anew if it was not."""
        given = order.given
        if made.graph is None or not any(one is given for one in args if one is not None):
            return None
        held = [attribute(n, self.model) for n in made.graph.nodes if n.op == "get_attr"]
        kind = _kind((args, held), given)
        if kind not in made.ordered:
            if capturing(order.perm):
                return None
            found = None
            try:
                with evaluating(self.model):
                    seen = Seen(self.model, made.graph, given)
                    seen.run(*args)
                found = self.compiled(reordered(seen, len(order)))
            except torch.OutOfMemoryError:
                return None  # the next call may have the memory
            except FAILURES as error:
                self.why_as_given = str(error)
            while len(made.ordered) >= MAX_TRACES:
                made.ordered.pop(next(iter(made.ordered)))
            made.ordered[kind] = found
        return made.ordered[kind]

    def state(self) -> tuple[Any, ...]:
        """Give what a trace takes for constant, as it is now."""
        return self.key().now()

    def key(self) -> Key:
        """Give the key of what a trace takes for constant."""
        key = Key()
        key.model(self.model)
        key.outside(self.reads.values(), self.reads.name_of)
        return key

    def trace(self) -> bool:
        """Trace the model as it is, and tell whether that worked."""
        if len(self.made) >= MAX_TRACES:
            self.made.clear()
            self.reads = Reads(traced=True)
        self.latest = _Made(None)
        try:
            classes = {type(m) for m in self.model.modules() if not is_leaf(m)}
            while self.reads.read(classes, (key := self.key()).objects):
                pass
            state = key.now()
            self.latest.objects = hold(key.objects, partial(self.forget, state))
            self.made[state] = self.latest
            self.latest.graph = self.traced()
            self.latest.function = self.compiled(self.latest.graph)
        except FAILURES as error:
            self.stops += 1
            warnings.warn(_stopped(error, self.model), stacklevel=3)
        return self.latest.function is not None

    def forget(self, state: tuple[Any, ...]) -> None:
        """Drop a trace of objects of which one has gone."""
        self.made.pop(state, None)

    def traced(self) -> fx.Graph:
        """Trace the model as it is now."""
        with _unchanged(self.model, self.key):
            graph = _Tracer().trace(self.model)
            again = _Tracer().trace(self.model)
            if graph.python_code("self").src != again.python_code("self").src:
                raise UnsupportedError("the forward computes something else at each call.")
        return graph

    def compiled(self, traced: fx.Graph) -> Callable[..., Any]:
        """Make a function of a trace, whose regions run as planned."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(traced, {}))
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


class _Proxy(fx.Proxy):
    """A value of the trace; code of the user's may not ask ``isinstance`` of it."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking = sys._getframe(1)  # of a function of torch in C that of its caller
        package = asking.f_globals.get("__name__", "").partition(".")[0]
        libraries = "torch", __package__.partition(".")[0]
        if "isinstance" in asking.f_code.co_names and package not in libraries:
            raise UnsupportedError(
                "forward asks what its arguments are (isinstance), where a trace has stand-ins."
            )
        return _Proxy


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Stand in for the value of a node."""
        return _Proxy(node, self)

    def __init__(self) -> None:
        package = sys.modules["sparsefmt.autograd"]
        for name in package.__all__:  # names that were not used yet cannot be seen
            getattr(package, name)
        super().__init__(autowrap_modules=(math, package))  # type: ignore[arg-type]
        self.modes = _modes()

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

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a call, but none that writes to a tensor of the model's."""
        node = super().create_node(kind, target, *args, **kwargs)
        if _modes() != self.modes:
            raise UnsupportedError(
                "forward changes a mode of torch for a part of itself (no_grad, autocast, ...)."
            )
        if writes(node, self.root):
            given = [*node.args[:1], node.kwargs.get("out"), node.kwargs.get("input")]
            for one in given:
                while isinstance(one, fx.Node) and _is_view(one):
                    one = one.args[0]
                if isinstance(one, fx.Node) and one.op == "get_attr":
                    raise UnsupportedError(f"forward writes to the model: to {one.target}.")
        return node

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


def _modes() -> tuple[Any, ...]:
    """Give the modes of torch that a context manager changes."""
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _KINDS]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


_KINDS = ("cpu", "cuda")
#: Names of calls whose result may share memory with what they are given.
_VIEWS = frozenset(
    "getattr getitem view view_as reshape reshape_as t transpose swapaxes movedim permute squeeze "
    "unsqueeze detach expand expand_as narrow select diagonal flatten unflatten ravel contiguous "
    "unbind chunk split to type_as float double half real".split()
)


def _is_view(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    called = node.op in ("call_function", "call_method")
    return called and name in _VIEWS and bool(node.args)


def _path(model: Module, value: object) -> str:
    """Name the attribute that holds a graph."""
    for prefix, module in model.named_modules():
        for name, found in vars(module).items():
            if found is value:
                return f"{prefix}.{name}" if prefix else name
    raise UnsupportedError("forward uses a graph that is neither an argument nor an attribute.")


@contextmanager
def evaluating(model: Module, *, training: bool = False) -> Iterator[None]:
    """Run the model in a mode for a while, and undo what its forward writes and draws.

    Parts that are in the other mode stay so where the model as a whole is in the one asked for.
    """
    modes = {module: module.training for module in model.modules()}
    key = Key()
    if not is_leaf(model):
        key.model(model)
    snapshot = Snapshot(model, key)
    drawn = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        used = {p.device for p in model.parameters() if p.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(list(used)):
            if model.training != training:
                model.train(training)
            yield
    finally:
        snapshot.restore()
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])  # noqa: NPY002
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def running(model: Module, *, training: bool) -> Iterator[None]:
    """Run the model as it trains, with gradients, or evaluates, and undo what it writes."""
    with evaluating(model, training=training), torch.set_grad_enabled(training):
        yield


def _kind(value: Any, graph: Any) -> Any:
    """Give what decides how rows go through a trace: shapes, and where the graph is."""
    if value is graph:
        return "graph"
    if isinstance(value, Tensor):
        return value.shape, value.layout
    if isinstance(value, list | tuple):
        return tuple(_kind(one, graph) for one in value)
    if isinstance(value, dict):
        return tuple((str(name), _kind(one, graph)) for name, one in value.items())
    return type(value)


@contextmanager
def _unchanged(model: Module, key: Callable[[], Key]) -> Iterator[None]:
    """Restore what the forward writes or draws while it is traced, and refuse to trace that."""
    held = ("_parameters", "_buffers", "_modules")
    inner = [(p, vars(m)[name]) for p, m in model.named_modules() for name in held]
    before = [{**now} for _, now in inner]
    first = key()
    state, snapshot = first.now(), Snapshot(model, first)
    drawn = torch.get_rng_state(), random.getstate()
    wrote: list[str] = []
    try:
        yield
    finally:
        for (prefix, now), was in zip(inner, before, strict=True):
            if now.keys() != was.keys() or any(now[name] is not was[name] for name in was):
                names = [n for n in {**was, **now} if now.get(n) is not was.get(n)]
                wrote += [f"{prefix}.{name}" if prefix else name for name in names]
                now.clear()
                now.update(was)
        wrote += snapshot.restore()
        drew = not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate()
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
    if wrote:
        raise UnsupportedError(
            f"forward writes to the model: to {', '.join(dict.fromkeys(wrote))}."
        )
    if drew:
        raise UnsupportedError("forward draws numbers that do not come from its arguments")
    if key().now() != state:
        raise UnsupportedError("forward changes a value outside of the model, which it reads")


def _stopped(error: BaseException, model: Module) -> str:
    """Say where the trace stopped: in the last line of the user's, or in which forward."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules[_ROOT]))
    library = (*ours, sysconfig.get_path("stdlib"))
    within = sysconfig.get_path("purelib")
    frames = [
        f"{f.filename}:{f.lineno}, in {f.name}: {f.line}"
        for f in traceback.extract_tb(error.__traceback__)
        if "<" not in f.filename
        if not f.filename.startswith(library) or f.filename.startswith(within)
        if not f.filename.startswith(ours)
    ]
    code = getattr(type(model).forward, "__code__", None)
    if not frames and code is not None and not re.match(r".+:\d+, in ", str(error)):
        frames = [f"{code.co_filename}:{code.co_firstlineno}, in {code.co_qualname}"]
    place = f" at {frames[-1]}" if frames else ""
    advice = (
        " A forward that is planned does not branch on tensors, and takes lengths from shapes."
        if isinstance(error, fx.proxy.TraceError) or re.search("Proxy|symbolic", str(error))
        else ""
    )
    told = str(error).rstrip(".")
    return (
        f"the model runs as it did, since its trace stopped{place} ({type(error).__name__}: "
        f"{told}).{advice}"
    )


_ROOT = __name__.partition(".")[0]
