"""Compositions of a layer on tensors: planned for what a call gets, constants computed once."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import count
from operator import add
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..autograd.attention import gat_aggregate
from ..autograd.engine.precision import bf16_is_allowed, tf32_is_allowed
from ..autograd.layers import maps_first
from ..autograd.matmul import multiply, scaled, spmm
from ..autograd.tensors.lifetimes import note
from ..autograd.tensors.prepare import graph_tensors
from ..autograd.tensors.shared import Shared, local_of, shared
from ..graph.graph import Graph
from ..plan.calibration import constants_of
from ..plan.expression import Expression, Leaf, over_processes
from ..plan.planner import Plan, plan
from ..plan.pricing import Constants
from ..plan.rules import Step, Tree, bare, steps
from .leaves import bound_leaf, leaves_of, rebuilt, shared_of, sizes_of

#: Plans that a layer keeps; of sampled graphs each is seen once.
MAX_PLANS = 8
#: Iterations of the layer that deciding may take.
MAX_ITERATIONS = 4
#: Decisions by the clock that a process remembers.
MAX_REMEMBERED = 256


class Weighted(NamedTuple):
    """A graph with values for its entries: in CSR order, those of a shared one as its edges."""

    graph: Any
    values: Tensor


class Attention(NamedTuple):
    """The attention of one head, which multiplies without being written down."""

    graph: Any
    sources: Tensor
    targets: Tensor
    options: Mapping[str, Any]


def _spmm(A: Any, X: Tensor, row: Tensor | None = None, col: Tensor | None = None) -> Tensor:
    away = shared(A.graph if isinstance(A, Weighted | Attention) else A)
    if isinstance(A, Attention):
        function = partial(gat_aggregate, A.graph) if away is None else away.gat_aggregate
        return function(X, A.sources, A.targets, **A.options)
    if away is not None:
        values = A.values if isinstance(A, Weighted) else None
        found: Tensor = away.spmm(X, values, row_scale=row, col_scale=col)
        return found
    if isinstance(A, Weighted):
        return multiply(graph_tensors(A.graph), False, X, A.values, row, col)
    return spmm(A, X, row_scale=row, col_scale=col)


def _scale_entries(A: Any, row: Tensor | None = None, col: Tensor | None = None) -> Weighted:
    if isinstance(A, Shared):
        return Weighted(A, shared(A).scaled_entries(row, col))
    graph, values = A if isinstance(A, Weighted) else (A, graph_tensors(A).csr_values)
    like = col if row is None else row
    assert like is not None  # a rule gives one of them
    if values is None:
        values = like.new_ones(graph_tensors(graph).nnz)
    return Weighted(graph, scaled(graph_tensors(graph), False, values.to(like.dtype), row, col))


def _broadcast(X: Tensor, row: Tensor) -> Tensor:
    return row[:, None] * X


#: What computes each kind of primitive, called with operands by their roles.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm": lambda left, right: left @ right,
    "spmm_unweighted": _spmm,
    "spmm_weighted": _spmm,
    "spmm_scaled": _spmm,
    "broadcast": _broadcast,
    "broadcast_cols": lambda X, col: X * col,
    "scale_entries": _scale_entries,
    "scale_diagonal": lambda row, col: row * col,
    "add": lambda **terms: reduce(add, terms.values()),
}


class Code(NamedTuple):
    """What a layer runs: code of its own, and what makes its result of a composition."""

    name: str  #: of the layer's class: times of one layer's code are not another's
    own: Callable[[Mapping[str, Any]], Any]
    finish: Callable[[Any], Any] = lambda made: made


class Program:
    """The calls of a tree, in order; those of constants alone run when constants change."""

    def __init__(self, tree: Tree) -> None:
        order = steps(tree)
        keys: dict[Tree, Any] = {step: number for number, step in enumerate(order)}

        def key(part: Tree) -> Any:
            return keys[part] if isinstance(part, Step) else part.name

        calls = [
            (step, (key(step), step.rule.kind, [(r, key(p)) for r, p in step.by_role().items()]))
            for step in order
        ]
        self.once = [call for step, call in calls if step.constant]
        self.each = [call for step, call in calls if not step.constant]
        self.result = key(tree)
        needed = {leaf: None for step in order if step.constant for leaf in _leaves(step)}
        self.constants = [leaf.name for leaf in needed if leaf.kind in ("dense", "diagonal")]
        #: Stamps of its constants, how often they were forgotten, and what was made of them.
        self._kept: tuple[list[Any], int, dict[Any, Any]] | None = None

    def __call__(self, values: Mapping[str, Any], functions: Mapping[str, Any]) -> Any:
        """Compute the tree of these values."""
        kept: Mapping[Any, Any] = {}
        if self.once:
            if capturing(_first(values)) and not self._fresh(values):
                return self._at_once(values, functions)
            kept = self._constants(values, functions)
        found = {**values, **kept}
        _run(self.each, found, functions)
        # What is kept stays ours, whatever the caller writes to the result.
        result = found[self.result]
        return result.clone() if self.result in kept else result

    def _constants(
        self, values: Mapping[str, Any], functions: Mapping[str, Any]
    ) -> Mapping[Any, Any]:
        """Give the values of the constant steps, kept since they were made of these constants."""
        state = self._kept
        if state is None or not self._fresh(values):
            stamps, found = [stamp(values[name]) for name in self.constants], dict(values)
            with torch.inference_mode(False), torch.no_grad():
                _run(self.once, found, functions)
            made = {call[0]: found[call[0]] for call in self.once}
            state = self._kept = stamps, times_forgotten(values), made
        note(state[2])
        return state[2]

    def _at_once(self, values: Mapping[str, Any], functions: Mapping[str, Any]) -> Any:
        """Compute the tree and keep nothing: memory of a captured CUDA graph is that graph's."""
        found = dict(values)
        _run([*self.once, *self.each], found, functions)
        return found[self.result]

    def _fresh(self, values: Mapping[str, Any]) -> bool:
        """Tell whether what is kept was made of these very constants."""
        if self._kept is None:
            return False
        stamps, forgotten, _ = self._kept
        return forgotten == times_forgotten(values) and all(
            is_stamped(values[name], made)
            for name, made in zip(self.constants, stamps, strict=True)
        )


