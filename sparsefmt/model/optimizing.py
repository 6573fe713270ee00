"""``optimize``: the fastest compositions of a model's layers on a graph, and its plan.

A composition is an order of the products in a layer's expression.  For each kind of call a ``Plan``
chooses one.  A layer's ``forward`` calls its ``LayerPlan``, if it has one, to run what is chosen.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from ..autograd import as_graph
from ..autograd.engine.precision import bf16_is_allowed
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..autograd.tensors.shared import Shared, n_sources, shared
from ..errors import DtypeError, ShapeError, SparseFmtError, UnsupportedError
from ..graph.graph import Graph
from ..ops.engine.explain import Explanation, explaining
from ..plan.calibration import constants_of
from ..plan.planner import Plan
from ..plan.rules import text_of
from .composition import Composition, Settings
from .decisions import (
    OVER_PROCESSES,
    Decision,
    TimedStep,
    decide_capture,
    decide_order,
    decide_tiles,
)
from .layers import ADAPTERS, LayerPlan, against, type_name
from .program import stamp
from .pyg_layers import layer_of_pyg
from .state import Randomness, Snapshot

MODES = ("auto", "model", "measure")
#: What a model may raise that no longer runs as it did when it was planned.
_FAILURES = (
    *(SparseFmtError, ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)
#: The attribute of a layer for which its ``forward`` looks.
PLAN = "_plan"


@dataclass(frozen=True, repr=False)
class ModelPlan:
    """The plans of a model's layers; ``print`` it, or ``explain()`` each composition."""

    model: Module
    compositions: Mapping[str, Composition] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)  #: why other layers run as they did
    ordering: Decision | None = None  #: whether to reorder vertices, if ``steps`` were asked for
    tiling: Decision | None = None  #: likewise, whether to build tiles
    launching: Decision | None = None  #: likewise, whether to capture the step
    training: bool = False  #: whether it was made for training
    inputs: tuple[Any, ...] = ()  #: of the model; tensors and graphs by weak references

    @property
    def layers(self) -> dict[str, Plan]:
        """Return the plan of each planned layer that was looked up last, by its name.

        That for training, or for inference, as was asked for, if there is one.
        """
        result = {}
        for name, composition in self.compositions.items():
            planned = composition.plans.copy().values()  # calls reorder them
            plans = [made.plan for made in planned if made.plan]
            asked = [plan for plan in plans if plan.training == self.training]
            if plans:
                result[name] = (asked or plans)[-1]
        return result

    @property
    def _decisions(self) -> list[Decision]:
        """Return the decisions that were made, on order, tiles and capture."""
        return [made for made in (self.ordering, self.tiling, self.launching) if made]

    def explain(self) -> str:
        """Write every composition of every layer, its costs, what was chosen, and what was left.

        Runs the model once for the kernels of its products, if ``x`` still exists.
        """
        layers = self.layers
        parts = [f"{name or 'model'}: {plan.explain()}" for name, plan in layers.items()]
        if not layers:
            none = "" if self.left else ", since no layer of it can be planned"
            parts = [f"no layer was planned: the model runs as it did{none}"]
        left = [pair for pair in self.left.items() if pair[0] not in layers]
        parts += [f"{name or 'model'}: runs as it did, since {why}" for name, why in left]
        if not layers:
            return "\n".join(parts)
        parts += [decision.explain() for decision in self._decisions]
        try:
            kernels = self.kernels()
        except _FAILURES as error:
            parts.append(f"kernels: the model does not run as it did when it was planned ({error})")
        else:
            parts += ["\n".join(["kernels of a forward:", *map(str, kernels)])] if kernels else []
        return "\n\n".join(parts)

    def __str__(self) -> str:
        lines = [f"{name or 'model'}: {text_of(p.chosen.tree)}" for name, p in self.layers.items()]
        return "\n".join(lines + [f"{made.subject}: {made.reason}" for made in self._decisions])

    def __repr__(self) -> str:
        return f"<plan of {type(self.model).__name__}: {str(self) or 'nothing'}>"

    def kernels(self) -> tuple[Explanation, ...]:
        """Run the model once, and explain which kernels the products of its forward ran.

        Empty without ``x``, once what the model was called with is gone, or after ``restore``.
        """
        inputs = [value() if isinstance(value, ref) else value for value in self.inputs]
        gone = any(a is None is not b for a, b in zip(inputs, self.inputs, strict=True))
        if not inputs or gone or not _plans_in(self.model):
            return ()
        with running(self.model, training=self.training), explaining() as explanations:
            self.model(*inputs)
        return tuple({str(explanation): explanation for explanation in explanations}.values())

    def restore(self) -> None:
        """Remove these plans, not later ones, and drop the tiles that were built for them."""
        mine = {id(composition.settings) for composition in self.compositions.values()}
        for module, plan in _plans_in(self.model).items():
            if id(plan.composition.settings) in mine:
                delattr(module, PLAN)
        for decision in self._decisions:
            decision.undo()


