"""The memory of arrays as launchers see it: CuPy's, and those of libraries that register theirs.

A launcher takes arrays, asks ``memory_of`` one of them, and from then on calls ``m.pointer(x)`` or
``m.empty(...)``: one launcher serves CuPy arrays and CUDA tensors.  The torch layer registers the
memory of tensors when it is imported.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ...formats.arrays import Array, allocating, finish, import_cupy, is_cupy, out_of_memory
from ...formats.compressed import CSR
from ...formats.primitives import expand
from ...reorder import Order

HERE: AbstractContextManager[object] = nullcontext()
#: The bits of an address that launches may depend on: loads have 16 bytes.
ALIGNMENT = 31


class Scalar(int):
    """An integer that kernels take at each launch: launches are prepared for all values alike."""

    __slots__ = ()


#: Launches are prepared for all arguments of such a class alike, which they ask at each call.
ALIKE = frozenset((Scalar, CSR, Order))


class Memory(Protocol):
    """The operations that libraries of arrays name differently."""

    def case(
        self, args: Sequence[Any], names: Iterable[str] = ()
    ) -> tuple[bool, tuple[Any, ...], list[int], int]:
        """List what the launches of a call depend on; ``names`` are of its last arguments.

        Returns
        -------
        elsewhere : bool
            True if the arrays are on another GPU than the current one.
        case : tuple
            The GPU, what the library allows, and of each array its dtype, axes behind the first
            one, and strides or that it is contiguous; other arguments as they are, or their class.
            Behind them, unless all are 0, the lowest 5 bits of the addresses.
        addresses : list of int
            Of all arguments; 0 for those that are no arrays, and the value of a ``Scalar``.
        stream : int
            The caller's current stream.
        """

    @property
    def address(self) -> Callable[[Any], int]:
        """Return a compiled function that returns the address of an array."""

    def pointer(self, a: Array) -> int:
        """Return the address of the first value on its device; 0 for None."""

    def pointers(self, *arrays: Any) -> list[int]:
        """Return the addresses of several arrays; 0 for None."""

    def dtype(self, a: Array) -> str:
        """Return the name of the dtype, such as ``"float32"``."""

    def row_stride(self, a: Array) -> int:
        """Count the values from one row to the next."""

    def contiguous(self, a: Array) -> Any:
        """Return ``a`` itself if it is C-contiguous, else a copy; None for None."""

    def rows_in_place(self, a: Array) -> Any:
        """Return ``a`` if its rows are contiguous and do not overlap, else a copy."""

    def factors(self, a: Array) -> Any:
        """Convert scales for kernels: contiguous, float32 for 2-byte ones; None for None."""

    def empty(self, shape: Sequence[int], dtype: str, like: Array) -> Any:
        """Return uninitialised memory on the device of ``like``."""

    def zeros(self, shape: Sequence[int], dtype: str, like: Array) -> Any:
        """Return zeroed memory on the device of ``like``."""

    def take(self, a: Array, places: Array) -> Any:
        """Gather the values at those places."""

    def zero_where(self, a: Array, mask: Array) -> Any:
        """Copy ``a`` with 0 where the mask is set."""

    def capturing(self) -> bool:
        """Return True if the current stream is captured for a CUDA graph."""

    def finish(self, a: Array) -> None:
        """Wait for the current stream, so that any stream may read ``a``."""

    def expand(self, indptr: Array, nnz: int) -> Any:
        """Return the row of each of the ``nnz`` entries."""

    def stream(self, a: Array) -> int:
        """Return the address of the caller's current stream on the device of ``a``."""

    def device(self, a: Array) -> int:
        """Return the number of the GPU that holds ``a``."""

    def on_device(self, a: Array) -> AbstractContextManager[object]:
        """Return a context in which launches go to the device of ``a``."""

    def deterministic(self) -> bool:
        """Return True if every sum must have the same order in each run."""

    def rounds(self) -> bool:
        """Return True if products may round float32 features to bfloat16 unasked."""


