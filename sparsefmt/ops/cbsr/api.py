"""Row-balanced sparse features: MaxK, the product with them (SpGEMM), and its gradients.

The gradients are in the features (SSpMM of MaxK-GNN) and in the edge values.
"""

import operator
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, SupportsIndex

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, allocating, namespace, on_device_of
from ...formats.base import Format
from ...formats.cbsr import CBSR, column_dtype
from ...formats.compressed import CSR
from ...reorder import Order
from ..engine.bind import array_of, bind, count_of_features, output, same_dtype, structure
from ..engine.call import call, convert_to_csr
from ..engine.structure import Sizes
from ..engine.table import (
    PRECISION,
    SCALES,
    Arg,
    Kernel,
    Op,
    Price,
    csr_kernels,
    deferred,
    unchecked,
)
from ..engine.transpose import Transpose, transpose_of
from ..matmul.api import ROUNDED, against_rounding, one_per_entry
from ..tiles.costs import COSTS, Costs
from . import cuda, cuda_sspmm

REDUCTIONS = ("sum", "mean")


def maxk(X: Array, k: int) -> CBSR:
    """Keep the ``k`` largest features of each row (MaxK-GNN, section 3.1).

    ``S[i, f] = X[i, f]`` for the ``k`` largest of row ``i``, and 0 elsewhere.  Ties go to the
    lowest column; -0.0 and 0.0 tie; NaN counts as the largest value, as in ``torch.topk``, and all
    NaN tie.  Values are taken over bit by bit.

    Parameters
    ----------
    X : array, shape (n_rows, feat)
        float16, bfloat16, float32 or float64.  Contiguous rows at any distance are read in place,
        other layouts are copied.
    k : int
        Between 1 and ``feat``.

    Returns
    -------
    CBSR, shape (n_rows, feat)
        Columns ascending in every row.

    Raises
    ------
    ShapeError
        If ``X`` is not 2-D or ``k`` lies outside 1 .. feat.
    DtypeError
        If ``X`` holds no floats or ``k`` is no integer.

    Notes
    -----
    Deterministic, and exact for subnormal values too.  Rows are searched rather than sorted, except
    those of more than 65 536 features on a GPU.
    """
    X = array_of("X", X)
    checks.dense("X", X)
    checks.value_dtype("X.dtype", X.dtype)
    k = _count("k", k)
    count_of_features(k, X.shape[1])
    columns, data = call(MAXK, None, X, k)
    return CBSR._trusted(indices=columns, data=data, shape=X.shape)


def _count(name: str, value: object) -> int:
    """Check for an integer of any kind; bool is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise DtypeError(f"{name} is {value!r}: give an integer.")
    return operator.index(value)


def spgemm(
    A: Format,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Multiply a sparse matrix by row-balanced features: the aggregation behind a MaxK.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * S[j, f]`` over the stored entries ``e = (i, j)`` of
    row ``i``; every ``a[e]`` is 1 for an unweighted ``A``, ``r`` and ``c`` are 1 where left out.
    Only the ``k`` stored places of a row of ``S`` are touched: what ``S`` does not store adds
    nothing, though ``a[e]`` be Inf or NaN.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        Other formats are converted to CSR, at each call.
    S : CBSR, shape (n_cols, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 are
        computed in float32.
    reduce : "sum" or "mean"
        ``mean`` divides by the number of stored entries of the row of ``A``, whether or not their
        rows of ``S`` store the feature.  A row without entries gives 0.
    row_scale, col_scale : array, shape (n_rows,) and (n_cols,), optional
        ``r`` and ``c``, of the dtype of ``S``, or float32 beside 2-byte features.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of the dtype and device of ``S``, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        Dense, on the device of the inputs, of the dtype of ``S``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``, with ``S`` for ``X``; also if ``S`` is no CBSR, or ``reduce`` neither.

    Notes
    -----
    Deterministic.  Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |S[j, f]|``.
    MaxK-GNN (ASPLOS'24), section 4.1.
    """
    A, reduce, S, row_scale, col_scale = bind(
        *(SPGEMM, A), reduce=reduce, S=S, row_scale=row_scale, col_scale=col_scale
    )
    columns, data, values, feat = S.indices, S.data, A.data, S.shape[1]
    if values is not None:
        same_dtype("S", data, "A", values)
    if out is not None:
        inputs = [row_scale, col_scale, columns, data]
        output(out, shape=(A.n_rows, feat), like=data, inputs=inputs, A=A)
    # By position: the names of options are part of what launches are looked up by.
    return call(SPGEMM, A, columns, data, feat, values, row_scale, col_scale, reduce, out=out)