def optimize(
    model: Module,
    graph: Graph | Shared | Tensor,
    *,
    x: Tensor | tuple[Any, ...] | None = None,
    training: bool | None = None,
    steps: int | None = None,
    mode: str = "auto",
) -> ModelPlan:
    """Choose the fastest compositions for the layers of a model, in place.

    A layer is a product of matrices; the order of its products decides how much it computes.  Each
    order is priced by the sizes of the graph and of the layer, and the constants of the device
    (``sparsefmt calibrate``).  The model keeps its parameters, buffers, hooks and forward.

    Parameters
    ----------
    model : torch.nn.Module
    graph : Graph, or PyG's edge_index or adj_t (torch's sparse tensor) for a model that takes one
        Or a DistGraph, on all ranks at once: what ranks exchange is priced too, and all of them
        choose alike.
    x : Tensor, or a tuple of what the model is called with, optional
        Features that stay the same: what the first layers make of them and the graph alone is
        computed once.  A tensor is handed to the model with the graph, if it takes one.
    training : bool, optional
        Whether to plan for training, with gradients; by default as the model is set.
    steps : int, optional
        How often the model will run, which shares the cost of what is computed once.  With it and
        ``x`` tiles are built of the graphs that are multiplied with, ``prepare(graph, tile=...)``,
        where products may round, and kept if they pay; and the plan says whether another order of
        the graph's vertices would pay (``Graph.reordered``), and whether a step would be faster
        captured (``sparsefmt.nn.capture``).
    mode : "auto", "model" or "measure"
        "model" chooses by predicted times alone.  "measure" times all compositions but those that
        another beats by less work in the same steps.  "auto" times those predicted within a quarter
        of the best, the layer's own code among them, where a run takes 2 ms or more; without that
        code only those whose predictions differ.  If nothing is timed, the layer's own code stays
        if it is predicted within that quarter.

    Returns
    -------
    ModelPlan
        ``explain()`` says what was tried and chosen, ``restore()`` undoes it.

    Raises
    ------
    DtypeError
        If ``model`` is no Module, ``graph`` neither a Graph nor an edge_index of integers, or not
        the one that layers of PyG take, or ``x``, ``training`` or ``steps`` of another type.
    ShapeError
        If the shape of an edge_index is not (2, edges), ``x`` holds more or fewer values than
        the model takes, or ``steps`` is below 1.
    UnsupportedError
        If there is no such mode, or training is planned with an ``x`` of inference mode.
    RankError
        If what is asked for differs between the ranks of a DistGraph, or is refused on some.

    Notes
    -----
    Planned are layers of exactly this package's classes.  A call is compared with what was planned
    for: another graph, width, dtype or device is planned anew, and a constant that another tensor
    replaces, or that is written to in place, is computed again.  A layer whose options or linear
    maps have changed, or whose maps are no Linear without hooks, runs its own code, and so do calls
    with edge weights, sampled neighbours or MaxK, under autocast, transforms and ``torch.compile``,
    and in the capture of a CUDA graph if not planned before.  On a DistGraph layers are planned, by
    predictions in every mode and by the constants of the first rank; the order of vertices, tiles
    and captures are not decided.  The model runs with ``x``, once or as often as it is timed, with
    its hooks; what it writes to itself, but for ``__slots__``, and draws is put back.  An error
    leaves the model as it was.

    Torch counts no version of what NumPy, DLPack, ``apply_``, ``map_`` or a collective writes, nor
    of writes in place through ``x.data`` or, on a GPU, a GINConv's ``eps.data``: not seen.
    """
    dist = shared(graph)
    if dist is not None and dist.complete is not None:
        graph, dist = dist.complete, None
    check = partial(_checked, model, graph, x, training, steps, mode)
    agreed = None  # constants of the first rank's device, by which all ranks plan
    if dist is not None:
        device = str(tensors_of(dist.local).device)
        facts = lambda: _facts(model, check(), training, steps, mode)  # noqa: E731
        agreed = dist.agreed(facts, lambda: constants_of(device))
    inputs = check()
    training = model.training if training is None else training
    features = [value for value in inputs if _is_features(value)]
    strided = [value for value in features if value.layout is torch.strided]  # others never are
    constants = tuple(stamp(value) for value in strided if not value.requires_grad)
    settings = Settings(mode, steps, constants, timing=True, agreed=agreed)
    before, result = _plans_in(model), None
    try:
        for module in before:
            delattr(module, PLAN)
        result = _planned(model, graph, inputs, settings, training=training)
    finally:
        settings.timing = False
        if result is None:
            for module in _plans_in(model):
                delattr(module, PLAN)
            for module, plan in before.items():
                setattr(module, PLAN, plan)
    return result


