"""One number for each stored entry: sampled dense products (SDDMM) and softmax over rows."""

from math import prod
from typing import Any

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ..cbsr.api import sddmm_cbsr
from ..engine.bind import bind, structure
from ..engine.bind import precision as check_precision
from ..engine.call import call, convert_to_csr
from ..engine.small import by_entries
from ..engine.structure import Sizes
from ..engine.table import PRECISION, SCALES, Arg, Kernel, Op, Price, csr_kernels
from ..tiles import kernels as tiles_kernels
from ..tiles.costs import COSTS, Costs
from . import cuda, small


def sddmm(
    A: Format,
    X: Array,
    Y: Array | CBSR,
    *,
    precision: str | None = None,
    costs: Costs | None = None,
    out: Array | None = None,
) -> Array:
    """Compute dot products of feature rows, at the stored entries of ``A``.

    ``s[e] = sum_f X[i, f] * Y[j, f]`` for the e-th stored entry (i, j) of ``A``; with heads,
    ``s[e, h] = sum_f X[i, h, f] * Y[j, h, f]``.

    Parameters
    ----------
    A : CSR or SGT, shape (n, m)
        Only the structure is read; ``A.data`` is ignored.  Other formats are converted to CSR, at
        each call; their entries keep the order of their own data.
    X, Y : array, shape (n, feat) and (m, feat), or (n, heads, feat) and (m, heads, feat)
        Same dtype: float16, bfloat16, float32 or float64.  Sums run in float32 at least.
        Contiguous rows at any distance are read in place, other layouts are copied.  ``Y`` may be a
        CBSR of shape (m, feat), of which only the stored places are touched.
    precision : "tf32" or "bf16", optional
        Either allows tensor cores in float32, which here round each factor to 11 bits, in tf32;
        ignored where no kernel has a use for it.
    costs : Costs, optional
        What decides which entries of an SGT tensor cores take, as in ``spmm``.
    out : array, shape (nnz,) or (nnz, heads), optional
        Takes the result; contiguous, of X's dtype and device, overlapping no input.

    Returns
    -------
    array, shape (nnz,) or (nnz, heads)
        On the device of the inputs, of X's dtype.

    Raises
    ------
    ShapeError
        If rows, columns, heads or feature widths do not fit together, or ``out`` has not the
        result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, dtypes do not fit, or ``costs`` are no ``Costs``.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``precision`` is unknown, or given for other features than float32.

    Notes
    -----
    Deterministic.  Error bound: ``feat * eps * sum_f |X[i, f]| |Y[j, f]|``; with tf32 ``2**-10``
    times that sum more, and features from 3.4e38 on count as infinite.  TC-GNN (ATC'23), section
    2.1, equation 3.
    """
    if isinstance(Y, CBSR):
        if precision is not None:
            check_precision(precision, "Y", Y)
        return sddmm_cbsr(A, X, Y, costs=costs, out=out)
    options = {"precision": precision, "costs": costs}
    A, X, Y, *allowed, out = bind(SDDMM, A, X=X, Y=Y, **options, out=out)
    options = dict(zip(options, allowed, strict=True))
    return call(SDDMM, structure(A), X, Y, out=out, **options)


def edge_softmax(A: Format, scores: Array, *, out: Array | None = None) -> Array:
    """Compute the softmax of the scores of each row's entries, head by head.

    ``p[e] = exp(s[e] - m) / sum_e' exp(s[e'] - m)`` over the entries of a row, ``m`` the largest of
    their scores: nothing overflows, whatever the scores.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        Only the structure is read; ``A.data`` is ignored.  Other formats are converted to CSR, at
        each call.
    scores : array, shape (nnz,) or (nnz, heads)
        In the order of A's own data; float16, bfloat16, float32 or float64.  2-byte scores
        are computed in float32.
    out : array, shape of ``scores``, optional
        Takes the result; contiguous, of the scores' dtype and device, overlapping no input.

    Returns
    -------
    array, shape of ``scores``
        Positive, and of sum 1 in each row that has entries.  A row whose scores are all -inf, or
        which has a NaN or +inf, gives NaN, as in PyTorch.

    Raises
    ------
    ShapeError
        If ``scores`` has not one row per stored entry, or ``out`` not the shape of ``scores``.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.

    Notes
    -----
    Deterministic.  The relative error is at most ``2 eps (deg + 4 + d + D)``, where ``d`` is the
    score's distance from the row's largest and ``D`` its mean under ``p``.  A probability below the
    least normal number of float32 (of float64 for such scores) may become 0.  The attention of GAT
    as fuseGNN (ICCAD'20), section 3, aggregates it.
    """
    A, scores, out = bind(EDGE_SOFTMAX, A, scores=scores, out=out)
    return call(EDGE_SOFTMAX, structure(A), scores, out=out)


