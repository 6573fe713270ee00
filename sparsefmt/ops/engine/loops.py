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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from numba.core import event

from ...errors import UnsupportedError
from ...formats.arrays import Array
from ...formats.primitives import BLOCK, SHORT
from .jit import tell
from .lanes import add_product, greater, lanes, load, product, store, total, where, width_of

Loop = TypeVar("Loop", bound=Callable[..., Any])
Int: TypeAlias = Any  #: a whole number in compiled code, of the size that numba gives it

Run: TypeAlias = Any  #: lanes in compiled code
Inputs: TypeAlias = Any  #: a tuple of arrays and numbers in compiled code

#: Pieces of work a thread: enough to even out hubs, few enough to cost nothing.
PIECES_PER_THREAD = 16
#: Entries between a prefetch and its use: 1.35x over none at 128 features, 5 M entries.
AHEAD = 16
#: Bytes of a tile of features, the last one masked.  512 keep 128 float32 features in registers:
#: 1.4x over two tiles of 256.
WIDEST, WIDE, MIDDLE, NARROW = 512, 256, 128, 64


class _Compiling(event.Listener):
    """Tells that numba compiles a loop, which it did not find on the disk."""

    def on_start(self, event: Any) -> None:
        tell()

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]

parallel = numba.njit(parallel=True, cache=True, nogil=True)
#: Part of what calls it: not cached, as processes that write a cache at a time may spoil it, and
#: without the entries from Python and C, which would take a sixth of the compiler's time.  Nor does
#: it count references to arrays, so it may neither make nor return one: its caller holds them.
#: 2.3x at 3 entries a row and 8 features, where a row counted each array of each tile.
INLINED: Any = {
    "forceinline": True,
    "nogil": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
inlined: Callable[[Loop], Loop] = numba.njit(**INLINED)
#: A function of its own: of what is rare, so that registers are for the rest.
not_inlined: Callable[[Loop], Loop] = numba.njit(**{**INLINED, "forceinline": False})


@inlined
def first_row(indptr: Array, limit: Int) -> Any:
    """Return the first row before which lie at least ``limit`` entries and rows together."""
    low, high = np.int64(0), np.int64(len(indptr) - 1)
    while low < high:
        middle = (low + high) // 2
        if indptr[middle] + middle < limit:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def rows_of(indptr: Array, piece: Int, pieces: Int) -> Any:
    """Return first and last row, exclusive, of a piece: of ``pieces`` of equal work."""
    items = np.int64(indptr[-1]) + len(indptr) - 1
    start, stop = np.int64(piece) * items // pieces, (np.int64(piece) + 1) * items // pieces
    return first_row(indptr, start), first_row(indptr, stop)


@inlined
def by_tiles(tile: Any, like: Array, feat: Int, row: tuple[Any, ...], args: Any) -> None:
    """Call ``tile(zero, f, count, row, args)`` for all features, as many as registers hold a time.

    ``zero`` has lanes of the dtype of ``like``.  Full tiles need no masks (1.2x at 128 features):
    their ``count`` is the number of lanes itself, not the lesser of two.  ``row`` holds numbers
    only: arrays are in ``args``, since a caller counts references when it makes a tuple of them.
    """
    f = 0
    full = lanes(like, WIDEST, 0)
    while feat - f >= width_of(full):
        tile(full, f, width_of(full), row, args)
        f += width_of(full)
    half = lanes(like, WIDE, 0)
    if feat - f >= width_of(half):
        tile(half, f, width_of(half), row, args)
        f += width_of(half)
    quarter = lanes(like, MIDDLE, 0)
    if feat - f >= width_of(quarter):
        tile(quarter, f, width_of(quarter), row, args)
        f += width_of(quarter)
    while f < feat:
        rest = lanes(like, NARROW, 0)
        count = min(width_of(rest), feat - f)
        tile(rest, f, count, row, args)
        f += count


@inlined
def finite(zero: Run, run: Run) -> Any:
    """Return lanes with 0 in the place of Inf and NaN."""
    return where(greater(product(run, 0), zero), zero, run)


@inlined
def plus_block(zero: Run, total: Run, lost: Run, sums: Run) -> Any:
    """Add lanes to a total in two parts, the second what rounds off the first (Knuth, Dekker).

    Where the first is infinite, or NaN, the second is 0.
    """
    after = add_product(total, 1, sums)
    share = add_product(after, -1, total)
    lost = add_product(lost, 1, add_product(total, -1, add_product(after, -1, share)))
    lost = finite(zero, add_product(lost, 1, add_product(sums, -1, share)))
    result = add_product(after, 1, lost)
    return result, finite(zero, add_product(lost, -1, add_product(result, -1, after)))


def by_blocks(add_some: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a function that sums some entries of a row to whole rows.

    It takes lanes of 0, first and last entry, exclusive, and what it reads.  A long row's sum
    has the error of one block's; a short row is one block.  Where lanes are entries it adds up
    ``step`` of them at a time.
    """
    some: Any = inlined(add_some)

    @inlined
    def add_up(zero: Run, start: Int, stop: Int, args: Inputs, step: Int = 1) -> Any:
        first, last, total, lost = start, stop, zero, zero
        if stop - start > SHORT * step:
            last = start + BLOCK * step
        while True:
            sums = some(zero, first, last, args)
            if last == stop:
                break
            total, lost = plus_block(zero, total, lost, sums)
            first, last = last, min(last + BLOCK * step, stop)
        if first > start:
            total, lost = plus_block(zero, total, lost, sums)
            sums = add_product(total, 1, lost)
        return sums

    return add_up


@not_inlined
def move_block(Y: Array, at: Int, feat: Int, totals: Array, factor: float, last: bool) -> None:
    """Move the sums of a block, ``feat`` values of ``Y``, to totals.

    ``totals``, which are multiplied by ``factor`` before, holds also what they lost; ``last``
    writes all to ``Y`` instead.
    """
    zero = lanes(Y, NARROW, 0)
    for f in range(0, feat, width_of(zero)):
        count = min(width_of(zero), feat - f)
        total = product(load(zero, totals, f, count), factor)
        lost = product(load(zero, totals, feat + f, count), factor)
        total, lost = plus_block(zero, total, lost, load(zero, Y, at + f, count))
        if last:
            store(add_product(total, 1, lost), Y, at + f, count)
            total, lost = zero, zero
        else:
            store(zero, Y, at + f, count)
        store(total, totals, f, count)
        store(lost, totals, feat + f, count)


@inlined
def dot(X: Array, at: Int, Y: Array, there: Any, feat: Int) -> Any:
    """Compute the dot product of ``feat`` values from ``X[at]`` and from ``Y[there]`` on."""
    zero = lanes(X, NARROW, 0)
    step, sums = width_of(zero), zero
    for f in range(0, feat, step):
        count = min(step, feat - f)
        sums = add_product(sums, load(zero, X, at + f, count), load(zero, Y, there + f, count))
    return total(sums)


# The threads of one loop at a time

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