def _planned(
    model: Module, graph: GraphLike, inputs: tuple[Any, ...], settings: Settings, *, training: bool
) -> ModelPlan:
    """Choose compositions for the layers of a model, and what pays over many steps."""
    dist, steps = shared(graph), settings.steps
    plans, graphs = _layers(model, graph, inputs, settings, training=training)
    compositions = {name: plan.composition for name, plan in plans.items()}
    result = ModelPlan(model, compositions, training=training)
    unplanned = [pair for pair in model.named_modules() if pair[0] not in result.layers]
    result = replace(
        result, left={name: why for name, module in unplanned if (why := _why_left(module))}
    )
    if dist is not None:
        return replace(result, **OVER_PROCESSES)
    # A list or an object may hold tensors, which the plan must not keep: then it keeps no inputs.
    if all(isinstance(value, Tensor | Graph | int | float | str | None) for value in inputs):
        weak = (ref(value) if isinstance(value, Tensor | Graph) else value for value in inputs)
        result = replace(result, inputs=tuple(weak))
    if not (steps and inputs):
        return result
    step = TimedStep(
        run=partial(model, *inputs),
        like=next((value for value in inputs if _is_features(value)), None),
        graphs=graphs,
        plans=[*result.layers.values()],
        mode=partial(running, model, training=training),
        steps=steps,
    )
    structure = graph if isinstance(graph, Graph) else as_graph(graph, step.like)
    return replace(
        result,
        ordering=decide_order(step, structure if isinstance(structure, Graph) else None),
        tiling=decide_tiles(step),
        launching=decide_capture(step),
    )


# Layers


