"""Comparison of ranks: all raise if one of them fails, or has other arguments than the first."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import RankError, SparseFmtError
from ..formats import checks

T = TypeVar("T")
#: Errors that this package raises on purpose.
_OWN = (SparseFmtError, OSError)


def on_all_ranks(
    prepare: Callable[[], T], group: Any, device: torch.device | None, *, alike: bool = False
) -> T:
    """Return ``prepare()`` on each rank, or raise on all ranks if it fails on one.

    ``prepare`` runs no collectives.  If ``alike``, it returns a dictionary that must be the same on
    all ranks.  ``device`` is where this rank computes, and NCCL takes what it sends.  Raises
    RankError if ``prepare`` fails on some ranks, or returns what differs.  An error with the same
    text on all ranks is raised as it is, and so is, on its own rank, one that is not of this
    package: MemoryError for instance.
    """
    with _Comparison(group, device) as comparison:
        result = prepare()
        comparison.facts = result if alike else None
    return result


class _Comparison:
    """A block on all ranks, at whose end all raise if it failed, or facts differ, on one."""

    def __init__(self, group: Any, device: torch.device | None) -> None:
        self.facts: Any = None
        self._group, self._device = group, device

    def __enter__(self) -> "_Comparison":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the process is to end
        answers: list[Any] = [None] * dist.get_world_size(self._group)
        mine = None if error is None else _sentence(error), self.facts
        with on_device(self._device):
            dist.all_gather_object(answers, mine, group=self._group)
        texts = [text for text, _ in answers]
        if error is not None and (len(set(texts)) == 1 or not isinstance(error, _OWN)):
            return
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankError(f"rank {rank} cannot take part: {text}") from error
        if self.facts is not None:
            first = answers[0][1]
            for rank, (_, facts) in enumerate(answers):
                for name, value in facts.items():
                    if value != first.get(name):
                        raise RankError(
                            f"{name} is {value} on rank {rank} and {first.get(name)} on rank 0: "
                            "give all ranks the same."
                        )


def on_device(device: torch.device | None) -> Any:
    """Return a context in which a GPU is the current one; without effect for other devices."""
    is_cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if is_cuda else nullcontext()


def first_of(group: Any) -> int:
    """Return the number, among all processes, of the first rank of a group."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def debugging(device: torch.device) -> bool:
    """Return True if ranks compare their arguments; within a CUDA graph they cannot."""
    if not checks.DEBUG:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _sentence(error: Exception) -> str:
    """Write an error of this rank as a sentence for the others."""
    if isinstance(error, _OWN):
        return str(error)
    what = " ".join([f"{type(error).__name__}:", *str(error).split()]).rstrip(":.")
    return f"{what}; see the error of that rank."
