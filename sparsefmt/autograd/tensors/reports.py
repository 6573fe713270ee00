"""What a GPU reports without being waited for: words of pinned memory that kernels write.

A stream's work is ordered for that stream alone.  A ``Report`` says when it is done, so that others
need not wait once it is, and what was found meanwhile, such as a wrong id in an ``edge_index``.
"""

import ctypes
from collections.abc import Callable
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from ...errors import SparseFmtError
from ...ops.engine import build
from ...ops.engine.build import Findings
from ..engine.memory import raw_stream

#: Bytes of each half of a slot: a line of the caches, so that no two are written together.
LINE, _SLOTS = 64, 256
_COUNT, _SECOND = len(Findings._fields), LINE // 8  # words of a half, and where the other begins
_Words = ctypes.c_longlong * (_SECOND + _COUNT)

_lock = RLock()
_in_use: list[Tensor] = []  # never given back: a kernel may still be about to write
_progress: dict[tuple[int, int], int] = {}
_free: list[tuple[int, Any]] = []  # addresses of slots, and their words
_open: "list[Report]" = []  # in the order of their making


class Report:
    """What a stream of a device tells once it has come to where this is made.

    ``fault`` makes the error for an id that was wrong, of what ``Findings.fault`` says.  A report
    on ``both`` halves of a build tells of the columns too, a ``LINE`` behind the ``address`` of
    what it tells of the rows; ``findings`` are those of each half.  In a ``with`` statement an
    error abandons it.
    """

    __slots__ = ("_fault", "_last", "_told", "_words", "address", "device", "findings", "stream")

    def __init__(
        self,
        device: int,
        fault: Callable[[int], SparseFmtError] | None = None,
        *,
        both: bool = False,
    ) -> None:
        self.device, self.stream = device, int(raw_stream(device))
        self.findings: tuple[Findings, ...] | None = None
        self._fault, self._told = fault, False
        self._last = _SECOND if both else 0
        with _lock:
            self.address, words = _free.pop() if _free else _more()
            words[0] = words[_SECOND] = words[1] = 0  # done twice, fault: the end writes the others
            self._words = words
            _open.append(self)

    def done(self) -> bool:
        """Return True if the stream has come so far."""
        words = self._words
        if self.findings is None and words[0] and words[self._last]:
            with _lock:
                if self.findings is None:
                    rows, columns = words[:_COUNT], words[_SECOND:]
                    halves = (rows, columns) if self._last else (rows,)
                    self.findings = tuple(Findings(*half) for half in halves)
                    _open.remove(self)
                    _free.append((self.address, words))
        return self.findings is not None

    def is_ahead(self) -> bool:
        """Return True if the current stream made it and has not come so far."""
        words = self._words
        if self.findings is not None or (words[0] and words[self._last]):
            return False
        return bool(raw_stream(self.device) == self.stream)

    def wait(self) -> tuple[Findings, ...]:
        """Wait until the stream has come so far, and raise for a wrong id."""
        if not self.done():
            torch.cuda.synchronize(self.device)  # synchronize!
        assert self.done(), "the build was launched before this report was asked for"
        self.check()
        return self.findings  # type: ignore[return-value]

    def reach(self) -> bool:
        """Let the current stream read what was made, and tell whether that is done.

        The stream that made it comes later by itself; another one waits, the host does not.
        """
        if not self.done():
            if raw_stream(self.device) != self.stream:
                made_by: Any = torch.cuda.default_stream(self.device)
                if self.stream:  # 0 is that one
                    made_by = torch.cuda.ExternalStream(self.stream, device=self.device)  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(self.device).wait_stream(made_by)
            return False
        self.check()
        return True

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            with _lock:  # its words are not used again: a kernel before may still write there
                if self in _open:
                    _open.remove(self)

    def check(self) -> None:
        """Raise for a wrong id, if one is known of."""
        if self.findings is not None and self.findings[0].fault and self._fault is not None:
            self._told = True
            raise self._fault(self.findings[0].fault)


def check_all() -> None:
    """Raise for the first wrong id that a stream has found since, and nobody was told of."""
    if _open:
        for report in _open.copy():
            if report.done() and not report._told:
                report.check()


def mark(device: int) -> Report:
    """Launch a report of the current stream, for when it has come so far."""
    report = Report(device)
    build.reached(report.address, report.stream)
    return report


def progress_of(report: Report) -> int:
    """Return the address of a report's own words on its GPU, for the steps of a build's blocks.

    They are 0 at first, and go with the report's place from one report to the next.
    """
    key = report.device, report.address
    address = _progress.get(key)
    if address is None:
        memory = torch.zeros(build.SMALL_BLOCKS, dtype=torch.int64, device=f"cuda:{key[0]}")
        address = _progress[key] = memory.data_ptr()
        _in_use.append(memory)  # 8 KiB for each place: the latest of those that are free comes next
    return address


def _more() -> tuple[int, Any]:
    """Make more slots, and return one of them."""
    with torch.inference_mode(False):
        memory = torch.zeros(_SLOTS * 2 * LINE, dtype=torch.uint8, pin_memory=True)
    _in_use.append(memory)
    begin = memory.data_ptr()
    places = range(begin, begin + _SLOTS * 2 * LINE, 2 * LINE)
    _free.extend((place, _Words.from_address(place)) for place in places)
    return _free.pop()
