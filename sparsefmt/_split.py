"""Which entries of an SGT go to matrix units, in the layout those read, and which do not.

What concerns windows is decided here, on the CPU and by NumPy, so that all devices decide alike;
``_slabs`` counts and places the entries.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from . import _primitives as primitives
from . import _slabs
from ._arrays import Array, allocating, finish, namespace, on_device_of
from ._cells import LANES, SLAB, place
from ._costs import Costs
from ._slabs import NEVER, Held, Plan, Slabs
from .compressed import CSR

if TYPE_CHECKING:
    from .sgt import SGT

#: Heights of windows that the kernels are made for.
HEIGHTS = (16, 32, 64, 128)
#: Windows that are looked at first, at least.
SAMPLE = 1024
#: Steps between them: primes, so that what repeats itself in a matrix does not hide between them.
STEPS = (7, 11, 17, 31, 61, 127, 251, 509, 1021, 2039, 4093, 8191, 16381, 32749)
#: Share of the cells from which values are kept of all.
BAKED = 0.25
#: Share of what must be saved that a sample has to save.
DOUBT = 0.5


@dataclass(frozen=True, eq=False)
class Split:
    """The entries of an SGT that go to matrix units, in slabs of 16 columns; and the rest.

    A window keeps those columns that hold enough of its entries, side by side, 16 a slab.  A slab
    has one bit for each of its cells that says whether it holds an entry, and its entries behind
    one another, by tile of 16 rows, column and place in CSR order.  Of entries that share a cell
    the first counts, the others belong to the rest.

    Where CUDA cores do best alone nothing is taken: there is no item, no slab, and no rest either,
    since the CSR itself is what to use.
    """

    items: Array  #: (n_items, 4) window, first slab, end, and the part it sums into or -1
    cuts: Array  #: (n_cuts, 4) window of several parts, first part, end, 0
    columns: Array  #: (n_slabs, 16) columns; behind the last of a window that one again
    masks: Array  #: (n_slabs, 32, height / 16) uint8, bits as ``_cells.mask_bit`` numbers them
    starts: Array  #: (n_slabs * height / 16 + 1,) first entry of each slab and tile of 16 rows
    cells: Array  #: (taken,) uint16, cell of each entry in its slab: ``_cells.cell``
    perm: Array  #: (taken,) place of each entry in CSR order
    rest: CSR | None  #: the other entries, without values; None if there are none, or all are
    rest_perm: Array | None  #: their places in CSR order
    height: int
    nnz: int  #: of the SGT
    taken: int  #: entries on matrix units
    n_parts: int  #: sums of part of a window that are kept for a while

    @property
    def share(self) -> float:
        """Share of the entries that matrix units take."""
        return self.taken / self.nnz if self.nnz else 0.0

    @property
    def n_cells(self) -> int:
        """Of all slabs together."""
        return len(self.columns) * SLAB * self.height

    @property
    def baked(self) -> bool:
        """Whether slabs are so well filled that a value for each cell is the shortest way."""
        return self.taken >= BAKED * self.n_cells > 0

    def places(self, itemsize: int) -> Array:
        """(taken,) int64: which cell has each entry in tiles, for values of that size."""
        xp, tiles = namespace(self.cells), self.height // 16
        if not self.taken:
            return xp.zeros(0, np.int64)
        with on_device_of(self.cells):
            slab = primitives.expand(xp.ascontiguousarray(self.starts[::tiles]), self.taken)
            cells = place(self.cells.astype(np.int64), itemsize)
            found = slab.astype(np.int64) * (SLAB * self.height) + cells
        finish(found)  # synchronize!
        return found


def split(A: "SGT", csr: CSR, costs: Costs) -> Split:
    """Choose for every window what its columns need to hold, and gather those that hold it.

    Of many windows every k-th is looked at first, one or two thousand: where matrix units save not
    half of what they must, nothing is taken.  Other matrices are looked at as a whole.

    On a GPU it is finished when this returns, so that any stream may use it.
    """
    with on_device_of(A.order), allocating(f"the split of {A!r}"):
        found = _split(A, csr, costs)
    finish(A.order)  # synchronize!
    return found


def _split(A: "SGT", csr: CSR, costs: Costs) -> Split:
    xp, dtype = namespace(A.order), A.index_dtype
    plan, held = _decide(A, costs)
    slabs = _nothing(A) if held is None else _slabs.gather(A, held, plan)
    rest, rest_perm = None, None
    if 0 < plan.taken < A.nnz:
        rest, rest_perm = _slabs.remaining(csr, slabs.taken, A.nnz - plan.taken)
    items, cuts, n_parts = _items(
        plan.slab_ptr, plan.taken == A.nnz, costs.longest_part(plan.n_slabs)
    )
    return Split(
        items=xp.asarray(items.astype(dtype)),
        cuts=xp.asarray(cuts.astype(dtype)),
        columns=slabs.columns.reshape(-1, SLAB),
        masks=slabs.masks.reshape(plan.n_slabs, LANES, A.tile[0] // 16),
        starts=slabs.starts,
        cells=slabs.cells,
        perm=slabs.perm,
        rest=rest,
        rest_perm=rest_perm,
        height=A.tile[0],
        nnz=A.nnz,
        taken=plan.taken,
        n_parts=n_parts,
    )


def _nothing(A: "SGT") -> Slabs:
    xp, dtype = namespace(A.order), A.index_dtype
    columns, starts, perm = (xp.zeros(size, dtype) for size in (0, 1, 0))
    masks, cells, taken = (xp.zeros(0, kind) for kind in (np.uint8, np.uint16, np.uint32))
    return Slabs(columns, masks, starts, cells, perm, taken)


# What is decided


def _decide(A: "SGT", costs: Costs) -> tuple[Plan, Held | None]:
    """What each window gives, of no window if none does; and then what its columns hold."""
    nothing = Plan(np.zeros(0, np.uint8), np.zeros(1, np.int64), 0), None
    if A.tile[0] not in HEIGHTS or not A.nnz:
        return nothing
    step = max((one for one in STEPS if one * SAMPLE <= A.n_windows), default=1)
    looked_at = {"share": 1 / step, "doubt": DOUBT}
    if step > 1 and _choose(_slabs.figures(A, step), costs, A.tile[0], **looked_at) is None:
        return nothing
    held = _slabs.hold(A)
    plan = _choose(held.figures, costs, A.tile[0])
    return (plan, held) if plan else nothing


def _choose(
    figures: Array, costs: Costs, height: int, *, share: float = 1.0, doubt: float = 1.0
) -> Plan | None:
    """The cheapest of: all columns everywhere, or what each window does best; None for nothing.

    ``share`` is that of all windows that is looked at, ``doubt`` that of what must be saved which
    is enough.
    """
    scale, options = height / 64, _options(figures)
    number, everything = options[0]
    rows = costs.row * height  # on CUDA cores, of a window
    best, least = everything + rows, np.full(len(figures), NEVER, np.uint8)
    slabs, taken = np.zeros_like(number), np.zeros_like(everything)
    alone, whole = best.sum(), 0.0
    for n, (number, entries) in enumerate(options, start=1):
        used = number > 0
        cost = number * (costs.slab * scale) + used * (costs.window * scale)
        cost += costs.left * (everything - entries)
        if n == 1:  # windows without entries have zeros to write
            whole = cost.sum() + (~used).sum() * (costs.window * scale)
        cost += used * (costs.again * scale) + rows
        better = cost < best
        for of, to in ((cost, best), (n, least), (number, slabs), (entries, taken)):
            np.copyto(to, of, where=better, casting="unsafe")
    cheapest = best.sum() + costs.launch * share  # of the kernel that CUDA cores run
    if whole <= cheapest:
        cheapest, (slabs, taken) = whole, options[0]
        least[:] = 1
    pieces = _pieces(slabs, costs.longest_part(slabs.sum() / share))
    cheapest += costs.launch * share + costs.piece * scale * pieces[pieces > 1].sum()
    if costs.gain * (alone - cheapest) < doubt * (costs.gain - 1) * alone or not taken.any():
        return None
    return Plan(least, primitives.offsets(slabs, np.int64), int(taken.sum()))


def _options(figures: Array) -> list[tuple[Array, Array]]:
    """Slabs and entries of each window if columns must hold at least 1, 2, ... entries."""
    *columns, many = np.ascontiguousarray(figures.T)
    entries = [n * one for n, one in enumerate(columns[:-1], start=1)]
    columns, entries = (list(accumulate(one[::-1]))[::-1] for one in (columns, [*entries, many]))
    return [((c + (SLAB - 1)) // SLAB, e) for c, e in zip(columns, entries, strict=True)]


def _pieces(slabs: Array, part: int) -> Array:
    """How many blocks each window goes to."""
    return -(-slabs // part)


def _items(slab_ptr: Array, alone: bool, part: int) -> tuple[Array, Array, int]:
    """Work for blocks: windows, those of many slabs in several parts."""
    slabs = np.diff(slab_ptr)
    pieces = _pieces(slabs, part)
    if alone:  # windows without entries have rows of zeros to write
        pieces = np.maximum(pieces, 1)
    ptr = primitives.offsets(pieces, np.int64)
    window = primitives.expand(ptr, int(ptr[-1]))
    of = pieces[window]
    begin = slab_ptr[window] + slabs[window] * (np.arange(len(window)) - ptr[window]) // of
    slot = np.where(of > 1, np.cumsum(of > 1) - 1, -1)
    cut = np.flatnonzero(pieces > 1)
    first = slot[ptr[cut]]
    cuts = np.stack([cut, first, first + pieces[cut], np.zeros_like(cut)], axis=1)
    items = np.stack([window, begin, np.append(begin, slab_ptr[-1])[1:], slot], axis=1)
    return items, cuts, int(pieces[cut].sum())
