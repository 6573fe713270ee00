"""What is known of PyG's layers by their names alone: nothing of it is imported."""

from typing import Any

from torch.nn import Module, ModuleList

from .state import HOOKS, hooked

#: Where PyG has its layers, and the base of all of them.
PYG_LAYERS = "torch_geometric.nn.conv"
_BASE = f"{PYG_LAYERS}.message_passing", "MessagePassing"
#: The base of our layers, of which PyG's is one once it is loaded.
_OURS = "sparsefmt.nn._passing", "Passing"
#: Methods that make up a layer, each of which a user may set on an instance.
STEPS = (
    *("forward", "propagate", "message", "aggregate", "message_and_aggregate", "update"),
    *("edge_update", "edge_updater", "explain_message"),
)
#: Modules that PyG's constructors put into layers.
_LINEAR = "torch_geometric.nn.dense.linear", "Linear"
_AGGREGATIONS = "torch_geometric.nn.aggr."


def layer_of_pyg(module: Module) -> str | None:
    """Name the class of a layer that passes messages by PyG's ``MessagePassing``.

    Parameters
    ----------
    module : Module

    Returns
    -------
    str or None
        The class's own name; None for a module that is no such layer, ours among them, which only
        PyG's tools take for one.

    Raises
    ------
    AttributeError
        If ``module`` is no object with a class.
    """
    bases = [(one.__module__, one.__qualname__) for one in type(module).__mro__]
    return type(module).__qualname__ if _BASE in bases and _OURS not in bases else None


def against_pyg_layer(layer: Module) -> str:
    """Say why such a layer may do something else than its class in PyG says, if so.

    Parameters
    ----------
    layer : Module
        One that ``layer_of_pyg`` knows.

    Returns
    -------
    str
        Empty if nothing is known.

    Raises
    ------
    AttributeError
        If it is no such layer.
    """
    kind: Any = layer
    if not type(layer).__module__.startswith(f"{PYG_LAYERS}."):
        return "its class is not PyG's own"
    step = step_set_by_hand(layer)
    if step is not None:
        return f"its {step} has been set by hand"
    if hooked(layer):
        return "it has forward hooks"
    if has_message_hooks(layer):
        return "it has hooks on its messages"
    if kind.explain:
        return "its explanation is asked for"
    return _against_inside(layer)


def step_set_by_hand(layer: Module) -> str | None:
    """Return the name of a step that stands on the layer itself, but for what PyG's setters put."""
    kind, attributes = type(layer), vars(layer)
    own = getattr(kind, "_orig_propagate", None), getattr(kind, "_jinja_propagate", None)
    for step in STEPS:
        value = attributes.get(step)
        if value is not None and getattr(value, "__func__", value) not in own:
            return step
    return None


def _against_inside(layer: Module) -> str:
    """Say what inside a layer does something else than PyG's constructor made, if so."""
    for name, module in layer.named_modules():
        if not name or name.split(".")[0] == "nn":  # the user's network serves as it is
            continue
        if not _is_of_pyg(module):
            return f"its {name} is a {type(module).__name__}, not what PyG puts there"
        if _is_hooked(module):
            return f"its {name} has hooks, or a forward set by hand"
    return ""


def _is_of_pyg(module: Module) -> bool:
    kind = type(module)
    named = kind.__module__, kind.__qualname__
    return kind is ModuleList or named == _LINEAR or named[0].startswith(_AGGREGATIONS)


def _is_hooked(module: Module) -> bool:
    """Tell whether a module has hooks that are not its own, as a map without a width has."""
    held = vars(module)
    hooks = (hook for name in HOOKS for hook in held[name].values())
    return "forward" in held or any(getattr(one, "__self__", None) is not module for one in hooks)


def has_message_hooks(layer: Module) -> bool:
    """Tell whether hooks see the steps of a layer of PyG: messages, aggregation and so on."""
    own = layer._forward_hooks, layer._forward_pre_hooks
    hooks = [value for name, value in vars(layer).items() if name.endswith("_hooks")]
    return any(hook and not any(hook is one for one in own) for hook in hooks)
