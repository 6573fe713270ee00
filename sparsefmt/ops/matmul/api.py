"""SpMM: a sparse matrix times a dense feature matrix, by sum, mean, max or min."""

from typing import Any

import numpy as np

from ...formats.arrays import Array, namespace
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.coo import COO
from ..engine import checks, choose
from ..engine.choose import pointer, row_stride
from ..engine.memory import memory_of
from ..engine.structure import Structure, structure_of
from ..engine.table import Kernel
from ..tiles import kernels as tiles_kernels
from ..tiles.costs import Costs, checked

REDUCTIONS = ("sum", "mean", "max", "min")


def spmm(
    A: Format,
    X: Array,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    precision: str | None = None,
    costs: Costs | None = None,
    out: Array | None = None,
) -> Array:
    """Sparse matrix times dense feature matrix: the aggregation of a vertex's in-neighbours.

    ``Y[i, f] = r[i] * reduce_e a[e] * c[j] * X[j, f]`` over the stored entries ``e = (i, j)`` of
    row ``i``; every ``a[e]`` is 1 for an unweighted ``A``, ``r`` and ``c`` are 1 where left out.
    An implicit zero never touches Inf or NaN, and counts in no reduction.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, shape (n_rows, n_cols)
        The format picks the method: COO scatters with atomics (GAS, for sums only; not
        deterministic on a GPU), CSR reduces row by row (GAR), SGT takes sums and means window by
        window, on a GPU by tensor cores where they may and pay (``explain`` says which); all else
        is converted to CSR first, at each call.
    X : array, shape (n_cols, feat)
        Same dtype as ``A.data``: float16, bfloat16, float32 or float64.  float16 and bfloat16 are
        computed in float32.  Any ``feat``, 0 included.  Contiguous rows at any distance are read in
        place, other layouts are copied.
    reduce : "sum", "mean", "max" or "min"
        ``mean`` divides by the number of stored entries of the row.  In ``max`` and ``min`` NaN
        wins, as in NumPy.  A row without entries gives 0 in all of them.
    row_scale : array, shape (n_rows,), optional
        ``r``, of X's dtype, or float32 beside 2-byte features.  It multiplies after the reduction,
        so that a negative one turns a maximum of the row around; in a sum over a COO it multiplies
        each entry, over an SGT on tensor cores the row's part there and the rest, which differs by
        rounding, overflow, and ``inf * 0`` or ``inf - inf`` where it is infinite.
    col_scale : array, shape (n_cols,), optional
        ``c``, of the same dtypes.
    precision : "tf32", optional
        Allows tensor cores in float32: they round each factor of a product to 16 bits, the sum of
        two bfloat16, so to more than the 11 bits of TF32, and add up in float32.  A permission:
        kernels that have no use for it ignore it.  float16 and bfloat16 need none, since their
        products are exact there.
    costs : Costs, optional
        What decides which entries of an SGT tensor cores take, by default as measured; ignored
        where no kernel has a use for it.
    out : array, shape (n_rows, feat), optional
        Takes the result; contiguous, of X's dtype and device, overlapping no input.

    Returns
    -------
    array, shape (n_rows, feat)
        On the device of the inputs, of X's dtype.

    Raises
    ------
    ShapeError
        If ``X`` is not 2-D or has not one row per column of ``A``, a scale is not 1-D with one
        factor per row or column, or ``out`` has not the result's shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, ``X`` has another dtype than ``A.data``, a scale or ``out``
        has a dtype that does not fit, or ``costs`` are no ``Costs``.
    DeviceError
        If the arguments are on different devices.
    UnsupportedError
        If ``reduce`` or ``precision`` is unknown, or ``precision`` is given for other features than
        float32.

    Notes
    -----
    Error bound: ``|Y - Y_exact| <= deg * eps * sum_e |a[e]| |X[j, f]``; with tf32 ``2**-15`` times
    that sum more, without values and ``c`` ``2**-17``, of features from 2e-33 on.  GAS and GAR are
    named in fuseGNN (ICCAD'20), section 3; tiles on tensor cores in TC-GNN (ATC'23), section 4.2.
    """
    A = checks.sparse("A", A)
    checks.choice("reduce", reduce, REDUCTIONS)
    X = checks.features("X", X, A=A)
    checks.values_like(A, X)
    precision = checks.precision(precision, "X", X)
    row_scale = checks.factors("row_scale", row_scale, A=A, axis="rows", like=X)
    col_scale = checks.factors("col_scale", col_scale, A=A, axis="columns", like=X)
    inputs = [X, row_scale, col_scale, *checks.arrays_of(A)]
    out = checks.output(out, shape=(A.n_rows, X.shape[1]), like=X, inputs=inputs)
    options = {"row_scale": row_scale, "col_scale": col_scale}
    options |= {"precision": precision, "costs": checked(costs)}
    return choose.run("spmm", A, checks.rows_in_place(X), out=out, reduce=reduce, **options)


# Launchers


