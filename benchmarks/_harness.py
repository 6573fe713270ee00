"""Timing, memory and the JSON that results are kept in."""

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WARMUPS = 5
RUNS = 20


@dataclass(frozen=True)
class Row:
    """One measured case: the candidate against its baseline, medians in milliseconds."""

    case: str
    ms: float
    baseline: str
    baseline_ms: float | None
    limit: str
    extra: dict[str, Any]

    @property
    def ratio(self) -> float | None:
        """How many times faster than the baseline."""
        return None if self.baseline_ms is None else self.baseline_ms / self.ms


def alternate(
    candidate: Callable[[], Any],
    baseline: Callable[[], Any] | None,
    *,
    cuda: bool,
    runs: int = RUNS,
    warmups: int = WARMUPS,
) -> tuple[float, float | None]:
    """Medians of both in milliseconds, run in turn in one process on the same warm inputs."""
    functions = [candidate] if baseline is None else [candidate, baseline]
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(warmups + runs):
        for function, kept in zip(functions, times, strict=True):
            elapsed = _cuda_ms(function) if cuda else _wall_ms(function)
            if turn >= warmups:
                kept.append(elapsed)
    medians = [statistics.median(kept) for kept in times]
    return medians[0], medians[1] if baseline else None


def _wall_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed * 1e3


def _cuda_ms(function: Callable[[], Any]) -> float:
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    _sleep()  # the host runs ahead meanwhile, so that launches do not count
    start.record()
    result = function()
    stop.record()
    stop.synchronize()
    del result
    return float(cupy.cuda.get_elapsed_time(start, stop))


def _sleep(cycles: int = 400_000) -> None:
    """Keep the GPU busy for about 0.2 ms."""
    _spin()((1,), (1,), (cycles,))


@cache
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(
        """
        extern "C" __global__ void spin(long long cycles) {
            for (long long start = clock64(); clock64() - start < cycles;) {}
        }
        """,
        "spin",
    )


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


def machine(*, cuda: bool) -> dict[str, Any]:
    """Where and on what a result was measured."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
    }
    for package in ("numpy", "scipy", "numba", "cupy-cuda13x", "cupy-cuda12x"):
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


def _commit() -> str:
    """The commit, from git or, in a copy without one, from the file that was carried along."""
    root = Path(__file__).parent.parent
    carried = root / "COMMIT"
    if carried.exists():
        return carried.read_text().strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def report(name: str, rows: list[Row], *, cuda: bool, folder: Path | None = None) -> Path:
    """Print the rows as a table and write them, with the machine, as JSON."""
    print(f"{'case':34} {'ms':>9} {'baseline':>9} {'ratio':>6}  against")
    for row in rows:
        ratio = f"{row.ratio:6.2f}" if row.ratio else " " * 6
        base = f"{row.baseline_ms:9.3f}" if row.baseline_ms else " " * 9
        extra = "  ".join(f"{key} {value}" for key, value in row.extra.items())
        print(f"{row.case:34} {row.ms:9.3f} {base} {ratio}  {row.baseline}  {row.limit}  {extra}")
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{'gpu' if cuda else 'cpu'}.json"
    kept = {
        "machine": machine(cuda=cuda),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"wrote {path}")
    return path
