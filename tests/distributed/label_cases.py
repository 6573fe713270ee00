"""Labels and models of ranks that differ: what each rank finds."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Linear

from sparsefmt.distributed import accuracy, broadcast_parameters, cross_entropy
from sparsefmt.errors import IndexRangeError, ShapeError


def unlabelled(group: Any) -> tuple[float, ...]:
    """Loss and accuracy over ranks where -1 and -100 mean no label, and a row is no number."""
    rank = dist.get_rank(group)
    logits = torch.eye(3, dtype=torch.float64)
    labels = torch.tensor([0, 1, -1 if rank else -100])
    loss = cross_entropy(logits, labels, group=group)
    dist.all_reduce(loss, group=group)
    broken = logits.clone()
    broken[0, 2] = torch.nan
    return float(loss), accuracy(logits, labels, group=group), accuracy(broken, labels, group=group)


def no_class(group: Any) -> str:
    """What is said of a label that is no class."""
    try:
        accuracy(torch.eye(3), torch.tensor([0, 3, 1]), group=group)
    except IndexRangeError as error:
        return str(error)
    return ""


def other_models(group: Any) -> str:
    """What all ranks say where one has another model."""
    rank = dist.get_rank(group)
    try:
        broadcast_parameters(Linear(4, 3 if rank == 1 else 2), group)
    except ShapeError as error:
        return str(error)
    return ""
