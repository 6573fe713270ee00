"""Graphs of the kinds that SENSEi's tables have: social, products, roads, and a very dense one."""

from functools import cache

import numpy as np

from sparsefmt import COO, CSR, generate

from .. import _graphs

#: Vertices on each side of a road network, of about the size of OpenStreetMap's.
ROADS = {"belgium": 1_200, "asia": 3_450}
#: Vertices, edges, exponent, share of edges inside a community, and its size.
COAUTHORS = (299_067, 1_955_352, 3.0, 0.9, 50)
MYCIELSKIAN = "mycielskian"


@cache
def load(name: str, device: str) -> CSR:
    """A graph of ``_graphs.RECIPES``, a file, "belgium", "asia", "coauthors" or "mycielskianK"."""
    if name in ROADS:
        return roads(ROADS[name]).to(device).tocsr()
    if name == "coauthors":
        nodes, edges, exponent, inside, community = COAUTHORS
        options = {"exponent": exponent, "inside": inside, "community": community, "seed": 0}
        return generate.power_law(nodes, edges, device=device, **options).tocsr()
    if name.startswith(MYCIELSKIAN):
        return mycielskian(int(name.removeprefix(MYCIELSKIAN))).to(device).tocsr()
    return _graphs.load(name, device=device)


def roads(side: int, *, seed: int = 0) -> COO:
    """A grid of crossings, of whose roads 3 in 10 are missing, and diagonals, 1 in 20."""
    rng = np.random.default_rng(seed)
    at = np.arange(side * side, dtype=np.int32).reshape(side, side)
    pairs = (
        (at[:, :-1], at[:, 1:], 0.7),
        (at[:-1], at[1:], 0.7),
        (at[:-1, :-1], at[1:, 1:], 0.05),
    )
    kept = []
    for one, other, share in pairs:
        there = rng.random(one.shape) < share
        kept.append(np.stack([one[there], other[there]]))
    return _both_ways(np.concatenate(kept, axis=1), side * side)


def mycielskian(k: int) -> COO:
    """The graph of chromatic number ``k`` without triangles: Mycielski (1955), from one edge on."""
    edges, n = np.array([[0], [1]], np.int32), 2
    for _ in range(k - 2):
        u, v = edges
        copies, apex = np.arange(n, 2 * n, dtype=np.int32), np.full(n, 2 * n, np.int32)
        rows = np.concatenate([u, u, u + n, copies])
        cols = np.concatenate([v, v + n, v, apex])
        edges, n = np.stack([rows, cols]), 2 * n + 1
    return _both_ways(edges, n)


def _both_ways(edges: np.ndarray, n: int) -> COO:
    row, col = np.concatenate([edges, edges[::-1]], axis=1)
    return COO(np.ascontiguousarray(row), np.ascontiguousarray(col), shape=(n, n))
