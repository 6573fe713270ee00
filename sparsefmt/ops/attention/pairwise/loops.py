"""Attention whose scores are of two rows, on NumPy arrays: compiled loops, and their callers.

Loops hold the scores of some entries of a row at a time, and scale the row's sums when a larger
score comes, as in ``pairwise.cu``.  ``att`` is empty where scores are products.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ....formats.primitives import SHORT
from ...engine.lanes import (
    add_product,
    exp,
    greater,
    lanes,
    lanes_beside,
    load,
    prefetch,
    product,
    store,
    total,
    where,
    width_of,
)
from ...engine.loops import (
    MIDDLE,
    NARROW,
    dot,
    inlined,
    move_block,
    parallel,
    rows_of,
    writing,
)
from ...engine.small import packed, values_of
from ...engine.structure import transposed
from ..gat.loops import Index, Rows, stays
from ..gat.small import dropping_of, narrow
from ..score import Dropping, PairwiseArguments, heads_and_feat, shape_of, sums_dtype

#: Entries of a row at a time: 64 rows of 128 float32 values fill the first cache.
ENTRIES = 64
#: Pieces of work of the gradients, whatever the threads: sums over all rows do not depend on these.
PIECES = 256


class Scoring(NamedTuple):
    """How scores are made of two rows, and what is added to them."""

    heads: int
    feat: int
    att: Any  #: empty where scores are dot products
    edges: Any  #: scores of the entries, or empty
    slope: Any
    scale: Any


class End(NamedTuple):
    """Rows at one end of the entries: sources, or targets."""

    scored: Any  #: keys, or queries
    weighed: Any  #: values, or gradients of the result: their products are gradients of weights


@inlined
def _gather(
    A: Rows, far: tuple[Array, ...], pitch: int, i: Index, e: Index, loops: bool, places: Array,
    ids: Array,
) -> Any:  # fmt: skip
    """Write neighbours and numbers of the next entries of row ``i``, and prefetch rows of ``far``.

    With ``loops`` stored ones are left out and one follows the last entry.  Returns the entry
    behind them, and how many they are.
    """
    indptr, indices, perm = A
    stop, count = np.int64(indptr[i + 1]), 0
    while e < stop and count < len(places):
        j = np.int64(indices[e])
        if not (loops and j == i):
            places[count], ids[count] = j, perm[e] if len(perm) else e
            count += 1
        e += 1
    if loops and e == stop and count < len(places):
        places[count], ids[count] = i, np.int64(indptr[-1]) + i
        count, e = count + 1, e + 1
    line = width_of(lanes(far[0], NARROW, 0))
    for k in range(count):
        for f in range(0, pitch, line):
            for X in far:
                prefetch(lanes(X, NARROW, 0), X, places[k] * pitch + f)
    return e, count


@inlined
def _leaky_product(
    X: Array, at: Index, Y: Array, there: Index, att: Array, slope: float, first: Index, feat: int
) -> Any:
    """Compute ``sum of att leaky(x + y)``."""
    zero = lanes(X, NARROW, 0)
    step, sums = width_of(zero), zero
    for f in range(0, feat, step):
        count = min(step, feat - f)
        z = add_product(load(zero, X, at + f, count), 1, load(zero, Y, there + f, count))
        leaky = where(greater(z, zero), z, product(z, slope))
        sums = add_product(sums, load(zero, att, first + f, count), leaky)
    return total(sums)


@inlined
def _scores(
    own: Array, i: Index, far: Array, places: Array, ids: Array, scoring: Scoring, h: int,
    scores: Array,
) -> None:  # fmt: skip
    """Write the scores of one head of row ``i`` of ``own`` with rows of ``far`` at the places."""
    heads, feat, att, edges, slope, scale = scoring
    first = h * feat
    at = i * heads * feat + first
    if len(att):
        for k in range(len(places)):
            there = places[k] * heads * feat + first
            scores[k] = scale * _leaky_product(own, at, far, there, att, slope, first, feat)
    else:
        for k in range(len(places)):
            there = places[k] * heads * feat + first
            scores[k] = scale * dot(own, at, far, there, feat)
    for k in range(len(places)):
        place = ids[k] * heads + h
        if place < len(edges):  # a loop that is not stored has no edge
            scores[k] += edges[place]


@inlined
def _drop(dropping: Dropping, ids: Array, h: int, weights: Array) -> None:
    """Set the weights of dropped entries to 0."""
    if dropping.below > 0:
        for k in range(len(ids)):
            if not stays(dropping, ids[k], h):
                weights[k] = 0


@inlined
def _exponentials(values: Array, less: float, count: int) -> Any:
    """Compute ``exp(value - less)`` in place of each value; return their sum."""
    low, zero = lanes(values, NARROW, -np.inf), lanes(values, NARROW, 0)
    tops, sums = lanes_beside(zero, values, less), zero
    for k in range(0, count, width_of(zero)):
        many = min(width_of(zero), count - k)
        powers = exp(add_product(load(low, values, k, many), -1, tops))
        store(powers, values, k, many)
        sums = add_product(sums, 1, load(zero, values, k, many))
    return total(sums)


@inlined
def _add_rows(
    out: Array, at: Index, before: float, X: Array, first: Index, pitch: int, feat: int,
    places: Array, weights: Array,
) -> None:  # fmt: skip
    """Compute ``out = before * out + sum of weights[k] X[places[k]]``."""
    zero = lanes(out, MIDDLE, 0)
    for f in range(0, feat, width_of(zero)):
        count = min(width_of(zero), feat - f)
        sums = product(load(zero, out, at + f, count), before)
        for k in range(len(places)):
            there = places[k] * pitch + first + f
            sums = add_product(sums, weights[k], load(zero, X, there, count))
        store(sums, out, at + f, count)


@inlined
def _add_slopes(
    out: Array, datt: Array, to: int, own: Array, at: Index, far: Array, first: Index,
    scoring: Scoring, places: Array, grads: Array,
) -> None:  # fmt: skip
    """Add ``att sum of grads[k] leaky'(z)`` to ``out``, ``sum of grads[k] leaky(z)`` to datt."""
    feat, att, slope = scoring.feat, scoring.att, scoring.slope
    zero, pitch = lanes(out, MIDDLE, 0), scoring.heads * feat
    for f in range(0, feat, width_of(zero)):
        count = min(width_of(zero), feat - f)
        x = load(zero, own, at + f, count)
        sums, of_att = zero, zero
        for k in range(len(places)):
            there = places[k] * pitch + first + f
            z = add_product(x, 1, load(zero, far, there, count))
            ds = lanes_beside(zero, out, grads[k])
            ds = where(greater(z, zero), ds, product(ds, slope))
            sums = add_product(sums, 1, ds)
            of_att = add_product(of_att, ds, z)
        factors = load(zero, att, first + f, count)
        store(add_product(load(zero, out, at + f, count), factors, sums), out, at + f, count)
        if len(datt):
            place = to + first + f
            store(add_product(load(zero, datt, place, count), 1, of_att), datt, place, count)


