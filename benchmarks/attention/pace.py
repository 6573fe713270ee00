"""How often the sections of ``fuse`` run a call: all of them are to end within minutes."""

from collections.abc import Callable
from typing import Any

from .. import _harness

#: Beyond it fewer runs do: what a call finds in a cache is little of its time, and the spread too.
LONG_MS = 20.0
LONG_RUNS, LONG_WARMUPS = 10, 3
PROBES = 2  #: calls that tell how long each takes, which warm up too


def paced(
    functions: list[Callable[[], Any]], *, cuda: bool, quick: bool = False
) -> tuple[list[float], int]:
    """As ``_harness.paced``, but 10 runs after 3 where one takes over 20 ms."""
    if not quick:
        probe = _harness.medians(functions, cuda=cuda, runs=1, warmups=PROBES - 1)
        if max(probe) > LONG_MS:
            runs, warmups = LONG_RUNS, LONG_WARMUPS - PROBES
            return _harness.medians(functions, cuda=cuda, runs=runs, warmups=warmups), runs
    return _harness.paced(functions, cuda=cuda, quick=quick)
