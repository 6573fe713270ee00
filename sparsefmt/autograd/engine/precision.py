"""What torch allows its own products of float32 matrices to round their factors to."""

from contextvars import ContextVar
from typing import Any

import torch

#: Set while the gradient of a result that was not rounded is computed: nothing is rounded then.
exact: ContextVar[bool] = ContextVar("exact", default=False)

# 0.1 µs, whichever way it was set; builds before torch 2.9 have one way, and ask it.
_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def tf32_is_allowed() -> bool:
    """Return True if float32 may be rounded to TF32: ``set_float32_matmul_precision("high")``."""
    if _precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return bool(_precision("cuda", "matmul") == "tf32")


def bf16_is_allowed() -> bool:
    """Return True if float32 may be rounded to bfloat16: ``..._matmul_precision("medium")``.

    Torch has no such word for products on a GPU alone: "medium" allows TF32 there, and bfloat16 to
    oneDNN.
    """
    if _precision is None:
        return torch.get_float32_matmul_precision() == "medium" and not exact.get()
    allowed = bool(_precision("mkldnn", "matmul") == "bf16") and tf32_is_allowed()
    return allowed and not exact.get()
