"""The symmetric normalisation of GCN: degrees, loops and scaling, and the way back."""

from typing import Any

import numpy as np

from ...errors import DeviceError, DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import (
    Array,
    allocating,
    contiguous,
    device_of,
    namespace,
    on_device_of,
)
from ...formats.base import Format
from ..engine.bind import array_of, bind, flag
from ..engine.call import call
from ..engine.structure import Sizes
from ..engine.table import Arg, Kernel, Op, Price, deferred
from ..engine.transpose import in_own_order
from . import cuda


def gcn_norm(A: Format, *, self_loops: bool = True) -> Any:
    """Compute GCN's matrix, ``D^-1/2 (A + I) D^-1/2``, or of ``A`` alone.

    ``b[e] = d[i]^-1/2 a[e] d[j]^-1/2`` for the stored entry ``e = (i, j)``, where ``d[i]`` is the
    sum of the values of row ``i``, plus 1 for the loop that is added to a vertex without one; 0 in
    the place of ``d^-1/2`` where ``d <= 0``.  ``a[e]`` is 1 for an unweighted ``A``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, n)
        A COO in any order; duplicates count each, stored loops too.
    self_loops : bool
        Whether to add the loops.

    Returns
    -------
    COO or CSR, shape (n, n)
        COO for COO, else CSR; with values of A's dtype, float32 for an unweighted ``A``.  With
        ``self_loops`` it stores ``nnz + n`` entries: those of ``A`` in their order and the loops
        ``(i, i)``, of a COO behind all others, of a CSR each behind its row.  The loop of a vertex
        that stores one already is an explicit zero, so that no size depends on what is stored.
        Without ``self_loops`` it shares the indices of ``A``.

    Raises
    ------
    ShapeError
        If ``A`` is not square.
    DtypeError
        If ``A`` is no sparse format, or ``self_loops`` no bool.

    Notes
    -----
    On a GPU a COO takes three launches (zeroing, degrees, scaling), a CSR two, and nothing
    synchronises but the first use of a CSR, which cuts its rows.  Degrees add up in float32 at
    least, on the CPU in float64.  Those of a COO add up by atomics: without values they are counts
    and deterministic, with values the order of the sums, and so their rounding, is not.  A CSR is
    deterministic.  CSC, SGT and CBSR are converted to CSR, at each call.

    GCN (ICLR'17), equation 2; fuseGNN (ICCAD'20), section 3, fuses the same steps.
    """
    A, self_loops = bind(GCN_NORM, A, self_loops=self_loops)
    _check_square(A)
    if A.format not in ("coo", "csr"):
        A = A.tocsr()
    size = A.nnz + A.n_rows * self_loops
    if size > np.iinfo(A.index_dtype).max:
        A = A.astype(index_dtype=np.int64)
    with on_device_of(A._indices), allocating(f"a normalised matrix of {size} entries"):
        B = _unfilled(A, size)
    structure = tuple(getattr(B, name) for name in B._array_fields[:2])
    call(GCN_NORM, A, A.data, size > A.nnz, structure=structure, out=B.data)
    return B


def gcn_norm_backward(A: Format, grad: Array, *, self_loops: bool = True) -> Array:
    """Compute the gradient of ``gcn_norm`` in the values of ``A``.

    ``da[e] = s[i] (g[e] s[j] - s[i]^2 t[i] / 2)`` with ``s = d^-1/2`` and
    ``t[k] = sum_{e: i=k} g[e] a[e] s[j] + sum_{e: j=k} g[e] a[e] s[i] + 2 s[k] g[loop of k]``, the
    last for vertices without a stored loop only.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n, n)
        As given to ``gcn_norm``.
    grad : array, shape (nnz + n,), or (nnz,) without ``self_loops``
        Of the values of the result, in their order and dtype.
    self_loops : bool
        As given to ``gcn_norm``.

    Returns
    -------
    array, shape of ``A.data``
        In the order of A's own values and the dtype of ``grad``; for an unweighted ``A`` (nnz,),
        the gradient of the ones.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gcn_norm``; and if ``grad`` does not fit the result.

    Notes
    -----
    On a GPU sums add up by atomics, in no fixed order; four launches, and one more for a CSR.
    """
    A, self_loops = bind(GCN_NORM_BACKWARD, A, self_loops=self_loops)
    _check_square(A)
    grad = _gradient(grad, A, A.nnz + A.n_rows * self_loops)
    shape = (A.nnz,) if A.data is None else A.data.shape
    if A.format in ("coo", "csr"):
        return _backward(A, grad, self_loops)
    csr, perm = A.tocsr_with_perm()
    return in_own_order(_backward(csr, grad, self_loops), perm).reshape(shape)


