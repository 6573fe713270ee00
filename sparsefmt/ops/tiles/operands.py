"""What a product by tiles reads beside features: the split on its device, factors, packed values.

An SGT brings tiles of its own; a structure goes by those that were prepared for the place of its
arrays in memory, so that a library op of torch takes the structure alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from ...formats.arrays import Array, finish, namespace, on_device_of
from ...formats.base import Built, Format
from ...formats.compressed import CSR
from ...formats.sgt import SGT
from ..engine.memory import memory_of
from ..engine.structure import Structure, all_tiles, built_at, structure_of
from . import costs as tile_costs
from .costs import Costs
from .split import Split

#: Address of the stream that every thread has by default, if CuPy is told so.
_PER_THREAD = 2


@dataclass(frozen=True, slots=True)
class TileStructure:
    """A ``Split`` that takes something, on a GPU, as the kernels see it: sizes and pointers."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    height: int
    n_items: int
    n_cuts: int
    n_parts: int
    items: int
    cuts: int
    columns: int
    masks: int
    starts: int
    cells: int
    n_cells: int
    taken: int
    rest: Structure | None


def tile_structure(split: Split, shape: tuple[int, int]) -> TileStructure:
    """Describe an SGT of that shape on a GPU; valid as long as the split lives."""
    arrays = split.items, split.cuts, split.columns, split.masks, split.starts, split.cells
    pointers = (array.data.ptr for array in arrays)
    sizes = split.items.dtype.name, split.height, len(split.items), len(split.cuts), split.n_parts
    rest = None if split.rest is None else structure_of(split.rest)
    counts = split.n_cells, split.taken
    fields: tuple[Any, ...] = (*shape, split.nnz, *sizes, *pointers, *counts, rest)
    return TileStructure(*fields)


class Numbers(NamedTuple):
    """Numbers of the entries in some order of the edge values; hold them until the launch."""

    tiles: Any  #: of each entry in tiles
    rest: Any  #: of each other entry; None if there are none


class Packed(NamedTuple):
    """Edge values as the kernels read them; all None for a product without any."""

    tiles: Any = None  #: of the entries in tiles, or of all cells: 0 where there is no entry
    rest: Any = None  #: of the other entries
    perm: Any = None  #: by which those are read


class Operands:
    """One split as kernels see it, and what products with it read, as arrays of one library.

    ``view`` gives its arrays to that library.  What is made later is made once, and finished: any
    stream may read it.
    """

    def __init__(self, split: Split, csr: CSR, view: Callable[[Array], Any] = lambda a: a) -> None:
        self.split, self.structure = split, tile_structure(split, csr.shape)
        rest = None if split.rest_perm is None else view(split.rest_perm)
        self._numbers = Numbers(view(split.perm), rest)
        self._csr, self._view, self._built = csr, view, Built()

    def numbers(self, perm: Array | None = None) -> Numbers:
        """Return the entries' numbers in CSR order, or those that ``perm`` gives for that order."""
        if perm is None:
            return self._numbers
        m, (tiles, rest) = memory_of(perm), self._numbers

        def build() -> tuple[Numbers, Any]:
            result = Numbers(m.take(perm, tiles), None if rest is None else m.take(perm, rest))
            if not m.capturing():
                m.finish(perm)
            return result, perm  # while this is there, nothing else lies at that address

        # In a capture it is memory of that CUDA graph.
        key = "numbers", m.pointer(perm)
        return self._built.ask(key, build, lambda _: not m.capturing())[0]

    def packed(self, values: Array, numbers: Array, *, baked: bool) -> Any:
        """Gather the values with those numbers, one by one or in the cells that have them."""
        m = memory_of(values)
        result = m.take(values, numbers)
        if not baked:
            return result
        places = self.places(values.itemsize)
        cells = m.zeros((self.split.n_cells,), m.dtype(values), values)
        cells[places] = result
        return cells

    def places(self, itemsize: int) -> Any:
        """Return the cell of each entry in tiles, for values of that size."""
        return self._built.ask(
            ("places", itemsize), lambda: self._view(self.split.places(itemsize))
        )

    def row_factors(self, row_scale: Array, shares: Array | None = None) -> tuple[Any, Any]:
        """Return what multiplies the sums of each row, and those of its entries in tiles.

        The latter is 0 where tiles have no entry of the row: 0 times Inf or NaN would not be 0.
        ``shares`` are given for means: 1 over the entries of each row.
        """
        if row_scale is None:
            return shares, shares
        rows = row_scale if shares is None else row_scale * shares
        outside = self.rows_outside()
        return rows, rows if outside is None else memory_of(rows).zero_where(rows, outside)

    def rows_outside(self) -> Any:
        """Return a mask of the rows of which tiles have no entry; None if there are none."""
        return self._built.ask("outside", self._rows_outside)

    def _rows_outside(self) -> Any:
        rest = self.split.rest
        with on_device_of(self._csr.indptr):
            ends = self._view(self._csr.indptr)
            if rest is not None:
                ends = ends - self._view(rest.indptr)
            inside = ends[1:] - ends[:-1]
            outside = inside == 0
            return outside if bool(outside.any()) else None  # synchronize!


