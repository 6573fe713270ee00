"""The ops on CUDA: torch allocates, ``ops._launch`` launches on torch's current stream.

They take a ``Structure``; ``of_tensors`` makes kernels of library ops of them.

Kernels take pointers: ``data_ptr()`` costs 0.1 µs where an exchange through DLPack costs 15.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.edges import cuda as edges_cuda
from ..ops.engine.structure import Structure
from ..ops.matmul import cuda as matmul_cuda
from ..ops.matmul.api import spmm_on_csr
from ..ops.tiles.kernels import spmm_kernels
from ._layout import rows_apart

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
}

_WIDE = (torch.float32, torch.float64)

# Torch's own code generator reads both this way: 0.1 µs, where a Stream object costs 3.  Builds
# without CUDA lack them.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_HERE = nullcontext()


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Torch's dispatcher does not switch devices for a Python kernel."""
    return _HERE if x.get_device() == _current_device() else torch.cuda.device(x.device)


def _stream(x: Tensor) -> int:
    return int(_raw_stream(x.get_device()))  # read at every launch


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _vector(values: Tensor | None) -> Tensor | None:
    """One value each, without gaps; keep the result until the launch is enqueued."""
    return None if values is None else values.contiguous()


def _factors(scale: Tensor | None) -> Tensor | None:
    """As ``_vector``; kernels take the scales of 2-byte features in float32."""
    if scale is None:
        return None
    return scale.contiguous() if scale.dtype in _WIDE else scale.to(torch.float32).contiguous()


_BY_TILES = spmm_kernels(spmm_on_csr)[0]
_structure_at = lru_cache(maxsize=256)(Structure)


def of_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a library op takes it: with the structure in tensors."""

    def run(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any) -> Any:
        _, slot, cut, long = plan
        structure = _structure_at(
            *(indptr.shape[0] - 1, n_cols, indices.shape[0], _NAMES[indices.dtype]),
            *(array.data_ptr() for array in (indptr, indices, *plan)),
            *(slot.shape[0] - 1, cut.shape[0], long.shape[0]),
        )
        return kernel(structure, *args)

    return run


def _workspace(S: Structure, x: Tensor, *, arg: bool) -> Tensor | None:
    """Memory for a product with the features, None where it needs none; keep it as ``_vector``."""
    return _memory(matmul_cuda.spmm_workspace(S, _NAMES[x.dtype], x.shape[1], arg=arg), x)


def _memory(size: int, like: Tensor) -> Tensor | None:
    return like.new_empty(size, dtype=torch.uint8) if size else None


def _spmm(
    S: Structure,
    x: Tensor,
    out: Tensor,
    arg: Tensor | None,
    reduce: str,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    x, values, workspace = rows_apart(x), _vector(values), _workspace(S, x, arg=arg is not None)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(x):
        matmul_cuda.spmm(
            S,
            _NAMES[x.dtype],
            reduce,
            feat=x.shape[1],
            ldx=x.stride(0),
            data=_pointer(values),
            perm=_pointer(perm),
            X=x.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            arg=_pointer(arg),
            workspace=_pointer(workspace),
            stream=_stream(x),
        )


def spmm(
    S: Structure,
    x: Tensor,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> Tensor:
    args = (x, values, perm, row_scale, col_scale, reduce)
    by_tiles = _BY_TILES.refuses is not None and not _BY_TILES.refuses(S, *args)
    found: Tensor = (_BY_TILES.run if by_tiles else spmm_on_csr)(S, *args)
    return found


def spmm_arg(
    S: Structure,
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(S.n_rows, x.shape[1])
    arg = torch.empty_like(out, dtype=getattr(torch, S.index_dtype))
    _spmm(S, x, out, arg, reduce, values, None, row_scale, col_scale)
    return out, arg


def spmm_arg_dx(
    S: Structure,
    perm: Tensor,
    grad: Tensor,
    arg: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = grad.new_empty(S.n_rows, grad.shape[1])
    grad, values, workspace = grad.contiguous(), _vector(values), _workspace(S, grad, arg=False)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(grad):
        matmul_cuda.spmm_arg_dx(
            S,
            _NAMES[grad.dtype],
            feat=grad.shape[1],
            perm=perm.data_ptr(),
            data=_pointer(values),
            grad=grad.data_ptr(),
            arg=arg.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            workspace=_pointer(workspace),
            stream=_stream(grad),
        )
    return out


def spmm_arg_da(
    S: Structure,
    x: Tensor,
    grad: Tensor,
    arg: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = x.new_empty(S.nnz)
    x, grad = rows_apart(x), grad.contiguous()
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(x):
        edges_cuda.spmm_arg_da(
            S,
            _NAMES[x.dtype],
            feat=x.shape[1],
            ldx=x.stride(0),
            X=x.data_ptr(),
            grad=grad.data_ptr(),
            arg=arg.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            stream=_stream(x),
        )
    return out
