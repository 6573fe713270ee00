"""SpMM by maximum or minimum: which entry each result comes from, and the way back to it."""

from typing import Any

import numpy as np

from ...errors import DtypeError, IndexRangeError, ShapeError, UnsupportedError
from ...formats import checks
from ...formats.arrays import Array, allocating, as_array, is_cupy, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.choose import pointer, row_stride
from .api import REDUCTIONS


def spmm_arg(
    A: Format,
    X: Array,
    *,
    reduce: str = "max",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
) -> tuple[Array, Array]:
    """The maximum or minimum of ``spmm``, and which entry it comes from.

    ``Y[i, f] = r[i] * a[e] * c[j] * X[j, f]`` for the entry ``e = arg[i, f]`` of row ``i`` whose
    ``a[e] * c[j] * X[j, f]`` is largest (smallest).  Ties go to the lowest entry; NaN wins.

    Parameters
    ----------
    A, X, row_scale, col_scale
        As for ``spmm``.
    reduce : "max" or "min"

    Returns
    -------
    Y : array, shape (n_rows, feat)
        The result of ``spmm``.
    arg : array, shape (n_rows, feat)
        Entries numbered in CSR order (that of ``A.tocsr()``), of the dtype of the CSR's indices; -1
        in a row without entries.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``.
    """
    A = engine_checks.sparse("A", A)
    engine_checks.choice("reduce", reduce, REDUCTIONS[2:])
    X = engine_checks.features("X", X, A=A)
    engine_checks.values_like(A, X)
    row_scale = engine_checks.factors("row_scale", row_scale, A=A, axis="rows", like=X)
    col_scale = engine_checks.factors("col_scale", col_scale, A=A, axis="columns", like=X)
    out = engine_checks.output(None, shape=(A.n_rows, X.shape[1]), like=X, inputs=[])
    B = A.tocsr()
    with on_device_of(out), allocating(f"entries of shape {out.shape}"):
        arg = namespace(out).empty(out.shape, B.index_dtype)
    options = {"reduce": reduce, "row_scale": row_scale, "col_scale": col_scale, "arg": arg}
    return choose.run("spmm", B, engine_checks.rows_in_place(X), out=out, **options), arg


