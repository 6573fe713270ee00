"""Synthetic graphs, the same for a seed on every device."""

import numpy as np

from . import _random
from .errors import ShapeError, UnsupportedError
from .formats import checks
from .formats.arrays import Array, DType, allocating, namespace, on_device_of, to_device
from .formats.compressed import COO

#: Entries drawn at a time: bounds the temporary memory, about 64 bytes an entry.
CHUNK_ENTRIES = 1 << 22
#: Rounds that follow the degrees before the last missing entries are drawn uniformly.
WEIGHTED_ROUNDS = 12


def power_law(
    n_nodes: int,
    n_edges: int,
    *,
    exponent: float = 2.3,
    inside: float = 0.6,
    community: int = 500,
    seed: int = 0,
    device: str = "cpu",
    index_dtype: DType = np.int32,
    shuffle: bool = True,
) -> COO:
    """Draw a directed graph with power-law degrees and planted communities.

    Chung-Lu: vertex ``v`` has an expected degree ``w_v`` proportional to
    ``(rank_v + c)^(-1 / (exponent - 1))``, so that the number of vertices of degree ``d`` falls as
    ``d^-exponent``; ``c`` is such that the largest expected degree is ``sqrt(n_edges)`` (at least
    four times the mean, at most a quarter of the vertices).  The target of an entry is drawn by
    ``w``; its source too, with probability ``inside`` from the target's community only.

    Parameters
    ----------
    n_nodes : int
    n_edges : int
        Exactly so many stored entries, all distinct and off the diagonal; at most half of
        ``n_nodes * (n_nodes - 1)``.  What is drawn twice is drawn anew, so that the largest degrees
        of a dense graph stay below their expectation.
    exponent : float
        Above 2.
    inside : float
        Share of entries drawn within a community, 0 to 1.
    community : int
        Vertices of a community; the last one may be smaller.
    seed : int
        The same seed gives the same graph on every device.
    device : "cpu", "cuda" or "cuda:<ordinal>"
    index_dtype : int32 or int64
    shuffle : bool
        Whether ids are shuffled.  If not, communities are ranges of ids.

    Returns
    -------
    COO
        Unweighted, entries of a row together.

    Raises
    ------
    ShapeError
        If a size is no integer, negative, or the entries do not fit the vertices.
    UnsupportedError
        If ``exponent``, ``inside`` or ``seed`` is out of range.
    IndexRangeError
        If ``index_dtype`` cannot count the entries.

    Notes
    -----
    Drawn in chunks; the peak is about 32 bytes an entry.  Chung and Lu, Annals of Combinatorics 6
    (2002) 125.
    """
    args = (n_nodes, n_edges, exponent, inside, community, seed, device, index_dtype, shuffle)
    return power_law_with_labels(*args)[0]


