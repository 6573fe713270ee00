"""A thread in each process of a training that sees when another one is gone, and ends this one.

A collective does not tell: gloo's error names a port, and NCCL waits.  So each rank writes a number
to the store every second, the beat, and reads those of the others.  One whose beat stands still is
gone: its name goes to the store, for the others to say the same, and the process ends with it.
"""

import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist

from ..errors import SparseFmtError
from .meeting import LINGER, Place

FAILED = 1
#: Of the timeout: how long a beat may stand still while nothing else is wrong.
_PATIENCE = 0.5
#: Beats that may be missing once a collective has failed, or the store.
_MISSING = 3
#: Seconds between looks at the others while all leave.
_POLL = 0.02


class Watch:
    """Watch the other ranks while a block runs, and end the process when one of them is gone.

    Leaving the block regularly waits for the others to do so; an exception that leaves it ends the
    process, with exit code 1 and one sentence on stderr, which the other ranks say too.

    Parameters
    ----------
    place : Place
        Where the store is; all ranks have met.
    timeout : float
        Seconds from the death of a rank, at most, to the end of this one.
    """

    def __init__(self, place: Place, timeout: float) -> None:
        self._place, self._timeout = place, timeout
        self._interval = min(1.0, timeout / 20)
        self._store = place.connect(timeout)
        self._others = [rank for rank in range(place.ranks) if rank != place.rank]
        #: Last beat of each other rank, and when it came.
        self._beats = {rank: (b"", time.monotonic()) for rank in self._others}
        self._left: set[int] = set()
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
        while not (leaving and len(self._left) == len(self._others)):
            leaving = self._leaving.wait(0.0 if leaving else self._interval)
            if leaving:
                time.sleep(_POLL)
            beats += 1
            try:
                sentence = self._look("left" if leaving else str(beats))
            except dist.DistError:
                if leaving:  # whoever holds the store has seen all others leave
                    return
                sentence = self._without_store()
            if sentence:
                self._end(sentence)

    def _look(self, own: str) -> str:
        """Beat, and say who is gone: "" for nobody."""
        self._store.set(f"beat/{self._place.rank}", own)
        if self._store.check(["gone"]):
            return str(self._store.get("gone").decode())
        now = time.monotonic()
        found = self._store.multi_get([f"beat/{rank}" for rank in self._others])
        for rank, beat in zip(self._others, found, strict=True):
            if beat == b"left":
                self._left.add(rank)
            if beat != self._beats[rank][0]:
                self._beats[rank] = beat, now
        sentence = self._silent(self._missing() if self._suspicious.is_set() else self._patience())
        if not sentence:
            return ""
        # the first one that says it is right: when others end for it, they fall silent too
        agreed: bytes = self._store.compare_set("gone", "", sentence)
        return agreed.decode()

    def _silent(self, limit: float) -> str:
        """Name the rank that has been silent longest, and longer than that."""
        waiting = {r: at for r, (_, at) in self._beats.items() if r not in self._left}
        if not waiting:
            return ""
        rank = min(waiting, key=waiting.__getitem__)
        silence = time.monotonic() - waiting[rank]
        if silence <= limit:
            return ""
        return (
            f"rank {rank} is gone: no sign of it for {silence:.1f} s; start the training again "
            "with --resume, on as many ranks as there are."
        )

    def _without_store(self) -> str:
        """Say why the store does not answer: the rank that holds it is gone, if no other was."""
        sentence = self._silent(self._missing())
        if sentence:
            return sentence
        who = "torchrun's agent" if self._place.by_agent else "rank 0"
        return (
            f"{who} is gone: the store that it held does not answer; start the training again with "
            "--resume, on as many ranks as there are."
        )

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
