"""What the CPU ops of sampling and of attention between whole rows still take from here."""

from typing import Any

import torch
from torch import Tensor

from ._cpu import _array
from ._scores import heads_and_feat, wide


def features(x: Tensor | None) -> Any:
    """An array of (n, heads, feat)."""
    return None if x is None else _array(x.contiguous().view(x.shape[0], *heads_and_feat(x)))


def flat(values: Tensor | None, heads: int, dtype: torch.dtype) -> Any:
    """An array of (n, heads) scores."""
    return None if values is None else _array(wide(values, dtype).view(values.shape[0], heads))


def seed_of(seed: Tensor | None) -> int:
    """The integer that it holds."""
    return 0 if seed is None else int(seed.item())
