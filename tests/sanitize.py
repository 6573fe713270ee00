"""compute-sanitizer's four tools over ``sanitize_cases.py``, its parts beside each other.

A first run without a tool compiles what the parts launch, which takes ten times as long under one.
Each part of a dtype is a process of its own; ``JOBS`` of them run at a time, all processors by
default. ``TOOLS`` names the tools to run, and ``SANITIZER`` is the command.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

SCRIPT = Path(__file__).with_name("sanitize_cases.py")
#: A part of the script and a dtype, the longest first.
PARTS = "pairwise_with_loops pairwise operations attention samples tiles formats".split()
CASES = (
    *product(PARTS, ("float32", "float64", "float16", "bfloat16")),
    *(("builds", "float32"), ("builds", "float64")),  # of indices of 4 and of 8 bytes
)
#: Of our kernels: CuPy's sorts beside them take minutes under the last two tools.
OURS = (
    *("spmm", "sddmm", "edge_softmax", "spgemm", "sspmm", "maxk", "cbsr", "gat_", "attend"),
    *("aggregate", "permuted", "gcn_", "sample", "edge_", "chunk_", "build_", "reached"),
)
ONLY_OURS = [word for name in OURS for word in ("--kernel-name", f"kns={name}")]
TOOLS: dict[str, list[str]] = {
    "memcheck": [],
    "initcheck": [],
    "racecheck": ONLY_OURS,
    "synccheck": ONLY_OURS,
}


class Run(NamedTuple):
    """What a process took, and what it printed if it failed."""

    case: str
    seconds: float
    failure: str


def main() -> int:
    """Run the parts without a tool, then under each tool; 1 if any of them found something."""
    jobs = int(os.environ.get("JOBS", os.cpu_count() or 1))
    chosen = os.environ.get("TOOLS", " ".join(TOOLS)).split()
    with ThreadPoolExecutor(jobs) as pool:
        plain = list(pool.map(lambda case: _run([], case), CASES))
        if not _report("no tool", plain):
            return 1
        # One queue for all tools: no processor waits for another tool's longest part.
        runs = {tool: [pool.submit(_run, _under(tool), case) for case in CASES] for tool in chosen}
        return int(not all([_report(tool, [run.result() for run in runs[tool]]) for tool in runs]))


def _report(tool: str, runs: list[Run]) -> bool:
    """Print what a tool found and how long its parts took; whether it found nothing."""
    slowest = max(runs, key=lambda run: run.seconds)
    total = sum(run.seconds for run in runs)
    print(f"== {tool}: {total:.0f} s of processes, {slowest.seconds:.0f} s {slowest.case}")
    failed = [run.failure for run in runs if run.failure]
    print(*failed, sep="\n", end="\n" * bool(failed), flush=True)
    return not failed


def _under(tool: str) -> list[str]:
    sanitizer = os.environ.get("SANITIZER", "compute-sanitizer")
    return [sanitizer, "--tool", tool, "--error-exitcode", "1", *TOOLS[tool]]


def _run(command: list[str], case: tuple[str, str]) -> Run:
    start = time.perf_counter()
    words = [*command, sys.executable, str(SCRIPT), *case]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    name, seconds = " ".join(case), time.perf_counter() - start
    if done.returncode == 0:
        return Run(name, seconds, "")
    printed = (done.stdout + done.stderr)[-8000:]
    return Run(name, seconds, f"{name}: exit {done.returncode}\n{printed}")


if __name__ == "__main__":
    sys.exit(main())
