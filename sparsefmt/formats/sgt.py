"""SGT: sparse graph translation into condensed tiles for matrix units (TC-GNN)."""

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import DtypeError, ShapeError
from . import checks
from .arrays import Array, allocating, finish, namespace, on_device_of
from .base import Format, FormatName, Level
from .compressed import CSR

if TYPE_CHECKING:
    from ..ops.tiles.costs import Costs
    from ..ops.tiles.split import Split

DEFAULT_TILE = (16, 8)
MAX_TILE_CELLS = 65536
#: In ``columns``: this slot of the window's last tile stands for no column.
PADDING = -1


def slot_dtype(tile: tuple[int, int]) -> np.dtype[Any]:
    """Choose the smallest dtype that numbers the cells of a tile."""
    return np.dtype(np.uint8 if tile[0] * tile[1] <= 256 else np.uint16)


def check_tile(tile: object) -> tuple[int, int]:
    """Check a tile's shape and return it: two positive integers, at most 65 536 cells."""
    try:
        height, width = (checks.as_index(size) for size in tile)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"tile is {tile!r}: give two integers (height, width).") from error
    if height < 1 or width < 1 or height * width > MAX_TILE_CELLS:
        raise ShapeError(
            f"tile is {(height, width)}: sizes are positive and a tile has at most "
            f"{MAX_TILE_CELLS} cells, use (16, 8) for instance."
        )
    return height, width


