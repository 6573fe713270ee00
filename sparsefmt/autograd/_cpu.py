"""The library ops on the CPU: the numba twins on views of the tensors' memory."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ._layout import balanced, factors, rows_apart, with_heads


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


def _bits(tensor: Tensor) -> Any:
    """A NumPy view of any dtype, of the integers that hold the values."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(integers[tensor.itemsize]).numpy()


def _space(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that a twin can write: float32 in place of bfloat16."""
    return torch.empty(
        shape, dtype=torch.float32 if dtype is torch.bfloat16 else dtype, device="cpu"
    )


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


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype is torch.bfloat16 else x
    columns, kept = balanced(wide, k)
    _cpu().maxk(*map(_array, (rows_apart(wide), columns, kept)))
    return columns, kept.to(x.dtype)


def cbsr_to_dense(columns: Tensor, kept: Tensor, feat: int) -> Tensor:
    out = kept.new_empty(kept.shape[0], feat)
    _cpu().cbsr_to_dense(_array(columns.contiguous()), _bits(kept.contiguous()), _bits(out))
    return out


def dense_to_cbsr(x: Tensor, columns: Tensor) -> Tensor:
    out = x.new_empty(columns.shape)
    _cpu().dense_to_cbsr(_bits(rows_apart(x)), _array(columns.contiguous()), _bits(out))
    return out


def spgemm(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    columns: Tensor,
    kept: Tensor,
    feat: int,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> Tensor:
    out = _space((indptr.shape[0] - 1, feat), kept.dtype)
    balanced = columns.contiguous(), kept.contiguous()
    arrays = map(_array, (indptr, indices, values, *balanced, row_scale, col_scale, out))
    _cpu().spgemm(*arrays, mean=reduce == "mean")
    return out.to(kept.dtype)


def sspmm(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    perm: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = _space(tuple(columns.shape), grad.dtype)
    features = rows_apart(grad), columns.contiguous()
    tensors = (indptr, indices, perm, values, *features, row_scale, col_scale, out)
    _cpu().sspmm(*map(_array, tensors))
    return out.to(grad.dtype)


def sspmm_outer(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """By the transpose, which it computes: here the outer product has no advantage."""
    from ..formats.compressed import CSR

    shape = indptr.shape[0] - 1, n_cols
    A = CSR._trusted(indptr=_array(indptr), indices=_array(indices), data=None, shape=shape)
    T, perm = A.tocsc_with_perm()
    side = torch.from_numpy(T.indptr), torch.from_numpy(T.indices), shape[0], plan
    return sspmm(*side, columns, grad, values, torch.from_numpy(perm), row_scale, col_scale)


def sddmm_cbsr(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    columns: Tensor,
    kept: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    scaled = row_scale is not None or col_scale is not None
    dtype = x.dtype
    if scaled and dtype.itemsize == 2:  # nothing is rounded before the scales
        x, kept = x.float(), kept.float()
    out = _space(tuple(indices.shape), x.dtype)
    features = rows_apart(x), columns.contiguous(), kept.contiguous()
    _cpu().sddmm_cbsr(*map(_array, (indptr, indices, *features, out)))
    if scaled:
        structure = indptr, indices, n_cols, plan
        _scale(out, *structure, row_scale, col_scale)
    return out.to(dtype)
