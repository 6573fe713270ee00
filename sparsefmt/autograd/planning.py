"""``optimize``: make a model run the fastest compositions of its layers on a graph."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import DtypeError, UnsupportedError
from ..graph import Graph
from ..plan.planner import Plan
from ..plan.rules import bare
from .adapters import ADAPTERS, PlannedLayer, type_name
from .composition import Composition, Settings, stamp
from .trace import TracedForward, is_leaf, takes

MODES = ("auto", "model", "measure")


@dataclass(frozen=True)
class ModelPlan:
    """The plans of a model's layers; ``print`` it, or ``explain()`` each composition."""

    model: Module
    compositions: Mapping[str, Composition] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, Plan]:
        """The latest plan of each layer, by its name, and of each product between layers."""
        found = {name: list(made.plans.values()) for name, made in self.compositions.items()}
        return {n: plans[-1].plan for n, plans in found.items() if plans and plans[-1].plan}

    def explain(self) -> str:
        """Write every composition of every layer, its costs, and what was chosen."""
        if not self.layers:
            return "no layer was planned: the model runs as it did"
        return "\n\n".join(f"{name or 'model'}: {p.explain()}" for name, p in self.layers.items())

    def __str__(self) -> str:
        return "\n".join(f"{name}: {bare(p.chosen.tree)}" for name, p in self.layers.items())

    def restore(self) -> None:
        """Make the model run as it did before."""
        for module in self.model.modules():
            if isinstance(vars(module).get("forward"), PlannedLayer | TracedForward):
                del module.forward


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
    graph : Graph, or PyG's edge_index for a model that takes one
    x : Tensor, or a tuple of what the model is called with, optional
        Features that stay the same: what the first layers make of them and the graph alone is
        computed once.  A tensor is handed to the model with the graph, if it takes one.
    training : bool, optional
        Whether to plan for training, with gradients; by default as the model is set.
    steps : int, optional
        How often the model will run, which shares the cost of what is computed once.
    mode : "auto", "model" or "measure"
        By predictions alone ("model"), by timing all that are not beaten ("measure"), or by
        predictions, timing the best two where these are within 1.5 of each other ("auto").

    Returns
    -------
    ModelPlan
        ``explain()`` says what was tried and chosen, ``restore()`` undoes it.

    Raises
    ------
    DtypeError
        If ``model`` is no Module, or ``graph`` neither a Graph nor a tensor.
    UnsupportedError
        If there is no such mode.

    Notes
    -----
    What a call gets is compared with what was planned for: another graph, width, dtype or device is
    planned anew, and a constant that another tensor replaces, or that is written to in place, is
    computed again.  Options that the expression does not have (edge weights, samples, MaxK),
    autocast, ``torch.compile`` and the capture of a CUDA graph run the layer's own composition.
    """
    _check(model, graph, mode)
    training = model.training if training is None else training
    given = () if x is None else x
    if isinstance(given, Tensor):
        given = (given, graph) if len(takes(model)) > 1 else (given,)
    stay = [one for one in given if isinstance(one, Tensor) and one.is_floating_point()]
    stamps = tuple(stamp(one) for one in stay if not one.requires_grad)
    settings = Settings(mode, steps, stamps, timing=True)
    traced = TracedForward(model, settings)
    if not (is_leaf(model) or traced.trace()):
        return ModelPlan(model)
    ModelPlan(model).restore()  # of an earlier call
    found = {
        name: PlannedLayer(module, ADAPTERS[type_name(module)], settings)
        for name, module in model.named_modules()
        if type_name(module) in ADAPTERS
    }
    seen = _inputs(model, found, given) if given else {}
    for name, planned in found.items():
        _plan(planned, *seen.get(name, (None, graph)), training=training)
        planned.layer.forward = planned
    if traced.compositions:
        model.forward = traced
        if given:
            with _evaluating(model), torch.set_grad_enabled(training):
                model(*given)
    settings.timing = False
    layers = {name: planned.composition for name, planned in found.items()}
    return ModelPlan(model, {**layers, **traced.compositions})


def _check(model: object, graph: object, mode: str) -> None:
    if not isinstance(model, Module):
        raise DtypeError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    if not isinstance(graph, Graph | Tensor):
        raise DtypeError(
            f"graph is a {type(graph).__name__}: give a sparsefmt.Graph, or PyG's edge_index."
        )
    if mode not in MODES:
        raise UnsupportedError(f"mode is {mode!r}: give one of {', '.join(map(repr, MODES))}.")


@contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    """Set the model to evaluation for a while, without a trace on generators and buffers."""
    modes = {module: module.training for module in model.modules()}
    try:
        used = {p.device for p in model.parameters() if p.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(list(used)):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _inputs(model: Module, found: Mapping[str, PlannedLayer], given: Any) -> dict[str, Any]:
    """Call the model, and give what each layer gets first."""
    seen: dict[str, Any] = {}
    hooks = [
        planned.layer.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, args[:2]) and None
        )
        for name, planned in found.items()
    ]
    try:
        with _evaluating(model):
            model(*given)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: args for name, args in seen.items() if len(args) == 2}


def _plan(layer: PlannedLayer, x: Tensor | None, graph: Any, *, training: bool) -> None:
    """Plan a layer for these features, or for some as wide as it takes."""
    if not layer.adapter.suits(layer.layer):
        return
    if x is None:
        weight = next(iter(layer.adapter.parameters(layer.layer).values()))
        n = graph.shape[1] if isinstance(graph, Graph) else int(graph.max()) + 1  # synchronize!
        with torch.random.fork_rng([d for d in [weight.device] if d.type == "cuda"]):
            x = torch.randn(n, weight.shape[0], dtype=weight.dtype, device=weight.device)
    if not layer.composition.settings.is_constant(x):
        x = x.detach().requires_grad_(training)
    made = graph if isinstance(graph, Graph) else layer.graph_of(x, graph)
    with torch.set_grad_enabled(training):
        values = None if made is None else layer.values(x, made)
        if made is not None and values is not None:
            layer.planned(values, layer.functions(made), graph)
