"""Products with a sample of each row on NumPy arrays; the samples are those of ``rows.cuh``.

Rows are sampled a batch at a time, so that prefetches reach beyond the end of a row.  All random
words are uint64, with 32 bits in use where ``rows.cuh`` has ``unsigned``: beside int64 numba would
turn smaller ones into floats.
"""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.lanes import lanes, prefetch, width_of
from ..engine.loops import AHEAD, NARROW, Int, by_tiles, dot, inlined, parallel, rows_of, writing
from ..engine.small import flat, longest_row, values_of
from ..matmul.cpu import spmm, sum_tile
from .options import ALL, STRATEGIES, SampleOptions

_FASTRAND, _RANDOM = 1, 2
#: Entries of a batch, or of its one row if that has more: with columns and values they stay in the
#: L1 until they are summed.
BATCH = 1024

_GOLDEN, _MIX1, _MIX2, _LOW, _TIMES1, _TIMES2, _STEP_A, _STEP_B = (
    np.uint64(word)
    for word in (
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFFFFFFFF,
        0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9, 0xBB67AE85,
    )
)  # fmt: skip
_ONE, _15, _27, _30, _31, _32 = (np.uint64(count) for count in (1, 15, 27, 30, 31, 32))


def spmm_sampled(
    A: CSR,
    x: Array,
    values: Array | None = None,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    seed: Any = None,
    width: int = ALL,
    strategy: str = "bucket",
    mean: bool = False,
    rescale: bool = False,
    *,
    out: Array | None = None,
) -> Array:
    """Compute ``out[i] = r[i] * factor(i) * sum of a[e] * c[j] * x[j]`` over row i's sample."""
    out = np.empty((A.n_rows, x.shape[1]), x.dtype) if out is None else out
    if not out.size:
        return out
    if longest_row(A) <= width:  # all rows whole: nothing to gather
        reduce = "mean" if mean else "sum"
        return spmm(A, x, values, None, row_scale, col_scale, reduce, out=out)
    stored, features = (A.indices, values_of(values, x)), flat(x)
    scales = values_of(row_scale, x), values_of(col_scale, x)
    to, options = _ends(A, width), (*_drawn(strategy, seed), mean, rescale)
    with writing(out) as (y, pieces):
        _spmm(A.indptr, to, stored, features, scales, flat(y), options, pieces)
    return out