def sspmm(
    A: Format,
    dY: Array,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    order: Order | None = None,
    transposed: Transpose | None = None,
) -> CBSR:
    """Compute the gradient of ``spgemm`` in the values of ``S``: a transposed product there.

    ``dS[j, t] = c[j] * sum_e a[e] * r[i] * dY[i, S.indices[j, t]]`` over the stored entries
    ``e = (i, j)`` of column ``j``; ``r[i]`` is divided by the number of entries of row ``i`` for a
    mean.  The other places of ``dY`` are not touched.

    Parameters
    ----------
    A, row_scale, col_scale, reduce
        As given to ``spgemm``; scales of the dtype of ``dY``.
    dY : array, shape (n_rows, feat)
        Same dtype as ``A.data``.  Contiguous rows at any distance are read in place, other layouts
        are copied.
    S : CBSR, shape (n_cols, feat)
        Only ``S.indices`` are read; ``S.data`` is ignored.
    precision : "tf32" or "bf16", optional
        "bf16" allows, on a GPU, to round a float32 ``dY`` to bfloat16 once: values, scales and sums
        stay float32.  A permission, taken where it pays, as in ``spmm``.  "tf32" changes nothing.
    deterministic : bool
        On a GPU the outer product adds up by atomics, whose order, and with it the last bits of the
        result, changes from run to run.  True takes the product with the transpose instead, which
        is several times slower for small ``k``.  The CPU is always deterministic.
    order : reorder.Order, optional
        Of the rows of ``A``.  The outer product goes through windows of rows that follow one
        another in it (hubs first if left out): the more columns they share, the faster.
        ``reorder.community_order(A)`` takes half a second to a second for 10**8 entries; make it
        once and keep it, since windows live as long as their order.  No row of any array moves.
        Without effect on the CPU and where ``deterministic``.
    transposed : Transpose, optional
        As for ``aggregate_backward``; computed if left out and needed.

    Returns
    -------
    CBSR, shape (n_cols, feat)
        Sharing the indices of ``S``, of the dtype of ``dY``.  A column without entries gives 0.

    Raises
    ------
    ShapeError
        If rows, columns, feature widths or the places of ``order`` do not fit together.
    DtypeError
        If ``A`` is no sparse format, ``S`` no CBSR or ``order`` no Order, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.
    FormatError
        If ``transposed`` was made of a matrix with other indices.
    UnsupportedError
        If ``reduce`` is neither, or ``precision`` unknown or given for other than float32.

    Notes
    -----
    The atomic way sorts the entries into windows at its first use, in about 48 bytes an entry.
    They stay with ``A``, if it is a CSR: 4 bytes and an index an entry for each height of windows,
    which goes by the width of the features.  Sums are in float32 if values have 2 bytes, in memory
    of their own.  The other way needs the transpose, and n_cols * 256 bytes at most.

    MaxK-GNN (ASPLOS'24), section 4.2.
    """
    matrix, reduce, dY, S, precision, row_scale, col_scale = bind(
        *(SSPMM_OUTER, A), reduce=reduce, dY=dY, S=S, precision=precision,
        row_scale=row_scale, col_scale=col_scale,
    )  # fmt: skip
    A = matrix if isinstance(matrix, CSR) else matrix.tocsr()
    if A.data is not None:
        same_dtype("dY", dY, "A", A.data)
    options = {"deterministic": deterministic, "precision": precision}
    if deterministic or transposed is not None or isinstance(dY, np.ndarray):
        options["transposed"], options["perm"], _ = transpose_of(matrix, A, transposed)
    if order is not None:
        options["order"] = checked_order(order, A)
    if reduce == "mean":
        row_scale = _shares(A, row_scale, dY)
    dS = call(SSPMM_OUTER, A, S.indices, dY, A.data, row_scale, col_scale, **options)
    return CBSR._trusted(indices=S.indices, data=dS, shape=S.shape)


def sddmm_cbsr(
    A: Format, X: Array, Y: CBSR, *, costs: Costs | None = None, out: Array | None = None
) -> Array:
    """Compute ``sddmm`` with row-balanced ``Y``: the gradient of ``spgemm`` in the edge values.

    ``s[e] = sum_t X[i, Y.indices[j, t]] * Y.data[j, t]`` for the e-th stored entry (i, j) of
    ``A``.  Arguments, result and errors are those of ``sddmm``, without heads.
    """
    A, _, X, Y = bind(SDDMM_CBSR, A, costs=costs, X=X, Y=Y)
    same_dtype("Y", Y, "X", X)
    if out is not None:
        inputs = [X, *Y._arrays().values()]
        output(out, shape=(A.nnz,), like=X, inputs=inputs, A=A)
    return call(SDDMM_CBSR, structure(A), X, Y.indices, Y.data, out=out)


