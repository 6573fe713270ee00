"""Launches of attention whose scores are of whole rows: GATv2's and those of dot products.

Conventions as in ``_launch``.  Queries are the targets' and keys the sources', (n, heads, feat).
What belongs to scores (``att``, ``edges``, statistics) is float32 for features of 2 bytes.  With
``one`` the keys are the values too, as they always are where ``kind`` is ``ADDITIVE``, and
``values`` is not read.  With ``loops`` stored entries (i, i) are left out and each row has one such
entry behind its own, whose edge score is 0.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from . import _jit
from ._launch import ITEMSIZE, Structure, fill, row_bytes
from ._launch_gat import TEAM_BYTES, Dropout

THREADS = 128  # of a block, as in rows.cuh
DOT, ADDITIVE = range(2)  # as in attend.cuh
FORWARD, SOURCES, TARGETS = range(3)
LANES = (4, 8, 16, 32)
#: Where nothing is tuned: float64, and indices of 64 bits.
FEW_LANES = (8, 32)
#: Lanes and values of a load, for rows that are not aligned to 16 bytes; beyond, attend_wide.cu.
SHORT_LANES = 8
_STATS_LANES = 8  # as in attend.cu

#: ``Attention``, by the size that sums have.
_LAYOUT = {4: "13PQfffI4i", 8: "13PQdddI4i"}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row of features is read: ``packs`` times ``lanes`` times ``vector`` values a slice."""

    lanes: int
    vector: int
    mates: int = 1  #: heads side by side
    packs: int = 0  #: of a lane in attend_wide.cu; 0 where a sub-warp has the row
    slices: int = 1

    @property
    def values(self) -> int:
        """Of a lane."""
        return self.vector * max(self.packs, 1)


def packs(dtype: str, vector: int) -> int:
    """Packs of a lane in attend_wide.cu: of sums all its registers have room for."""
    return (8 if dtype == "float64" else 16) // vector


def _mates(lanes: int) -> int:
    """Heads side by side, where loads are of 16 bytes."""
    return TEAM_BYTES // (16 * lanes) or 1


