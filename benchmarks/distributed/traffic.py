"""Exchanges of a step: left out, or repeated without the rest of it.

Both put something else in the places of the collectives that move features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from sparsefmt.distributed import halo

Collective = Callable[..., Any]


@contextmanager
def repeatable() -> Iterator[list[Callable[[], Any]]]:
    """Give a call for each exchange that sends as much once more, of tensors of its own.

    Exchanges of the same sizes share a call.
    """
    found: list[Callable[[], Any]] = []
    known: dict[Any, Callable[[], Any]] = {}

    def noting(call: Collective) -> Collective:
        def run(into: Tensor, given: Tensor, *splits: Any, group: Any, **options: Any) -> Any:
            key = call, into.shape, given.shape, into.dtype, str(splits)
            if key not in known:
                tensors = torch.zeros_like(into), torch.zeros_like(given)
                known[key] = partial(call, *tensors, *splits, group=group)
            found.append(known[key])
            return call(into, given, *splits, group=group, **options)

        return run

    with _instead(noting):
        yield found


@contextmanager
def silent() -> Iterator[None]:
    """Leave out each exchange of features: what comes was in memory before.

    Numbers of columns still travel, since others would make other work, and sums over ranks stay,
    at which the ranks meet.
    """

    def leaving(call: Collective) -> Collective:
        def run(into: Tensor, *given: Any, **options: Any) -> Any:
            if into.is_floating_point():
                return SimpleNamespace(wait=lambda: True)
            return call(into, *given, **options)

        return run

    with _instead(leaving):
        yield


@contextmanager
def _instead(other: Callable[[Collective], Collective]) -> Iterator[None]:
    """Call others in the places of both collectives by which a halo moves features."""
    with (
        patch.object(dist, "all_to_all_single", other(dist.all_to_all_single)),
        patch.object(halo, "_all_gather", other(halo._all_gather)),
    ):
        yield
