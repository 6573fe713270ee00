"""What the kernels of both devices ask of their arguments' memory."""

from torch import Tensor


def rows_apart(x: Tensor) -> Tensor:
    """``x`` if there are gaps between its rows at most, else a contiguous copy."""
    if x.is_contiguous() or (x.shape[0] and x[0].is_contiguous()):
        return x
    return x.contiguous()


def with_heads(x: Tensor) -> Tensor:
    """``x`` as (n, heads, feat), nothing but gaps between its rows."""
    return rows_apart(x if x.dim() == 3 else x.unsqueeze(1))


def factors(
    like: Tensor, n_rows: int, n_cols: int, row_scale: Tensor | None, col_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both scales as features of width 1, whose sddmm is the factor of each entry."""
    r = like.new_ones(n_rows, 1) if row_scale is None else row_scale[:, None].to(like.dtype)
    c = like.new_ones(n_cols, 1) if col_scale is None else col_scale[:, None].to(like.dtype)
    return r, c
