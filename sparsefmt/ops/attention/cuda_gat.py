"""Launches of graph attention: one forward, two backward, and one more each where rows are cut.

Scores that vectors make of the features take one more each way.  Conventions as in ``_launch``.
Scores and what belongs to them are float32 for 2-byte features.
With ``loops`` each row has a virtual loop, which is entry nnz + row, and stored ones are left out.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from ..engine import jit
from ..engine.launch import ITEMSIZE, fill, row_bytes
from ..engine.structure import Structure
from ..matmul.cuda import Shape, spmm_shape

THREADS = 128  # of a block, as in rows.cuh
#: Bytes that the heads of a team gather side by side: a line of the L2. Two heads of 64 bytes took
#: 0.63x the time of each alone (H200, reddit, float16), 512 bytes 1.15x that of 128.
TEAM_BYTES = 128
_STATS_LANES = 8  # as in gat.cu
NOTHING, ANYTHING, ONLY_BIAS = range(3)  # as in gat.cu
#: Lanes that have a row and head of the scores, and a row of their gradient.
SCORE_LANES, SCORE_GRADIENT_LANES = (2, 8), (8, 32)
#: Rows that a block of the scores' gradient has at least; blocks at most, and where rows are wide.
_SHARE_ROWS, _MOST_SHARES, _FEWEST_SHARES = 64, 1024, 64

#: Of ``Scores``, by the dtype that sums run in; and what follows it forward and backward.
_SCORES = {4: "5PQqffI", 8: "5PQqddI"}
_FORWARD, _BACKWARD = "4P2i", "4P3i"


@dataclass(frozen=True, slots=True)
class Dropout:
    """Entries whose random word is below ``below`` are dropped, others multiplied with ``kept``.

    ``seed_at`` is the address of an int64 on the device that replaces the seed, so that a CUDA
    graph can draw anew; 0 for none.
    """

    seed: int = 0
    below: int = 0
    kept: float = 1.0
    seed_at: int = 0


def dropout(share: float, seed: int = 0, seed_at: int = 0) -> Dropout:
    """What drops that share of the entries, 0 to less than 1."""
    below = min(round(share * 2**32), 2**32 - 1)
    return Dropout(seed % 2**64, below, 1 / (1 - share), seed_at) if below else Dropout()


def size_of_sums(dtype: str) -> int:
    """Bytes of a score."""
    return max(ITEMSIZE[dtype], 4)


@lru_cache(maxsize=4096)
def _shape(dtype: str, heads: int, feat: int, together: int) -> tuple[Shape, int, int]:
    """How rows are read, heads of a team, and slices of a head's features; one if it has none.

    ``together`` has the lowest 4 bits of all addresses.
    """
    together = together if feat else 1
    shape = spmm_shape(dtype, feat=feat, ldx=heads * feat, together=together, wide=False)
    mates = 1
    while (
        heads % (2 * mates) == 0
        and 2 * mates * shape.lanes * shape.vector * ITEMSIZE[dtype] <= TEAM_BYTES
        and 2 * mates * shape.lanes <= jit.WARP
    ):
        mates *= 2
    return shape, mates, max(-(-feat // (shape.lanes * shape.vector)), 1)


def _general(dtype: str, index_dtype: str, vector: int) -> bool:
    """Whether one variant has to do for all: rare indices and loads of less than 16 bytes."""
    return index_dtype == "int64" or vector * ITEMSIZE[dtype] < 16


def variants(dtype: str, index_dtype: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and template arguments of all instantiations in ``gat.cu`` of these types."""
    sizes = product((1, 2, 4), (0, 1, 2, 4, 8, 16, 32, 64), (0, ITEMSIZE[dtype], 8))
    shapes = {_shape(dtype, heads, feat, together)[:2] for heads, feat, together in sizes}
    found: set[tuple[str, tuple[int, ...]]] = set()
    for (shape, mates), backward in product(shapes, (0, 1)):
        base = shape.lanes, shape.vector
        found.add(("gat_cut_rows", (*base, backward)))
        general = _general(dtype, index_dtype, shape.vector)
        extras = (NOTHING, ANYTHING) if backward else (NOTHING, ANYTHING, ONLY_BIAS)
        for flags in [(1, ANYTHING)] if general else product((0, 1), extras):
            found.add(("gat_balanced", (*base, mates, backward, *flags)))
    return sorted(found)


def gat_workspace(S: Structure, dtype: str, *, heads: int, feat: int) -> int:
    """Bytes for the sums of rows that blocks share; 0 unless a row is very long."""
    shapes = [_shape(dtype, heads, feat, together) for together in (0, 8, ITEMSIZE[dtype])]
    values = max(slices * one.lanes * (2 * one.vector + 3) for one, _, slices in shapes)
    return 2 * S.n_cuts * heads * values * size_of_sums(dtype)


