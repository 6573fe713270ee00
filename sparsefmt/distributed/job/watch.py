"""A thread in each process of a training that sees when another one is gone, and ends this one.

A collective does not tell: gloo's error names a port, and NCCL waits.  So each rank writes a number
to the store every second, the beat, and reads those of the others.  One whose beat stands still is
gone: its name goes to the store, for the others to say the same, and the process ends with it.
Beside the beat stands the progress of the main thread, which may hang while the beat goes on.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from ...errors import SparseFmtError
from .meeting import LINGER, Place

FAILED = 1
#: Of the timeout: how long a beat may stand still while nothing else is wrong.
_PATIENCE = 0.5
#: Beats that may be missing once a collective has failed, or the store.
_MISSING = 3
#: Of the timeout: how long nothing may go on before an epoch is finished, while kernels compile.
FIRST = 10
#: How many times as long as ever before a rank may take to go on, if that is beyond the timeout.
_LONGER = 2
#: Ranks that a sentence names.
_NAMED = 3
#: Seconds between looks at the others while all leave.
_POLL = 0.02
_AGAIN = "start the training again with --resume, on as many ranks as there are."


@dataclass
class _Seen:
    """What is known of a rank."""

    beat: bytes = b""
    heard: float = field(default_factory=time.monotonic)  #: when the beat last changed
    progress: tuple[int, int] = (0, 0)  #: epochs finished, and steps begun or finished
    moved: float = field(default_factory=time.monotonic)  #: when the progress last changed
    longest: float = 0.0  #: seconds from one progress to the next, at most

    def hear(self, beat: bytes, now: float) -> None:
        """Take what the rank says of itself."""
        if beat == self.beat:
            return
        self.beat, self.heard = beat, now
        said = beat.split()
        progress = (int(said[1]), int(said[2])) if len(said) == 3 else self.progress
        if progress != self.progress:
            self.longest = max(self.longest, now - self.moved)
            self.progress, self.moved = progress, now

    @property
    def has_left(self) -> bool:
        """Whether it is through with its work."""
        return self.beat == b"left"


class Watch:
    """Watch the other ranks while a block runs, and end the process when one of them is gone.

    Leaving the block regularly waits for the others to do so; an exception that leaves it ends the
    process, with exit code 1 and one sentence on stderr, which the other ranks say too.

    Parameters
    ----------
    place : Place
        Where the store is; all ranks have met.
    timeout : float
        Seconds from the death of a rank, at most, to the end of this one; and how long no main
        thread may go on, or twice as long as ever before, where that is more.  Until a rank has
        finished an epoch it is ten times the timeout.

    Attributes
    ----------
    progress : callable
        Gives the epochs that the main thread has finished, and a count of its steps: both only
        grow, and as the same on all ranks.  It is called on another thread.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._place, self._timeout = place, timeout
        self._interval = min(1.0, timeout / 20)
        self._store = place.connect(timeout)
        self._others = [rank for rank in range(place.ranks) if rank != place.rank]
        self._seen = {rank: _Seen() for rank in range(place.ranks)}
        self._suspicious = threading.Event()  # a collective has failed
        self._leaving = threading.Event()
        self._lock = threading.Lock()  # held by who says the last sentence
        self._thread = threading.Thread(target=self._run, name="sparsefmt watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self._others:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._others:
            return
        if error is not None:
            self._explain(error)
        self._leaving.set()
        self._thread.join()

    def _run(self) -> None:
        beats, leaving = 0, False
        while not (leaving and all(seen.has_left for seen in self._seen.values())):
            leaving = self._leaving.wait(0.0 if leaving else self._interval)
            if leaving:
                time.sleep(_POLL)
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

    def _look(self, own: str) -> str:
        """Beat, and say who is gone or stands still: "" for nobody."""
        self._store.set(f"beat/{self._place.rank}", own)
        if self._store.check(["gone"]):
            return str(self._store.get("gone").decode())
        now = time.monotonic()
        found = self._store.multi_get([f"beat/{rank}" for rank in self._seen])
        for seen, beat in zip(self._seen.values(), found, strict=True):
            seen.hear(beat, now)
        sentence = self._silent(self._missing() if self._suspicious.is_set() else self._patience())
        sentence = sentence or self._standing()
        if not sentence:
            return ""
        # the first one that says it is right: when others end for it, they fall silent too
        agreed: bytes = self._store.compare_set("gone", "", sentence)
        return agreed.decode()

    def _silent(self, limit: float) -> str:
        """Name the rank that has been silent longest, and longer than that."""
        waiting = {r: self._seen[r].heard for r in self._others if not self._seen[r].has_left}
        if not waiting:
            return ""
        rank = min(waiting, key=waiting.__getitem__)
        silence = time.monotonic() - waiting[rank]
        if silence <= limit:
            return ""
        return f"rank {rank} is gone: no sign of it for {silence:.1f} s; {_AGAIN}"

    def _standing(self) -> str:
        """Name the ranks that are behind all others, which wait for them, and do not go on."""
        working = {rank: seen for rank, seen in self._seen.items() if not seen.has_left}
        if not working:
            return ""
        least = min(seen.progress for seen in working.values())
        behind = {rank: seen for rank, seen in working.items() if seen.progress == least}
        stood = time.monotonic() - max(seen.moved for seen in behind.values())
        limit = max(self._allowed(seen) for seen in behind.values())
        if stood <= limit:
            return ""
        names = ", ".join(map(str, list(behind)[:_NAMED]))
        more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
        who = f"rank {names} stands" if len(behind) == 1 else f"ranks {names}{more} stand"
        return (
            f"{who} still: no progress for {stood:.1f} s; look for a disk or a GPU that does not "
            f"answer, or give a larger --timeout, and {_AGAIN}"
        )

    def _allowed(self, seen: _Seen) -> float:
        """Seconds in which a rank must go on."""
        if not seen.progress[0]:
            return FIRST * self._timeout
        return max(self._timeout, _LONGER * seen.longest)

    def _without_store(self) -> str:
        """Say why the store does not answer: the rank that holds it is gone, if no other was."""
        sentence = self._silent(self._missing())
        if sentence:
            return sentence
        who = "torchrun's agent" if self._place.by_agent else "rank 0"
        return f"{who} is gone: the store that it held does not answer; {_AGAIN}"

    def _explain(self, error: BaseException) -> NoReturn:
        """End the process for an exception: its own fault, or because of another rank."""
        own = isinstance(error, SparseFmtError | torch.OutOfMemoryError)
        if isinstance(error, RuntimeError) and not own:
            # if it comes of a collective, the thread finds out who is gone, and ends the process
            self._suspicious.set()
            time.sleep(2 * self._missing())
        what = " ".join(str(error).split()) or "it was stopped"
        sentence = f"rank {self._place.rank} failed: {type(error).__name__}: {what}"
        if not own:
            sys.excepthook(type(error), error, error.__traceback__)
        try:
            sentence = self._store.compare_set("gone", "", sentence).decode()
        except dist.DistError:
            sentence = self._without_store()
        self._end(sentence)

    def _end(self, sentence: str) -> NoReturn:
        """Say it and end; at once, since a collective that hangs would never return."""
        with self._lock:
            print(f"sparsefmt: error: {sentence}", file=sys.stderr, flush=True)
            if self._place.holds_store:
                time.sleep(min(LINGER, 3 * self._interval))  # in which others read it
            os._exit(FAILED)

    def _patience(self) -> float:
        return self._timeout * _PATIENCE

    def _missing(self) -> float:
        return _MISSING * self._interval
