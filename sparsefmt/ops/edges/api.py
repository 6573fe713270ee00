"""SDDMM: products of dense features, sampled at the entries of a sparse matrix."""

from typing import Any

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.compressed import CSR
from ...formats.costs import Costs, checked
from ..cbsr.gradients import sddmm_cbsr
from ..engine import checks, choose
from ..engine.choose import pointer, row_stride
from ..tiles import kernels as tiles_kernels


def sddmm(
    A: Format,
    X: Array,
    Y: Array | CBSR,
    *,
    precision: str | None = None,
    costs: Costs | None = None,
    out: Array | None = None,
) -> Array:
    """Dot products of feature rows, at the stored entries of ``A``.

    ``s[e] = sum_f X[i, f] * Y[j, f]`` for the e-th stored entry (i, j), in CSR order; with heads,
    ``s[e, h] = sum_f X[i, h, f] * Y[j, h, f]``.

    Parameters
    ----------
    A : CSR or SGT, shape (n, m)
        Only the structure is read; ``A.data`` is ignored.  Other formats are converted to CSR, at
        each call: entries count in the order of ``A.tocsr()``.
    X, Y : array, shape (n, feat) and (m, feat), or (n, heads, feat) and (m, heads, feat)
        Same dtype: float16, bfloat16, float32 or float64.  Sums run in float32 at least.
        Contiguous rows at any distance are read in place, other layouts are copied.  ``Y`` may be a
        CBSR of shape (m, feat), of which only the stored places are touched.
    precision : "tf32", optional
        Allows tensor cores in float32, which here round each factor to 11 bits, in tf32; ignored
        where no kernel has a use for it.
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
        checks.precision(precision, "Y", Y)
        checked(costs)
        return sddmm_cbsr(A, X, Y, out=out)
    A = checks.sparse("A", A)
    X = checks.features("X", X, A=A, axis="rows", heads=True)
    Y = checks.features("Y", Y, A=A, heads=True)
    checks.alike("Y", Y, "X", X)
    precision, costs = checks.precision(precision, "X", X), checked(costs)
    inputs = [X, Y, *checks.arrays_of(A)]
    out = checks.output(out, shape=(A.nnz, *X.shape[1:-1]), like=X, inputs=inputs)
    X, Y = checks.rows_in_place(X), checks.rows_in_place(Y)
    options = {"precision": precision, "costs": costs}
    return choose.run("sddmm", checks.structure(A), X, Y, out=out, **options)


def _sddmm_gpu(A: CSR, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    cuda.sddmm(
        matmul_cuda.structure(A),
        str(X.dtype),
        heads=X.shape[1] if X.ndim == 3 else 1,
        feat=X.shape[-1],
        ldx=row_stride(X),
        ldy=row_stride(Y),
        X=pointer(X),
        Y=pointer(Y),
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )


def _sddmm_numba(A: CSR, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from ..engine import cpu

    X, Y = (a if a.ndim == 3 else a[:, None] for a in (X, Y))
    cpu.sddmm(A.indptr, A.indices, X, Y, out.reshape(A.nnz, X.shape[1]))


def _rows() -> tuple[choose.Kernel, ...]:
    csr = choose.is_format("csr")

    def row(name: str, place: Any, run: Any) -> choose.Kernel:
        return choose.Kernel("sddmm", name, choose.all_of(place, csr), run)

    return (
        row("sddmm_csr_balanced", choose.on_gpu, _sddmm_gpu),
        *tiles_kernels.sddmm_rows(_sddmm_gpu),
        row("sddmm_csr_numba", choose.on_cpu, _sddmm_numba),
        choose.through_csr("sddmm"),
    )


choose.register(*_rows())