def spmm_arg_backward(
    A: Format,
    X: Array,
    arg: Array,
    grad: Array,
    *,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    transposed: CSR | None = None,
    perm: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of ``spmm_arg`` in the features and in the edge values.

    ``dX[j, f] = sum_e a[e] c[j] r[i] grad[i, f]`` over the entries ``e = (i, j)`` of column ``j``
    with ``arg[i, f] == e``, and ``dA[e] = sum_f r[i] c[j] grad[i, f] X[j, f]`` over the features
    with ``arg[i, f] == e``.

    Parameters
    ----------
    A, X, row_scale, col_scale
        As given to ``spmm_arg``.
    arg : array, shape (n_rows, feat)
        What ``spmm_arg`` returned.
    grad : array, shape (n_rows, feat)
        Of ``Y``, in X's dtype.
    transposed : CSR, shape (n_cols, n_rows), optional
        ``A.tocsr().tocsc().T``; computed if left out.  Its values are not read.
    perm : array, shape (nnz,), optional
        The number in CSR order of each entry of ``transposed``: the permutation of
        ``A.tocsr().tocsc_with_perm()``.  Goes with ``transposed``.

    Returns
    -------
    dX : array, shape (n_cols, feat)
    dA : array, shape (nnz,)
        In CSR order; of an unweighted ``A`` too.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``spmm``; also if only one of ``transposed`` and ``perm`` is given.

    Notes
    -----
    Deterministic: no atomics.  What ``arg`` says of entries of other rows is ignored; whether
    ``transposed`` and ``perm`` are those of ``A`` is not checked beyond their range on the CPU.
    """
    A = engine_checks.sparse("A", A).tocsr()
    X = engine_checks.rows_in_place(engine_checks.features("X", X, A=A))
    engine_checks.values_like(A, X)
    grad = engine_checks.rows_in_place(engine_checks.features("grad", grad, A=A, axis="rows"))
    engine_checks.alike("grad", grad, "X", X)
    arg = _winners(arg, grad, A)
    row_scale = engine_checks.factors("row_scale", row_scale, A=A, axis="rows", like=X)
    col_scale = engine_checks.factors("col_scale", col_scale, A=A, axis="columns", like=X)
    T, perm = _transposed(A, transposed, perm)
    dX = engine_checks.output(None, shape=X.shape, like=X, inputs=[])
    dA = engine_checks.output(None, shape=(A.nnz,), like=X, inputs=[])
    options = {"row_scale": row_scale, "col_scale": col_scale, "dA": dA}
    return choose.run("spmm_arg_backward", A, X, arg, grad, T, perm, out=dX, **options), dA


def _winners(arg: Any, grad: Array, A: CSR) -> Array:
    arg = as_array("arg", arg, beside=A.indices)
    if arg.shape != grad.shape:
        raise ShapeError(
            f"arg has shape {arg.shape} but grad has {grad.shape}: give what spmm_arg returned."
        )
    checks.index_like("arg", arg, "A.indices", A.indices)
    # A kernel reads as many places at a time as features: 64 bytes at most.
    aligned = not is_cupy(arg) or arg.data.ptr % 64 == 0
    return arg if arg.flags.c_contiguous and aligned else arg.copy()


def _transposed(A: CSR, transposed: CSR | None, perm: Any) -> tuple[CSR, Array]:
    if (transposed is None) != (perm is None):
        given, other = ("perm", "transposed") if transposed is None else ("transposed", "perm")
        raise UnsupportedError(f"{given} is given without {other}: give both or neither.")
    if transposed is None:
        columns, perm = A.tocsc_with_perm()
        transposed = columns.T
    elif not isinstance(transposed, CSR) or transposed.shape != A.shape[::-1]:
        raise ShapeError(f"transposed is {transposed!r}: give the CSR of A.T, A is {A!r}.")
    if transposed.index_dtype != A.index_dtype:
        raise DtypeError(
            f"transposed has {transposed.index_dtype} indices but A {A.index_dtype}: use "
            ".astype(index_dtype=...)."
        )
    if transposed.nnz != A.nnz:
        raise ShapeError(f"transposed stores {transposed.nnz} entries but A stores {A.nnz}.")
    checks.same_device("transposed", transposed.indices, "A", A.indices)
    return transposed, _numbers("perm", perm, A)


def _numbers(name: str, perm: Any, A: CSR) -> Array:
    """A permutation of the entries, checked, in the index dtype of ``A``."""
    perm = as_array(name, perm, beside=A.indices)
    if perm.shape != (A.nnz,):
        raise ShapeError(
            f"{name} has shape {perm.shape} but A stores {A.nnz} entries: give one number each."
        )
    if perm.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {perm.dtype}: give integers, the permutation of a conversion.")
    checks.same_device(name, perm, "A", A.indices)
    if not is_cupy(perm) and A.nnz and not (0 <= perm.min() and perm.max() < A.nnz):
        raise IndexRangeError(
            f"{name} numbers entries {perm.min()} to {perm.max()} but A stores {A.nnz}: give the "
            "permutation of A.tocsr().tocsc_with_perm()."
        )
    with on_device_of(perm), allocating(f"a permutation of {A.nnz} entries"):
        return namespace(perm).ascontiguousarray(perm, A.index_dtype)


# Launchers


def _arg_backward_gpu(
    A: CSR, X: Array, arg: Array, grad: Array, T: CSR, perm: Array, *, out: Array, dA: Array,
    row_scale: Array | None, col_scale: Array | None,
) -> None:  # fmt: skip
    from ..edges import cuda as edges_cuda
    from . import cuda

    shared = {
        "feat": X.shape[1],
        "arg": pointer(arg),
        "row_scale": pointer(row_scale),
        "col_scale": pointer(col_scale),
        "stream": cuda.stream(),
    }
    # The kernels read `grad` packed.
    grad = namespace(grad).ascontiguousarray(grad)
    structure, dtype = cuda.structure(T), str(X.dtype)
    size = cuda.spmm_workspace(structure, dtype, X.shape[1], arg=False)
    workspace = namespace(X).empty(size, np.uint8) if size else None
    entries = {"perm": pointer(perm), "data": pointer(A.data), "workspace": pointer(workspace)}
    cuda.spmm_arg_dx(structure, dtype, grad=pointer(grad), out=pointer(out), **entries, **shared)
    dense = {"ldx": row_stride(X), "X": pointer(X), "grad": pointer(grad)}
    edges_cuda.spmm_arg_da(cuda.structure(A), dtype, out=pointer(dA), **dense, **shared)


def _arg_backward_numba(
    A: CSR, X: Array, arg: Array, grad: Array, T: CSR, perm: Array, *, out: Array, dA: Array,
    row_scale: Array | None, col_scale: Array | None,
) -> None:  # fmt: skip
    from ..engine import cpu

    scales = row_scale, col_scale
    cpu.spmm_arg_dx(T.indptr, T.indices, perm, A.data, grad, arg, *scales, out)
    cpu.spmm_arg_da(A.indptr, A.indices, X, grad, arg, *scales, dA)


choose.register(
    *(
        choose.Kernel("spmm_arg_backward", name, place, run)
        for name, place, run in (
            ("spmm_arg_backward_cuda", choose.on_gpu, _arg_backward_gpu),
            ("spmm_arg_backward_numba", choose.on_cpu, _arg_backward_numba),
        )
    )
)
