"""Gradients of SpGEMM, in row-balanced features (SSpMM of MaxK-GNN) and in edge values."""

from typing import Any

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, allocating, is_cupy, namespace, on_device_of
from ...formats.base import Format
from ...formats.cbsr import CBSR
from ...formats.compressed import CSR
from ...reorder import Order
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.choose import pointer, row_stride
from ..matmul.api import REDUCTIONS
from ..matmul.extrema import _transposed
from .api import balanced, factors, memory
from .windows import Cut


def sspmm(
    A: Format,
    dY: Array,
    S: CBSR,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    deterministic: bool = False,
    order: Order | None = None,
    transposed: CSR | None = None,
    perm: Array | None = None,
) -> CBSR:
    """Gradient of ``spgemm`` in the values of ``S``: a transposed product, at its places only.

    ``dS[j, t] = c[j] * sum_e a[e] * r[i] * dY[i, S.indices[j, t]]`` over the stored entries
    ``e = (i, j)`` of column ``j``; ``r[i]`` is divided by the number of entries of row ``i`` for a
    mean.  The other places of ``dY`` are not touched.

    Parameters
    ----------
    A, row_scale, col_scale, reduce
        As given to ``spgemm``; scales of the dtype of ``dY``.
    dY : array, shape (n_rows, feat)
        Same dtype as ``A.data``.  Contiguous rows at any distance are read in place, other layouts
        are copied.
    S : CBSR, shape (n_cols, feat)
        Only ``S.indices`` are read; ``S.data`` is ignored.
    deterministic : bool
        On a GPU the outer product adds up by atomics, whose order, and with it the last bits of the
        result, changes from run to run.  True takes the product with the transpose instead, which
        is several times slower for small ``k``.  The CPU is always deterministic.
    order : reorder.Order, optional
        Of the rows of ``A``.  The outer product goes through windows of rows that follow one
        another in it (hubs first if left out): the more columns they share, the faster.
        ``reorder.community_order(A)`` takes half a second to a second for 10**8 entries; make it
        once and keep it, since windows live as long as their order.  No row of any array moves.
        Without effect on the CPU and where ``deterministic``.
    transposed : CSR, shape (n_cols, n_rows), optional
        ``A.tocsr().tocsc().T``; computed if left out and needed.  Its values are not read.
    perm : array, shape (nnz,), optional
        The number in CSR order of each entry of ``transposed``: the permutation of
        ``A.tocsr().tocsc_with_perm()``.  Goes with ``transposed``.

    Returns
    -------
    CBSR, shape (n_cols, feat)
        Sharing the indices of ``S``, of the dtype of ``dY``.  A column without entries gives 0.

    Raises
    ------
    ShapeError
        If rows, columns, feature widths or the places of ``order`` do not fit together.
    DtypeError
        If ``A`` is no sparse format, ``S`` no CBSR or ``order`` no Order, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.
    IndexRangeError
        On the CPU, if ``perm`` numbers entries that ``A`` does not store.
    UnsupportedError
        If ``reduce`` is neither, or only one of ``transposed`` and ``perm`` is given.

    Notes
    -----
    The atomic way sorts the entries into windows at its first use, in about 48 bytes an entry.
    They stay with ``A``, if it is a CSR: 4 bytes and an index an entry for each height of windows,
    which goes by the width of the features.  Sums are in float32 if values have 2 bytes, in memory
    of their own.  The other way needs the transpose, and n_cols * 256 bytes at most.  Whether
    ``transposed`` and ``perm`` are those of ``A`` is not checked beyond their range on the CPU.

    MaxK-GNN (ASPLOS'24), section 4.2.
    """
    A = engine_checks.sparse("A", A).tocsr()
    engine_checks.choice("reduce", reduce, REDUCTIONS[:2])
    dY = engine_checks.rows_in_place(engine_checks.features("dY", dY, A=A, axis="rows"))
    S = balanced("S", S, A, like=("dY", dY))
    if A.data is not None:
        engine_checks.same_dtype("dY", dY, "A", A)
    row_scale = factors("row_scale", row_scale, A, "rows", "dY", dY)
    col_scale = factors("col_scale", col_scale, A, "columns", "dY", dY)
    if deterministic or transposed is not None or perm is not None or not is_cupy(dY):
        transposed, perm = _transposed(A, transposed, perm)
    if order is not None:
        order = checked_order(order, A)
    if reduce == "mean":
        row_scale = _shares(A, row_scale, dY)
    dS = engine_checks.output(None, shape=S.indices.shape, like=dY, inputs=[])
    options = {
        "row_scale": row_scale,
        "col_scale": col_scale,
        "deterministic": deterministic,
        "order": order,
    }
    choose.run("sspmm", A, dY, S, transposed, perm, out=dS, **options)
    return CBSR._trusted(indices=S.indices, data=dS, shape=S.shape)


