"""Launches of attention whose scores are of whole rows: GATv2's and those of dot products.

Conventions as in ``_launch``.  Queries are the targets' and keys the sources', (n, heads, feat).
What belongs to scores (``att``, ``edges``, statistics) is float32 for features of 2 bytes.  With
``one`` the keys are the values too, as they always are where ``kind`` is ``ADDITIVE``, and
``values`` is not read.  With ``loops`` stored entries (i, i) are left out and each row has one such
entry behind its own, whose edge score is 0.
"""

from itertools import accumulate
from typing import Any

from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.structure import Structure
from . import column_blocks
from .column_blocks import Part
from .cuda_gat import Dropout
from .pairwise_shape import ADDITIVE, FORWARD, SOURCES, TARGETS, Cut, cut_of, instantiation

THREADS = 128  # of a block, as in rows.cuh
_STATS_LANES = 8  # as in attend.cu

#: ``Attention``, by the size that sums have.
_LAYOUT = {4: "16PQfffI6i", 8: "16PQdddI6i"}


def _size_of_sums(dtype: str) -> int:
    return max(ITEMSIZE[dtype], 4)


def column_parts(
    S: Structure, dtype: str, *, way: int, kind: int, one: bool, heads: int, feat: int
) -> int:
    """In how many parts the columns are best gone through, where all addresses are aligned.

    Not where parts would have to share the gradient of ``att``.
    """
    cut = cut_of(dtype, S.index_dtype, heads, feat, 0)
    if dtype == "float64" or cut.packs or (kind == ADDITIVE and way == TARGETS):
        return 1
    arrays = 2 if way == SOURCES or not one else 1
    gathered = S.n_cols * arrays * cut.mates * cut.lanes * cut.vector * ITEMSIZE[dtype]
    return column_blocks.count(S, gathered)


def attend_workspace(
    S: Structure, dtype: str, *, heads: int, feat: int, arrays: int, parts: tuple[Part, ...] = ()
) -> int:
    """Bytes for the sums of rows that blocks share, 0 unless a row is very long; and for ``parts``.

    ``arrays`` of features are made at once: 2 by ``attend_sources`` without ``one``, else 1.
    """
    n_cuts = max([S.n_cuts, *(part.structure.n_cuts for part in parts)])
    between = sum(_between(S, dtype, heads, feat, arrays)) if parts else 0
    if not (n_cuts and feat):
        return between
    values = 0  # of a head, over all that the addresses may ask for
    for together in (0, 8, ITEMSIZE[dtype]):
        cut = cut_of(dtype, S.index_dtype, heads, feat, together)
        of_lane = (2 if cut.packs else arrays) * cut.values + 2
        values = max(values, cut.slices * cut.lanes * of_lane)
    return between + 2 * n_cuts * heads * values * _size_of_sums(dtype)


