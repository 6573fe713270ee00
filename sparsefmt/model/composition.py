"""Compositions of a layer: planned for what a call takes, by predictions or by a clock."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .._caches import store
from ..autograd.engine.precision import bf16_is_allowed, tf32_is_allowed
from ..autograd.tensors.prepare import tensors_of
from ..autograd.tensors.shared import Shared
from ..graph.graph import Graph
from ..plan.calibration import constants_of
from ..plan.expression import (
    Apply,
    Broadcast,
    Expression,
    Hop,
    Leaf,
    Product,
    Sum,
    over_processes,
)
from ..plan.planner import Plan, plan
from ..plan.pricing import Constants
from ..plan.rules import Tree, steps, text_of
from .maps import maps_first
from .program import (
    Functions,
    Program,
    Stamp,
    Values,
    capturing,
    first_tensor,
    is_stamped,
    shared_of,
)

#: Plans that a layer keeps; of sampled graphs each is seen once.
MAX_PLANS = 8
#: Iterations of the layer that deciding may take.
MAX_ITERATIONS = 4
#: Decisions by the clock that a process remembers.
MAX_REMEMBERED = 256


@dataclass
class Settings:
    """The options of ``optimize``, which all layers of a model share."""

    mode: str = "auto"
    steps: int | None = None
    constants: tuple[Stamp, ...] = ()  #: stamps of the features that stay
    timing: bool = False  #: whether to time now, or to plan by predictions and what is remembered
    #: What processes that share a graph have agreed to plan by; graphs are not shared without.
    agreed: Constants | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone: a copy will meet other tensors."""
        return {"mode": self.mode, "steps": self.steps, "agreed": self.agreed}

    def is_constant(self, value: Tensor) -> bool:
        """Return True if the tensor is one of the constant features."""
        return any(is_stamped(value, made) for made in self.constants)


class Code(NamedTuple):
    """A layer's own code, and what makes its result of a composition."""

    name: str  #: of the layer's class: times of one layer's code are not another's
    run: Callable[[Values], Any]
    functions: Functions  #: of primitives
    finish: Callable[[Any], Any]


class Own(NamedTuple):
    """The composition that a layer has by itself, if it is one of the trees."""

    default: str = ""
    narrowing: str = ""  #: where the layer maps features before it aggregates them
    #: Both, of a graph that processes share: where it maps features first, and where it does not.
    over_processes: tuple[str, str] = ("", "")


@dataclass
class Planned:
    """A plan with its program; None where the layer's own code is as good."""

    plan: Plan | None
    program: Program | None


#: Number of each graph, never used again.
_NUMBERS: Any = WeakIdKeyDictionary()
_COUNT = count()
#: Seconds of trees by graph, sizes, dtype and whether it trains.
_REMEMBERED: dict[Any, dict[Tree, float]] = store({})


def number_of(graph: Graph | Shared) -> int:
    """Return the graph's number, by which plans know it."""
    number: int | None = _NUMBERS.get(graph)
    if number is None:
        number = _NUMBERS[graph] = next(_COUNT)
    return number


