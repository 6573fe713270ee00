"""One rank of a training: it meets the others, and trains while a thread watches them.

Ranks compare what must be alike before they connect.  Then a collective does not say when a rank is
gone: gloo's error names a port, and NCCL waits.  So each rank writes a number to the store every
second, the beat, and reads those of the others.  One whose beat stands still is gone: its name goes
to the store, for the others to report the same, and the process ends with it.  The beat comes with
the progress of the main thread, which may hang while the beat goes on.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from ...errors import RankError, SparseFmtError, UnsupportedError
from ..parts.cutting import version
from ..parts.files import check_ranks, read_partition
from ..parts.rows import check_count
from .checkpoint import check_writable
from .options import Options
from .training import Training, check_trainable

#: A store of torch.distributed, whose stubs leave them out.
Store: TypeAlias = Any
#: How to mend what differs, by its name.
_MENDS = {
    "world size": "start all with the same WORLD_SIZE",
    "partition": "give all the same folder",
    **dict.fromkeys(("sparsefmt", "torch"), "install the same version everywhere"),
}
FAILED = 1
#: Seconds in which others read why a process ends, before it and perhaps the store are gone.
_LINGER = 3.0
#: Seconds between looks at the store while ranks meet, and while they leave.
_POLL, _POLL_LEAVING = 0.05, 0.02
#: Of the timeout: how long a beat may stand still while nothing else is wrong.
_PATIENCE = 0.5
#: Beats that may be missing once a collective has failed, or the store.
_MISSING = 3
#: Of the timeout: how long nothing may go on before an epoch is finished, while kernels compile.
_FIRST = 10
#: How many times as long as ever before a rank may take to go on, if that is beyond the timeout.
_LONGER = 2
#: Ranks that a sentence names.
_NAMED = 3
_AGAIN = "start the training again with --resume, on as many ranks as there are."


def run(folder: Path, device: str, timeout: float, options: Options) -> None:
    """Run a training on a folder of parts, as the rank that the environment says.

    Raises what ``meet`` raises; once the ranks have met, an error ends the process: see ``Watch``.
    """
    place, ready = place_of(os.environ), dict[str, Any]()
    place, store = meet(place, _facts(ready, folder, device, options, place), timeout)
    where = ready["device"]
    try:
        with Watch(place, timeout) as watch:
            if where.type == "cuda":
                torch.cuda.set_device(where)
                # NCCL would abort the process before the watch can say which rank is gone.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
                # Else an exchange waits until the product meanwhile has begun all of its blocks.
                os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
            dist.init_process_group(
                "nccl" if where.type == "cuda" else "gloo",
                store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
                rank=place.rank,
                world_size=place.ranks,
                # longer than the watch, which names who is late
                timeout=timedelta(seconds=2 * _FIRST * timeout),
            )
            training = Training(ready["partition"], options, None, where)
            watch.progress = training.progress
            training.run(lambda line: print(line, flush=True) if place.rank == 0 else None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _facts(
    ready: dict[str, Any], folder: Path, device: str, options: Options, place: "Place"
) -> dict[str, str]:
    """Return what must be alike on all ranks, or why this one cannot take part; fill ``ready``."""
    try:
        partition = read_partition(folder)
        check_ranks(partition, place.ranks)
        check_trainable(partition, options)
        if options.checkpoint is not None and place.rank == 0:
            check_writable(options.checkpoint)
        ready.update(partition=partition, device=_device(device, place))
    except (SparseFmtError, OSError) as error:
        return {"fault": str(error)}
    facts = {"sparsefmt": version(), "torch": torch.__version__}
    facts |= {"partition": partition.fingerprint, "device": ready["device"].type}
    alike = [name for name in vars(options) if name != "checkpoint"]
    return facts | {f"--{name}": str(getattr(options, name)) for name in alike}


def _device(name: str, place: "Place") -> torch.device:
    """Choose the device of this process by the name that the command line has."""
    count = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not count):
        return torch.device("cpu")
    if place.local_rank >= count:
        raise UnsupportedError(
            f"there are {count} GPUs and this is process {place.local_rank} of its machine, "
            "counted from 0: start one process for each GPU, or give --device cpu."
        )
    return torch.device("cuda", place.local_rank)


@dataclass(frozen=True)
class Place:
    """The number of this process, and where processes meet: what torchrun says."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    host: str = "localhost"
    port: int = 0  #: 0 for any that is free
    by_agent: bool = False  #: whether torchrun holds the store, not rank 0
    attempt: str = "0"  #: how often torchrun has started the processes again

    @property
    def holds_store(self) -> bool:
        """Return True if the store ends with this process."""
        return self.rank == 0 and not self.by_agent

    @property
    def holder(self) -> str:
        """Return the process with which the store ends."""
        return "torchrun's agent" if self.by_agent else "rank 0"

    def connect(self, timeout: float, *, serve: bool = False) -> Store:
        """Connect to the store, which ``serve`` starts; what is in it belongs to this attempt."""
        try:
            if not serve and not _polled(partial(self._listens, timeout), timeout):
                raise TimeoutError
            wait: Any = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
            store = dist.TCPStore(self.host, self.port, None, serve, **wait)  # type: ignore[attr-defined]
        except (dist.DistError, ValueError, OSError) as error:
            where = f"{self.host}:{self.port}"
            if serve:
                raise RankError(
                    f"rank 0 cannot listen at {where}: give a MASTER_PORT that is free."
                ) from error
            raise RankError(
                f"rank {self.rank} found no {self.holder} at {where} within {timeout:g} s: start "
                f"{self.holder}, or mend MASTER_ADDR and MASTER_PORT."
            ) from error
        return dist.PrefixStore(f"sparsefmt/{self.attempt}", store)  # type: ignore[attr-defined]

    def _listens(self, timeout: float) -> bool:
        """Return True if the store listens; torch would write pages to stderr if it does not."""
        with suppress(OSError):
            socket.create_connection((self.host, self.port), timeout).close()
            return True
        return False


