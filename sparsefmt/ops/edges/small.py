"""Small work on edges of NumPy arrays, by NumPy's loops on one thread."""

from math import prod
from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine import small
from ..engine.small import factors_at_entries, wide

#: Features that are gathered at a time: 4 MB of two float32 operands.
_PART = 1 << 19


def refuses_products(A: CSR, X: Array, *_: Any, **__: Any) -> list[str]:
    """List the reasons against small dot products."""
    return small.reasons_against(A.nnz * prod(X.shape[1:]))


@small.quietly
def sddmm(
    A: CSR, X: Array, Y: Array, row_scale: Array | None = None, col_scale: Array | None = None,
    *, out: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Compute ``r[i] c[j] <X[i, h], Y[j, h]>``: (n, heads, feat) twice to (nnz, heads)."""
    out = np.empty((A.nnz, *X.shape[1:-1]), X.dtype) if out is None else out
    if not out.size:
        return out
    products = out if out.dtype.itemsize >= 4 else np.empty(out.shape, np.float32)
    rows = small.rows_of(A)
    for part in small.parts(A.nnz, X[:1].size, _PART):
        left, right = wide(X[rows[part]]), wide(Y[A.indices[part]])
        np.einsum("...f,...f->...", left, right, out=products[part])
    if row_scale is not None or col_scale is not None:
        factors = factors_at_entries(A, products.dtype, row_scale, col_scale)
        products *= factors if products.ndim == 1 else factors[:, None]
    if products is not out:
        out[...] = products
    return out


@small.quietly
def edge_softmax(A: CSR, scores: Array, *, out: Array | None = None) -> Array:
    """Compute the softmax over each row's entries, head by head: (nnz,) or (nnz, heads)."""
    out = np.empty(scores.shape, scores.dtype) if out is None else out
    if out.size:
        s, rows = _by_head(scores), small.rows_of(A)
        powers = np.exp(s - small.reduce_rows(np.maximum, A, s, 0)[:, rows])
        powers /= small.reduce_rows(np.add, A, powers, 1)[:, rows]
        out[...] = powers.T.reshape(out.shape)
    return out


@small.quietly
def edge_softmax_backward(
    A: CSR, probabilities: Array, grad: Array, *, out: Array | None = None
) -> Array:
    """Compute ``p * (grad - sum over the row of p * grad)``, head by head."""
    out = np.empty(grad.shape, grad.dtype) if out is None else out
    if out.size:
        p, g = _by_head(probabilities), _by_head(grad)
        sums = small.reduce_rows(np.add, A, p * g, 0)
        out[...] = (p * (g - sums[:, small.rows_of(A)])).T.reshape(out.shape)
    return out


def _by_head(values: Array) -> Array:
    """Return (heads, nnz) values, contiguous, in the type in which sums run."""
    return np.ascontiguousarray(wide(values).reshape(len(values), small.heads_of(values)).T)
