"""What a step sends: its collectives counted, left out, or repeated without the rest of it.

Others are put in the places of the functions of ``torch.distributed`` for the time being, there and
where ``sparsefmt.distributed`` has a name for one; so all of its ways to exchange are counted, and
none has to tell.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Newer versions of torch have other names, and warn of the older ones.
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
EXCHANGES = tuple(
    name for name in ("all_to_all_single", *GATHERS, *SCATTERS) if hasattr(dist, name)
)
NAMES = (*EXCHANGES, "all_reduce")
LIBRARY = "sparsefmt.distributed"


@dataclass(frozen=True)
class Sending:
    """One collective: its sizes, without its tensors."""

    name: str
    into: tuple[int, ...]  #: shape of what comes
    given: tuple[int, ...]  #: shape of what goes
    dtype: torch.dtype
    there: tuple[int, ...] | None  #: rows from each rank, of an ``all_to_all_single``
    here: tuple[int, ...] | None  #: rows to each rank
    group: Any

    @property
    def bytes(self) -> int:
        """Bytes that leave this rank; of a sum over ranks those of a ring."""
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        whole = int(torch.Size(self.given).numel()) * self.dtype.itemsize
        if self.name == "all_reduce":
            return 2 * whole * (ranks - 1) // ranks
        if self.name in GATHERS:
            return whole * (ranks - 1)
        if self.here is None:
            return whole * (ranks - 1) // ranks
        return whole - whole // max(self.given[0], 1) * self.here[rank]


def repeated(sendings: Sequence[Sending], device: str) -> Callable[[], None]:
    """Send as much once more, one after the other, of tensors kept from call to call."""
    once = {one: _again(one, device) for one in sendings}
    calls = [once[one] for one in sendings]

    def run() -> None:
        for call in calls:
            call()

    return run


def _again(one: Sending, device: str) -> Callable[[], Any]:
    given = torch.zeros(one.given, dtype=one.dtype, device=device)
    into = torch.zeros(one.into, dtype=one.dtype, device=device)
    if one.name == "all_reduce":
        return lambda: dist.all_reduce(given, group=one.group)
    if one.name in GATHERS + SCATTERS:
        return lambda: getattr(dist, one.name)(into, given, group=one.group)
    splits = [None if part is None else list(part) for part in (one.there, one.here)]
    return lambda: dist.all_to_all_single(into, given, *splits, group=one.group)


class Nothing:
    """The work of a collective that was left out."""

    def wait(self) -> bool:
        """Return at once."""
        return True


@contextmanager
def counted() -> Iterator[list[Sending]]:
    """Note each collective that is called meanwhile."""
    found: list[Sending] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            found.append(_sending(name, *given, **options))
            return call(*given, **options)

        return run

    with _instead(noting, NAMES):
        yield found


@contextmanager
def silent() -> Iterator[None]:
    """Leave out each exchange of features that is called meanwhile: what comes was there before.

    Numbers of columns still travel, since others would make other work, and sums over ranks stay,
    at which the ranks meet.
    """

    def leaving(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(into: Tensor, *given: Any, async_op: bool = False, **options: Any) -> Any:
            if not into.is_floating_point():
                return call(into, *given, async_op=async_op, **options)
            return Nothing() if async_op else None

        return run

    with _instead(leaving, EXCHANGES):
        yield


@contextmanager
def _instead(
    other: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Iterable[str]
) -> Iterator[None]:
    modules = [dist, *(m for name, m in sys.modules.items() if name.startswith(LIBRARY))]
    places = [
        (module, key, name, value)
        for name in names
        for module in modules
        for key, value in list(vars(module).items())
        if value is getattr(dist, name)
    ]
    for module, key, name, call in places:
        setattr(module, key, other(name, call))
    try:
        yield
    finally:
        for module, key, _, call in places:
            setattr(module, key, call)


def _sending(name: str, into: Tensor, *given: Any, **options: Any) -> Sending:
    """Read the sizes off the arguments of a call, by their places or names in torch."""
    if name == "all_reduce":
        group = options.get("group")
        return Sending(name, (), tuple(into.shape), into.dtype, None, None, group)
    names = ("input", "output_split_sizes", "input_split_sizes", "group")
    if name in GATHERS:
        names = ("input_tensor", "group")
    if name in SCATTERS:
        names = ("input", "op", "group")
    found = dict(zip(names, given, strict=False)) | options
    source = found[names[0]]
    splits = [found.get(key) for key in ("output_split_sizes", "input_split_sizes")]
    there, here = (None if one is None else tuple(one) for one in splits)
    shapes = tuple(into.shape), tuple(source.shape)
    return Sending(name, *shapes, into.dtype, there, here, found.get("group"))