@parallel
def forward(
    A: Rows, queries: Array, keys: Array, values: Array, scoring: Scoring, dropping: Dropping,
    loops: bool, out: Array, statistics: Array, pieces: int,
) -> None:  # fmt: skip
    """Compute ``O[i, h] = sum of P[e, h] V[j, h]``; of each row and head its ``statistics``."""
    heads, feat = scoring.heads, scoring.feat
    pitch, low = heads * feat, out.dtype.type(-np.inf)
    for piece in numba.prange(pieces):
        places, ids = np.empty(ENTRIES, np.int64), np.empty(ENTRIES, np.int64)
        weights = np.empty(ENTRIES, out.dtype)
        tops, sums = np.empty(heads, out.dtype), np.empty(heads, out.dtype)
        totals, sum_totals = np.zeros(2 * pitch, out.dtype), np.zeros(2 * heads, out.dtype)
        first, last = rows_of(A.indptr, piece, pieces)
        for i in range(first, last):
            e, stop = np.int64(A.indptr[i]), np.int64(A.indptr[i + 1]) + loops
            some, long = e < stop, stop - e > SHORT
            tops[:], sums[:], out[i * pitch : (i + 1) * pitch] = low, 0, 0
            while e < stop:
                e, n = _gather(A, (keys, values), pitch, i, e, loops, places, ids)
                for h in range(heads):
                    there, at = h * feat, i * pitch + h * feat
                    near = places[:n], ids[:n]
                    _scores(queries, i, keys, *near, scoring, h, weights)
                    top = tops[h]
                    for k in range(n):
                        top = max(top, weights[k])
                    less = top if top > low else out.dtype.type(0)
                    before = np.exp(tops[h] - less) if top != tops[h] else out.dtype.type(1)
                    sums[h] = sums[h] * before + _exponentials(weights, less, n)
                    tops[h] = top
                    _drop(dropping, ids[:n], h, weights)
                    _add_rows(out, at, before, values, there, pitch, feat, places[:n], weights)
                    if long:
                        move_block(out, at, feat, totals[2 * there :], before, e == stop)
                        move_block(sums, h, 1, sum_totals[2 * h :], before, e == stop)
            for h in range(heads):
                inverse = 1 / sums[h] if some else out.dtype.type(0)
                factor = dropping.scale * inverse
                for f in range(i * pitch + h * feat, i * pitch + (h + 1) * feat):
                    out[f] *= factor
                if len(statistics):
                    statistics[2 * (i * heads + h)] = tops[h]
                    statistics[2 * (i * heads + h) + 1] = inverse


