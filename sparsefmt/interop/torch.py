"""Converters from and to torch: sparse tensors, and dense tensors as components.

Memory crosses by DLPack, through ``from_dlpack`` only: it orders the streams of both libraries,
which a call of ``__dlpack__()`` does not.
"""

import sys
import warnings
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from ..errors import DeviceError, FormatError, UnsupportedError
from ..formats import foreign
from ..formats.arrays import (
    Array,
    DType,
    allocating,
    as_array,
    has_tangent,
    is_cupy,
    namespace,
    on_device_of,
)
from ..formats.base import Format, Level
from ..formats.compressed import COO, CSC, CSR
from ..formats.convert import from_dense
from .scipy import as_exchangeable, imported, index_pair, values_of, wrong_kind

if TYPE_CHECKING:
    import torch


def from_torch(
    tensor: "torch.Tensor", *, dtype: DType = None, index_dtype: DType = None
) -> COO | CSR | CSC:
    """Convert a torch tensor to the format of its layout, on the tensor's device.

    Sparse COO (coalesced or not), CSR and CSC tensors share their memory with the result; order,
    duplicates and explicit zeros stay.  A dense 2-D tensor becomes a CSR of its nonzero cells.

    Parameters
    ----------
    tensor : torch.Tensor, shape (n_rows, n_cols), on the CPU or a CUDA device
    dtype : optional
        As for ``from_scipy``.
    index_dtype : int32 or int64, optional
        By default that of the tensor (int64 for COO); int32 for a dense tensor.

    Returns
    -------
    COO, CSR or CSC

    Raises
    ------
    UnsupportedError
        If the tensor requires grad (formats carry no gradients: detach it, and give the edge
        values to ``sparsefmt.autograd``), is hybrid, batched or complex, or has another layout.
    DeviceError
        If it lives on neither the CPU nor a CUDA device.
    DtypeError, ShapeError, FormatError, IndexRangeError
        If the values cannot be kept exactly, or the tensor is not a valid matrix.

    Notes
    -----
    bfloat16 needs ``ml_dtypes``, whose dtype NumPy and CuPy use.
    """
    if not is_tensor(tensor):
        raise wrong_kind("from_torch", tensor, "give a torch.Tensor")
    _check_tensor("tensor", tensor)
    layout = str(tensor.layout).removeprefix("torch.")
    if layout == "strided":
        X = foreign.values("tensor", from_tensor("tensor", tensor), dtype)
        A: CSR = from_dense(X, index_dtype=np.int32 if index_dtype is None else index_dtype)
        return A
    if layout not in ("sparse_coo", "sparse_csr", "sparse_csc"):
        raise UnsupportedError(f"tensor.layout is {layout}: convert it with .to_sparse_csr().")
    if tensor.ndim != 2 or tensor.dense_dim():
        raise UnsupportedError(
            f"tensor has shape {tuple(tensor.shape)} with {tensor.dense_dim()} dense dimensions: "
            "hybrid and batched tensors are no matrices, give 2 sparse dimensions."
        )
    return _from_sparse(tensor, layout, dtype, index_dtype)


def _from_sparse(
    tensor: "torch.Tensor", layout: str, dtype: DType, index_dtype: DType
) -> COO | CSR | CSC:
    shape = tensor.shape[0], tensor.shape[1]
    if layout == "sparse_coo":
        # The private accessors are the only ones for a tensor that is not coalesced.
        both = foreign.indices("indices", from_tensor("indices", tensor._indices()), index_dtype)
        values = from_tensor("values", tensor._values())
        return COO(both[0], both[1], foreign.values("values", values, dtype), shape=shape)
    make, parts = (
        (CSR, (tensor.crow_indices(), tensor.col_indices()))
        if layout == "sparse_csr"
        else (CSC, (tensor.ccol_indices(), tensor.row_indices()))
    )
    indptr, indices = index_pair(
        indptr=from_tensor("indptr", parts[0]),
        indices=from_tensor("indices", parts[1]),
        index_dtype=index_dtype,
    )
    values = from_tensor("values", tensor.values())
    return make(indptr, indices, foreign.values("values", values, dtype), shape=shape)


