"""``optimize``: make a model run the fastest compositions of its layers on a graph."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..autograd.engine.precision import bf16_is_allowed
from ..autograd.tensors.edge_index import as_graph
from ..autograd.tensors.prepare import graph_tensors
from ..autograd.tensors.shared import Shared, n_sources, shared
from ..errors import DtypeError, ShapeError, UnsupportedError
from ..graph.graph import Graph
from ..plan.calibration import constants_of
from ..plan.pricing import Constants
from .composition import Settings, stamp
from .decisions import Ordering, Trial, decide
from .launching import Launching
from .launching import decide as decide_capture
from .layers import ADAPTERS, PlannedLayer, taken, type_name
from .model_plan import ModelPlan, planned_in, weakly
from .state import LAYERS, is_leaf
from .tiling import Tiling, TimedStep
from .tiling import decide as decide_tiles
from .trace import TracedForward, evaluating, running, takes

MODES = ("auto", "model", "measure")


def optimize(
    model: Module,
    graph: Any,
    *,
    x: Any = None,
    training: bool | None = None,
    steps: int | None = None,
    mode: str = "auto",
) -> ModelPlan:
    """Make a model run the fastest compositions of its layers, in place.

    A layer is a product of matrices; the order of its products decides how much it computes.  Each
    order is priced by the sizes of the graph and of the layer, and the constants of the device
    (``sparsefmt calibrate``).  The model keeps its parameters, buffers and hooks.

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
        ``x`` the vertices of the graph are put into another order, by community, where that pays
        within so many steps: the model moves rows there and back, and takes and gives the user's.
        Then tiles are built of the graphs that are multiplied with, ``prepare(graph, tile=...)``,
        where products may round, and kept if they pay; and the plan says whether a step would be
        faster captured (``sparsefmt.nn.capture``).
    mode : "auto", "model" or "measure"
        By predictions alone ("model"), by timing all that are not beaten ("measure"), or by
        predictions and, where these are within a quarter of the best and a run takes 2 ms or more,
        a clock: of the layer's own code and the best one, or of two that differ ("auto").  Where no
        clock decides, the layer's own code stays if its prediction is within that quarter.

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
        If there is no such mode.
    RankError
        If what is asked for differs between the ranks of a DistGraph, or is refused on some.

    Notes
    -----
    What a call gets is compared with what was planned for: another graph, width, dtype or device is
    planned anew, and a constant that another tensor replaces, or that is written to in place, is
    computed again.  Options that the expression does not have (edge weights, samples, MaxK),
    autocast and ``torch.compile`` run the layer's own composition, and so does the capture of a
    CUDA graph of what was not planned before.  Another order of the vertices holds in all of these
    but ``torch.compile``, and not in copies.  On a DistGraph layers are planned, by predictions in
    every mode and by the constants of the first rank; what the model computes between them, the
    order of vertices, tiles and captures stay.  What is timed runs the hooks of the model
    and of its parameters.  An error leaves the model as it was.
    """
    away = shared(graph)
    if away is not None and away.whole is not None:
        graph, away = away.whole, None
    asked = partial(_asked, model, graph, x, training, steps, mode)
    agreed = None if away is None else away.agreed(lambda: _alike(asked()), partial(_costs, away))
    given, training = (one := asked()).given, one.training
    stay = [one for one in given if _is_features(one) and not one.requires_grad]
    stamps = tuple(map(stamp, stay))
    settings = Settings(mode, steps, stamps, timing=True, agreed=agreed)
    traced = TracedForward(model, settings)
    patched = "forward" in vars(model) and not planned_in(model)[:1] == [model]
    if away is None and not (is_leaf(model) or patched or traced.trace()):
        return ModelPlan(model)
    before = {module: vars(module).get("forward") for module in model.modules()}
    made = None
    try:
        for module in planned_in(model):  # by an earlier call
            del module.forward
        many = bool(steps and given) and away is None
        made = _planned(Trial(traced, given, training), graph, many=many)
        made = made if away is None else replace(made, given=(), **_AS_THEY_ARE)
    finally:
        settings.timing = False
        if made is None:
            _put_back(before)
    return made


#: What is left as it is where processes share the graph: each of them would decide for itself.
_AS_THEY_ARE: dict[str, Any] = {
    "ordering": Ordering("stays, since processes share the graph: reorder it before it is cut"),
    "tiling": Tiling("none, since processes share the graph"),
    "launching": Launching("not decided, since processes share the graph"),
}


class _Asked(NamedTuple):
    """What a plan is asked for: the values that the model is called with, and options."""

    model: Module
    given: tuple[Any, ...]
    training: bool
    steps: int | None
    mode: str


def _asked(
    model: Any, graph: Any, x: Any, training: bool | None, steps: int | None, mode: str
) -> _Asked:
    """Check what is asked for."""
    _check(model, graph, mode)
    _check_options(training, steps)
    given = _given(model, graph, x)
    return _Asked(model, given, model.training if training is None else training, steps, mode)


def _alike(asked: _Asked) -> dict[str, Any]:
    """Give what decides for a plan, to be the same on all processes that share a graph."""
    kinds = [
        (tuple(one.shape[1:]), str(one.dtype), one.requires_grad, one.is_inference())
        if isinstance(one, Tensor)
        else type(one).__name__
        for one in asked.given
    ]
    options = {"training": asked.training, "steps": asked.steps, "mode": asked.mode}
    layers = {
        f"model.{name}": (type_name(module), module.training)
        for name, module in asked.model.named_modules()
        if name
    }
    weights = {
        f"model.{name}": (tuple(one.shape), str(one.dtype), one.requires_grad)
        for name, one in asked.model.named_parameters()
    }
    kind = {"model": type_name(asked.model)} | layers | weights
    return {"x": kinds, **options, **kind, "bfloat16 in float32 products": bf16_is_allowed()}


def _costs(away: Any) -> Constants:
    """Give the constants of the device of this process."""
    return constants_of(str(graph_tensors(away.local).device))


def _put_back(forwards: Mapping[Module, Any]) -> None:
    """Give modules the forward that they had of their own, or none."""
    for module, forward in forwards.items():
        vars(module).pop("forward", None)
        if forward is not None:
            module.forward = forward


def _planned(trial: Trial, graph: Any, *, many: bool) -> ModelPlan:
    """Plan each layer, and each product between layers."""
    traced, given, training = trial.traced, trial.given, trial.training
    model, settings = traced.model, traced.settings
    found = {
        name: PlannedLayer(module, ADAPTERS[type_name(module)], settings)
        for name, module in model.named_modules()
        if type_name(module) in ADAPTERS and "forward" not in vars(module)  # of the user's
    }
    seen = _inputs(model, found, given) if given else {}
    with running(model, training=training):
        for name, planned in found.items():
            _plan(planned, *seen.get(name, (None, graph)), training=training)
    for planned in found.values():
        planned.layer.forward = planned
    if traced.compositions:
        model.forward = traced
        if given:
            with evaluating(model), torch.set_grad_enabled(training):
                model(*given)
    settings.timing = False
    layers = {name: planned.composition for name, planned in found.items()}
    compositions = {**layers, **traced.compositions}
    made = ModelPlan(model, compositions, training=training, given=weakly(given))
    return _for_many_steps(trial, made, found, seen, graph) if many else made


def _for_many_steps(
    trial: Trial,
    made: ModelPlan,
    layers: Mapping[str, PlannedLayer],
    seen: Mapping[str, Any],
    graph: Any,
) -> ModelPlan:
    """Decide what pays over many steps: the order of the vertices, tiles in it, a capture."""
    traced, model, plans = trial.traced, made.model, list(made.layers.values())
    if is_leaf(model):
        ordering = Ordering("stays, since the model is one layer")
    elif "forward" in vars(model) and traced.latest.function is None:
        ordering = Ordering("stays, since the model has a forward of its own")
    else:
        ordering = decide(trial, plans, graph)
    if ordering.chosen:
        model.forward = traced
    step = TimedStep(
        run=partial(model, *trial.given),
        like=next((one for one in trial.given if _is_features(one)), None),
        graphs=_multiplied(trial, layers, seen, traced.order.graph if traced.order else graph),
        seconds=sum(plan.chosen.predicted for plan in plans),
        mode=partial(running, model, training=trial.training),
    )
    tiling = decide_tiles(step, traced.settings.steps or 1)
    return replace(made, ordering=ordering, tiling=tiling, launching=decide_capture(step))


def _is_features(value: object) -> bool:
    """Tell whether a value that a model is called with is a tensor of features."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _check(model: object, graph: object, mode: object) -> None:
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