def sddmm_cbsr(A: Format, X: Array, Y: CBSR, *, out: Array | None = None) -> Array:
    """``sddmm`` with row-balanced ``Y``: the gradient of ``spgemm`` in the edge values.

    ``s[e] = sum_t X[i, Y.indices[j, t]] * Y.data[j, t]`` for the e-th stored entry (i, j), in CSR
    order.  Arguments, result and errors are those of ``sddmm``, without heads.
    """
    A = engine_checks.sparse("A", A)
    X = engine_checks.rows_in_place(engine_checks.features("X", X, A=A, axis="rows"))
    Y = balanced("Y", Y, A, like=("X", X))
    engine_checks.same_dtype("Y", Y, "X", X)
    inputs = [X, *Y._arrays().values(), *A._arrays().values()]
    out = engine_checks.output(out, shape=(A.nnz,), like=X, inputs=inputs)
    return choose.run("sddmm_cbsr", engine_checks.structure(A), X, Y, out=out)


def checked_order(order: object, A: CSR) -> Order:
    """An order of the rows of ``A``, on its device."""
    if not isinstance(order, Order):
        raise DtypeError(
            f"order is a {type(order).__name__}: give a reorder.Order, such as community_order(A) "
            "or Order(perm)."
        )
    if len(order) != A.n_rows:
        raise ShapeError(f"order is of {len(order)} vertices but there are {A.n_rows} rows.")
    checks.same_device("order", order.perm, "the structure", A.indptr)
    return order


def _shares(A: CSR, row_scale: Array | None, like: Array) -> Array:
    """``r[i] / deg_i``, in the dtype of factors."""
    wide = like.dtype if like.dtype.itemsize >= 4 else np.float32
    with on_device_of(like), allocating(f"a factor for each of {A.n_rows} rows"):
        degrees = namespace(like).maximum(A.lengths, 1).astype(wide)
        return (1 if row_scale is None else row_scale) / degrees


# Launchers


def _sspmm_windows_gpu(
    A: CSR, dY: Array, S: CBSR, T: CSR | None, perm: Array | None, *, out: Array,
    row_scale: Array | None, col_scale: Array | None, deterministic: bool, order: Order | None,
) -> None:  # fmt: skip
    from . import cuda_sspmm

    dtype, cut = str(dY.dtype), _cut(A, dY, S, order)
    assert cut is not None  # as _fits_on_chip found
    structure = cuda_sspmm.windowed(A._windows_of(cut, order), A.n_cols)
    workspace = memory(cuda_sspmm.sums_workspace(structure, dtype, S.k), out)
    given = _sspmm_arguments(A, dY, S, row_scale, col_scale, out, workspace)
    cuda_sspmm.sspmm_windows(structure, dtype, **given)


def _sspmm_panels_gpu(
    A: CSR, dY: Array, S: CBSR, T: CSR | None, perm: Array | None, *, out: Array,
    row_scale: Array | None, col_scale: Array | None, deterministic: bool, order: Order | None,
) -> None:  # fmt: skip
    from ..matmul import cuda as matmul_cuda
    from . import cuda_sspmm

    if T is None:
        T, perm = _transposed(A, None, None)
    structure, dtype = matmul_cuda.structure(T), str(dY.dtype)
    workspace = memory(cuda_sspmm.panels_workspace(structure, dtype, S.n_cols), out)
    given = _sspmm_arguments(A, dY, S, row_scale, col_scale, out, workspace)
    cuda_sspmm.sspmm_panels(structure, dtype, perm=pointer(perm), **given)


