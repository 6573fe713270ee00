"""The first training step of a fresh process, from a wheel, with empty caches and with warm ones.

A wheel of this checkout is installed into a folder of its own, and each run is a process in an
empty directory that finds it there.  The clock starts when torch is imported, with the part that
its Adam imports at first use, and stops when a step of a model of two layers is done: imports, the
graph, forward, loss, backward, Adam; on a GPU its context too.  PyG's layers and a model of linear
layers alone do the same, in one run each, since no target is about them.  Ours and PyG's have the
same weights: their losses must agree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import _harness
from .._harness import Target

ROOT = Path(__file__).resolve().parents[2]
#: Vertices, edges, features and classes.
SIZES = {"small": (1_000, 8_000, 64, 7), "pubmed": (19_717, 88_648, 500, 3)}
LAYERS = ("gcn", "sage", "gat")
OURS = "cold", "warm"
WAYS = *OURS, "pyg", "dense"
RUNS = 3  # of ours
#: Most seconds: with empty caches by device, and with warm ones.
COLD = {"cpu": {"gcn": 2.5, "sage": 2.5, "gat": 5.0}, "cuda": dict.fromkeys(LAYERS, 6.0)}
WARM = {"gcn": 0.5, "sage": 0.5, "gat": 1.0}
COLUMNS = {"case": "<16", **dict.fromkeys(WAYS, "8.2f"), "torch": "8.2f", "compiles": ">9"}
STEP = """
import json, sys, time
before = time.perf_counter()
import torch, torch._dynamo
start = time.perf_counter()
way, layer, device, n, edges, feat, classes = sys.argv[1:4] + [int(text) for text in sys.argv[4:]]
torch.manual_seed(0)
edge_index = torch.randint(0, n, (2, edges))
x, y = torch.randn(n, feat), torch.randint(0, classes, (n,))
keep = edge_index[0] != edge_index[1]
edge_index = edge_index[:, keep]
given = time.perf_counter() - start
x, y, graph = x.to(device), y.to(device), edge_index.to(device)
if way == "pyg":
    import torch_geometric.nn as nn
elif way == "ours":
    import sparsefmt
    from sparsefmt import nn
if way == "dense":
    layers = torch.nn.Linear(feat, 16), torch.nn.Linear(16, classes)
elif layer == "gat":
    layers = nn.GATConv(feat, 8, heads=8), nn.GATConv(64, classes, concat=False)
else:
    kind = nn.GCNConv if layer == "gcn" else nn.SAGEConv
    layers = kind(feat, 16), kind(16, classes)
torch.manual_seed(1)
for _, weights in sorted(torch.nn.ModuleList(layers).named_parameters()):
    torch.nn.init.normal_(weights, std=0.1)
model = torch.nn.ModuleList(layers).to(device)
optimizer = torch.optim.Adam(model.parameters())
if way == "ours":
    graph = sparsefmt.Graph.from_edge_index(graph, num_nodes=n)
more = () if way == "dense" else (graph,)
hidden = torch.relu(model[0](x, *more))
loss = torch.nn.functional.cross_entropy(model[1](hidden, *more), y)
loss.backward()
optimizer.step()
if device == "cuda":
    torch.cuda.synchronize()
taken = time.perf_counter() - start - given
print(json.dumps({"seconds": taken, "torch": start - before, "loss": float(loss),
                  "compiles": "numba" in sys.modules and way == "ours"}))
"""


def first_step(options: argparse.Namespace) -> bool:
    """Measure each layer at each size, and tell whether all losses were right."""
    cuda = options.device == "cuda"
    _harness.print_head("seconds to the end of the first step, beyond torch's import", COLUMNS)
    rows = []
    with _installed() as place:
        for size in list(SIZES)[: 1 if options.quick else None]:
            for layer in LAYERS:
                row = _row(place, layer, size, options.device, 1 if options.quick else RUNS)
                rows.append(row)
                _harness.print_row(row, COLUMNS)
    return _harness.keep("wallclock", "first_step", rows, judge, cuda=cuda, folder=options.out)


@contextmanager
def _installed() -> Iterator[Path]:
    """Install a wheel of this checkout into a folder, which goes with the context."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        options = ["--no-deps", "--no-build-isolation", "--target", str(place / "installed")]
        subprocess.run([*pip, "install", *options, str(ROOT)], check=True)
        (place / "empty").mkdir()
        yield place


def _row(place: Path, layer: str, size: str, device: str, runs: int) -> dict[str, Any]:
    """Take the ways in turn: a cache that is new for each cold run, then the same one again."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    arguments = [layer, device, *map(str, SIZES[size])]
    for run in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            for way in OURS if run else WAYS:
                kind = way if way in ("pyg", "dense") else "ours"
                found[way].append(_run(place, cache, [kind, *arguments]))
    row: dict[str, Any] = {"case": f"{layer} {size}", "layer": layer, "device": device}
    for way, each in found.items():
        row[way] = statistics.median(one["seconds"] for one in each)
    row["torch"] = statistics.median(one["torch"] for way in WAYS for one in found[way])
    row["compiles"] = "yes" if found["cold"][0]["compiles"] else "nothing"
    ours, theirs = found["cold"][0]["loss"], found["pyg"][0]["loss"]
    if not abs(ours - theirs) <= 1e-4 * abs(theirs):
        row["wrong"] = f"a loss of {ours} where PyG has {theirs}"
    return row


def _run(place: Path, cache: str, arguments: list[str]) -> dict[str, Any]:
    """Run one process in an empty directory; what it has printed."""
    caches = {"NUMBA_CACHE_DIR": cache, "CUPY_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", STEP, *arguments],
        cwd=place / "empty",
        env=os.environ | caches | {"PYTHONPATH": str(place / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a step of {arguments} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(rows: list[dict[str, Any]]) -> list[Target]:
    """Seconds with empty caches and with warm ones."""
    found = []
    for row in rows:
        layer, device = row["layer"], row["device"]
        for way, most in (("cold", COLD[device][layer]), ("warm", WARM[layer])):
            found.append(Target(f"{row['case']}, {way}, s", row[way], most, at_least=False))
    return found
