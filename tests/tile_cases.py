"""What the tests of tiles share: matrices, ways to split them, and how far tf32 may round."""

import numpy as np
from laws.cases import Case
from op_cases import features, put

import sparsefmt
from sparsefmt import ops
from sparsefmt.formats.oracle import float64
from sparsefmt.ops.matmul.oracle import factors, precision_of
from sparsefmt.ops.tiles.costs import Costs

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


def product(A, X, *, reduce="sum", row_scale=None, col_scale=None, precision=None):
    """``([Y], [bound])`` of a CSR as by the oracle of SpMM; float32 may be rounded."""
    r, c = factors(row_scale, A.n_rows), factors(col_scale, A.n_cols)
    row, degree = np.repeat(np.arange(A.n_rows), A.lengths), A.lengths[:, None].astype(float)
    share = np.maximum(degree, 1) if reduce == "mean" else 1
    eps, least = precision_of(X.dtype)
    cost = FEATURES if A.data is None and col_scale is None else PRODUCTS
    with np.errstate(invalid="ignore", over="ignore"):
        values = c[A.indices] if A.data is None else float64(A.data) * c[A.indices]
        products = values[:, None] * float64(X)[A.indices]
        Y, sizes = np.zeros((2, A.n_rows, X.shape[1]))
        np.add.at(Y, row, products)
        np.add.at(sizes, row, abs(products))
        Y, sizes = (r[:, None] * Y, abs(r[:, None]) * sizes)
        bound = 2 * degree * (eps * sizes + least) + rounding(X.dtype, cost) * sizes
        return [np.where(degree > 0, Y / share, 0)], [np.where(degree > 0, bound / share, 0)]


def dots(A, X, Y, *, precision=None):
    """``([s], [bound])`` of a CSR as by the oracle of SDDMM; float32 may be rounded to tf32."""
    row, (eps, least) = np.repeat(np.arange(A.n_rows), A.lengths), precision_of(X.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        products = float64(X)[row] * float64(Y)[A.indices]
        feat, sizes = X.shape[-1], abs(products).sum(-1)
        bound = 2 * (feat + 1) * (eps * sizes + least) + rounding(X.dtype, TF32) * sizes
        return [products.sum(-1)], [bound]


SPMM = Case("spmm", ops.spmm, {"X": ("cols",), "row_scale": ("rows",), "col_scale": ("cols",)},
            product)  # fmt: skip
SDDMM = Case("sddmm", ops.sddmm, {"X": ("rows",), "Y": ("cols",)}, dots, entries=(0,))


def sides(A, width, dtype):
    """Features of the rows and of the columns, the arguments of SDDMM."""
    return {"X": features(A.n_rows, width, dtype), "Y": features(A.n_cols, width, dtype, seed=2)}


def used(xp, value=np.nan):
    """Memory full of that value, given back: the next arrays are likely to lie there."""
    if xp.__name__ == "cupy":
        for size in (1 << 12, 1 << 16, 1 << 20):
            xp.full(size, value, np.float32)


def placed(xp, A, way, monkeypatch):
    """``A`` where the module's arrays live; whatever is multiplied next is split that way."""
    monkeypatch.setattr("sparsefmt.ops.tiles.costs.measured", lambda *_: costs(way, A.tile[0]))
    return put(xp, A)
