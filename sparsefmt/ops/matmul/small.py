"""Small sums and means on NumPy arrays, by SciPy's loops on one thread."""

from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import COO, CSR
from ...formats.convert import numbered_csr
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


def refuses_coo(A: Any, x: Array, *, reduce: str = "sum", **_: Any) -> list[str]:
    """List the reasons against a small product with a COO."""
    reasons = small.reasons_against((A.nnz + A.n_rows) * x.shape[1])
    return reasons if reduce == "sum" else [*reasons, f"scattering does not take a {reduce}"]


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
    add_product(A.shape, (A.indptr, A.indices, a), np.ascontiguousarray(wide(x)), sums)
    if row_scale is not None or reduce == "mean":
        small.scale_rows(A, sums, row_scale, reduce)
    if sums is not out:
        with np.errstate(over="ignore", under="ignore"):
            out[...] = sums
    return out


def spmm_coo(
    A: COO, x: Array, *, values: Array, row_scale: Array, col_scale: Array,
    out: Array | None = None, **_: Any,
) -> Array:  # fmt: skip
    """Add ``r[i] a[e] c[j] x[j]`` to ``out[i]`` for every entry: sorted by row, in their order."""
    B, numbers = numbered_csr(A.with_data(None))
    if row_scale is not None:
        factors = wide(row_scale)[A.row]
        values = factors if values is None else factors * wide(values)
    return spmm(B, x, values, numbers, None, col_scale, out=out)
