"""The product with row-balanced sparse features (CBSR): SpGEMM of MaxK-GNN."""

from typing import Any

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ..engine import choose
from ..engine.bind import bind, output, same_dtype
from ..engine.table import SCALES, Arg, Op, Price, csr_kernels
from . import cuda

REDUCTIONS = ("sum", "mean")


def spgemm(
    A: Format,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Sparse matrix times row-balanced sparse features: the aggregation behind a MaxK.

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
    if A.data is not None:
        same_dtype("S", S, "A", A)
    if out is not None:
        inputs = [row_scale, col_scale, *S._arrays().values()]
        output(out, shape=(A.n_rows, S.n_cols), like=S.data, inputs=inputs, A=A)
    options = {"row_scale": row_scale, "col_scale": col_scale, "reduce": reduce, "out": out}
    return choose.run(SPGEMM, A, S.indices, S.data, S.n_cols, values=A.data, **options)


# The row of the table


def _rows(S: Any, columns: Any, data: Any, feat: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, feat), data),)


def _price(S: Any, columns: Any, data: Any, feat: int, values: Any = None, *_: Any) -> Price:
    """Every entry reads ``k`` columns and values; every row of the product is written."""
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
    results=_rows,
    kernels=(
        *csr_kernels(cuda.spgemm, "spgemm_csr_cbsr", "spgemm_csr_cbsr_numba"),
        choose.convert_to_csr("spgemm"),
    ),
    price=_price,
    narrowed=("*",),
    functions=("spgemm",),
)
