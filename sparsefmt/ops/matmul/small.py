"""Small sums and means on NumPy arrays, by SciPy's loops on one thread."""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ...formats.primitives import add_product
from ..engine import small
from ..engine.small import wide
from .cuda import shape_of_heads


def refuses(
    A: Any, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *_: Any,
    **__: Any,
) -> list[str]:  # fmt: skip
    """List the reasons against a small product."""
    width = int(x.shape[-1] * small.heads_of(values))
    reasons = small.reasons_against((A.nnz + A.n_rows) * width)
    takes = reduce in ("sum", "mean")
    return reasons if takes else [*reasons, f"SciPy's loops do not take a {reduce}"]


def spmm(
    A: CSR, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *,
    out: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Compute ``out[i] = r[i] * sum or mean of a[e] c[j] x[j]`` over the entries of row i."""
    if values is not None and values.ndim == 2:
        out = np.empty(shape_of_heads(A, x, values), x.dtype) if out is None else out
        for h in range(values.shape[1]):
            features = x if x.ndim == 2 else x[:, h]
            out[:, h] = spmm(A, features, values[:, h], perm, row_scale, col_scale, reduce)
        return out
    if out is None:
        out = np.empty((A.n_rows, x.shape[1]), x.dtype)
    if not out.size:
        return out
    if values is not None and perm is not None:
        values = values[perm]
    a = small.weights(A, x, values, col_scale)
    sums = out if a.dtype == out.dtype else np.empty(out.shape, a.dtype)
    sums.fill(0)
    X = np.ascontiguousarray(wide(x))
    add_product(A.shape, (A.indptr, A.indices, a), X, sums, small.blocks_of(A))
    if row_scale is not None or reduce == "mean":
        small.scale_rows(A, sums, row_scale, reduce)
    if sums is not out:
        with np.errstate(over="ignore", under="ignore"):
            out[...] = sums
    return out
