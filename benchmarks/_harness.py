"""Timing, targets and the JSON that results are kept in.

A ``Row`` is one case against one baseline (``report``).  Benchmarks of several sections keep their
cases as dicts instead, merged section by section into one file (``keep``).
"""

import datetime
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
WARMUPS = 5
RUNS = 20
#: Several times the L2 of any device so far.
FLUSH_BYTES = 1 << 28
#: How long the GPU spins before a timed call; what takes the host longer waits for it anyway.
LEAST_SPIN_MS, MOST_SPIN_MS = 0.2, 5.0
PACKAGES = ("numpy", "scipy", "numba", "torch", "torch-geometric")
#: Beyond it half as many runs do: what takes so long is a library's, and its spread is small.
LONG_MS = 50.0
SHORT_MS = 0.2


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


def _with_spread(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with the spreads of its medians by name, if it has any."""
    spreads = {name: value.spread for name, value in row.items() if isinstance(value, Median)}
    return row | {"spread": spreads} if spreads else row


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
    found = medians(functions, cuda=cuda, runs=runs, warmups=warmups)
    return found[0], found[1] if baseline else None


def medians(
    functions: list[Callable[[], Any]],
    *,
    cuda: bool,
    runs: int = RUNS,
    warmups: int = WARMUPS,
    flush: bool = False,
) -> list[float]:
    """Median of each in milliseconds; with ``flush`` each finds an empty L2.

    They take turns in a changing order: each finds in the L2 what the one before it left.
    On a GPU the last warm-up tells how long the host takes to launch each on an idle device.
    """
    times: list[list[float]] = [[] for _ in functions]
    spins = [LEAST_SPIN_MS for _ in functions]
    for _ in range(warmups):
        for at, function in enumerate(functions):
            spins[at] = spin_ms(_wall_ms(function))
            if cuda:
                _wait()
    turns, chance = list(range(len(functions))), random.Random(0)
    for _ in range(runs):
        chance.shuffle(turns)
        for at in turns:
            if flush:
                _flush()
            run = functions[at]
            times[at].append(_cuda_ms(run, spins[at]) if cuda else _wall_ms(run))
    return [Median.of(repeats) for repeats in times]


def paced(
    functions: list[Callable[[], Any]], *, cuda: bool, quick: bool = False
) -> tuple[list[float], int]:
    """Medians, and of how many runs: 20 after 5, but 10 after 3 where one takes over 50 ms.

    Of 60 where none takes 0.2 ms: what the one before left in the L2 is more of their time.
    """
    longest = max(medians(functions, cuda=cuda, runs=1, warmups=1))
    runs, warmups = (10, 3) if longest > LONG_MS else (RUNS, WARMUPS)
    if longest < SHORT_MS:
        runs = 3 * RUNS
    if quick:
        runs, warmups = 5, 1
    return medians(functions, cuda=cuda, runs=runs, warmups=warmups), runs


def _wall_ms(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed * 1e3


def spin_ms(host_ms: float) -> float:
    """How long the GPU is to be busy while the host launches what takes it so long."""
    return min(max(LEAST_SPIN_MS, 3 * host_ms), MOST_SPIN_MS)


def _cuda_ms(function: Callable[[], Any], spin_ms: float) -> float:
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


def _wait() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def _flush() -> None:
    """Fill the L2 with something else."""
    scratch = _scratch()
    scratch.data.memset_async(0, scratch.nbytes)


@cache
def _scratch() -> Any:
    import cupy

    return cupy.empty(FLUSH_BYTES, np.uint8)


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


@cache
def _spin() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


@cache
def copy_bandwidth() -> float:
    """Bytes read plus written in a second by the faster of two ways to copy a GiB, in GB/s."""
    import cupy

    source, target = cupy.zeros(1 << 28, np.float32), cupy.empty(1 << 28, np.float32)
    ways = [lambda: cupy.copyto(target, source), lambda: cupy.negative(source, out=target)]
    return 2 * source.nbytes / min(medians(ways, cuda=True)) / 1e6


def poison(array: Any) -> None:
    """Fill a CuPy array with NaN, whatever its floating dtype."""
    array.data.memset_async(0xFF, array.nbytes)


@contextmanager
def poisoned(*, cuda: bool) -> Iterator[None]:
    """Where every new CuPy array begins as NaN; nothing without ``cuda``."""
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
    """Hand unused memory of CuPy's and torch's pools back, so that the other may have it."""
    cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
    if cupy is not None and cupy.is_available():
        cupy.get_default_memory_pool().free_all_blocks()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine(*, cuda: bool) -> dict[str, Any]:
    """Where and on what a result was measured."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
    }
    for package in (*PACKAGES, "cupy-cuda13x", "cupy-cuda12x"):
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
    git = ["git", "-C", str(root)]
    command = [*git, "describe", "--always", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    # Results that were written just now make no other program.
    others = [".", ":!benchmarks/results", ":!docs/results.md"]
    dirty = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *others], check=False).returncode
    return (found.stdout.strip() or "unknown") + "-dirty" * (dirty == 1)


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
        "rows": [_with_spread(asdict(row)) | {"ratio": row.ratio} for row in rows],
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"wrote {path}")
    return path


