"""The first training step of a fresh process: a section of ``wallclock``.

A wheel of this checkout is installed into a folder of its own, and each run is a process in an
empty directory that finds it there.  The clock stops when a step of a model of two layers is done:
imports but torch's, the graph, forward, loss, backward, Adam; on a GPU its context too.  PyG's
layers do the same from the same weights, whose losses must agree; linear maps alone are the floor.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _oracle
from ._table import ROOT, Row

SIZES = {"small": (1_000, 8_000, 64, 7), "pubmed": (19_717, 88_648, 500, 3)}
#: Most seconds: with empty caches by device, and with warm ones.
COLD: dict[str, dict[str, float]] = {
    "cpu": {"gcn": 2.5, "sage": 2.5, "gat": 5.0},
    "cuda": {"gcn": 6.0, "sage": 6.0, "gat": 6.0},
}
WARM = {"gcn": 0.5, "sage": 0.5, "gat": 1.0}
#: The clock starts when torch is imported, with the part that its Adam imports at first use.
STEP = """
import json, sys, time
import torch, torch._dynamo
start = time.perf_counter()
way, layer, device, n, edges, feat, classes = sys.argv[1:4] + [int(text) for text in sys.argv[4:]]
torch.manual_seed(0)
edge_index = torch.randint(0, n, (2, edges))
x, y = torch.randn(n, feat), torch.randint(0, classes, (n,))
graph = edge_index[:, edge_index[0] != edge_index[1]]
drawn = time.perf_counter() - start
x, y, graph = x.to(device), y.to(device), graph.to(device)
if way == "pyg":
    import torch_geometric.nn as nn
elif way == "ours":
    import sparsefmt
    from sparsefmt import nn
if way == "floor":
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
more = [graph] * (way != "floor")
loss = torch.nn.functional.cross_entropy(model[1](torch.relu(model[0](x, *more)), *more), y)
loss.backward()
optimizer.step()
if device == "cuda":
    torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - start - drawn, "loss": float(loss)}))
"""


def first_step(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each layer at each size, from a wheel of this checkout in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        flags = ["--no-deps", "--no-build-isolation", "--target", str(place / "installed")]
        subprocess.run([*pip, *flags, str(ROOT)], check=True)
        (place / "empty").mkdir()
        for size, numbers in [*SIZES.items()][: 1 if options.quick else None]:
            for layer in [*WARM][: 1 if options.quick else None]:
                arguments = [layer, options.device, *map(str, numbers)]
                runs: dict[str, list[Any]] = {"cold": [], "warm": []}
                for _ in range(1 if options.quick else 3):
                    with tempfile.TemporaryDirectory() as cache:
                        for each in runs.values():
                            each.append(_process(place, cache, ["ours", *arguments]))
                theirs = _process(place, folder, ["pyg", *arguments])
                error = abs(runs["cold"][0]["loss"] / theirs["loss"] - 1)
                row: Row = {"case": f"{layer} {size}", "layer": layer, "error": error}
                for way, each in runs.items():
                    row[f"{way}_s"] = statistics.median(one["seconds"] for one in each)
                row["pyg_s"] = theirs["seconds"]
                row["floor_s"] = _process(place, folder, ["floor", *arguments])["seconds"]
                yield row | _oracle.refused(_oracle.over(row["error"], 1e-4))


def _process(place: Path, cache: str, arguments: list[str]) -> Any:
    """Run one process in an empty directory, and return what it has printed."""
    more = {"NUMBA_CACHE_DIR": cache, "CUPY_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", STEP, *arguments],
        cwd=place / "empty",
        env=os.environ | more | {"PYTHONPATH": str(place / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a step of {arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])