def _check_options(training: object, steps: object) -> None:
    if training is not None and not isinstance(training, bool):
        raise DtypeError(
            f"training is {training!r}: give True, False, or None for what the model is set to."
        )
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise DtypeError(f"steps is {steps!r}: give an integer, 1 or more, or None.")
    if steps < 1:
        raise ShapeError(f"steps is {steps}: give an integer, 1 or more, or None.")


def _given(model: Module, graph: Graph | Tensor, x: object) -> tuple[Any, ...]:
    """Give what the model is called with."""
    if x is not None and not isinstance(x, Tensor | tuple | list):
        mend = "torch.from_numpy(x)" if hasattr(x, "__array_interface__") else "a torch.Tensor"
        raise DtypeError(
            f"x is a {type(x).__name__}: give {mend}, or a tuple of what the model is called with."
        )
    if isinstance(x, tuple | list):
        _check_call(model, tuple(x))
        return tuple(x)
    of_pyg = [n for n, m in model.named_modules() if type(m).__module__.startswith(LAYERS[0])]
    if isinstance(graph, Graph | Shared) and of_pyg:
        raise DtypeError(
            f"graph is a {type(graph).__name__}, but {of_pyg[0] or 'model'} is a layer of PyG: "
            "give its edge_index, or in x a tuple of what the model is called with."
        )
    if x is None:
        return ()
    any_number = any(p.kind is p.VAR_POSITIONAL for p in _signature(model).parameters.values())
    return (x, graph) if any_number or len(takes(model)) > 1 else (x,)


