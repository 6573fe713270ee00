"""How much memory a call takes beyond what is in use before it."""

from collections.abc import Callable
from typing import Any

MIB = 1 << 20


def peak_bytes(function: Callable[[], Any]) -> int:
    """Most bytes that CuPy's pool had in use during the call beyond those before it."""
    import cupy

    pool = cupy.get_default_memory_pool()
    before = peak = pool.used_bytes()

    class Peak(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "peak"

        def malloc_postprocess(self, **_: Any) -> None:
            nonlocal peak
            peak = max(peak, pool.used_bytes())

    with Peak():
        result = function()
    del result
    return int(peak - before)


def torch_peak_bytes(function: Callable[[], Any]) -> tuple[int, int]:
    """Likewise of torch's allocator on a GPU, and of CuPy's pool beside it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cupy_bytes = peak_bytes(function)
    return torch.cuda.max_memory_allocated() - before, cupy_bytes
