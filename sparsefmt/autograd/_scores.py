"""How scores lie beside features: what kernels, fakes and Functions of attention all ask.

Features are (n, heads, feat) or (n, feat), and scores follow them without the last axis.  Scores,
statistics and their gradients are float32 beside 2-byte features, else of the features' dtype.
"""

from typing import Any

import torch
from torch import Tensor

DOT, ADDITIVE = 0, 1  # kinds of scores, as in attend.cu


def sums_dtype(x: Tensor) -> torch.dtype:
    """In which sums of such features run."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def heads_and_feat(x: Tensor) -> tuple[int, int]:
    """Heads, and the features of each."""
    shape = x.shape
    return (shape[1] if len(shape) == 3 else 1), shape[-1]


def wide(values: Tensor | None, dtype: torch.dtype) -> Any:
    """As kernels read it; keep it until the launch is enqueued."""
    if values is None:
        return None
    return (values if values.dtype is dtype else values.to(dtype)).contiguous()


def shape_of(values: Tensor | None, asked: bool = True) -> Any:
    """Of the gradient of what may not be given, or not asked for: nothing then."""
    return (0,) if values is None or not asked else values.shape