def _between(
    S: Structure, dtype: str, heads: int, feat: int, arrays: int
) -> tuple[int, int, int, int]:
    """Bytes of what one part of the columns leaves to the next.

    Twice the largest scores and sums of exponentials, and of 2-byte features both arrays of sums.
    """
    size = _size_of_sums(dtype)
    scores, sums = (-(-S.n_rows * heads * n * size // 256) * 256 for n in (2, feat))
    narrow = ITEMSIZE[dtype] == 2
    return scores, scores, sums * narrow, sums * (narrow and arrays == 2)


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
    parts: tuple[Part, ...] = (),
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
    sizes, memory = (heads, feat), (workspace, stream)
    _run(S, dtype, which, sizes, 0, features, scores, results, dropped, parts, memory)


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
    kernel = jit.load("attention/pairwise.cu", "attend_stats", "4Pqi", (dtype,))
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
    parts: tuple[Part, ...] = (),
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
    sizes, memory = (heads, feat), (workspace, stream)
    _run(T, dtype, which, sizes, perm, features, scores, results, dropped, parts, memory)


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
    parts: tuple[Part, ...] = (),
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
    sizes, memory = (heads, feat), (workspace, stream)
    _run(S, dtype, which, sizes, 0, features, scores, results, dropped, parts, memory)


def _run(
    S: Structure,
    dtype: str,
    which: tuple[int, int, bool],
    sizes: tuple[int, int],
    perm: int,
    features: tuple[int, int, int, int],
    scores: tuple[float, float, bool, int, int, int],
    results: tuple[int, int, int, int, int],
    dropped: Dropout,
    parts: tuple[Part, ...],
    memory: tuple[int, int],
) -> None:
    """All columns at once or, where they are in parts, one part after another."""
    (way, kind, one), (heads, feat), (workspace, stream) = which, sizes, memory
    slope, scale, loops, att, stats, edges = scores
    out, other, statistics, datt, dedges = results
    queries, keys, values, grad = features
    values = keys if one else values
    together = (queries | keys | values | grad | out | other) % 16
    cut = cut_of(dtype, S.index_dtype, heads, feat, together)
    numbers = bool(edges or dedges or dropped.below)
    perm, parts = perm if numbers else 0, () if cut.packs else parts
    if not S.nnz:  # there are loops alone; what kernels read beside them has to exist
        perm = edges = dedges = 0
    att = att if kind == ADDITIVE else 0
    last, between = max(len(parts) - 1, 0), (0, 0, 0, 0)
    if parts:
        between = _between(S, dtype, heads, feat, 1 + (way == SOURCES and not one))
    *passed, part, other_part, carry = accumulate(between, initial=workspace)
    if ITEMSIZE[dtype] != 2:  # results take sums as they are
        part, other_part = out, other
    summed = int(one and way == SOURCES and bool(cut.packs))
    for step in range(last + 1):
        before, left = (passed[step % 2 - 1] if step else 0), statistics
        if way == FORWARD and step < last:
            left = passed[step % 2]
        flags = (dropped.below, heads, feat, int(loops), summed, int(step > 0), int(step < last))
        given, made = (att, stats, edges), (out, other, part, other_part, left, datt, dedges)
        arrays = (queries, keys, values, grad, *given, *made, dropped.seed_at, before)
        attention = (*arrays, dropped.seed, slope, scale, dropped.kept, *flags)
        kernel = instantiation((dtype, S.index_dtype), cut, which, extra=numbers or loops)
        P = parts[step] if parts else Part(S)
        _rows(S, P, dtype, (cut, *kernel), perm, attention, carry, stream)
        if P.structure.n_cuts:
            _cut_rows(P.structure, dtype, cut, which, attention, carry, stream)


def _rows(
    S: Structure,
    part: Part,
    dtype: str,
    kernel_of: tuple[Cut, str, tuple[int, ...]],
    perm: int,
    attention: tuple[Any, ...],
    carry: int,
    stream: int,
) -> None:
    """The entries of one part of the columns, or all."""
    (cut, name, constants), P = kernel_of, part.structure
    heads, feat = attention[-6:-4]
    wide = bool(cut.packs)
    more, counts = ((), (S.nnz,)) if wide else ((S.indptr, part.moves), (P.nnz, S.nnz))
    layout = _LAYOUT[_size_of_sums(dtype)]
    layout = f"5P{layout}PqII" if wide else f"7P{layout}P2qII"
    kernel = jit.load(
        f"attention/{name.replace('attend', 'pairwise')}.cu",
        f"{name}_rows",
        layout,
        (dtype, S.index_dtype),
        constants,
    )
    indices = S.indices if S.nnz else S.indptr
    structure = (P.indptr, indices, P.start, P.slot, perm, *more)
    rest = (carry, *counts, row_bytes(heads * feat, dtype), P.blocks)
    blocks = P.blocks * (heads // cut.mates) * cut.slices
    kernel(blocks, (*structure, *attention, *rest), threads=THREADS, stream=stream)


def _cut_rows(
    S: Structure,
    dtype: str,
    cut: Cut,
    which: tuple[int, int, bool],
    attention: tuple[Any, ...],
    carry: int,
    stream: int,
) -> None:
    """The rows that blocks share, of which each has left its sums in ``carry``."""
    (way, _, one), (heads, feat) = which, attention[-6:-4]
    layout, types = _LAYOUT[_size_of_sums(dtype)], (dtype, S.index_dtype)
    sums = 2 if way == SOURCES and (cut.packs or not one) else 1
    kernel = jit.load("attention/pairwise.cu", "attend_cut_rows", f"2P{layout}P6i", types)
    shape = (cut.lanes, cut.vector, max(cut.packs, 1), sums, int(way == FORWARD))
    args = (S.start, S.cut, *attention, carry, S.n_cuts, *shape)
    blocks = -(-S.n_cuts * heads * feat // THREADS)
    kernel(blocks, args, threads=THREADS, stream=stream)