@inlined
def _gradients(
    i: Index, near: End, far: End, statistics: Array, dots: Array, of_sources: bool, places: Array,
    ids: Array, scoring: Scoring, dropping: Dropping, h: int, weights: Array, grads: Array,
) -> None:  # fmt: skip
    """Write ``M P`` of one head of the gathered entries, and the gradients of their scores."""
    heads, feat = scoring.heads, scoring.feat
    _scores(near.scored, i, far.scored, places, ids, scoring, h, weights)
    for k in range(len(places)):
        weights[k] -= statistics[2 * ((places[k] if of_sources else i) * heads + h)]
    _exponentials(weights, 0, len(places))
    for k in range(len(places)):
        item = (places[k] if of_sources else i) * heads + h
        weights[k] *= statistics[2 * item + 1]
        grads[k] = -weights[k] * dots[item]
        weights[k] *= dropping.scale
    _drop(dropping, ids, h, weights)
    at = (i * heads + h) * feat
    for k in range(len(places)):
        there = (places[k] * heads + h) * feat
        grads[k] += weights[k] * dot(near.weighed, at, far.weighed, there, feat)


@parallel
def backward(
    A: Rows, near: End, far: End, scoring: Scoring, dropping: Dropping, loops: bool,
    of_sources: bool, statistics: Array, dots: Array, dnear: Array, dvalues: Array, datt: Array,
    dedges: Array, pieces: int,
) -> None:  # fmt: skip
    """Write the gradients of the rows of ``near``, from those of ``far`` at the entries' other end.

    ``of_sources`` goes over the transposed structure, and writes the gradient of the values too.
    Else those of the edges, a sum of that of ``att`` for each piece, and ``D`` of each row.
    """
    heads, feat = scoring.heads, scoring.feat
    pitch, unit = heads * feat, dnear.dtype.type(1)
    for piece in numba.prange(pieces):
        places, ids = np.empty(ENTRIES, np.int64), np.empty(ENTRIES, np.int64)
        weights, grads = np.empty(ENTRIES, dnear.dtype), np.empty(ENTRIES, dnear.dtype)
        totals, value_totals = np.zeros(2 * pitch, dnear.dtype), np.zeros(2 * pitch, dnear.dtype)
        att_totals, moved = np.zeros(2 * pitch, dnear.dtype), False
        first, last = rows_of(A.indptr, piece, pieces)
        for i in range(first, last):
            e, stop = np.int64(A.indptr[i]), np.int64(A.indptr[i + 1]) + loops
            long = stop - e > SHORT
            dnear[i * pitch : (i + 1) * pitch] = 0
            if of_sources:
                dvalues[i * pitch : (i + 1) * pitch] = 0
            else:
                for h in range(heads):
                    at = (i * heads + h) * feat
                    dots[i * heads + h] = dot(near.weighed, at, dvalues, at, feat)
            while e < stop:
                e, n = _gather(A, far, pitch, i, e, loops, places, ids)
                for h in range(heads):
                    there, at = h * feat, i * pitch + h * feat
                    entries = places[:n], ids[:n]
                    _gradients(
                        i, near, far, statistics, dots, of_sources, *entries, scoring, dropping, h,
                        weights, grads,
                    )  # fmt: skip
                    for k in range(n):
                        if ids[k] * heads + h < len(dedges):
                            dedges[ids[k] * heads + h] = grads[k]
                        grads[k] *= scoring.scale
                    if of_sources:
                        _add_rows(
                            dvalues, at, unit, far.weighed, there, pitch, feat, places[:n], weights
                        )
                    if len(scoring.att):
                        _add_slopes(
                            dnear, datt, piece * pitch, near.scored, at, far.scored, there,
                            scoring, places[:n], grads,
                        )  # fmt: skip
                    else:
                        _add_rows(
                            dnear, at, unit, far.scored, there, pitch, feat, places[:n], grads
                        )
                    if long:
                        if of_sources:
                            move_block(
                                dvalues, at, feat, value_totals[2 * there :], unit, e == stop
                            )
                        move_block(dnear, at, feat, totals[2 * there :], unit, e == stop)
                        if len(datt):
                            of_att, moved = att_totals[2 * there :], True
                            move_block(datt, piece * pitch + there, feat, of_att, unit, False)
        if moved:
            for h in range(heads):
                there = h * feat
                of_att = att_totals[2 * there :]
                move_block(datt, piece * pitch + there, feat, of_att, unit, True)


