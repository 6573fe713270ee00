"""The normalisation of GCN on the CPU: the numba twins, as in ``_cpu``."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..formats.primitives import expand
from ._cpu import _array, _space


@cache
def _cpu() -> ModuleType:
    from ..ops.gcn import cpu as gcn_cpu

    return gcn_cpu


def gcn_norm(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    values: Tensor | None,
    loops: bool,
) -> Tensor:
    dtype = torch.float32 if values is None else values.dtype
    values = None if values is None else values.contiguous()
    out = _space((indices.shape[0] + (indptr.shape[0] - 1) * loops,), dtype)
    _cpu().gcn_norm_csr(*map(_array, (indptr, indices, values, out)), loops=loops)
    return out.to(dtype)


def gcn_norm_backward(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    values: Tensor,
    grad: Tensor,
    loops: bool,
) -> Tensor:
    out = _space(tuple(indices.shape), values.dtype)
    row, n = expand(_array(indptr), indices.shape[0]), indptr.shape[0] - 1
    structure = row, _array(indices), _array(indptr)
    data, g = _array(values.contiguous()), _array(grad.contiguous())
    _cpu().gcn_norm_backward(*structure, data, n, g, _array(out), loops=loops)
    return out.to(values.dtype)
