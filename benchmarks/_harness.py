"""Time calls in turn, measure their memory, and name the machine; tables are made in ``_table``."""

import datetime
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sparsefmt.formats.arrays import Array, is_cupy

Call = Callable[[], Any]

WARMUPS, RUNS = 5, 20
#: Beyond it half as many runs do: what takes so long is a library's, and its spread is small.
LONG_MS, SHORT_MS = 20.0, 0.2
#: Several times the L2 of any device so far.
FLUSH_BYTES = 1 << 28
#: How long the GPU spins before a timed call; what takes the host longer waits for it anyway.
LEAST_SPIN_MS, MOST_SPIN_MS = 0.2, 5.0
PACKAGES = ("numpy", "scipy", "numba", "torch", "torch-geometric", "cupy-cuda13x", "cupy-cuda12x")
MIB = 1 << 20
#: Keeps the GPU busy for so many nanoseconds, at any clock rate.
SPIN = """
__device__ long long now() {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
extern "C" __global__ void spin(long long ns) {
    for (long long start = now(); now() - start < ns;) {}
}
"""


class Median(float):
    """Median of repeats in milliseconds, with their spread: the distance of the quartiles."""

    spread: float

    @classmethod
    def of(cls, repeats: list[float]) -> "Median":
        """Return the median and the spread of these repeats."""
        median = cls(statistics.median(repeats))
        low, _, high = statistics.quantiles(repeats) if len(repeats) > 1 else (0.0, 0.0, 0.0)
        median.spread = high - low
        return median


def medians(
    functions: list[Call],
    *,
    cuda: bool,
    runs: int = RUNS,
    warmups: int = WARMUPS,
    flush: bool = False,
) -> list[float]:
    """Return the median of each in milliseconds; with ``flush`` each starts with an empty L2.

    They take turns in a changing order: each finds in the L2 what the one before it left.
    On a GPU the last warm-up tells how long the host takes to launch each on an idle device.
    """
    times: list[list[float]] = [[] for _ in functions]
    spins = [LEAST_SPIN_MS for _ in functions]
    for _ in range(warmups):
        for at, function in enumerate(functions):
            spins[at] = spin_ms(_host_ms(function))
            wait(cuda=cuda)
    turns, chance = list(range(len(functions))), random.Random(0)
    for _ in range(runs):
        chance.shuffle(turns)
        for at in turns:
            if flush:
                scratch = _scratch()
                scratch.data.memset_async(0, scratch.nbytes)
            run = functions[at]
            times[at].append(_cuda_ms(run, spins[at]) if cuda else _host_ms(run))
    return [Median.of(repeats) for repeats in times]


def paced(functions: list[Call], *, cuda: bool, quick: bool = False) -> tuple[list[float], int]:
    """Return medians, and of how many runs: 20 after 5, but 10 after 3 where one takes 20 ms.

    Of 60 where none takes 0.2 ms: what the one before left in the L2 is more of their time.
    """
    if quick:
        return medians(functions, cuda=cuda, runs=5, warmups=1), 5
    longest = max(medians(functions, cuda=cuda, runs=1, warmups=1))
    runs, warmups = (10, 1) if longest > LONG_MS else (RUNS, WARMUPS)
    runs = 3 * RUNS if longest < SHORT_MS else runs
    return medians(functions, cuda=cuda, runs=runs, warmups=warmups), runs


def timed(
    calls: Mapping[str, Call], *, cuda: bool, quick: bool, cold: bool = False
) -> dict[str, Any]:
    """Time calls in turn: a row of their medians by name, and how many times faster ``ms`` is.

    ``{"ms": ours, "torch_ms": theirs}`` gives ``over_torch``, with ``cold`` also ``cold_ms`` and
    ``cold_over_torch``, each call with an empty L2.
    """
    functions = [*calls.values()]
    times, runs = paced(functions, cuda=cuda, quick=quick)
    row: dict[str, Any] = dict(zip(calls, times, strict=True))
    row |= {"runs": runs} | speed_ups(row)
    if cold and cuda and not quick:
        times = medians(functions, cuda=True, runs=5, warmups=1, flush=True)
        by_name = dict(zip(calls, times, strict=True))
        row["cold_ms"] = by_name["ms"]
        row |= {f"cold_{name}": ratio for name, ratio in speed_ups(by_name).items()}
    return row


def speed_ups(row: Mapping[str, Any]) -> dict[str, float]:
    """Return ``over_x`` for each ``x_ms`` of a row but forward passes: the speed-up of ``ms``."""
    names = [name for name in row if name.endswith("_ms") and not name.endswith("forward_ms")]
    return {f"over_{name.removesuffix('_ms')}": row[name] / row["ms"] for name in names}


def walls(
    makers: Mapping[str, Callable[[], Call]], *, cuda: bool, runs: int, warmups: int
) -> dict[str, Median]:
    """Return median milliseconds of each, from an idle device to an idle device.

    Each call is made anew for every run, which is not timed; they take turns in a changing order.
    """
    times: dict[str, list[float]] = {name: [] for name in makers}
    chance = random.Random(0)
    for run in range(warmups + runs):
        for name in chance.sample([*makers], len(makers)):
            call = makers[name]()
            ms = wall_ms(call, cuda=cuda)
            if run >= warmups:
                times[name].append(ms)
    return {name: Median.of(each) for name, each in times.items()}