def power_law_with_labels(
    n_nodes: int,
    n_edges: int,
    exponent: float = 2.3,
    inside: float = 0.6,
    community: int = 500,
    seed: int = 0,
    device: str = "cpu",
    index_dtype: DType = np.int32,
    shuffle: bool = True,
) -> tuple[COO, Array]:
    """Draw a graph as ``power_law`` does; return it and the (n_nodes,) community of each vertex."""
    index = checks.index_dtype("index_dtype", index_dtype)
    n_nodes = checks.integer("n_nodes", n_nodes, least=0)
    n_edges = checks.integer("n_edges", n_edges, least=0)
    community = min(checks.integer("community", community, least=1), max(n_nodes, 1))
    seed = _random.check_seed(seed)
    _check_law(n_nodes, n_edges, exponent, inside)
    checks.sizes_fit((n_nodes, n_nodes), n_edges, index)
    host = np.random.default_rng(seed)
    ranks = host.permutation(n_nodes)
    ids = host.permutation(n_nodes) if shuffle else np.arange(n_nodes)
    weights = _expected_degrees(n_nodes, n_edges, exponent)[ranks]
    limits = np.concatenate([np.zeros(1), np.cumsum(weights)])
    limits, ids = (to_device(table, device) for table in (limits, ids.astype(index)))
    with on_device_of(ids), allocating(f"graph of {n_edges} entries"):
        xp = namespace(ids)
        keys = _distinct_keys(limits, n_edges, inside, community, seed)
        row, col = ids[keys // max(n_nodes, 1)], ids[keys % max(n_nodes, 1)]
        labels = xp.empty(n_nodes, index)
        labels[ids] = (xp.arange(n_nodes) // community).astype(index)
    return COO._trusted(row=row, col=col, data=None, shape=(n_nodes, n_nodes)), labels


def banded(
    n_nodes: int, half_width: int, *, device: str = "cpu", index_dtype: DType = np.int32
) -> COO:
    """Build the graph of all entries with ``|i - j| <= half_width``, in order."""
    n_nodes = checks.integer("n_nodes", n_nodes, least=0)
    half_width = checks.integer("half_width", half_width, least=0)
    reach = min(half_width, n_nodes)  # further places lie outside anyway
    with allocating(f"band of {n_nodes} x {2 * reach + 1}"):
        offsets = np.arange(-reach, reach + 1)
        row = np.repeat(np.arange(n_nodes), len(offsets))
        col = row + np.tile(offsets, n_nodes)
        inside = (col >= 0) & (col < n_nodes)
        row, col = row[inside], col[inside]
    return _structure(row, col, n_nodes, device, index_dtype)


def star(n_nodes: int, *, device: str = "cpu", index_dtype: DType = np.int32) -> COO:
    """Build a graph of vertex 0 linked with every other, both ways: the extreme of a hub."""
    n_nodes = checks.integer("n_nodes", n_nodes, least=0)
    with allocating(f"star of {n_nodes} vertices"):
        leaves = np.arange(1, max(n_nodes, 1))
        hub = np.zeros_like(leaves)
        row, col = np.concatenate([hub, leaves]), np.concatenate([leaves, hub])
    return _structure(row, col, n_nodes, device, index_dtype)


def dense_block(
    n_nodes: int, size: int, *, device: str = "cpu", index_dtype: DType = np.int32
) -> COO:
    """Build a graph whose first ``size`` vertices are all linked, with loops; the rest isolated."""
    n_nodes = checks.integer("n_nodes", n_nodes, least=0)
    size = checks.integer("size", size, least=0)
    if size > n_nodes:
        raise ShapeError(f"size is {size} but there are {n_nodes} vertices: give n_nodes or less.")
    checks.sizes_fit((n_nodes, n_nodes), size * size, np.dtype(np.int64))
    with allocating(f"block of {size} x {size}"):
        row, col = np.divmod(np.arange(size * size), max(size, 1))
    return _structure(row, col, n_nodes, device, index_dtype)


def _structure(row: Array, col: Array, n_nodes: int, device: str, index_dtype: DType) -> COO:
    index = checks.index_dtype("index_dtype", index_dtype)
    checks.sizes_fit((n_nodes, n_nodes), len(row), index)
    row, col = (places.astype(index) for places in (row, col))
    return COO._trusted(row=row, col=col, data=None, shape=(n_nodes, n_nodes)).to(device)


def _check_law(n_nodes: int, n_edges: int, exponent: float, inside: float) -> None:
    room = n_nodes * (n_nodes - 1) // 2
    if n_edges > room:
        raise ShapeError(
            f"n_edges is {n_edges} but {n_nodes} vertices take at most {room} random entries "
            "(half of all off the diagonal): ask for fewer, or more vertices."
        )
    if not (isinstance(exponent, int | float) and 2 < exponent < np.inf):
        raise UnsupportedError(
            f"exponent is {exponent!r}: means exist above 2, give a number like 2.1 to 4."
        )
    if not (isinstance(inside, int | float) and 0 <= inside <= 1):
        raise UnsupportedError(f"inside is {inside!r}: give a share, a number from 0 to 1.")


def _expected_degrees(n_nodes: int, n_edges: int, exponent: float) -> Array:
    """Compute degrees, descending, of sum about ``n_edges``; bisection finds the offset."""
    power = 1.0 / (exponent - 1.0)
    mean = n_edges / max(n_nodes, 1)
    largest = min(n_nodes / 4, max(float(np.sqrt(n_edges)), 4 * mean))

    def first_share(offset: float) -> float:
        ends = np.array([offset + 0.5, offset + n_nodes + 0.5]) ** (1.0 - power)
        return float((offset + 1.0) ** -power * (1.0 - power) / (ends[1] - ends[0]))

    low, high = 0.0, 1.0 + n_nodes
    for _ in range(60 if n_nodes else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if first_share(middle) * n_edges > largest else (low, middle)
    return (np.arange(1, n_nodes + 1) + high) ** -power


def _distinct_keys(limits: Array, n_edges: int, inside: float, community: int, seed: int) -> Array:
    """Draw ascending keys ``row * n_nodes + col`` until ``n_edges`` are distinct."""
    xp = namespace(limits)
    keys, drawn, rounds = xp.empty(0, np.int64), 0, 0
    while len(keys) < n_edges:
        missing = n_edges - len(keys)
        wanted = missing + missing // 8 + 64
        weighted = rounds < WEIGHTED_ROUNDS
        pieces = [keys]
        for start in range(drawn, drawn + wanted, CHUNK_ENTRIES):
            counters = xp.arange(start, min(start + CHUNK_ENTRIES, drawn + wanted))
            pieces.append(_draw(counters, limits, inside if weighted else -1.0, community, seed))
        keys = xp.concatenate(pieces)
        del pieces
        keys.sort()
        new = xp.ones(len(keys), bool)
        xp.not_equal(keys[1:], keys[:-1], out=new[1:])
        keys = keys[new]  # synchronize!
        drawn, rounds = drawn + wanted, rounds + 1
    surplus = len(keys) - n_edges
    if surplus:  # drop keys that are evenly spread, so that no vertex loses more than its share
        retained = xp.ones(len(keys), bool)
        retained[(xp.arange(surplus, dtype=np.int64) * 2 + 1) * len(keys) // (2 * surplus)] = False
        keys = keys[retained]  # synchronize!
    return keys


def _draw(counters: Array, limits: Array, inside: float, community: int, seed: int) -> Array:
    """Draw a key per counter, loops left out; a negative ``inside`` ignores the weights."""
    xp = namespace(limits)
    n_nodes = len(limits) - 1
    picks = [_random.uniform(counters, seed, stream) for stream in range(3)]
    if inside < 0:
        row, col = ((pick * n_nodes).astype(np.int64) for pick in picks[:2])
    else:
        row = _pick(limits, picks[0] * limits[-1])
        begin = row // community * community
        within = picks[2] < inside
        low = xp.where(within, limits[begin], 0.0)
        high = xp.where(within, limits[xp.minimum(begin + community, n_nodes)], limits[-1])
        col = _pick(limits, low + picks[1] * (high - low))
    return (row * n_nodes + col)[row != col]  # synchronize!


def _pick(limits: Array, heights: Array) -> Array:
    """Return the vertex whose interval of ``limits`` contains each height."""
    vertex = namespace(limits).searchsorted(limits, heights, side="right") - 1
    return namespace(limits).minimum(vertex, len(limits) - 2)