def _layers(
    model: Module,
    graph: GraphLike,
    inputs: tuple[Any, ...],
    settings: Settings,
    *,
    training: bool,
) -> tuple[dict[str, LayerPlan], list[Graph]]:
    """Choose a plan for each layer; return the plans, and the graphs in their products."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if type_name(type(module)) in ADAPTERS and "forward" not in vars(module)
    }
    plans = {name: LayerPlan(layer, settings) for name, layer in layers.items()}
    graphs = dict[int, Graph]()
    with running(model, training=training):
        calls = _calls(model, layers, inputs) if inputs else {}
        for name, plan in plans.items():
            features, edge_index = calls.get(name, (None, graph))
            made = _plan(plan, layers[name], features, edge_index, training=training)
            graphs |= {id(graph): graph for graph in made}
    for name, plan in plans.items():
        setattr(layers[name], PLAN, plan)
    settings.timing = False  # from here on predictions and remembered times decide
    return plans, list(graphs.values())


def _calls(
    model: Module, layers: Mapping[str, Module], inputs: tuple[Any, ...]
) -> dict[str, tuple[Any, Any]]:
    """Run the model, and return the features and the graph that each layer gets first."""
    calls: dict[str, tuple[Any, Any]] = {}

    def note(name: str, layer: Module, features: object, edge_index: object) -> None:
        calls.setdefault(name, (features, edge_index))

    try:
        for name, layer in layers.items():
            setattr(layer, PLAN, partial(note, name))
        model(*inputs)
    except RuntimeError as error:
        if not torch.is_grad_enabled():
            error.add_note("optimize ran the model without gradients: training=True asks for them.")
        raise
    finally:
        for layer in layers.values():
            vars(layer).pop(PLAN, None)
    return calls


def _plan(
    plan: LayerPlan, layer: Module, x: Any, edge_index: GraphLike, *, training: bool
) -> list[Graph]:
    """Choose for these features, or for random ones of the layer's width; return its graphs."""
    if against(layer):
        return []
    if x is None:
        weight = next(iter(plan.adapter.maps(layer).values())).weight
        n = n_sources(as_graph(edge_index, None))
        x = torch.randn(n, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if isinstance(x, Tensor) and x.is_floating_point():
        if not plan.composition.settings.is_constant(x):
            x = x.detach().requires_grad_(training)
    prepared = plan.prepared(layer, x, edge_index)
    if prepared is None:
        return []
    planned, values, _ = prepared
    graphs = values.values() if planned.program else [plan.adapter.graph(layer, x, edge_index)]
    return [graph for graph in graphs if isinstance(graph, Graph)]


def _why_left(module: Module) -> str:
    """Return why a layer that is not planned runs as it did, or "" of other modules."""
    if layer_of_pyg(module) is not None:
        return "it is PyG's: exchange it by sparsefmt.nn.replace_layers(model) before"
    kind, names = type(module), [type_name(base) for base in type(module).__mro__]
    if names[0] in ADAPTERS:
        reason = "its forward was set by hand" if "forward" in vars(module) else against(module)
        return reason or "it did not ask for a plan: it goes over samples, or was not called"
    if any(name in ADAPTERS for name in names):
        return f"{kind.__name__} is a class of your own"
    if names[0].startswith("sparsefmt.nn.") and "sparsefmt.nn._passing.Passing" in names:
        return f"{kind.__name__} has one composition alone"
    return ""


def _plans_in(model: Module) -> dict[Module, LayerPlan]:
    """Return the layers of a model that have a plan, and the plans."""
    pairs = ((module, vars(module).get(PLAN)) for module in model.modules())
    return {module: plan for module, plan in pairs if isinstance(plan, LayerPlan)}


@contextmanager
def running(model: Module, *, training: bool) -> Iterator[None]:
    """Put the model in training mode, with gradients, or in evaluation; undo what runs change.

    A model that is in that mode is not touched, nor are parts of it that are in the other one.
    """
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.is_cuda}
    snapshot = Snapshot(model)
    randomness = Randomness(torch.cuda.default_generators[device.index] for device in devices)
    try:
        with torch.set_grad_enabled(training):
            if model.training != training:
                model.train(training)
            yield
    finally:
        snapshot.restore()
        randomness.restore()
        for module, mode in modes.items():
            module.training = mode


# What is asked for