def _wide(dtype: str, feat: int, vector: int) -> Cut:
    per_lane = packs(dtype, vector)
    slices = -(-feat // (_jit.WARP * per_lane * vector))
    return Cut(_jit.WARP, vector, packs=per_lane, slices=slices)


@lru_cache(maxsize=4096)
def _cut(dtype: str, index_dtype: str, heads: int, feat: int, together: int) -> Cut:
    """The widest loads that alignment allows; ``together`` has the addresses' lowest bits."""
    size = ITEMSIZE[dtype]
    together |= feat * size
    tuned = size < 8 and index_dtype == "int32"
    if together % 16 == 0:
        vector = 16 // size
        for lanes in LANES if tuned else FEW_LANES:
            if lanes * vector >= feat and heads % _mates(lanes) == 0:
                return Cut(lanes, vector, _mates(lanes))
        return _wide(dtype, feat, vector)
    if tuned and feat <= SHORT_LANES:
        return Cut(SHORT_LANES, 1)
    if tuned and together % 8 == 0 and feat * size <= 16 * 8:
        return Cut(16, 8 // size)
    return Cut(_jit.WARP, 1) if tuned and feat <= _jit.WARP else _wide(dtype, feat, 1)


def _size_of_sums(dtype: str) -> int:
    return max(ITEMSIZE[dtype], 4)


def attend_workspace(S: Structure, dtype: str, *, heads: int, feat: int, arrays: int) -> int:
    """Bytes for the sums of rows that blocks share; 0 unless a row is very long.

    ``arrays`` of features are made at once: 2 by ``attend_sources`` without ``one``, else 1.
    """
    if not (S.n_cuts and feat):
        return 0
    values = 0  # of a head, over all that the addresses may ask for
    for together in (0, 8, ITEMSIZE[dtype]):
        cut = _cut(dtype, S.index_dtype, heads, feat, together)
        of_lane = (2 if cut.packs else arrays) * cut.values + 2
        values = max(values, cut.slices * cut.lanes * of_lane)
    return 2 * S.n_cuts * heads * values * _size_of_sums(dtype)


def attend(
    S: Structure,
    dtype: str,
    *,
    kind: int,
    one: bool,
    heads: int,
    feat: int,
    slope: float,
    scale: float,
    dropped: Dropout,
    loops: bool,
    queries: int,
    keys: int,
    values: int,
    att: int,
    edges: int,
    out: int,
    statistics: int,
    workspace: int,
    stream: int,
) -> None:
    """``O[i, h] = sum of P[e, h] V[j, h]``.

    Where given, ``statistics`` (n_rows, heads, 2) takes of each row its largest score, and 1 over
    its sum of exponentials relative to that; zeros if there are no entries or no features.
    """
    if not (S.n_rows and heads):
        return
    if not (feat and (S.nnz or loops)):
        for array, size in ((out, feat * ITEMSIZE[dtype]), (statistics, 2 * _size_of_sums(dtype))):
            if array and size:
                fill(array, S.n_rows * heads * size, 0, stream)
        return
    features = (queries, keys, values, 0)
    scores = (slope, scale, loops, att, 0, edges)
    results = (out, 0, statistics, 0, 0)
    which = (FORWARD, kind, one)
    _run(S, dtype, which, heads, feat, 0, features, scores, results, dropped, workspace, stream)


def attend_statistics(
    dtype: str,
    *,
    items: int,
    feat: int,
    out: int,
    grad: int,
    statistics: int,
    stats: int,
    stream: int,
) -> None:
    """What entries read on the way back of each of ``items`` targets and heads.

    ``stats`` is (items, 4): what forward wrote into ``statistics``, ``D = <dO, O>``, and 0.
    """
    if not items:
        return
    kernel = _jit.load("attend.cu", "attend_stats", "4Pqi", (dtype,))
    blocks = -(-items * _STATS_LANES // THREADS)
    args = (out, grad, statistics, stats, items, feat)
    kernel(blocks, args, threads=THREADS, stream=stream)


def attend_sources(
    T: Structure,
    dtype: str,
    *,
    kind: int,
    one: bool,
    heads: int,
    feat: int,
    slope: float,
    scale: float,
    dropped: Dropout,
    loops: bool,
    perm: int,
    queries: int,
    keys: int,
    values: int,
    att: int,
    edges: int,
    grad: int,
    stats: int,
    dvalues: int,
    dkeys: int,
    workspace: int,
    stream: int,
) -> None:
    """``dV`` and ``dK``, with ``one`` their sum in ``dvalues``; ``T`` is the transpose.

    ``perm[e]`` is the number that entry e of the transpose has in CSR order, by which it is dropped
    and finds its edge score.
    """
    if not (T.n_rows and heads and feat):
        return
    dkeys = 0 if one else dkeys
    if not (T.nnz or loops):
        for array in (dvalues, dkeys):
            if array:
                fill(array, T.n_rows * heads * feat * ITEMSIZE[dtype], 0, stream)
        return
    features = (queries, keys, values, grad)
    scores = (slope, scale, loops, att, stats, edges)
    results = (dvalues, dkeys, 0, 0, 0)
    which = (SOURCES, kind, one)
    _run(T, dtype, which, heads, feat, perm, features, scores, results, dropped, workspace, stream)


def attend_targets(
    S: Structure,
    dtype: str,
    *,
    kind: int,
    one: bool,
    heads: int,
    feat: int,
    slope: float,
    scale: float,
    dropped: Dropout,
    loops: bool,
    queries: int,
    keys: int,
    values: int,
    att: int,
    edges: int,
    grad: int,
    stats: int,
    dqueries: int,
    datt: int,
    dedges: int,
    workspace: int,
    stream: int,
) -> None:
    """``dQ``; where scores are additive, ``datt``; and, where given, ``dedges`` (nnz, heads).

    ``datt`` has (S.blocks, heads, feat), to be summed over its first axis by the caller; like
    ``dedges`` it is of the type that sums run in.
    """
    if not (heads and feat):
        return
    if not (S.n_rows and (S.nnz or loops)):
        size = S.n_rows * heads * feat * ITEMSIZE[dtype]
        if size:
            fill(dqueries, size, 0, stream)
        if kind == ADDITIVE:
            fill(datt, S.blocks * heads * feat * _size_of_sums(dtype), 0, stream)
        return
    features = (queries, keys, values, grad)
    scores = (slope, scale, loops, att, stats, edges)
    results = (dqueries, 0, 0, datt, dedges)
    which = (TARGETS, kind, one)
    _run(S, dtype, which, heads, feat, 0, features, scores, results, dropped, workspace, stream)


def _run(
    S: Structure,
    dtype: str,
    which: tuple[int, int, bool],
    heads: int,
    feat: int,
    perm: int,
    features: tuple[int, int, int, int],
    scores: tuple[float, float, bool, int, int, int],
    results: tuple[int, int, int, int, int],
    dropped: Dropout,
    workspace: int,
    stream: int,
) -> None:
    way, kind, one = which
    slope, scale, loops, att, stats, edges = scores
    out, other, statistics, datt, dedges = results
    queries, keys, values, grad = features
    values = keys if one else values
    together = (queries | keys | values | grad | out | other) % 16
    cut = _cut(dtype, S.index_dtype, heads, feat, together)
    numbers = bool(edges or dedges or dropped.below)
    indices, perm, nnz = S.indices, perm if numbers else 0, S.nnz
    if not nnz:  # there are loops alone; what kernels read beside them has to exist
        indices, perm, edges, dedges = S.indptr, 0, 0, 0
    att = att if kind == ADDITIVE else 0
    summed = int(one and way == SOURCES and bool(cut.packs))
    flags = (dropped.below, heads, feat, int(loops), summed)
    given, made = (att, stats, edges), (out, other, statistics, datt, dedges)
    arrays = (queries, keys, values, grad, *given, *made, dropped.seed_at)
    attention: tuple[Any, ...] = (*arrays, dropped.seed, slope, scale, dropped.kept, *flags)
    layout, types = _LAYOUT[_size_of_sums(dtype)], (dtype, S.index_dtype)
    name, constants = instantiation(types, cut, which, extra=numbers or loops)
    kernel = _jit.load(f"{name}.cu", f"{name}_rows", f"5P{layout}PqII", types, constants)
    structure = (S.indptr, indices, S.start, S.slot, perm)
    sizes = (nnz, row_bytes(heads * feat, dtype), S.blocks)
    blocks = S.blocks * (heads // cut.mates) * cut.slices
    kernel(blocks, (*structure, *attention, workspace, *sizes), threads=THREADS, stream=stream)
    if S.n_cuts:
        sums = 2 if way == SOURCES and (cut.packs or not one) else 1
        kernel = _jit.load("attend.cu", "attend_cut_rows", f"2P{layout}P6i", types)
        shape = (cut.lanes, cut.vector, max(cut.packs, 1), sums, int(way == FORWARD))
        args = (S.start, S.cut, *attention, workspace, S.n_cuts, *shape)
        blocks = -(-S.n_cuts * heads * feat // THREADS)
        kernel(blocks, args, threads=THREADS, stream=stream)


def instantiation(
    types: tuple[str, str], cut: Cut, which: tuple[int, int, bool], *, extra: bool
) -> tuple[str, tuple[int, ...]]:
    """Kernel and template arguments; what is not tuned is always ready for all ``extra``."""
    way, kind, one = which
    if cut.packs:
        return "attend_wide", (cut.vector, cut.packs, way)
    tuned = types[1] == "int32" and cut.vector * ITEMSIZE[types[0]] == 16 and types[0] != "float64"
    extra = extra or not tuned
    return "attend", (cut.lanes, cut.vector, cut.mates, way, kind, int(one), int(extra))


def instantiations(types: tuple[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """All that the launchers may ask for, of these types."""
    size, tuned = ITEMSIZE[types[0]], types[0] != "float64" and types[1] == "int32"
    vector = 16 // size
    cuts = [Cut(n, vector, _mates(n)) for n in (LANES if tuned else FEW_LANES)]
    if tuned:
        cuts += [Cut(SHORT_LANES, 1), Cut(16, 8 // size), Cut(_jit.WARP, 1)]
    cuts += [Cut(_jit.WARP, v, packs=packs(types[0], v)) for v in (vector, 1)]
    kinds = [(DOT, False), (DOT, True), (ADDITIVE, True)]
    ways = [(way, *one) for way, one in product((FORWARD, SOURCES, TARGETS), kinds)]
    every = product(cuts, ways, (False, True))
    return sorted({instantiation(types, cut, way, extra=e) for cut, way, e in every})
