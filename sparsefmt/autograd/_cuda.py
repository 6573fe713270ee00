"""The library ops on CUDA: torch allocates, ``ops._launch`` launches on torch's current stream.

Kernels take pointers: ``data_ptr()`` costs 0.1 µs where an exchange through DLPack costs 15.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ._layout import rows_apart, with_heads

_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
}


_WIDE = (torch.float32, torch.float64)


@cache
def _launch() -> Any:
    from ..ops import _launch

    return _launch


def _on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Torch's dispatcher does not switch devices for a Python kernel."""
    if x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


# Torch's own code generator reads the stream this way: 0.1 µs, a Stream object costs 3.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


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


def _structure(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor]) -> Any:
    """The structure as the launchers see it, looked up by its sizes and addresses."""
    start, slot, cut, long = plan
    return _structure_at(
        (indptr.shape[0] - 1, n_cols, indices.shape[0]),
        _NAMES[indices.dtype],
        (indptr.data_ptr(), indices.data_ptr(), start.data_ptr()),
        (slot.data_ptr(), cut.data_ptr(), long.data_ptr()),
        (slot.shape[0] - 1, cut.shape[0], long.shape[0]),
    )


@lru_cache(maxsize=256)
def _structure_at(
    sizes: tuple[int, ...],
    index_dtype: str,
    arrays: tuple[int, ...],
    borders: tuple[int, ...],
    counts: tuple[int, ...],
) -> Any:
    return _launch().Structure(*sizes, index_dtype, *arrays, *borders, *counts)


def _spmm(
    structure: Any,
    x: Tensor,
    out: Tensor,
    arg: Tensor | None,
    reduce: str,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    feat = x.shape[1]
    x, values = rows_apart(x), _vector(values)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    launch = _launch()
    size = launch.spmm_workspace(structure, _NAMES[x.dtype], feat, arg=arg is not None)
    workspace = x.new_empty(size, dtype=torch.uint8) if size else None
    with _on_device_of(x):
        launch.spmm(
            structure,
            _NAMES[x.dtype],
            reduce,
            feat=feat,
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
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> Tensor:
    out = x.new_empty((indptr.shape[0] - 1, x.shape[1]))
    if out.numel():
        structure = _structure(indptr, indices, n_cols, plan)
        _spmm(structure, x, out, None, reduce, values, perm, row_scale, col_scale)
    return out


def spmm_arg(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty((indptr.shape[0] - 1, x.shape[1]))
    arg = torch.empty_like(out, dtype=indices.dtype)
    if out.numel():
        structure = _structure(indptr, indices, n_cols, plan)
        _spmm(structure, x, out, arg, reduce, values, None, row_scale, col_scale)
    return out, arg


def spmm_arg_dx(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    perm: Tensor,
    grad: Tensor,
    arg: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = grad.new_empty((indptr.shape[0] - 1, grad.shape[1]))
    if not out.numel():
        return out
    grad, values = grad.contiguous(), _vector(values)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(grad):
        _launch().spmm_arg_dx(
            _structure(indptr, indices, n_cols, plan),
            _NAMES[grad.dtype],
            feat=grad.shape[1],
            perm=perm.data_ptr(),
            data=_pointer(values),
            grad=grad.data_ptr(),
            arg=arg.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            stream=_stream(grad),
        )
    return out


def spmm_arg_da(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    grad: Tensor,
    arg: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = x.new_empty(indices.shape)
    if not out.numel():
        return out
    x, grad = rows_apart(x), grad.contiguous()
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(x):
        _launch().spmm_arg_da(
            _structure(indptr, indices, n_cols, plan),
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


def sddmm(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    y: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = x.new_empty((indices.shape[0], *x.shape[1:-1]))
    if not out.numel():
        return out
    left, right = with_heads(x), with_heads(y)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(x):
        _launch().sddmm(
            _structure(indptr, indices, n_cols, plan),
            _NAMES[x.dtype],
            heads=left.shape[1],
            feat=left.shape[2],
            ldx=left.stride(0),
            ldy=right.stride(0),
            X=left.data_ptr(),
            Y=right.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            stream=_stream(x),
        )
    return out


def edge_softmax(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], scores: Tensor
) -> Tensor:
    scores = scores.contiguous()
    out = torch.empty_like(scores)
    if not out.numel():
        return out
    with _on_device_of(scores):
        _launch().edge_softmax(
            _structure(indptr, indices, n_cols, plan),
            _NAMES[scores.dtype],
            heads=scores.shape[1] if scores.dim() == 2 else 1,
            scores=scores.data_ptr(),
            out=out.data_ptr(),
            stream=_stream(scores),
        )
    return out


def edge_softmax_backward(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    probabilities: Tensor,
    grad: Tensor,
) -> Tensor:
    probabilities, grad = probabilities.contiguous(), grad.contiguous()
    out = torch.empty_like(grad)
    if not out.numel():
        return out
    with _on_device_of(grad):
        _launch().edge_softmax_backward(
            _structure(indptr, indices, n_cols, plan),
            _NAMES[grad.dtype],
            heads=grad.shape[1] if grad.dim() == 2 else 1,
            probabilities=probabilities.data_ptr(),
            grad=grad.data_ptr(),
            out=out.data_ptr(),
            stream=_stream(grad),
        )
    return out
