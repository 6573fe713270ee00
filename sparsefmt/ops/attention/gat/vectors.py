"""Loops of graph attention over vertices: scores of vectors, and the gradients through them."""

import numba

from ....formats.arrays import Array
from ...engine.lanes import add_product, lanes, load, store, width_of
from ...engine.loops import NARROW, dot, parallel


@parallel
def scores_of_vectors(
    H: Array, source: Array, target: Array, heads: int, feat: int, el: Array, er: Array, pieces: int
) -> None:
    """Compute ``el = <H, source>`` and ``er = <H, target>`` of each row and head."""
    for piece in numba.prange(pieces):
        for item in range(piece * len(el) // pieces, (piece + 1) * len(el) // pieces):
            h = item % heads
            el[item] = dot(H, item * feat, source, h * feat, feat)
            er[item] = dot(H, item * feat, target, h * feat, feat)


@parallel
def through_scores(
    H: Array, scores: tuple[Array, Array], vectors: tuple[Array, Array], heads: int, feat: int,
    dH: Array, sums: Array, pieces: int
) -> None:  # fmt: skip
    """Add to ``dH`` and ``sums`` what the gradients ``scores`` add through both vectors.

    ``sums`` are the gradients of both vectors over the rows of each piece, 0 before.
    """
    d_el, d_er = scores
    source, target = vectors
    width = heads * feat
    n_rows = len(H) // width
    for piece in numba.prange(pieces):
        zero = lanes(H, NARROW, 0)
        wide, of_source, of_target = width_of(zero), 2 * piece * width, (2 * piece + 1) * width
        for i in range(piece * n_rows // pieces, (piece + 1) * n_rows // pieces):
            for h in range(heads):
                left, right = d_el[i * heads + h], d_er[i * heads + h]
                for f in range(h * feat, (h + 1) * feat, wide):
                    count = min(wide, (h + 1) * feat - f)
                    run = load(zero, H, i * width + f, count)
                    for of, factor in ((of_source, left), (of_target, right)):
                        sum_ = load(zero, sums, of + f, count)
                        store(add_product(sum_, factor, run), sums, of + f, count)
                    added = load(zero, dH, i * width + f, count)
                    added = add_product(added, left, load(zero, source, f, count))
                    added = add_product(added, right, load(zero, target, f, count))
                    store(added, dH, i * width + f, count)
