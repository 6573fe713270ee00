"""Load a ``.cu`` file, compile one instantiation with NVRTC, keep it, launch it.

Contract: ``load`` raises ``KernelLaunchError`` with the compiler's log if the source does not
compile, and with the driver's error if the result does not load; a ``Kernel`` call raises
``KernelLaunchError`` if the launch itself is refused.  A launch is asynchronous, so that a fault
*inside* a kernel surfaces at a later synchronisation; ``SPARSEFMT_DEBUG=1`` synchronises after each
launch so that the error names its kernel.
CuPy adds ``-ftz=true`` by itself: float32 subnormals become zero on a GPU.
"""

import os
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .._arrays import import_cupy
from ..errors import KernelLaunchError

OPTIONS = ("-std=c++17",)
THREADS = 256
WARP = 32
MAX_BLOCKS = 2**31 - 1

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

#: Every instantiation that the launchers may ask for, by file: what ``compile_all`` compiles.
_declared: dict[str, list[str]] = {}
_loaded: dict[tuple[int, str, str], "Kernel"] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """One compiled instantiation on one device."""

    name: str
    function: Any

    def __call__(self, blocks: int, args: tuple[Any, ...], *, threads: int = THREADS) -> None:
        """Launch on the current stream; ``blocks`` is clipped to what a grid can have."""
        driver = import_cupy().cuda.driver
        try:
            self.function((min(max(blocks, 1), MAX_BLOCKS),), (threads,), args)
            if os.environ.get("SPARSEFMT_DEBUG") == "1":
                import_cupy().cuda.get_current_stream().synchronize()  # synchronize!
        except (driver.CUDADriverError, import_cupy().cuda.runtime.CUDARuntimeError) as error:
            raise KernelLaunchError(f"{self.name}: {error}") from error


def warps_to_blocks(warps: int) -> int:
    """Blocks of ``THREADS`` threads that hold this many warps."""
    return -(-warps * WARP // THREADS)


def expression(kernel: str, *dtypes: Any, **constants: bool | int) -> str:
    """The C++ name of an instantiation: dtypes first, then constants, in template order."""
    types = [_C_TYPES[str(dtype)] for dtype in dtypes]
    return f"{kernel}<{', '.join(types + [str(int(value)) for value in constants.values()])}>"


def declare(file: str, *expressions: str) -> None:
    """Announce instantiations that a launcher may load."""
    _declared.setdefault(file, []).extend(expressions)


def declared() -> list[tuple[str, str]]:
    """Every announced ``(file, expression)``."""
    from . import matmul  # noqa: F401  # launchers announce when they are imported

    return [(file, name) for file, names in _declared.items() for name in names]


def load(file: str, kernel: str, *dtypes: Any, **constants: bool | int) -> Kernel:
    """The instantiation, compiled for the current device at its first use; thread-safe."""
    name = expression(kernel, *dtypes, **constants)
    cupy = import_cupy()
    key = (cupy.cuda.runtime.getDevice(), file, name)
    found = _loaded.get(key)
    if found is None:
        with _lock:
            found = _loaded.get(key) or _loaded.setdefault(key, _compile(cupy, file, name))
    return found


def compile_all() -> int:
    """Compile every kernel for the current device, so that nothing compiles later; their count.

    Call it before a CUDA graph is captured.
    """
    cupy = import_cupy()
    device = cupy.cuda.runtime.getDevice()
    for file, name in declared():
        with _lock:
            if (device, file, name) not in _loaded:
                _loaded[device, file, name] = _compile(cupy, file, name)
    return len(declared())


def _compile(cupy: Any, file: str, name: str) -> Kernel:
    try:
        module = cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=[name])
        return Kernel(name, module.get_function(name))
    except cupy.cuda.compiler.CompileException as error:
        raise KernelLaunchError(f"{file}: {name} does not compile:\n{error}") from error
    except cupy.cuda.driver.CUDADriverError as error:
        raise KernelLaunchError(f"{file}: {name} does not load: {error}") from error


@cache
def source(file: str) -> str:
    """The text of a kernel file with its own headers pasted in, so that caches see them change."""
    folder = Path(__file__).parent
    text = (folder / file).read_text()
    for header in folder.glob("*.cuh"):
        text = text.replace(f'#include "{header.name}"', header.read_text())
    return text
