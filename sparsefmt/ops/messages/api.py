"""Messages of a vertex's features and those of its edges: sums, gradients, and combinations."""

from typing import Any

import numpy as np

from ...errors import ShapeError, UnsupportedError
from ...formats.arrays import Array, allocating, as_array, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ..engine import checks, choose
from ..engine.order import in_csr_order
from ..engine.table import Op, Price, csr_kernels
from ..engine.transpose import Transpose, transpose_of
from . import cuda

MESSAGES, REDUCTIONS = tuple(cuda.SUMS), ("sum", "mean")
COMBINATIONS = ("add", "sub", "mul")


def message_aggregate(
    A: Format,
    X: Array | None,
    E: Array,
    *,
    message: str = "mul",
    reduce: str = "sum",
    out: Array | None = None,
) -> Array:
    """Aggregate messages made of a neighbour's features and of those of the edge to it.

    ``Y[i, f] = reduce_e m(X[j, f], E[e, f])`` over the stored entries ``e = (i, j)`` of row ``i``.
    No array with a message for each entry is made.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        Only the structure is read; ``A.data`` is ignored.  Other formats than CSR are converted, at
        each call.
    X : array, shape (n_cols, feat)
        float16, bfloat16, float32 or float64; 2-byte types are computed in float32.  Contiguous
        rows at any distance are read in place.  Not read by "copy_edge", which takes None too.
    E : array, shape (nnz, feat)
        In the order of A's own data; of X's dtype and layouts.
    message : "mul", "add", "relu_add" or "copy_edge"
        ``x * w``, ``x + w``, ``max(x + w, 0)`` (GINE) or ``w``.  NaN stays NaN.
    reduce : "sum" or "mean"
        ``mean`` divides by the number of stored entries of the row.  An empty row gives 0.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of the dtype and device of ``E``, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        On the device of the inputs, of their dtype.

    Raises
    ------
    ShapeError
        If ``X`` has not one row per column of ``A``, ``E`` not one per stored entry, their widths
        differ, or ``out`` has not the result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``message`` or ``reduce`` is unknown; ``spmm`` has maxima and minima, for one weight an
        entry.

    Notes
    -----
    Deterministic.  Error bound: ``deg * eps * sum_e |m|``, of ``|x| + |w|`` for sums.  GINE is in
    "Strategies for pre-training graph neural networks" (ICLR'20), equation A.1.
    """
    given = checks.structure(checks.sparse("A", A))
    checks.choice("message", message, MESSAGES)
    checked_reduction(reduce)
    E = _of_entries("E", E, given)
    if message == "copy_edge" and X is None:
        x = None
    else:
        x = checks.features("X", X, A=given)
        checks.alike("X", x, "E", E)
    out = checks.output(out, shape=(given.n_rows, E.shape[1]), like=E, inputs=(x, E), A=given)
    csr, numbers = numbered_csr(given)
    return choose.run(MESSAGE_AGGREGATE, csr, x, E, numbers, message, reduce, out=out)


def checked_reduction(reduce: str) -> str:
    """Refuse maxima and minima by name."""
    if isinstance(reduce, str) and reduce in ("max", "min"):
        raise UnsupportedError(
            f'reduce is "{reduce}": messages are reduced by "sum" or "mean"; spmm(..., '
            f'reduce="{reduce}") takes the {reduce} of features with one weight an entry.'
        )
    return checks.word("reduce", reduce, REDUCTIONS)


