"""The questions of graph attention's short way: can kernels read the tensors, does torch watch."""

import torch
from torch import Tensor
from torch.nn import Parameter

from ...ops.engine.call import question
from ...ops.engine.structure import tiled
from .library import direct, is_functional
from .memory import current_device

#: Bytes of a value, of those dtypes whose factors are of the same one.
ITEMSIZE = {torch.float32: 4, torch.float64: 8}
_KINDS = Tensor, Parameter


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
        not direct((x,))
        or tiled
        or question.get() is not None
        or x.get_device() != current_device()
    )