def _sspmm_arguments(
    A: CSR, dY: Array, S: CBSR, row_scale: Array | None, col_scale: Array | None, out: Array,
    workspace: Array | None,
) -> dict[str, int]:  # fmt: skip
    from ..matmul import cuda as matmul_cuda

    return {
        "feat": S.n_cols,
        "k": S.k,
        "index_bytes": S.indices.itemsize,
        "indices": pointer(S.indices),
        "data": pointer(A.data),
        "grad": pointer(dY),
        "ldg": row_stride(dY),
        "row_scale": pointer(row_scale),
        "col_scale": pointer(col_scale),
        "out": pointer(out),
        "workspace": pointer(workspace),
        "stream": matmul_cuda.stream(),
    }


def _sspmm_numba(
    A: CSR, dY: Array, S: CBSR, T: CSR, perm: Array, *, out: Array,
    row_scale: Array | None, col_scale: Array | None, deterministic: bool, order: Order | None,
) -> None:  # fmt: skip
    from ..engine import cpu

    cpu.sspmm(T.indptr, T.indices, perm, A.data, dY, S.indices, row_scale, col_scale, out)


def _sddmm_gpu(A: CSR, X: Array, Y: CBSR, *, out: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    cuda.sddmm(
        matmul_cuda.structure(A),
        str(X.dtype),
        feat=Y.n_cols,
        k=Y.k,
        index_bytes=Y.indices.itemsize,
        X=pointer(X),
        ldx=row_stride(X),
        indices=pointer(Y.indices),
        values=pointer(Y.data),
        row_scale=0,
        col_scale=0,
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )


def _sddmm_numba(A: CSR, X: Array, Y: CBSR, *, out: Array) -> None:
    from ..engine import cpu

    cpu.sddmm_cbsr(A.indptr, A.indices, X, Y.indices, Y.data, out)


def _atomics_allowed(*_: Any, deterministic: bool, **__: Any) -> list[str]:
    return ["deterministic is asked for"] if deterministic else []


def _fits_on_chip(A: CSR, dY: Array, S: CBSR, *_: Any, **__: Any) -> list[str]:
    if not is_cupy(dY) or _cut(A, dY, S, None) is not None:
        return []
    return [f"a row of {S.n_cols} features does not fit on chip"]


def _cut(A: CSR, dY: Array, S: CBSR, order: Order | None) -> Cut | None:
    from . import cuda_sspmm

    return cuda_sspmm.cut(
        A.shape,
        A.nnz,
        str(dY.dtype),
        feat=S.n_cols,
        k=S.k,
        ordered=order is not None,
        device=A.indptr.device.id,
    )


def _rows() -> tuple[choose.Kernel, ...]:
    gpu, cpu = (
        choose.all_of(place, choose.is_format("csr")) for place in (choose.on_gpu, choose.on_cpu)
    )
    windows = choose.all_of(gpu, _atomics_allowed, _fits_on_chip)
    return (
        choose.Kernel(
            "sspmm", "sspmm_csr_windows", windows, _sspmm_windows_gpu, deterministic=False
        ),
        choose.Kernel("sspmm", "sspmm_csr_panels", gpu, _sspmm_panels_gpu),
        choose.Kernel("sspmm", "sspmm_csr_cbsr_numba", cpu, _sspmm_numba),
        choose.Kernel("sddmm_cbsr", "sddmm_csr_cbsr", gpu, _sddmm_gpu),
        choose.Kernel("sddmm_cbsr", "sddmm_csr_cbsr_numba", cpu, _sddmm_numba),
        choose.through_csr("sddmm_cbsr"),
    )


choose.register(*_rows())