def spmm_sampled_da(
    A: CSR, x: Array, grad: Array, row_scale: Array, col_scale: Array, seed: Any, width: int,
    strategy: str, mean: bool, rescale: bool, *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Compute ``out[e] = r[i] * factor(i) * c[j] * <grad[i], x[j]>`` at sampled entries, else 0."""
    out = np.empty(A.nnz, x.dtype) if out is None else out
    if not out.size:
        return out
    features = flat(grad), flat(x), x.shape[1]
    scales = values_of(row_scale, x), values_of(col_scale, x)
    to, options = _ends(A, width), (*_drawn(strategy, seed), mean, rescale)
    with writing(out) as (products, pieces):
        _sddmm(A.indptr, to, A.indices, *features, scales, products, options, pieces)
    return out


def sample_rows(A: CSR, options: SampleOptions, cols: Array, entries: Array, *, to: Array) -> None:
    """Write columns and numbers of the sampled entries, those of row i from ``to[i]`` on."""
    drawn = _drawn(options.strategy, options.seed)
    with writing(np.empty(0)) as (_, pieces):  # all results are integers
        _sample(A.indptr, A.indices, to, cols, entries, options.width, *drawn, pieces)


def _drawn(strategy: str, seed: Any) -> tuple[int, np.uint64]:
    """Return strategy and seed as the loops take them; the seed may be an array of one."""
    seed = 0 if seed is None else seed if isinstance(seed, int) else seed.item()
    return STRATEGIES[strategy], np.uint64(seed % 2**64)


def _ends(A: CSR, width: int) -> Array:
    """Return where the sample of each row begins among the samples of all rows, and the end."""
    to = np.zeros(A.n_rows + 1, np.int64)
    np.minimum(A.lengths, width, out=to[1:])
    return to.cumsum(out=to)


# Which entries


@inlined
def _mixed(z: Any) -> Any:
    """Mix the bits of a word by a bijection (Steele, Lea and Flood, OOPSLA'14)."""
    z = (z ^ (z >> _30)) * _MIX1
    z = (z ^ (z >> _27)) * _MIX2
    return z ^ (z >> _31)


@inlined
def _word(x: Array, key: Any) -> Any:
    """Mix 32 bits with a key."""
    x = (((x ^ key) & _LOW) * _TIMES1) & _LOW
    return ((x ^ (x >> _15)) * _TIMES2) & _LOW


@inlined
def _stride(length: Int) -> Any:
    """Return 577, of ES-SpMM's equation 2, or the next prime that does not divide the length."""
    if length % 577 != 0:
        return 577
    if length % 587 != 0:
        return 587
    return 593 if length % 593 != 0 else 599


@inlined
def _round(place: Int, keys: Array, cut: Any) -> Any:
    """Apply a round of the Feistel network of ``rows.cuh`` to a pair packed in one number."""
    high, shift = cut
    low, up = place & ((_ONE << shift) - _ONE), place >> shift
    up += (_word(low, keys[0]) * high) >> _32
    up = min(up, up - high)
    low ^= (_word(up, keys[1]) << shift) >> _32
    return (up << shift) | low


@inlined
def _permute(entries: Array, at: Int, begin: Int, length: Int, taken: Int, key: Any) -> None:
    """Write ``begin`` plus where a permutation of 0 .. length - 1 takes 0 .. taken - 1.

    All places go through a round before the next one, so that the loops are vectorised.
    """
    size, bits = np.uint64(length), 0
    while (length - 1) >> bits > 0:
        bits += 1
    shift = np.uint64(bits // 2)
    cut = ((size + (_ONE << shift) - _ONE) >> shift) & _LOW, shift
    rounds = 14 if length < 12 else 8 if length < 64 else 6 if length < 600 else 4
    places = entries[at : at + taken]
    for k in range(len(places)):
        places[k] = k
    a, b = key & _LOW, key >> _32
    for _ in range(rounds):
        for k in range(len(places)):
            places[k] = np.int64(_round(np.uint64(places[k]) & _LOW, (a, b), cut))
        a, b = (a + _STEP_A) & _LOW, (b + _STEP_B) & _LOW
    for k in range(len(places)):
        place = np.uint64(places[k]) & _LOW
        while place >= size:  # beyond the row: go through all rounds again
            a, b = key & _LOW, key >> _32
            for _ in range(rounds):
                place = _round(place, (a, b), cut)
                a, b = (a + _STEP_A) & _LOW, (b + _STEP_B) & _LOW
        places[k] = begin + np.int64(place)


@inlined
def _sample_row(
    entries: Array, at: Int, row: Int, begin: Int, length: Int, taken: Int, strategy: Int, seed: Any
) -> None:
    """Write the numbers of a row's sampled entries from ``at`` on; ``seed`` is mixed already."""
    if taken < length and strategy == _FASTRAND:
        place, step = 0, _stride(length) % length
        for k in range(taken):
            entries[at + k] = begin + place
            place += step
            if place >= length:
                place -= length
    elif taken < length and strategy == _RANDOM:
        key = _mixed(seed + np.uint64(row + 1) * _GOLDEN)
        _permute(entries, at, begin, length, taken, key)
    else:
        for k in range(taken):
            entries[at + k] = begin + k


@parallel
def _sample(
    indptr: Array, indices: Array, to: Array, cols: Array, entries: Array, width: Int,
    strategy: Int, seed: Any, pieces: Int,
) -> None:  # fmt: skip
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        mixed = _mixed(seed)
        for i in range(start, stop):
            begin, at = np.int64(indptr[i]), np.int64(to[i])
            length = np.int64(indptr[i + 1]) - begin
            taken = min(length, width)
            _sample_row(entries, at, i, begin, length, taken, strategy, mixed)
            for k in range(at, at + taken):
                cols[k] = indices[entries[k]]


# Batches of rows


@inlined
def _room(to: Array, start: Int, stop: Int) -> Any:
    """Return the size of a batch: BATCH, or what the largest sample of a row needs."""
    room = BATCH
    for i in range(start, stop):
        room = max(room, to[i + 1] - to[i])
    return room


@inlined
def _batch(entries: Array, indptr: Array, to: Array, first: Int, stop: Int, options: Any) -> Any:
    """Sample rows from ``first`` on while they fit; return the row behind the last of them."""
    last = first
    while last < stop and to[last + 1] - to[first] <= len(entries):
        at, begin = to[last] - to[first], np.int64(indptr[last])
        length, taken = np.int64(indptr[last + 1]) - begin, to[last + 1] - to[last]
        _sample_row(entries, at, last, begin, length, taken, options[0], options[1])
        last += 1
    return last


# Products


@inlined
def _gather(
    cols: Array, weights: Array, entries: Array, A: Any, col_scale: Array, count: Int
) -> None:
    """Load the columns of a batch, and the factors of the rows of X, if there are any."""
    indices, data = A
    for k in range(count):
        cols[k] = indices[entries[k]]
    if len(data):
        for k in range(count):
            weights[k] = data[entries[k]]
    elif len(weights):
        weights[:count] = 1
    if len(col_scale):
        for k in range(count):
            weights[k] *= col_scale[cols[k]]


@parallel
def _spmm(
    indptr: Array, to: Array, A: Any, X: Array, scales: Array, Y: Array, options: Any, pieces: Int
) -> None:
    """Run the loop: ``A`` is (indices, data), ``X`` and ``Y`` are (flat, row stride)."""
    indices, data = A
    row_scale, col_scale = scales
    strategy, seed, mean, rescale = options
    weighted = len(data) > 0 or len(col_scale) > 0
    for piece in numba.prange(pieces):
        start, stop = rows_of(to, piece, pieces)
        room, drawn = _room(to, start, stop), (strategy, _mixed(seed))
        entries, cols = np.empty(room, np.int64), np.empty(room, indices.dtype)
        weights, none = np.empty(room if weighted else 0, X[0].dtype), col_scale[:0]
        first = start
        while first < stop:
            last = _batch(entries, indptr, to, first, stop, drawn)
            count = to[last] - to[first]
            _gather(cols, weights, entries, A, col_scale, count)
            args = (cols[:count], weights), X, (row_scale, none), Y, mean
            for i in range(first, last):
                span = to[i] - to[first], to[i + 1] - to[first]
                length = np.int64(indptr[i + 1]) - np.int64(indptr[i])
                share = length / max(span[1] - span[0], 1) if rescale else 1.0
                by_tiles(sum_tile, X[0], Y[1], (i, span, share), args)
            first = last


@parallel
def _sddmm(
    indptr: Array, to: Array, indices: Array, X: Array, Y: Array, feat: Int, scales: Array,
    out: Array, options: Any, pieces: Int,
) -> None:  # fmt: skip
    """Compute dot products at sampled entries, else 0; ``X``, ``Y`` are (flat, row stride)."""
    X, ldx = X
    Y, ldy = Y
    row_scale, col_scale = scales
    strategy, seed, mean, rescale = options
    unit, line = X.dtype.type(1), width_of(lanes(Y, NARROW, 0))
    for piece in numba.prange(pieces):
        start, stop = rows_of(to, piece, pieces)
        drawn = strategy, _mixed(seed)
        entries = np.empty(_room(to, start, stop), np.int64)
        out[indptr[start] : indptr[stop]] = 0
        first = start
        while first < stop:
            last = _batch(entries, indptr, to, first, stop, drawn)
            behind = to[last] - to[first]
            for i in range(first, last):
                taken = to[i + 1] - to[i]
                factor = row_scale[i] if len(row_scale) else unit
                if mean:
                    factor /= max(taken, 1)
                if rescale:
                    length = np.int64(indptr[i + 1]) - np.int64(indptr[i])
                    factor *= length / max(taken, 1)
                for k in range(to[i] - to[first], to[i + 1] - to[first]):
                    ahead = np.int64(indices[entries[min(k + AHEAD, behind - 1)]]) * ldy
                    for f in range(0, feat, line):
                        prefetch(lanes(Y, NARROW, 0), Y, ahead + f)
                    e = entries[k]
                    j = np.int64(indices[e])
                    result = dot(X, i * ldx, Y, j * ldy, feat)
                    column = col_scale[j] if len(col_scale) else unit
                    out[e] = result * column * factor
            first = last
