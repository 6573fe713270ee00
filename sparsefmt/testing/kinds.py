"""Graphs by kind: their entries, from a few integers and without randomness.

Each kind is a function of ``(n_rows, n_cols, a, b)``, where ``a`` and ``b`` pick a place or a size
as that kind needs them; any non-negative integers will do, and smaller ones give simpler
graphs.  Vertices keep their natural order: shuffle ids afterwards where order must not matter.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ..formats.arrays import Array

Cells: TypeAlias = tuple[Array, Array]

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
