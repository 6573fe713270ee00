"""What is known of PyG's layers by their names alone: nothing of it is imported."""

from typing import Any

from torch import Tensor
from torch.nn import Identity, Module, ModuleList

#: The base of PyG's layers, and of ours, of which PyG's is one once it is loaded.
_BASE = "torch_geometric.nn.conv.message_passing", "MessagePassing"
_OURS = "sparsefmt.nn._passing", "Passing"
#: Modules that PyG's constructors put into layers.
_LINEAR = "torch_geometric.nn.dense.linear", "Linear"
_AGGREGATIONS = "torch_geometric.nn.aggr."
#: Parts of layers that are the user's, or that our layers take as they are.
TAKEN = ("act", "nn", "post_nns", "pre_nns", "rnn")
#: Steps of a layer, any of which an instance may have of its own.
_STEPS = (
    *("forward", "propagate", "message", "aggregate", "message_and_aggregate", "update"),
    *("edge_update", "edge_updater", "explain_message"),
)
#: Where a module keeps what is called with its arguments, results and gradients.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layer_of_pyg(module: Module) -> str | None:
    """Return the class's name of a layer that passes messages by PyG's ``MessagePassing``.

    None of a module that is no such layer, ours among them, which only PyG's tools take for one.
    """
    bases = [(base.__module__, base.__qualname__) for base in type(module).__mro__]
    return type(module).__qualname__ if _BASE in bases and _OURS not in bases else None


def against_pyg_layer(layer: Module) -> str:
    """Return why a layer of PyG may do something else than its class, or an empty text."""
    kind: Any = layer
    if not type(layer).__module__.startswith("torch_geometric.nn.conv."):
        return "its class is not PyG's own"
    step = step_set_by_hand(layer)
    if step is not None:
        return f"its {step} has been set by hand"
    if any(vars(layer)[name] for name in _HOOKS):
        return "it has forward hooks"
    on_steps = {name for name in vars(layer) if name.endswith("_hooks")} - vars(Module()).keys()
    if any(vars(layer)[name] for name in on_steps):
        return "it has hooks on its messages"
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and not name.startswith("_cached_"):
            return f"its {name} is a tensor set by hand, no parameter or buffer"
    if kind.explain:
        return "its explanation is asked for"
    for name, module in layer.named_modules():
        if not name or name.split(".")[0] in TAKEN:
            continue
        cls = type(module)
        known = cls in (Identity, ModuleList) or (cls.__module__, cls.__qualname__) == _LINEAR
        if not known and not cls.__module__.startswith(_AGGREGATIONS):
            return f"its {name} is a {cls.__name__}, not what PyG puts there"
        if _is_hooked(module):
            return f"its {name} has hooks, or a method set by hand"
    return ""


def step_set_by_hand(layer: Module) -> str | None:
    """Return the name of a step that is not PyG's, on the layer or its class, or None."""
    kind, attributes = type(layer), vars(layer)
    generated = getattr(kind, "_orig_propagate", None), getattr(kind, "_jinja_propagate", None)
    for step in _STEPS:
        value = attributes.get(step)
        if value is not None and getattr(value, "__func__", value) not in generated:
            return step
        of_class = getattr(kind, step, None)
        if of_class is not None and not of_class.__module__.startswith("torch_geometric."):
            return step
    return None


def _is_hooked(module: Module) -> bool:
    """Return True if a module has hooks that are not its own, as a map without a width has."""
    attributes = vars(module)
    hooks = [hook for name in _HOOKS for hook in attributes[name].values()]
    mine = (getattr(hook, "__self__", None) is module for hook in hooks)
    set_by_hand = (callable(getattr(type(module), name, None)) for name in attributes)
    return any(set_by_hand) or not all(mine)