# Where tiles come from


class OwnTiles:
    """The tiles of an SGT: splits and packed values are built once with it."""

    costs: Costs | None = None  #: instead of measured ones

    def __init__(self, A: SGT) -> None:
        self.sgt = A

    def operands(self, costs: Costs) -> Operands | None:
        """Return the operands; None where no entry pays on tensor cores."""
        A, split = self.sgt, self.sgt.split(costs)
        if not split.share:
            return None
        return A._built().ask(("operands", split), lambda: Operands(split, A._structure()))

    def shares(self) -> Any:
        """Return 1 over the entries of each row, in float32."""
        return self.sgt._built().ask("shares", lambda: _shares(self.sgt._structure()))

    def packed(self, operands: Operands, values: Array, perm: Array, *, baked: bool) -> Packed:
        """Return the values of the SGT, packed once for each stream."""
        if values is None:
            return Packed()
        split, numbers = operands.split, operands.numbers()

        def tiles(data: Array) -> Array:
            return operands.packed(data, numbers.tiles, baked=baked)

        def rest(data: Array) -> Array:
            return memory_of(data).take(data, numbers.rest)

        return Packed(
            self._packed(("tiles", split, baked), tiles),
            None if numbers.rest is None else self._packed(("rest", split), rest),
        )

    def _packed(self, key: tuple[Any, ...], pack: Callable[[Array], Array]) -> Array:
        """Pack the values, once for each stream."""
        data: Array = self.sgt.data
        m = memory_of(data)
        # In a capture it is only made when the graph is launched: nobody else may find it.
        stream, keep = m.stream(data), not m.capturing()

        def build() -> Array:
            made = pack(data)
            if keep and stream == _PER_THREAD:  # one address, a stream for each thread
                m.finish(made)
            return made

        return self.sgt._built_of_values().ask((*key, stream), build, lambda _: keep)


def _shares(csr: CSR) -> Array:
    lengths = csr.lengths.astype(np.float32)
    result = 1 / namespace(lengths).maximum(lengths, np.float32(1))
    finish(result)  # synchronize!
    return result


class PreparedTiles:
    """The tiles that products with a structure go by: for each kind of product a split of its own.

    Each is built by the first product of its kind, but not in a capture of a CUDA graph.
    ``shares`` are 1 over the entries of each row in float32, ``refuses_float32`` gives the reasons
    why features of float32 may not be rounded now.
    """

    def __init__(
        self,
        sgt: SGT,
        shares: Array,
        *,
        costs: Costs | None,
        view: Callable[[Array], Any],
        refuses_float32: Callable[[], list[str]],
    ) -> None:
        self.sgt, self.costs, self.refuses_float32 = sgt, costs, refuses_float32
        self._shares, self._view = shares, view
        self._built = Built()
        all_tiles.add(ref(self, all_tiles.discard))

    def operands(self, costs: Costs) -> Operands | None:
        """Return the operands; None where no entry pays, or a capture would have to build them."""
        result = self._built.parts
        if costs not in result and not memory_of(self._shares).capturing():
            self._built.ask(costs, lambda: self.build(costs))
        return result.get(costs)

    def build(self, costs: Costs) -> Operands | None:
        """Build the operands with all that they may need: a capture could not."""
        split = self.sgt.split(costs)
        if not split.share:
            return None
        result = Operands(split, self.sgt._structure(), self._view)
        result.rows_outside()
        for itemsize in (2, 4) if split.baked else ():
            result.places(itemsize)
        return result

    def shares(self) -> Any:
        """Return 1 over the entries of each row, in float32."""
        return self._shares

    def packed(self, operands: Operands, values: Array, perm: Array, *, baked: bool) -> Packed:
        """Copy the values of entries in tiles into their order; the others are read by ``perm``."""
        if values is None:
            return Packed()
        numbers = operands.numbers(perm)
        return Packed(operands.packed(values, numbers.tiles, baked=baked), values, numbers.rest)


def tiles_of(A: Format | Structure) -> OwnTiles | PreparedTiles | None:
    """Find the tiles that a matrix brings, or that were prepared for it; None without any."""
    if type(A) is Structure:
        built = built_at(A) if all_tiles else None
        return None if built is None else built.parts.get("tiles")
    return OwnTiles(A) if isinstance(A, SGT) else None


def costs_of(
    tiles: OwnTiles | PreparedTiles, op: str, x: Array, costs: Costs | None, *,
    weighted: bool = False,
) -> Costs | None:  # fmt: skip
    """Choose the given costs, else those measured for such a product; None: CUDA cores do best."""
    return costs or tiles.costs or tile_costs.measured(op, x.itemsize, weighted, x.shape[-1])


def find_operands(
    A: Format | Structure, op: str, x: Array, costs: Costs | None, *, weighted: bool = False
) -> tuple[OwnTiles | PreparedTiles, Operands] | None:
    """Find the tiles that such a product goes by, and what it reads of them; None without any."""
    tiles = tiles_of(A)
    chosen = tiles and costs_of(tiles, op, x, costs, weighted=weighted)
    operands = tiles and chosen and tiles.operands(chosen)
    return (tiles, operands) if tiles and operands else None
