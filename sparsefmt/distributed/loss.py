"""Weights that all ranks have alike: their gradients added up, their values sent out."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ..errors import DtypeError, ShapeError, UnsupportedError


def sum_gradients(module_or_parameters: Module | Iterable[Tensor], group: Any = None) -> None:
    """Add up the gradients of weights over all ranks, after backward, in place.

    ``p.grad = sum_ranks p.grad`` for each parameter that requires a gradient.

    Parameters
    ----------
    module_or_parameters : Module, or iterable of Tensor
        The same on all ranks, in the same order.
    group : ProcessGroup, optional
        By default all processes.

    Raises
    ------
    DtypeError
        If something else is given than parameters.
    UnsupportedError
        If a gradient is sparse, or a parameter has no values yet.

    Notes
    -----
    With the loss of ``distributed.cross_entropy`` the sum is the gradient of the whole graph's
    loss.  ``DistributedDataParallel`` does not give it: it averages, over ranks with as many
    examples each, so that its gradients are those of this function divided by the ranks.  One
    all-reduce for each dtype.  A parameter without a gradient on this rank takes part with zeros,
    and has one afterwards.
    """
    parameters = [one for one in _parameters(module_or_parameters) if one.requires_grad]
    for one in parameters:
        if one.grad is None:
            one.grad = torch.zeros_like(one)
        if one.grad.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient has layout {one.grad.layout}: only dense ones are added up, make the "
                "embedding with sparse=False."
            )
    for alike in _by_dtype([one.grad for one in parameters if one.grad is not None]):
        flat = torch.cat([one.reshape(-1) for one in alike])
        dist.all_reduce(flat, group=group)
        _copy_back(alike, flat)


def broadcast_parameters(module: Module, group: Any = None) -> None:
    """Give all ranks the parameters and buffers that the first rank has, in place.

    Parameters
    ----------
    module : Module
        Of the same shapes on all ranks.
    group : ProcessGroup, optional
        By default all processes.

    Raises
    ------
    DtypeError
        If ``module`` is no Module.
    ShapeError
        If a rank has other parameters or buffers than the first; all ranks raise it.
    UnsupportedError
        If a parameter has no values yet.

    Notes
    -----
    One broadcast for each dtype.  ``DistributedDataParallel`` does the same when it is made.
    """
    if not isinstance(module, Module):
        raise DtypeError(f"module is a {type(module).__name__}: give a torch.nn.Module.")
    _parameters(module)  # refuses what has no values
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    _check_alike({name: (tuple(one.shape), str(one.dtype)) for name, one in named.items()}, group)
    tensors = [*named.values()]
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for alike in _by_dtype([one.detach() for one in tensors]):
        flat = torch.cat([one.reshape(-1) for one in alike])
        dist.broadcast(flat, first, group=group)
        _copy_back(alike, flat)


def _check_alike(mine: dict[str, Any], group: Any) -> None:
    """Check that all ranks have tensors of the same names, shapes and dtypes."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group=group)
    for rank, other in enumerate(every):
        for name in {**every[0], **other}:
            theirs, first = other.get(name, "none"), every[0].get(name, "none")
            if theirs != first:
                raise ShapeError(
                    f"rank {rank} has {theirs} as {name} where rank 0 has {first}: make the same "
                    "module on all ranks."
                )


def _parameters(given: Any) -> list[Tensor]:
    """Check for parameters that have values."""
    if isinstance(given, Tensor):
        raise DtypeError("one tensor is given: give a module, or a list of its parameters.")
    found = list(given.parameters() if isinstance(given, Module) else given)
    for one in found:
        if not isinstance(one, Tensor):
            raise DtypeError(f"a {type(one).__name__} is given: give a module, or its parameters.")
        if is_lazy(one):
            raise UnsupportedError(
                "a parameter has no values yet, since its map waits for the first features: run "
                "the model once before."
            )
    return found


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Part tensors by their dtype, in an order that all ranks have."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for one in tensors:
        found.setdefault(one.dtype, []).append(one)
    return list(found.values())


def _copy_back(tensors: list[Tensor], flat: Tensor) -> None:
    parts = torch.split(flat, [one.numel() for one in tensors])
    with torch.no_grad():
        for one, part in zip(tensors, parts, strict=True):
            one.copy_(part.view(one.shape))
