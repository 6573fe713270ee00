"""Batches as PyG's ``NeighborLoader`` gives them, drawn here: it needs pyg-lib or torch-sparse.

The objects are the same: vertices numbered in the order in which they are met, those of the batch
first, and edges hop by hop, each vertex of a hop getting its in-neighbours one after another, so
that targets ascend.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Neighbours:
    """Samples of the in-neighbours of vertices, without replacement."""

    def __init__(
        self, indptr: Array, indices: Array, fan_out: Sequence[int], seed: int = 0
    ) -> None:
        self.indptr, self.indices, self.fan_out = indptr, indices, fan_out
        self._chance = np.random.default_rng(seed)
        self._number = np.full(len(indptr) - 1, -1, np.int64)  # of each vertex, in a batch

    def batches(self, size: int, count: int) -> Iterator[tuple[Array, Array]]:
        """Give (vertices, edge_index) of ``count`` batches of ``size`` vertices each."""
        order = self._chance.permutation(len(self.indptr) - 1)
        for begin in range(0, size * count, size):
            yield self.sample(order[begin : begin + size])

    def sample(self, seeds: Array) -> tuple[Array, Array]:
        """Give the vertices that are met from ``seeds`` on, and the edges in their numbers."""
        number = self._number
        met, first = [seeds], 0
        number[seeds] = np.arange(len(seeds))
        ends: list[tuple[Array, Array]] = []
        for fan in self.fan_out:
            frontier, total = met[-1], sum(map(len, met))
            source, counts = self._in_neighbours(frontier, fan)
            new, places = np.unique(source[number[source] < 0], return_index=True)
            new = new[np.argsort(places)]
            number[new] = total + np.arange(len(new))
            target = np.repeat(first + np.arange(len(frontier)), counts)
            ends.append((number[source], target))
            met.append(new)
            first = total
        vertices = np.concatenate(met)
        number[vertices] = -1
        return vertices, np.stack([np.concatenate(side) for side in zip(*ends, strict=True)])

    def _in_neighbours(self, vertices: Array, fan: int) -> tuple[Array, Array]:
        """Give at most ``fan`` sources of each vertex, and how many."""
        start = self.indptr[vertices].astype(np.int64)
        degree = self.indptr[vertices + 1] - start
        counts = np.minimum(degree, fan)
        places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        many = degree > fan
        if many.any():
            places[np.repeat(many, counts)] = self._distinct(degree[many], fan).ravel()
        return self.indices[places + np.repeat(start, counts)].astype(np.int64), counts

    def _distinct(self, limits: Array, count: int) -> Array:
        """Draw ``count`` distinct numbers below each limit: Floyd's algorithm."""
        found = np.full((len(limits), count), -1, np.int64)
        for at in range(count):
            last = limits - count + at
            drawn = self._chance.integers(0, last + 1)
            again = (found[:, :at] == drawn[:, None]).any(1)
            found[:, at] = np.where(again, last, drawn)
        return found
