"""The numba twins: every operation on NumPy arrays, on all cores, deterministic.

They take plain arrays and check nothing.  Dense arrays may have any row stride, their other axes
are contiguous; ``out`` and index arrays are contiguous.  numba has no 2-byte floats, so float16 and
bfloat16 are widened to float32, computed there and rounded once; what is too large for them becomes
infinite without a warning.  As with every OpenMP program, a process that has run an operation
cannot ``fork`` and run one in the child, which gets an ``UnsupportedError``: start such workers
with ``spawn``.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np

from ...errors import UnsupportedError
from ...formats.arrays import Array
from .loops import PIECES_PER_THREAD

#: numba's workqueue, the only pool of some platforms, aborts the process when two threads enter it.
#: One parallel loop uses all cores: waiting for it costs nothing.
_pool = threading.Lock()
#: Whether this process was forked from one whose OpenMP pool ran: entering it would abort.
_pool_lost = False


def _after_fork() -> None:
    global _pool, _pool_lost
    _pool = threading.Lock()  # another thread of the parent may have held it
    try:
        _pool_lost = numba.threading_layer() == "omp"  # type: ignore[attr-defined]
    except ValueError:  # no pool yet: the child starts its own
        _pool_lost = False


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def writing(out: Array) -> Iterator[tuple[Array, int]]:
    """Yield memory for the result, wide where ``out`` is half, and the number of pieces of work."""
    if _pool_lost:
        raise UnsupportedError(
            "this process was forked from one that had run an operation, and OpenMP's threads do "
            'not survive a fork: start it with multiprocessing\'s "spawn" '
            '(multiprocessing.get_context("spawn")).'
        )
    wide = out if out.dtype.itemsize >= 4 else np.empty(out.shape, np.float32)
    with _pool:
        yield wide, PIECES_PER_THREAD * numba.get_num_threads()
    if wide is not out:
        with np.errstate(over="ignore", under="ignore"):
            out[...] = wide
