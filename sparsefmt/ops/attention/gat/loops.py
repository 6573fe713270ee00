"""Loops of graph attention that numba compiles, over flat arrays; weights are of a row at a time.

Sums are split by the sign of the score, as in ``gat.cu``: gradients of scores are linear in both.
"""

from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ...engine.lanes import (
    add_product,
    exp,
    halves,
    lanes,
    lanes_beside,
    load,
    paired,
    prefetch,
    product,
    store,
    total,
    width_of,
)
from ...engine.loops import (
    AHEAD,
    MIDDLE,
    NARROW,
    Inputs,
    Int,
    Run,
    by_blocks,
    dot,
    inlined,
    parallel,
    rows_of,
    writing,
)
from ...engine.small import longest_row, packed, wide
from ...engine.structure import transposed
from ..score import Dropping, Forward, GatArguments, heads_and_feat, shape_of
from . import small
from .small import Twin, dropping_of, narrow, rounded, type_of_sums
from .vectors import scores_of_vectors, through_scores

#: A place or a number of an entry.
Index: TypeAlias = int | np.signedinteger[Any]
#: Rows of a share of the sums of vectors' gradients.
_ROWS = 1024


class Rows(NamedTuple):
    """The entries of each row, and the numbers by which they are dropped."""

    indptr: Any
    indices: Any
    perm: Any  #: of the transpose: each entry's number in CSR order; else empty


class Scores(NamedTuple):
    """The terms of the scores."""

    sources: Any
    targets: Any
    edges: Any
    loops: Any  #: of the virtual loops


class Sizes(NamedTuple):
    """What all loops over rows count with."""

    heads: int
    feat: int
    longest: int  #: entries of the longest row, a virtual loop included
    slope: Any
    loops: bool  #: whether each row has a virtual one


philox = inlined(small.philox)


@inlined
def stays(dropping: Dropping, number: Index, h: int) -> Any:
    """Return True if the entry of that number stays in head ``h``."""
    below = dropping.below
    return below == 0 or philox(dropping.seed, number, h) >= below


@inlined
def _sum_of(left: float, right: float, more: Array, at: Index) -> Any:
    """Add the scores of both ends and, where there are any, one more."""
    z = left + right
    if len(more):
        z += more[at]
    return z


@inlined
def _row_scores(
    row: Array, start: Index, i: Index, h: int, scores: Scores, heads: int, slope: float,
    loops: bool, weights: Array, signs: Array,
) -> Any:  # fmt: skip
    """Write scores of a row's entries, a virtual loop last; return their number and largest."""
    el, edges = scores.sources, scores.edges
    right, top = scores.targets[i * heads + h], el.dtype.type(-np.inf)
    size = len(row)
    for k in range(size):
        j = np.int64(row[k])
        z = _sum_of(el[j * heads + h], right, edges, (start + k) * heads + h)
        signs[k] = 1 if z > 0 else -1
        weights[k] = z if z > 0 else slope * z
        if loops and j == i:
            weights[k] = -np.inf
        top = max(top, weights[k])
    if loops:
        z = _sum_of(el[i * heads + h], right, scores.loops, i * heads + h)
        signs[size] = 1 if z > 0 else -1
        weights[size] = z if z > 0 else slope * z
        top, size = max(top, weights[size]), size + 1
    return size, top


