"""The symmetric normalisation of GCN: degrees, loops and scaling, and the way back."""

from typing import Any

import numpy as np

from ...errors import DeviceError, DtypeError, ShapeError
from ...formats import checks, primitives
from ...formats.arrays import (
    Array,
    allocating,
    as_array,
    contiguous,
    device_of,
    namespace,
    on_device_of,
)
from ...formats.base import Format
from ...formats.compressed import CSR
from ...formats.coo import COO
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.choose import pointer


def gcn_norm(A: Format, *, self_loops: bool = True) -> Any:
    """``D^-1/2 (A + I) D^-1/2``, or of ``A`` alone: the matrix that GCN multiplies with.

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
    A = _operand(A, self_loops)
    if A.format not in ("coo", "csr"):
        A = A.tocsr()
    size = A.nnz + A.n_rows * self_loops
    if size > np.iinfo(A.index_dtype).max:
        A = A.astype(index_dtype=np.int64)
    with on_device_of(A._indices), allocating(f"a normalised matrix of {size} entries"):
        B = _unfilled(A, size)
    choose.run("gcn_norm", A, B, out=B.data)
    return B


def gcn_norm_backward(A: Format, grad: Array, *, self_loops: bool = True) -> Array:
    """Gradient of ``gcn_norm`` in the values of ``A``.

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
    A = _operand(A, self_loops)
    grad = _gradient(grad, A, A.nnz + A.n_rows * self_loops)
    shape = (A.nnz,) if A.data is None else A.data.shape
    if A.format in ("coo", "csr"):
        return _backward(A, grad, self_loops)
    csr, perm = A.tocsr_with_perm()
    found = _backward(csr, grad, self_loops)
    with on_device_of(found), allocating(f"gradients of {A.nnz} values"):
        out = namespace(found).empty_like(found)
        out[perm] = found
        return out.reshape(shape)


def _operand(A: object, self_loops: object) -> Format:
    """A square matrix, and a bool beside it."""
    if not isinstance(self_loops, bool):
        raise DtypeError(f"self_loops is {self_loops!r}: give True or False.")
    A = engine_checks.sparse("A", A)
    if A.n_rows != A.n_cols:
        raise ShapeError(
            f"A has shape {A.shape}: a vertex has one degree, give as many columns as rows."
        )
    return A


def _gradient(grad: object, A: Format, size: int) -> Array:
    array = as_array("grad", grad, empty=np.float64, beside=A._indices)
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
    """The result without its contents, but for those that it shares with ``A``."""
    xp = namespace(A._indices)
    values = xp.empty(size, np.float32 if A.data is None else A.data.dtype)
    if size == A.nnz:  # nothing is added: it has the same structure
        return A._replace(data=values)
    index = A.index_dtype
    if A.format == "coo":
        places = {"row": xp.empty(size, index), "col": xp.empty(size, index)}
    else:
        places = {"indptr": xp.empty(A.n_rows + 1, index), "indices": xp.empty(size, index)}
    return type(A)._trusted(**places, data=values, shape=A.shape)


def _backward(A: Any, grad: Array, self_loops: bool) -> Array:
    with on_device_of(grad), allocating(f"gradients of {A.nnz} values"):
        out = namespace(grad).empty(A.nnz, grad.dtype)
    found: Array = choose.run("gcn_norm_backward", A, grad, out=out, loops=self_loops)
    return found


def _loops(A: Format, B: Format) -> bool:
    """Whether B has loops that A has not."""
    return B.nnz > A.nnz


# Kernels


