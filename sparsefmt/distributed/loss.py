"""Training over ranks: losses and scores of labelled vertices, and weights that all have alike."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, functional
from torch.nn.parameter import is_lazy

from ..errors import DeviceError, DtypeError, IndexRangeError, ShapeError, UnsupportedError
from .agreement import Group

#: The label of a vertex without one, as in torch; others below 0 mean the same.
UNLABELLED = -100


def cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, group: Group = None
) -> Tensor:
    """Compute this rank's share of the cross entropy; shares add up to that of the whole graph.

    ``sum_i -log softmax(logits[i])[labels[i]] / n`` over the labelled vertices ``i`` of this rank,
    where ``n`` is the number of labelled vertices of all ranks.

    Parameters
    ----------
    logits : Tensor, shape (n_local, n_classes)
    labels : Tensor of int64, shape (n_local,)
        Below 0 for a vertex without a label: -100 as in torch, -1 as ``read_part`` has it.
    mask : Tensor of bool, shape (n_local,), optional
        The vertices that count; by default all that have a label.
    group : ProcessGroup, optional
        By default all processes.

    Returns
    -------
    Tensor, shape ()
        0 on a rank without labelled vertices, and where there are none at all.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the tensors do not fit together.
    IndexRangeError
        If a label is no class; on a GPU torch raises it, at a later synchronisation.

    Notes
    -----
    Call backward on all ranks, then ``sum_gradients``: gradients are those of the mean over the
    whole graph, whatever each rank has of it.  ``DistributedDataParallel`` averages gradients of
    means over each rank, which is the same only for ranks with as many labels each, and its ranks
    would have to multiply this loss by their number.  Does not wait for a GPU.
    """
    labels = _masked_labels(logits, labels, mask)
    count = (labels != UNLABELLED).sum()
    dist.all_reduce(count, group=group)
    wide = logits.float() if logits.itemsize == 2 else logits  # a sum may pass their range
    total = functional.cross_entropy(wide, labels, reduction="sum", ignore_index=UNLABELLED)
    return total / count.clamp(min=1)


def accuracy(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, group: Group = None
) -> float:
    """Return the share of the labelled vertices of all ranks whose largest logit is their label's.

    Parameters
    ----------
    logits, labels, mask, group
        As for ``cross_entropy``.

    Returns
    -------
    float
        The same on all ranks; 0 where no vertex is labelled.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, IndexRangeError
        As ``cross_entropy``.

    Notes
    -----
    A vertex with a logit that is no number counts as wrong.  Waits for a GPU.
    """
    labels = _masked_labels(logits, labels, mask)
    right = (logits.argmax(1) == labels) & ~logits.isnan().any(1)
    counts = torch.stack([right.sum(), (labels != UNLABELLED).sum()])
    dist.all_reduce(counts, group=group)
    score, count = map(int, counts.tolist())  # synchronize!
    return score / max(count, 1)


def _masked_labels(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Check the tensors of a loss; return labels, ``UNLABELLED`` where they do not count."""
    for name, value in (("logits", logits), ("labels", labels), ("mask", mask)):
        if not isinstance(value, Tensor) and not (name == "mask" and value is None):
            raise DtypeError(f"{name} is a {type(value).__name__}: give a torch.Tensor.")
        if value is not None and value.device != logits.device:
            raise DeviceError(
                f"{name} is on {value.device} but logits are on {logits.device}: move one of them."
            )
    if not logits.is_floating_point() or logits.dim() != 2 or not logits.shape[1]:
        raise ShapeError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}: give floating "
            "numbers of shape (n_local, n_classes)."
        )
    n = logits.shape[0]
    for name, value, dtype in (("labels", labels, torch.int64), ("mask", mask, torch.bool)):
        if value is not None and value.dtype is not dtype:
            raise DtypeError(f"{name} is {value.dtype}: give {dtype}, {name}.to({dtype}).")
        if value is not None and value.shape != (n,):
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)} but logits has {n} rows: give ({n},), "
                "those of this rank's vertices."
            )
    masked: Tensor = labels.masked_fill(
        labels < 0 if mask is None else (labels < 0) | ~mask, UNLABELLED
    )
    if not masked.is_cuda and masked.numel() and int(masked.max()) >= logits.shape[1]:
        raise IndexRangeError(
            f"labels holds {int(masked.max())} but logits has {logits.shape[1]} classes: give "
            "labels below that."
        )
    return masked


def sum_gradients(module_or_parameters: Module | Iterable[Tensor], group: Group = None) -> None:
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
    grads: list[Tensor] = []
    for parameter in _parameters(module_or_parameters):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient has layout {parameter.grad.layout}: only dense ones are added up, "
                "make the embedding with sparse=False."
            )
        grads.append(parameter.grad)
    _run_flat(grads, lambda flat: dist.all_reduce(flat, group=group))


def broadcast_parameters(module: Module, group: Group = None) -> None:
    """Copy the parameters and buffers of the first rank to all ranks, in place.

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
    _parameters(module)  # refuses parameters without values
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes: list[Any] = [None] * dist.get_world_size(group)
    mine = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    dist.all_gather_object(shapes, mine, group=group)
    for rank, theirs in enumerate(shapes):
        for name in {**shapes[0], **theirs}:
            shape, first = theirs.get(name, "none"), shapes[0].get(name, "none")
            if shape != first:
                raise ShapeError(
                    f"rank {rank} has {shape} as {name} where rank 0 has {first}: make the same "
                    "module on all ranks."
                )
    detached = [tensor.detach() for tensor in tensors.values()]
    _run_flat(detached, lambda flat: dist.broadcast(flat, group_src=0, group=group))


def _parameters(source: Module | Iterable[Any]) -> list[Tensor]:
    """Return the parameters of a module or iterable; raise if one has no values."""
    if isinstance(source, Tensor):
        raise DtypeError("one tensor is given: give a module, or a list of its parameters.")
    parameters = list(source.parameters() if isinstance(source, Module) else source)
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            kind = type(parameter).__name__
            raise DtypeError(f"a {kind} is given: give a module, or its parameters.")
        if is_lazy(parameter):
            raise UnsupportedError(
                "a parameter has no values yet, since its map waits for the first features: run "
                "the model once before."
            )
    return parameters


def _run_flat(tensors: list[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Run an in-place collective over tensors, those of one dtype flattened into one."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        collective(flat)
        with torch.no_grad():
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