class CupyMemory:
    """Memory of CuPy arrays; ``Memory`` documents its methods."""

    address: Any = attrgetter("data.ptr")

    def __init__(self) -> None:
        cupy = import_cupy()
        self._cupy, self._current_stream = cupy, cupy.cuda.get_current_stream
        self._current_device, self._array = cupy.cuda.runtime.getDevice, cupy.ndarray

    def case(
        self, args: Sequence[Any], names: Iterable[str] = ()
    ) -> tuple[bool, tuple[Any, ...], list[int], int]:
        device = args[0].data.device_id
        facts: list[Any] = [device, *names]
        addresses: list[int] = []
        array, fact, add, lowest = self._array, facts.append, addresses.append, 0
        for a in args:
            if a is None:
                fact(None)
                add(0)
            elif isinstance(a, array):
                address = a.data.ptr
                fact(a.dtype)
                fact(a.shape[1:])
                fact(a._c_contiguous or a.strides)
                lowest |= address
                add(address)
            else:
                kind = type(a)
                fact(kind if kind in ALIKE else a)
                add(a if kind is Scalar else 0)
        if lowest & ALIGNMENT:  # memory as CuPy allocates it has none of these bits
            fact((*map(ALIGNMENT.__and__, addresses),))
        elsewhere = device != self._current_device()
        return elsewhere, tuple(facts), addresses, self._current_stream().ptr

    def pointer(self, a: Array) -> int:
        return 0 if a is None else a.data.ptr

    def pointers(self, *arrays: Any) -> list[int]:
        return [0 if a is None else a.data.ptr for a in arrays]

    def dtype(self, a: Array) -> str:
        return _NAMES.get(a.dtype) or a.dtype.name

    def row_stride(self, a: Array) -> int:
        return a.strides[0] // a.itemsize if a.shape[0] > 1 else prod(a.shape[1:])

    def contiguous(self, a: Array) -> Any:
        if a is None or is_contiguous(a):
            return a
        with self.on_device(a), allocating(f"a contiguous copy of {a.nbytes} bytes"):
            return self._cupy.ascontiguousarray(a)

    def rows_in_place(self, a: Array) -> Any:
        if rows_apart(a):
            return a
        with self.on_device(a), allocating(f"a contiguous copy of {a.nbytes} bytes"):
            return a.copy()

    def factors(self, a: Array) -> Any:
        if a is None:
            return None
        if a.itemsize > 2:
            return self.contiguous(a)
        with self.on_device(a), allocating("scales in float32"):
            return a.astype(np.float32, order="C")  # by default it keeps strides

    def empty(self, shape: Sequence[int], dtype: str, like: Array) -> Any:
        try:  # a context that tells what was allocated would write its text each time
            if like.data.device_id == self._current_device():
                return self._cupy.empty(shape, dtype)
            with like.device:
                return self._cupy.empty(shape, dtype)
        except MemoryError as error:
            raise out_of_memory(f"a result of shape {shape}", error) from error

    def zeros(self, shape: Sequence[int], dtype: str, like: Array) -> Any:
        with self.on_device(like), allocating(f"a result of shape {shape}"):
            return self._cupy.zeros(shape, dtype)

    def take(self, a: Array, places: Array) -> Any:
        with self.on_device(a), allocating(f"{len(places)} values"):
            return a[places]

    def zero_where(self, a: Array, mask: Array) -> Any:
        with self.on_device(a), allocating(f"{len(a)} values"):
            return self._cupy.where(mask, a.dtype.type(0), a)

    def capturing(self) -> bool:
        return bool(self._current_stream().is_capturing())

    def finish(self, a: Array) -> None:
        finish(a)  # synchronize!

    def expand(self, indptr: Array, nnz: int) -> Any:
        return expand(indptr, nnz)

    def stream(self, a: Array) -> int:
        return int(self._current_stream().ptr)

    def device(self, a: Array) -> int:
        return int(a.data.device_id)

    def on_device(self, a: Array) -> AbstractContextManager[object]:
        return HERE if a.data.device_id == self._current_device() else a.device

    def deterministic(self) -> bool:
        """Return False: CuPy has no such mode."""
        return False

    def rounds(self) -> bool:
        """Return False: arrays are rounded only where a call allows it."""
        return False


_NAMES = {np.dtype(name): name for name in ("float16", "float32", "float64", "int32", "int64")}
#: The memory of each class of arrays that a launcher has seen, or that was registered.
memories: dict[type, Memory] = {}


def register_memory(kind: type, memory: Memory) -> None:
    """Use ``memory`` for arrays of that class and its subclasses."""
    memories[kind] = memory


def memory_of(a: Array) -> Memory:
    """Return the memory of the library that an array on a GPU comes from."""
    return memories.get(type(a)) or _find(a)


def _find(a: Array) -> Memory:
    for kind in type(a).__mro__:
        if kind in memories:
            return memories.setdefault(type(a), memories[kind])
    if not is_cupy(a):
        raise TypeError(f"no launcher takes a {type(a).__name__}")
    return memories.setdefault(type(a), CupyMemory())


def is_contiguous(a: Array) -> bool:
    """Return True if a CuPy array is C-contiguous."""
    return bool(a._c_contiguous)  # 0.05 µs: what ``flags``, which take 0.6, are made of


def rows_apart(a: Array) -> bool:
    """Return True if rows are contiguous and aligned, at any distance, and do not overlap."""
    if isinstance(a, np.ndarray):
        if not a.flags.aligned:
            return False
        whole = a.flags.c_contiguous
    else:
        whole = is_contiguous(a)
    if whole:
        return True
    row = a[0].nbytes if len(a) else 0
    gaps = a.strides[0] >= row and a.strides[0] % a.itemsize == 0
    return bool(a[:1].flags.c_contiguous and gaps)
