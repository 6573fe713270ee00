"""Examination of a machine: what it has, what would run where on it, and what to install.

The driver is asked through its C interface, and versions come from the metadata of what is
installed: of the optional libraries only CuPy is imported, to try a first kernel.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from ..errors import DeviceError
from ..formats.arrays import import_cupy

BASE = ("numpy", "scipy", "numba")
OPTIONAL = ("torch", "click", "rich", "matplotlib")
#: CuPy's distributions: at most one may be installed, they overwrite each other.
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
#: Inline ``mma.sync`` for tf32 and bfloat16 begins with this compute capability.
TENSOR_CORES = (8, 0)
#: The oldest CUDA driver interface that a CuPy extra of this package works with.
OLDEST_CUDA = 12

_PROBE = 'extern "C" __global__ void sparsefmt_probe(int* x) { *x = 42; }'
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Device:
    """A GPU, as the driver describes it."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    memory: int  #: bytes

    @property
    def tensor_cores(self) -> bool:
        """Return True if the tensor-core kernels can run on it."""
        return self.capability >= TENSOR_CORES


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA that it runs, and its devices."""

    cuda: tuple[int, int] | None  #: None if there is no driver
    devices: tuple[Device, ...]
    problem: str = ""  #: why there are no devices


@dataclass(frozen=True)
class Cupy:
    """CuPy's packages, and whether a kernel works."""

    packages: tuple[tuple[str, str], ...]  #: (distribution, version)
    runtime: tuple[int, int] | None
    nvrtc: tuple[int, int] | None
    problem: str = ""  #: why CuPy, its compiler or a first kernel does not work
    works: bool = False  #: whether a kernel was compiled, launched and gave the right result


@dataclass(frozen=True)
class Report:
    """The facts that ``sparsefmt doctor`` prints."""

    system: dict[str, str]
    versions: dict[str, str | None]  #: None where the library is not installed
    driver: Driver
    cupy: Cupy

    @property
    def missing(self) -> list[str]:
        """Return the base dependencies that are not installed."""
        return [name for name in BASE if self.versions[name] is None]

    @property
    def broken(self) -> bool:
        """Return True if something is installed, or required, and does not work."""
        unusable = bool(self.driver.devices and self.cupy.packages and not self.cupy.works)
        return bool(self.missing) or unusable or len(self.cupy.packages) > 1


def examine() -> Report:
    """Return a report of this machine; never raise for what is absent or broken."""
    driver = find_driver()
    return Report(
        system(), {name: version(name) for name in BASE + OPTIONAL}, driver, find_cupy(driver)
    )


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def system() -> dict[str, str]:
    """Return versions of sparsefmt and Python, the machine, and the usable cores."""
    usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return {
        "sparsefmt": version("sparsefmt") or "not installed (run from a checkout)",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "CPU cores": str(len(usable(0))),
    }


# The driver, through its C interface


def find_driver() -> Driver:
    """Return the driver and its devices; a ``Driver`` without devices if there is none."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return read_driver(ctypes.CDLL(name))
    except OSError:
        return Driver(None, (), f"no NVIDIA driver ({name} was not found)")


def read_driver(library: ctypes.CDLL) -> Driver:
    """Read version and devices from the loaded driver library."""
    number = ctypes.c_int()
    status = library.cuInit(0)
    known = library.cuDriverGetVersion(ctypes.byref(number)) == 0
    cuda = _split(number.value) if known else None
    if status != 0:
        return Driver(cuda, (), f"the driver found no usable device (cuInit gave {status})")
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return Driver(cuda, (), "the driver found no device")
    return Driver(cuda, tuple(_read_device(library, i) for i in range(count.value)))


def _read_device(library: ctypes.CDLL, ordinal: int) -> Device:
    handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), ordinal)
    library.cuDeviceGetName(name, len(name), handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, handle)
    capability = major.value, minor.value
    return Device(ordinal, name.value.decode(errors="replace"), capability, memory.value)


def _split(number: int) -> tuple[int, int]:
    """Split CUDA's version number: 12040 is 12.4."""
    return number // 1000, number % 1000 // 10


# CuPy