@by_blocks
def _signed_powers(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Write powers with their signs in place of some scores; add up all and signed ones."""
    weights, signs, tops = args
    nothing = lanes(weights, NARROW, -np.inf)
    step, (sums, positive) = width_of(nothing), halves(zero)
    none = sums
    for k in range(first, last, step):
        count = min(step, last - k)
        powers = exp(add_product(load(nothing, weights, k, count), -1, tops))
        sign = load(none, signs, k, count)
        store(product(powers, sign), weights, k, count)
        signed = load(none, weights, k, count)
        sums = add_product(sums, sign, signed)
        positive = add_product(positive, 1, signed)
    return paired(sums, positive)


@inlined
def _powers(weights: Array, signs: Array, size: int, top: float) -> Any:
    """Compute ``exp(s - top)`` with the sign of s, in place; return sums of all and positive."""
    zero = lanes(weights, NARROW, 0)
    args = weights, signs, lanes_beside(zero, weights, top)
    both = _signed_powers(paired(zero, zero), 0, size, args, width_of(zero))
    sums, positive = halves(both)
    denominator = total(sums)
    # What is left of the signed sum: positive less negative.
    return denominator, (denominator + total(positive)) / 2


@inlined
def _add(sums: tuple[Any, Any], weight: float, run: Any) -> Any:
    """Add ``weight * run`` to the sum of positive weights or to that of negative ones."""
    plus, minus = sums
    return add_product(plus, max(weight, 0), run), add_product(minus, max(-weight, 0), run)


@by_blocks
def _signed_sums(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Sum ``X`` over some entries of a row, by their weights' signs."""
    X, ldx, at, row, weights, count = args
    sums = halves(zero)
    none = sums[0]
    for k in range(first, last):
        sums = _add(sums, weights[k], load(none, X, np.int64(row[k]) * ldx + at, count))
    return paired(*sums)


@inlined
def _sums(X: Array, ldx: int, at: Index, row: Array, own: int, weights: Array, count: int) -> Any:
    """Sum ``X`` over a row's entries, by their weights' signs; ``own`` is the loop's, or -1."""
    zero, args = lanes(X, MIDDLE, 0), (X, ldx, at, row, weights, count)
    sums = halves(_signed_sums(paired(zero, zero), 0, len(row), args))
    if own >= 0:
        sums = _add(sums, weights[len(row)], load(zero, X, own * ldx + at, count))
    return sums


@inlined
def _drop(
    dropping: Dropping, perm: Array, start: Index, stored: int, loop: Index, size: int, h: int,
    weights: Array,
) -> None:  # fmt: skip
    """Set weights of dropped entries to 0; ``perm``, if any, numbers stored ones."""
    for k in range(stored):
        number = np.int64(perm[start + k]) if len(perm) else start + k
        if not stays(dropping, number, h):
            weights[k] = 0
    if size > stored and not stays(dropping, loop, h):
        weights[stored] = 0


@parallel
def forward(
    indptr: Array, indices: Array, H: Array, scores: Scores, sizes: Sizes, dropping: Dropping,
    out: Array, plus: Array, stats: Array, attention: Array, pieces: int,
) -> None:  # fmt: skip
    """Compute ``O[i, h] = sum of M[e, h] P[e, h] H[j, h]``, and what is asked for besides.

    ``plus`` is the part of it whose scores are positive.  ``stats`` has of each row and head the
    largest score, the sum of exponentials, the share of positive scores, and 0.  ``attention`` is
    P, in the order of the entries; 0 for stored loops beside virtual ones.
    """
    heads, feat, longest, slope, loops = sizes
    for piece in numba.prange(pieces):
        weights, signs = np.empty(longest, H.dtype), np.empty(longest, H.dtype)
        first, last = rows_of(indptr, piece, pieces)
        wide = width_of(lanes(H, MIDDLE, 0))
        for i in range(first, last):
            start, row = np.int64(indptr[i]), indices[indptr[i] : indptr[i + 1]]
            own, loop = i if loops else -1, np.int64(indptr[-1]) + i
            for h in range(heads):
                item = i * heads + h
                size, top = _row_scores(
                    row, start, i, h, scores, heads, slope, loops, weights, signs
                )
                denominator, positive = _powers(weights, signs, size, top)
                if len(attention):
                    for k in range(len(row)):
                        attention[(start + k) * heads + h] = abs(weights[k]) / denominator
                if dropping.below > 0:
                    _drop(dropping, indices[:0], start, len(row), loop, size, h, weights)
                factor = H.dtype.type(0) if denominator == 0 else dropping.scale / denominator
                for f in range(0, feat, wide):
                    count = min(wide, feat - f)
                    a, b = _sums(H, heads * feat, h * feat + f, row, own, weights, count)
                    a, b = product(a, factor), product(b, factor)
                    if len(plus):
                        store(a, plus, item * feat + f, count)
                    store(add_product(a, 1, b), out, item * feat + f, count)
                if len(stats):
                    stats[4 * item], stats[4 * item + 1] = top, denominator
                    stats[4 * item + 2] = positive / denominator if size else 0
                    stats[4 * item + 3] = 0


@inlined
def _source_scores(
    row: Array, perm: Array, start: Index, j: Index, h: int, scores: Scores, heads: int,
    slope: float, loops: bool, stats: Array, work: tuple[Array, Array, Array],
) -> Any:  # fmt: skip
    """Write a source's scores, less the targets' largest, into ``work``; return their number.

    Beside it two factors of its power: what makes P of it, with the score's sign, and
    ``leaky'(z) D`` times that.
    """
    er, edges, (weights, signs, shares) = scores.targets, scores.edges, work
    left, size = scores.sources[j * heads + h], len(row)
    unit = er.dtype.type(1)
    item: Index
    for k in range(size):
        item = np.int64(row[k]) * heads + h
        z = left + er[item]
        if len(edges):
            z += edges[np.int64(perm[start + k]) * heads + h]
        inverse = stats[3 * item + 1]
        signs[k] = inverse if z > 0 else -inverse
        weights[k] = (z if z > 0 else slope * z) - stats[3 * item]
        shares[k] = (unit if z > 0 else slope) * stats[3 * item + 2] * inverse
        if loops and np.int64(row[k]) == j:
            weights[k] = -np.inf
    if loops:
        item = j * heads + h
        z = _sum_of(left, er[item], scores.loops, item)
        inverse = stats[3 * item + 1]
        signs[size] = inverse if z > 0 else -inverse
        weights[size] = (z if z > 0 else slope * z) - stats[3 * item]
        shares[size] = (unit if z > 0 else slope) * stats[3 * item + 2] * inverse
        size += 1
    return size


@by_blocks
def _slopes(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Write P with the sign of the score in place of some scores; add up ``leaky'(z) P D``."""
    weights, signs, shares = args
    nothing, step, less = lanes(weights, NARROW, -np.inf), width_of(zero), zero
    for k in range(first, last, step):
        count = min(step, last - k)
        powers = exp(load(nothing, weights, k, count))
        less = add_product(less, powers, load(zero, shares, k, count))
        store(product(powers, load(zero, signs, k, count)), weights, k, count)
    return less


@inlined
def _source_weights(work: tuple[Array, Array, Array], size: int) -> Any:
    """Write P with the sign of the score in place of the score; return ``sum of leaky'(z) P D``."""
    zero = lanes(work[0], NARROW, 0)
    return total(_slopes(zero, 0, size, work, width_of(zero)))


@parallel
def backward(
    T: Rows, grad: Array, H: Array, scores: Scores, sizes: Sizes, dropping: Dropping, stats: Array,
    out: Array, d_el: Array, pieces: int,
) -> None:  # fmt: skip
    """Compute ``dH[j, h] = sum of M P[e, h] dO[i, h]`` of the transpose, and the gradient of el.

    ``stats`` has of each target and head the largest score, 1 over the sum of exponentials, and
    <dO, O>.
    """
    heads, feat, longest, slope, loops = sizes
    indptr, indices, perm = T
    for piece in numba.prange(pieces):
        weights, signs = np.empty(longest, grad.dtype), np.empty(longest, grad.dtype)
        work = weights, signs, np.empty(longest, grad.dtype)
        first, last = rows_of(indptr, piece, pieces)
        zero = lanes(grad, MIDDLE, 0)
        wide = width_of(zero)
        for j in range(first, last):
            start, row = np.int64(indptr[j]), indices[indptr[j] : indptr[j + 1]]
            own, loop = j if loops else -1, np.int64(indptr[-1]) + j
            for h in range(heads):
                item, dots = j * heads + h, zero
                size = _source_scores(
                    row, perm, start, j, h, scores, heads, slope, loops, stats, work
                )
                less = _source_weights(work, size)
                if dropping.below > 0:
                    _drop(dropping, perm, start, len(row), loop, size, h, weights)
                for f in range(0, feat, wide):
                    count = min(wide, feat - f)
                    a, b = _sums(grad, heads * feat, h * feat + f, row, own, weights, count)
                    a, b = product(a, dropping.scale), product(b, dropping.scale)
                    store(add_product(a, 1, b), out, item * feat + f, count)
                    run = load(zero, H, item * feat + f, count)
                    dots = add_product(dots, run, add_product(a, slope, b))
                d_el[item] = total(dots) - less


@parallel
def statistics(
    out: Array, plus: Array, grad: Array, forward: Array, slope: float, feat: int, stats: Array,
    d_er: Array, pieces: int,
) -> None:  # fmt: skip
    """Write ``stats`` of each row and head, which ``backward`` reads, and the gradient ``d_er``."""
    for piece in numba.prange(pieces):
        for item in range(piece * len(d_er) // pieces, (piece + 1) * len(d_er) // pieces):
            D = dot(grad, item * feat, out, item * feat, feat)
            positive = dot(grad, item * feat, plus, item * feat, feat)
            denominator = forward[4 * item + 1]
            stats[3 * item], stats[3 * item + 2] = forward[4 * item], D
            stats[3 * item + 1] = 0 if denominator == 0 else 1 / denominator
            d_er[item] = (1 - slope) * (positive - D * forward[4 * item + 2])


@inlined
def _score_gradient(
    z: float, grad: Array, H: Array, target: Index, source: Index, feat: int, slope: float,
    factor: float, stats: Array,
) -> Any:  # fmt: skip
    """Compute ``leaky'(z) P (M <dO, H> - D)`` of one entry and head; M is the ``factor``."""
    p = np.exp((z if z > 0 else slope * z) - stats[3 * target]) * stats[3 * target + 1]
    p = p if z > 0 else slope * p
    through = factor * dot(grad, target * feat, H, source * feat, feat)
    return p * (through - stats[3 * target + 2])


@parallel
def edge_gradient(
    indptr: Array, indices: Array, grad: Array, H: Array, scores: Scores, sizes: Sizes,
    dropping: Dropping, stats: Array, out: Array, own: Array, pieces: int,
) -> None:  # fmt: skip
    """Write gradients of scores of entries and, to ``own``, of loops; either may be empty."""
    (el, er, edges, virtual), (heads, feat, _, slope, loops) = scores, sizes
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        nothing, end, line = H.dtype.type(0), len(indices) - 1, width_of(lanes(H, NARROW, 0))
        for i in range(first, last):
            for item in range(i * heads, (i + 1) * heads if len(own) else i * heads):
                z, number = _sum_of(el[item], er[item], virtual, item), end + 1 + i
                factor = dropping.scale if stays(dropping, number, item % heads) else nothing
                own[item] = _score_gradient(z, grad, H, item, item, feat, slope, factor, stats)
            for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1]) if len(out) else 0):
                j, ahead = np.int64(indices[e]), np.int64(indices[min(e + AHEAD, end)])
                for f in range(0, heads * feat, line):
                    prefetch(lanes(H, NARROW, 0), H, ahead * heads * feat + f)
                for h in range(heads):
                    if loops and i == j:
                        out[e * heads + h] = 0
                        continue
                    target, source = i * heads + h, j * heads + h
                    z = _sum_of(el[source], er[target], edges, e * heads + h)
                    factor = dropping.scale if stays(dropping, e, h) else nothing
                    out[e * heads + h] = _score_gradient(
                        z, grad, H, target, source, feat, slope, factor, stats
                    )


