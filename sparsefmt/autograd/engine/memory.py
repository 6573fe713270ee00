"""Torch's memory: how launchers see CUDA tensors, and numba's loops those of the CPU.

Kernels take pointers: ``data_ptr()`` costs 0.1 µs where an exchange through DLPack costs 15.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ...formats.arrays import Array
from ...ops.engine.memory import ALIGNMENT, HERE, Scalar, register_memory
from .precision import bf16_is_allowed

NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_OPTIONS = frozenset((str, bool, int, float))
_WIDE = (torch.float32, torch.float64)

# Torch's own code generator reads both this way: 0.1 µs, where a Stream object costs 3.  Builds
# without CUDA lack them.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def on_device(number: int) -> AbstractContextManager[object]:
    """Enter a context in which that GPU is the current one; nothing where it is."""
    return HERE if number == current_device() else torch.cuda.device(number)


def out_of_inference() -> AbstractContextManager[object]:
    """Leave inference mode, if it is at work, whose tensors could never take part in training."""
    inside = torch.is_inference_mode_enabled() or torch.compiler.is_dynamo_compiling()
    return torch.inference_mode(False) if inside else HERE


_deterministic: Any = torch._C._get_deterministic_algorithms


class TorchMemory:
    """Memory of CUDA tensors, allocated by torch and on torch's current stream."""

    address: Any = staticmethod(Tensor.data_ptr)

    def case(
        self, args: Sequence[Any], names: Iterable[str] = ()
    ) -> tuple[bool, tuple[Any, ...], list[int], int]:
        device = args[0].get_device()
        facts: list[Any] = [device, bf16_is_allowed(), _deterministic(), *names]
        addresses: list[int] = []
        fact, add, lowest = facts.append, addresses.append, 0
        for a in args:
            if a is None or type(a) in _OPTIONS:  # a question to torch's classes takes 0.15 µs
                fact(a)
                add(0)
            elif isinstance(a, Tensor):
                address, strides = a.data_ptr(), a.stride()
                # Slices of shapes take 0.3 µs.
                axes = len(strides)
                if axes > 1:
                    fact(a.shape[1] if axes == 2 else a.shape[1:])
                fact(a.dtype)
                fact(strides)
                lowest |= address
                add(address)
            else:
                is_scalar = type(a) is Scalar
                fact(Scalar if is_scalar else a)
                add(a if is_scalar else 0)
        if lowest & ALIGNMENT:
            fact((*map(ALIGNMENT.__and__, addresses),))
        return device != current_device(), tuple(facts), addresses, raw_stream(device)

    def pointer(self, a: Tensor | None) -> int:
        return 0 if a is None else a.data_ptr()

    def pointers(self, *arrays: Tensor | None) -> list[int]:
        return [0 if a is None else a.data_ptr() for a in arrays]

    def dtype(self, a: Tensor) -> str:
        return NAMES[a.dtype]

    def row_stride(self, a: Tensor) -> int:
        return a.stride(0)

    def contiguous(self, a: Array) -> Any:
        return None if a is None else a.contiguous()

    def rows_in_place(self, a: Tensor) -> Tensor:
        # Of a matrix the stride tells it: a view of a row would take 1 µs.
        if a.is_contiguous() or (a.stride(1) == 1 if a.dim() == 2 else a[0].is_contiguous()):
            return a
        return a.contiguous()

    def factors(self, a: Array) -> Any:
        if a is None:
            return None
        return a.contiguous() if a.dtype in _WIDE else a.to(torch.float32).contiguous()

    def empty(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        torch_dtype = DTYPES[dtype]
        if torch_dtype is not like.dtype:
            return like.new_empty(shape, dtype=torch_dtype)
        # Of its shape and layout torch makes it in 2 µs, else in 3.
        same = like.shape == shape and like.is_contiguous()
        return torch.empty_like(like) if same else like.new_empty(shape)

    allocate = empty

    def zeros(self, shape: Sequence[int], dtype: str, like: Tensor) -> Tensor:
        return like.new_zeros(shape, dtype=DTYPES[dtype])

    def take(self, a: Tensor, places: Tensor) -> Tensor:
        return a.index_select(0, places)

    def zero_where(self, a: Tensor, mask: Tensor) -> Tensor:
        return a.masked_fill(mask, 0)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def finish(self, a: Tensor) -> None:
        torch.cuda.current_stream(a.device).synchronize()  # synchronize!

    def expand(self, indptr: Tensor, nnz: int) -> Tensor:
        return torch.repeat_interleave(indptr.diff(), output_size=nnz)

    def stream(self, a: Tensor) -> int:
        return int(raw_stream(a.get_device()))

    def device(self, a: Tensor) -> int:
        return a.get_device()

    def on_device(self, a: Tensor) -> AbstractContextManager[object]:
        return on_device(a.get_device())

    def deterministic(self) -> bool:
        """Return True if torch is in deterministic mode."""
        return torch.are_deterministic_algorithms_enabled()

    def rounds(self) -> bool:
        """Return True if torch allows products of float32 features in bfloat16."""
        return bf16_is_allowed()


MEMORY = TorchMemory()
for _kind in (Tensor, Parameter):
    register_memory(_kind, MEMORY)


def as_numpy(value: Tensor) -> Any:
    """Return a NumPy view of a CPU tensor; of bfloat16, which NumPy lacks, a float32 copy."""
    value = value.detach()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def sums_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of such features run."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def dtype_of(like: Tensor | str) -> torch.dtype:
    """Return the dtype of a result: a tensor's, or that of the name."""
    return DTYPES[like] if isinstance(like, str) else like.dtype
