"""Aggregation by a chosen method, its gradients, and the scaling of edges that normalises it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError, UnsupportedError
from ...formats import primitives
from ...formats.arrays import Array, allocating, is_cupy, namespace, on_device_of
from ...formats.base import Format
from ...formats.convert import numbered_csr
from ..engine.bind import ARRAYS, bind, same_dtype, sparse
from ..engine.call import call
from ..engine.explain import remark
from ..engine.structure import Sizes
from ..engine.table import FIRST, SCALES, Arg, Op, Price, csr_kernels
from ..engine.transpose import Transpose, in_own_order, transpose_of
from . import cuda_aggregate
from .api import SPMM, VALUES, price_of_rows


@dataclass(frozen=True)
class _Rates:
    """Nanoseconds of an H200, by which ``auto`` compares scattering with conversion and reduction.

    Both gather the same rows of X and write the same rows of Y once, which is left out here.
    """

    convert: float = 0.7e6  #: a conversion of any size, 0.4e6 to 1.2e6: the host's, of ten launches
    convert_entry: float = 0.065  #: an entry more of it: what a radix sort reads and writes
    scatter_byte: float = 2.25e-4  #: a byte of sums added atomically beyond one added in a register
    far_byte: float = 4.5e-4  #: the same where Y is not in the L2: read and written in memory
    resident: int = 24 * 2**20  #: bytes of Y, 128 of each row, that the L2 serves well


_RATES = _Rates()
_SLICE_BYTES = 128  # of a row of Y that a launch of the scattering kernel adds to at a time


def aggregate(A: Format, X: Array, *, method: str = "auto") -> Array:
    """Sum up each vertex's in-neighbours, ``Y = A @ X``, by gather-apply-scatter or -reduce.

    ``Y[i, f] = sum_e a[e] * X[j, f]`` over the stored entries ``e = (i, j)`` of row ``i``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    X : array, shape (n_cols, feat)
        As for ``spmm``.
    method : "auto", "gas" or "gar"
        ``gas`` takes the entries of a COO in whatever order they come and adds each to its row by
        atomics (not deterministic; float16 and bfloat16 add up in a float32 workspace); ``gar``
        sums the rows of a CSR, as both do on the CPU, where that is always faster.  A matrix in
        another format is converted, at each call.  ``auto`` scatters a COO on a GPU where that is
        predicted to be faster than conversion and reduction; ``explain`` says what it compared.

    Returns
    -------
    array, shape (n_rows, feat)

    Raises
    ------
    UnsupportedError
        If ``method`` is unknown.
    ShapeError, DtypeError, DeviceError
        As ``spmm``.

    Notes
    -----
    GAS pays where features are few, so that a sort costs more than it saves.  Entries in order of
    rows are added up before they are scattered.  Convert once, and keep the CSR, where you call
    more than once: that is faster than either.  fuseGNN (ICCAD'20), section 3.
    """
    A, method, X, _ = bind(AGGREGATE_BACKWARD, A, method=method, X=X, values=None)
    chosen, why = chosen_method(A, X) if method == "auto" else (method, lambda: "as asked for")
    B = A.tocoo() if chosen == "gas" else A.tocsr()
    options = {"reduce": "sum", "row_scale": None, "col_scale": None}
    Y: Array = call(SPMM, B, X, values=B.data, **options)
    remark(lambda: f"method {chosen}: {why()}")
    return Y


def chosen_method(A: Format, X: Array) -> tuple[str, Callable[[], str]]:
    """Choose the method that is predicted to be faster, and say why."""
    if A.format != "coo":
        return "gar", lambda: "the entries are in order of rows or soon are, A is no COO"
    if not is_cupy(A._indices):
        return "gar", lambda: "on the CPU conversion and reduction are faster than scattering"
    sums = X.shape[1] * max(X.itemsize, 4)
    far = A.n_rows * min(sums, _SLICE_BYTES) > _RATES.resident
    scatter = A.nnz * sums * (_RATES.far_byte if far else _RATES.scatter_byte) / 1e3
    convert = (_RATES.convert + A.nnz * _RATES.convert_entry) / 1e3

    def why() -> str:
        return f"atomics are predicted to take {scatter:.0f} us more, conversion {convert:.0f}"

    return "gas" if scatter < convert else "gar", why


def aggregate_backward(
    A: Format,
    X: Array,
    grad: Array,
    *,
    self_weight: Array | None = None,
    transposed: Transpose | None = None,
) -> tuple[Array, ...]:
    """Compute the gradients of ``Y = A @ X + diag(self_weight) @ X`` in ``X`` and the edge values.

    ``dX[j, f] = sum_e a[e] grad[i, f] + self_weight[j] grad[j, f]`` over the stored entries ``e =
    (i, j)`` of column ``j``, ``dA[e] = sum_f grad[i, f] X[j, f]`` and ``dself[j] = sum_f grad[j, f]
    X[j, f]``; every ``a[e]`` is 1 for an unweighted ``A``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    X : array, shape (n_cols, feat)
        As for ``spmm``.
    grad : array, shape (n_rows, feat)
        Of ``Y``, in X's dtype.
    self_weight : array, shape (n_rows,), optional
        What each vertex's own features were multiplied with, for a square ``A``; of X's dtype, or
        float32 beside 2-byte features.
    transposed : Transpose, optional
        ``ops.transpose(A)``, for those who call more than once; computed if left out, by a sort.
        With it ``dA`` of a large graph also goes back to CSR order 2.7 times as fast on a GPU.

    Returns
    -------
    dX : array, shape (n_cols, feat)
    dA : array, shape (nnz,)
        In the order of A's own data; of an unweighted ``A`` too.
    dself : array, shape (n_rows,)
        Only if ``self_weight`` is given, in its dtype.

    Raises
    ------
    ShapeError
        If shapes do not fit, or ``self_weight`` is given for an ``A`` that is not square.
    DtypeError, DeviceError
        As ``spmm``.
    FormatError
        If ``transposed`` was made of a matrix with other indices.

    Notes
    -----
    Deterministic: no atomics.  A row of ``grad`` that an entry gathers serves both gradients, where
    a product with the transpose and ``sddmm`` gather one each.  Sums run in float32 at least; on a
    GPU wide features go in slices, for whose dot products it takes a float an entry of memory, and
    of large graphs one of any width, and a value an entry if there are values: from 4 Mi entries on
    beside 16 MiB of features, or with ``transposed`` 1.5 Mi, and from 8 Mi on.
    fuseGNN (ICCAD'20), algorithms 2 and 3.
    """
    A, X, _, grad, weight = bind(
        *(AGGREGATE_BACKWARD, A), X=X, values=None, grad=grad, self_weight=self_weight
    )
    if weight is not None and A.n_rows != A.n_cols:
        raise ShapeError(f"self_weight is given but A is {A.shape}: only a square A has vertices.")
    csr, numbers = numbered_csr(A)
    T, perm, inverse = transpose_of(A, csr, transposed)
    with on_device_of(X), allocating(f"a result of shape {(A.n_rows,)}"):
        dself = None if weight is None else namespace(weight).empty_like(weight)
    numbered = {"values": csr.data, "perm": perm, "inverse": inverse}
    options = {"row_scale": None, "col_scale": None, "self_weight": weight, "dself": dself}
    gradients = call(AGGREGATE_BACKWARD, T, X, grad, **numbered, **options)
    dX, dA = gradients or (None, None)  # ``explain`` runs nothing
    dA = dA if dA is None else in_own_order(dA, numbers)
    if dself is None:
        return dX, dA
    with on_device_of(dself), allocating(f"a result of shape {dself.shape}"):
        with np.errstate(over="ignore"):
            return dX, dA, dself.astype(getattr(self_weight, "dtype", X.dtype), copy=False)


def scale(A: Format, row: Array | None = None, col: Array | None = None) -> Any:
    """Scale the values of a matrix: ``diag(row) · A · diag(col)``, of the same structure.

    ``b[e] = row[i] * a[e] * col[j]`` for the stored entry ``e = (i, j)``; ``a[e]`` is 1 for an
    unweighted ``A``, and a factor that is left out is 1.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    row : array, shape (n_rows,), optional
    col : array, shape (n_cols,), optional
        Of the dtype of ``A.data``; for an unweighted ``A`` both of one dtype, float16, bfloat16,
        float32 or float64, which the result has.  2-byte products are rounded once.

    Returns
    -------
    the format of ``A``
        Sharing its index arrays; ``A`` itself if both factors are left out.

    Raises
    ------
    ShapeError
        If ``row`` or ``col`` is not 1-D with one factor per row or column.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.

    Notes
    -----
    Deterministic.  ``spmm`` takes both factors itself and spares this pass over the values.
    """
    A = sparse(A)
    row = None if row is None else ARRAYS.check("row", row, _ROW, A, A.n_rows, None)
    col = None if col is None else ARRAYS.check("col", col, _COL, A, A.n_cols, None)
    factors = [(name, a) for name, a in (("row", row), ("col", col)) if a is not None]
    if not factors:
        return A
    like = factors[0] if A.data is None else ("A.data", A.data)
    for name, factor in factors:
        same_dtype(name, factor, *like)
    like = like[1]
    quiet = np.errstate(over="ignore", under="ignore", invalid="ignore")  # as the kernels
    with on_device_of(like), allocating(f"values of {A.nnz} entries"), quiet:
        rows, cols = _places(A)
        wide = like.dtype if like.dtype.itemsize >= 4 else np.dtype(np.float32)
        products: Array = None if A.data is None else A.data.astype(wide)
        for factor, places in ((row, rows), (col, cols)):
            if factor is not None:
                scales = factor.astype(wide, copy=False)[places]
                xp = namespace(scales)
                products = scales if products is None else xp.multiply(scales, products)
        return A._replace(data=products.astype(like.dtype, copy=False))


_ROW, _COL = Arg("row", "rows"), Arg("col", "cols")


def _places(A: Any) -> tuple[Any, Any]:
    """Return row and column of each value, in the order and shape that the format has."""
    if A.format == "coo":
        return A.row, A.col
    if A.format == "cbsr":
        return namespace(A.indices).arange(A.n_rows)[:, None], A.indices
    if A.format == "sgt":
        A = A.tocsr()  # whose order an SGT's values have
    if A.format not in ("csr", "csc"):
        raise UnsupportedError(f"A is {A.format.upper()}: convert it, A.tocsr() for instance.")
    major = primitives.expand(A.indptr, A.nnz)
    return (major, A.indices) if A.format == "csr" else (A.indices, major)


# The row of the table


def _price_of_both(S: Sizes, x: Array, grad: Array, *more: Any) -> Price:
    """Price both gradients: a product, and the rows of X read and gradients of values written."""
    product = price_of_rows(S, x, *more)
    size = product.bytes + (S.n_rows * x.shape[1] + S.nnz) * x.itemsize
    return Price(size, 2 * product.flops)


AGGREGATE_BACKWARD = Op(
    "aggregate_backward",
    (
        *(Arg("x", "cols", (2,), also=("X",)), Arg("grad", "rows", (2,), "x"), VALUES),
        *(Arg("perm", optional=True), *SCALES),
    ),
    results=lambda S, x, *_: (((S.n_rows, x.shape[1]), x), ((S.nnz,), x)),
    returns=2,
    slots=("aggregate_backward_of_graph",),
    kernels=csr_kernels(
        cuda_aggregate.aggregate_backward, "aggregate_backward_cuda", "aggregate_backward_numba"
    ),
    price=_price_of_both,
    options=(
        Arg("method", kind="str", words=("auto", "gas", "gar")),
        Arg("self_weight", "rows", like=FIRST, optional=True),
    ),
    functions=("aggregate_backward",),
)
