"""Spaces of matrices that a strategy may draw: options, their checks, and entries that meet them.

No randomness and no hypothesis here; ``sparsefmt.testing`` draws integers and turns them into
entries with the functions of this module.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias, TypedDict, TypeGuard

import numpy as np

from ..errors import ShapeError, SparseFmtError
from ..formats import checks
from ..formats.arrays import Array, DType
from ..formats.base import Format
from ..formats.compressed import COO, CSC, CSR

Shape: TypeAlias = tuple[int, int]
Cells: TypeAlias = tuple[Array, Array]

#: TC-GNN's tile, those of other matrix units, and some that fit nothing.
TILES = ((16, 8), (8, 8), (16, 16), (1, 1), (3, 5))
#: Feature widths around the sizes of a warp and of a vector load.
WIDTHS = (0, 1, 7, 16, 33, 64, 128, 257)

#: A row that stores this many entries or more is a hub.
HUB = 5
#: Nonzero magnitudes start here, so that products of two do not underflow in float16.
LEAST_MAGNITUDE = 1 / 64


class ValueOptions(TypedDict, total=False):
    """Options of drawn values; all keywords, all with a default."""

    dtype: Any  #: a value dtype or a strategy of them; ``value_dtypes()`` if left out
    max_magnitude: float | None  #: at least 1; 16.0 if left out, None for all the dtype holds
    allow_nan: bool  #: False if left out
    allow_infinity: bool  #: False if left out


class MatrixOptions(ValueOptions, total=False):
    """Options of drawn matrices; all keywords, all with a default.

    A flag that is True (the default of each) says that the feature may occur, False that it never
    does.
    """

    index_dtype: Any  #: int32, int64 or a strategy of them; either if left out
    shape: Any  #: (n_rows, n_cols) or a strategy of them; sides up to ``max_side`` if left out
    max_side: int  #: 8 if left out; for a shape that is left out
    min_nnz: int  #: stored entries, at least; 0 if left out
    max_nnz: int | None  #: stored entries, at most; 24 if left out, or what the rest asks for
    weighted: bool | None  #: whether there are values; None, the default, for either
    duplicates: bool  #: a cell may be stored more than once
    explicit_zeros: bool  #: a stored value may be 0.0 or -0.0
    unsorted: bool  #: entries of a row (CSC: column; COO: all) in any order, else ascending
    empty_rows: bool  #: a row may store nothing
    hubs: bool  #: a row may store 5 entries or more
    self_loops: bool  #: a diagonal cell may be stored
    rectangular: bool  #: the shape may have two different sides


@dataclass(frozen=True, kw_only=True)
class Values:
    """``ValueOptions`` with their defaults."""

    dtype: Any = None
    max_magnitude: float | None = 16.0
    allow_nan: bool = False
    allow_infinity: bool = False

    def fault(self) -> str | None:
        """Return what is wrong with the options, None if they can hold together."""
        if fault := self._flag_fault("allow_nan", "allow_infinity"):
            return fault
        top = self.max_magnitude
        if top is not None and not (isinstance(top, float | int) and 1 <= top < float("inf")):
            return f"max_magnitude={top!r} must be None or a number of at least 1"
        return None

    def _flag_fault(self, *names: str) -> str | None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                return f"{name}={getattr(self, name)!r} must be True or False"
        return None

    def only_values(self) -> "Values":
        """Return the options without those of a matrix and without the dtype: a key for caches."""
        flags = {"allow_nan": self.allow_nan, "allow_infinity": self.allow_infinity}
        return Values(max_magnitude=self.max_magnitude, **flags)


@dataclass(frozen=True, kw_only=True)
class Space(Values):
    """``MatrixOptions`` with their defaults, and their consequences."""

    index_dtype: Any = None
    shape: Any = None
    max_side: int = 8
    min_nnz: int = 0
    max_nnz: int | None = None
    weighted: bool | None = None
    duplicates: bool = True
    explicit_zeros: bool = True
    unsorted: bool = True
    empty_rows: bool = True
    hubs: bool = True
    self_loops: bool = True
    rectangular: bool = True

    def fault(self) -> str | None:
        """Return what is wrong with the options, None if they can hold together."""
        return super().fault() or self._type_fault() or self._conflict() or self._shape_fault()

    def _type_fault(self) -> str | None:
        flags = "duplicates", "explicit_zeros", "unsorted", "empty_rows", "hubs", "self_loops"
        if fault := self._flag_fault(*flags, "rectangular"):
            return fault
        for name in ("max_side", "min_nnz", "max_nnz"):
            if not (is_size(getattr(self, name)) or (name, self.max_nnz) == ("max_nnz", None)):
                return f"{name}={getattr(self, name)!r} must be a non-negative integer"
        if self.weighted not in (True, False, None):
            return f"weighted={self.weighted!r} must be True, False or None"
        return None

    def _conflict(self) -> str | None:
        if self.max_nnz is not None and self.min_nnz > self.max_nnz:
            return f"min_nnz={self.min_nnz} is larger than max_nnz={self.max_nnz}"
        if self.weighted is False:
            for name in ("dtype", "allow_nan", "allow_infinity"):
                if getattr(self, name) is not None and getattr(self, name) is not False:
                    return f"{name}={getattr(self, name)!r} needs values, but weighted=False"
        return None

    def _shape_fault(self) -> str | None:
        """Return a text if no shape, or not the fixed one, meets all the other options."""
        if self.shape is None:
            none = f"no shape with sides up to max_side={self.max_side} meets the other options"
            return None if self.possible_rows() else none
        try:
            rows, cols = checks.shape(self.shape)
        except SparseFmtError as error:
            return str(error)
        if not self.rectangular and rows != cols:
            return f"shape={self.shape!r} is not square, but rectangular=False"
        if not self.holds((rows, cols)):
            return f"shape={self.shape!r} cannot meet the other options: {self!r}"
        return None

    # Shapes

    def limit(self, shape: Shape) -> int:
        """Return the most entries that a matrix of this shape may have."""
        if self.max_nnz is not None:
            return self.max_nnz
        return max(24, self.min_nnz, 0 if self.empty_rows else shape[0])

    def row_room(self, row: int, shape: Shape) -> int:
        """Return the number of columns in which a row may store entries."""
        return shape[1] - (not self.self_loops and row < shape[1])

    def holds(self, shape: Shape) -> bool:
        """Return True if a matrix of this shape can meet the options."""
        n_rows, square = shape[0], min(shape)
        room = 0
        for count, first in ((square, 0), (n_rows - square, square)):
            cells = self.row_room(first, shape) if count else 0
            if count and not cells and not self.empty_rows:
                return False
            each = self.limit(shape) if cells and self.duplicates else cells
            room += count * (each if self.hubs else min(each, HUB - 1))
        least = max(self.min_nnz, 0 if self.empty_rows else n_rows)
        return least <= min(room, self.limit(shape))

    def possible_rows(self) -> list[int]:
        """Return each ``n_rows`` for which some ``n_cols`` will do."""
        widest = (lambda n: self.max_side) if self.rectangular else (lambda n: n)
        return [n for n in range(self.max_side + 1) if self.holds((n, widest(n)))]

    def possible_cols(self, n_rows: int) -> tuple[int, int]:
        """Return the least and largest ``n_cols`` for that many rows; all between will do too."""
        if not self.rectangular:
            return n_rows, n_rows
        sides = range(self.max_side + 1)
        least = bisect_left(sides, True, key=lambda n_cols: self.holds((n_rows, n_cols)))
        return least, self.max_side

    # Entries

    def settle(self, wanted: Iterable[Shape], shape: Shape, shift: int) -> list[Shape]:
        """Choose the wanted entries that the options allow, and add those that they demand."""
        entries: list[Shape] = []
        degree: dict[int, int] = {}
        seen: set[Shape] = set()

        def add(entry: Shape, limit: int) -> None:
            full = not self.hubs and degree.get(entry[0], 0) >= HUB - 1
            if len(entries) < limit and not full and (self.duplicates or entry not in seen):
                entries.append(entry)
                seen.add(entry)
                degree[entry[0]] = degree.get(entry[0], 0) + 1

        limit = self.limit(shape)
        for row, col in wanted:
            if row == col and not self.self_loops:
                col = (col + 1) % shape[1]
            if row != col or self.self_loops:
                add((row, col), limit - (0 if self.empty_rows else shape[0]))
        if not self.empty_rows:
            for row in set(range(shape[0])) - degree.keys():
                add(self._nth(row, shift + row, shape), limit)
        while len(entries) < self.min_nnz:
            for entry in self._first_cells(shape):
                add(entry, self.min_nnz)
        if not self.unsorted:
            entries.sort()
        return entries

    def _nth(self, row: int, place: int, shape: Shape) -> Shape:
        col = place % self.row_room(row, shape)
        return row, col + (not self.self_loops and col >= row)

    def _first_cells(self, shape: Shape) -> Iterator[Shape]:
        for row in range(shape[0]):
            for place in range(min(self.row_room(row, shape), self.limit(shape))):
                yield self._nth(row, place, shape)


def size(value: object) -> int:
    """Check that ``value`` is a size, and return it as a Python integer."""
    if not is_size(value):
        raise ShapeError(f"a size is {value!r}: give a non-negative integer.")
    return int(value)


def without_small(least: float, zeros: bool, value: float) -> float:
    """Round a value below ``least`` to 0.0; to 1.0 where there are to be no zeros."""
    if abs(value) >= least:
        return value
    return (value if value == 0 else 0.0) if zeros else 1.0


def is_size(value: object) -> TypeGuard[int]:
    """Return True for a non-negative integer."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def value_types(*, bfloat16: bool = True) -> list[np.dtype[Any]]:
    """Return the dtypes of values, simplest first; bfloat16 where ``ml_dtypes`` is installed."""
    dtypes = [np.dtype(name) for name in ("float32", "float64", "float16")]
    if bfloat16 and find_spec("ml_dtypes") is not None:
        from ml_dtypes import bfloat16 as scalar

        dtypes.append(np.dtype(scalar))
    return dtypes