def _inputs_of(
    args: PairwiseArguments,
) -> tuple[Array, Array, Array, Scoring, Dropping, bool]:
    """Return the arguments as loops take them: features as one axis, numbers as sums run."""
    keys, kind = args.keys, np.dtype(sums_dtype(args.keys)).type
    terms = values_of(args.att, keys).reshape(-1), values_of(args.edges, keys).reshape(-1)
    factors = narrow(kind, args.slope), narrow(kind, args.scale)
    scoring = Scoring(*heads_and_feat(keys), *terms, *factors)
    q, k = _read(args.queries), _read(keys)
    v = k if args.values is None else _read(args.values)
    return q, k, v, scoring, dropping_of(args.dropout, args.seed, kind), args.loops


def _read(a: Array) -> Array:
    """Flatten an array; copy a read-only one, which compiled loops take for another type."""
    flat = packed(a)
    return flat if flat.flags.writeable else flat.copy()


def pairwise(A: CSR, *arguments: Any, out: Array | None = None) -> Array:
    """Compute ``O[i, h] = sum of M[e, h] P[e, h] V[j, h]``, of ``PairwiseArguments``."""
    return _forward(A, PairwiseArguments(*arguments), out, train=False)[0]


def pairwise_with_statistics(A: CSR, *arguments: Any) -> tuple[Array, Array]:
    """Compute ``pairwise``, and what backward reads of each row and head."""
    return _forward(A, PairwiseArguments(*arguments))


def _forward(
    A: CSR, args: PairwiseArguments, out: Array | None = None, *, train: bool = True
) -> tuple[Array, Array]:
    """Compute the product, and with ``train`` the statistics."""
    inputs, keys = _inputs_of(args), args.keys
    if out is None:
        out = np.empty((A.n_rows, *keys.shape[1:]), keys.dtype)
    shape = (A.n_rows, heads_and_feat(keys)[0], 2) if train else 0
    statistics = np.zeros(shape, sums_dtype(keys))
    if out.size:
        rows = Rows(A.indptr, A.indices, np.empty(0, A.indices.dtype))
        with writing(out) as (result, pieces):
            forward(rows, *inputs, result.reshape(-1), statistics.reshape(-1), pieces)
    return out, statistics


def pairwise_backward(
    A: CSR, T: CSR | None, perm: Array | None, grad: Array, out: Array | None,
    statistics: Array | None, of_edges: bool, *arguments: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute gradients of queries, keys, values, ``att`` and edges, as on a GPU."""
    args = PairwiseArguments(*arguments)
    inputs = _inputs_of(args)
    (queries, keys, values), shared = inputs[:3], inputs[3:]
    sums, make, dtype = keys.dtype, np.empty if grad.size else np.zeros, args.keys.dtype
    dqueries, dkeys, dvalues = (make(shape_of(a), sums) for a in args[:3])
    datt = np.zeros(shape_of(args.att), sums)
    dedges = np.zeros(shape_of(args.edges, of_edges), sums)  # 0 at stored loops that are left out
    if grad.size:
        if statistics is None:
            out, statistics = _forward(A, args, np.empty(grad.shape, sums))
        if T is None:
            T, perm = transposed(A)
        none, of_pieces = np.empty(0, sums), np.zeros((PIECES, datt.size), sums)
        of_rows = statistics.reshape(-1), np.empty(statistics.size // 2, sums)  # the second: D
        targets, sources = End(queries, _read(grad)), End(keys, values)
        of_targets = dqueries.reshape(-1), _read(out), of_pieces.reshape(-1), dedges.reshape(-1)
        weighed = dkeys if args.values is None else dvalues
        of_sources = dkeys.reshape(-1), weighed.reshape(-1), none, none
        columns = Rows(T.indptr, T.indices, perm)
        rows = Rows(A.indptr, A.indices, np.empty(0, columns.perm.dtype))
        with writing(none):
            backward(rows, targets, sources, *shared, False, *of_rows, *of_targets, PIECES)
            backward(columns, sources, targets, *shared, True, *of_rows, *of_sources, PIECES)
        datt = datt if args.att is None else of_pieces.sum(axis=0).reshape(datt.shape)
    with np.errstate(over="ignore", under="ignore"):
        narrowed = (d.astype(dtype, copy=False) for d in (dqueries, dkeys, dvalues))
        return *narrowed, datt, dedges