def message_aggregate_backward(
    A: Format,
    X: Array | None,
    E: Array | None,
    grad: Array,
    *,
    message: str = "mul",
    reduce: str = "sum",
    transposed: Transpose | None = None,
) -> tuple[Array | None, Array]:
    """Gradients of ``message_aggregate`` in the features of vertices and of edges, in one pass.

    ``dX[j, f] = sum_e grad[i, f] m_x`` over the stored entries ``e = (i, j)`` of column ``j`` and
    ``dE[e, f] = grad[i, f] m_w``, where ``m_x`` and ``m_w`` are the derivatives of the message at
    ``X[j, f]`` and ``E[e, f]``; for a mean ``grad`` is divided by the entries of its row first.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
    X : array, shape (n_cols, feat)
    E : array, shape (nnz, feat)
        As given to ``message_aggregate``.  "add" and "copy_edge" read neither, and take None.
    grad : array, shape (n_rows, feat)
        Of the result, in the dtype of ``X`` and ``E``.
    message, reduce
        As given to ``message_aggregate``.
    transposed : Transpose, optional
        ``ops.transpose(A)``, for those who call more than once; computed if left out, by a sort.

    Returns
    -------
    dX : array, shape (n_cols, feat)
        None for "copy_edge".
    dE : array, shape (nnz, feat)
        In the order of A's own data.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``message_aggregate``.
    FormatError
        If ``transposed`` was made of a matrix with other indices.

    Notes
    -----
    Deterministic: no atomics.  Each row of ``grad`` that an entry gathers serves both gradients.
    Where a sum ``x + w`` is 0 the gradient of "relu_add" is 0, and where it is NaN that of 1.
    """
    given = checks.structure(checks.sparse("A", A))
    checks.choice("message", message, MESSAGES)
    checked_reduction(reduce)
    grad = checks.features("grad", grad, A=given, axis="rows")
    x = w = None
    if message in ("mul", "relu_add"):
        x, w = checks.features("X", X, A=given), _of_entries("E", E, given)
        checks.alike("X", x, "grad", grad)
        checks.alike("E", w, "grad", grad)
    csr, numbers = numbered_csr(given)
    scale = _inverse_degree(csr, grad) if reduce == "mean" else None
    dE = checks.output(None, shape=(given.nnz, grad.shape[1]), like=grad, inputs=[])
    if message == "copy_edge":
        return None, choose.run(EDGE_COMBINE, csr, grad, None, numbers, scale, "left", out=dE)
    T, perm, _ = transpose_of(given, csr, transposed)
    places = perm if numbers is None else in_csr_order(numbers, perm)
    dX = checks.output(None, shape=(given.n_cols, grad.shape[1]), like=grad, inputs=[])
    args = x, w, grad, places, scale, message, True
    choose.run(MESSAGE_AGGREGATE_BACKWARD, T, *args, out=(dX, dE))
    return dX, dE


def edge_combine(
    A: Format, left: Array, right: Array, op: str = "add", *, out: Array | None = None
) -> Array:
    """Combine the features of both vertices of each stored entry.

    ``out[e, f] = left[i, f] op right[j, f]`` for the e-th stored entry ``(i, j)`` of ``A``.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        Only the structure is read.
    left, right : array, shape (n_rows, feat) and (n_cols, feat)
        Of one dtype: float16, bfloat16, float32 or float64.  Contiguous rows at any distance are
        read in place.
    op : "add", "sub" or "mul"
        ``sddmm`` sums up products.
    out : array, shape (nnz, feat), optional
        Takes the result; contiguous, of the inputs' dtype and device, overlapping none of them.

    Returns
    -------
    array, shape (nnz, feat)
        In the order of A's own data.

    Raises
    ------
    ShapeError
        If rows or feature widths do not fit, or ``out`` has not the result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``op`` is unknown.

    Notes
    -----
    Deterministic.  Each value is rounded once.
    """
    given = checks.structure(checks.sparse("A", A))
    if op == "dot":
        raise UnsupportedError('op is "dot": call sddmm(A, left, right), which sums up products.')
    checks.choice("op", op, COMBINATIONS)
    left = checks.features("left", left, A=given, axis="rows")
    right = checks.features("right", right, A=given)
    checks.alike("right", right, "left", left)
    shape = given.nnz, left.shape[1]
    out = checks.output(out, shape=shape, like=left, inputs=(left, right), A=given)
    csr, numbers = numbered_csr(given)
    return choose.run(EDGE_COMBINE, csr, left, right, numbers, None, op, out=out)


