"""Statistics of a matrix: degrees, symmetry, bandwidth, and how its entries fill tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from .errors import DtypeError, ShapeError
from .formats import primitives
from .formats.arrays import Array, allocating, namespace, on_device_of
from .formats.base import Format
from .formats.compressed import CSR, Compressed
from .formats.sgt import SGT, check_tile

Tile = tuple[int, int]

#: TC-GNN's and FlashSparse's shapes, and the square one of older matrix units.
TILES: tuple[Tile, ...] = ((8, 8), (16, 8), (16, 16))


@dataclass(frozen=True)
class Degrees:
    """Statistics of the stored entries of each row (in-degrees) or column (out-degrees).

    The Gini coefficient is 0 when all are equal and near 1 when one has nearly all.
    """

    min: int
    mean: float
    median: float
    max: int
    std: float  #: of the population
    empty: int  #: rows (columns) without an entry
    gini: float
    top_share: float  #: share of all entries that the 1% fullest rows (columns) hold, rounded up

    def __str__(self) -> str:
        return (
            f"min {self.min}, mean {self.mean:.2f}, median {self.median:g}, max {self.max}, "
            f"std {self.std:.2f}, empty {self.empty}, gini {self.gini:.3f}, "
            f"top 1% hold {self.top_share:.1%}"
        )


@dataclass(frozen=True)
class TileStats:
    """Statistics of condensed tiles (TC-GNN, section 3 and figure 7)."""

    tile: Tile  #: (height, width)
    tile_count: int  #: after condensing
    dense_tile_count: int  #: tiles with an entry before condensing
    density: float  #: share of the condensed tiles' cells that hold an entry
    reduction: float  #: share of tiles saved: 1 - tile_count / dense_tile_count
    nbytes: int  #: of the SGT

    @classmethod
    def of(cls, A: SGT) -> "TileStats":
        """Compute the statistics of an SGT."""
        dense = A.dense_tile_count
        return cls(
            tile=A.tile,
            tile_count=A.tile_count,
            dense_tile_count=dense,
            density=A.tile_density,
            reduction=1.0 - A.tile_count / dense if dense else 0.0,
            nbytes=A.nbytes,
        )

    def __str__(self) -> str:
        return (
            f"{self.tile_count} tiles of {self.dense_tile_count}, {self.reduction:.1%} saved, "
            f"density {self.density:.1%}, {_bytes(self.nbytes)}"
        )


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of a matrix, each computed at first use and cached.

    ``str()`` computes all of them.  On a GPU every part runs there.
    """

    matrix: CSR = field(repr=False)  #: what is summed up
    tile_shapes: tuple[Tile, ...] = TILES  #: the shapes that ``tiles`` is about

    @property
    def n_rows(self) -> int:
        """Return the number of rows: target vertices."""
        return self.matrix.n_rows

    @property
    def n_cols(self) -> int:
        """Return the number of columns: source vertices."""
        return self.matrix.n_cols

    @property
    def nnz(self) -> int:
        """Return the number of stored entries."""
        return self.matrix.nnz

    @property
    def density(self) -> float:
        """Return the share of the matrix's cells that hold an entry; 0 without cells."""
        cells = self.n_rows * self.n_cols
        return (self.nnz - self.duplicates) / cells if cells else 0.0

    @cached_property
    def in_degree(self) -> Degrees:
        """Return statistics of the entries of each row."""
        return _degrees(self.matrix.lengths, self.nnz)

    @cached_property
    def out_degree(self) -> Degrees:
        """Return statistics of the entries of each column."""
        A = self.matrix
        with on_device_of(A.indices), allocating(f"column lengths of {A!r}"):
            lengths = namespace(A.indices).bincount(A.indices, minlength=A.n_cols)  # synchronize!
        return _degrees(lengths, self.nnz)

    @property
    def empty_rows(self) -> int:
        """Return the number of rows without an entry."""
        return self.in_degree.empty

    @property
    def empty_cols(self) -> int:
        """Return the number of columns without an entry."""
        return self.out_degree.empty

    @cached_property
    def _distances(self) -> tuple[int, float]:
        A = self.matrix
        with on_device_of(A.indptr), allocating(f"distances in {A!r}"):
            distance = primitives.expand(A.indptr, A.nnz)
            distance -= A.indices
            loops = int((distance == 0).sum())  # synchronize!
            total = int(abs(distance).sum(dtype=np.int64))  # synchronize!
        return loops, total / A.nnz if A.nnz else 0.0

    @property
    def self_loops(self) -> int:
        """Return the number of stored entries on the diagonal."""
        return self._distances[0]

    @property
    def bandwidth(self) -> float:
        """Return the mean distance ``|i - j|`` of an entry from the diagonal; 0 without entries."""
        return self._distances[1]

    @cached_property
    def _pattern(self) -> tuple[Array, Array]:
        """Return column and row of each distinct entry, columns in order, rows ascending."""
        return _distinct(self.matrix.with_data(None).tocsc())

    @cached_property
    def duplicates(self) -> int:
        """Return the number of entries stored beyond the first in their cell."""
        return self.nnz - len(self._pattern[0])

    @cached_property
    def is_symmetric(self) -> bool | None:
        """Return True if (j, i) is stored wherever (i, j) is, values aside; None if rectangular."""
        if self.n_rows != self.n_cols:
            return None
        col, row = self._pattern
        with on_device_of(col):
            by_row = _distinct(self.matrix.with_data(None).tocsc().tocsr())
            # synchronize!
            return bool((col == by_row[0]).all()) and bool((row == by_row[1]).all())

    @cached_property
    def tiles(self) -> tuple[TileStats, ...]:
        """Return statistics for each of ``tile_shapes``; the tiles themselves are not cached."""
        structure = self.matrix.with_data(None)
        values = 0 if self.matrix.data is None else int(self.matrix.data.nbytes)
        stats = [TileStats.of(structure.tosgt(tile)) for tile in self.tile_shapes]
        return tuple(replace(s, nbytes=s.nbytes + values) for s in stats)

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the matrix in each format, ``"sgt 16x8"`` and so on for the tiles."""
        A = self.matrix
        index = A.index_dtype.itemsize
        values = 0 if A.data is None else int(A.data.nbytes)
        sizes = {
            "coo": 2 * index * A.nnz + values,
            "csr": index * (A.n_rows + 1 + A.nnz) + values,
            "csc": index * (A.n_cols + 1 + A.nnz) + values,
        }
        return sizes | {f"sgt {_name(s.tile)}": s.nbytes for s in self.tiles}

    def __str__(self) -> str:
        symmetric = {True: "symmetric", False: "not symmetric", None: "rectangular"}
        lines = [
            f"{self.n_rows} x {self.n_cols}, {self.nnz} entries, density {self.density:.2e}, "
            f"{symmetric[self.is_symmetric]}",
            f"rows      {self.in_degree}",
            f"columns   {self.out_degree}",
            f"entries   {self.self_loops} self loops, {self.duplicates} duplicates, "
            f"mean |i - j| {self.bandwidth:.1f}",
        ]
        lines += [f"{_name(s.tile):<9} {s}" for s in self.tiles]
        sizes = ", ".join(f"{name} {_bytes(size)}" for name, size in self.nbytes.items())
        return "\n".join([*lines, f"bytes     {sizes}"])


def summarize(A: Format, *, tiles: Sequence[Tile] = TILES) -> Stats:
    """Return statistics of ``A``: degrees, symmetry, bandwidth, tile density and bytes.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR
    tiles : sequence of (height, width)
        Tile shapes to summarize; empty for none.

    Returns
    -------
    Stats
        Lazy: each part is computed when it is read.

    Raises
    ------
    DtypeError
        If ``A`` is no format.
    ShapeError
        If ``tiles`` is no sequence, or a tile shape is not two positive integers.
    """
    return Stats(_csr(A), _check_tiles(tiles))


def _check_tiles(tiles: Sequence[Tile]) -> tuple[Tile, ...]:
    try:
        shapes = iter(tiles)
    except TypeError as error:
        raise ShapeError(
            f"tiles is {tiles!r}: give a sequence of (height, width), [(16, 8)] for instance."
        ) from error
    return tuple(check_tile(tile) for tile in shapes)


def _csr(A: Format) -> CSR:
    if not isinstance(A, Format):
        raise DtypeError(f"A is a {type(A).__name__}: give a sparsefmt format (of a Graph: .csr).")
    return A.tocsr()


def _degrees(lengths: Array, nnz: int) -> Degrees:
    n = len(lengths)
    if not n:
        return Degrees(0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0.0)
    xp = namespace(lengths)
    with on_device_of(lengths), allocating(f"degrees of {n} vertices"):
        ordered = xp.sort(lengths).astype(np.float64)
        mean = nnz / n
        ranks = xp.arange(1, n + 1, dtype=np.float64)
        facts = [ordered[0], ordered[(n - 1) // 2], ordered[n // 2], ordered[-1]]
        facts += [xp.sqrt(((ordered - mean) ** 2).mean()), (ordered == 0).sum()]
        facts += [(ranks * ordered).sum(), ordered[n - -(-n // 100) :].sum()]
        low, left, right, high, std, empty, ranked, top = xp.stack(facts).tolist()  # synchronize!
    return Degrees(
        min=int(low),
        mean=mean,
        median=(left + right) / 2,
        max=int(high),
        std=std,
        empty=int(empty),
        gini=2 * ranked / (n * nnz) - (n + 1) / n if nnz else 0.0,
        top_share=top / nnz if nnz else 0.0,
    )


def _distinct(A: Compressed) -> tuple[Array, Array]:
    """Return major and minor index of each distinct entry of a matrix with sorted indices."""
    with on_device_of(A.indices), allocating(f"distinct entries of {A!r}"):
        major = primitives.expand(A.indptr, A.nnz)
        new = namespace(major).ones(A.nnz, bool)
        new[1:] = (major[1:] != major[:-1]) | (A.indices[1:] != A.indices[:-1])
        return major[new], A.indices[new]  # synchronize!


def _name(tile: Tile) -> str:
    return f"{tile[0]}x{tile[1]}"


def _bytes(count: int) -> str:
    """Write a number of bytes for people: 1.50 MiB."""
    size, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
