"""The calls of layers that run as one node of autograd's, and how such a node is applied."""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from ..graph.graph import Graph
from .engine import checks
from .tensors.prepare import tensors_of

_TENSORS = (Tensor, Parameter)


def is_plain(graph: object, x: Any, weight: Any, *others: Tensor | None) -> bool:
    """Return True if a layer may run as one node, as most calls in eager mode may.

    That is for plain tensors, ``x`` of shape (n, in_channels) and parameters ``weight``, of shape
    (out_channels, in_channels) or (1,), and ``others``, of its dtype and device; and for a square
    graph there, without values or with those of that dtype.  False for everything else, wrong or
    not, within autocast, ``torch.compile``, ``torch.func`` and forward mode.
    """
    if (
        torch.compiler.is_compiling()
        or type(graph) is not Graph
        or type(x) not in _TENSORS
        or type(weight) not in _TENSORS
        or x.dim() != 2
        or forward_ad._current_level >= 0
        or maybe_current_level() is not None
        or is_functorch_wrapped_tensor(x)  # left behind by a transform
        or is_functorch_wrapped_tensor(weight)
    ):
        return False
    dtype, device = x.dtype, x.device
    for other in others:
        if other is not None and not (
            type(other) in _TENSORS
            and other.dtype is dtype
            and other.device == device
            and not is_functorch_wrapped_tensor(other)
        ):
            return False
    tensors = tensors_of(graph)
    values = tensors.csr_values
    return (
        x.shape[0] == tensors.n_rows == tensors.n_cols
        and (weight.dim() == 1 or x.shape[1] == weight.shape[1])
        and dtype is weight.dtype
        and dtype in checks.FLOATING
        and device == tensors.device == weight.device
        and x.layout is torch.strided
        and (values is None or values.dtype is dtype)
        and not torch.is_autocast_enabled(tensors.kind)
    )


def applied(function: type[Function], *args: Any) -> Tensor:
    """Apply a function in a call that ``is_plain``, for which torch's own ``apply`` does no more.

    That looks at each argument for a wrapper that a transform has left behind.
    """
    out: Tensor = super(Function, function).apply(*args)  # type: ignore[misc]
    return out