@dataclass
class Composition:
    """An expression with a plan for each kind of call."""

    expression: Expression
    own: Own
    settings: Settings
    plans: dict[Any, Planned] = field(default_factory=dict)
    chosen: dict[Any, Plan] = field(default_factory=dict)  #: by sizes to the next power of two

    def planned(self, values: Values, code: Code, constants: Collection[str] = ()) -> Planned:
        """Return the plan for values of these kinds; make it at the first call."""
        like = first_tensor(values)
        kinds = (
            number_of(value)
            if isinstance(value, Graph | Shared)
            else (value.shape, value.dtype, value.device, value.requires_grad, name in constants)
            for name, value in values.items()
        )
        key = *modes(like), *kinds
        result = self.plans.pop(key, None)
        if result is None:
            if capturing(like):
                return Planned(None, None)  # no time to plan, which synchronises
            with torch.random.fork_rng([like.device] if like.is_cuda else []):
                chosen = self._plan(values, code, constants)
            tree = chosen.chosen.tree
            result = Planned(chosen, None if tree == chosen.own else Program(tree))
            while len(self.plans) >= MAX_PLANS:
                self.plans.pop(next(iter(self.plans), None), None)
        self.plans[key] = result  # the last used is the last to go
        return result

    def _plan(self, values: Values, code: Code, constants: Collection[str]) -> Plan:
        """Choose a plan, the same for graphs of about one size: samples come by the thousand."""
        leaves = {leaf.name: leaf for leaf in leaves_of(self.expression)}
        bound = {
            name: _bound(leaf, values[name], name in constants) for name, leaf in leaves.items()
        }
        sizes, like, dist = _sizes_of(leaves, values), first_tensor(values), shared_of(values)
        training = torch.is_grad_enabled() and any(leaf.grad for leaf in bound.values())
        wide = {size for leaf in bound.values() for size in (leaf.rows, leaf.cols) if leaf.entries}
        wide |= {"n", "nnz", "halo", "own", *(leaf.entries for leaf in bound.values())}
        about = tuple(1 << n.bit_length() if name in wide else n for name, n in sizes.items())
        rounded = modes(like)[1]
        travelling = None if dist is None else dist.bytes_between(like)
        key = (training, rounded, about, like.dtype, like.device, travelling, *bound.values())
        result = self.chosen.get(key)
        if result is None or self.settings.timing:
            expression = rebuilt(self.expression, bound)
            default = self._layers_tree(sizes, bound, values)
            result = plan(
                expression if dist is None else over_processes(expression),
                sizes,
                self.settings.agreed or constants_of(str(like.device)),
                itemsize=like.itemsize,
                training=training,
                runs=self.settings.steps,
                rounded=rounded,
                travelling=travelling,
                orders=(sizes,),
                own=lambda tree: (  # nothing of it is kept
                    text_of(tree) == default and not any(step.constant for step in steps(tree))
                ),
            )
            if dist is None:  # processes would time apart, and choose apart
                result = self._measured(result, values, code)
            self.chosen[key] = result
        return result

    def _layers_tree(
        self, sizes: Mapping[str, int], leaves: Mapping[str, Leaf], values: Values
    ) -> str:
        """Return the composition that the layer has by itself for these widths."""
        dist = shared_of(values)
        if dist is not None:
            return self.own.over_processes[not dist.maps_first(values["H"], sizes["out"])]
        default, narrowing, _ = self.own
        if narrowing and maps_first(sizes["in"], sizes["out"], gradient=leaves["H"].grad):
            return narrowing
        return default

    def _measured(self, result: Plan, values: Values, code: Code) -> Plan:
        """Time trees too close to decide, or all promoted ones, unless they were timed before."""
        auto, like = self.settings.mode == "auto", first_tensor(values)
        trees = [c.tree for c in (result.close if auto else result.promoted)]
        if self.settings.mode == "model" or len(trees) < 2:
            return result
        graphs = tuple(_fingerprint(v) for v in values.values() if isinstance(v, Graph))
        sizes = tuple(result.sizes.items())
        kind = like.dtype, like.device, result.training, modes(like)[1], tf32_is_allowed()
        key = result.expression, graphs, sizes, *kind, code.name, tuple(trees)
        seconds = _REMEMBERED.get(key, {})
        if self.settings.timing and (not seconds or not auto):
            # The same numbers without their history, so that timing leaves no gradients.
            leaves = {
                name: value.detach().requires_grad_()
                if isinstance(value, Tensor) and value.requires_grad
                else value
                for name, value in values.items()
            }

            def run_of(tree: Tree) -> Callable[[], Any]:
                if tree == result.own:
                    return partial(code.run, leaves)
                program = Program(tree)
                return lambda: code.finish(program(leaves, code.functions))

            runs = {tree: run_of(tree) for tree in trees}
            seconds = _timed(runs, like, MAX_ITERATIONS if auto else None)
            while len(_REMEMBERED) >= MAX_REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)), None)
            _REMEMBERED[key] = seconds
        return result.with_measured(seconds)


# Leaves


def leaves_of(expression: Expression) -> list[Leaf]:
    """Return the leaves of an expression."""
    match expression:
        case Leaf():
            return [expression]
        case Broadcast(vector, matrix):
            return [vector, *leaves_of(matrix)]
        case Product(parts) | Sum(parts) | Apply(arguments=parts) | Hop(parts):
            return [leaf for part in parts for leaf in leaves_of(part)]


