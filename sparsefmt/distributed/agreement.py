"""Ranks tell each other what they were given, and all refuse what is wrong or differs on one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import RankError, SparseFmtError
from ..formats import checks

T = TypeVar("T")


def on_all_ranks(
    prepare: Callable[[], T], group: Any, device: torch.device | None, *, alike: bool = False
) -> T:
    """Prepare something on each rank, and raise on all of them if it fails on one.

    Parameters
    ----------
    prepare : callable
        Without collectives.
    group : ProcessGroup or None
    device : torch.device, optional
        Where this rank computes, and NCCL takes what it sends.
    alike : bool
        Whether ``prepare`` gives a dictionary that is to be the same on all ranks.

    Raises
    ------
    RankError
        If it fails on some ranks, or gives what differs.  What fails with the same words on all
        ranks is raised as it is, and so is, on its own rank, what this package does not raise:
        MemoryError for instance.
    """
    with _Telling(group, device) as telling:
        found = prepare()
        telling.facts = found if alike else None
    return found


class _Telling:
    """Tells other ranks how a block ended, and raises if one of theirs failed or facts differ."""

    def __init__(self, group: Any, device: torch.device | None) -> None:
        self.facts: Any = None
        self._group, self._device = group, device

    def __enter__(self) -> "_Telling":
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if fault is not None and not isinstance(fault, Exception):
            return  # the process is to end
        said: list[Any] = [None] * dist.get_world_size(self._group)
        mine = None if fault is None else _sentence(fault), self.facts
        is_cuda = self._device is not None and self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_cuda else nullcontext():
            dist.all_gather_object(said, mine, group=self._group)
        faults = [text for text, _ in said]
        if fault is not None and (len(set(faults)) == 1 or not _is_ours(fault)):
            return
        for rank, text in enumerate(faults):
            if text is not None:
                raise RankError(f"rank {rank} cannot take part: {text}") from fault
        if self.facts is not None:
            _compare([facts for _, facts in said])


def debugging(device: torch.device) -> bool:
    """Tell whether ranks compare what they are given; within a CUDA graph they cannot."""
    if not checks.DEBUG:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _compare(said: list[Mapping[str, Any]]) -> None:
    """Refuse facts that differ from those of the first rank."""
    for rank, facts in enumerate(said):
        for name, value in facts.items():
            first = said[0].get(name)
            if value != first:
                raise RankError(
                    f"{name} is {value} on rank {rank} and {first} on rank 0: give all ranks the "
                    "same."
                )


def _is_ours(fault: Exception) -> bool:
    return isinstance(fault, SparseFmtError | OSError)


def _sentence(fault: Exception) -> str:
    """Say what is wrong on this rank, for the others."""
    if _is_ours(fault):
        return str(fault)
    what = " ".join([f"{type(fault).__name__}:", *str(fault).split()]).rstrip(":.")
    return f"{what}; see the error of that rank."