def _of_entries(name: str, E: Any, A: Format) -> Array:
    """Check for a row of features for each stored entry, on the device of ``A``."""
    array = as_array(name, E, empty=np.float64, beside=A._indices)
    if array.ndim != 2 or array.shape[0] != A.nnz:
        mend = f"{name}[:, None] for instance, " if array.ndim == 1 else ""
        raise ShapeError(
            f"{name} has shape {array.shape} but A stores {A.nnz} entries: give ({A.nnz}, feat), "
            f"{mend}in the order of A's data."
        )
    return checks.entries(name, array, A=A)


def _inverse_degree(A: CSR, like: Array) -> Array:
    """Return 1 over the entries of each row, in the dtype that sums run in."""
    dtype = np.float64 if like.dtype == np.float64 else np.float32
    with on_device_of(A.indptr), allocating(f"factors of {A.n_rows} rows"):
        xp = namespace(A.indptr)
        return (1.0 / xp.maximum(A.indptr[1:] - A.indptr[:-1], 1)).astype(dtype)


# The rows of the table


def _rows(S: Any, x: Any, edges: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, edges.shape[1]), edges),)


def _columns_and_entries(
    S: Any, x: Any, edges: Any, grad: Any, perm: Any, scale: Any, message: str, wanted: bool
) -> tuple[Any, ...]:
    feat = grad.shape[1]
    return ((S.n_rows, feat), grad), ((S.nnz if wanted else 0, feat), grad)


def _entries(S: Any, left: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.nnz, left.shape[1]), left),)


def _price_of_sums(S: Any, x: Any, edges: Any, *_: Any) -> Price:
    """Every entry reads its index and two rows; rows of the result are written."""
    row = edges.shape[1] * edges.itemsize
    gathers = (x is not None) + 1
    return Price((gathers * S.nnz + S.n_rows) * row + 4 * S.nnz, 2 * S.nnz * edges.shape[1])


def _price_of_gradients(S: Any, x: Any, edges: Any, grad: Any, *_: Any) -> Price:
    """Every entry reads two indices and two rows, and writes one."""
    feat, reads = grad.shape[1], 2 + (edges is not None)
    size = (reads * S.nnz + 2 * S.n_rows) * feat * grad.itemsize + 8 * S.nnz
    return Price(size, 3 * S.nnz * feat)


def _price_of_combinations(S: Any, left: Any, right: Any, *_: Any) -> Price:
    rows = 1 + (right is not None)
    return Price((rows * S.nnz + S.n_rows) * left.shape[1] * left.itemsize, S.nnz * left.shape[1])


MESSAGE_AGGREGATE = Op(
    "message_aggregate",
    "Tensor? x, Tensor edges, Tensor? perm, str message, str reduce",
    results=_rows,
    kernels=csr_kernels(cuda.message_aggregate, "message_aggregate_csr", "message_aggregate_numba"),
    price=_price_of_sums,
    narrowed=("*",),
    functions=("message_aggregate",),
)
MESSAGE_AGGREGATE_BACKWARD = Op(
    "message_aggregate_backward",
    "Tensor? x, Tensor? edges, Tensor grad, Tensor? perm, Tensor? scale, str message, bool wanted",
    results=_columns_and_entries,
    returns=2,
    kernels=csr_kernels(
        cuda.message_aggregate_backward,
        "message_aggregate_backward_csr",
        "message_aggregate_backward_numba",
    ),
    price=_price_of_gradients,
    functions=("message_aggregate_backward",),
)
EDGE_COMBINE = Op(
    "edge_combine",
    "Tensor left, Tensor? right, Tensor? perm, Tensor? scale, str op",
    results=_entries,
    kernels=csr_kernels(cuda.edge_combine, "edge_combine_csr", "edge_combine_numba"),
    price=_price_of_combinations,
    narrowed=("left", "right"),
    functions=("edge_combine",),
)
