"""Load a ``.cu`` file, compile one instantiation with NVRTC, keep it, launch it.

Contract: ``load`` raises ``KernelLaunchError`` with the compiler's log if the source does not
compile, and with the driver's error if the result does not load; a ``Kernel`` call raises
``KernelLaunchError`` if the launch itself is refused.  A launch is asynchronous, so that a fault
*inside* a kernel surfaces at a later synchronisation; ``SPARSEFMT_DEBUG=1`` synchronises after each
launch so that the error names its kernel.
CuPy adds ``-ftz=true`` by itself: float32 subnormals become zero on a GPU.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..._caches import cache
from ...errors import DeviceError, KernelLaunchError, UnsupportedError
from ...formats import checks
from ...formats.arrays import Array, import_cupy

OPTIONS = ("-std=c++17",)
THREADS = 256
WARP = 32
MAX_BLOCKS, MAX_ROWS = 2**31 - 1, 2**16 - 1

_C_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
}

_compiled: dict[tuple[int, str, str], tuple[Any, int]] = {}
_loaded: dict[tuple[Any, ...], "Kernel"] = {}
_lock = threading.Lock()


_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute
#: A ``CUlaunchAttribute``: all blocks run at the same time, so that they may wait for each other.
_COOPERATIVE = ctypes.create_string_buffer(struct.pack("i4xi60x", 2, 1))
_COOPERATIVE_AT = ctypes.addressof(_COOPERATIVE)
_pack_attributes, _ATTRIBUTES_AT = struct.Struct("PI").pack_into, 40  # of a ``CUlaunchConfig``

#: A ``CUlaunchConfig``, as ``struct`` writes it: grid, block, shared memory, stream, no attributes.
_CONFIG = "7IP16x"
#: With the size of the parameters, which follow: at a multiple of 16, as their alignment may ask.
_HEAD = _CONFIG + "N"
_MAX_PARAMETERS = 4096  # bytes: every driver takes as many


class _Memory(threading.local):
    """What the driver reads at a launch: of each thread its own, since a launch lets the GIL go.

    The driver copies it before it returns, so that the thread's next launch writes it anew.
    """

    def __init__(self) -> None:
        memory = ctypes.create_string_buffer(struct.calcsize(_HEAD) + _MAX_PARAMETERS)
        start = ctypes.addressof(memory)
        size, parameters = start + struct.calcsize(_CONFIG), start + struct.calcsize(_HEAD)
        # CU_LAUNCH_PARAM_BUFFER_POINTER = 1, _BUFFER_SIZE = 2, _END = 0
        extra = (ctypes.c_void_p * 5)(1, parameters, 2, size, 0)
        self.parts = memory, ctypes.byref(memory), ctypes.byref(extra)


_memory = _Memory()


#: A kernel with its grid and known arguments, which takes the stream and the other arguments.
Launch: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled instantiation on one device; a launch costs the host a fraction of CuPy's."""

    name: str
    module: Any  #: keeps ``function`` alive
    function: Any  #: its address, as ctypes passes it
    pack_into: Callable[..., None]  #: writes ``_HEAD`` and the parameters
    size: int  #: of the parameters, in bytes
    launch: Any  #: the driver's

    def __call__(
        self,
        blocks: int | tuple[int, int],
        args: tuple[int, ...],
        *,
        threads: int = THREADS,
        shared: int = 0,
        stream: int,
    ) -> None:
        """Enqueue a grid of at least one block on the stream of that address."""
        self.ready(blocks, threads=threads, shared=shared)(stream, *args)

    def ready(
        self,
        blocks: int | tuple[int, int],
        before: tuple[int, ...] = (),
        after: tuple[int, ...] = (),
        *,
        threads: int = THREADS,
        shared: int = 0,
        cooperative: bool = False,
    ) -> Launch:
        """Prepare a launch of which only the stream and some arguments are missing.

        It enqueues the kernel on the stream of an address, with the arguments between the known.

        ``before`` and ``after`` are the first and the last arguments.  ``shared`` is the dynamic
        shared memory of a block in bytes, at most 48 KiB or what ``load`` was told.  The blocks of
        a ``cooperative`` launch run at the same time, as many as the GPU has room for at most.
        """
        x, y = blocks if isinstance(blocks, tuple) else (blocks, 1)
        if x > MAX_BLOCKS or y > MAX_ROWS:
            raise KernelLaunchError(
                f"{self.name}: a grid of {x} x {y} blocks, at most {MAX_BLOCKS} x {MAX_ROWS} fit."
            )
        grid = x or 1, y, 1, threads, 1, 1, shared
        pack_into, function, start = self.pack_into, self.function, self.launch
        before = self.size, *before

        # One call of ``struct`` writes all that the driver reads, and one of ctypes passes four
        # pointers: the 11 arguments of ``cuLaunchKernel`` would cost more than all of it.
        def launch(stream: int, *args: float) -> None:
            memory, config, extra = _memory.parts
            pack_into(memory, 0, *grid, stream, *before, *args, *after)
            if cooperative:
                _pack_attributes(memory, _ATTRIBUTES_AT, _COOPERATIVE_AT, 1)
            status = start(config, function, None, extra)
            if status == _INVALID_CONTEXT:  # the first call of this thread
                runtime = import_cupy().cuda.runtime
                runtime.setDevice(runtime.getDevice())
                status = start(config, function, None, extra)
            if status or checks.DEBUG:
                self.raise_if_failed(status, stream)

        return launch

    def raise_if_failed(self, status: int, stream: int) -> None:
        """Raise KernelLaunchError if the launch failed, or what its stream runs."""
        cuda = import_cupy().cuda
        try:
            cuda.driver.check_status(status)
            cuda.runtime.streamSynchronize(stream)  # synchronize!
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            raise KernelLaunchError(f"{self.name}: {error}") from error


