"""The numba twins of attention over edges.

As in ``cpu``: they take plain arrays and check nothing.  Features are (n, heads, feat), contiguous;
scores, their gradients and statistics have the dtype in which sums run: float32, or float64 for
float64 features.
"""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ..engine.cpu import packed, wide, writing
from . import cpu_gat


def gat(
    indptr: Array,
    indices: Array,
    H: Array,
    el: Array,
    er: Array,
    out: Array,
    *,
    edges: Array | None = None,
    loop_edges: Array | None = None,
    slope: float,
    dropout: float,
    seed: int,
    loops: bool = False,
    plus: Array | None = None,
    stats: Array | None = None,
) -> None:
    """``out[i, h] = sum of M[e, h] P[e, h] H[j, h]`` over the entries of row i, as ``ops.gat``.

    ``plus`` takes the part of it whose scores are positive; ``stats`` of shape (n_rows, heads, 4)
    each row's largest score, its sum of exponentials, the share of positive scores, and 0.
    """
    scores, one = _scores(el, er, edges, loop_edges), wide(el).dtype.type
    sizes, dropping = _sizes(indptr, H, loops), _dropping(dropout, seed, one)
    split = np.empty(0, one) if plus is None else np.empty(plus.shape, one)
    split = plus if plus is not None and plus.dtype == one else split
    with writing(out) as (Y, pieces):
        cpu_gat.forward(
            *(indptr, indices, packed(H), scores, sizes, dropping, narrow(one, slope), loops),
            *(_flat(Y), _flat(split), np.empty(0, one) if stats is None else _flat(stats), pieces),
        )
    if plus is not None and split is not plus:
        with np.errstate(over="ignore"):
            plus[...] = split


def gat_backward(
    indptr: Array,
    indices: Array,
    t_indptr: Array,
    t_indices: Array,
    perm: Array,
    grad: Array,
    H: Array,
    el: Array,
    er: Array,
    out: Array,
    plus: Array,
    stats: Array,
    *,
    edges: Array | None = None,
    loop_edges: Array | None = None,
    slope: float,
    dropout: float,
    seed: int,
    loops: bool = False,
    dH: Array,
    dell: Array,
    der: Array,
    dedges: Array | None = None,
    dloop: Array | None = None,
) -> None:
    """The gradients of ``gat``, which gave ``out``, ``plus`` and ``stats``.

    ``t_indptr, t_indices`` is the transposed structure; ``perm`` its entries' numbers in CSR order.
    """
    scores, one = _scores(el, er, edges, loop_edges), wide(el).dtype.type
    X, g, found = packed(H), packed(grad), np.empty(3 * der.size, one)
    shared = scores, _sizes(t_indptr, H, loops), _dropping(dropout, seed, one), narrow(one, slope)
    with writing(dH) as (result, pieces):
        cpu_gat.statistics(
            *(packed(out), packed(plus), g, _flat(stats), narrow(one, slope), H.shape[2]),
            *(found, _flat(der), pieces),
        )
        transposed = t_indptr, t_indices, perm
        cpu_gat.backward(
            *transposed, g, X, *shared, loops, found, _flat(result), _flat(dell), pieces
        )
        if dedges is not None:
            cpu_gat.edge_gradient(
                indptr, indices, g, X, *shared, loops, found, _flat(dedges), pieces
            )
        if dloop is not None and not loops:
            dloop[...] = 0
        elif dloop is not None:
            nnz = np.int64(indptr[-1])
            cpu_gat.loop_gradient(nnz, g, X, *shared, found, _flat(dloop), pieces)


def gat_attention(
    indptr: Array,
    indices: Array,
    el: Array,
    er: Array,
    out: Array,
    *,
    edges: Array | None = None,
    loop_edges: Array | None = None,
    slope: float,
    loops: bool = False,
) -> None:
    """``out[e, h] = P[e, h]`` in CSR order, before any dropout; 0 for stored loops if ``loops``."""
    scores, one = _scores(el, er, edges, loop_edges), wide(el).dtype.type
    sizes = _sizes(indptr, el[:, :, None], loops)
    with writing(out) as (P, pieces):
        given = scores, sizes, narrow(one, slope), loops
        cpu_gat.attention(indptr, indices, *given, _flat(P), pieces)


def _scores(el: Array, er: Array, *of_entries: Array | None) -> tuple[Array, ...]:
    left = packed(el)
    none = np.empty(0, left.dtype)
    return (left, packed(er), *(none if one is None else packed(one) for one in of_entries))


def _sizes(indptr: Array, H: Array, loops: bool) -> tuple[int, int, int]:
    """Heads, features, and the entries of the longest row, a virtual loop included."""
    return H.shape[1], H.shape[2], int(np.diff(indptr).max(initial=0)) + bool(loops)


def _dropping(share: float, seed: int, one: Any) -> tuple[Any, Any, Any]:
    """The seed, below which word of 32 bits an entry is dropped, and what others are scaled by."""
    below = min(round(share * 2**32), 2**32 - 1)
    return np.uint64(seed % 2**64), np.uint64(below), one(1 / (1 - share) if below else 1)


def narrow(one: Any, value: float) -> Any:
    """As the type that sums run in, infinite where it holds no such number."""
    with np.errstate(over="ignore"):
        return one(value)


def _flat(a: Array) -> Array:
    return a.reshape(-1)
