"""Slow and obvious: samples of rows in Python's integers, and products with them in float64.

Nothing here calls a kernel, so that nothing here shares their bugs.  Options are those of
``ops.spmm_sampled``; ``A`` is a CSR.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ...formats.oracle import float64
from ..matmul.oracle import error_bound, factors, precision_of, spmm_oracle

_PRIMES = 577, 587, 593, 599


def places_oracle(length: int, width: int, strategy: str, seed: int, row: int) -> list[int]:
    """List the places in a row of ``length`` entries that are sampled, in their order.

    Examples
    --------
    >>> places_oracle(10, 4, "fastrand", 0, 0), places_oracle(3, 4, "random", 0, 0)
    ([0, 7, 4, 1], [0, 1, 2])
    """
    if length <= width or strategy == "bucket":
        return list(range(min(length, width)))
    if strategy == "fastrand":
        prime = next(one for one in _PRIMES if length % one)
        return [k * prime % length for k in range(width)]
    key = _mixed(_mixed(seed) + (row + 1) * 0x9E3779B97F4A7C15)
    return [_permuted(k, length, key) for k in range(width)]


def sample_oracle(
    A: CSR, width: int, *, strategy: str = "bucket", seed: int = 0
) -> tuple[CSR, Array]:
    """Return the sample as a CSR, and the numbers of its entries among those of ``A``."""
    A = A.to("cpu")
    rows: list[list[int]] = []
    for row, (begin, end) in enumerate(pairwise(A.indptr.tolist())):
        places = places_oracle(end - begin, width, strategy, seed, row)
        rows.append([begin + place for place in places])
    perm = np.array([e for row in rows for e in row], A.index_dtype)
    indptr = np.array([0, *np.cumsum([len(row) for row in rows])], A.index_dtype)
    data = None if A.data is None else A.data[perm]
    return CSR(indptr, A.indices[perm], data, shape=A.shape), perm


def spmm_sampled_oracle(A: CSR, X: Array, width: int, **options: Any) -> Array:
    """Compute what ``ops.spmm_sampled`` does, in float64.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 3, 3], [0, 1, 2], shape=(2, 3))
    >>> X = np.array([[1.0], [10.0], [100.0]])
    >>> spmm_sampled_oracle(A, X, 2, rescale=True).tolist()
    [[16.5], [0.0]]
    """
    B, r, c = _scaled_sample(A, width, **options)
    return spmm_oracle(B, X, row_scale=r, col_scale=c)


def spmm_sampled_bound(A: CSR, X: Array, width: int, **options: Any) -> Array:
    """Bound how far ``spmm_sampled`` may lie from the oracle: the bound of ``spmm`` for the sample.

    A factor of 3 covers the rounding of what a row is multiplied with besides.
    """
    B, r, c = _scaled_sample(A, width, **options)
    return error_bound(B, X, row_scale=r, col_scale=c, factor=3)


def sddmm_sampled_oracle(A: CSR, X: Array, Y: Array, width: int, **options: Any) -> Array:
    """``r[i] s_i c[j] <X[i], Y[j]>`` at the sampled entries and 0 at the others, in float64."""
    A = A.to("cpu")
    B, r, c = _scaled_sample(A, width, **options)
    _, perm = sample_oracle(A, width, **_chosen(**options))
    X, Y, found, e = float64(X), float64(Y), np.zeros(A.nnz), 0
    for row, end in enumerate(B.indptr[1:].tolist()):
        while e < end:
            col = int(B.indices[e])
            found[perm[e]] = r[row] * c[col] * (X[row] * Y[col]).sum()
            e += 1
    return found


def sddmm_sampled_bound(A: CSR, X: Array, Y: Array, width: int, **options: Any) -> Array:
    """Bound how far such products, in the dtype of ``X``, may lie from the oracle.

    ``2 * (feat + 4) * (eps * r c sum |x| |y| + least normal number)``; 0 where it must be 0.
    """
    eps, least = precision_of(X.dtype)
    for scale in {"row_scale", "col_scale"} & {*options}:
        options[scale] = None if options[scale] is None else np.abs(float64(options[scale]))
    size = sddmm_sampled_oracle(A, np.abs(float64(X)), np.abs(float64(Y)), width, **options)
    sampled = np.zeros(A.nnz)
    sampled[sample_oracle(A, width, **_chosen(**options))[1]] = 1
    bound: Array = 2 * (X.shape[1] + 4) * (eps * size + least * sampled)
    return bound


def _chosen(*, strategy: str = "bucket", seed: int = 0, **_: Any) -> dict[str, Any]:
    return {"strategy": strategy, "seed": seed}


def _scaled_sample(
    A: CSR, width: int, *, mean: bool = False, rescale: bool = False, row_scale: Any = None,
    col_scale: Any = None, **how: Any,
) -> tuple[CSR, Array, Array]:  # fmt: skip
    """Return the sample, and the factors of its rows and columns."""
    A = A.to("cpu")
    B = sample_oracle(A, width, **how)[0]
    whole, kept = A.lengths.astype(np.float64), np.maximum(B.lengths, 1).astype(np.float64)
    share = 1 / kept if mean else whole / kept if rescale else np.ones(A.n_rows)
    return B, factors(row_scale, A.n_rows) * share, factors(col_scale, A.n_cols)


# Permutations by counter


def _mixed(z: int) -> int:
    """SplitMix64's finaliser of ``z`` modulo 2**64 (Steele, Lea and Flood, OOPSLA'14)."""
    z %= 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _word(x: int, key: int) -> int:
    x = (x ^ key) * 0x85EBCA6B % 2**32
    return (x ^ x >> 15) * 0xC2B2AE35 % 2**32


def _permuted(k: int, length: int, key: int) -> int:
    """Find where a permutation of 0 .. length - 1 takes ``k``.

    Numbers are pairs ``(up, low)`` with ``up < high`` and ``low < side``, in the rounds of a
    Feistel network; a pair beyond the length goes through all of them again.
    """
    side = 1 << (length - 1).bit_length() // 2
    high = -(-length // side)
    rounds = 14 if length < 12 else 8 if length < 64 else 6 if length < 600 else 4
    up, low = divmod(k, side)
    while True:
        for turn in range(rounds):
            a, b = key + turn * 0x9E3779B9, (key >> 32) + turn * 0xBB67AE85
            up = (up + (_word(low, a % 2**32) * high >> 32)) % high
            low ^= _word(up, b % 2**32) * side >> 32
        if up * side + low < length:
            return up * side + low
