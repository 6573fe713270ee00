"""Converters from and to scipy.sparse and cupyx.scipy.sparse, and checks of all converters."""

from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ..errors import DeviceError, ShapeError, UnsupportedError
from ..formats import checks, foreign
from ..formats.arrays import Array, DType, allocating, import_cupy, is_cupy, namespace, on_device_of
from ..formats.base import Format
from ..formats.cbsr import CBSR
from ..formats.compressed import COO, CSC, CSR
from ..formats.sgt import SGT

#: An array or matrix of scipy.sparse or cupyx.scipy.sparse, which share no class.
SparseMatrix: TypeAlias = Any

_COMPRESSED: dict[str, type[CSR] | type[CSC]] = {"csr": CSR, "csc": CSC}
_COMPUTED_BY_SCIPY = (np.dtype(np.float32), np.dtype(np.float64))


def from_scipy(
    M: SparseMatrix, *, dtype: DType = None, index_dtype: DType = None
) -> COO | CSR | CSC:
    """Convert a scipy.sparse array or matrix to the format of the same name.

    CSR, CSC and COO share their memory with ``M``; the other SciPy formats become CSR.  Order,
    duplicates and explicit zeros stay as they are.

    Parameters
    ----------
    M : scipy.sparse array or matrix, shape (n_rows, n_cols)
        Any format.  Entries beyond ``indptr[-1]``, which SciPy allows, are left out.
    dtype : float16, bfloat16, float32 or float64, optional
        For the values.  By default floats keep theirs; integers and booleans become float64.
    index_dtype : int32 or int64, optional
        By default that of ``M``.

    Returns
    -------
    COO, CSR or CSC

    Raises
    ------
    UnsupportedError
        If ``M`` is not sparse, or complex.
    ShapeError
        If ``M`` is not 2-D.
    DtypeError, FormatError, IndexRangeError
        If the values cannot be kept exactly, or ``M`` is not a valid matrix (SciPy checks little).
    """
    import scipy.sparse

    if not scipy.sparse.issparse(M):
        raise wrong_kind("from_scipy", M, "give a scipy.sparse array; from_dense takes dense ones")
    return _from_sparse(M, dtype, index_dtype)


def to_scipy(A: Format, *, dtype: DType = None) -> Any:
    """Convert a matrix to a scipy.sparse array: COO, CSR and CSC by name, SGT and CBSR as CSR.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, on the CPU
    dtype : float32 or float64, optional
        For the values; by default those of ``A``, and float32 where it is unweighted.

    Returns
    -------
    scipy.sparse.coo_array, csr_array or csc_array
        Shares the memory of ``A``; only ``dtype`` and an unweighted ``A`` make new values.

    Raises
    ------
    DeviceError
        If ``A`` is on a GPU.
    UnsupportedError
        If the values are float16 or bfloat16, which SciPy stores but cannot compute with.
    """
    import scipy.sparse

    A = as_exchangeable("to_scipy", A)
    on_cpu("to_scipy", A)
    return _to_sparse(scipy.sparse, A, dtype)


def from_cupyx(
    M: SparseMatrix, *, dtype: DType = None, index_dtype: DType = None
) -> COO | CSR | CSC:
    """Convert a cupyx.scipy.sparse array or matrix to the format of the same name, on its GPU.

    CSR, CSC and COO share their memory with ``M``; DIA becomes CSR.

    Parameters
    ----------
    M : cupyx.scipy.sparse array or matrix, shape (n_rows, n_cols)
    dtype, index_dtype : optional
        As for ``from_scipy``.

    Returns
    -------
    COO, CSR or CSC

    Raises
    ------
    DeviceError
        If CuPy is not installed.
    UnsupportedError, ShapeError, DtypeError, FormatError, IndexRangeError
        As ``from_scipy``.
    """
    if not _cupyx_sparse().issparse(M):
        raise wrong_kind("from_cupyx", M, "give a cupyx.scipy.sparse array")
    with on_device_of(M.data):
        return _from_sparse(M, dtype, index_dtype)


