"""SpMM by maximum or minimum: which entry each result comes from, and the way back to it."""

from collections.abc import Callable
from typing import Any

from ...errors import ShapeError
from ...formats import checks as formats_checks
from ...formats import primitives
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
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ..engine import choose
from ..engine.bind import bind
from ..engine.order import in_own_order
from ..engine.table import SCALES, Arg, Op, Price, csr_kernels, unchecked
from ..engine.transpose import Transpose, transpose_of
from . import cuda
from .api import REDUCTIONS, SPMM, VALUES, price_of_rows


def spmm_arg(
    A: Format,
    X: Array,
    *,
    reduce: str = "max",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> tuple[Array, Array]:
    """The maximum or minimum of ``spmm``, and which entry it comes from.

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
    Y = choose.run(SPMM, B, X, values=B.data, reduce=reduce, arg=arg, **scales)
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
    """Gradients of ``spmm_arg`` in the features and in the edge values.

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
    arg, grad = _winners(arg, grad, csr), contiguous(grad)
    if numbers is not None:
        arg = _renumbered(arg, primitives.inverse(numbers))
    T, perm, _ = transpose_of(A, csr, transposed)
    dX = choose.run(SPMM_ARG_DX, T, perm, grad, arg, csr.data, *scales)
    dA = choose.run(SPMM_ARG_DA, csr, X, grad, arg, *scales)
    return dX, None if dA is None else in_own_order(dA, numbers)


def _renumbered(arg: Array, numbers: Array | None) -> Array:
    """Give entries the numbers that ``numbers`` has for them; what is none of them becomes -1."""
    if numbers is None or not len(numbers):
        return arg
    with on_device_of(arg), allocating(f"entries of shape {arg.shape}"):
        known = (arg >= 0) & (arg < len(numbers))
        found: Array = namespace(arg).where(known, numbers[arg * known], -1)
        return found.astype(arg.dtype, copy=False)


def _winners(arg: Any, grad: Array, A: CSR) -> Array:
    arg = as_array("arg", arg, beside=A.indices)
    if arg.shape != grad.shape:
        raise ShapeError(
            f"arg has shape {arg.shape} but grad has {grad.shape}: give what spmm_arg returned."
        )
    formats_checks.index_like("arg", arg, "A.indices", A.indices)
    # A kernel reads as many places at a time as features: 64 bytes at most.
    aligned = not is_cupy(arg) or arg.data.ptr % 64 == 0
    return arg if arg.flags.c_contiguous and aligned else arg.copy()


# The rows of the table


def _rows_and_winners(S: Any, x: Any, *_: Any) -> tuple[Any, ...]:
    shape = S.n_rows, x.shape[1]
    return (shape, x), (shape, str(S.index_dtype))


def _rows_of_grad(S: Any, perm: Any, grad: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, grad.shape[1]), grad),)


def one_per_entry(S: Any, x: Any, *_: Any) -> tuple[Any, ...]:
    """Give the shape and dtype of a value for each entry, of the dtype of ``x``."""
    return (((S.nnz,), x),)


def _price_of_dx(S: Any, perm: Any, grad: Any, arg: Any, *given: Any) -> Price:
    """Price it as a product, which reads as many winners as features."""
    found = price_of_rows(S, grad, *given)
    return Price(found.bytes + S.nnz * grad.shape[1] * arg.itemsize, found.flops)


def _price_of_da(S: Any, x: Any, grad: Any, arg: Any, *_: Any) -> Price:
    """Every result reads its winner and two features, and adds to a value."""
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
    (_X, VALUES, *SCALES, Arg("reduce", kind="str", words=REDUCTIONS[2:])),
    results=_rows_and_winners,
    returns=2,
    kernels=csr_kernels(cuda.spmm_arg, "spmm_csr_balanced", "spmm_csr_numba"),
    price=price_of_rows,
    narrowed=("*",),
)
SPMM_ARG_DX = _gradient(
    cuda.spmm_arg_dx,
    *unchecked("Tensor perm, Tensor grad, Tensor arg, Tensor? values"),
    results=_rows_of_grad,
    price=_price_of_dx,
)
SPMM_ARG_DA = _gradient(
    cuda.spmm_arg_da,
    *(_X, Arg("grad", "rows", (2,), "x"), Arg("arg")),
    results=one_per_entry,
    options=(VALUES,),
    price=_price_of_da,
)
