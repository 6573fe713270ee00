"""What compiled loops share: how they are compiled, cut into pieces of rows, prefetch, and dot."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import event

from . import waiting
from .lanes import add_product, lanes, load, total, width_of

Loop = TypeVar("Loop", bound=Callable[..., Any])

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
        waiting.tell()

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


@inlined
def first_row(indptr: Any, limit: Any) -> Any:
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
def rows_of(indptr: Any, piece: Any, pieces: Any) -> Any:
    """First and last row, exclusive, of one of so many pieces of equal work, cut at rows."""
    items = np.int64(indptr[-1]) + len(indptr) - 1
    start, stop = np.int64(piece) * items // pieces, (np.int64(piece) + 1) * items // pieces
    return first_row(indptr, start), first_row(indptr, stop)


@inlined
def by_tiles(tile: Any, like: Any, feat: Any, row: Any, given: Any) -> None:
    """Call ``tile(zero, f, count, row, given)`` for all features, as many as registers hold a time.

    ``zero`` has lanes of the dtype of ``like``.  Full tiles need no masks (1.2x at 128 features):
    their ``count`` is the number of lanes itself, not the lesser of two.  ``row`` holds numbers
    only: arrays are in ``given``, since a caller counts references when it makes a tuple of them.
    """
    f = 0
    whole = lanes(like, WIDEST, 0)
    while feat - f >= width_of(whole):
        tile(whole, f, width_of(whole), row, given)
        f += width_of(whole)
    half = lanes(like, WIDE, 0)
    if feat - f >= width_of(half):
        tile(half, f, width_of(half), row, given)
        f += width_of(half)
    quarter = lanes(like, MIDDLE, 0)
    if feat - f >= width_of(quarter):
        tile(quarter, f, width_of(quarter), row, given)
        f += width_of(quarter)
    while f < feat:
        rest = lanes(like, NARROW, 0)
        count = min(width_of(rest), feat - f)
        tile(rest, f, count, row, given)
        f += count


@inlined
def dot(X: Any, at: Any, Y: Any, there: Any, feat: Any) -> Any:
    """Dot product of ``feat`` values each, from ``X[at]`` and from ``Y[there]`` on."""
    zero = lanes(X, NARROW, 0)
    step, sums = width_of(zero), zero
    for f in range(0, feat, step):
        count = min(step, feat - f)
        sums = add_product(sums, load(zero, X, at + f, count), load(zero, Y, there + f, count))
    return total(sums)
