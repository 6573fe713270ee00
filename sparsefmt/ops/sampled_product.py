"""SDDMM: products of dense features, sampled at the entries of a sparse matrix."""

from typing import Any

from .._arrays import Array
from .._costs import Costs, checked
from ..base import Format
from ..cbsr import CBSR
from ..compressed import CSR
from . import _check, _registry, tiles
from ._registry import pointer, row_stride
from .cbsr_gradients import sddmm_cbsr


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
        _check.precision(precision, "Y", Y)
        checked(costs)
        return sddmm_cbsr(A, X, Y, out=out)
    A = _check.sparse("A", A)
    X = _check.features("X", X, A=A, axis="rows", heads=True)
    Y = _check.features("Y", Y, A=A, heads=True)
    _check.alike("Y", Y, "X", X)
    precision, costs = _check.precision(precision, "X", X), checked(costs)
    inputs = [X, Y, *_check.arrays_of(A)]
    out = _check.output(out, shape=(A.nnz, *X.shape[1:-1]), like=X, inputs=inputs)
    X, Y = _check.rows_in_place(X), _check.rows_in_place(Y)
    options = {"precision": precision, "costs": costs}
    return _registry.run("sddmm", _check.structure(A), X, Y, out=out, **options)


def _sddmm_gpu(A: CSR, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from . import _launch, _launch_edges

    _launch_edges.sddmm(
        _launch.structure(A),
        str(X.dtype),
        heads=X.shape[1] if X.ndim == 3 else 1,
        feat=X.shape[-1],
        ldx=row_stride(X),
        ldy=row_stride(Y),
        X=pointer(X),
        Y=pointer(Y),
        out=pointer(out),
        stream=_launch.stream(),
    )


def _sddmm_numba(A: CSR, X: Array, Y: Array, *, out: Array, **_: Any) -> None:
    from . import cpu

    X, Y = (a if a.ndim == 3 else a[:, None] for a in (X, Y))
    cpu.sddmm(A.indptr, A.indices, X, Y, out.reshape(A.nnz, X.shape[1]))


def _rows() -> tuple[_registry.Kernel, ...]:
    csr = _registry.is_format("csr")

    def row(name: str, place: Any, run: Any) -> _registry.Kernel:
        return _registry.Kernel("sddmm", name, _registry.all_of(place, csr), run)

    return (
        row("sddmm_csr_balanced", _registry.on_gpu, _sddmm_gpu),
        *tiles.sddmm_rows(_sddmm_gpu),
        row("sddmm_csr_numba", _registry.on_cpu, _sddmm_numba),
        _registry.through_csr("sddmm"),
    )


_registry.register(*_rows())