def gat_slices(dtype: str, *, heads: int, feat: int, together: int) -> int:
    """Partial sums that the gradient of ``el`` has for each source and head."""
    return _shape(dtype, heads, feat, together % 16)[2]


def _scores(
    dropped: Dropout,
    slope: float,
    *,
    el: int,
    er: int = 0,
    edges: int = 0,
    loop_edges: int = 0,
    loops: int = -1,
) -> tuple[Any, ...]:
    arrays = (el, er, edges, loop_edges, dropped.seed_at)
    return (*arrays, dropped.seed, loops, slope, dropped.kept, dropped.below)


def gat(
    S: Structure,
    dtype: str,
    *,
    heads: int,
    feat: int,
    slope: float,
    dropped: Dropout,
    loops: bool,
    H: int,
    el: int,
    er: int,
    edges: int,
    loop_edges: int,
    bias: int,
    out: int,
    plus: int,
    stats: int,
    workspace: int,
    stream: int,
) -> None:
    """``O[i, h] = sum of P[e, h] H[j, h] + bias[h]``.

    On the way also ``plus``, the sum over positive scores, and ``stats``, (n_rows, heads, 4): the
    largest score, the sum of exponentials, the share of positive scores and 0; of no features, only
    those.  With ``loops`` or ``bias`` the structure is square.
    """
    if not (S.n_rows and heads and (feat or stats)):
        return
    if not (S.nnz or loops or bias):
        size = S.n_rows * heads * ITEMSIZE[dtype] * feat
        sums = S.n_rows * heads * 4 * size_of_sums(dtype)
        for pointer, nbytes in ((out, size), (plus, size), (stats, sums)):
            if pointer and nbytes:
                fill(pointer, nbytes, 0, stream)
        return
    first_loop = S.nnz if loops else -1
    edges = edges if S.nnz else 0
    scores = _scores(
        dropped, slope, el=el, er=er, edges=edges, loop_edges=loop_edges, loops=first_loop
    )
    way = (*scores, out, plus, bias, stats, heads, feat)
    extra = ANYTHING if loops or edges else ONLY_BIAS if bias else NOTHING
    X = H if feat else el
    together = H | out | plus | bias
    run = (S, dtype, heads, feat, together, X, 0, way, False, dropped, extra)
    _run(*run, workspace, stream)