def edge_softmax_backward(
    A: Format, probabilities: Array, grad: Array, *, out: Array | None = None
) -> Array:
    """Compute the gradient of ``edge_softmax`` in its scores.

    ``ds[e] = p[e] * (grad[e] - sum_e' p[e'] grad[e'])`` over the entries of a row, head by head.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        As given to ``edge_softmax``.
    probabilities : array, shape (nnz,) or (nnz, heads)
        What ``edge_softmax`` returned.
    grad : array, shape of ``probabilities``
        Of the probabilities, in their dtype.
    out : array, shape of ``probabilities``, optional
        Takes the result; contiguous, of their dtype and device, overlapping no input.

    Returns
    -------
    array, shape of ``probabilities``

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``edge_softmax``; also if ``grad`` has another shape or dtype than ``probabilities``.

    Notes
    -----
    Deterministic.
    """
    A, *arrays, out = bind(
        *(EDGE_SOFTMAX_BACKWARD, A), probabilities=probabilities, grad=grad, out=out
    )
    return call(EDGE_SOFTMAX_BACKWARD, structure(A), *arrays, out=out)


# The rows of the table


def _like_scores(S: Sizes, scores: Array, *_: Any) -> tuple[Any, ...]:
    return ((scores.shape, scores),)


def _price_of_products(S: Sizes, X: Array, *_: Any) -> Price:
    """Compute the price: every entry reads a row of Y; rows of X are read once."""
    row = prod(X.shape[1:])
    values = (S.nnz + S.n_rows) * row
    return Price(values * X.itemsize + S.nnz * (4 + X.itemsize), 2 * S.nnz * row)


def _price_of_softmax(S: Sizes, scores: Array, *_: Any) -> Price:
    heads = scores.shape[1] if len(scores.shape) == 2 else 1
    return Price(2 * S.nnz * heads * scores.itemsize + 8 * S.n_rows, 5 * S.nnz * heads)


def _row(op: str, arguments: tuple[Arg, ...], *kernels: Kernel, **facts: Any) -> Op:
    return Op(op, arguments, kernels=(*kernels, convert_to_csr(op)), **facts)


SDDMM = _row(
    "sddmm",
    (
        Arg("x", "rows", (2, 3), also=("X", "left")),
        Arg("y", "cols", (2, 3), "x", also=("Y", "right")),
        *SCALES,
    ),
    *tiles_kernels.sddmm_kernels(cuda.sddmm),
    Kernel("sddmm_csr_numpy", small.sddmm, ("csr",), "cpu", refuses=small.refuses_products),
    *csr_kernels(cuda.sddmm, "sddmm_csr_balanced", "sddmm_csr_numba"),
    results=lambda S, X, *_: (((S.nnz, *X.shape[1:-1]), X),),
    entry_results=(0,),
    price=_price_of_products,
    options=(PRECISION, COSTS),
    narrowed=("*",),
    functions=("sddmm",),
)
EDGE_SOFTMAX = _row(
    "edge_softmax",
    (Arg("scores", "entries", (1, 2)),),
    Kernel("edge_softmax_numpy", small.edge_softmax, ("csr",), "cpu", refuses=by_entries),
    *csr_kernels(cuda.edge_softmax, "edge_softmax_csr", "edge_softmax_numba"),
    results=_like_scores,
    entries=("scores",),
    entry_results=(0,),
    price=_price_of_softmax,
    narrowed=(),
    functions=("edge_softmax",),
)
EDGE_SOFTMAX_BACKWARD = _row(
    "edge_softmax_backward",
    (
        Arg("probabilities", "entries", (1, 2)),
        Arg("grad", "entries", (1, 2), "probabilities"),
    ),
    Kernel(
        *("edge_softmax_backward_numpy", small.edge_softmax_backward, ("csr",), "cpu"),
        refuses=by_entries,
    ),
    *csr_kernels(
        cuda.edge_softmax_backward, "edge_softmax_backward_csr", "edge_softmax_backward_numba"
    ),
    results=_like_scores,
    entries=("probabilities", "grad"),
    entry_results=(0,),
    price=_price_of_softmax,
    narrowed=(),
    functions=("edge_softmax_backward",),
)