def _run(calls: list[Any], found: dict[Any, Any], functions: Mapping[str, Any]) -> None:
    for key, kind, operands in calls:
        found[key] = functions[kind](**{role: found[name] for role, name in operands})


def _leaves(tree: Tree) -> list[Leaf]:
    if isinstance(tree, Step):
        return [leaf for part in tree.operands for leaf in _leaves(part)]
    return [tree]


def times_forgotten(values: Mapping[str, Any]) -> int:
    """Tell how often processes that share a graph were told to forget features that stay."""
    away = shared_of(values)
    return 0 if away is None else int(away.times_forgotten)


def stamp(value: Tensor) -> tuple[Any, int]:
    """Give what tells a tensor, unchanged, from others."""
    return ref(value), -1 if value.is_inference() else value._version


def is_stamped(value: Tensor, given: tuple[Any, int]) -> bool:
    """Tell whether it is that tensor, not written to since; never of inference's tensors."""
    return given[0]() is value and not value.is_inference() and value._version == given[1]


# Plans by what a call gets


def plannable(x: Tensor) -> bool:
    """Tell whether a call may be planned: eager, and in the dtypes as they are."""
    plain = x.layout is torch.strided and x.is_floating_point()
    traced = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    return plain and not traced


def suits(graph: Graph | Shared, x: Tensor) -> bool:
    """Tell whether a graph is where the features are, with values of their dtype or none."""
    tensors = graph_tensors(local_of(graph))
    values = tensors.csr_values
    return tensors.device == x.device and (values is None or values.dtype == x.dtype)


@dataclass
class Settings:
    """How a model is planned."""

    mode: str = "auto"
    steps: int | None = None
    constants: tuple[Any, ...] = ()  #: stamps of the features that stay
    moved: tuple[Any, ...] = ()  #: stamps of their rows in another order of the vertices
    timing: bool = False  #: whether to time now, or to plan by predictions and what is remembered
    #: What processes that share a graph have agreed to plan by; graphs are not shared without.
    agreed: Constants | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out tensors that a copy will not meet."""
        return {"mode": self.mode, "steps": self.steps, "agreed": self.agreed}

    def is_constant(self, value: Tensor) -> bool:
        """Tell whether the tensor is one of the constant features."""
        return any(is_stamped(value, given) for given in (*self.constants, *self.moved))


@dataclass
class Planned:
    """A plan with its program; None where the layer's own composition is as good."""

    plan: Plan | None
    program: Program | None