def spmm_on_csr(
    A: CSR | Structure,
    x: Any,
    values: Any = None,
    perm: Any = None,
    row_scale: Any = None,
    col_scale: Any = None,
    reduce: str = "sum",
    *,
    out: Any = None,
    arg: Any = None,
    **_: Any,
) -> Any:
    """``out = diag(r) reduce(a c X)`` of a CSR on a GPU, by arrays of any library."""
    from . import cuda

    S, m = structure_of(A), memory_of(x)
    if values is None and isinstance(A, CSR):
        values = A.data
    dtype, feat = m.dtype(x), x.shape[1]
    out = m.empty((S.n_rows, feat), dtype, x) if out is None else out
    x, values = m.rows_in_place(x), m.contiguous(values)
    row_scale, col_scale = m.factors(row_scale), m.factors(col_scale)
    nbytes = cuda.spmm_workspace(S, dtype, feat, arg=arg is not None)
    workspace = m.empty((nbytes,), "uint8", x) if nbytes else None
    with m.on_device(x):
        cuda.spmm(
            *(S, dtype, reduce), feat=feat, ldx=m.row_stride(x), data=m.pointer(values),
            perm=m.pointer(perm), X=m.pointer(x), row_scale=m.pointer(row_scale),
            col_scale=m.pointer(col_scale), out=m.pointer(out), arg=m.pointer(arg),
            workspace=m.pointer(workspace), stream=m.stream(x),
        )  # fmt: skip
    return out


_spmm_csr_gpu = spmm_on_csr  # the old name


def _spmm_coo_gpu(
    A: COO,
    X: Array,
    *,
    out: Array,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    **_: Any,
) -> None:
    from . import cuda

    # Atomics add in float32 at least; a 2-byte result is rounded once, at the end.
    sums = out if out.itemsize >= 4 else namespace(out).empty(out.shape, np.float32)
    sums.fill(0)
    cuda.spmm_coo(
        str(X.dtype),
        str(A.index_dtype),
        nnz=A.nnz,
        feat=X.shape[1],
        ldx=row_stride(X),
        row=pointer(A.row),
        col=pointer(A.col),
        data=pointer(A.data),
        X=pointer(X),
        row_scale=pointer(row_scale),
        col_scale=pointer(col_scale),
        out=pointer(sums),
        stream=cuda.stream(),
    )
    if sums is not out:
        out[...] = sums


def _spmm_csr_numba(
    A: CSR,
    X: Array,
    *,
    out: Array,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    arg: Array | None = None,
    **_: Any,
) -> None:
    from ..engine import cpu

    scales = row_scale, col_scale
    cpu.spmm(A.indptr, A.indices, A.data, X, *scales, out, reduce=reduce, arg=arg)


def _spmm_coo_numba(
    A: COO,
    X: Array,
    *,
    out: Array,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    **_: Any,
) -> None:
    from ..engine import cpu

    cpu.spmm_coo(A.row, A.col, A.data, X, row_scale, col_scale, out)


# What each kernel can run


def _sums(A: Format, X: Array, *, reduce: str = "sum", **_: Any) -> list[str]:
    return [] if reduce == "sum" else [f"scattering does not take a {reduce}"]


def _rows() -> tuple[choose.Kernel, ...]:
    gpu, cpu, csr = choose.on_gpu, choose.on_cpu, choose.is_format("csr")
    coo = choose.is_format("coo")

    def row(name: str, run: Any, *conditions: Any, **facts: Any) -> choose.Kernel:
        return choose.Kernel("spmm", name, choose.all_of(*conditions), run, **facts)

    return (
        row("spmm_csr_balanced", _spmm_csr_gpu, gpu, csr),
        *map(_as_before, tiles_kernels.spmm_kernels(spmm_on_csr)),
        row("spmm_coo_atomic", _spmm_coo_gpu, gpu, coo, _sums, deterministic=False),
        row("spmm_csr_numba", _spmm_csr_numba, cpu, csr),
        row("spmm_coo_numba", _spmm_coo_numba, cpu, coo, _sums),
        choose.through_csr("spmm"),
    )


def _as_before(kernel: Kernel) -> choose.Kernel:
    """A row of the new table in the old one, until spmm has its own."""
    on_cpu = choose.on_cpu if kernel.place == "cpu" else choose.on_gpu
    conditions = [on_cpu] if kernel.place != "any" else []
    conditions += [choose.is_format(one) for one in kernel.formats if len(kernel.formats) == 1]
    conditions += [kernel.refuses] if kernel.refuses else []

    def supports(A: Format, X: Array, **options: Any) -> list[str]:
        return choose.all_of(*conditions)(A, X, values=getattr(A, "data", None), **options)

    def run(A: Format, X: Array, **options: Any) -> None:
        kernel.run(A, X, values=getattr(A, "data", None), **options)

    return choose.Kernel("spmm", kernel.name, supports, run, note=kernel.note)


choose.register(*_rows())
