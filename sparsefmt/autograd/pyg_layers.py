"""What is known of PyG's layers by their names alone: nothing of it is imported."""

from typing import Any

from torch.nn import Module

from .constants import hooked

#: Where PyG has its layers, and the base of all of them.
PYG_LAYERS = "torch_geometric.nn.conv"
_BASE = f"{PYG_LAYERS}.message_passing", "MessagePassing"


def layer_of_pyg(module: Module) -> str | None:
    """Name the class of a layer that passes messages by PyG's ``MessagePassing``.

    Parameters
    ----------
    module : Module

    Returns
    -------
    str or None
        The class's own name; None for a module that is no such layer.

    Raises
    ------
    AttributeError
        If ``module`` is no object with a class.
    """
    bases = ((one.__module__, one.__qualname__) for one in type(module).__mro__)
    return type(module).__qualname__ if _BASE in bases else None


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
    if "forward" in vars(layer):
        return "its forward has been set by hand"
    if hooked(layer):
        return "it has forward hooks"
    if has_message_hooks(layer):
        return "it has hooks on its messages"
    return "its explanation is asked for" if kind.explain else ""


def has_message_hooks(layer: Module) -> bool:
    """Tell whether hooks see the steps of a layer of PyG: messages, aggregation and so on."""
    own = layer._forward_hooks, layer._forward_pre_hooks
    hooks = [value for name, value in vars(layer).items() if name.endswith("_hooks")]
    return any(hook and not any(hook is one for one in own) for hook in hooks)
