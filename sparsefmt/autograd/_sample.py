"""What both devices do with the sample of a structure: its transpose, and the factors of its rows.

Torch's own operations throughout, none of which waits for a GPU.
"""

import torch
from torch import Tensor

from ._scores import sums_dtype


def transposed(
    cols: Tensor, entries: Tensor | None, rows: Tensor, n_cols: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``indptr``, rows and entries by columns, in the order of rows in each.

    Places whose column is ``n_cols`` are free: they come last, and ``indptr`` ends before them.
    """
    found, order = torch.sort(cols, stable=True)
    ends = torch.arange(n_cols + 1, dtype=cols.dtype, device=cols.device)
    indptr = torch.searchsorted(found, ends, out_int32=cols.dtype is torch.int32)
    perm = None if entries is None else entries.index_select(0, order)
    return indptr, rows.index_select(0, order), perm


def row_factors(
    indptr: Tensor,
    row_scale: Tensor | None,
    like: Tensor,
    width: int,
    mean: bool,
    rescale: bool,
) -> Tensor | None:
    """(n_rows,) what multiplies the sum of a row, in the dtype of sums of ``like``."""
    dtype = sums_dtype(like)
    scale = None if row_scale is None else row_scale.to(dtype)
    if not mean and not rescale:
        return scale
    lengths = indptr.diff()
    kept = lengths.clamp(1, width).to(dtype)
    shares = lengths.to(dtype) / kept if rescale else kept.reciprocal()
    return shares if scale is None else scale * shares