def _polled(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``done()``, for ``seconds`` at most; return False if it is not by then."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def place_of(environment: Mapping[str, str]) -> Place:
    """Read the variables that torchrun sets; without RANK and WORLD_SIZE a process is alone."""
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
    check_count("WORLD_SIZE", ranks)
    if not 0 <= rank < ranks or not 0 < port < 1 << 16:
        raise RankError(
            f"rank {rank} of {ranks} at port {port}: RANK goes from 0 to WORLD_SIZE - 1, and "
            "MASTER_PORT from 1 to 65535."
        )
    host = environment.get("MASTER_ADDR", "localhost")
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, ranks, local, host, port, by_agent, attempt)


def meet(place: Place, facts: Mapping[str, str], timeout: float) -> tuple[Place, Store]:
    """Wait for the other processes, and compare facts with theirs; return the place and the store.

    The fact ``"fault"`` is why this process cannot take part.  Raises RankError if a rank does not
    come within ``timeout``, comes twice, cannot take part, or has other facts.
    """
    store = place.connect(timeout, serve=place.holds_store)
    if not place.port:
        place = replace(place, port=store.underlying_store.port)
    try:
        _compare(place, store, {"world size": str(place.ranks), **facts}, timeout)
    except RankError:
        _linger(place, store)
        raise
    return place, store


def _compare(place: Place, store: Store, facts: dict[str, str], timeout: float) -> None:
    """Raise RankError if facts of a rank differ from those of rank 0."""
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
    """Wait for a rank, and return its facts."""
    key = f"facts/{rank}"
    try:
        if not _polled(lambda: bool(store.check([key])), timeout):
            raise RankError(
                f"rank {rank} did not come within {timeout:g} s: start all {place.ranks} ranks."
            )
        facts: dict[str, str] = json.loads(store.get(key))
    except dist.DistError as error:
        raise RankError(
            f"rank 0 is gone, which held the store: it did not wait for rank {place.rank}, or its "
            "own error says why."
        ) from error
    return facts


def _linger(place: Place, store: Store) -> None:
    """Keep the store alive for a moment, so that ranks that have come read the error."""
    if not place.holds_store:
        with suppress(dist.DistError):  # the store is gone already
            store.set(f"knows/{place.rank}", "1")
        return
    present = [r for r in range(1, place.ranks) if store.check([f"facts/{r}"])]
    _polled(lambda: bool(store.check([f"knows/{r}" for r in present])), _LINGER)


@dataclass
class _Rank:
    """The last signs of a rank."""

    beat: bytes = b""
    changed: float = field(default_factory=time.monotonic)  #: when the beat last changed
    progress: tuple[int, int] = (0, 0)  #: epochs finished, and steps begun or finished
    moved: float = field(default_factory=time.monotonic)  #: when the progress last changed
    longest: float = 0.0  #: seconds from one progress to the next, at most

    def update(self, beat: bytes, now: float) -> None:
        """Read what the rank has written of itself."""
        if beat == self.beat:
            return
        self.beat, self.changed = beat, now
        words = beat.split()
        progress = (int(words[1]), int(words[2])) if len(words) == 3 else self.progress
        if progress != self.progress:
            self.longest = max(self.longest, now - self.moved)
            self.progress, self.moved = progress, now


