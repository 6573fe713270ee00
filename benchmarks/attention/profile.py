"""What ran on the GPU during a call: torch's profiler sees kernels that CuPy launched too."""

import re
from collections.abc import Callable, Iterable
from typing import Any

#: Names of the kernels that multiply dense matrices.
GEMM = re.compile(r"gemm|gemv|cutlass|xmma|splitk|nvjet|dot_kernel|cublas", re.IGNORECASE)
#: What the copy engine or a fill does is no kernel.
COPIES = ("Memcpy", "Memset")


def on_device(function: Callable[[], Any], *, calls: int = 1) -> list[tuple[str, float]]:
    """Name and microseconds of everything that the GPU did in so many calls, after one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
    on_gpu = [event for event in seen.events() if event.device_type.name == "CUDA"]
    return [(event.name, event.time_range.elapsed_us()) for event in on_gpu]


def kernel_ms(function: Callable[[], Any], *, calls: int = 3) -> float:
    """Milliseconds of a call in which anything ran on the GPU: without the gaps between."""
    return sum(us for _, us in on_device(function, calls=calls)) / calls / 1e3


def counted(names: Iterable[str]) -> dict[str, int]:
    """How many kernels, how many products of dense matrices, and how many copies and fills."""
    found = {"kernels": 0, "gemms": 0, "copies": 0}
    for name in names:
        if name.startswith(COPIES):
            found["copies"] += 1
        elif GEMM.search(name):
            found["gemms"] += 1
        else:
            found["kernels"] += 1
    return found
