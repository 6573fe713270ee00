"""Products with a sample of each row on the CPU: the numba twins, as in ``_cpu``."""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import _cpu as _whole
from ._cpu import _array, _space
from ._cpu_attention import seed_of
from ._layout import rows_apart
from ._sample import row_factors, transposed


@cache
def _cpu() -> ModuleType:
    from ..ops.sampling import cpu as sampling_cpu

    return sampling_cpu


def _options(
    seed: Tensor | None, width: int, strategy: str, mean: bool, rescale: bool
) -> dict[str, Any]:
    how = {"width": width, "strategy": strategy, "seed": seed_of(seed)}
    return how | {"mean": mean, "rescale": rescale}


def spmm_sampled(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    *sampling: Any,
) -> Tensor:
    out = _space((indptr.shape[0] - 1, x.shape[1]), x.dtype)
    if out.numel():
        arrays = map(_array, (indptr, indices, values, rows_apart(x), row_scale, col_scale, out))
        _cpu().spmm_sampled(*arrays, **_options(*sampling))
    return out.to(x.dtype)


def spmm_sampled_dx(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    seed: Tensor | None,
    width: int,
    strategy: str,
    mean: bool,
    rescale: bool,
) -> Tensor:
    """By the transpose of the sample: a column adds up in the order of its entries."""
    out = _space((n_cols, grad.shape[1]), grad.dtype)
    kept = indptr.diff().clamp(max=width).long()
    ends = kept.cumsum(0)
    rows = torch.repeat_interleave(torch.arange(len(kept), dtype=indices.dtype), kept)
    cols, entries = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.int64)
    _cpu().sample_rows(
        *map(_array, (indptr, indices, ends - kept, cols, entries)),
        width=width,
        strategy=strategy,
        seed=seed_of(seed),
    )
    t_indptr, rows, perm = transposed(cols, None if values is None else entries, rows, n_cols)
    values = None if values is None or perm is None else values[perm]
    factors = row_factors(indptr, row_scale, grad, width, mean, rescale)
    if out.numel():
        given = t_indptr, rows, values, rows_apart(grad), col_scale, factors, out
        _whole._cpu().spmm(*map(_array, given), reduce="sum")
    return out.to(grad.dtype)


def spmm_sampled_da(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    x: Tensor,
    grad: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    *sampling: Any,
) -> Tensor:
    out = _space(tuple(indices.shape), x.dtype)
    if out.numel():
        features = rows_apart(grad), rows_apart(x)
        arrays = map(_array, (indptr, indices, *features, row_scale, col_scale, out))
        _cpu().sddmm_sampled(*arrays, **_options(*sampling))
    return out.to(x.dtype)