class Watch:
    """A watch on the other ranks while a block runs; it ends the process when one of them is gone.

    Leaving the block regularly waits for the others to do so; an exception that leaves it ends the
    process, with exit code 1 and one sentence on stderr, which the other ranks write too.

    ``timeout`` are the seconds from the death of a rank, at most, to the end of this one; and how
    long no main thread may go on, or twice as long as ever before, where that is more.  Until a
    rank has finished an epoch it is ten times the timeout.  ``progress`` is called on another
    thread: it returns the epochs that the main thread has finished, and a count of its steps; both
    only grow, and as the same on all ranks.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._place, self._timeout = place, timeout
        self._interval = min(1.0, timeout / 20)
        self._missing = _MISSING * self._interval
        self._store = place.connect(timeout)
        self._ranks = {rank: _Rank() for rank in range(place.ranks)}
        self._suspicious = threading.Event()  # a collective has failed
        self._leaving = threading.Event()
        self._lock = threading.Lock()  # held by who writes the last sentence
        self._thread = threading.Thread(target=self._run, name="sparsefmt watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self._place.ranks > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._place.ranks > 1:
            if error is not None:
                self._explain(error)
            self._leaving.set()
            self._thread.join()

    def _working(self) -> dict[int, _Rank]:
        """Return the ranks that have not left."""
        return {number: rank for number, rank in self._ranks.items() if rank.beat != b"left"}

    def _run(self) -> None:
        """Write this rank's beat and read the others', until all leave or this process must end."""
        beats, leaving = 0, False
        while not leaving or self._working():
            leaving = self._leaving.wait(0.0 if leaving else self._interval)
            if leaving:
                time.sleep(_POLL_LEAVING)
            beats += 1
            try:
                epochs, steps = self.progress()
                sentence = self._look("left" if leaving else f"{beats} {epochs} {steps}")
            except dist.DistError:
                if leaving:  # whoever holds the store has seen all others leave
                    return
                sentence = self._without_store()
            if sentence:
                self._end(sentence)

    def _look(self, beat: str) -> str:
        """Write this rank's beat; return who is gone or stands still, "" for nobody."""
        self._store.set(f"beat/{self._place.rank}", beat)
        if self._store.check(["gone"]):
            return str(self._store.get("gone").decode())
        now = time.monotonic()
        beats = self._store.multi_get([f"beat/{number}" for number in self._ranks])
        for rank, sign in zip(self._ranks.values(), beats, strict=True):
            rank.update(sign, now)
        patience = self._timeout * _PATIENCE
        sentence = self._silent(self._missing if self._suspicious.is_set() else patience)
        sentence = sentence or self._standing()
        if not sentence:
            return ""
        # the first one that says it is right: when others end for it, they fall silent too
        agreed: bytes = self._store.compare_set("gone", "", sentence)
        return agreed.decode()

    def _silent(self, limit: float) -> str:
        """Name the rank that has been silent longest, and longer than that."""
        ranks = self._working().items()
        signs = ((rank.changed, number) for number, rank in ranks if number != self._place.rank)
        changed, number = min(signs, default=(inf, 0))
        silence = time.monotonic() - changed
        if silence <= limit:
            return ""
        return f"rank {number} is gone: no sign of it for {silence:.1f} s; {_AGAIN}"

    def _standing(self) -> str:
        """Name the ranks that are behind all others, which wait for them, and do not go on."""
        working = self._working()
        if not working:
            return ""
        least = min(rank.progress for rank in working.values())
        behind = {number: rank for number, rank in working.items() if rank.progress == least}
        stood = time.monotonic() - max(rank.moved for rank in behind.values())
        limit = max(max(self._timeout, _LONGER * rank.longest) for rank in behind.values())
        if stood <= (limit if least[0] else _FIRST * self._timeout):
            return ""
        names = ", ".join(map(str, list(behind)[:_NAMED]))
        more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
        who = f"rank {names} stands" if len(behind) == 1 else f"ranks {names}{more} stand"
        return (
            f"{who} still: no progress for {stood:.1f} s; look for a disk or a GPU that does not "
            f"answer, or give a larger --timeout, and {_AGAIN}"
        )

    def _without_store(self) -> str:
        """Write why the store does not answer: its holder is gone, if no other rank is."""
        gone = f"{self._place.holder} is gone: the store that it held does not answer; {_AGAIN}"
        return self._silent(self._missing) or gone

    def _explain(self, error: BaseException) -> NoReturn:
        """End the process for an exception: its own, or because of another rank."""
        clear = isinstance(error, SparseFmtError | torch.OutOfMemoryError)
        if isinstance(error, RuntimeError) and not clear:
            # if it comes of a collective, the thread finds out who is gone, and ends the process
            self._suspicious.set()
            time.sleep(2 * self._missing)
        what = " ".join(str(error).split()) or "it was stopped"
        sentence = f"rank {self._place.rank} failed: {type(error).__name__}: {what}"
        if not clear:
            sys.excepthook(type(error), error, error.__traceback__)
        try:
            sentence = self._store.compare_set("gone", "", sentence).decode()
        except dist.DistError:
            sentence = self._without_store()
        self._end(sentence)

    def _end(self, sentence: str) -> NoReturn:
        """Print a sentence and end, without delay: a collective that hangs would never return."""
        with self._lock:
            print(f"sparsefmt: error: {sentence}", file=sys.stderr, flush=True)
            if self._place.holds_store:
                time.sleep(min(_LINGER, 3 * self._interval))  # in which others read it
            os._exit(FAILED)
