"""What the tests of tiles share: matrices, ways to split them, and how far tf32 may round."""

import numpy as np
from op_cases import features, put, quick_oracle

import sparsefmt
from sparsefmt.ops.tiles.costs import Costs
from sparsefmt.testing import error_bound, spmm_oracle

#: Eight rows: no kernel has such windows.
TILES = [(8, 8), (16, 8), (16, 16), (32, 16), (64, 16), (128, 16)]
WAYS = ["measured", "all", "mix", "none"]
#: What rounding costs that precision="tf32" allows.  In SpMM features, two bfloat16 of which the
#: second is rounded, and with values their product, without that of both second ones; in SDDMM
#: both factors have 11 bits.
FEATURES, PRODUCTS, TF32 = 2.0**-17, 2.0**-15, (1 + 2.0**-11) ** 2 - 1


def costs(way, height):
    """Costs that put all entries on matrix units, none, or some; in parts of 2 slabs."""
    scale = 64 / height  # costs are of 64 rows
    if way == "measured":
        return Costs()
    if way == "all":
        return Costs(slab=0, window=0, again=1e9, piece=0, gain=0, part=2)
    if way == "none":
        return Costs(slab=1e9, part=2)
    # A slab pays from 24 entries on: columns of one stay, columns of two go.
    free = dict.fromkeys(("window", "again", "row", "piece", "launch", "gain"), 0)
    return Costs(slab=24 * scale, left=1, part=2, **free)


def windows(dtype, index_dtype=np.int32, *, seed=0):
    """A CSR of dense windows and sparse ones, a hub, empty rows and windows, and duplicates."""
    rng = np.random.default_rng(seed)
    shape = 301, 187
    dense = rng.integers(0, 70, 1500), rng.integers(40, 130, 1500)
    sparse = rng.integers(200, 301, 300), rng.integers(0, 187, 300)
    hub = np.full(150, 5), rng.permutation(187)[:150]
    row, col = (np.concatenate(parts) for parts in zip(dense, sparse, hub, strict=True))
    keep = row % 7 != 3
    row, col = row[keep], col[keep]
    order = rng.permutation(len(row))
    row, col = (a[order].astype(index_dtype) for a in (row, col))
    data = None if dtype is None else rng.uniform(-1, 1, len(row)).astype(dtype)
    return sparsefmt.COO(row, col, data, shape=shape).tocsr()


def blocks(dtype, index_dtype=np.int32, *, seed=0):
    """A CSR of well filled windows, of which some cells are empty and two entries share one."""
    rng = np.random.default_rng(seed)
    row, col = np.nonzero(rng.random((147, 53)) < 0.7)
    row, col = (np.append(one, one[7]).astype(index_dtype) for one in (row, col))
    data = None if dtype is None else rng.uniform(-1, 1, len(row)).astype(dtype)
    return sparsefmt.COO(row, col, data, shape=(147, 53)).tocsr()


def rounding(dtype, cost):
    """How far a product may be from the exact one, for its size, where float32 is rounded."""
    return cost if np.dtype(dtype) == np.float32 else 0.0


def allowed(dtype):
    """The options that let tensor cores take such features."""
    return {"precision": "tf32"} if np.dtype(dtype) == np.float32 else {}


def product_bound(A, X, **options):
    """As ``error_bound``; float32 may be rounded."""
    positive = {k: abs(v) if k.endswith("scale") else v for k, v in options.items()}
    cost = FEATURES if A.data is None and "col_scale" not in options else PRODUCTS
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = spmm_oracle(_positive(A), abs(X), **positive)
        return error_bound(A, X, **options) + rounding(X.dtype, cost) * sizes


def quick(A, X, reduce="sum"):
    """``(Y, bound)`` as ``quick_oracle``; float32 may be rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        expected, bound = quick_oracle(A, X, reduce)
        cost = rounding(X.dtype, FEATURES if A.data is None else PRODUCTS)
        if cost:
            bound = bound + cost * abs(quick_oracle(_positive(A), abs(X), reduce)[0])
        return expected, bound


def quick_products(A, X, Y):
    """``(s, bound)`` of a CSR as ``sddmm_oracle``, by NumPy; float32 may be rounded to tf32."""
    row = np.repeat(np.arange(A.n_rows), A.lengths)
    left, right = X.astype(np.float64)[row], Y.astype(np.float64)[A.indices]
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = (abs(left) * abs(right)).sum(-1)
        eps = 2.0**-7 if X.dtype.name == "bfloat16" else float(np.finfo(X.dtype).eps)
        bound = (2 * (X.shape[-1] + 1) * eps + rounding(X.dtype, TF32)) * sizes
        return (left * right).sum(-1), bound + 1e-7 * (eps > 1e-4)


def _positive(A):
    return A if A.data is None else A.with_data(abs(A.data))


def sides(A, width, dtype):
    """Features of the rows and of the columns."""
    return features(A.n_rows, width, dtype), features(A.n_cols, width, dtype, seed=2)


def used(xp, value=np.nan):
    """Memory full of that value, given back: the next arrays are likely to lie there."""
    if xp.__name__ == "cupy":
        for size in (1 << 12, 1 << 16, 1 << 20):
            xp.full(size, value, np.float32)


def placed(xp, A, way, monkeypatch):
    """``A`` where the module's arrays live; whatever is multiplied next is split that way."""
    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", lambda *_: costs(way, A.tile[0]))
    return put(xp, A)