def to_cupyx(A: Format, *, dtype: DType = None) -> Any:
    """Convert a matrix to a cupyx.scipy.sparse array: COO, CSR, CSC; SGT and CBSR as CSR.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR, on a GPU
    dtype : float32 or float64, optional
        As for ``to_scipy``.

    Returns
    -------
    cupyx.scipy.sparse.coo_array, csr_array or csc_array
        Shares the memory of ``A``; int64 indices stay int64.

    Raises
    ------
    DeviceError
        If ``A`` is on the CPU, or CuPy is not installed.
    UnsupportedError
        If the values are float16 or bfloat16, which CuPy's sparse arrays do not hold.

    Notes
    -----
    CuPy reads the ends of the arrays when it builds its object, which synchronises.
    """
    sparse = _cupyx_sparse()
    A = as_exchangeable("to_cupyx", A)
    if not is_cupy(A._indices):
        raise DeviceError('to_cupyx: A is on the CPU: move it with A.to("cuda") or use to_scipy.')
    with on_device_of(A._indices):
        return _to_sparse(sparse, A, dtype)


def _cupyx_sparse() -> ModuleType:
    import_cupy()
    import cupyx.scipy.sparse

    module: ModuleType = cupyx.scipy.sparse
    return module


def _from_sparse(M: SparseMatrix, dtype: DType, index_dtype: DType) -> COO | CSR | CSC:
    if len(M.shape) != 2:
        raise ShapeError(f"M has shape {M.shape}: give a 2-D matrix.")
    if M.format not in ("coo", *_COMPRESSED):
        M = M.tocsr()
    if M.format == "coo":
        row, col = index_pair(row=M.row, col=M.col, index_dtype=index_dtype)
        return COO(row, col, foreign.values("M.data", M.data, dtype), shape=M.shape)
    # SciPy lets both arrays be longer than the entries that indptr counts.
    stored = slice(int(M.indptr[-1]))
    indptr, indices = index_pair(
        indptr=M.indptr, indices=M.indices[stored], index_dtype=index_dtype
    )
    data = foreign.values("M.data", M.data[stored], dtype)
    return _COMPRESSED[M.format](indptr, indices, data, shape=M.shape)


def _to_sparse(sparse: ModuleType, A: COO | CSR | CSC, dtype: DType) -> Any:
    data = values_of(A, dtype)
    if data.dtype not in _COMPUTED_BY_SCIPY:
        raise UnsupportedError(
            f"values are {data.dtype}, but scipy.sparse computes in float32 and float64 only: "
            "ask for one of them with dtype=."
        )
    if isinstance(A, COO):
        return sparse.coo_array((data, (A.row, A.col)), shape=A.shape)
    make = getattr(sparse, f"{A.format}_array")
    return make((data, A.indices, A.indptr), shape=A.shape)


# Checks of all converters


def wrong_kind(function: str, value: object, mend: str) -> UnsupportedError:
    """Return the error for an argument of a type that ``function`` does not take."""
    kind = type(value)
    return UnsupportedError(f"{function} got a {kind.__module__}.{kind.__qualname__}: {mend}.")


def imported(module: str, needed: str) -> Any:
    """Import a module of another library, or raise ``UnsupportedError(needed)``."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(needed) from error


def as_exchangeable(function: str, A: object) -> COO | CSR | CSC:
    """Return ``A`` if other libraries know its format, else (SGT, CBSR) convert it to CSR."""
    if not isinstance(A, Format):
        raise wrong_kind(function, A, "give a COO, CSR, CSC, SGT or CBSR")
    if isinstance(A, SGT | CBSR):
        return A.tocsr()
    if not isinstance(A, COO | CSR | CSC):
        raise wrong_kind(function, A, "give a COO, CSR, CSC, SGT or CBSR")
    return A


def on_cpu(function: str, A: Format) -> None:
    """Raise for a matrix on a GPU: moving it would be a hidden copy and synchronisation."""
    if is_cupy(A._indices):
        raise DeviceError(f'{function}: A is on {A.device}: move it with A.to("cpu") first.')


def values_of(A: Format, dtype: DType = None) -> Array:
    """Return the values of ``A``, shared where ``dtype`` is theirs; ones where it is unweighted."""
    target = None if dtype is None else checks.value_dtype("dtype", dtype)
    with on_device_of(A._indices), allocating(f"the {A.nnz} values of {A!r}"):
        if A.data is None:
            return namespace(A._indices).ones(A.nnz, target or np.dtype(np.float32))
        return A.data if target is None else A.data.astype(target, copy=False)


def index_pair(*, index_dtype: DType = None, **arrays: Array) -> tuple[Array, Array]:
    """Convert two index arrays to one dtype: ``index_dtype``, or the larger of theirs."""
    pair = [foreign.indices(name, array, index_dtype) for name, array in arrays.items()]
    if pair[0].dtype != pair[1].dtype:
        pair = [array.astype(np.int64, copy=False) for array in pair]
    first, second = pair
    return first, second