def gat_statistics(
    dtype: str,
    *,
    items: int,
    heads: int,
    feat: int,
    slope: float,
    dropped: Dropout,
    loops: bool,
    nnz: int,
    H: int,
    el: int,
    loop_edges: int,
    bias: int,
    out: int,
    plus: int,
    grad: int,
    er: int,
    forward: int,
    stats: int,
    der: int,
    dloop: int,
    stream: int,
) -> None:
    """What entries read on the way back of each of ``items`` targets and heads, and ``der``.

    ``stats`` is (items, 4).  ``dloop`` takes the gradient of ``loop_edges``, for which alone ``H``
    and ``el`` are read: 0 without ``loops``.
    """
    if not items:
        return
    if dloop and not loops:
        fill(dloop, items * size_of_sums(dtype), 0, stream)
    first_loop = nnz if loops else -1
    scores = _scores(dropped, slope, el=el, er=er, loop_edges=loop_edges, loops=first_loop)
    layout = f"5P{_SCORES[size_of_sums(dtype)]}4Pq2i"
    kernel = jit.load("attention/gat.cu", "gat_stats", layout, (dtype,))
    arrays, results = (out, plus, bias, grad, H), (forward, stats, der, dloop if loops else 0)
    blocks = -(-items * _STATS_LANES // THREADS)
    args = (*arrays, *scores, *results, items, heads, feat)
    kernel(blocks, args, threads=THREADS, stream=stream)


def gat_backward(
    T: Structure,
    dtype: str,
    *,
    heads: int,
    feat: int,
    slope: float,
    dropped: Dropout,
    loops: bool,
    perm: int,
    grad: int,
    H: int,
    el: int,
    edges: int,
    loop_edges: int,
    stats: int,
    out: int,
    dell: int,
    workspace: int,
    stream: int,
) -> None:
    """``dH`` and, in as many parts as ``gat_slices`` says, ``del``.

    ``T`` is the transpose, whose entries have the numbers ``perm`` in CSR order.
    """
    if not (T.n_rows and heads):
        return
    together = grad | H | out
    slices = gat_slices(dtype, heads=heads, feat=feat, together=together)
    if not feat or not (T.nnz or loops):
        if feat:
            fill(out, T.n_rows * heads * feat * ITEMSIZE[dtype], 0, stream)
        fill(dell, T.n_rows * heads * slices * size_of_sums(dtype), 0, stream)
        return
    edges = edges if T.nnz else 0
    first_loop = T.nnz if loops else -1
    scores = _scores(dropped, slope, el=el, edges=edges, loop_edges=loop_edges, loops=first_loop)
    way = (*scores, stats, H, out, dell, heads, feat, slices)
    perm = perm if dropped.below or edges else 0
    extra = ANYTHING if loops or edges else NOTHING
    run = (T, dtype, heads, feat, together, grad, perm, way, True, dropped, extra)
    _run(*run, workspace, stream)


def _run(
    S: Structure,
    dtype: str,
    heads: int,
    feat: int,
    together: int,
    X: int,
    perm: int,
    way: tuple[Any, ...],
    backward: bool,
    dropped: Dropout,
    extra: int,
    workspace: int,
    stream: int,
) -> None:
    shape, mates, slices = _shape(dtype, heads, feat, together % 16)
    if not S.nnz:  # of a column that exists, whose weight is 0
        S, perm = replace(S, indices=S.indptr, nnz=1), 0
    layout = _SCORES[size_of_sums(dtype)] + (_BACKWARD if backward else _FORWARD)
    types, base = (dtype, S.index_dtype), (shape.lanes, shape.vector)
    flags = int(dropped.below > 0), extra
    if _general(dtype, S.index_dtype, shape.vector):
        flags = 1, ANYTHING
    constants = (*base, mates, int(backward), *flags)
    kernel = jit.load("attention/gat.cu", "gat_balanced", f"6P{layout}PqIIi", types, constants)
    arrays = (S.indptr, S.indices, S.start, S.slot, perm, X)
    sizes = (S.nnz, row_bytes(heads * feat, dtype), S.blocks, slices)
    blocks = S.blocks * (heads // mates) * slices
    kernel(blocks, (*arrays, *way, workspace, *sizes), threads=THREADS, stream=stream)
    if S.n_cuts:
        one = (*base, int(backward))
        kernel = jit.load("attention/gat.cu", "gat_cut_rows", f"2P{layout}Pii", types, one)
        blocks = -(-S.n_cuts * heads * slices * shape.lanes // THREADS)
        args = (S.start, S.cut, *way, workspace, S.n_cuts, slices)
        kernel(blocks, args, threads=THREADS, stream=stream)


def _vector(dtype: str, feat: int, together: int) -> int:
    """Values of a load: 16 bytes where all rows are aligned to that."""
    size = ITEMSIZE[dtype]
    return 16 // size if (together | feat * size) % 16 == 0 else 1


def gat_scores(
    dtype: str,
    *,
    n: int,
    heads: int,
    feat: int,
    H: int,
    source: int,
    target: int,
    el: int,
    er: int,
    stream: int,
) -> None:
    """``el = <H, source>`` and ``er = <H, target>`` of each row and head."""
    items = n * heads
    if not items:
        return
    vector = _vector(dtype, feat, H | source | target)
    lanes = SCORE_LANES[feat > SCORE_LANES[0] * vector]
    kernel = jit.load("attention/gat_scores.cu", "gat_scores", "5Pq2i", (dtype,), (lanes, vector))
    blocks = -(-items * lanes // THREADS)
    args = (H, source, target, el, er, items, heads, feat)
    kernel(blocks, args, threads=THREADS, stream=stream)


def gat_scores_blocks(n: int, heads: int, feat: int) -> int:
    """How many partial sums ``gat_scores_backward`` makes of each value."""
    wide = max(_MOST_SHARES * THREADS // max(heads * feat, THREADS), _FEWEST_SHARES)
    return max(min(-(-n // _SHARE_ROWS), wide), 1)


def gat_scores_backward(
    dtype: str,
    *,
    n: int,
    heads: int,
    feat: int,
    H: int,
    grad_H: int,
    dell: int,
    slices: int,
    der: int,
    source: int,
    target: int,
    result: int,
    out: int,
    partial: int,
    stream: int,
) -> None:
    """``out = grad_H + dell source + der target``, which may be ``grad_H`` itself.

    ``partial``, (``gat_scores_blocks``, 2, heads, feat), takes parts of the gradients of ``source``
    and ``target``; with ``result``, the gradient of ``gat``'s ``out``, it is 3 for 2, and takes
    those of ``bias`` too.  ``dell`` is (n, heads, slices), ``der`` (n, heads).
    """
    width = heads * feat
    if not width:
        return
    vector = _vector(dtype, feat, H | grad_H | source | target | result | out)
    lanes = SCORE_GRADIENT_LANES[width > SCORE_GRADIENT_LANES[0] * vector]
    constants = (lanes, vector)
    kernel = jit.load(
        "attention/gat_scores.cu", "gat_scores_backward", "9Pq4i", (dtype,), constants
    )
    shares = gat_scores_blocks(n, heads, feat)
    arrays = (H, grad_H, dell, der, source, target, result, out, partial)
    blocks = shares * -(-width // (lanes * vector))
    kernel(blocks, (*arrays, n, shares, heads, feat, slices), threads=THREADS, stream=stream)