def find_cupy(driver: Driver) -> Cupy:
    """Return CuPy's versions, and whether a kernel compiles and runs if there is a device."""
    packages = tuple((name, installed) for name in CUPY if (installed := version(name)))
    try:
        cupy = import_cupy()
    except DeviceError:
        return Cupy(packages, None, None, "it cannot be imported" if packages else "not installed")
    except (OSError, RuntimeError, AttributeError) as error:
        return Cupy(packages, None, None, f"its import fails: {_shortened(error)}")
    packages = packages or (("cupy", str(cupy.__version__)),)
    try:
        runtime = _split(cupy.cuda.runtime.runtimeGetVersion())
        nvrtc = tuple(cupy.cuda.nvrtc.getVersion())
    except (OSError, RuntimeError, ImportError, AttributeError) as error:
        return Cupy(packages, None, None, f"CUDA libraries are missing: {_shortened(error)}")
    problem = _probe(cupy) if driver.devices else driver.problem
    return Cupy(packages, runtime, nvrtc, problem, works=not problem)


def _probe(cupy: ModuleType) -> str:
    """Run a first kernel; return the problem, "" if there is none."""
    try:
        result = cupy.zeros(1, "int32")
        cupy.RawKernel(_PROBE, "sparsefmt_probe")((1,), (1,), (result,))
        value = int(result[0])  # synchronize!
    except (
        OSError,
        RuntimeError,
        ImportError,
        MemoryError,
        cupy.cuda.compiler.CompileException,
    ) as error:
        return f"a first kernel fails: {_shortened(error)}"
    return "" if value == 42 else f"a first kernel gave {value} instead of 42"


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:157]}..."


# Conclusions


def runs(report: Report) -> dict[str, tuple[bool, str]]:
    """Return what would run: name -> (whether it does, on what or why not)."""
    devices = [f"{device.ordinal}: {device.name}" for device in report.driver.devices]
    cpu = ", ".join(f"{name} is not installed" for name in report.missing)
    gpu = f"CuPy: {report.cupy.problem}" if devices else report.driver.problem
    gpu = "" if report.cupy.works else gpu
    able = [
        name
        for name, device in zip(devices, report.driver.devices, strict=True)
        if device.tensor_cores
    ]
    needs = (
        f"needs compute capability {TENSOR_CORES[0]}.{TENSOR_CORES[1]}: CUDA kernels run instead"
    )
    torch = report.versions["torch"]
    return {
        "CPU twins (numba)": (not cpu, cpu or f"{report.system['CPU cores']} cores"),
        "CUDA kernels": (not gpu, gpu or "; ".join(devices)),
        "tensor cores": (not gpu and bool(able), gpu or "; ".join(able) or needs),
        "PyTorch layer": (
            torch is not None,
            f"torch {torch}" if torch else "torch is not installed",
        ),
        "pictures": (
            report.versions["matplotlib"] is not None,
            "sparsefmt plot, sparsefmt demo" if report.versions["matplotlib"] else "no matplotlib",
        ),
    }


def advice(report: Report) -> Iterator[str]:
    """Yield what to install or mend, most urgent first; nothing if all is well."""
    if report.missing:
        yield f"pip install {' '.join(report.missing)}"
    packages = [name for name, _ in report.cupy.packages]
    if len(packages) > 1:
        yield f"{' and '.join(packages)} overwrite each other: pip uninstall {' '.join(packages)}"
    yield from _advise_gpu(report)
    if report.versions["torch"] is None:
        yield "pip install 'sparsefmt[torch]'  (only for training from PyTorch)"
    if any(report.versions[name] is None for name in ("click", "rich", "matplotlib")):
        yield "pip install 'sparsefmt[cli]'"


def _advise_gpu(report: Report) -> Iterator[str]:
    cuda, cupy = report.driver.cuda, report.cupy
    if not report.driver.devices:
        if cuda is not None:
            yield "no GPU is visible: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
        return
    if cuda is not None and cuda[0] < OLDEST_CUDA:
        old = f"{cuda[0]}.{cuda[1]}"
        yield f"a newer NVIDIA driver: this one runs CUDA {old}, CuPy needs {OLDEST_CUDA}"
    elif not cupy.works:
        extra = "cuda12" if cuda is not None and cuda[0] == OLDEST_CUDA else "cuda13"
        again = "--force-reinstall " if cupy.packages else ""
        yield f"pip install {again}'sparsefmt[{extra}]'"
