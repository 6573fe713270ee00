"""Windows of rows that fit on chip, and their entries by column: how ``sspmm`` goes through A."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...errors import UnsupportedError
from ...formats import primitives
from ...formats.arrays import Array, allocating, finish, is_cupy, namespace, on_device_of
from ...formats.base import Built
from ...formats.compressed import CSR
from ...reorder import Order
from ..engine.jit import capturing
from ..engine.structure import Preparing

#: As in sspmm.cu: a word holds the row in its window, and above it the column in its part.
ROW_BITS = 8
MOST_ROWS = 1 << ROW_BITS
MOST_COLUMNS = (1 << 32 - ROW_BITS) - 1  # a word of ones is no entry


class WindowSizes(NamedTuple):
    """How a CSR is cut into windows, parts and pieces."""

    height: int  #: rows of a window
    parts: int  #: of the columns
    piece: int  #: most entries that a block takes


@dataclass(frozen=True, eq=False)
class Windows(Preparing):
    """The entries of a CSR by part of the columns, in it by window of rows, in it by column.

    A window is ``height`` rows that follow one another in ``order``; a block of threads has them on
    chip and takes one piece of the window's entries in a part.  Entries of one column are
    neighbours, so that what they add to it is added up before it goes to memory: the more columns
    the rows of a window share, the less goes there.
    """

    pieces: Array  #: (n_pieces + 1, 2) first entry, and ``part * n_windows + window``
    order: Array  #: (n_rows,) the row of the CSR at each place in the windows
    words: Array  #: (nnz,) uint32, column in the part * 256 + row in the window
    perm: Array  #: (nnz,) number of each entry in the order of the CSR
    height: int
    part_size: int  #: columns of a part; the last may have fewer
    _prepared: dict[Hashable, Any] = field(init=False, default_factory=dict, repr=False)

    @property
    def n_pieces(self) -> int:
        """Return the number of blocks of threads."""
        return len(self.pieces) - 1


def windows_of(
    A: CSR, sizes: WindowSizes, order: Order | None = None, *, stream: int = 0
) -> Windows:
    """Return the windows of a CSR, built at the first call for these sizes and this order.

    Those of an order go with it.  Raises an ``UnsupportedError`` where they are missing and that
    stream is being captured.
    """

    def build() -> Windows:
        if is_cupy(A.indptr) and capturing(stream):
            raise UnsupportedError(
                "the rows of the graph are not in windows yet, and a capture cannot sort them: "
                "run the same step once before it."
            )
        rows = None if order is None else order.perm
        return build_windows(A.indptr, A.indices, A.n_cols, sizes, rows)

    built = A._built()
    if order is not None:
        orders: WeakKeyDictionary[Order, Built] = built.ask("orders", WeakKeyDictionary)
        with built.lock:
            built = orders.setdefault(order, Built())
    return built.ask(("windows", sizes), build)


def prepare_order(A: CSR, order: Order) -> None:
    """Let products of tensors with this structure take its rows in that order from now on."""
    built = A._built()
    with built.lock:
        before = prepared_order(A)
        if before is not None and before is not order and is_cupy(A.indptr):
            with on_device_of(A.indptr):  # windows of the old order may go with it
                namespace(A.indptr).cuda.runtime.deviceSynchronize()  # synchronize!
        built.parts["order"] = order


def prepared_order(A: CSR) -> Order | None:
    """Return the order in which products of tensors take the rows, or None: by length."""
    return A._built().parts.get("order")


def build_windows(
    indptr: Array, indices: Array, n_cols: int, sizes: WindowSizes, order: Array | None
) -> Windows:
    """Sort the entries into windows; one sort of 64-bit words, about 48 bytes an entry meanwhile.

    ``order`` puts the rows that shall share a window side by side; without it rows of many entries
    do, which share the most columns.  On a GPU it is finished when this returns, so that any stream
    may use it.
    """
    xp, dtype = namespace(indptr), indptr.dtype
    height, parts, piece = sizes
    n_rows, nnz = len(indptr) - 1, len(indices)
    part_size = max(-(-n_cols // parts), 1)
    n_windows = -(-n_rows // height)
    with on_device_of(indptr), allocating(f"windows of {nnz} entries"):
        if order is None:
            order = xp.argsort(indptr[:-1] - indptr[1:], kind="stable")
        order = order.astype(dtype)  # a copy: the caller may write to its own
        position = xp.empty(n_rows, dtype)
        position[order] = xp.arange(n_rows, dtype=dtype)
        position = position[primitives.expand(indptr, nnz)]
        column = indices.astype(np.int64)
        keys = column // part_size * n_windows
        keys += position // height
        keys *= part_size
        keys += column % part_size
        del column
        perm = xp.argsort(keys, kind="stable")
        keys = keys[perm]
        words = (keys % part_size << ROW_BITS).astype(np.uint32)
        words |= (position[perm] % height).astype(np.uint32)
        ptr = primitives.pointers(keys, parts * n_windows, np.int64, step=part_size)
        begins = primitives.offsets(-(-xp.diff(ptr) // piece), np.int64)
        n_pieces = int(begins[-1])  # synchronize!
        bucket = primitives.expand(begins, n_pieces)
        first = ptr[bucket] + (xp.arange(n_pieces) - begins[bucket]) * piece
        pieces = xp.full((n_pieces + 1, 2), nnz, dtype)
        pieces[:-1, 0], pieces[:-1, 1] = first, bucket
    finish(indptr)  # synchronize!
    return Windows(
        pieces=pieces,
        order=order,
        words=words,
        perm=perm.astype(dtype, copy=False),
        height=height,
        part_size=part_size,
    )
