"""cuSPARSE as a baseline: its C interface through ctypes, row-major, preprocessed, best algorithm.

All calls go to one library, the one that CuPy loaded, through a handle of its own.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array

from . import _harness

SPMM_ALGORITHMS = {"DEFAULT": 0, "CSR_ALG1": 4, "CSR_ALG2": 6, "CSR_ALG3": 12}
#: Y^T as the transpose of a row-major matrix, or as a column-major matrix: the same memory.
SDDMM_LAYOUTS = ("transposed", "column-major")

_VALUE_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType
_INDEX_TYPES = {"int32": 2, "int64": 3}
_AS_IS, _TRANSPOSED = 0, 1
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2
_SUM_IN_FLOAT32 = 0

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_STEP = [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT]
_SIGNATURES: dict[str, list[Any]] = {
    "Create": [_POINTER],
    "SetStream": [_POINTER, _POINTER],
    "CreateCsr": [_POINTER, *[_LONG] * 3, *[_POINTER] * 3, *[_INT] * 4],
    "CreateDnMat": [_POINTER, *[_LONG] * 3, _POINTER, _INT, _INT],
    **{
        f"{product}{step}": [*_STEP, _POINTER]
        for product in ("SpMM", "SDDMM")
        for step in ("_bufferSize", "_preprocess", "")
    },
}


class CusparseError(RuntimeError):
    """A call was refused, for instance because the algorithm does not take the dtype."""


@cache
def _library() -> ctypes.CDLL:
    from cupy_backends.cuda.libs import cusparse  # noqa: F401  # loads the library

    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if "/libcusparse.so" in line]
    if not paths:
        raise SystemExit("CuPy loaded no libcusparse: install cupy-cuda13x[ctk]")
    library = ctypes.CDLL(paths[0])
    for name, signature in _SIGNATURES.items():
        getattr(library, f"cusparse{name}").argtypes = signature
    return library


def _call(name: str, *args: Any) -> None:
    status = getattr(_library(), f"cusparse{name}")(*args)
    if status:
        raise CusparseError(f"cusparse{name}: status {status}")


@cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("Create", ctypes.byref(handle))
    return handle


class Product:
    """One SpMM or SDDMM, prepared; every call runs it on the stream that was current then.

    Keeps the arrays and the buffer alive.
    """

    def __init__(
        self,
        kind: str,
        operands: tuple[ctypes.c_void_p, ...],
        transposed: bool,
        algorithm: int,
        keep: tuple[Any, ...],
    ) -> None:
        import cupy

        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        first, second, result = operands
        operations = (_AS_IS, _TRANSPOSED if transposed else _AS_IS)
        scaled = (ctypes.addressof(one), first, second, ctypes.addressof(zero), result)
        self._args = (_handle(), *operations, *scaled, _SUM_IN_FLOAT32, algorithm)
        self._kind, self._keep = kind, (*keep, one, zero)
        _call("SetStream", _handle(), cupy.cuda.get_current_stream().ptr)
        size = ctypes.c_size_t()
        _call(f"{kind}_bufferSize", *self._args, ctypes.byref(size))
        self._buffer = cupy.empty(max(size.value, 1), "int8")
        _call(f"{kind}_preprocess", *self._args, self._buffer.data.ptr)
        self._run = getattr(_library(), f"cusparse{kind}")

    def __call__(self) -> None:
        status = self._run(*self._args, self._buffer.data.ptr)
        if status:
            raise CusparseError(f"cusparse{self._kind}: status {status}")


def _descriptor(kind: str, *args: Any) -> ctypes.c_void_p:
    """Return a descriptor, some hundred bytes that live as long as the process."""
    pointer = ctypes.c_void_p()
    _call(f"Create{kind}", ctypes.byref(pointer), *args)
    return pointer


def _sparse(A: CSR, data: Array) -> ctypes.c_void_p:
    index = _INDEX_TYPES[A.index_dtype.name]
    pointers = [array.data.ptr for array in (A.indptr, A.indices, data)]
    types = (index, index, 0, _VALUE_TYPES[data.dtype.name])
    return _descriptor("Csr", A.n_rows, A.n_cols, A.nnz, *pointers, *types)


def _dense(X: Array, *, flipped: bool = False) -> ctypes.c_void_p:
    """Return a row-major matrix; flipped: its transpose, column-major in the same memory."""
    rows, columns = X.shape[::-1] if flipped else X.shape
    order = _COLUMN_MAJOR if flipped else _ROW_MAJOR
    kind = _VALUE_TYPES[X.dtype.name]
    return _descriptor("DnMat", rows, columns, X.shape[1], X.data.ptr, kind, order)


def spmm(A: CSR, X: Array, Y: Array, algorithm: str = "DEFAULT") -> Product:
    """Prepare ``Y = A @ X`` into ``Y``, both row-major; ``A`` has values of X's dtype.

    Raises
    ------
    CusparseError
        If the algorithm does not take these operands.
    """
    if A.data is None:
        raise ValueError("cuSPARSE reads values: give a weighted A, ones if need be")
    parts = (_sparse(A, A.data), _dense(X), _dense(Y))
    return Product("SpMM", parts, False, SPMM_ALGORITHMS[algorithm], (A, X, Y))


def sddmm(A: CSR, X: Array, Y: Array, out: Array, layout: str = "transposed") -> Product:
    """Prepare ``out[e] = <X_i, Y_j>`` at the entries of ``A`` into ``out``, of X's dtype.

    Raises
    ------
    CusparseError
        If cuSPARSE does not take these operands.
    """
    flipped = layout == "column-major"
    out.data.memset_async(0, out.nbytes)  # beta is 0, but nothing may read poison
    parts = (_dense(X), _dense(Y, flipped=flipped), _sparse(A, out))
    return Product("SDDMM", parts, not flipped, 0, (A, X, Y, out))


def best(choices: dict[str, Any]) -> tuple[str, Product]:
    """Return the fastest by three runs each after one; only two plans are alive at a time."""
    found: tuple[float, str, Product] | None = None
    refused = []
    for name, make in choices.items():
        try:
            product = make()
            ms = _harness.medians([product], cuda=True, runs=3, warmups=1)[0]
        except (CusparseError, MemoryError) as error:  # the latter for its buffer
            refused.append(f"{name}: {error}")
            continue
        if found is None or ms < found[0]:
            found = ms, name, product
    if found is None:
        raise CusparseError("; ".join(refused))
    return found[1], found[2]