# Entries and values into arrays


def build(format: str, entries: Array, data: Array | None, shape: Shape, index: DType) -> Format:
    """Build a matrix of ``(nnz, 2)`` entries, in their order as far as the format has one."""
    row, col = entries.astype(index).T
    if format == "coo":
        return COO(row, col, data, shape=shape)
    major, minor, size = (row, col, shape[0]) if format == "csr" else (col, row, shape[1])
    order = np.argsort(major, kind="stable")
    indptr = np.searchsorted(major[order], np.arange(size + 1)).astype(index)
    kind = CSR if format == "csr" else CSC
    return kind(indptr, minor[order], None if data is None else data[order], shape=shape)


def seeded_values(seed: int, count: int, dtype: DType, values: Values, zeros: bool) -> Array:
    """Draw values that the options allow, special ones included; all ones for seed 0."""
    if seed == 0:
        return np.ones(count, dtype)
    rng = np.random.default_rng(seed)
    least, top = magnitudes(np.dtype(dtype), values.max_magnitude)
    drawn = rng.uniform(least, top, count) * rng.choice([-1.0, 1.0], count)
    special = [0.0, -0.0] * zeros + [np.nan] * values.allow_nan
    special += [np.inf, -np.inf] * values.allow_infinity
    if special:
        drawn = np.where(rng.random(count) < 0.1, rng.choice(special, count), drawn)
    return drawn.astype(dtype)