#: Number of each graph, never used again.
_NUMBERS: Any = WeakIdKeyDictionary()
_COUNT = count()
#: Seconds of trees by graph, sizes, dtype and whether it trains.
_REMEMBERED: dict[Any, dict[Tree, float]] = {}


def number_of(graph: Graph | Shared) -> int:
    """Give the graph's number, by which plans know it."""
    found: int | None = _NUMBERS.get(graph)
    if found is None:
        found = _NUMBERS[graph] = next(_COUNT)
    return found


@dataclass
class Composition:
    """An expression with a plan for each kind of call."""

    expression: Expression
    default: str  #: the layer's own composition, if it is one of the trees
    settings: Settings
    narrowing: str = ""  #: the same where the layer maps features before it aggregates them
    #: Both, of a graph that processes share: where it maps features first, and where it does not.
    over_processes: tuple[str, str] = ("", "")
    plans: dict[Any, Planned] = field(default_factory=dict)
    chosen: dict[Any, Plan] = field(default_factory=dict)  #: by sizes to the next power of two

    def planned(
        self,
        values: Mapping[str, Any],
        functions: Mapping[str, Any],
        code: Code,
        constants: Collection[str] = (),
    ) -> Planned:
        """Give the plan for such values, made at the first call."""
        key = (
            *ways(_first(values)),
            *(_kind(value, name in constants) for name, value in values.items()),
        )
        found = self.plans.pop(key, None)
        if found is None:
            if capturing(_first(values)):
                return Planned(None, None)  # no time to plan, which synchronises
            with torch.random.fork_rng(_cuda(values)):
                plan = self._plan(values, functions, code, constants)
            tree = plan.chosen.tree
            found = Planned(plan, None if tree == plan.own else Program(tree))
            while len(self.plans) >= MAX_PLANS:
                self.plans.pop(next(iter(self.plans), None), None)
        self.plans[key] = found  # the last used is the last to go
        return found

    def _plan(
        self,
        values: Mapping[str, Any],
        functions: Mapping[str, Any],
        code: Code,
        constants: Collection[str],
    ) -> Plan:
        """Plan, or choose as for a graph of about that size: samples come by the thousand."""
        leaves = {leaf.name: leaf for leaf in leaves_of(self.expression)}
        bound = {
            name: bound_leaf(leaf, values[name], name in constants) for name, leaf in leaves.items()
        }
        sizes, like, away = sizes_of(leaves, values), _first(values), shared_of(values)
        training = torch.is_grad_enabled() and any(leaf.grad for leaf in bound.values())
        wide = {size for leaf in bound.values() for size in (leaf.rows, leaf.cols) if leaf.entries}
        wide |= {"n", "nnz", "halo", "own", *(leaf.entries for leaf in bound.values())}
        about = tuple(1 << n.bit_length() if name in wide else n for name, n in sizes.items())
        rounded = ways(like)[1]
        travelling = None if away is None else away.bytes_between(like)
        where = like.dtype, like.device, travelling
        key = (training, rounded, about, *where, *bound.values())
        found = self.chosen.get(key)
        if found is None or self.settings.timing:
            expression = rebuilt(self.expression, bound)
            found = plan(
                expression if away is None else over_processes(expression),
                sizes,
                self.settings.agreed or constants_of(str(like.device)),
                itemsize=like.itemsize,
                training=training,
                runs=self.settings.steps,
                rounded=rounded,
                travelling=travelling,
                orders=(sizes,),
                own=partial(_is_own, self._own(sizes, bound, values)),
            )
            if away is None:  # processes would time apart, and choose apart
                found = self._measured(found, values, functions, code)
            self.chosen[key] = found
        return found

    def _own(
        self, sizes: Mapping[str, int], leaves: Mapping[str, Leaf], values: Mapping[str, Any]
    ) -> str:
        """Give the composition that the layer has by itself for these widths."""
        away = shared_of(values)
        if away is not None:
            return self.over_processes[not away.maps_first(values["H"], sizes["out"])]
        if self.narrowing and maps_first(sizes["in"], sizes["out"], gradient=leaves["H"].grad):
            return self.narrowing
        return self.default

    def _measured(
        self,
        found: Plan,
        values: Mapping[str, Any],
        functions: Mapping[str, Any],
        code: Code,
    ) -> Plan:
        """Time those too close to decide, or all promoted, unless they were timed before."""
        auto, like = self.settings.mode == "auto", _first(values)
        timed = [c.tree for c in (found.close if auto else found.promoted)]
        if self.settings.mode == "model" or len(timed) < 2:
            return found
        graphs = tuple(_fingerprint(v) for v in values.values() if isinstance(v, Graph))
        sizes = tuple(found.sizes.items())
        kind = like.dtype, like.device, found.training, ways(like)[1], tf32_is_allowed()
        key = found.expression, graphs, sizes, *kind, code.name, tuple(timed)
        seconds = _REMEMBERED.get(key, {})
        if self.settings.timing and (not seconds or not auto):
            apart = {name: _apart(value) for name, value in values.items()}
            runs = {
                tree: partial(code.own, apart)
                if tree == found.own
                else partial(_whole, Program(tree), code.finish, apart, functions)
                for tree in timed
            }
            seconds = _timed(runs, like, MAX_ITERATIONS if auto else None)
            while len(_REMEMBERED) >= MAX_REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)), None)
            _REMEMBERED[key] = seconds
        return found.with_measured(seconds)


