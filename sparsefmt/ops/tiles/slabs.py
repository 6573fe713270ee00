"""Count the entries of windows by column, and put those that tensor cores take into slabs.

On a GPU a few kernels do it (``slab_kernels``); what they do is here for NumPy.  Both give the
same arrays.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...formats import primitives
from ...formats.arrays import Array, is_cupy, namespace, to_device
from ...formats.compressed import CSR
from . import slab_kernels as kernels
from .cells import SLAB, cell, mask_bit
from .slab_kernels import MOST

if TYPE_CHECKING:
    from ...formats.sgt import SGT

#: Instead of a least number of entries: no column holds as many.
NEVER = 255


@dataclass(frozen=True, eq=False)
class ColumnCounts:
    """Entries of each column of the tiles, padding too; of those in one cell the first counts."""

    #: (n_windows, MOST + 1) int64 on the CPU: columns that hold 1, 2, ... entries, those that hold
    #: at least ``MOST``, and the entries in these
    figures: Array
    begins: Array  #: (n_columns + 1,) where the entries of each column begin, and the end
    counts: Array  #: (n_columns,) uint8, entries that count


@dataclass(frozen=True, eq=False)
class SlabChoice:
    """How much each window gives to tensor cores: decided on the CPU, sent to where it is done."""

    least: Array  #: (n_windows,) uint8, entries that a column must hold; ``NEVER`` takes none
    slab_ptr: Array  #: (n_windows + 1,) int64, first slab of each window
    entry_ptr: Array  #: (n_windows + 1,) int64, entries taken before each window
    n_slabs: int  #: all windows together
    taken: int  #: entries, all windows together


@dataclass(frozen=True, eq=False)
class Slabs:
    """The arrays that a ``Split`` describes, and a bit for each entry: whether it is taken."""

    columns: Array
    masks: Array
    starts: Array
    cells: Array
    perm: Array
    #: (nnz // 32 + 1,) uint32, a bit for each entry in CSR order: whether it is taken; None if all
    #: are
    taken: Array | None


def figures(A: "SGT", step: int) -> Array:
    """Compute ``ColumnCounts.figures`` of every ``step``-th window."""
    if not is_cupy(A.order):
        return count_columns(A).figures[::step]
    return _count(A, step, places=False).figures


def count_columns(A: "SGT") -> ColumnCounts:
    """Count the entries of the columns of all tiles."""
    if is_cupy(A.order):
        return _count(A, 1, places=True)
    column, _, first = _entries(A)
    n_columns = A.columns.size
    counts = np.bincount(column[first], minlength=n_columns)
    window = np.repeat(primitives.expand(A.window_ptr, A.tile_count), A.tile[1])
    numbers = np.zeros((A.n_windows, MOST + 1), np.int64)
    used, many = counts > 0, counts >= MOST
    np.add.at(numbers, (window[used], np.minimum(counts[used], MOST) - 1), 1)
    np.add.at(numbers[:, MOST], window[many], counts[many])
    begins = primitives.pointers(column, n_columns, A.index_dtype)
    return ColumnCounts(numbers, begins, counts.astype(np.uint8))


def gather(A: "SGT", counted: ColumnCounts, choice: SlabChoice) -> Slabs:
    """Put the entries that are taken into slabs; the choice takes some and is where ``A`` is."""
    if is_cupy(A.order):
        return _gather_with_kernels(A, counted, choice)
    tiles, n_slabs = A.tile[0] // 16, choice.n_slabs
    sources, place_of = _sources(A, counted, choice)
    column, row, first = _entries(A)
    first &= place_of[column] >= 0
    place, row, order = place_of[column[first]], row[first], A.order[first]
    slab, k = place // SLAB, place % SLAB
    masks = np.zeros(n_slabs * tiles * 32, np.uint8)
    bit = slab * (tiles * 256) + mask_bit(row, k, tiles)
    np.bitwise_or.at(masks, bit // 8, (1 << bit % 8).astype(np.uint8))
    key = slab * tiles + row // 16
    sorting = np.argsort(key, kind="stable")
    perm = order[sorting]
    taken = None
    if choice.taken < A.nnz:
        bits = np.zeros((A.nnz // 32 + 1) * 32, bool)
        bits[perm] = True
        taken = np.packbits(bits, bitorder="little").view(np.uint32)
    return Slabs(
        columns=A.columns.ravel()[sources],
        masks=masks,
        starts=primitives.pointers(key[sorting], n_slabs * tiles, A.index_dtype),
        cells=cell(row, k)[sorting].astype(np.uint16),
        perm=perm,
        taken=taken,
    )


def remaining(csr: CSR, taken: Array, count: int) -> tuple[CSR, Array]:
    """Return the ``count`` entries that are not taken as a CSR of their own, and their places."""
    xp, dtype = namespace(taken), csr.index_dtype
    if is_cupy(taken):
        before = kernels.left()(taken, size=len(taken) + 1)  # entries left before each 32
        primitives.sum_up(before)
        indices, perm = xp.empty(count, dtype), xp.empty(count, dtype)
        kernels.compact()(csr.indices, taken, before, indices, perm)
        indptr = kernels.rank()(csr.indptr, taken, before)
    else:
        left = np.unpackbits(taken.view(np.uint8), count=csr.nnz, bitorder="little") == 0
        perm = np.flatnonzero(left).astype(dtype, copy=False)
        indices = csr.indices[perm]
        indptr = primitives.offsets(left, dtype)[csr.indptr]
    return CSR._trusted(indptr=indptr, indices=indices, data=None, shape=csr.shape), perm


def _entries(A: "SGT") -> tuple[Array, Array, Array]:
    """Return the column of each entry, its row in the window, and if it is first in its cell."""
    tile = primitives.expand(A.tile_ptr, A.nnz).astype(np.int64)
    slots, width = A.slots.astype(np.int32), A.tile[1]
    column, row = tile * width + slots % width, slots // width
    first = np.ones(A.nnz, bool)
    first[1:] = (column[1:] != column[:-1]) | (row[1:] != row[:-1])
    return column, row, first


def _sources(A: "SGT", counted: ColumnCounts, choice: SlabChoice) -> tuple[Array, Array]:
    """Return the column of tiles at each place of the slabs, and the place, or -1, of each column.

    Behind the last column of a window that one again.
    """
    window = np.repeat(primitives.expand(A.window_ptr, A.tile_count), A.tile[1])
    chosen = np.flatnonzero(counted.counts >= choice.least[window])
    window = window[chosen]
    ptr = primitives.pointers(window, A.n_windows, np.int64)
    place = choice.slab_ptr[window] * SLAB + np.arange(len(chosen)) - ptr[window]
    place_of = np.full(A.columns.size, -1)
    place_of[chosen] = place
    before = np.zeros(choice.n_slabs * SLAB, np.int64)
    before[place] = np.arange(len(chosen))
    return chosen[np.maximum.accumulate(before)], place_of


# On a GPU


def _count(A: "SGT", step: int, *, places: bool) -> ColumnCounts:
    import cupy

    n_windows, n_columns = -(-A.n_windows // step), A.columns.size if places else 0
    begins = cupy.empty(n_columns + 1, A.index_dtype)
    counts = cupy.empty(n_columns, np.uint8)
    numbers = cupy.empty(n_windows * (MOST + 1), np.int64)
    kernels.count()(
        *(A.window_ptr, A.tile_ptr, A.slots, A.n_windows, A.tile[1], step, places),
        *(begins, counts, numbers),
        size=n_windows * kernels.THREADS,
        block_size=kernels.THREADS,
    )
    on_host = to_device(numbers, "cpu")  # synchronize!
    return ColumnCounts(on_host.reshape(n_windows, MOST + 1), begins, counts)


def _gather_with_kernels(A: "SGT", counted: ColumnCounts, choice: SlabChoice) -> Slabs:
    import cupy

    width, tiles, n_slabs = A.tile[1], A.tile[0] // 16, choice.n_slabs
    columns = cupy.empty(n_slabs * SLAB, A.index_dtype)
    sources = cupy.empty(n_slabs * SLAB, np.int64)
    starts = cupy.empty(n_slabs * tiles + 1, A.index_dtype)
    kernels.place()(
        *(A.window_ptr, choice.slab_ptr, choice.entry_ptr, choice.least, counted.counts),
        *(A.columns.ravel(), A.n_windows, width, tiles, columns, sources, starts),
        size=A.n_windows * kernels.THREADS,
        block_size=kernels.THREADS,
    )
    masks = cupy.empty(n_slabs * tiles * 8, np.uint32)
    cells = cupy.empty(choice.taken, np.uint16)
    perm = cupy.empty(choice.taken, A.index_dtype)
    taken = cupy.zeros(A.nnz // 32 + 1, np.uint32) if choice.taken < A.nnz else None
    marks = masks if taken is None else taken  # which it then leaves alone
    kernels.fill()(
        *(sources, counted.begins, A.slots, A.order, width, tiles, taken is not None),
        *(masks, starts, cells, perm, marks),
        size=n_slabs * 32,
    )
    return Slabs(columns, masks.view(np.uint8), starts, cells, perm, taken)
