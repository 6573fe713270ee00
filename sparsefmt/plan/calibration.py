"""Measurements of this device's primitives, and the constants fitted to them."""

import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._caches import cache
from ..formats.arrays import finish, import_cupy, parse_device, to_device
from ..formats.compressed import CSR
from ..generate import power_law
from ..ops import gat, sddmm
from .locality import Locality, locality
from .pricing import Constants, Work, work_of
from .rules import Primitive
from .run import ARRAY_FUNCTIONS

#: Vertices, entries of a row on average, and whether communities are spread over the vertices: what
#: overhead, caches and memory decide.
GRAPHS = (
    *((500, 4, True), (5_000, 10, True), (20_000, 40, True), (100_000, 10, True)),
    *((400_000, 8, True), (400_000, 8, False)),
)
WIDTHS = (1, 16, 64, 256)
#: Wider features are no scores of attention.
MAX_HEADS = 16
DEFAULT_CACHE = 32 << 20
#: The longest measurement counts at least so many seconds, or so many calls.
_SECONDS, _CALLS = 0.05, 50


class Sample(NamedTuple):
    """A primitive, its sizes and the seconds that it took."""

    primitive: Primitive
    sizes: Mapping[str, int]
    seconds: float
    locality: Locality | None = None


def calibrate(device: str = "cpu", step: Callable[[str], None] = lambda text: None) -> Constants:
    """Time each kind of primitive over graphs and widths, and fit the constants of the device.

    Least squares of the relative error with constants that are not negative; takes 1 to 3 minutes.

    Raises
    ------
    DeviceError
        If there is no such device.
    """
    samples = []
    for n, degree, shuffle in GRAPHS:
        step(f"timing a graph of {n} vertices")
        samples += list(_samples(n, degree, device, shuffle=shuffle))
    return fitted(samples, device)