def checked_order(order: object, A: CSR) -> Order:
    """Check for an order of the rows of ``A``, on its device."""
    if not isinstance(order, Order):
        raise DtypeError(
            f"order is a {type(order).__name__}: give a reorder.Order, such as community_order(A) "
            "or Order(perm)."
        )
    if len(order) != A.n_rows:
        raise ShapeError(f"order is of {len(order)} vertices but there are {A.n_rows} rows.")
    checks.same_device("order", order.perm, "the structure", A.indptr)
    return order


def _shares(A: CSR, row_scale: Array | None, like: Array) -> Array:
    """Compute ``r[i] / deg_i``, in the dtype of factors."""
    wide = like.dtype if like.dtype.itemsize >= 4 else np.float32
    with on_device_of(like), allocating(f"a factor for each of {A.n_rows} rows"):
        degrees = namespace(like).maximum(A.lengths, 1).astype(wide)
        return (1 if row_scale is None else row_scale.astype(wide, copy=False)) / degrees


# The rows of the table: features


def _price_of_choice(_: Any, x: Array, k: int) -> Price:
    n_rows, feat = x.shape
    chosen = n_rows * k * (x.itemsize + column_dtype(feat).itemsize)
    return Price(n_rows * feat * x.itemsize + chosen, 0)


def _price_of_dense(_: Any, columns: Array, data: Array, feat: int) -> Price:
    n_rows, k = columns.shape
    return Price(n_rows * (k * (columns.itemsize + data.itemsize) + feat * data.itemsize), 0)


def _price_at_columns(_: Any, x: Array, columns: Array) -> Price:
    n_rows, k = columns.shape
    return Price(n_rows * k * (columns.itemsize + 2 * x.itemsize), 0)


MAXK = Op(
    "maxk",
    unchecked("Tensor x, SymInt k"),
    results=lambda _, x, k: (
        ((x.shape[0], k), column_dtype(x.shape[1]).name),
        ((x.shape[0], k), x),
    ),
    kernels=(
        Kernel("maxk_rows", cuda.maxk, place="gpu", refuses=cuda.maxk_too_wide),
        Kernel("maxk_sorted", cuda.maxk_by_sorting, place="gpu"),
        Kernel("maxk_numba", deferred(f"{__package__}.cpu", "maxk"), place="cpu"),
    ),
    price=_price_of_choice,
    returns=2,
    structures=0,
)


def _of_features(launcher: Callable[..., Any], arguments: str, **facts: Any) -> Op:
    """Make the row of an operation without a matrix, named as its launcher."""
    name = launcher.__name__
    kernels = csr_kernels(launcher, name, f"{name}_numba")
    return Op(name, unchecked(arguments), kernels=kernels, structures=0, **facts)


CBSR_TO_DENSE = _of_features(
    cuda.cbsr_to_dense,
    "Tensor columns, Tensor kept, SymInt feat",
    results=lambda _, columns, data, feat: (((data.shape[0], feat), data),),
    price=_price_of_dense,
)
DENSE_TO_CBSR = _of_features(
    cuda.dense_to_cbsr,
    "Tensor x, Tensor columns",
    results=lambda _, x, columns: ((columns.shape, x),),
    price=_price_at_columns,
)

# The product


def _price(
    S: Sizes, columns: Array, data: Array, feat: int, values: Array | None = None, *_: Any
) -> Price:
    """Price a call: every entry reads ``k`` columns and values; rows of the product are written."""
    entries = S.nnz * columns.shape[1]
    weights = 0 if values is None else S.nnz * data.itemsize
    read = entries * (columns.itemsize + data.itemsize) + S.nnz * 4 + weights
    return Price(read + S.n_rows * feat * data.itemsize, 2 * entries)


SPGEMM = Op(
    "spgemm",
    (
        Arg("columns", "cols", also=("S",), balanced=True),
        *(Arg("kept"), Arg("feat", kind="SymInt"), Arg("values", optional=True), *SCALES),
        Arg("reduce", kind="str", words=REDUCTIONS),
    ),
    results=lambda S, columns, data, feat, *_: (((S.n_rows, feat), data),),
    kernels=(
        *csr_kernels(cuda.spgemm, "spgemm_csr_cbsr", "spgemm_csr_cbsr_numba"),
        convert_to_csr("spgemm"),
    ),
    price=_price,
    narrowed=("*",),
    functions=("spgemm",),
)

# Its gradients


