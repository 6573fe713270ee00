"""The full check of condensed tiles: that they are what ``condense`` makes.

Only a column that no entry uses is let through: it costs room and changes nothing.

Fifteen kinds of fault, numbered in the order in which they are reported; a later kind means
something only where the earlier ones are absent.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from ..errors import FormatError
from . import checks, primitives
from . import faults as formats_faults
from .arrays import Array, is_cupy, on_device_of
from .condense import PART_ENTRIES, sgt_coordinates
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
    in_padding, below, rows = _entry_faults(A)
    yield in_padding
    yield below
    yield _first_unsorted(A)
    yield checks.first_true(rows < 0)
    yield checks.first_true(rows[1:] < rows[:-1])


def _entry_faults(A: SGT) -> tuple[int, int, Array]:
    """Find the first entry in padding, the first below the last row, and all rows in CSR order."""
    found = [-1, -1]
    rows = np.full(A.nnz, -1, A.index_dtype)
    for some, part, row, col in sgt_coordinates(A):
        for kind, wrong in enumerate((col < 0, row >= A.n_rows - some.start)):
            at = checks.first_true(wrong)
            if found[kind] < 0 <= at:
                found[kind] = part.start + at
        rows[A.order[part]] = row + rows.dtype.type(some.start)
    return found[0], found[1], rows


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


def _first_unsorted(A: SGT) -> int:
    """Find the first entry whose successor in its tile does not come after it, -1 if none."""
    for part in primitives.parts(slice(0, max(A.nnz - 1, 0)), PART_ENTRIES):
        both = slice(part.start, part.stop + 1)
        column, order = A.slots[both] % np.int32(A.tile[1]), A.order[both]
        wrong = column[1:] < column[:-1]
        wrong |= (column[1:] == column[:-1]) & (order[1:] <= order[:-1])
        ends = np.array([part.start, part.stop], A.tile_ptr.dtype)
        low, high = np.searchsorted(A.tile_ptr, ends, side="right")
        wrong[A.tile_ptr[low:high] - 1 - part.start] = False  # the next tile begins
        if wrong.any():
            return int(part.start) + checks.first_true(wrong)
    return -1
