"""Which rows of a graph each rank has: contiguous ones, by the vertices where they begin."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ..errors import ShapeError
from ..formats.arrays import namespace
from ..graph import Graph


class Partitioner(Protocol):
    """What shares the rows of a graph out among ranks."""

    def __call__(self, graph: Graph, parts: int) -> tuple[int, ...]:
        """Give the vertex at which each part begins, and the number of vertices: parts + 1."""


def balanced(graph: Graph, parts: int) -> tuple[int, ...]:
    """Share out the rows of a graph so that each part has about as many entries.

    Parameters
    ----------
    graph : Graph, shape (n, n_cols)
    parts : int
        At least 1; parts beyond the number of rows are empty.

    Returns
    -------
    tuple of int
        The first row of each part, ascending from 0, and ``n`` at the end.

    Raises
    ------
    ShapeError
        If ``parts`` is less than 1.

    Notes
    -----
    Part ``p`` begins at the row whose entries reach the share ``p / parts`` of all; of the two
    borders around it, the nearer one.  A row counts as one entry more than it has, so that rows
    without entries are shared out too.  Synchronises with a GPU.
    """
    if parts < 1:
        raise ShapeError(f"parts is {parts}: give 1 or more.")
    indptr, n = graph.csr.indptr, graph.shape[0]
    xp = namespace(indptr)
    ends = indptr.astype(np.int64) + xp.arange(n + 1)
    shares = xp.asarray([int(ends[-1]) * p / parts for p in range(1, parts)])  # synchronize!
    after = xp.searchsorted(ends, shares)
    before = xp.maximum(after - 1, 0)
    nearer = xp.where(shares - ends[before] < ends[after] - shares, before, after)
    return (0, *map(int, nearer.tolist()), n)  # synchronize!


def checked(bounds: Any, ranks: int) -> tuple[int, ...]:
    """Check the borders of rows for so many ranks.

    Raises
    ------
    ShapeError
        If there are not ``ranks + 1`` of them, ascending from 0.
    """
    found = tuple(map(int, bounds)) if isinstance(bounds, Sequence) else ()
    if len(found) != ranks + 1 or found[0] != 0 or any(b < a for a, b in pairwise(found)):
        raise ShapeError(
            f"bounds is {bounds!r}: give the first row of each of the {ranks} ranks, ascending "
            "from 0, and the number of rows at the end, as distributed.balanced(graph, ranks) does."
        )
    return found