def fitted(samples: Sequence[Sample], device: str) -> Constants:
    """Fit a device's constants to samples: for each kind, and "other" to all that only stream."""
    from scipy.optimize import nnls

    sizes = (0, 0) if device == "cpu" else (GPU.slice, GPU.inner)
    base = Constants(name_of(device), cache_of(device), {}, *sizes)
    kinds: dict[str, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(sample.primitive.kind, []).append(sample)
    kinds["other"] = [s for s in samples if (w := _work(s, base)).near + w.far == 0]
    seconds = {}
    for kind, part in kinds.items():
        work = np.array([_work(sample, base) for sample in part], np.float64)
        relative = work / np.array([s.seconds for s in part])[:, None]
        size = np.linalg.norm(relative, axis=0)
        size[size == 0] = 1
        solution, _ = nnls(relative / size, np.ones(len(part)))
        seconds[kind] = tuple((solution / size).tolist())
    return replace(base, seconds=seconds)


def _work(sample: Sample, constants: Constants) -> Work:
    return work_of(sample.primitive, sample.sizes, constants, locality=sample.locality)


def _samples(n: int, degree: int, device: str, *, shuffle: bool) -> Iterator[Sample]:
    """Time every kind of primitive on one graph."""
    A = power_law(n, n * degree, seed=1, shuffle=shuffle).tocsr().to(device)
    reach = locality(A)
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return to_device(rng.random(shape, np.float32), device)

    d, weighted = array(n), A.with_data(array(A.nnz))
    sizes = {"n": n, "nnz": A.nnz, "m": 64}
    yield _sample("scale_entries", ("nnz",), sizes, A=A, row=d, col=d)
    yield _sample("scale_diagonal", ("n",), sizes, row=d, col=d)
    for width in WIDTHS:
        X, sizes = array(n, width), {**sizes, "w": width}
        gathered, features = ("nnz", "n", "w"), ("n", "w")
        yield _sample("spmm_unweighted", gathered, sizes, reach, A=A, X=X)
        yield _sample("spmm_weighted", gathered, sizes, reach, A=weighted, X=X)
        yield _sample("spmm_scaled", gathered, sizes, reach, A=A, X=X, row=d, col=d)
        yield _sample("sddmm", gathered, sizes, reach, A=A, X=X, Y=X)
        if width <= MAX_HEADS:
            heads = {"H": X[:, :, None], "el": X, "er": X}
            yield _sample("attention", gathered, sizes, reach, A=A, **heads)
        yield _sample("broadcast", features, sizes, X=X, row=d)
        yield _sample("add", (*features, "2"), sizes, term0=X, term1=X)
        yield _sample("gemm", ("n", "w", "m"), sizes, left=X, right=array(width, 64))


_FUNCTIONS = ARRAY_FUNCTIONS | {"sddmm": sddmm, "attention": gat}


def _sample(
    kind: str,
    names: tuple[str, ...],
    sizes: Mapping[str, int],
    reach: Locality | None = None,
    **operands: Any,
) -> Sample:
    function = _FUNCTIONS[kind]
    result = function(**operands)  # compiles
    array = result.data if isinstance(result, CSR) else result
    times: list[float] = []
    while len(times) < 5 or (sum(times) < _SECONDS and len(times) < _CALLS):
        finish(array)  # synchronize!
        start = time.perf_counter()
        function(**operands)
        finish(array)  # synchronize!
        times.append(time.perf_counter() - start)
    extra = "factor" if kind == "spmm_scaled" else ""
    return Sample(Primitive(kind, names, extra), sizes, min(times), reach)


# Which device


def path_of(device: str) -> Path:
    """Return the file of a device's constants: in the user's cache, by name and version."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        version = metadata.version("sparsefmt")
    except metadata.PackageNotFoundError:  # a checkout, not installed
        version = "checkout"
    name = re.sub(r"[^a-z0-9]+", "-", f"{name_of(device)} {version}".lower())
    return root / "sparsefmt" / f"constants-{name}.json"


def name_of(device: str) -> str:
    """Return the name of the device with its driver, or of the processor with its cores."""
    ordinal = parse_device(device)
    if ordinal is None:
        return f"{_processor()}, {os.cpu_count()} cores"
    cupy = import_cupy()
    model = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()
    return f"{model} driver {cupy.cuda.runtime.driverGetVersion()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def cache_of(device: str) -> int:
    """Return the bytes of the device's last cache."""
    ordinal = parse_device(device)
    if ordinal is None:
        name = "SC_LEVEL3_CACHE_SIZE"
        return (os.sysconf(name) if name in os.sysconf_names else 0) or DEFAULT_CACHE
    return int(import_cupy().cuda.Device(ordinal).attributes["L2CacheSize"])


#: Fitted on two cores of an EPYC; a product gathers, and the cache holds what is small.
CPU = Constants(
    "a processor",
    DEFAULT_CACHE,
    {
        "gemm": (6e-6, 6e-9, 0, 0, 8e-11, 0, 0, 4e-12),
        "spmm_unweighted": (9e-6, 8e-9, 2.5e-10, 2e-11, 4e-10, 1e-11, 2e-11, 0),
        "spmm_weighted": (9e-6, 8e-9, 3e-10, 2e-11, 4e-10, 1.2e-11, 2e-11, 0),
        "spmm_scaled": (1.1e-5, 9e-9, 2.7e-10, 2e-11, 4e-10, 1.2e-11, 2e-11, 0),
        "sddmm": (7e-6, 7e-9, 2.4e-9, 0, 2.7e-10, 9e-12, 2e-11, 0),
        "attention": (2e-5, 1e-8, 8e-9, 2e-11, 4e-10, 1e-11, 2e-11, 0),
        "scale_entries": (1.2e-5, 0, 2.8e-9, 0, 2.7e-10, 0, 0, 0),
        "broadcast": (8e-7, 0, 0, 0, 9.4e-11, 0, 0, 1.7e-10),
        "other": (8e-7, 0, 3e-9, 6e-12, 3e-11, 0, 0, 5e-12),
    },
)
_GATHERING = (8e-6, 0, 2.8e-12, 2.85e-13, 3.9e-13, 3e-14, 2.6e-13, 1.3e-13)
#: From an H100's figures: 8 us a launch, 4 TB/s in order; products fitted to 116 of 32 graphs, with
#: the vertices in several orders: 15 TB/s of gathered rows from a multiprocessor's own cache (the
#: time of two bytes is that of a flop), 10 from the L2, and 3 from memory.
GPU = Constants(
    "a GPU",
    50 << 20,
    {
        "gemm": (8e-6, 0, 0, 2.5e-13, 2.5e-13, 0, 0, 2.5e-14),
        "spmm_unweighted": _GATHERING,
        "spmm_weighted": _GATHERING,
        "spmm_scaled": _GATHERING,
        "other": (8e-6, 0, 0, 2.5e-13, 2.5e-13, 1e-13, 3.3e-13, 0),
    },
    slice=128,
    inner=256 << 10,
)


@cache
def constants_of(device: str) -> Constants:
    """Return the constants that ``calibrate`` wrote for the device, or defaults for its kind."""
    path = path_of(device)
    if path.exists():
        return Constants.load(path)
    return CPU if parse_device(device) is None else GPU
