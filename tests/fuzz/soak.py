"""Train each layer for thousands of steps, and see that nothing grows: ``make soak``.

Ten times in the first and ten times in the last thousand steps it counts what the process holds:
bytes that malloc has given out (arrays and tensors), blocks of Python's own allocator (objects),
resident memory, open files and threads; with ``--device cuda`` the bytes of torch's and CuPy's
pools too.  The counts are added up in place: a list of them would be a leak.
"""

import argparse
import ctypes
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.nn import Linear, Module, ReLU, Sequential

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from sparsefmt import COO, Graph, nn, read, write  # noqa: E402

#: Steps of a window and between its counts; the means of the first and the last are compared.
WINDOW, EVERY = 1000, 100
#: How far the last may lie above the first.
GROWTH = 0.01
#: Steps before the first count: what is compiled, imported or kept once is there then.
WARM = 300
VERTICES, EDGES, WIDTH = 12, 40, 8

Step = Callable[[], object]
LAYERS: dict[str, Callable[[], Module]] = {
    "AGNNConv": nn.AGNNConv,
    "GATConv": lambda: nn.GATConv(WIDTH, 4, heads=2, dropout=0.2),
    "GATv2Conv": lambda: nn.GATv2Conv(WIDTH, 4, heads=2, dropout=0.2),
    "GCNConv": lambda: nn.GCNConv(WIDTH, WIDTH),
    "GCNConv sampled": lambda: nn.GCNConv(WIDTH, WIDTH, training_sample=3),
    "GINConv": lambda: nn.GINConv(Sequential(Linear(WIDTH, WIDTH), ReLU())),
    "SAGEConv": lambda: nn.SAGEConv(WIDTH, WIDTH),
    "SAGEConv of MaxK": lambda: nn.SAGEConv(WIDTH, WIDTH, k=3),
    "MaxK": lambda: nn.MaxK(3),
}


def entries(rng: np.random.Generator) -> COO:
    """Give a small random matrix, in no order."""
    row, col = rng.integers(0, VERTICES, (2, EDGES)).astype(np.int32)
    return COO(row, col, shape=(VERTICES, VERTICES))


def training(layer: Module, device: str, graph: Callable[[], Graph]) -> Step:
    """Give a step: forward, backward and Adam on the graph that ``graph`` gives."""
    layer = layer.to(device)
    first = Linear(WIDTH, WIDTH).to(device)
    parameters = [*first.parameters(), *layer.parameters()]
    optimizer = torch.optim.Adam(parameters, capturable=device != "cpu")
    x = torch.randn(VERTICES, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        given = () if isinstance(layer, nn.MaxK) else (graph(),)
        layer(first(x), *given).square().mean().backward()
        optimizer.step()

    return step


def captured(step: Step) -> Step:
    """Give the replay of a CUDA graph of a step."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def layers(device: str) -> dict[str, Step]:
    """Every layer on one graph, in a CUDA graph on a GPU, and on a new graph at each step."""
    rng, found = np.random.default_rng(0), {}
    kept = Graph(entries(rng)).to(device)
    for name, make in LAYERS.items():
        step = training(make(), device, lambda: kept)
        found[name] = step if device == "cpu" else captured(step)
    for name in set(LAYERS) - {"MaxK"}:
        batches = training(LAYERS[name](), device, lambda: Graph(entries(rng)).to(device))
        found[f"{name}, new graphs"] = batches
    return dict(sorted(found.items()))


def formats(device: str, folder: Path) -> dict[str, Step]:
    """Conversions, and files that are written and read."""
    rng, made = np.random.default_rng(1), entries(np.random.default_rng(2))

    def convert() -> None:
        A = entries(rng).to(device)
        A.tocsr().tocsc().tosgt().tocoo().T.tocsr()[1:, ::2].toarray()

    names = itertools.cycle(["a.npz", "a.mtx", "a.csv.gz"])

    def files() -> None:
        path = folder / next(names)
        write(path, made)
        read(path)

    return {"conversions": convert, "files": files}


# What is counted


class _Heap(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def count(device: str, *, alone: bool = True) -> dict[str, float]:
    """What the process holds now, after a collection of cycles."""
    gc.collect()
    found = {
        "Python blocks": sys.getallocatedblocks(),
        "resident bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
    }
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Heap
        heap = libc.mallinfo2()
        found["malloc bytes"] = heap.uordblks + heap.hblkhd
    if device != "cpu":
        import cupy

        torch.cuda.synchronize()
        found["torch bytes"] = torch.cuda.memory_allocated()
        found["torch reserved"] = torch.cuda.memory_reserved()
        found["CuPy bytes"] = cupy.get_default_memory_pool().used_bytes()
        if alone:  # it tells of all processes
            free, total = torch.cuda.mem_get_info()
            found["device bytes"] = total - free
    return found


def soaked(
    step: Step, steps: int, device: str, *, alone: bool
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Give milliseconds a step, and the means of the first and of the last window."""
    for _ in range(WARM):
        step()
    names, spent = list(count(device, alone=alone)), 0.0
    sums = np.zeros((2, len(names)))
    for at in range(steps):
        if at % EVERY == 0 and (at < WINDOW or at >= steps - WINDOW):
            sums[int(at >= WINDOW)] += list(count(device, alone=alone).values())
        begin = time.perf_counter()
        step()
        spent += time.perf_counter() - begin
    first, last = (sums / (WINDOW // EVERY)).tolist()
    return spent / steps * 1e3, dict(zip(names, zip(first, last, strict=True), strict=True))


def grown(means: dict[str, tuple[float, float]]) -> list[str]:
    """Name what lies higher in the last window than is allowed; files and threads by one."""
    return [
        f"{name} grew from {first:.0f} to {last:.0f}"
        for name, (first, last) in means.items()
        if last > first * (1 + GROWTH) + (0.5 if name in ("files", "threads") else 0)
    ]


def main() -> int:
    """Soak each case, print a line for each, and give how many grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="2000 or more")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, each a process")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.steps < 2 * WINDOW:
        parser.error(f"--steps is {given.steps}: give {2 * WINDOW} or more, two windows.")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = layers(given.device) | formats(given.device, Path(folder))
        names = [given.case] if given.case else [name for name in cases if given.only in name]
        if given.jobs > 1:
            with ThreadPoolExecutor(given.jobs) as pool:
                worst = sum(pool.map(lambda name: in_process(name, given), names))
        else:
            worst = sum(held(name, cases[name], given) for name in names)
    if not given.case:
        print("flat" if not worst else f"{worst} of {len(names)} cases grow")
    return worst


def in_process(name: str, given: argparse.Namespace) -> bool:
    """Soak a case in a process of its own; whether it grew, or failed."""
    options = f"--steps={given.steps}", f"--device={given.device}", f"--case={name}"
    return subprocess.run([sys.executable, __file__, *options], check=False).returncode != 0


def held(name: str, step: Step, given: argparse.Namespace) -> bool:
    """Soak a case and print what a step of it keeps; whether it grew."""
    ms, means = soaked(step, given.steps, given.device, alone=not given.case)
    steps = given.steps - WINDOW
    kept = {key: (last - first) / steps for key, (first, last) in means.items() if last != first}
    told = ", ".join(f"{key} {value:+.3f}" for key, value in kept.items())
    lines = [f"{name}: {ms:.2f} s a 1000 steps; a step keeps {told or 'nothing'}"]
    faults = grown(means)
    print("\n  ".join([*lines, *faults]), flush=True)
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main())
