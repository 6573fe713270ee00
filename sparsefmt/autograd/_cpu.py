"""The library ops on the CPU: the numba twins on views of the tensors' memory."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._layout import factors, rows_apart, with_heads


@cache
def _cpu() -> ModuleType:
    from ..ops.engine import cpu

    return cpu


def _array(tensor: Tensor | None) -> Any:
    """A NumPy view; bfloat16, which NumPy does not have, as a float32 copy."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def _space(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that a twin can write: float32 in place of bfloat16."""
    return torch.empty(
        shape, dtype=torch.float32 if dtype is torch.bfloat16 else dtype, device="cpu"
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
    out = _space((indptr.shape[0] - 1, x.shape[1]), x.dtype)
    if values is not None and perm is not None:
        values = values[perm]
    if out.numel():
        arrays = map(_array, (indptr, indices, values, rows_apart(x), row_scale, col_scale, out))
        _cpu().spmm(*arrays, reduce=reduce)
    return out.to(x.dtype)


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
    out = _space((indptr.shape[0] - 1, x.shape[1]), x.dtype)
    arg = torch.empty(out.shape, dtype=indices.dtype, device="cpu")
    if out.numel():
        arrays = map(_array, (indptr, indices, values, rows_apart(x), row_scale, col_scale, out))
        _cpu().spmm(*arrays, reduce=reduce, arg=_array(arg))
    return out.to(x.dtype), arg


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
    out = _space((indptr.shape[0] - 1, grad.shape[1]), grad.dtype)
    if out.numel():
        tensors = (indptr, indices, perm, values, grad.contiguous(), arg, row_scale, col_scale, out)
        _cpu().spmm_arg_dx(*map(_array, tensors))
    return out.to(grad.dtype)


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
    out = _space(tuple(indices.shape), x.dtype)
    if out.numel():
        tensors = (
            indptr,
            indices,
            rows_apart(x),
            grad.contiguous(),
            arg,
            row_scale,
            col_scale,
            out,
        )
        _cpu().spmm_arg_da(*map(_array, tensors))
    return out.to(x.dtype)


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
    scaled = row_scale is not None or col_scale is not None
    dtype = x.dtype
    if scaled and dtype.itemsize == 2:  # nothing is rounded before the scales
        x, y = x.float(), y.float()
    out = _space((indices.shape[0], *x.shape[1:-1]), x.dtype)
    if out.numel():
        pairs = out if out.dim() == 2 else out.unsqueeze(1)
        _cpu().sddmm(*map(_array, (indptr, indices, with_heads(x), with_heads(y), pairs)))
    if scaled:
        structure = indptr, indices, n_cols, plan
        _scale(out, *structure, row_scale, col_scale)
    return out.to(dtype)


def aggregate_backward(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    grad: Tensor,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from ..ops.matmul import cpu_aggregate as matmul_cpu_aggregate

    dx = _space((indptr.shape[0] - 1, x.shape[1]), x.dtype)
    da = _space(tuple(indices.shape), x.dtype)
    given = perm, values, rows_apart(x), rows_apart(grad), row_scale, col_scale
    arrays = map(_array, (indptr, indices, *given, None, dx, da, None))
    matmul_cpu_aggregate.aggregate_backward(*arrays)
    return dx.to(x.dtype), da.to(x.dtype)


def _scale(
    products: Tensor,
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> None:
    """Multiply the products at the entries, in place, by the factors of their rows and columns."""
    r, c = factors(products, indptr.shape[0] - 1, n_cols, row_scale, col_scale)
    each = sddmm(indptr, indices, n_cols, plan, r, c, None, None)
    products.mul_(each if products.dim() == 1 else each[:, None])


def edge_softmax(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], scores: Tensor
) -> Tensor:
    out = _space(tuple(scores.shape), scores.dtype)
    if out.numel():
        heads = scores.shape[1] if scores.dim() == 2 else 1
        arrays = (a.view(-1, heads) for a in (scores.contiguous(), out))
        _cpu().edge_softmax(*map(_array, (indptr, *arrays)))
    return out.to(scores.dtype)


def edge_softmax_backward(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    probabilities: Tensor,
    grad: Tensor,
) -> Tensor:
    out = _space(tuple(grad.shape), grad.dtype)
    if out.numel():
        heads = grad.shape[1] if grad.dim() == 2 else 1
        arrays = (a.view(-1, heads) for a in (probabilities.contiguous(), grad.contiguous(), out))
        _cpu().edge_softmax_backward(*map(_array, (indptr, *arrays)))
    return out.to(grad.dtype)