def _coo_gpu(A: COO, B: COO, *, out: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    n = A.n_rows
    workspace = namespace(out).empty(cuda.BYTES * n, np.uint8)
    cuda.gcn_norm_coo(
        str(out.dtype),
        str(A.index_dtype),
        nnz=A.nnz,
        n=n,
        loops=_loops(A, B),
        row=pointer(A.row),
        col=pointer(A.col),
        data=pointer(A.data),
        out_row=pointer(B.row),
        out_col=pointer(B.col),
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def _csr_gpu(A: CSR, B: CSR, *, out: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    workspace = namespace(out).empty(cuda.BYTES * A.n_rows, np.uint8)
    cuda.gcn_norm_csr(
        matmul_cuda.structure(A),
        str(out.dtype),
        loops=_loops(A, B),
        data=pointer(A.data),
        out_indptr=pointer(B.indptr),
        out_indices=pointer(B.indices),
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def _coo_numba(A: COO, B: COO, *, out: Array) -> None:
    from . import cpu as gcn_cpu

    loops = _loops(A, B)
    gcn_cpu.gcn_norm_coo(A.row, A.col, A.data, A.n_rows, out, loops=loops)
    if loops:
        for mine, given in ((B.row, A.row), (B.col, A.col)):
            mine[: A.nnz], mine[A.nnz :] = given, np.arange(A.n_rows)


def _csr_numba(A: CSR, B: CSR, *, out: Array) -> None:
    from . import cpu as gcn_cpu

    loops = _loops(A, B)
    columns = B.indices if loops else None
    gcn_cpu.gcn_norm_csr(A.indptr, A.indices, A.data, out, loops=loops, columns=columns)
    if loops:
        np.add(A.indptr, np.arange(A.n_rows + 1), out=B.indptr, casting="same_kind")


def _rows(A: Any) -> tuple[Array, Array, Array | None]:
    """Rows and columns of the entries and, of a CSR, its pointers."""
    if A.format == "coo":
        return A.row, A.col, None
    return primitives.expand(A.indptr, A.nnz), A.indices, A.indptr


def _backward_gpu(A: Any, grad: Array, *, out: Array, loops: bool) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    row, col, indptr = _rows(A)
    workspace = namespace(out).empty(cuda.BYTES_BACKWARD * A.n_rows, np.uint8)
    cuda.gcn_norm_backward(
        str(out.dtype),
        str(A.index_dtype),
        nnz=A.nnz,
        n=A.n_rows,
        loops=loops,
        row=pointer(row),
        col=pointer(col),
        indptr=pointer(indptr),
        data=pointer(A.data),
        grad=pointer(grad),
        out=pointer(out),
        workspace=pointer(workspace),
        stream=matmul_cuda.stream(),
    )


def _backward_numba(A: Any, grad: Array, *, out: Array, loops: bool) -> None:
    from . import cpu as gcn_cpu

    gcn_cpu.gcn_norm_backward(*_rows(A), A.data, A.n_rows, grad, out, loops=loops)


def _unweighted(A: Format, *_: Any, **__: Any) -> list[str]:
    return [] if A.data is None else ["A has values, which are not counted but added"]


def _kernels() -> tuple[choose.Kernel, ...]:
    gpu, cpu = choose.on_gpu, choose.on_cpu
    coo, csr = choose.is_format("coo"), choose.is_format("csr")

    def row(op: str, name: str, run: Any, *conditions: Any, fixed: bool = True) -> Any:
        asked = choose.all_of(*conditions)
        return choose.Kernel(op, f"{op}_{name}", asked, run, deterministic=fixed)

    return (
        row("gcn_norm", "csr", _csr_gpu, gpu, csr),
        row("gcn_norm", "coo_counted", _coo_gpu, gpu, coo, _unweighted),
        row("gcn_norm", "coo_atomic", _coo_gpu, gpu, coo, fixed=False),
        row("gcn_norm", "csr_numba", _csr_numba, cpu, csr),
        row("gcn_norm", "coo_numba", _coo_numba, cpu, coo),
        row("gcn_norm_backward", "atomic", _backward_gpu, gpu, fixed=False),
        row("gcn_norm_backward", "numba", _backward_numba, cpu),
    )


choose.register(*_kernels())
