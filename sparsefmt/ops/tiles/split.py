"""Split the entries of an SGT: those that tensor cores take, as these read them, and the rest.

What concerns windows is decided here, on the CPU and by NumPy, so that all devices decide alike;
``slabs`` counts and places the entries.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...formats import primitives
from ...formats.arrays import Array, DType, allocating, finish, namespace, on_device_of, send
from ...formats.compressed import CSR
from . import slabs as tile_slabs
from .cells import LANES, SLAB, place
from .costs import Costs
from .slab_kernels import MOST
from .slabs import NEVER, ColumnCounts, SlabChoice

if TYPE_CHECKING:
    from ...formats.sgt import SGT

#: Heights of windows that the kernels are made for.
HEIGHTS = (16, 32, 64, 128)
#: Windows that are looked at first, at least.
SAMPLE = 1024
#: Steps between them: primes, so that what repeats itself in a matrix does not hide between them.
STEPS = (7, 11, 17, 31, 61, 127, 251, 509, 1021, 2039, 4093, 8191, 16381, 32749)
#: Share of the cells that hold an entry from which on values lie cell by cell.
BAKED = 0.25
#: Share of what must be saved that a sample has to save.
DOUBT = 0.5
#: How far before ``MOST`` each least number of entries stands, 0 for none taken among them.
_BEFORE_MOST = np.arange(MOST, -1, -1, dtype=np.uint8)[:, None]


@dataclass(frozen=True, eq=False)
class Split:
    """The entries of an SGT that go to matrix units, in slabs of 16 columns; and the rest.

    The columns that hold enough of a window's entries stand side by side, 16 a slab.  A slab
    has one bit for each of its cells that says whether it holds an entry, and its entries behind
    one another, by tile of 16 rows, column and place in CSR order.  Of entries that share a cell
    the first counts, the others belong to the rest.

    Where CUDA cores do best alone nothing is taken: there is no item, no slab, and no rest either,
    since the CSR itself is what to use.
    """

    items: Array  #: (n_items, 4) window, first slab, end, and the part it sums into or -1
    cuts: Array  #: (n_cuts, 4) window of several parts, first part, end, 0
    columns: Array  #: (n_slabs, 16) columns; behind the last of a window that one again
    masks: Array  #: (n_slabs, 32, height / 16) uint8, bits as ``cells.mask_bit`` numbers them
    starts: Array  #: (n_slabs * height / 16 + 1,) first entry of each slab and tile of 16 rows
    cells: Array  #: (taken,) uint16, cell of each entry in its slab: ``cells.cell``
    perm: Array  #: (taken,) place of each entry in CSR order
    rest: CSR | None  #: the other entries, without values; None if there are none, or all are
    rest_perm: Array | None  #: their places in CSR order
    height: int
    nnz: int  #: of the SGT
    taken: int  #: entries on matrix units
    n_parts: int  #: parts of windows, whose sums wait for one another in memory

    @property
    def share(self) -> float:
        """Return the share of the entries that matrix units take."""
        return self.taken / self.nnz if self.nnz else 0.0

    @property
    def n_cells(self) -> int:
        """Return the number of cells of all slabs together."""
        return len(self.columns) * SLAB * self.height

    @property
    def baked(self) -> bool:
        """Return True if slabs are so full that a value for each cell takes the least memory."""
        return self.taken >= BAKED * self.n_cells > 0

    def arrays(self) -> list[Array]:
        """Return all arrays that kernels read of it."""
        own = [self.items, self.cuts, self.columns, self.masks, self.starts, self.cells, self.perm]
        rest = self.rest
        return own if rest is None else [*own, rest.indptr, rest.indices, self.rest_perm]

    def places(self, itemsize: int) -> Array:
        """Return the cell of each entry in tiles, (taken,) int64, for values of that size."""
        xp, tiles = namespace(self.cells), self.height // 16
        if not self.taken:
            return xp.zeros(0, np.int64)
        with on_device_of(self.cells):
            slab = primitives.expand(xp.ascontiguousarray(self.starts[::tiles]), self.taken)
            cells = place(self.cells.astype(np.int64), itemsize)
            result = slab.astype(np.int64) * (SLAB * self.height) + cells
        finish(result)  # synchronize!
        return result


def split(A: "SGT", csr: CSR, costs: Costs) -> Split:
    """Choose for every window what its columns need to hold, and gather those that hold it.

    Of many windows every k-th is looked at first, one or two thousand: where matrix units save not
    half of what they must, nothing is taken.  Other matrices are looked at as a whole.

    On a GPU it is finished when this returns, so that any stream may use it.
    """
    with on_device_of(A.order), allocating(f"the split of {A.nnz} entries"):
        result = _split(A, csr, costs)
    finish(A.order)  # synchronize!
    return result


def _split(A: "SGT", csr: CSR, costs: Costs) -> Split:
    """Split the entries on the device that is current."""
    result = _decide(A, costs)
    if result is None:
        return _nothing(A)
    choice, counted = result
    part, complete = costs.longest_part(choice.n_slabs), choice.taken == A.nnz
    items, cuts, n_parts = _items(choice.slab_ptr, complete, part, A.index_dtype)
    least, slab_ptr, entry_ptr, items, cuts = send(
        [choice.least, choice.slab_ptr, choice.entry_ptr, items, cuts], like=A.order
    )
    choice = replace(choice, least=least, slab_ptr=slab_ptr, entry_ptr=entry_ptr)
    slabs = tile_slabs.gather(A, counted, choice)
    rest, rest_perm = None, None
    if slabs.taken is not None:
        rest, rest_perm = tile_slabs.remaining(csr, slabs.taken, A.nnz - choice.taken)
    columns, height = slabs.columns.reshape(-1, SLAB), A.tile[0]
    masks = slabs.masks.reshape(choice.n_slabs, LANES, height // 16)
    entries, of_rest = (slabs.starts, slabs.cells, slabs.perm), (rest, rest_perm)
    sizes = height, A.nnz, choice.taken, n_parts
    return Split(items, cuts, columns, masks, *entries, *of_rest, *sizes)


def _nothing(A: "SGT") -> Split:
    """Return the split of an SGT that takes nothing."""
    xp, dtype, height = namespace(A.order), A.index_dtype, A.tile[0]
    items, cuts = (xp.empty((0, 4), dtype) for _ in range(2))
    columns, masks = xp.empty((0, SLAB), dtype), xp.empty((0, LANES, height // 16), np.uint8)
    entries = xp.zeros(1, dtype), xp.empty(0, np.uint16), xp.empty(0, dtype)
    return Split(items, cuts, columns, masks, *entries, None, None, height, A.nnz, 0, 0)


# What is decided


def _decide(A: "SGT", costs: Costs) -> tuple[SlabChoice, ColumnCounts] | None:
    """Decide what each window gives, and count its columns; None if no window gives anything."""
    if A.tile[0] not in HEIGHTS or not A.nnz:
        return None
    step = max((step for step in STEPS if step * SAMPLE <= A.n_windows), default=1)
    looked_at = {"share": 1 / step, "doubt": DOUBT}
    if step > 1 and _choose(tile_slabs.figures(A, step), costs, A.tile[0], **looked_at) is None:
        return None
    counted = tile_slabs.count_columns(A)
    choice = _choose(counted.figures, costs, A.tile[0])
    return (choice, counted) if choice else None


def _choose(
    figures: Array, costs: Costs, height: int, *, share: float = 1.0, doubt: float = 1.0
) -> SlabChoice | None:
    """Choose how many entries a column needs to go to tiles, by window; None if none pay.

    ``share`` is that of all windows that is looked at, ``doubt`` that of what must be saved which
    is enough.
    """
    scale, options, n_windows = height / 64, _options(figures), len(figures)
    slabs, entries = options
    everything, used = entries[1], slabs > 0
    rows = costs.row * height  # on CUDA cores, of a window
    cost = slabs * (costs.slab * scale)
    cost += np.where(used, costs.window * scale, 0)
    cost += (everything - entries) * costs.left
    empty = n_windows - np.count_nonzero(used[1])  # they have zeros to write
    complete = cost[1].sum() + empty * (costs.window * scale)
    cost += np.where(used, costs.again * scale + rows, rows)
    cost[0] = everything + rows
    alone = cost[0].sum()
    best = cost.min(axis=0)
    least = MOST - ((cost == best) * _BEFORE_MOST).max(axis=0)  # the first; argmin is 10x slower
    cheapest = best.sum() + costs.launch * share  # of the kernel that CUDA cores run
    if complete <= cheapest:
        cheapest = complete
        least[:] = 1
    chosen = options[:, least, np.arange(n_windows)]
    ptr = np.zeros((2, n_windows + 1), np.int64)
    chosen.cumsum(axis=1, out=ptr[:, 1:])
    n_slabs, taken = ptr[:, -1].tolist()
    part = costs.longest_part(n_slabs / share)
    pieces = -(-chosen[0][chosen[0] > part] // part)  # blocks of each window
    cheapest += costs.launch * share + costs.piece * scale * pieces.sum()
    if costs.gain * (alone - cheapest) < doubt * (costs.gain - 1) * alone or not taken:
        return None
    least[least == 0] = NEVER
    return SlabChoice(least, ptr[0], ptr[1], n_slabs, taken)


def _options(figures: Array) -> Array:
    """Count slabs and entries of columns of at least 1, 2, ...: (2, MOST + 1, n_windows).

    Of each window; at 0 stands that none is taken.
    """
    result = np.zeros((2, MOST + 1, len(figures)), np.int64)
    result[0, 1:] = figures.T[:MOST]
    np.multiply(result[0, 1:MOST], np.arange(1, MOST)[:, None], out=result[1, 1:MOST])
    result[1, MOST] = figures.T[MOST]
    for n in range(MOST - 1, 0, -1):
        result[:, n] += result[:, n + 1]
    result[0] += SLAB - 1
    result[0] //= SLAB
    return result


def _items(slab_ptr: Array, alone: bool, part: int, dtype: DType) -> tuple[Array, Array, int]:
    """List the work of blocks: windows, those of many slabs in several parts."""
    slabs = slab_ptr[1:] - slab_ptr[:-1]
    pieces = -(-slabs // part)  # blocks of each window
    if alone:  # windows without entries have rows of zeros to write
        pieces = np.maximum(pieces, 1)
    ends = pieces.cumsum()
    window = np.arange(len(slabs)).repeat(pieces)
    of = pieces[window]
    nth = np.arange(len(window)) - (ends - pieces)[window]
    items = np.full((len(window), 4), -1, dtype)
    items[:, 0] = window
    items[:, 1] = slab_ptr[window] + slabs[window] * nth // of
    items[:-1, 2] = items[1:, 1]
    items[-1:, 2] = slab_ptr[-1]
    parts = np.flatnonzero(of > 1)
    items[parts, 3] = np.arange(len(parts))
    cut = np.flatnonzero(pieces > 1)
    ends = pieces[cut].cumsum()
    cuts = np.zeros((len(cut), 4), dtype)
    cuts[:, 0], cuts[:, 1], cuts[:, 2] = cut, ends - pieces[cut], ends
    return items, cuts, len(parts)
