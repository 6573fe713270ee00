"""Maps of layers: which may be read as a weight and a bias, and which have to be called."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Linear, Module, Parameter, Sequential
from torch.nn.modules import module as modules

#: Hooks of all modules, by their kind: torch 2.6 has no function that asks for any.
_GLOBAL_HOOKS = [
    getattr(modules, f"_global_{kind}_hooks")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
]
_TENSORS = (Tensor, Parameter)
#: What torch's classes define, unless somebody has patched them.
_FORWARDS = {Linear: Linear.forward, Sequential: Sequential.forward}
_CALL = Module.__call__
#: PyG's own linear map, which may not be there to be imported.
_OF_PYG = "torch_geometric.nn.dense.linear", "Linear"


def calls_forward_alone(module: Module, kind: type[Module] = Linear) -> bool:
    """Return True if a call of a module of that very class runs torch's forward, and no hooks."""
    return type(module) is kind and not (
        kind.forward is not _FORWARDS[kind]
        or Module.__call__ is not _CALL
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or any(_GLOBAL_HOOKS)
    )


def read_map(layer: Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight and the bias of a linear map, or None if the map has to be called.

    Every layer, ``optimize`` and ``replace_layers`` ask this function.  A map is read only if a
    call of it is ``torch.nn.functional.linear`` with both and nothing else: a torch or PyG
    ``Linear`` itself, without hooks of its own or global ones, without a forward set by hand, and
    with plain parameters, none that are computed, pruned, quantised or not yet made.
    """
    kind = type(layer)
    if Module.__call__ is not _CALL:
        return None
    if kind is Linear:
        if Linear.forward is not _FORWARDS[Linear]:  # patched for all of them
            return None
    elif (kind.__module__, kind.__qualname__) != _OF_PYG or _is_patched(kind):
        return None
    attributes = layer.__dict__  # a module's attributes take 0.3 µs each
    if (
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
        or "weight" in attributes  # plain tensors may stand in their place
        or "bias" in attributes
        or any(_GLOBAL_HOOKS)
    ):
        return None
    parameters = attributes["_parameters"]
    weight, bias = parameters.get("weight"), parameters.get("bias", layer)
    if type(weight) not in _TENSORS and not _is_traced(weight):
        return None
    if bias is None:
        return weight, None
    if type(bias) not in _TENSORS and not _is_traced(bias):
        return None
    return (weight, bias) if bias.shape == weight.shape[:1] else None


def _is_patched(kind: Any) -> bool:
    """Return True if the forward of a class is not the one that its module defines."""
    code = getattr(kind.forward, "__code__", None)
    return code is None or code.co_filename != sys.modules[kind.__module__].__file__


_is_patched._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_traced(value: object) -> bool:
    """Return True if a tracer of torch's has put its tensor in the place of a parameter."""
    return torch.compiler.is_compiling() and type(value).__module__.startswith("torch._subclasses.")


def maps_first(width: int, out_width: int, *, gradient: bool) -> bool:
    """Return True if SAGE and GIN aggregate what was mapped, so that fewer bytes are gathered.

    If the features have no ``gradient``, backward aggregates the gradient of what was mapped only.
    Tangents of weights cannot pass through an aggregation, which then comes first.
    """
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return False
    passes = 2 if torch.is_grad_enabled() and not gradient else 1
    return passes * out_width <= width