@cache
def _driver() -> Any:
    """Load ``cuLaunchKernelEx``, without ``argtypes``: its pointers need no conversion."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    try:
        return library.cuLaunchKernelEx
    except AttributeError as error:
        raise KernelLaunchError(
            "the NVIDIA driver has no cuLaunchKernelEx: it is older than CUDA 11.8. "
            "Install a driver for CUDA 12 or later."
        ) from error


def current_device() -> int:
    """Return the number of the current GPU."""
    return int(import_cupy().cuda.runtime.getDevice())


def warps_to_blocks(warps: int) -> int:
    """Count the blocks of ``THREADS`` threads that hold these warps, at most ``MAX_BLOCKS``."""
    return min(-(-warps * WARP // THREADS), MAX_BLOCKS)


def expression(kernel: str, dtypes: tuple[str, ...], constants: tuple[int, ...]) -> str:
    """Return the C++ name of an instantiation: types, then constants, in template order."""
    types = [_C_TYPES[dtype] for dtype in dtypes]
    return f"{kernel}<{', '.join(types + [str(value) for value in constants])}>"


#: Modules below ``ops`` whose ``instantiations`` say what their launchers may ask for.
LAUNCHERS = (
    *("matmul.cuda", "matmul.cuda_aggregate", "edges.cuda", "attention.gat.launches"),
    *("attention.pairwise.cuda", "cbsr.cuda", "cbsr.cuda_sspmm", "sampling.cuda"),
    *("tiles.cuda", "tiles.cuda_edges", "gcn.cuda", "messages.cuda", "engine.build"),
)


@cache
def declared() -> tuple[tuple[str, str], ...]:
    """List every ``(file, expression)`` that a launcher may ask for: what ``compile_all`` takes."""
    modules = (import_module(f"sparsefmt.ops.{name}") for name in LAUNCHERS)
    return tuple(name for module in modules for name in module.instantiations())


def load(
    file: str,
    kernel: str,
    layout: str,
    dtypes: tuple[str, ...],
    constants: tuple[int, ...] = (),
    *,
    shared: int = 0,
) -> Kernel:
    """Load an instantiation, compiled for the current device at its first use; thread-safe.

    ``shared`` is the most dynamic shared memory that a launch may take, where it is over 48 KiB.
    """
    device = current_device()
    result = _loaded.get((device, file, kernel, dtypes, constants, shared))
    if result is None:
        name = expression(kernel, dtypes, constants)
        with _lock:
            module, function = _compiled.get((device, file, name)) or _compile(device, file, name)
            if shared:
                _allow_shared(function, shared, name)
            result = Kernel(
                name,
                module,
                ctypes.c_void_p.from_param(function),
                struct.Struct(_HEAD + layout).pack_into,
                struct.calcsize(layout),
                _driver(),
            )
            _loaded[device, file, kernel, dtypes, constants, shared] = result
    return result


def _allow_shared(function: int, size: int, name: str) -> None:
    driver = import_cupy().cuda.driver
    try:
        driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, size)
    except driver.CUDADriverError as error:
        raise KernelLaunchError(f"{name}: {size} bytes of shared memory: {error}") from error


def compile_all() -> int:
    """Compile every kernel for the current device, so that nothing compiles later.

    Call it before a CUDA graph is captured.  It takes all cores for minutes.

    Returns
    -------
    int
        How many kernels there are.

    Raises
    ------
    DeviceError
        If CuPy is not installed, or there is no CUDA device.
    KernelLaunchError
        If a kernel does not compile or load.
    """
    try:
        device = current_device()
    except import_cupy().cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"there is no CUDA device: {error}") from error

    def compile_one(name: tuple[str, str]) -> None:
        with import_cupy().cuda.Device(device):  # of this thread
            if (device, *name) not in _compiled:
                _compile(device, *name)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(1 for _ in pool.map(compile_one, declared()))


def _compile(device: int, file: str, name: str) -> tuple[Any, int]:
    cupy = import_cupy()
    tell()
    try:
        module = cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=[name])
        function = int(module.get_function(name).kernel.ptr)
        return _compiled.setdefault((device, file, name), (module, function))
    except cupy.cuda.compiler.CompileException as error:
        raise KernelLaunchError(f"{file}: {name} does not compile:\n{error}") from error
    except cupy.cuda.driver.CUDADriverError as error:
        raise KernelLaunchError(f"{file}: {name} does not load: {error}") from error


@cache
def source(file: str) -> str:
    """Read a kernel file with its own headers pasted in, so that caches see them change."""
    folder = Path(__file__).parent.parent
    text = (folder / file).read_text()
    for header in sorted(folder.rglob("*.cuh")):
        name = header.relative_to(folder).as_posix()
        text = text.replace(f'#include "{name}"', header.read_text())
    return text


# Who is told when a compiler is waited for: the command line says so

_told: ContextVar[Callable[[], object] | None] = ContextVar("told", default=None)


@contextmanager
def told(function: Callable[[], object]) -> Iterator[None]:
    """Call the function before each loop or kernel that is compiled in this context."""
    token = _told.set(function)
    try:
        yield
    finally:
        _told.reset(token)


def tell() -> None:
    """Call what ``told`` was given, if anything, before a loop or kernel is compiled."""
    function = _told.get()
    if function is not None:
        function()


# What every launcher counts with: sizes of values, bytes of rows, memory set to a byte

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


def stream() -> int:
    """Return the address of CuPy's current stream."""
    return int(import_cupy().cuda.get_current_stream().ptr)


