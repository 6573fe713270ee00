"""Windows of rows that fit on chip, and their entries by column: how ``sspmm`` goes through A."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from ...formats import primitives
from ...formats.arrays import Array, allocating, finish, namespace, on_device_of

if TYPE_CHECKING:
    from ...reorder import Order

#: As in sspmm.cu: a word holds the row in its window, and above it the column in its part.
ROW_BITS = 8
MOST_ROWS = 1 << ROW_BITS
MOST_COLUMNS = (1 << 32 - ROW_BITS) - 1  # a word of ones is no entry


@dataclass(frozen=True, slots=True)
class Cut:
    """How a CSR is cut into windows, parts and pieces."""

    height: int  #: rows of a window
    parts: int  #: of the columns
    piece: int  #: most entries that a block takes


@dataclass(frozen=True, eq=False)
class Windows:
    """The entries of a CSR by part of the columns, in it by window of rows, in it by column.

    A window is ``height`` rows that follow one another in ``order``; a block of threads has them on
    chip and takes one piece of the window's entries in a part.  Entries of one column are
    neighbours, so that what they add to it is added up before it goes to memory: the more columns
    the rows of a window share, the less goes there.

    What is built stays with its structure (``Kept``), once for each cut.
    """

    pieces: Array  #: (n_pieces + 1, 2) first entry, and ``part * n_windows + window``
    order: Array  #: (n_rows,) the row of the CSR at each place in the windows
    words: Array  #: (nnz,) uint32, column in the part * 256 + row in the window
    perm: Array  #: (nnz,) number of each entry in the order of the CSR
    height: int
    part_size: int  #: columns of a part; the last may have fewer

    @property
    def n_pieces(self) -> int:
        """Number of blocks of threads."""
        return len(self.pieces) - 1


class Kept:
    """The windows of one structure, each built once; those of an order while that order lives."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_length: dict[Cut, Windows] = {}
        self._ordered: WeakKeyDictionary[Order, dict[Cut, Windows]] = WeakKeyDictionary()

    def ask(self, cut: Cut, order: "Order | None", build: Callable[[], Windows]) -> Windows:
        """Those of that cut and order."""
        with self._lock:
            made = self._by_length if order is None else self._ordered.setdefault(order, {})
            if cut not in made:
                made[cut] = build()
            return made[cut]


def windows(indptr: Array, indices: Array, n_cols: int, cut: Cut, order: Array | None) -> Windows:
    """Sort the entries into windows; one sort of 64-bit words, about 48 bytes an entry meanwhile.

    ``order`` puts the rows that shall share a window side by side; without it rows of many entries
    do, which share the most columns.  On a GPU it is finished when this returns, so that any stream
    may use it.
    """
    xp, dtype = namespace(indptr), indptr.dtype
    n_rows, nnz = len(indptr) - 1, len(indices)
    part_size = max(-(-n_cols // cut.parts), 1)
    n_windows = -(-n_rows // cut.height)
    with on_device_of(indptr), allocating(f"windows of {nnz} entries"):
        if order is None:
            order = xp.argsort(indptr[:-1] - indptr[1:], kind="stable")
        order = order.astype(dtype)  # a copy: the caller may write to its own
        position = xp.empty(n_rows, dtype)
        position[order] = xp.arange(n_rows, dtype=dtype)
        position = position[primitives.expand(indptr, nnz)]
        column = indices.astype(np.int64)
        keys = column // part_size * n_windows
        keys += position // cut.height
        keys *= part_size
        keys += column % part_size
        del column
        perm = xp.argsort(keys, kind="stable")
        keys = keys[perm]
        words = (keys % part_size << ROW_BITS).astype(np.uint32)
        words |= (position[perm] % cut.height).astype(np.uint32)
        ptr = primitives.pointers(keys, cut.parts * n_windows, np.int64, step=part_size)
        begins = primitives.offsets(-(-xp.diff(ptr) // cut.piece), np.int64)
        n_pieces = int(begins[-1])  # synchronize!
        bucket = primitives.expand(begins, n_pieces)
        first = ptr[bucket] + (xp.arange(n_pieces) - begins[bucket]) * cut.piece
        pieces = xp.full((n_pieces + 1, 2), nnz, dtype)
        pieces[:-1, 0], pieces[:-1, 1] = first, bucket
    finish(indptr)  # synchronize!
    return Windows(
        pieces=pieces,
        order=order,
        words=words,
        perm=perm.astype(dtype, copy=False),
        height=cut.height,
        part_size=part_size,
    )