# Kernels


def _forward(
    A: CSR, bias: Array | None, args: GatArguments, *, out: Array | None = None, train: bool = True
) -> Forward:
    """Compute the product in ``out``, or in the dtype of sums; with ``train`` also statistics."""
    h, kind = args.h, type_of_sums(args.h)
    if out is None:
        out = np.empty((A.n_rows, *h.shape[1:]), kind)
    plus = np.empty(out.shape if train else 0, kind)
    statistics = np.empty((A.n_rows, heads_and_feat(h)[0], 4) if train else 0, kind)
    if out.size or train:
        with writing(out) as (Y, pieces):
            results = Y.reshape(-1), plus.reshape(-1), statistics.reshape(-1), np.empty(0, kind)
            forward(A.indptr, A.indices, packed(h), *_case_of(A, args), *results, pieces)
            if bias is not None:
                Y += wide(bias).reshape(h.shape[1:])
    return Forward(out, plus, statistics)


def _gradients(
    A: CSR, transpose: tuple[CSR | None, Any], grad: Array, saved: Forward, of_edges: bool,
    args: GatArguments,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute gradients of the features and of all scores, over columns and then over rows."""
    h = args.h
    kind, X, g = type_of_sums(h), packed(h), packed(grad)
    T, perm = transposed(A) if transpose[0] is None else (transpose[0], transpose[1])
    terms = (args.el, True), (args.er, True), (args.loop_edges, True), (args.edges, of_edges)
    dh, stats = np.empty(h.shape, h.dtype), np.empty(3 * args.er.size, kind)
    results = [np.empty(shape_of(term, wanted), kind) for term, wanted in terms]
    d_el, d_er, d_loops, d_edges = (a.reshape(-1) for a in results)
    (out, plus, forward), case = (packed(a) for a in saved), _case_of(T, args)
    if not args.loops:
        d_loops[...] = 0
        d_loops = d_loops[:0]
    with writing(dh) as (result, pieces):
        statistics(out, plus, g, forward, case[1].slope, h.shape[-1], stats, d_er, pieces)
        columns, of_columns = Rows(T.indptr, T.indices, perm), (result.reshape(-1), d_el, pieces)
        backward(columns, g, X, *case, stats, *of_columns)
        if len(d_edges) or len(d_loops):
            edge_gradient(A.indptr, A.indices, g, X, *case, stats, d_edges, d_loops, pieces)
    return dh, *results


def _attention(A: CSR, args: GatArguments, out: Array) -> None:
    """Write ``P[e, k]``, 0 at loops that are left out."""
    none = np.empty(0, out.dtype)
    with writing(out) as (P, pieces):
        rows = A.indptr, A.indices, none, *_case_of(A, args)
        forward(*rows, none, none, none, P.reshape(-1), pieces)


def gat_scores(h: Array, source: Array, target: Array) -> tuple[Array, Array]:
    """Compute ``el = <h, source>`` and ``er = <h, target>`` of each row and head."""
    el, er = np.zeros((2, *h.shape[:-1]), type_of_sums(h))
    if h.size:
        args = packed(h), packed(source), packed(target), *heads_and_feat(h)
        with writing(el) as (_, pieces):
            scores_of_vectors(*args, el.reshape(-1), er.reshape(-1), pieces)
    return el, er


def _through_scores(
    h: Array, dh: Array, d_el: Array, d_er: Array, source: Array, target: Array
) -> tuple[Array, Array]:
    """Add to ``dh`` what scores add to it; compute the gradients of both vectors."""
    scores, vectors = (packed(d_el), packed(d_er)), (packed(source), packed(target))
    shares = -(-len(h) // _ROWS)  # whatever the number of threads
    sums, result = np.zeros((shares, 2, *source.shape), d_el.dtype), packed(dh)
    if h.size:
        of_rows = *heads_and_feat(h), result, sums.reshape(-1), shares
        with writing(dh):
            through_scores(packed(h), scores, vectors, *of_rows)
    of_vectors = sums.sum(0, dtype=np.float64).astype(sums.dtype)
    return rounded(result.reshape(h.shape), h), of_vectors


def _case_of(A: CSR, args: GatArguments) -> tuple[Scores, Sizes, Dropping]:
    """Return what all loops over rows read."""
    kind = type_of_sums(args.h)
    terms = (np.empty(0, kind) if a is None else packed(a) for a in args[1:5])
    longest = longest_row(A) + bool(args.loops)
    sizes = *heads_and_feat(args.h), longest, narrow(kind, args.slope), bool(args.loops)
    return Scores(*terms), Sizes(*sizes), dropping_of(args.dropout, args.seed, kind)


_twin = Twin(_forward, _gradients, _through_scores, _attention)
gat, gat_attention, gat_backward = _twin.gat, _twin.gat_attention, _twin.gat_backward
gat_with_statistics = _twin.gat_with_statistics
gat_of_vectors, gat_of_vectors_backward = _twin.gat_of_vectors, _twin.gat_of_vectors_backward
gat_of_vectors_with_statistics = _twin.gat_of_vectors_with_statistics