def to_torch(A: Format, *, dtype: DType = None, validate: Level = "full") -> "torch.Tensor":
    """Convert a matrix to a sparse torch tensor on its device: COO, CSR, CSC, others as CSR.

    Parameters
    ----------
    A : COO, CSR, CSC, SGT or CBSR
    dtype : float16, bfloat16, float32 or float64, optional
        For the values; by default those of ``A``, and float32 where it is unweighted.
    validate : "full" or "cheap"
        ``"cheap"`` takes the order of a CSR or CSC on trust, which saves one pass over it.

    Returns
    -------
    torch.Tensor
        CSR and CSC share all arrays with ``A``.  COO shares the values, and the indices where
        ``row`` and ``col`` are the rows of one (2, nnz) array of int64, as ``from_torch`` makes
        them; otherwise torch needs a copy.  It is marked as not coalesced.  Read-only arrays,
        which torch does not know, are copied.

    Raises
    ------
    FormatError
        If indices within a row of a CSR (column of a CSC) do not ascend or repeat.  torch's
        layouts demand that and its kernels rely on it.
    UnsupportedError
        If torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("to_torch needs torch: pip install 'sparsefmt[torch]'.") from error
    A = as_exchangeable("to_torch", A)
    values = to_tensor(values_of(A, dtype))
    if isinstance(A, COO):
        indices = to_tensor(stacked(A.row, A.col))
        return torch.sparse_coo_tensor(indices, values, A.shape, check_invariants=False)
    if validate == "full":
        _check_ascending(A)
    make = torch.sparse_csr_tensor if isinstance(A, CSR) else torch.sparse_csc_tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* tensor support is in beta state", UserWarning)
        return make(
            to_tensor(A.indptr), to_tensor(A.indices), values, A.shape, check_invariants=False
        )


def _check_ascending(A: CSR | CSC) -> None:
    """Raise for a row (CSC: column) whose indices repeat or fall."""
    with on_device_of(A.indices):
        falls = A.indices[1:] <= A.indices[:-1]
        starts = A.indptr[1:-1]
        falls[starts[(starts > 0) & (starts < A.nnz)] - 1] = False
        if falls.any():  # synchronize!
            entry = int(falls.argmax()) + 1
            raise FormatError(
                f"indices[{entry}] is {int(A.indices[entry])} after {int(A.indices[entry - 1])}, "
                f"but torch wants them ascending and distinct: use A.sorted_indices(), or "
                "A.tocoo() where entries repeat."
            )


# Dense tensors


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Return True if ``value`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_plain_array(name: str, value: object) -> Array:
    """Convert an array or tensor to a NumPy or CuPy array, sharing memory where it can."""
    return from_tensor(name, value) if is_tensor(value) else as_array(name, value)


def from_tensor(name: str, tensor: "torch.Tensor") -> Array:
    """Convert a dense tensor to a NumPy or CuPy array over the same memory."""
    _check_tensor(name, tensor)
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(f"{name} is a sparse tensor: give a dense one, or use from_torch.")
    tensor = tensor.resolve_neg()  # DLPack would drop the pending sign
    if str(tensor.dtype) != "torch.bfloat16":
        return as_array(name, tensor)
    needed = f"{name} is bfloat16, which NumPy and CuPy take from ml_dtypes: pip install ml_dtypes."
    ml_dtypes = imported("ml_dtypes", needed)
    bits = sys.modules["torch"].int16
    return as_array(name, tensor.view(bits)).view(ml_dtypes.bfloat16)


def to_tensor(array: Array) -> "torch.Tensor":
    """Convert an array to a tensor over the same memory; a read-only array is copied."""
    import torch
    from torch.utils.dlpack import from_dlpack

    if not is_cupy(array) and not array.flags.writeable:
        array = array.copy()
    if array.dtype.name == "bfloat16":
        bits = from_dlpack(array.view(np.int16))
        return bits.view(torch.bfloat16)
    return from_dlpack(array)


def _check_tensor(name: str, tensor: "torch.Tensor") -> None:
    if tensor.requires_grad or has_tangent(tensor):
        raise UnsupportedError(
            f"{name} requires grad, or has a tangent, and formats carry no gradients: pass "
            f"{name}.detach() and give the edge values to sparsefmt.autograd."
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name} is on {tensor.device}: move it to the CPU or a CUDA device.")


def stacked(first: Array, second: Array) -> Array:
    """Join two vectors as rows of one (2, n) int64 array; views of such an array are not copied."""
    base = first.base
    fits = getattr(base, "shape", None) == (2, len(first)) and base is second.base
    if fits and base.dtype == np.int64 and base.flags.c_contiguous:
        if all(_address(a) == _address(b) for a, b in zip(base, (first, second), strict=True)):
            return base
    with on_device_of(first), allocating(f"two rows of {len(first)} indices"):
        both = namespace(first).empty((2, len(first)), np.int64)
        both[0], both[1] = first, second
        return both


def _address(array: Array) -> int:
    return int(array.data.ptr if is_cupy(array) else array.ctypes.data)
