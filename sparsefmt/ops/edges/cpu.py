"""SDDMM and edge softmax on NumPy arrays: compiled loops, and the functions around them."""

from typing import Any

import numba
import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.lanes import (
    add_product,
    divided,
    exp,
    greater,
    lanes,
    lanes_beside,
    largest,
    load,
    prefetch,
    product,
    store,
    total,
    where,
    width_of,
)
from ..engine.loops import (
    AHEAD,
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
from ..engine.small import factors_at_entries, flat, packed, wide


@parallel
def products_at_entries(
    indptr: Array, indices: Array, X: Array, ldx: Int, Y: Array, ldy: Int, heads: Int, out: Array,
    feat: Int, pieces: Int,
) -> None:  # fmt: skip
    """Compute ``out[e, h] = <X[i, h], Y[j, h]>``; flat arrays and their row strides."""
    last, line = len(indices) - 1, width_of(lanes(Y, NARROW, 0))
    for piece in numba.prange(pieces):
        start, stop = rows_of(indptr, piece, pieces)
        for i in range(start, stop):
            for e in range(np.int64(indptr[i]), np.int64(indptr[i + 1])):
                ahead = np.int64(indices[min(e + AHEAD, last)]) * ldy
                for f in range(0, heads * feat, line):
                    prefetch(lanes(Y, NARROW, 0), Y, ahead + f)
                at, there = i * ldx, np.int64(indices[e]) * ldy
                for h in range(heads):
                    out[e * heads + h] = dot(X, at + h * feat, Y, there + h * feat, feat)


@by_blocks
def _power_lanes(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Write powers of some entries, which are lanes; add them up."""
    scores, out, top = args
    low, step, sums = lanes(scores, NARROW, -np.inf), width_of(zero), zero
    for e in range(first, last, step):
        count = min(step, last - e)
        shifted = add_product(load(low, scores, e, count), -1, top)
        powers = exp(shifted)
        store(powers, out, e, count)
        # Lanes beyond the row: -inf less a finite top is 0 after exp, so they add nothing.
        sums = add_product(sums, 1, load(zero, out, e, count))
    return sums


@inlined
def _softmax_one(scores: Array, out: Array, start: Int, stop: Int) -> None:
    """Compute the softmax of one head: lanes are entries."""
    zero, low = lanes(scores, NARROW, 0), lanes(scores, NARROW, -np.inf)
    step, top = width_of(zero), low
    for e in range(start, stop, step):
        run = load(low, scores, e, min(step, stop - e))
        top = where(greater(run, top), run, top)
    top = lanes_beside(zero, scores, largest(top))
    denominator = total(_power_lanes(zero, start, stop, (scores, out, top), step))
    for e in range(start, stop, step):
        count = min(step, stop - e)
        store(divided(load(zero, out, e, count), denominator), out, e, count)


@by_blocks
def _power_rows(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Write powers of some entries, whose lanes are heads; add them up."""
    scores, out, top, h, heads, count = args
    sums = zero
    for e in range(first, last):
        powers = exp(add_product(load(zero, scores, e * heads + h, count), -1, top))
        store(powers, out, e * heads + h, count)
        sums = add_product(sums, 1, powers)
    return sums


@inlined
def _softmax_heads(scores: Array, out: Array, start: Int, stop: Int, h: Int, heads: Int) -> None:
    """Compute the softmax of several heads: lanes are heads."""
    zero, low = lanes(scores, NARROW, 0), lanes(scores, NARROW, -np.inf)
    count, top = min(width_of(zero), heads - h), low
    for e in range(start, stop):
        run = load(zero, scores, e * heads + h, count)
        top = where(greater(run, top), run, top)
    sums = _power_rows(zero, start, stop, (scores, out, top, h, heads, count))
    for e in range(start, stop):
        at = e * heads + h
        store(divided(load(zero, out, at, count), sums), out, at, count)


@parallel
def softmax_of_rows(indptr: Array, scores: Array, heads: Int, out: Array, pieces: Int) -> None:
    """Compute the softmax of each row's scores, head by head."""
    step = width_of(lanes(scores, NARROW, 0))
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        for i in range(first, last):
            start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
            if heads == 1:
                _softmax_one(scores, out, start, stop)
            else:
                for h in range(0, heads, step):
                    _softmax_heads(scores, out, start, stop, h, heads)


@by_blocks
def _product_lanes(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up products at some entries, which are lanes."""
    p, grad = args
    step, sums = width_of(zero), zero
    for e in range(first, last, step):
        count = min(step, last - e)
        sums = add_product(sums, load(zero, p, e, count), load(zero, grad, e, count))
    return sums


@by_blocks
def _product_rows(zero: Run, first: Int, last: Int, args: Inputs) -> Any:
    """Add up products at some entries, whose lanes are heads."""
    p, grad, h, heads, count = args
    sums = zero
    for e in range(first, last):
        at = e * heads + h
        sums = add_product(sums, load(zero, p, at, count), load(zero, grad, at, count))
    return sums


@inlined
def _backward_one(p: Array, grad: Array, out: Array, start: Int, stop: Int) -> None:
    zero = lanes(p, NARROW, 0)
    step = width_of(zero)
    sums = _product_lanes(zero, start, stop, (p, grad), step)
    mean = lanes_beside(zero, p, total(sums))
    for e in range(start, stop, step):
        count = min(step, stop - e)
        run = add_product(load(zero, grad, e, count), -1, mean)
        store(product(run, load(zero, p, e, count)), out, e, count)


@inlined
def _backward_heads(
    p: Array, grad: Array, out: Array, start: Int, stop: Int, h: Int, heads: Int
) -> None:
    zero = lanes(p, NARROW, 0)
    count = min(width_of(zero), heads - h)
    sums = _product_rows(zero, start, stop, (p, grad, h, heads, count))
    for e in range(start, stop):
        at = e * heads + h
        run = add_product(load(zero, grad, at, count), -1, sums)
        store(product(run, load(zero, p, at, count)), out, at, count)


@parallel
def softmax_gradient_of_rows(
    indptr: Array, p: Array, grad: Array, heads: Int, out: Array, pieces: Int
) -> None:
    """Compute ``p (grad - sum of p grad)``, row by row and head by head."""
    step = width_of(lanes(p, NARROW, 0))
    for piece in numba.prange(pieces):
        first, last = rows_of(indptr, piece, pieces)
        for i in range(first, last):
            start, stop = np.int64(indptr[i]), np.int64(indptr[i + 1])
            if heads == 1:
                _backward_one(p, grad, out, start, stop)
            else:
                for h in range(0, heads, step):
                    _backward_heads(p, grad, out, start, stop, h, heads)


def sddmm(
    A: CSR, X: Array, Y: Array, row_scale: Array | None = None, col_scale: Array | None = None,
    *, out: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Compute ``r[i] c[j] <X[i, h], Y[j, h]>``: (n, heads, feat) twice to (nnz, heads)."""
    dtype, shape = X.dtype, (A.nnz, *X.shape[1:-1])
    out = np.empty(shape, dtype) if out is None else out
    if not out.size:
        return out
    scaled = row_scale is not None or col_scale is not None
    if scaled:  # nothing is rounded before the scales
        X, Y = wide(X), wide(Y)
    heads, feat = X.shape[1] if X.ndim == 3 else 1, X.shape[-1]
    (x, ldx), (y, ldy) = flat(X), flat(Y)
    with writing(out) as (products, pieces):
        products_at_entries(
            A.indptr, A.indices, x, ldx, y, ldy, heads, products.reshape(-1), feat, pieces
        )
        if scaled:
            factors = factors_at_entries(A, products.dtype, row_scale, col_scale)
            products *= factors if products.ndim == 1 else factors[:, None]
    return out


def edge_softmax(A: CSR, scores: Array, *, out: Array | None = None) -> Array:
    """Compute the softmax over each row's entries, head by head: (nnz,) or (nnz, heads)."""
    out = np.empty(scores.shape, scores.dtype) if out is None else out
    if out.size:
        heads = scores.shape[1] if scores.ndim == 2 else 1
        with writing(out) as (probabilities, pieces):
            softmax_of_rows(A.indptr, packed(scores), heads, probabilities.reshape(-1), pieces)
    return out


def edge_softmax_backward(
    A: CSR, probabilities: Array, grad: Array, *, out: Array | None = None
) -> Array:
    """Compute ``p * (grad - sum over the row of p * grad)``, head by head."""
    out = np.empty(grad.shape, grad.dtype) if out is None else out
    if out.size:
        p, g, heads = packed(probabilities), packed(grad), grad.shape[1] if grad.ndim == 2 else 1
        with writing(out) as (result, pieces):
            softmax_gradient_of_rows(A.indptr, p, g, heads, result.reshape(-1), pieces)
    return out