@dataclass(frozen=True, eq=False, repr=False)
class SGT(Format):
    """Condensed tiles: the columns that a window of rows uses, packed side by side.

    ``height`` consecutive rows form a window.  Its distinct columns, ascending, are packed
    ``width`` at a time into tiles; the window's last tile is padded.  An entry lies in the tile
    that holds its column, at slot ``local_row * width + local_column``.  Entries are ordered by
    (window, column, place in CSR), so those of a tile are contiguous.  Lossless: order within a
    row, duplicates and explicit zeros survive.  Source: TC-GNN (ATC'23), section 3, algorithm 1.

    Build one with ``A.tosgt(tile)``.

    Parameters
    ----------
    window_ptr : array, shape (n_windows + 1,)
        First tile of each window.
    columns : array, shape (n_tiles, width)
        Column of ``A`` behind each tile column, -1 where the window has none left.
    tile_ptr : array, shape (n_tiles + 1,)
        First entry of each tile.
    slots : array, shape (nnz,)
        Cell of each entry in its tile; uint8 to 256 cells, else uint16.
    order : array, shape (nnz,)
        Place of each entry in CSR order: the map back.
    data : array, shape (nnz,), optional
        Values **in CSR order**: the value of the e-th tiled entry is ``data[order[e]]``.
    shape : (n_rows, n_cols)
        Need not be multiples of the tile.
    tile : (height, width)
    validate : "full" or "cheap"
        How much to check, see ``check``.

    Raises
    ------
    FormatError, ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arrays do not form such a matrix.
    """

    window_ptr: Array  #: (n_windows + 1,) first tile of each window
    columns: Array  #: (n_tiles, width) column behind each tile column, -1 for padding
    tile_ptr: Array  #: (n_tiles + 1,) first entry of each tile
    slots: Array  #: (nnz,) cell in the tile
    order: Array  #: (nnz,) place in CSR order
    data: Array | None = None  #: (nnz,) values in CSR order
    shape: tuple[int, int] = field(kw_only=True)
    tile: tuple[int, int] = field(default=DEFAULT_TILE, kw_only=True)
    validate: InitVar[Level] = field(default="full", kw_only=True)

    format: ClassVar[FormatName] = "sgt"
    _array_fields: ClassVar[tuple[str, ...]] = (
        "window_ptr",
        "columns",
        "tile_ptr",
        "slots",
        "order",
        "data",
    )

    @property
    def nnz(self) -> int:
        """Return the number of stored entries, explicit zeros and duplicates counted."""
        return len(self.order)

    @property
    def T(self) -> "SGT":
        """Return the transpose in tiles of the same shape; a conversion, not a view."""
        return self.tocsr().T.tosgt(self.tile)

    @property
    def n_windows(self) -> int:
        """Return the number of row windows: ``ceil(n_rows / height)``."""
        return -(-self.n_rows // self.tile[0])

    @property
    def tile_count(self) -> int:
        """Return the number of tiles after condensing."""
        return len(self.columns)

    @property
    def tile_density(self) -> float:
        """Return the share of the tiles' cells that hold an entry; 0 for a matrix without tiles.

        Counted at the first call, which synchronises with a GPU.
        """
        cells = self.tile_count * self.tile[0] * self.tile[1]
        return self._built().ask("filled", self._count_filled) / cells if cells else 0.0

    def _count_filled(self) -> int:
        """Count the cells that hold an entry: repeated ones lie side by side."""
        with on_device_of(self.slots), allocating(f"slots of {self.nnz} entries"):
            new = namespace(self.slots).ones(self.nnz, bool)
            new[1:] = self.slots[1:] != self.slots[:-1]
            new[self.tile_ptr[:-1][self.tile_ptr[:-1] < self.nnz]] = True
            return int(new.sum())  # synchronize!

    @property
    def dense_tile_count(self) -> int:
        """Return the number of tiles that hold an entry when columns are *not* condensed."""
        width = self.tile[1]
        xp = namespace(self.columns)
        with on_device_of(self.columns), allocating(f"columns of {self.tile_count} tiles"):
            blocks = self.columns // width  # padding, -1, becomes block -1
            tiles = xp.arange(self.tile_count, dtype=self.index_dtype)
            window = xp.searchsorted(self.window_ptr, tiles, side="right")
            blocks, window = blocks.ravel(), xp.repeat(window, width)
            new = blocks >= 0
            new[1:] &= (blocks[1:] != blocks[:-1]) | (window[1:] != window[:-1])
            return int(new.sum())  # synchronize!

    @property
    def reduction(self) -> float:
        """Return the share of tiles that condensing saves (TC-GNN, figure 7): 0 saves none."""
        dense = self.dense_tile_count
        return 1.0 - self.tile_count / dense if dense else 0.0

    def split(self, costs: "Costs | None" = None) -> "Split":
        """Split the entries into slabs for matrix units, and the rest.

        Built once for each ``costs``; shared by what ``with_data`` gives.  Synchronises with a GPU
        when it builds one.  Like all that is built it holds for the arrays that were given: do not
        write to them.

        Parameters
        ----------
        costs : Costs, optional
            What decides; by default as measured of SpMM in float32 without values.  Products take
            those that were measured of their kind.

        Raises
        ------
        DtypeError
            If ``costs`` are no ``Costs``.
        """
        from ..ops.tiles import split
        from ..ops.tiles.costs import Costs, checked

        costs = checked(costs) or Costs()
        return self._built().ask(
            ("split", costs), lambda: split.split(self, self._structure(), costs)
        )

    def _structure(self) -> CSR:
        """Return the CSR behind this SGT, without values: ``order`` and ``data`` go by it.

        Of an SGT that was not converted from one, or came from another process or device, it is
        built at the first call.
        """

        def build() -> CSR:
            csr = self.with_data(None).tocsr()
            finish(csr.indptr)  # synchronize!
            return csr

        return self._built().ask("csr", build)

    def _built_arrays(self) -> list[Array]:
        """Return the arrays of its splits and of its CSR, which products may read."""
        arrays: list[Array] = []
        for _, part in self._built().items():
            if isinstance(part, CSR):
                arrays += [part.indptr, part.indices]
            elif hasattr(part, "arrays"):  # a split
                arrays += part.arrays()
        return arrays

    def _check_cheap(self) -> None:
        object.__setattr__(self, "tile", check_tile(self.tile))
        checks.indices(window_ptr=self.window_ptr, tile_ptr=self.tile_ptr, order=self.order)
        if self.columns.ndim != 2 or self.columns.shape[1] != self.tile[1]:
            raise ShapeError(
                f"columns has shape {self.columns.shape}: give (n_tiles, width) with "
                f"width == {self.tile[1]}."
            )
        checks.index_like("columns", self.columns, "window_ptr", self.window_ptr)
        checks.sizes_fit(self.shape, self.nnz, self.index_dtype)
        n_pointers = self.n_windows + 1
        checks.pointers("window_ptr", self.window_ptr, n_pointers, "one per window and an end")
        n_pointers = self.tile_count + 1
        checks.pointers("tile_ptr", self.tile_ptr, n_pointers, "one per tile and an end")
        checks.pointers("slots", self.slots, self.nnz, "one per stored entry, as in order")
        checks.same_device("slots", self.slots, "window_ptr", self.window_ptr)
        if self.slots.dtype != slot_dtype(self.tile):
            raise DtypeError(
                f"slots.dtype is {self.slots.dtype} but tiles of {self.tile} number their cells in "
                f"{slot_dtype(self.tile)}: cast with .astype()."
            )
        checks.values(self.data, (self.nnz,), like=self.order)

    def _check_full(self) -> None:
        checks.tiles(self)