def magnitudes(dtype: np.dtype[Any], top: float | None) -> tuple[float, float]:
    """Return the least and largest finite magnitude of nonzero values, both exact in ``dtype``."""
    if dtype.name == "bfloat16":
        largest, normal, stored = float.fromhex("0x1.fep127"), 2.0**-126, np.dtype(np.float32)
    else:
        limits, stored = np.finfo(dtype), dtype
        largest, normal = float(limits.max), float(limits.tiny)
    if top is None or top >= largest:
        return (normal if top is None else LEAST_MAGNITUDE), largest
    rounded = stored.type(top)
    return LEAST_MAGNITUDE, float(
        rounded if rounded <= top else np.nextafter(rounded, stored.type(0))
    )


# Graphs by kind: entries of a shape from ``a`` and ``b``, which pick a place or a size as a kind
# needs them.  Any non-negative integers will do, and smaller ones give simpler graphs.

#: Longest side of a dense block, widest band, most columns of an isolated row's neighbour.
BLOCK, BAND, FEW = 6, 2, 3


def empty(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return no entry at all."""
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


def one_row(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return entries of row ``a`` alone, in every ``b + 1``-th column."""
    col = np.arange(0, n_cols if n_rows else 0, b % 3 + 1)
    return np.full(len(col), a % max(n_rows, 1)), col


def star(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return a full row ``a``, and an entry of every row in column ``b``."""
    hub, centre = a % max(n_rows, 1), b % max(n_cols, 1)
    spokes = np.arange(n_cols if n_rows else 0)
    rim = np.flatnonzero(np.arange(n_rows) != hub) if n_cols else spokes
    row = np.concatenate([np.full(len(spokes), hub), rim])
    return row, np.concatenate([spokes, np.full(len(rim), centre)])


def power_law(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return ``n_cols / (i + 1)`` entries of each row ``i``, at least one: Zipf's law."""
    rank = np.arange(n_rows if n_cols else 0)
    degree = np.maximum(n_cols // (rank + 1), 1)
    row = np.repeat(rank, degree)
    place = np.arange(len(row)) - np.repeat(np.cumsum(degree) - degree, degree)
    return row, (a + b * row + place) % max(n_cols, 1)


def banded(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return the entries at most ``a`` columns off the diagonal (a chain, a mesh)."""
    band = np.arange(-(a % (BAND + 1)), a % (BAND + 1) + 1)
    row = np.repeat(np.arange(n_rows), len(band))
    col = row + np.tile(band, n_rows)
    inside = (col >= 0) & (col < n_cols)
    return row[inside], col[inside]


def dense_block(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return every cell of one block, nothing outside (a clique)."""
    top, left = a % max(n_rows, 1), b % max(n_cols, 1)
    height, width = min(BLOCK, n_rows - top), min(BLOCK, n_cols - left)
    row, col = np.divmod(np.arange(height * width), max(width, 1))
    return row + top, col + left


def isolated_rows(n_rows: int, n_cols: int, a: int, b: int) -> Cells:
    """Return a few entries of every ``a + 2``-th row; the rows between are empty."""
    rows = np.arange(b % 2, n_rows, a % 4 + 2)
    few = min(FEW, n_cols)
    row = np.repeat(rows, few)
    return row, (row + np.tile(np.arange(few), len(rows))) % max(n_cols, 1)


KINDS: dict[str, Callable[[int, int, int, int], Cells]] = {
    kind.__name__: kind
    for kind in (empty, one_row, star, power_law, banded, dense_block, isolated_rows)
}


def scatter(row: Array, col: Array, shape: tuple[int, int], seed: int) -> Cells:
    """Rename the vertices of a graph, and put its entries into another order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(row))
    return rng.permutation(shape[0])[row[order]], rng.permutation(shape[1])[col[order]]
