"""Reports of builds on a GPU, for which the host does not wait: words of pinned memory.

Other streams must wait for the one that builds.  Its last kernel writes the ``Report``: that it is
done, so that nobody need wait any more, and its ``Findings``, such as a wrong id of an
``edge_index`` or the number of blocks.  So it is like a CUDA event that also brings numbers.
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
_open: "list[Report]" = []  # those not seen done, in the order of their making


class Report:
    """The report of a build, which the current stream of a device writes when it is done.

    Kernels write the findings on rows at ``address`` and, of a build of ``both`` in one launch,
    those on columns a ``LINE`` behind; ``findings`` has them once ``done()`` has seen them.
    ``fault`` makes the error for a wrong id from ``Findings.fault``.  Launches lie in a ``with``
    statement, in which an error abandons the report.
    """

    __slots__ = ("_fault", "_last", "_raised", "_words", "address", "device", "findings", "stream")

    def __init__(
        self,
        device: int,
        fault: Callable[[int], SparseFmtError] | None = None,
        *,
        both: bool = False,
    ) -> None:
        self.device, self.stream = device, int(raw_stream(device))
        self.findings: tuple[Findings, ...] | None = None
        self._fault, self._raised = fault, False
        self._last = _SECOND if both else 0
        with _lock:
            self.address, words = _free.pop() if _free else _more()
            words[0] = words[_SECOND] = words[1] = 0  # done twice, fault: the end writes the others
            self._words = words
            _open.append(self)

    def done(self) -> bool:
        """Return True if the build is done, and keep its findings."""
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

    def is_queued_here(self) -> bool:
        """Return True if the build is not done, but queued on the current stream.

        Then launches on it come after the build, and nobody need wait.
        """
        words = self._words
        if self.findings is not None or (words[0] and words[self._last]):
            return False
        return bool(raw_stream(self.device) == self.stream)

    def wait(self) -> tuple[Findings, ...]:
        """Let the host wait until the build is done, and raise for a wrong id."""
        if not self.done():
            torch.cuda.synchronize(self.device)  # synchronize!
        assert self.done(), "the build was launched before this report was asked for"
        self.check()
        return self.findings  # type: ignore[return-value]

    def wait_on_stream(self) -> bool:
        """Let the current stream wait for the build; return True if that is done already.

        The host waits for nothing, nor does the stream that builds.
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
        """Raise for a wrong id, if the build has reported one."""
        if self.findings is not None and self.findings[0].fault and self._fault is not None:
            self._raised = True
            raise self._fault(self.findings[0].fault)


def check_all() -> None:
    """Raise for the first wrong id that a build has reported and no error has named."""
    if _open:
        for report in _open.copy():
            if report.done() and not report._raised:
                report.check()


def record(device: int) -> Report:
    """Record a report without findings on the current stream, as torch records an event."""
    report = Report(device)
    build.reached(report.address, report.stream)
    return report


def progress_of(report: Report) -> int:
    """Return the address of words on the GPU in which the blocks of a small build count steps.

    Each address of reports has its own.  They are 0 at first, and are not reset between builds.
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