def _checked(
    model: object, graph: object, x: object, training: object, steps: object, mode: object
) -> tuple[Any, ...]:
    """Check the arguments of ``optimize``; return the inputs that the model is called with."""
    if not isinstance(model, Module):
        raise DtypeError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    if not isinstance(graph, Graph | Shared | Tensor):
        raise DtypeError(
            f"graph is a {type(graph).__name__}: give a sparsefmt.Graph, or PyG's edge_index."
        )
    if isinstance(graph, Tensor) and graph.layout is torch.strided:
        if graph.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"graph has dtype {graph.dtype}: an edge_index holds vertices' numbers, as of "
                "graph.long()."
            )
        if graph.dim() != 2 or graph.shape[0] != 2:
            raise ShapeError(
                f"graph has shape {tuple(graph.shape)}: an edge_index has shape (2, edges), of "
                "sources and targets."
            )
    if mode not in MODES:
        raise UnsupportedError(f"mode is {mode!r}: give one of {', '.join(map(repr, MODES))}.")
    if training is not None and not isinstance(training, bool):
        raise DtypeError(
            f"training is {training!r}: give True, False, or None for what the model is set to."
        )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise DtypeError(f"steps is {steps!r}: give an integer, 1 or more, or None.")
    if steps is not None and steps < 1:
        raise ShapeError(f"steps is {steps}: give an integer, 1 or more, or None.")
    inputs = _inputs(model, graph, x)
    of_inference = any(isinstance(value, Tensor) and value.is_inference() for value in inputs)
    if of_inference and (model.training if training is None else training):
        raise UnsupportedError(
            "x was made in inference mode, which training cannot use: give x.clone(), made outside "
            "of it, or training=False."
        )
    return inputs


def _inputs(model: Module, graph: object, x: object) -> tuple[Any, ...]:
    """Return the arguments that the model is called with."""
    signature = inspect.signature(type(model).forward)
    if x is not None and not isinstance(x, Tensor | tuple | list):
        mend = "torch.from_numpy(x)" if hasattr(x, "__array_interface__") else "a torch.Tensor"
        raise DtypeError(
            f"x is a {type(x).__name__}: give {mend}, or a tuple of what the model is called with."
        )
    if isinstance(x, tuple | list):
        try:
            signature.bind(model, *x)
        except TypeError as error:
            raise ShapeError(
                f"x holds {len(x)} values, which {type(model).__name__}.forward does not take: "
                f"{error}."
            ) from None
        return tuple(x)
    of_pyg = [name for name, module in model.named_modules() if layer_of_pyg(module) is not None]
    if isinstance(graph, Graph | Shared) and of_pyg:
        raise DtypeError(
            f"graph is a {type(graph).__name__}, but {of_pyg[0] or 'model'} is a layer of PyG: "
            "give its edge_index, or in x a tuple of what the model is called with."
        )
    if x is None:
        return ()
    _, *parameters = signature.parameters.values()
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return (x, graph) if any_number or len(required) > 1 else (x,)


def _facts(
    model: Module, inputs: tuple[Any, ...], training: bool | None, steps: int | None, mode: str
) -> dict[str, Any]:
    """Return the facts that a plan depends on, which processes that share a graph compare."""
    kinds = [
        (tuple(value.shape[1:]), str(value.dtype), value.requires_grad, value.is_inference())
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in inputs
    ]
    training = model.training if training is None else training
    facts = {"x": kinds, "training": training, "steps": steps, "mode": mode}
    facts["model"] = type_name(type(model))
    for name, module in model.named_modules():
        if name:
            facts[f"model.{name}"] = type_name(type(module)), module.training
    for name, p in model.named_parameters():
        facts[f"model.{name}"] = tuple(p.shape), str(p.dtype), p.requires_grad
    return facts | {"bfloat16 in float32 products": bf16_is_allowed()}


def _is_features(value: object) -> bool:
    """Return True if a value that a model is called with is a tensor of features."""
    return isinstance(value, Tensor) and value.is_floating_point()
