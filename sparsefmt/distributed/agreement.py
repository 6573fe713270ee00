"""Comparison of ranks: all raise if one of them fails, or has other arguments than the first."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from ..errors import RankError, SparseFmtError
from ..formats import checks

T = TypeVar("T")
#: By default all processes.
Group: TypeAlias = dist.ProcessGroup | None
#: Errors that this package raises on purpose.
_EXPECTED = (SparseFmtError, OSError)


def on_all_ranks(
    prepare: Callable[[], T], group: Group, device: torch.device | None, *, alike: bool = False
) -> T:
    """Return ``prepare()`` on each rank, or raise on all ranks if it fails on one.

    ``prepare`` runs no collectives.  If ``alike``, it returns a dictionary that must be the same on
    all ranks.  ``device`` is where NCCL takes what this rank sends.  An error with the same text on
    all ranks, or of another package, is raised as it is on its rank; all else is a RankError.
    """
    facts: Mapping[str, Any] | None = None

    def compare(kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the process is to end
        text = None if error is None else str(error)
        if error is not None and not isinstance(error, _EXPECTED):
            text = " ".join([f"{type(error).__name__}:", *str(error).split()]).rstrip(":.")
            text += "; see the error of that rank."
        answers: list[Any] = [None] * dist.get_world_size(group)
        with on_device(device):
            dist.all_gather_object(answers, (text, facts), group=group)
        texts = [text for text, _ in answers]
        if error is not None and (len(set(texts)) == 1 or not isinstance(error, _EXPECTED)):
            return
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankError(f"rank {rank} cannot take part: {text}") from error
        for rank, (_, theirs) in enumerate(answers):
            for name, value in (theirs or {}).items():
                if value != (first := answers[0][1].get(name)):
                    raise RankError(
                        f"{name} is {value} on rank {rank} and {first} on rank 0: give all ranks "
                        "the same."
                    )

    with ExitStack() as ranks:
        ranks.push(compare)
        result = prepare()
        if alike:
            facts = cast(Mapping[str, Any], result)
    return result


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; without effect for other devices."""
    if device is None or device.type != "cuda":
        return nullcontext()
    return torch.cuda.device(device)


def debugging(device: torch.device) -> bool:
    """Return True if ranks compare their arguments; within a CUDA graph they cannot."""
    if not checks.DEBUG:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
