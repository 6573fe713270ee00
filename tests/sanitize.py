"""compute-sanitizer's four tools over ``sanitize_cases.py``, its parts beside each other.

A first run without a tool compiles what the parts launch, which takes ten times as long under one.
Each part of a dtype is a process of its own; ``JOBS`` of them run at a time, all processors by
default, and ``SANITIZER`` is the command.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

CASES = Path(__file__).with_name("sanitize_cases.py")
DTYPES = ("float32", "float64", "float16", "bfloat16")
PARTS = ("attention", "samples", "operations", "tiles", "formats")
#: Of our kernels: CuPy's sorts beside them take minutes under the last two tools.
OURS = (
    *("spmm", "sddmm", "edge_softmax", "spgemm", "sspmm", "maxk", "cbsr", "gat_", "attend"),
    *("aggregate", "permuted", "gcn_", "sample"),
)
ONLY_OURS = [word for name in OURS for word in ("--kernel-name", f"kns={name}")]
TOOLS: dict[str, list[str]] = {
    "no tool": [],
    "memcheck": [],
    "initcheck": [],
    "racecheck": ONLY_OURS,
    "synccheck": ONLY_OURS,
}


def main() -> int:
    """Run each tool over all parts; 1 at the first that finds something."""
    jobs = int(os.environ.get("JOBS", os.cpu_count() or 1))
    for tool, options in TOOLS.items():
        start = time.perf_counter()
        command = [] if tool == "no tool" else _under(tool, options)
        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(lambda case, c=command: _run(c, case), product(PARTS, DTYPES)))
        failed = [text for text in found if text]
        print(f"== {tool}: {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)
        if failed:
            return 1
    return 0


def _under(tool: str, options: list[str]) -> list[str]:
    sanitizer = os.environ.get("SANITIZER", "compute-sanitizer")
    return [sanitizer, "--tool", tool, "--error-exitcode", "1", *options]


def _run(command: list[str], case: tuple[str, str]) -> str:
    """What a process printed, if it failed."""
    words = [*command, sys.executable, str(CASES), *case]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return f"{' '.join(case)}: exit {done.returncode}\n{(done.stdout + done.stderr)[-8000:]}"


if __name__ == "__main__":
    sys.exit(main())
