"""The numba twins of attention whose scores are of whole rows: as those of ``cpu``."""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ..engine.cpu import packed, values_of, writing
from . import cpu_pairwise
from .cpu import _dropping, narrow

#: Of the backward loops, whatever the threads: sums over all rows then do not depend on these.
PIECES = 256


def attend(
    indptr: Array,
    indices: Array,
    Q: Array,
    K: Array,
    V: Array | None,
    att: Array | None,
    out: Array,
    *,
    edges: Array | None = None,
    slope: float,
    scale: float,
    dropout: float,
    seed: int,
    loops: bool,
    statistics: Array | None = None,
) -> None:
    """``out[i, h] = sum of M[e, h] P[e, h] V[j, h]`` over the entries of row i.

    ``P`` is the softmax of ``scale <Q[i, h], K[j, h]> + edges[e, h]`` over the row, or with ``att``
    of ``scale <att[h], leaky(Q[i, h] + K[j, h])> + edges[e, h]``; without ``V`` the keys are the
    values.  All are (n, heads, feat), ``edges`` (nnz, heads).  ``statistics`` (n_rows, heads, 2)
    takes of each row its largest score, and 1 over its sum of exponentials relative to that.
    """
    q, k = _read(Q), _read(K)
    scoring = _scoring(Q, att, edges, slope, scale)
    dropping = _dropping(dropout, seed, q.dtype.type)
    statistics = np.empty(0, q.dtype) if statistics is None else statistics.reshape(-1)
    A = indptr, indices, np.empty(0, indices.dtype)
    with writing(out) as (Y, pieces):
        cpu_pairwise.forward(
            *(A, q, k, k if V is None else _read(V), scoring, dropping, loops),
            *(Y.reshape(-1), statistics, pieces),
        )


def attend_backward(
    indptr: Array,
    indices: Array,
    t_indptr: Array,
    t_indices: Array,
    perm: Array,
    grad: Array,
    Q: Array,
    K: Array,
    V: Array | None,
    att: Array | None,
    out: Array,
    statistics: Array,
    *,
    edges: Array | None,
    slope: float,
    scale: float,
    dropout: float,
    seed: int,
    loops: bool,
    dQ: Array,
    dK: Array,
    dV: Array | None,
    datt: Array | None,
    dedges: Array | None,
) -> None:
    """Gradients of all that ``attend`` takes, from that of its result.

    ``t_indptr, t_indices`` is the transposed structure, ``perm`` its entries' numbers.  ``out`` and
    ``statistics`` are what ``attend`` wrote.  ``dK`` takes those of the values too where ``V`` is
    None, and ``dV`` is None just then; ``datt`` is for ``att``, and ``dedges`` may be None.
    """
    q, k, g, result = (_read(a) for a in (Q, K, grad, out))
    v = k if V is None else _read(V)
    scoring = _scoring(Q, att, edges, slope, scale)
    dropping = _dropping(dropout, seed, q.dtype.type)
    dq, dk = _space(dQ, q), _space(dK, k)
    dv = dk if dV is None else _space(dV, v)
    none, dots = np.empty(0, q.dtype), np.empty(statistics.size // 2, q.dtype)
    stats = statistics.reshape(-1), dots
    of_att = np.zeros((0 if att is None else PIECES, *Q.shape[1:]), q.dtype)
    of_edges = none if dedges is None else dedges.reshape(-1)
    of_edges[...] = 0  # what stored loops keep
    A, T = (indptr, indices, np.empty(0, perm.dtype)), (t_indptr, t_indices, perm)
    near, far = (q, g), (k, v)
    with writing(none):
        cpu_pairwise.backward(
            *(A, near, far, scoring, dropping, loops, False, stats),
            *(dq, result, of_att.reshape(-1), of_edges, PIECES),
        )
        cpu_pairwise.backward(
            *(T, far, near, scoring, dropping, loops, True, stats),
            *(dk, dv, none, none, PIECES),
        )
    with np.errstate(over="ignore", under="ignore"):
        for given, made in ((dQ, dq), (dK, dk), (dV, dv)):
            if given is not None and not np.may_share_memory(given, made):
                given[...] = made.reshape(given.shape)
        if datt is not None:
            datt[...] = of_att.sum(axis=0)


def _read(a: Array) -> Array:
    """One axis; a copy of what is read-only, a kind of its own to loops that take several."""
    flat = packed(a)
    return flat if flat.flags.writeable else flat.copy()


def _space(given: Array, like: Array) -> Array:
    """The memory of ``given`` as one axis, or other memory of the dtype that sums have."""
    in_place = given.dtype == like.dtype and given.flags.c_contiguous
    return given.reshape(-1) if in_place else np.empty_like(like)


def _scoring(
    Q: Array, att: Array | None, edges: Array | None, slope: float, scale: float
) -> tuple[Any, ...]:
    """``(heads, feat, att, edges, slope, scale)``."""
    factors, terms = values_of(att, Q).reshape(-1), values_of(edges, Q).reshape(-1)
    one = factors.dtype.type
    return *Q.shape[1:], factors, terms, narrow(one, slope), narrow(one, scale)
