"""The short way to a product without edge values: of plain CUDA tensors, in a plain eager call.

On a small graph the host is what a step waits for.  The long way asks the table of operations, each
kernel's reasons, and what memory the arrays are in; here one look-up finds what all of these have
decided for a call of the same case before.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from ...ops.engine.choose import question
from ...ops.matmul.cuda import is_wide, launch_case
from ...ops.tiles.operands import prepared
from ..tensors.tensors import Side
from .library import is_functional, listening
from .memory import MEMORY, NAMES, current_device
from .precision import bf16_is_allowed

#: Bytes of a value, of those dtypes whose factors are of the same one.
ITEMSIZE = {torch.float32: 4, torch.float64: 8}
_KINDS = Tensor, Parameter


def product_at_once(
    side: Side,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
    own: Tensor | None = None,
    factors: Tensor | None = None,
    one_more: bool = False,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Run ``SPMM``, or ``SPMM_WITH_OWN`` of a sum or mean if there are ``own`` rows, at once.

    None if the call has to go by the library op, which gives the same bits.
    """
    S, dtype = side.structure, x.dtype
    size = ITEMSIZE.get(dtype)
    if S is None or size is None or not S.nnz or is_watched(x) or bf16_is_allowed():
        return None
    (n, feat), (stride, step), own_stride, own_at = x.shape, x.stride(), -1, 0
    if step != 1 or not feat:
        return None
    if own is not None:
        own_stride, step = own.stride()
        if step != 1 or not _is_plain(own):
            return None
        own_at, own_stride = own.data_ptr(), own_stride * size
    places = addresses(col_scale, row_scale, factors, bias)
    if places is None:
        return None
    cols, scale, factors_at, bias_at = places

    # Of the same shape and layout torch makes it sooner.
    same = n == S.n_rows and stride == feat
    out = torch.empty_like(x) if same else x.new_empty((S.n_rows, feat))
    rows, result = x.data_ptr(), out.data_ptr()
    alignment = (rows | result | own_at | max(own_stride, 0)) & 15
    name, scaled = NAMES[dtype], (row_scale is not None, col_scale is not None)
    wide = is_wide(S, name, scaled=scaled[1])
    case = name, reduce, feat, stride, alignment, own_stride, one_more, *scaled, wide
    added = own_at, factors_at, bias_at
    launch_case(S, MEMORY, x, case, rows, result, (scale, 0, 0, cols), 0, added)
    return out


def addresses(*factors: Tensor | None) -> list[int] | None:
    """Give the addresses of factors, 0 for None; None if one does not lie as kernels read it."""
    found = []
    for one in factors:
        if one is None:
            found.append(0)
        elif _is_plain(one) and one.is_contiguous():
            found.append(one.data_ptr())
        else:
            return None
    return found


def _is_plain(one: Tensor) -> bool:
    """Tell whether memory holds the values themselves."""
    return type(one) in _KINDS and not (one.is_neg() or one._is_zerotensor() or is_functional(one))


def is_watched(x: Tensor) -> bool:
    """Tell whether the long way would do more for these features than round them and launch."""
    return bool(
        torch.compiler.is_dynamo_compiling()
        or not _is_plain(x)
        or prepared
        or question() is not None
        or listening((x,))
        or x.get_device() != current_device()
    )
