"""Losses and scores over the labelled vertices of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..errors import DeviceError, DtypeError, IndexRangeError, ShapeError

#: The label of a vertex without one, as in torch; others below 0 mean the same.
UNLABELLED = -100


def cross_entropy(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, group: Any = None
) -> Tensor:
    """Give this rank's part of the cross entropy, whose sum over ranks is that of the whole graph.

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
        If a label is no class; of a GPU torch tells, once it has come so far.

    Notes
    -----
    Call backward on all ranks, then ``sum_gradients``: gradients are those of the mean over the
    whole graph, whatever each rank has of it.  ``DistributedDataParallel`` averages gradients of
    means over each rank, which is the same only for ranks with as many labels each, and its ranks
    would have to multiply this loss by their number.  Does not wait for a GPU.
    """
    labels = _labels_that_count(logits, labels, mask)
    count = (labels != UNLABELLED).sum()
    dist.all_reduce(count, group=group)
    wide = logits.float() if logits.itemsize == 2 else logits  # a sum may pass their range
    total = functional.cross_entropy(wide, labels, reduction="sum", ignore_index=UNLABELLED)
    return total / count.clamp(min=1)


def accuracy(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, group: Any = None
) -> float:
    """Give the share of the labelled vertices of all ranks whose largest logit is their label's.

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
    labels = _labels_that_count(logits, labels, mask)
    right = (logits.argmax(1) == labels) & ~logits.isnan().any(1)
    counts = torch.stack([right.sum(), (labels != UNLABELLED).sum()])
    dist.all_reduce(counts, group=group)
    score, count = map(int, counts.tolist())  # synchronize!
    return score / max(count, 1)


def _labels_that_count(logits: Any, labels: Any, mask: Any) -> Tensor:
    """Check the tensors of a loss, and give the labels without those that are masked out."""
    for name, one in (("logits", logits), ("labels", labels), ("mask", mask)):
        if not isinstance(one, Tensor) and not (name == "mask" and one is None):
            raise DtypeError(f"{name} is a {type(one).__name__}: give a torch.Tensor.")
        if one is not None and one.device != logits.device:
            raise DeviceError(
                f"{name} is on {one.device} but logits are on {logits.device}: move one of them."
            )
    if not logits.is_floating_point() or logits.dim() != 2 or not logits.shape[1]:
        raise ShapeError(
            f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}: give floating "
            "numbers of shape (n_local, n_classes)."
        )
    n = logits.shape[0]
    for name, one, dtype in (("labels", labels, torch.int64), ("mask", mask, torch.bool)):
        if one is not None and one.dtype is not dtype:
            raise DtypeError(f"{name} is {one.dtype}: give {dtype}, {name}.to({dtype}).")
        if one is not None and one.shape != (n,):
            raise ShapeError(
                f"{name} has shape {tuple(one.shape)} but logits has {n} rows: give ({n},), those "
                "of this rank's vertices."
            )
    without = labels < 0 if mask is None else (labels < 0) | ~mask
    found: Tensor = labels.masked_fill(without, UNLABELLED)
    if not found.is_cuda and found.numel() and int(found.max()) >= logits.shape[1]:
        raise IndexRangeError(
            f"labels holds {int(found.max())} but logits has {logits.shape[1]} classes: give "
            "labels below that."
        )
    return found
