"""A GPU's stand-in for a whole process: the package runs its code for CUDA, kernels do nothing.

CuPy is that of ``host_cupy``, CPU tensors say that they are on ``cuda:0``, kernels are not
compiled, and the driver takes each launch and forgets it: results are zeros.  ``install`` comes
before the package is imported, and is never undone.
"""

import ctypes
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import host_cupy
import numpy as np
import torch

_ndarray = np.ndarray
#: Of an H100, as far as launchers ask.
ATTRIBUTES = {
    **{"MultiProcessorCount": 132, "L2CacheSize": 52428800},
    **{"MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472},
}


def install() -> None:
    """Let this process believe in a GPU."""
    _install_cupy()
    _install_torch()
    from sparsefmt.ops.engine import build, jit

    build.reached = _write_report
    jit._driver = lambda: lambda *_: 0  # type: ignore[assignment]
    jit._compile = lambda *_: (None, 1)  # type: ignore[assignment]
    for name in ("numpy.random", "scipy.sparse.csgraph"):  # Cython looks at NumPy's own class
        import_module(name)
    host_cupy.np = SimpleNamespace(**vars(np))
    np.ndarray = _OfTheHost  # type: ignore[misc]


def _install_cupy() -> None:
    """Add to ``host_cupy`` what launchers ask of CuPy."""
    sys.modules["cupy"] = cupy = host_cupy.module()
    stream = SimpleNamespace(ptr=0, synchronize=int, is_capturing=bool)
    runtime = cupy.cuda.runtime
    runtime.memsetAsync = runtime.memcpyAsync = lambda *_: None
    runtime.streamIsCapturing = lambda _: False
    cupy.cuda.driver = SimpleNamespace(funcSetAttribute=lambda *_: None)
    cupy.cuda.get_current_stream = lambda: stream
    cupy.empty = cupy.zeros
    host_cupy.Device.attributes, host_cupy.Device.compute_capability = ATTRIBUTES, "90"
    data = property(lambda a: SimpleNamespace(ptr=a.ctypes.data, device_id=0))
    host_cupy.ndarray.data = data
    host_cupy.ndarray._c_contiguous = property(lambda a: a.flags.c_contiguous)


class _OnlyItself(type):
    """The class of a class that has no instances of other classes."""

    def __instancecheck__(cls, a: object) -> bool:
        return type(a) is _ndarray


class _OfTheHost(metaclass=_OnlyItself):
    """What stands for NumPy's class of arrays: those of CuPy's stand-in are not of it."""


def _install_torch() -> None:
    """Let tensors and torch's questions about streams answer as on a GPU."""
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    torch._C._cuda_getDevice = lambda: 0
    torch.cuda.is_current_stream_capturing = bool
    torch.cuda.synchronize = lambda *_: None
    torch.nn.Module.cuda = lambda self: self
    tensor = torch.Tensor
    tensor.is_cuda, tensor.device = True, torch.device("cuda", 0)
    tensor.get_device = lambda _: 0
    for owner, names in ((torch, "zeros ones full arange tensor"), (tensor, "new_zeros new_full")):
        for name in names.split():
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    tensor.new_empty = tensor.new_zeros
    impl = torch.library.Library.impl

    def register(library: Any, name: str, function: Any, key: str = "", **options: Any) -> None:
        """Register a kernel for CUDA as that of the CPU, which the dispatcher takes."""
        if library.ns != "sparsefmt" or key != "CPU":
            impl(library, name, function, "CPU" if key == "CUDA" else key, **options)

    torch.library.Library.impl = register


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch so that it leaves out where its result is to be."""

    def call(*args: Any, device: object = None, pin_memory: bool = False, **options: Any) -> Any:
        return function(*args, **options)

    return call


def _write_report(address: int, *_: object) -> None:
    """Write to a report that its stream is done."""
    ctypes.c_longlong.from_address(address).value = 1
