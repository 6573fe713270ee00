"""SpMM: a sparse matrix times dense features, and the entries that win a maximum or minimum."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ...errors import ShapeError, UnsupportedError
from ...formats import checks, primitives
from ...formats.arrays import (
    Array,
    allocating,
    as_array,
    contiguous,
    is_cupy,
    namespace,
    on_device_of,
)
from ...formats.base import Format
from ...formats.compressed import COO, CSR
from ...formats.convert import numbered_csr
from ..engine.bind import BF16, bind, structure
from ..engine.call import call, convert_to_csr
from ..engine.memory import memory_of
from ..engine.structure import Sizes, Structure
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
from ..engine.transpose import Transpose, in_own_order, transpose_of
from ..tiles import kernels as tiles_kernels
from ..tiles.costs import COSTS, Costs
from . import cuda, small

REDUCTIONS = ("sum", "mean", "max", "min")


def spmm(
    A: Format,
    X: Array,
    *,
    values: Array | None = None,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    precision: str | None = None,
    costs: Costs | None = None,
    out: Array | None = None,
) -> Array:
    """Multiply a sparse matrix by dense features: the aggregation of a vertex's in-neighbours.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * X[j, f]`` over the stored entries ``e = (i, j)`` of
    row ``i``; every ``a[e]`` is 1 for an unweighted ``A``, ``r`` and ``c`` are 1 where left out.
    An implicit zero never touches Inf or NaN, and counts in no reduction.  With heads
    ``Y[i, h, f] = r[i] * reduce_e a[e, h] * c[j] * X[j, h, f]``, in one launch.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        The format picks the method: COO on a GPU scatters with atomics (GAS, for sums only; not
        deterministic), CSR reduces row by row (GAR), SGT takes sums and means window by window, on
        a GPU by tensor cores where they may and pay (``explain`` says which); all else is converted
        to CSR first, at each call.
    X : array, shape (n_cols, feat) or (n_cols, heads, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 are
        computed in float32.  Any ``feat``, 0 included.  Contiguous rows at any distance are read in
        place, other layouts are copied.
    values : array, shape (nnz,) or (nnz, heads), optional
        ``a`` in the place of ``A.data``, in its order; of X's dtype.  Values of heads are summed or
        averaged, of any format by rows of its CSR; with an ``X`` of shape (n_cols, feat) all heads
        have these features.
    reduce : "sum", "mean", "max" or "min"
        ``mean`` divides by the number of stored entries of the row.  In ``max`` and ``min`` NaN
        wins, as in NumPy.  A row without entries gives 0 in all of them.
    row_scale : array, shape (n_rows,), optional
        ``r``, of X's dtype, or float32 beside 2-byte features.  It multiplies after the reduction,
        so that a negative one turns a maximum of the row around; in a sum over a COO on a GPU it
        multiplies each entry, over an SGT on tensor cores the row's part there and the rest, which
        differs by rounding, overflow, and ``inf * 0`` or ``inf - inf`` where it is infinite.
    col_scale : array, shape (n_cols,), optional
        ``c``, of the same dtypes.
    precision : "tf32" or "bf16", optional
        "tf32" allows tensor cores in float32: they round each factor of a product to 16 bits, the
        sum of two bfloat16, so to more than the 11 bits of TF32, and add up in float32.  "bf16"
        allows that, and on a GPU to round ``X`` to bfloat16 once, which halves the bytes that a sum
        or mean gathers; values, scales and sums stay float32.  A permission: kernels that have no
        use for it ignore it.  float16 and bfloat16 need none, since their products are exact there.
    costs : Costs, optional
        What decides which entries of an SGT tensor cores take, by default as measured; ignored
        where no kernel has a use for it.
    out : array, shape (n_rows, feat) or (n_rows, heads, feat), optional
        Takes the result; contiguous, of X's dtype and device, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat) or (n_rows, heads, feat)
        On the device of the inputs, of X's dtype.

    Raises
    ------
    ShapeError
        If ``X`` has not one row per column of ``A``, ``values`` not one per stored entry, or their
        heads differ, a scale is not 1-D with one factor per row or column, or ``out`` has not the
        result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, ``X`` has another dtype than ``A.data``, a scale or ``out``
        has a dtype that does not fit, or ``costs`` are no ``Costs``.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``reduce`` or ``precision`` is unknown, ``precision`` is given for other features than
        float32, or ``reduce`` is "max" or "min" with values of heads.

    Notes
    -----
    Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |X[j, f]``, on the CPU that of 512
    entries for longer rows, too, in sums over rows of all operations; with tf32 ``2**-15`` times
    that sum more, without values and ``c`` ``2**-17``, of features from 2e-33 on; with bf16
    ``2**-8`` times it, and features beyond 3.39e38 become infinite.  GAS and GAR are
    named in fuseGNN (ICCAD'20), section 3; tiles on tensor cores in TC-GNN (ATC'23), section 4.2.
    """
    A, reduce, X, weights, precision, costs, *scales, out = bind(
        SPMM, A, reduce=reduce, X=X, values=values, precision=precision, costs=costs,
        row_scale=row_scale, col_scale=col_scale, out=out,
    )  # fmt: skip
    if values is not None:
        if weights.ndim == 2:
            summed(reduce)
            csr, numbers = numbered_csr(structure(A))
            return call(SPMM, csr, X, weights, numbers, *scales, reduce, out=out)
        # Values travel with the matrix, which may be converted.
        A = A.with_data(weights.reshape(A._indices.shape) if A.format == "cbsr" else weights)
    options = {"reduce": reduce, "precision": precision, "costs": costs}
    options["row_scale"], options["col_scale"] = scales
    if X.ndim == 2:
        return call(SPMM, A, X, values=A.data, out=out, **options)
    # Features of heads that share their values lie side by side.
    x, y = (a if a is None else a.reshape(len(a), a.shape[1] * a.shape[2]) for a in (X, out))
    result = call(SPMM, A, x, values=A.data, out=y, **options)
    return out if result is y else result.reshape(A.shape[0], *X.shape[1:])


def summed(reduce: str) -> None:
    """Refuse maxima and minima of heads by name."""
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(
            f'reduce is "{reduce}" with a value of each head: call it for one head at a time, with '
            "its features and its values, or reduce by sum or mean."
        )


def spmm_arg(
    A: Format,
    X: Array,
    *,
    reduce: str = "max",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> tuple[Array, Array]:
    """Return the maximum or minimum of ``spmm``, and which entry it comes from.

    ``Y[i, f] = r[i] * a[e] * c[j] * X[j, f]`` for the entry ``e = arg[i, f]`` of row ``i`` whose
    ``a[e] * c[j] * X[j, f]`` is largest (smallest).  Ties go to the entry that comes first in its
    row of ``A.tocsr()``; NaN wins.

    Parameters
    ----------
    A, X, row_scale, col_scale
        As for ``spmm``.
    reduce : "max" or "min"

    Returns
    -------
    Y : array, shape (n_rows, feat)
        The result of ``spmm``.
    arg : array, shape (n_rows, feat)
        Entries numbered in the order of A's own data, of the dtype of the CSR's indices; -1 in a
        row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``.
    """
    scales = {"row_scale": row_scale, "col_scale": col_scale}
    A, reduce, X, _, *factors = bind(SPMM_ARG, A, reduce=reduce, X=X, values=None, **scales)
    B, numbers = numbered_csr(A)
    shape = A.n_rows, X.shape[1]
    with on_device_of(X), allocating(f"entries of shape {shape}"):
        arg = namespace(X).empty(shape, B.index_dtype)
    scales = dict(zip(scales, factors, strict=True))
    Y = call(SPMM, B, X, values=B.data, reduce=reduce, arg=arg, **scales)
    return Y, _renumbered(arg, numbers)


def spmm_arg_backward(
    A: Format,
    X: Array,
    arg: Array,
    grad: Array,
    *,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    transposed: Transpose | None = None,
) -> tuple[Array, Array]:
    """Compute the gradients of ``spmm_arg`` in the features and in the edge values.

    ``dX[j, f] = sum_e a[e] c[j] r[i] grad[i, f]`` over the entries ``e = (i, j)`` of column ``j``
    with ``arg[i, f] == e``, and ``dA[e] = sum_f r[i] c[j] grad[i, f] X[j, f]`` over the features
    with ``arg[i, f] == e``.

    Parameters
    ----------
    A, X, row_scale, col_scale
        As for ``spmm``, and as given to ``spmm_arg``.
    arg : array, shape (n_rows, feat)
        What ``spmm_arg`` returned.
    grad : array, shape (n_rows, feat)
        Of ``Y``, in X's dtype.
    transposed : Transpose, optional
        As for ``aggregate_backward``.

    Returns
    -------
    dX : array, shape (n_cols, feat)
    dA : array, shape (nnz,)
        In the order of A's own data; of an unweighted ``A`` too.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, FormatError, UnsupportedError
        As ``spmm``; FormatError if ``transposed`` was made of a matrix with other indices.

    Notes
    -----
    Deterministic: no atomics.  What ``arg`` says of entries of other rows is ignored.
    """
    A, X, _, grad, *scales = bind(
        *(SPMM_ARG_DA, A), X=X, values=None, grad=grad, row_scale=row_scale, col_scale=col_scale
    )
    csr, numbers = numbered_csr(A)
    arg, grad = _check_winners(arg, grad, csr), contiguous(grad)
    if numbers is not None:
        arg = _renumbered(arg, primitives.inverse(numbers))
    T, perm, _ = transpose_of(A, csr, transposed)
    dX = call(SPMM_ARG_DX, T, perm, grad, arg, csr.data, *scales)
    dA = call(SPMM_ARG_DA, csr, X, grad, arg, *scales)
    return dX, None if dA is None else in_own_order(dA, numbers)


def _renumbered(arg: Array, numbers: Array | None) -> Array:
    """Return the numbers of entries in the order of a matrix; -1 for what is no entry."""
    if numbers is None or not len(numbers):
        return arg
    with on_device_of(arg), allocating(f"entries of shape {arg.shape}"):
        known = (arg >= 0) & (arg < len(numbers))
        result: Array = namespace(arg).where(known, numbers[arg * known], -1)
        return result.astype(arg.dtype, copy=False)


def _check_winners(arg: Array, grad: Array, A: CSR) -> Array:
    """Check for what ``spmm_arg`` returned, and return it as kernels read it."""
    arg = as_array("arg", arg, like=A.indices)
    if arg.shape != grad.shape:
        raise ShapeError(
            f"arg has shape {arg.shape} but grad has {grad.shape}: give what spmm_arg returned."
        )
    checks.index_like("arg", arg, "A.indices", A.indices)
    # A kernel reads as many places at a time as features: 64 bytes at most.
    aligned = not is_cupy(arg) or arg.data.ptr % 64 == 0
    return arg if arg.flags.c_contiguous and aligned else arg.copy()


# The rows of the table


def _rows(S: Sizes, x: Array, values: Array | None = None, *_: Any) -> tuple[Any, ...]:
    of_heads = values is not None and len(values.shape) == 2
    shape = cuda.shape_of_heads(S, x, values) if of_heads else (S.n_rows, *x.shape[1:])
    return ((shape, x),)


def price_of_rows(S: Sizes, x: Array, *more: Any) -> Price:
    """Compute the price: an entry reads an index, values and a row of X; rows are written."""
    values = more[0] if more else None
    weights = 0 if values is None else prod(values.shape[1:])
    feat = prod(x.shape[1:])
    results = weights * feat if weights > 1 and len(x.shape) == 2 else feat
    features = (S.nnz * feat + S.n_rows * results) * x.itemsize
    return Price(features + S.nnz * (4 + weights * x.itemsize), 2 * S.nnz * results)


def against_heads(values: Array, who: str) -> list[str]:
    """Return the reason against a kernel that takes one value an entry."""
    if values is None or values.ndim == 1:
        return []
    return [f"{who} one value an entry"]


def _against_scattering(A: COO, X: Array, *, reduce: str = "sum", **_: Any) -> list[str]:
    return [] if reduce == "sum" else [f"scattering does not take a {reduce}"]


def _against_rounding(
    A: CSR | Structure, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *_: Any,
    precision: str | None = None, **__: Any,
) -> list[str]:  # fmt: skip
    """List the reasons against rounding the features of a product."""
    reasons = against_rounding(A.nnz, x, precision) or against_heads(values, "rounding takes")
    if not reasons and reduce not in ("sum", "mean"):
        return [f"a {reduce} is one of the features as they are"]
    return reasons


def against_rounding(nnz: int, x: Array, precision: str | None) -> list[str]:
    """List the reasons against rounding float32 features to bfloat16 before ``nnz`` gathers."""
    wasted = cuda.against_rounding(nnz, x.shape[0], prod(x.shape[1:]))
    if wasted:  # torch need not be asked for small products
        return wasted
    if x.itemsize != 4:
        return _ONLY_FLOAT32
    if precision != BF16 and (type(x) is np.ndarray or not memory_of(x).rounds()):
        return _NOT_ALLOWED
    return []


_ONLY_FLOAT32 = ["only float32 is rounded"]
_NOT_ALLOWED = [f'float32 is gathered as it is: allow bfloat16 with precision="{BF16}"']
#: What ``explain`` says of kernels that gather so.
ROUNDED = "float32 features rounded to bfloat16, half the bytes"
_CPU = f"{__package__}.cpu"

VALUES = Arg(
    *("values", "entries", (1, 2), "x", "dtype"), optional=True, stored=True, also=("edge_weight",)
)
SPMM = Op(
    "spmm",
    (
        *(Arg("x", "cols", (2, 3), also=("X",)), VALUES, Arg("perm", optional=True), *SCALES),
        Arg("reduce", kind="str", words=REDUCTIONS),
        Arg("own", optional=True, default="None"),
        Arg("own_scale", optional=True, default="None"),
        Arg("one_more", kind="bool", default="False"),
        Arg("bias", optional=True, default="None"),
    ),
    results=_rows,
    slots=("spmm_with_own_numba", "spmm_then_own", "spmm_csr_embedding_bag"),
    kernels=(
        *tiles_kernels.spmm_kernels(cuda.spmm),
        Kernel(
            *("spmm_csr_rounded", cuda.spmm_rounded, ("csr",), "gpu"),
            refuses=_against_rounding,
            note=ROUNDED,
        ),
        Kernel("spmm_csr_balanced", cuda.spmm, ("csr",), "gpu"),
        Kernel(
            *("spmm_coo_atomic", cuda.spmm_coo, ("coo",), "gpu"),
            refuses=_against_scattering,
            deterministic=False,
        ),
        Kernel("spmm_csr_scipy", small.spmm, ("csr",), "cpu", refuses=small.refuses),
        Kernel("spmm_csr_numba", deferred(_CPU, "spmm"), ("csr",), "cpu"),
        convert_to_csr("spmm"),
    ),
    price=price_of_rows,
    options=(PRECISION, COSTS),
    narrowed=("*",),
    functions=("spmm", "spmm_arg", "aggregate"),
)


# Rows of maxima and minima


def one_per_entry(S: Sizes, x: Array, *_: Any) -> tuple[Any, ...]:
    """Return the shape and dtype of a value for each entry, of the dtype of ``x``."""
    return (((S.nnz,), x),)


def _price_of_dx(S: Sizes, perm: Array, grad: Array, arg: Array, *more: Any) -> Price:
    """Compute the price of a product that reads as many winners as features."""
    product = price_of_rows(S, grad, *more)
    return Price(product.bytes + S.nnz * grad.shape[1] * arg.itemsize, product.flops)


def _price_of_da(S: Sizes, x: Array, grad: Array, arg: Array, *_: Any) -> Price:
    """Compute the price: every result reads its winner and two features, and adds to a value."""
    results = grad.shape[0] * grad.shape[1]
    size = results * (arg.itemsize + 2 * x.itemsize) + S.nnz * (4 + x.itemsize)
    return Price(size, 2 * results)


_X = Arg("x", "cols", (2,), also=("X",))


def _gradient(launcher: Callable[..., Any], *arguments: Arg, **facts: Any) -> Op:
    """Make the row of a gradient, named as its launcher; its last arguments are scales."""
    kernels = csr_kernels(launcher, "spmm_arg_backward_cuda", "spmm_arg_backward_numba")
    facts |= {"kernels": kernels, "functions": ("spmm_arg_backward",)}
    return Op(launcher.__name__, (*arguments, *SCALES), **facts)


SPMM_ARG = Op(
    "spmm_arg",
    (_X, replace(VALUES, axes=(1,)), *SCALES, Arg("reduce", kind="str", words=REDUCTIONS[2:])),
    results=lambda S, x, *_: (
        ((S.n_rows, x.shape[1]), x),
        ((S.n_rows, x.shape[1]), str(S.index_dtype)),
    ),
    returns=2,
    kernels=csr_kernels(cuda.spmm_arg, "spmm_csr_balanced", "spmm_csr_numba"),
    price=price_of_rows,
    narrowed=("*",),
)
SPMM_ARG_DX = _gradient(
    cuda.spmm_arg_dx,
    *unchecked("Tensor perm, Tensor grad, Tensor arg, Tensor? values"),
    results=lambda S, perm, grad, *_: (((S.n_rows, grad.shape[1]), grad),),
    price=_price_of_dx,
)
SPMM_ARG_DA = _gradient(
    cuda.spmm_arg_da,
    *(_X, Arg("grad", "rows", (2,), "x"), Arg("arg")),
    results=one_per_entry,
    options=(VALUES,),
    price=_price_of_da,
)