def _check_square(A: Format) -> None:
    """Check for as many columns as rows."""
    if A.n_rows != A.n_cols:
        raise ShapeError(
            f"A has shape {A.shape}: a vertex has one degree, give as many columns as rows."
        )


def _gradient(grad: object, A: Format, size: int) -> Array:
    """Check a gradient of the result's values; contiguous."""
    array = array_of("grad", grad, like=A._indices)
    if array.shape != (size,):
        raise ShapeError(
            f"grad has shape {array.shape}: give ({size},), one for each value of the result."
        )
    checks.value_dtype("grad.dtype", array.dtype)
    dtype = np.dtype(np.float32) if A.data is None else A.data.dtype
    if array.dtype != dtype:
        raise DtypeError(f"grad is {array.dtype} but the result is {dtype}: cast it.")
    if device_of(array) != A.device:
        raise DeviceError(f"grad is on {device_of(array)} but A is on {A.device}: move one.")
    return contiguous(array)


def _unfilled(A: Any, size: int) -> Any:
    """Allocate the result; without loops it shares the indices of ``A``."""
    xp = namespace(A._indices)
    values = xp.empty(size, np.float32 if A.data is None else A.data.dtype)
    if size == A.nnz:
        return A._replace(data=values)
    lengths = (size, size) if A.format == "coo" else (A.n_rows + 1, size)
    places = (xp.empty(length, A.index_dtype) for length in lengths)
    indices = dict(zip(A._array_fields[:2], places, strict=True))
    return type(A)._trusted(**indices, data=values, shape=A.shape)


def _backward(A: Any, grad: Array, self_loops: bool) -> Array:
    with on_device_of(grad), allocating(f"gradients of {A.nnz} values"):
        out = namespace(grad).empty(A.nnz, grad.dtype)
    result: Array = call(GCN_NORM_BACKWARD, A, A.data, grad, self_loops, out=out)
    return result


# The rows of the table


def _price(S: Sizes, values: Array, loops: bool) -> Price:
    """Compute the price: each entry is read for its degree and its product, and written."""
    size = 4 if values is None else values.itemsize
    read = 2 * S.nnz * (4 + (values is not None) * size)
    return Price(read + (S.nnz + S.n_rows * loops) * size + 16 * S.n_rows, 3 * S.nnz)


def _price_backward(S: Sizes, values: Array, grad: Array, loops: bool) -> Price:
    """Compute the price: three passes over the entries, two of them over the gradient."""
    read = 3 * S.nnz * 8 + 2 * S.nnz * values.itemsize + 2 * (S.nnz + S.n_rows * loops) * 4
    return Price(read + S.nnz * grad.itemsize + 32 * S.n_rows, 9 * S.nnz)


_CPU = f"{__package__}.cpu"
_LOOPS = Arg("loops", kind="bool", test=flag, also=("self_loops",))
_ADDED = ["A has values, which are not counted but added"]
_COO, _CSR, _BOTH = ("coo",), ("csr",), ("coo", "csr")

GCN_NORM = Op(
    "gcn_norm",
    (Arg("values", optional=True), _LOOPS),
    results=lambda S, values, loops: (
        ((S.nnz + (S.n_rows if loops else 0),), "float32" if values is None else values),
    ),
    kernels=(
        Kernel("gcn_norm_csr", cuda.gcn_norm_csr, _CSR, "gpu"),
        Kernel(
            *("gcn_norm_coo_counted", cuda.gcn_norm_coo, _COO, "gpu"),
            refuses=lambda A, values, *_, **__: [] if values is None else _ADDED,
        ),
        Kernel("gcn_norm_coo_atomic", cuda.gcn_norm_coo, _COO, "gpu", deterministic=False),
        Kernel("gcn_norm_csr_numba", deferred(_CPU, "gcn_norm_csr"), _CSR, "cpu"),
        Kernel("gcn_norm_coo_numba", deferred(_CPU, "gcn_norm_coo"), _COO, "cpu"),
    ),
    price=_price,
    narrowed=(),
    takes_indptr=True,
    functions=("gcn_norm",),
)
GCN_NORM_BACKWARD = Op(
    "gcn_norm_backward",
    (Arg("values"), Arg("grad"), _LOOPS),
    results=lambda S, values, *_: (((S.nnz,), values),),
    kernels=(
        Kernel(
            "gcn_norm_backward_atomic", cuda.gcn_norm_backward, _BOTH, "gpu", deterministic=False
        ),
        Kernel("gcn_norm_backward_numba", deferred(_CPU, "gcn_norm_backward"), _BOTH, "cpu"),
    ),
    price=_price_backward,
    narrowed=(),
    takes_indptr=True,
    functions=("gcn_norm_backward",),
)