def _is_own(own: str, tree: Tree) -> bool:
    """Tell whether the layer computes the tree by itself, with nothing to keep of it."""
    return bare(tree) == own and not any(step.constant for step in steps(tree))


def _whole(
    program: Program,
    finish: Callable[[Any], Any],
    values: Mapping[str, Any],
    functions: Mapping[str, Any],
) -> Any:
    return finish(program(values, functions))


def _timed(
    runs: Mapping[Tree, Callable[[], Any]], like: Tensor, iterations: int | None
) -> dict[Tree, float]:
    """Time each twice in turn, as many as fit into so many iterations, and give the faster run."""
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
    """Time a run, and the gradients of what it was given."""
    return times_of(run, like)[1]


def times_of(run: Callable[[], Any], like: Tensor) -> tuple[float, float]:
    """Time the same on the host alone, and until the device is done."""
    cuda = like.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(like.device)  # synchronize!
    start = time.perf_counter()
    total = sum(y.sum() for y in tree_leaves(run()) if isinstance(y, Tensor) and y.requires_grad)
    if isinstance(total, Tensor):
        torch.autograd.grad(total, _sources(total))
    host = time.perf_counter() - start
    if cuda:
        torch.cuda.synchronize(like.device)  # synchronize!
    return host, time.perf_counter() - start


def _sources(y: Tensor) -> list[Tensor]:
    """Give the tensors at which the graph of autograd begins."""
    found, seen, open_ = [], set(), [y.grad_fn]
    while open_:
        node: Any = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        open_ += [following for following, _ in node.next_functions]
    return found


def _apart(value: Any) -> Any:
    """Give the same numbers without their history, so that timing stays here."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _first(values: Mapping[str, Any]) -> Tensor:
    return next(value for value in values.values() if isinstance(value, Tensor))


def ways(like: Tensor) -> tuple[bool, bool]:
    """Tell whether gradients are wanted, and whether products may round float32 features."""
    rounds = like.is_cuda and like.dtype is torch.float32 and bf16_is_allowed()
    return torch.is_grad_enabled(), rounds


def capturing(like: Tensor) -> bool:
    """Tell whether a CUDA graph is captured, whose memory is its own."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def _cuda(values: Mapping[str, Any]) -> list[torch.device]:
    return [device for device in (_first(values).device,) if device.type == "cuda"]


def _kind(value: Any, constant: bool) -> Any:
    if isinstance(value, Graph | Shared):
        return number_of(value)
    return value.shape, value.dtype, value.device, value.requires_grad, constant


def _fingerprint(graph: Graph) -> tuple[int, ...]:
    """Give numbers that differ for graphs of another structure, nearly always."""
    tensors = graph_tensors(graph)
    rows, columns = tensors.rows.indptr, tensors.rows.indices
    columns = columns[:: max(1, tensors.nnz // 65536)].long()
    places = torch.arange(len(columns), device=columns.device) % 8191
    sums = rows.sum(dtype=torch.int64), (columns * places).sum()
    return (*graph.shape, graph.nnz, *(int(found) for found in sums))  # synchronize!
