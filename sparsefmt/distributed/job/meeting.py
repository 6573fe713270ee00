"""Processes meet: they find one store, and compare what must be alike before they connect."""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from ...errors import RankError

#: A store of torch.distributed, whose stubs leave them out.
Store: TypeAlias = Any
#: How to mend what differs, by its name.
_MENDS = {
    "world size": "start all with the same WORLD_SIZE",
    "sparsefmt": "install the same version everywhere",
    "torch": "install the same version everywhere",
    "partition": "give all the same folder",
}
#: Seconds in which others read what one has found, before its process and perhaps the store ends.
LINGER = 3.0
_POLL = 0.05


@dataclass(frozen=True)
class Place:
    """Which process this is of how many, and where they meet: what torchrun says."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    host: str = "localhost"
    port: int = 0  #: 0 for any that is free
    by_agent: bool = False  #: whether torchrun holds the store, not rank 0
    attempt: str = "0"  #: how often torchrun has started the processes again

    @property
    def holds_store(self) -> bool:
        """Whether the store ends with this process."""
        return self.rank == 0 and not self.by_agent

    def connect(self, timeout: float, *, serve: bool = False) -> Store:
        """Connect to the store, which ``serve`` starts; what is in it belongs to this attempt."""
        wait = timedelta(seconds=timeout)
        try:
            if not serve:
                self._knock(timeout)
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self.host, self.port, None, serve, timeout=wait, wait_for_workers=False
            )
        except (dist.DistError, ValueError, OSError) as error:
            who = "torchrun's agent" if self.by_agent else "rank 0"
            where = f"{self.host}:{self.port}"
            if serve:
                raise RankError(
                    f"rank 0 cannot listen at {where}: give a MASTER_PORT that is free."
                ) from error
            raise RankError(
                f"rank {self.rank} found no {who} at {where} within {timeout:g} s: start {who}, or "
                "mend MASTER_ADDR and MASTER_PORT."
            ) from error
        return below(f"sparsefmt/{self.attempt}", store)

    def _knock(self, timeout: float) -> None:
        """Wait until somebody listens, without the pages that torch would write to stderr."""
        until = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout).close()
                return
            except OSError:
                if time.monotonic() > until:
                    raise
            time.sleep(_POLL)


def below(prefix: str, store: Store) -> Store:
    """Give a store whose keys begin so in another one."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def place_of(environment: Mapping[str, str]) -> Place:
    """Read the variables that torchrun sets; without RANK and WORLD_SIZE a process is alone.

    Raises
    ------
    RankError
        If some are missing, or no numbers, or the rank is not below the world size.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place()
    try:
        rank, ranks, port = (int(environment[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = int(environment.get("LOCAL_RANK", rank))
    except (KeyError, ValueError) as error:
        raise RankError(
            f"RANK, WORLD_SIZE, MASTER_PORT or LOCAL_RANK is missing or no number ({error}): start "
            "with torchrun, or set them all."
        ) from error
    if not 0 <= rank < ranks or not 0 < port < 1 << 16:
        raise RankError(
            f"rank {rank} of {ranks} at port {port}: RANK goes from 0 to WORLD_SIZE - 1, and "
            "MASTER_PORT from 1 to 65535."
        )
    return Place(
        rank=rank,
        ranks=ranks,
        local_rank=local,
        host=environment.get("MASTER_ADDR", "localhost"),
        port=port,
        by_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def meet(place: Place, facts: Mapping[str, str], timeout: float) -> tuple[Place, Store]:
    """Wait for the other processes, and compare facts with theirs.

    Parameters
    ----------
    place : Place
    facts : mapping of str to str
        What must be alike, by a name of it; ``"fault"`` is why this process cannot take part.
    timeout : float
        Seconds to wait for each of the others.

    Returns
    -------
    place : Place
        With the port where the store is.
    store : Store

    Raises
    ------
    RankError
        If a rank does not come, comes twice, cannot take part, or has other facts: the text names
        it.
    """
    store = place.connect(timeout, serve=place.holds_store)
    if not place.port:
        place = Place(port=store.underlying_store.port)
    try:
        _compare(place, store, {"world size": str(place.ranks), **facts}, timeout)
    except RankError:
        _let_others_read(place, store)
        raise
    return place, store


def _compare(place: Place, store: Store, facts: dict[str, str], timeout: float) -> None:
    if store.add(f"taken/{place.rank}", 1) > 1:
        raise RankError(
            f"rank {place.rank} is there twice: start each RANK once, and other trainings at "
            "another MASTER_PORT."
        )
    store.set(f"beat/{place.rank}", "0")
    store.set(f"facts/{place.rank}", json.dumps(facts))
    first: dict[str, str] = {}
    for rank in range(place.ranks):
        theirs = _facts_of(store, rank, place, timeout)
        first = first or theirs
        if "fault" in theirs:
            who = f"rank {rank} cannot take part: " if place.ranks > 1 else ""
            raise RankError(f"{who}{theirs['fault']}")
        for name, value in theirs.items():
            if value != first.get(name):
                raise RankError(
                    f"rank {rank} has {name} {value} and rank 0 has {first.get(name)}: "
                    f"{_MENDS.get(name, 'give all ranks the same')}."
                )


def _facts_of(store: Store, rank: int, place: Place, timeout: float) -> dict[str, str]:
    key, until = f"facts/{rank}", time.monotonic() + timeout
    try:
        while not store.check([key]):
            if time.monotonic() > until:
                raise RankError(
                    f"rank {rank} did not come within {timeout:g} s: start all {place.ranks} ranks."
                )
            time.sleep(_POLL)
        found: dict[str, str] = json.loads(store.get(key))
    except dist.DistError as error:
        raise RankError(
            f"rank 0 is gone, which held the store: it did not wait for rank {place.rank}, or its "
            "own error says why."
        ) from error
    return found


def _let_others_read(place: Place, store: Store) -> None:
    """Wait a moment with the store, until those who are there know as much."""
    if not place.holds_store:
        with suppress(dist.DistError):  # the store is gone already
            store.set(f"knows/{place.rank}", "1")
        return
    here = [r for r in range(1, place.ranks) if store.check([f"facts/{r}"])]
    until = time.monotonic() + LINGER
    while time.monotonic() < until and not store.check([f"knows/{r}" for r in here]):
        time.sleep(_POLL)