def wall_ms(call: Call, *, cuda: bool) -> float:
    """Time a call in milliseconds from an idle device to an idle device."""
    wait(cuda=cuda)
    start = time.perf_counter()
    result = call()
    wait(cuda=cuda)
    del result
    return (time.perf_counter() - start) * 1e3


def _host_ms(function: Call) -> float:
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed * 1e3


def spin_ms(host_ms: float) -> float:
    """Return how long the GPU is to be busy while the host launches what takes it so long."""
    return min(max(LEAST_SPIN_MS, 3 * host_ms), MOST_SPIN_MS)


def _cuda_ms(function: Call, spin_ms: float) -> float:
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    # The host runs ahead meanwhile, so that launches do not count.
    _spin()((1,), (1,), (int(spin_ms * 1e6),))
    start.record()
    result = function()
    stop.record()
    stop.synchronize()
    del result
    return float(cupy.cuda.get_elapsed_time(start, stop))


def wait(*, cuda: bool) -> None:
    """Wait for the GPU, if there is one."""
    if cuda:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


@cache
def _scratch() -> Any:
    import cupy

    return cupy.empty(FLUSH_BYTES, np.uint8)


@cache
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


@cache
def copy_bandwidth() -> float:
    """Return bytes read plus written in a second by the faster of two copies of a GiB, in GB/s."""
    import cupy

    source, target = cupy.zeros(1 << 28, np.float32), cupy.empty(1 << 28, np.float32)
    copies = [lambda: cupy.copyto(target, source), lambda: cupy.negative(source, out=target)]
    return 2 * source.nbytes / min(medians(copies, cuda=True)) / 1e6


# Memory


def poison(array: Array) -> None:
    """Fill an array with NaN, whatever its floating dtype."""
    if is_cupy(array):
        array.data.memset_async(0xFF, array.nbytes)
    else:
        array.fill(np.nan)


@contextmanager
def poisoned(*, cuda: bool) -> Iterator[None]:
    """Make every new CuPy array begin as NaN; do nothing without ``cuda``."""
    if not cuda:
        yield
        return
    import cupy

    def malloc(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(malloc):
        yield


def free() -> None:
    """Return unused memory of CuPy's and torch's pools, so that the other may have it."""
    cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
    if cupy is not None and cupy.is_available():
        cupy.get_default_memory_pool().free_all_blocks()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_gradients(forward: Call, inputs: Any, gradient: Any) -> tuple[Any, ...]:
    """Run forward and backward: return the result and the gradients of all inputs."""
    import torch

    y = forward()
    return y.detach(), *torch.autograd.grad(y, inputs, gradient)


def allocations(function: Call) -> tuple[int, list[int]]:
    """Return the most bytes in use in CuPy's pool beyond those before a call, and the sizes."""
    import cupy

    pool, sizes = cupy.get_default_memory_pool(), []
    before = peak = pool.used_bytes()

    class Watch(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name = "watch"

        def malloc_postprocess(self, **facts: Any) -> None:
            nonlocal peak
            peak = max(peak, pool.used_bytes())
            sizes.append(int(facts["size"]))

    with Watch():
        result = function()
    del result
    return int(peak - before), sizes


def peak_bytes(function: Call) -> tuple[int, int]:
    """Return the most bytes that torch's allocator on a GPU and CuPy's pool hand out in a call."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    of_cupy, _ = allocations(function)
    return torch.cuda.max_memory_allocated() - before, of_cupy


def allocated_sizes(function: Call) -> list[int]:
    """Return the bytes of every allocation in a call, by torch's allocator and CuPy's pool."""
    import torch

    record = torch.cuda.memory._record_memory_history
    record(max_entries=100_000, context=None)
    try:
        _, sizes = allocations(function)
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        record(enabled=None)
    return sizes + [one["size"] for one in chain(*traces) if one["action"] == "alloc"]


# The machine


def machine(*, cuda: bool) -> dict[str, Any]:
    """Return where and on what a result is measured."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    if cuda:
        import cupy

        runtime = cupy.cuda.runtime
        facts["device"] = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
        facts["driver"] = runtime.driverGetVersion()
        facts["cuda runtime"] = runtime.runtimeGetVersion()
    return facts


def commit() -> str:
    """Return the commit, from git or, in a copy without one, from the file carried along."""
    root = Path(__file__).parent.parent
    carried = root / "COMMIT"
    if carried.exists():
        return carried.read_text().strip()
    git = ["git", "-C", str(root)]
    describe = [*git, "describe", "--always", "--abbrev=12"]
    name = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    # Results that were written just now make no other program.
    paths = [".", ":!benchmarks/results", ":!docs/results.md"]
    diff = [*git, "diff", "--quiet", "HEAD", "--", *paths]
    dirty = subprocess.run(diff, capture_output=True, check=False).returncode
    return (name or "unknown") + "-dirty" * (dirty == 1)