def rebuilt(expression: Expression, leaves: Mapping[str, Leaf]) -> Expression:
    """Return the expression with other leaves in the place of those of the same names."""
    match expression:
        case Leaf(name):
            return leaves[name]
        case Broadcast(vector, matrix):
            return replace(expression, vector=leaves[vector.name], matrix=rebuilt(matrix, leaves))
        case Product(parts):
            return Product(tuple(rebuilt(part, leaves) for part in parts))
        case Sum(parts):
            return Sum(tuple(rebuilt(part, leaves) for part in parts))
        case Hop(factors):
            return Hop(tuple(leaves[factor.name] for factor in factors))
        case Apply(arguments=parts):
            return replace(expression, arguments=tuple(rebuilt(p, leaves) for p in parts))


def _bound(leaf: Leaf, value: Graph | Shared | Tensor, constant: bool) -> Leaf:
    """Set a leaf's kind by its graph, or by its tensor the flags ``constant`` and ``grad``."""
    if isinstance(value, Shared):
        return replace(leaf, kind="unweighted")
    if isinstance(value, Graph):
        return replace(leaf, kind="weighted" if value.weighted else "unweighted")
    constant = (constant or leaf.constant) and not value.requires_grad
    return replace(leaf, constant=constant, grad=value.requires_grad)


def _sizes_of(leaves: Mapping[str, Leaf], values: Values) -> dict[str, int]:
    """Return the sizes of a call by their names; on a DistGraph the largest of any process."""
    sizes = {"heads": 1}
    for name, value in values.items():
        leaf = leaves.get(name)
        names = ("n", "n") if leaf is None else (leaf.rows, leaf.cols)
        sizes |= dict(zip(names, value.shape, strict=False))
        if isinstance(value, Graph):
            sizes["nnz" if leaf is None else leaf.entries] = value.nnz
    dist = shared_of(values)
    return sizes if dist is None else sizes | dist.busiest


def modes(like: Tensor) -> tuple[bool, bool]:
    """Return two flags: gradients are wanted, and products may round float32 features."""
    rounds = like.is_cuda and like.dtype is torch.float32 and bf16_is_allowed()
    return torch.is_grad_enabled(), rounds


# A clock


def _timed(
    runs: Mapping[Tree, Callable[[], Any]], like: Tensor, iterations: int | None
) -> dict[Tree, float]:
    """Time each run twice, as many runs as ``iterations`` allow; return the lesser times."""
    seconds: dict[Tree, float] = {}
    for tree, run in runs.items():
        if iterations and 2 * len(seconds) + 2 > iterations:
            break
        try:
            seconds[tree] = seconds_of(run, like)  # compiles, and builds what stays
        except (MemoryError, torch.OutOfMemoryError):
            continue  # one that fits may be there
    return {tree: min(first, seconds_of(runs[tree], like)) for tree, first in seconds.items()}


def seconds_of(run: Callable[[], Any], like: Tensor) -> float:
    """Time a run, and the gradients of what it was called with."""
    return times_of(run, like)[1]


def times_of(run: Callable[[], Any], like: Tensor) -> tuple[float, float]:
    """Time a run and its gradients: on the host alone, and until the device is done."""
    cuda = like.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(like.device)  # synchronize!
    start = time.perf_counter()
    total = sum(y.sum() for y in tree_leaves(run()) if isinstance(y, Tensor) and y.requires_grad)
    if isinstance(total, Tensor):
        torch.autograd.grad(total, list(_sources(total)), retain_graph=True)
    host = time.perf_counter() - start
    if cuda:
        torch.cuda.synchronize(like.device)  # synchronize!
    return host, time.perf_counter() - start


def _sources(y: Tensor) -> Iterable[Tensor]:
    """Yield the tensors at which the graph of autograd begins."""
    seen, open_ = set(), [y.grad_fn]
    while open_:
        node: Any = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        open_ += [following for following, _ in node.next_functions]


def _fingerprint(graph: Graph) -> tuple[int, ...]:
    """Return numbers that differ for graphs of another structure, nearly always."""
    tensors = tensors_of(graph)
    rows, columns = tensors.rows.indptr, tensors.rows.indices
    columns = columns[:: max(1, tensors.nnz // 65536)].long()
    places = torch.arange(len(columns), device=columns.device) % 8191
    sums = rows.sum(dtype=torch.int64), (columns * places).sum()
    return (*graph.shape, graph.nnz, *(int(part) for part in sums))  # synchronize!