def row_bytes(stride: int, dtype: str) -> int:
    """Return the bytes from one row to the next; raise UnsupportedError from 2**32 on."""
    nbytes = stride * ITEMSIZE[dtype]
    if nbytes >= 2**32:
        raise UnsupportedError(
            f"rows of features lie {nbytes} bytes apart: kernels count to 2**32, cut the features."
        )
    return nbytes


def fill(pointer: int, size: int, byte: int, stream: int) -> None:
    """Set ``size`` bytes from the pointer on to one value, on that stream."""
    filling(size, byte)(stream, pointer)


def filling(size: int, byte: int = 0) -> Callable[[int, int], None]:
    """Prepare to set ``size`` bytes to one value, as a launch that takes where they begin."""
    runtime = import_cupy().cuda.runtime

    def launch(stream: int, pointer: int) -> None:
        try:
            runtime.memsetAsync(pointer, byte, size, stream)
        except runtime.CUDARuntimeError as error:
            raise KernelLaunchError(f"filling {size} bytes: {error}") from error

    return launch


def capturing(stream: int) -> bool:
    """Return True if a CUDA graph is being captured from that stream."""
    return bool(import_cupy().cuda.runtime.streamIsCapturing(stream))


def view(pointer: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Make a CuPy array over memory that others own, and keep as long as it is read."""
    cupy = import_cupy()
    size = prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return cupy.empty(shape, dtype)
    memory = cupy.cuda.UnownedMemory(pointer, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class _Stream:
    """A stream by its address, as CuPy takes it over."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def on_stream(address: int) -> AbstractContextManager[object]:
    """Return a context in which CuPy's operations run on that stream."""
    if address == stream():
        return nullcontext()
    result: AbstractContextManager[object]
    result = import_cupy().cuda.Stream.from_external(_Stream(address))
    return result
