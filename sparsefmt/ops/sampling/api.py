"""SpMM over a sample of each row (ES-SpMM): kernels choose entries as they load them."""

from functools import partial
from typing import Any

import numpy as np

from ...formats import primitives
from ...formats.arrays import Array, allocating, is_cupy, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ..engine.bind import bind, flag, structure
from ..engine.call import call, convert_to_csr
from ..engine.memory import Scalar
from ..engine.structure import Sizes
from ..engine.table import SCALES, Arg, Op, Price, csr_kernels, deferred
from ..matmul.api import VALUES
from . import cuda
from .options import ALL, STRATEGIES, SampleOptions, integer, refuse_both
from .options import width as most


def spmm_sampled(
    A: Format,
    X: Array,
    width: int,
    *,
    strategy: str = "bucket",
    seed: int = 0,
    mean: bool = False,
    rescale: bool = False,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Multiply with a sample of each row: at most ``width`` of its entries, chosen in the kernel.

    ``Y[i, f] = r[i] * s_i * sum_{e in sample(i)} a[e] * c[j] * X[j, f]`` over the sampled entries
    ``e = (i, j)`` of row ``i``; ``a[e]`` is 1 for an unweighted ``A``, ``r`` and ``c`` are 1 where
    left out.  ``s_i`` is ``1 / |sample(i)|`` with ``mean``, ``nnz_i / |sample(i)|`` with
    ``rescale``, where ``nnz_i`` counts the entries of the row, and else 1.  Entries that are not
    sampled never touch Inf or NaN.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        All but CSR are converted to it, at each call.  Rows have fewer than 2**31 entries.
    X : array, shape (n_cols, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 are
        computed in float32.  Contiguous rows at any distance are read in place, other layouts are
        copied.
    width : int
        Most entries of a row, 1 or more.  A row that has no more is taken whole, in its order.
    strategy : "bucket", "fastrand" or "random"
        Which entries of a longer row are taken, and in which order: ``bucket`` the first ones;
        ``fastrand`` those at ``(k * 577) mod nnz_i`` for ``k = 0, 1, ...``, or, if 577 divides
        ``nnz_i``, with the first of 587, 593 and 599 that does not; ``random`` a random sample
        without replacement.
    seed : int
        For ``random``, modulo 2**64: another seed chooses other entries.
    mean : bool
        Divide each row by the number of its sampled entries.
    rescale : bool
        Multiply each row so that with ``random`` the mean over all seeds is the whole row's sum.
    row_scale : array, shape (n_rows,), optional
        ``r``, of X's dtype, or float32 beside 2-byte features.  A row without entries gives 0
        whatever its factor.
    col_scale : array, shape (n_cols,), optional
        ``c``, of the same dtypes.
    out : array, shape (n_rows, feat), optional
        As for ``spmm``.

    Returns
    -------
    array, shape (n_rows, feat)
        As of ``spmm``.

    Raises
    ------
    ShapeError
        If ``width`` is less than 1, ``X`` is not 2-D or has not one row per column of ``A``, a
        scale is not 1-D with one factor per row or column, or ``out`` has not the result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, ``width`` or ``seed`` no integer, ``mean`` or ``rescale`` no
        bool, ``X`` has another dtype than ``A.data``, or a scale or ``out`` one that does not fit.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``strategy`` is unknown, or both ``mean`` and ``rescale`` are given: the mean of a sample
        estimates the mean of the row as it is.

    Notes
    -----
    The sample of a row depends on the seed, the number of the row and ``nnz_i`` only: not on
    features, values, dtypes or the device.  ``sample`` returns it as a graph.  Deterministic:
    entries add up in the order of the sample, part by part where threads of a GPU share a row.

    On a GPU one block works on a row, however many of its entries are sampled.  Nothing is
    precomputed unless ``width`` is at least the mean degree: then the first call makes
    ``A.chunks``, which synchronises, to learn whether any row is longer; if none is, ``spmm`` runs.

    Error bound: that of ``spmm`` for the sample.  ES-SpMM (arXiv 2104.10716), section IV and
    equation 2, and VI-A for the factors; a random sample is the future work of its section VI-B.
    """
    A, width, strategy, seed, mean, rescale, X, values, row_scale, col_scale, out = bind(
        SPMM_SAMPLED, A, width=width, strategy=strategy, seed=seed, mean=mean, rescale=rescale,
        X=X, values=None, row_scale=row_scale, col_scale=col_scale, out=out,
    )  # fmt: skip
    refuse_both(mean, rescale)
    return call(
        *(SPMM_SAMPLED, A, X), values=values, row_scale=row_scale, col_scale=col_scale, seed=seed,
        width=width, strategy=strategy, mean=mean, rescale=rescale, out=out,
    )  # fmt: skip


def sample(A: Format, width: int, *, strategy: str = "bucket", seed: int = 0) -> CSR:
    """Return the sample of ``spmm_sampled`` as a graph, with the same entries in its order.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        All but CSR are converted to it.
    width, strategy, seed
        As for ``spmm_sampled``.

    Returns
    -------
    CSR, shape (n_rows, n_cols)
        At most ``width`` entries of each row, in the order of the sample, with their values where
        ``A`` has any.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        As ``spmm_sampled``.

    Notes
    -----
    On a GPU it synchronises once, to learn the size of the result.
    """
    return sample_with_perm(A, width, strategy=strategy, seed=seed)[0]


def sample_with_perm(
    A: Format, width: int, *, strategy: str = "bucket", seed: int = 0
) -> tuple[CSR, Array]:
    """Return the sample, and the number of each of its entries in ``A``.

    Parameters
    ----------
    A, width, strategy, seed
        As for ``spmm_sampled``.

    Returns
    -------
    CSR, shape (n_rows, n_cols)
        The sample.
    perm : array, shape (nnz of the sample,)
        The number of each of its entries in the order of A's own data, in the dtype of the
        indices: ``A.data[perm]`` are its values.

    Raises
    ------
    ShapeError, DtypeError, UnsupportedError
        As ``spmm_sampled``.
    """
    A, width, strategy, seed = bind(SPMM_SAMPLED, A, width=width, strategy=strategy, seed=seed)
    options = SampleOptions(seed, width, strategy)
    A, numbers = numbered_csr(A)
    xp = namespace(A.indptr)
    with on_device_of(A.indptr), allocating(f"a sample of {A.nnz} entries"):
        indptr = primitives.offsets(xp.minimum(A.lengths, options.width), A.index_dtype)
        size = int(indptr[-1])  # synchronize!
        cols, perm = (xp.empty(size, A.index_dtype) for _ in range(2))
        if is_cupy(cols):
            cuda.sample_rows(
                A, cols, perm, None, indptr, options.seed, options.width, options.strategy, 0
            )
        else:
            _sample_rows(A, options, cols, perm, to=indptr)
        data = None if A.data is None else A.data[perm]
        B = CSR._trusted(indptr=indptr, indices=cols, data=data, shape=A.shape)
        return B, perm if numbers is None else numbers[perm]


def sampling_rate(A: Format, width: int) -> float:
    """Compute the share of the entries that a sample has, ``sum_i min(nnz_i, width) / nnz``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR
        All but CSR are converted to it.
    width : int
        Most entries of a row, 1 or more.

    Returns
    -------
    float
        1.0 for a graph without entries.

    Raises
    ------
    ShapeError
        If ``width`` is less than 1.
    DtypeError
        If ``A`` is no sparse format, or ``width`` no integer.

    Notes
    -----
    On a GPU it synchronises.  ES-SpMM (arXiv 2104.10716), Table IV.
    """
    A, width = bind(SPMM_SAMPLED, A, width=width)
    lengths, xp = structure(A).tocsr().lengths, namespace(A._indices)
    with on_device_of(lengths), allocating(f"lengths of {A.n_rows} rows"):
        sampled = int(xp.minimum(lengths, width).sum(dtype=np.int64))  # synchronize!
    return sampled / A.nnz if A.nnz else 1.0


_sample_rows = deferred(f"{__package__}.cpu", "sample_rows")

# The rows of the table


def _price_of_product(
    S: Sizes, x: Array, values: Array | None = None, r: Array | None = None, c: Array | None = None,
    seed: Any = None, width: int = ALL, *_: Any, **__: Any,
) -> Price:  # fmt: skip
    """Price a call: every sampled entry reads a row of x; rows of the result are written once."""
    sampled, row = min(S.nnz, S.n_rows * width), x.shape[1] * x.itemsize
    entry = 4 + (0 if values is None else x.itemsize)
    return Price((sampled + S.n_rows) * row + sampled * entry, 2 * sampled * x.shape[1])


def _price_of_values(
    S: Sizes, x: Array, grad: Array, r: Array | None = None, c: Array | None = None,
    seed: Any = None, width: int = ALL, *_: Any,
) -> Price:  # fmt: skip
    """Price a call: every sampled entry reads a row of x; rows of the gradient are read once."""
    sampled, row = min(S.nnz, S.n_rows * width), x.shape[1] * x.itemsize
    size = (sampled + S.n_rows) * row + sampled * 4 + S.nnz * x.itemsize
    return Price(size, 2 * sampled * x.shape[1])


#: The last arguments of the product and of both gradients.
SCALES_AND_OPTIONS = (
    *SCALES,
    Arg("seed", kind="Tensor?", test=lambda name, value: Scalar(integer(name, value) % 2**64)),
    Arg("width", kind="SymInt", test=most),
    Arg("strategy", kind="str", words=tuple(STRATEGIES)),
    *(
        Arg(name, kind="bool", test=partial(flag, kinds=bool | np.bool_))
        for name in ("mean", "rescale")
    ),
)
_X = Arg("x", "cols", (2,), also=("X",))

SPMM_SAMPLED = Op(
    "spmm_sampled",
    (_X, VALUES, *SCALES_AND_OPTIONS),
    kernels=(
        *csr_kernels(cuda.spmm_sampled, "spmm_sampled_csr_balanced", "spmm_sampled_csr_numba"),
        convert_to_csr("spmm_sampled"),
    ),
    results=lambda S, x, *_, **__: (((S.n_rows, x.shape[1]), x),),
    price=_price_of_product,
    narrowed=("*",),
    functions=("spmm_sampled",),
)
SPMM_SAMPLED_DA = Op(
    "spmm_sampled_da",
    (_X, Arg("grad", "rows", (2,), "x"), *SCALES_AND_OPTIONS),
    kernels=csr_kernels(cuda.spmm_sampled_da, "spmm_sampled_da_csr", "spmm_sampled_da_numba"),
    results=lambda S, x, *_: (((S.nnz,), x),),
    price=_price_of_values,
)