def _at_places(S: Sizes, columns: Array, grad: Array, *_: Any) -> tuple[Any, ...]:
    return ((columns.shape, grad),)


def _price_of_gradient(
    S: Sizes, columns: Array, grad: Array, values: Array | None = None, *_: Any
) -> Price:
    """Price a call: every entry reads ``k`` places of ``grad``; columns and results pass once."""
    entries, places = S.nnz * columns.shape[1], prod(columns.shape)
    weights = 0 if values is None else S.nnz * grad.itemsize
    read = entries * grad.itemsize + places * columns.itemsize + S.nnz * 4 + weights
    return Price(read + places * grad.itemsize, 2 * entries)


def _price_of_products(S: Sizes, x: Array, columns: Array, data: Array, *_: Any) -> Price:
    """Price a call: every entry reads ``k`` columns and values; rows of ``x`` are read once."""
    entries = S.nnz * columns.shape[1]
    read = entries * (columns.itemsize + data.itemsize) + prod(x.shape) * x.itemsize
    return Price(read + S.nnz * (4 + x.itemsize), 2 * entries)


def _against_rounding(
    A: CSR, columns: Array, grad: Array, *_: Any, precision: str | None = None, **__: Any
) -> list[str]:
    """List the reasons against rounding the gradient of the result."""
    return against_rounding(A.nnz, grad, precision)


def _no_rounded_windows(
    A: CSR, columns: Array, grad: Array, *more: Any, **options: Any
) -> list[str]:
    """List the reasons against windows of rounded rows."""
    reasons = _against_rounding(A, columns, grad, *more, **options)
    return reasons or cuda_sspmm.no_windows(A, columns, grad, *more, narrow=True, **options)


def _rounded_panels(run: Callable[..., Any]) -> Kernel:
    """Make the kernel that rounds the gradient of the result, and runs as without."""
    options: Any = {"refuses": _against_rounding, "note": ROUNDED}
    return Kernel("sspmm_csr_panels_rounded", partial(run, narrow=True), ("csr",), "gpu", **options)


_CPU = f"{__package__}.cpu"
_PLACES = Arg("columns", "cols", like="grad", also=("S",), balanced=True)
_GRAD, _VALUES = Arg("grad", "rows", (2,), also=("dY",)), Arg("values", optional=True)

#: The gradient by the structure itself: what the public function chooses by.
SSPMM_OUTER = Op(
    "sspmm_outer",
    (_PLACES, _GRAD, _VALUES, *SCALES),
    results=_at_places,
    kernels=(
        Kernel(
            *("sspmm_csr_windows_rounded", cuda_sspmm.sspmm_windows_rounded, ("csr",), "gpu"),
            *(_no_rounded_windows, False, ROUNDED),
        ),
        Kernel(
            *("sspmm_csr_windows", cuda_sspmm.sspmm_windows, ("csr",), "gpu"),
            *(cuda_sspmm.no_windows, False),
        ),
        _rounded_panels(cuda_sspmm.sspmm_panels),
        Kernel("sspmm_csr_panels", cuda_sspmm.sspmm_panels, ("csr",), "gpu"),
        Kernel("sspmm_csr_cbsr_numba", deferred(_CPU, "sspmm_outer"), ("csr",), "cpu"),
    ),
    price=_price_of_gradient,
    options=(Arg("reduce", kind="str", words=REDUCTIONS), PRECISION),
    narrowed=("*",),
    functions=("sspmm",),
)
#: The gradient by the transposed structure, which a graph keeps.
SSPMM = Op(
    "sspmm",
    (_PLACES, _GRAD, _VALUES, Arg("perm"), *SCALES),
    results=_at_places,
    kernels=(
        _rounded_panels(cuda_sspmm.sspmm),
        Kernel("sspmm_csr_panels", cuda_sspmm.sspmm, ("csr",), "gpu"),
        Kernel("sspmm_csr_cbsr_numba", deferred(_CPU, "sspmm"), ("csr",), "cpu"),
    ),
    price=_price_of_gradient,
    narrowed=("*",),
)
SDDMM_CBSR = Op(
    "sddmm_cbsr",
    (
        Arg("x", "rows", (2,), also=("X",)),
        Arg("columns", "cols", like="x", also=("Y",), balanced=True),
        *(Arg("kept"), *SCALES),
    ),
    results=one_per_entry,
    entry_results=(0,),
    kernels=(
        *csr_kernels(cuda.sddmm_cbsr, "sddmm_csr_cbsr", "sddmm_csr_cbsr_numba"),
        convert_to_csr("sddmm_cbsr"),
    ),
    price=_price_of_products,
    options=(COSTS,),
    narrowed=("*",),
)