# Sections: cases as dicts, judged and kept together


@dataclass(frozen=True)
class Target:
    """A figure over the cases of a section, and what it is to reach; without a limit: to know."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = True

    @property
    def ok(self) -> bool:
        """Whether the figure reaches its limit; a NaN reaches none."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        if self.limit is None:
            return f"{self.name}: {self.value:.3g}"
        sign = ">=" if self.at_least else "<="
        verdict = "ok" if self.ok else "MISSED"
        return f"{self.name}: {self.value:.3g} (target {sign} {self.limit:g}) {verdict}"


Judge = Callable[[list[dict[str, Any]]], list[Target]]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def print_row(row: dict[str, Any], columns: dict[str, str]) -> None:
    """One line: the columns by name with their formats (a width first), blank where missing."""
    print("  ".join(_cell(row.get(name), form) for name, form in columns.items()), flush=True)


def print_head(title: str, columns: dict[str, str]) -> None:
    """The section's title and the names of its columns."""
    print(f"\n== {title}")
    names = (f"{name:{_aligned(form)}}" for name, form in columns.items())
    print("  ".join(names), flush=True)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return f"{'':{_aligned(form)}}"
    return f"{value:{_aligned(form) if isinstance(value, str) else form}}"


def _aligned(form: str) -> str:
    """The format of a text as wide as a number of this format: ``"9.3f" -> ">9"``."""
    side = form[0] if form[0] in "<>" else ">"
    return side + form.lstrip("<>").rstrip("deEfg%").split(".")[0]


def keep(
    name: str,
    section: str,
    rows: list[dict[str, Any]],
    judge: Judge,
    *,
    cuda: bool,
    folder: Path | None = None,
) -> bool:
    """Print the section's figures against targets and merge it into ``<name>-<device>.json``.

    Rows are known by their ``case``.  Earlier ones of the same clean commit on the same device stay
    unless measured again; other sections stay as they are.  A row with ``wrong`` is not kept.

    Returns
    -------
    bool
        Whether no row is wrong.
    """
    right = [_with_spread(row) for row in rows if "wrong" not in row]
    wrong = [row for row in rows if "wrong" in row]
    for row in wrong:
        print(f"  WRONG, not reported: {row['case']}: {row['wrong']}")
    if not right:
        return False
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{'gpu' if cuda else 'cpu'}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    sections = kept.get("sections", {})
    here = machine(cuda=cuda)
    merged = _merged(sections.get(section), right, here)
    targets = judge(merged)
    if wrong:
        targets.append(Target("wrong cases, not reported", len(wrong), 0, at_least=False))
    for target in targets:
        print(f"  {target}")
    sections[section] = {
        "machine": here,
        "targets": [asdict(target) | {"ok": target.ok} for target in targets],
        "rows": merged,
    }
    path.write_text(json.dumps({"sections": sections}, indent=1) + "\n")
    print(f"  wrote {section} to {path}", flush=True)
    return not wrong


def _merged(
    earlier: dict[str, Any] | None, rows: list[dict[str, Any]], here: dict[str, Any]
) -> list[dict[str, Any]]:
    clean = here["commit"] != "unknown" and not here["commit"].endswith("-dirty")
    same = ("commit", "device", "cpu")
    if not earlier or not clean or any(earlier["machine"].get(k) != here.get(k) for k in same):
        return rows
    new = {row["case"] for row in rows}
    return [row for row in earlier["rows"] if row["case"] not in new] + rows
