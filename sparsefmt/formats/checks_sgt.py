"""The full check of condensed tiles: that they are what ``condense`` makes.

Only a column that no entry uses is let through: it costs room and changes nothing.

Fifteen kinds of fault, numbered in the order in which they are reported; a later kind means
something only where the earlier ones are absent.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from ..errors import FormatError
from . import checks
from . import faults as formats_faults
from .arrays import Array, is_cupy, on_device_of
from .condense import sgt_coordinates
from .sgt import PADDING, SGT

KINDS = 15
#: Kinds 10 to 14: what is wrong with the array at the place that was found.
_TEXTS = (
    "slots[{0}] lies in a tile column that is padding (-1): use a column of the window",
    "slots[{0}] lies below the last row of the matrix: use rows inside the shape",
    "slots and order do not ascend by (column, order) in a tile at position {1}: sort its entries",
    "order never names {0}: it must be a permutation of 0 to nnz - 1",
    "order puts a later row at place {0} than at {1}: places must count entries row by row",
)


def check_tiles(A: SGT) -> None:
    """Raise for the first kind of fault that ``A`` has."""
    _raise_fault(A, _gpu_faults(A) if is_cupy(A.order) else _numpy_faults(A))


def _raise_fault(A: SGT, faults: Iterable[int]) -> None:
    cells = A.tile[0] * A.tile[1]
    for kind, place in enumerate(faults):
        if place < 0:
            continue
        if kind < 6:
            name, last = (("window_ptr", A.tile_count), ("tile_ptr", A.nnz))[kind // 3]
            at = [place if kind % 3 == i else -1 for i in range(3)]
            checks.raise_pointer_fault(name, getattr(A, name), last, at)
        elif kind == 6:
            checks.raise_index_fault("columns", A.columns, A.n_cols, "columns", place)
        elif kind == 7:
            at = [int(i) for i in np.unravel_index(place, A.columns.shape)]
            raise FormatError(
                f"columns{at} is {int(A.columns[*at])}: columns of a window must ascend and be "
                f"distinct, with padding ({PADDING}) only behind the last of them."
            )
        elif kind == 8:
            checks.raise_index_fault("slots", A.slots, cells, "cells in a tile", place)
        elif kind == 9:
            checks.raise_index_fault("order", A.order, A.nnz, "entries", place)
        else:
            raise FormatError(_TEXTS[kind - 10].format(place, place + 1) + ".")


def _gpu_faults(A: SGT) -> tuple[int, ...]:
    with on_device_of(A.order):
        import cupy

        rows = cupy.full(A.nnz, -1, A.index_dtype)
        sizes = (A.n_windows, A.tile_count, A.nnz, *A.shape, *A.tile)
        arrays = (A.window_ptr, A.columns.ravel(), A.tile_ptr, A.slots, A.order)
        size = max(A.n_windows + 1, A.tile_count + 1, A.columns.size, A.nnz)
        return formats_faults.lowest(
            KINDS,
            ("tiles", size, (*arrays, *sizes, rows)),
            ("tiles_order", A.nnz, (rows, A.nnz)),
        )


def _numpy_faults(A: SGT) -> Iterator[int]:
    """Lazily, so that each kind may rely on the earlier ones."""
    yield from checks.first_pointer_faults(A.window_ptr, A.tile_count)
    yield from checks.first_pointer_faults(A.tile_ptr, A.nnz)
    yield checks.first_outside(A.columns, A.n_cols, PADDING)
    yield checks.first_true(_misplaced_columns(A))
    yield checks.first_outside(A.slots, A.tile[0] * A.tile[1])
    yield checks.first_outside(A.order, A.nnz)
    row, col = (np.empty(A.nnz, A.index_dtype) for _ in range(2))
    for some, part, within, columns in sgt_coordinates(A):
        row[part], col[part] = within + row.dtype.type(some.start), columns
    yield checks.first_true(col < 0)
    yield checks.first_true((row < 0) | (row >= A.n_rows))  # below 0: past the index dtype
    yield checks.first_true(_unsorted_entries(A))
    rows = np.full(A.nnz, -1, A.index_dtype)
    rows[A.order] = row
    yield checks.first_true(rows < 0)
    yield checks.first_true(rows[1:] < rows[:-1])


def _misplaced_columns(A: SGT) -> Array:
    """Where columns do not ascend within a window, or padding comes before a column."""
    flat = A.columns.ravel()
    wrong = np.zeros(A.columns.shape, bool)
    before, here = flat[:-1], flat[1:]
    wrong.reshape(-1)[1:] = (here >= 0) & ((before < 0) | (here <= before))
    starts = A.window_ptr[A.window_ptr < A.tile_count]
    wrong[starts, 0] = False
    wrong[:, 0] |= A.columns[:, 0] < 0  # a tile without columns
    return wrong


def _unsorted_entries(A: SGT) -> Array:
    """Where an entry's successor in its tile does not come after it by (column, order)."""
    column = A.slots % np.int32(A.tile[1])
    wrong = column[1:] < column[:-1]
    wrong |= (column[1:] == column[:-1]) & (A.order[1:] <= A.order[:-1])
    starts = A.tile_ptr[(A.tile_ptr > 0) & (A.tile_ptr < A.nnz)]
    wrong[starts - 1] = False
    return wrong