def _signature(model: Module) -> inspect.Signature:
    return inspect.signature(type(model).forward)


def _check_call(model: Module, given: tuple[Any, ...]) -> None:
    try:
        _signature(model).bind(model, *given)
    except TypeError as error:
        raise ShapeError(
            f"x holds {len(given)} values, which {type(model).__name__}.forward does not take: "
            f"{error}."
        ) from None


def _inputs(model: Module, found: Mapping[str, PlannedLayer], given: Any) -> dict[str, Any]:
    """Call the model, and give what each layer gets first."""
    seen: dict[str, Any] = {}

    def keep(name: str, layer: Module, args: Any, kwargs: Any) -> None:
        seen.setdefault(name, taken(args, kwargs)[:2])

    hooks = [
        planned.layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
        for name, planned in found.items()
    ]
    try:
        with evaluating(model):
            model(*given)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: args for name, args in seen.items() if len(args) == 2}


def _multiplied(
    trial: Trial, layers: Mapping[str, PlannedLayer], seen: Mapping[str, Any], given: Any
) -> list[Graph]:
    """Give the graphs that the model multiplies with, in the order of vertices of the given one."""
    graphs: dict[int, Graph] = {}
    if trial.traced.compositions and isinstance(given, Graph):
        graphs[id(given)] = given
    for name, layer in layers.items():
        plans = list(layer.composition.plans.values())
        x, _ = seen.get(name, (None, None))
        held = None if x is None else layer.graph_of(x, given)
        if held is None or not plans:
            continue
        values = (layer.values(x, held, given) if plans[-1].program else None) or {"A": held}
        graphs |= {id(one): one for one in values.values() if isinstance(one, Graph)}
    return list(graphs.values())


def _plan(layer: PlannedLayer, x: Tensor | None, graph: Any, *, training: bool) -> None:
    """Plan a layer for these features, or for some as wide as it takes."""
    if not layer.adapter.suits(layer.layer) or isinstance(x, tuple | list):  # of two ends
        return
    if x is None:
        weight = next(iter(layer.adapter.parameters(layer.layer).values()))
        n = n_sources(as_graph(graph, None))
        with torch.random.fork_rng([d for d in [weight.device] if d.type == "cuda"]):
            x = torch.randn(n, weight.shape[0], dtype=weight.dtype, device=weight.device)
    if not layer.composition.settings.is_constant(x):
        x = x.detach().requires_grad_(training)
    made = layer.graph_of(x, graph)
    values = None if made is None else layer.values(x, made, graph)
    if made is not None and values is not None:
        layer.planned(values, layer.functions(made), graph)
