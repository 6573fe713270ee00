"""Messages of a vertex's features and those of its edges: sums, gradients, and combinations."""

from typing import Any

import numpy as np

from ...errors import UnsupportedError
from ...formats.arrays import Array, allocating, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.convert import numbered_csr
from ..engine.bind import bind, structure, word
from ..engine.call import call
from ..engine.structure import Sizes
from ..engine.table import Arg, Op, Price, csr_kernels, unchecked
from ..engine.transpose import Transpose, in_csr_order, transpose_of
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
    """Add up messages made of a neighbour's features and of those of the edge to it.

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
    options = {"message": message, "reduce": reduce}
    edges_alone = X is None and isinstance(message, str) and message == "copy_edge"
    features = {} if edges_alone else {"X": X}
    A, message, reduce, E, *x, out = bind(MESSAGE_AGGREGATE, A, **options, E=E, **features, out=out)
    csr, numbers = numbered_csr(structure(A))
    args = x[0] if x else None, E, numbers, message, reduce
    return call(MESSAGE_AGGREGATE, csr, *args, out=out)


def checked_reduction(name: str, reduce: object) -> str:
    """Check for a sum or mean; refuse maxima and minima by name."""
    if isinstance(reduce, str) and reduce in ("max", "min"):
        raise UnsupportedError(
            f'reduce is "{reduce}": messages are reduced by "sum" or "mean"; spmm(..., '
            f'reduce="{reduce}") takes the {reduce} of features with one weight an entry.'
        )
    return word(name, reduce, REDUCTIONS)


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
    """Compute the gradients of ``message_aggregate`` in features of vertices and of edges.

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
    options = {"message": message, "reduce": reduce}
    reads_both = isinstance(message, str) and message in ("mul", "relu_add")
    features = {"X": X, "E": E} if reads_both else {}
    A, message, reduce, grad, *read = bind(
        MESSAGE_AGGREGATE_BACKWARD, A, **options, grad=grad, **features
    )
    A, (x, w) = structure(A), read or (None, None)
    csr, numbers = numbered_csr(A)
    scale = _inverse_degree(csr, grad) if reduce == "mean" else None
    if message == "copy_edge":
        return None, call(EDGE_COMBINE, csr, grad, None, numbers, scale, "left")
    T, perm, _ = transpose_of(A, csr, transposed)
    places = perm if numbers is None else in_csr_order(numbers, perm)
    gradients = call(MESSAGE_AGGREGATE_BACKWARD, T, x, w, grad, places, scale, message, True)
    return gradients or (None, None)  # ``explain`` runs nothing


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
    A, op, left, right, out = bind(EDGE_COMBINE, A, op=op, left=left, right=right, out=out)
    csr, numbers = numbered_csr(structure(A))
    return call(EDGE_COMBINE, csr, left, right, numbers, None, op, out=out)


def _checked_combination(name: str, op: object) -> str:
    """Check for one of ``COMBINATIONS``; name the function of dot products."""
    if isinstance(op, str) and op == "dot":
        raise UnsupportedError('op is "dot": call sddmm(A, left, right), which sums up products.')
    return word(name, op, COMBINATIONS)


def _inverse_degree(A: CSR, like: Array) -> Array:
    """Return 1 over the number of entries of each row, 1 for an empty one, in the dtype of sums."""
    dtype = np.float64 if like.dtype == np.float64 else np.float32
    with on_device_of(A.indptr), allocating(f"factors of {A.n_rows} rows"):
        xp = namespace(A.indptr)
        return (1.0 / xp.maximum(A.indptr[1:] - A.indptr[:-1], 1)).astype(dtype)


# The rows of the table


def _price_of_sums(S: Sizes, x: Array, edges: Array, *_: Any) -> Price:
    """Compute the price: an entry reads its index and two rows; rows of results are written."""
    row = edges.shape[1] * edges.itemsize
    gathers = (x is not None) + 1
    return Price((gathers * S.nnz + S.n_rows) * row + 4 * S.nnz, 2 * S.nnz * edges.shape[1])


def _price_of_gradients(S: Sizes, x: Array, edges: Array, grad: Array, *_: Any) -> Price:
    """Compute the price: every entry reads two indices and two rows, and writes one."""
    feat, reads = grad.shape[1], 2 + (edges is not None)
    size = (reads * S.nnz + 2 * S.n_rows) * feat * grad.itemsize + 8 * S.nnz
    return Price(size, 3 * S.nnz * feat)


def _price_of_combinations(S: Sizes, left: Array, right: Array, *_: Any) -> Price:
    rows = 1 + (right is not None)
    return Price((rows * S.nnz + S.n_rows) * left.shape[1] * left.itemsize, S.nnz * left.shape[1])


_MESSAGE = Arg("message", kind="str", words=MESSAGES)
_REDUCE = Arg("reduce", kind="str", test=checked_reduction)
MESSAGE_AGGREGATE = Op(
    "message_aggregate",
    (
        Arg("x", "cols", (2,), "edges", kind="Tensor?", also=("X",)),
        Arg("edges", "entries", (2,), also=("E", "edge_features")),
        *(Arg("perm", optional=True), _MESSAGE, _REDUCE),
    ),
    results=lambda S, x, edges, *_: (((S.n_rows, edges.shape[1]), edges),),
    kernels=csr_kernels(cuda.message_aggregate, "message_aggregate_csr", "message_aggregate_numba"),
    price=_price_of_sums,
    narrowed=("*",),
    functions=("message_aggregate",),
)
MESSAGE_AGGREGATE_BACKWARD = Op(
    "message_aggregate_backward",
    (
        Arg("x", "cols", (2,), "grad", kind="Tensor?", also=("X",)),
        Arg("edges", "entries", (2,), "grad", kind="Tensor?", also=("E",)),
        *(Arg("grad", "rows", (2,)), Arg("perm", optional=True), Arg("scale", optional=True)),
        *(_MESSAGE, Arg("wanted", kind="bool")),
    ),
    results=lambda S, x, edges, grad, perm, scale, message, wanted: (
        ((S.n_rows, grad.shape[1]), grad),
        ((S.nnz if wanted else 0, grad.shape[1]), grad),
    ),
    returns=2,
    kernels=csr_kernels(
        cuda.message_aggregate_backward,
        "message_aggregate_backward_csr",
        "message_aggregate_backward_numba",
    ),
    price=_price_of_gradients,
    options=(_REDUCE,),
    functions=("message_aggregate_backward",),
)
EDGE_COMBINE = Op(
    "edge_combine",
    (
        *(Arg("left", "rows", (2,)), Arg("right", "cols", (2,), "left", kind="Tensor?")),
        *unchecked("Tensor? perm, Tensor? scale"),
        Arg("op", kind="str", test=_checked_combination),
    ),
    results=lambda S, left, *_: (((S.nnz, left.shape[1]), left),),
    kernels=csr_kernels(cuda.edge_combine, "edge_combine_csr", "edge_combine_numba"),
    price=_price_of_combinations,
    narrowed=("left", "right"),
    functions=("edge_combine",),
)
