"""Calls of the public API, and the functions of the package that each enters once it is warm.

``python tests/golden/counted.py arrays cpu ranks stand-in`` or ``cuda`` runs groups of calls and
writes JSON: of each group the list of ``file:function`` that each call enters, in order.  A line
for each goes to stderr: how many calls, files and changes from file to file.  ``frames(call)``
lists those of any call.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
N, ENTRIES, FEAT, HEADS, WARM = 2000, 20000, 32, 4, 3
WIDE = 256  #: features that are enough work for numba's loops
_INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # since Python 3.12

Calls = dict[str, Callable[[], Any]]


def frames(call: Callable[[], Any]) -> list[str]:
    """Return ``file:function`` of each Python function of the package that a call enters."""
    import sparsefmt

    folder = f"{Path(sparsefmt.__file__).parent}/"
    result: list[str] = []

    def add(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and code.co_name not in _INLINED:
            result.append(f"{code.co_filename.removeprefix(folder)}:{code.co_qualname}")

    sys.setprofile(add)
    try:
        call()
    finally:
        sys.setprofile(None)
    return result


def summary(name: str, entered: list[str]) -> str:
    """Write how many calls, files, and changes from file to file there are."""
    files = [one.partition(":")[0] for one in entered]
    changes = sum(a != b for a, b in pairwise(files))
    return f"{name}: {len(files)} calls, {len(set(files))} files, {changes} changes"


def edges(xp: Any) -> Any:
    """Make random edges, and the matrix of them."""
    from sparsefmt import COO

    row, col = xp.asarray(np.random.default_rng(0).integers(0, N, (2, ENTRIES)))
    return row, col, COO(row, col, shape=(N, N)).tocsr()


def inputs(xp: Any) -> Any:
    """Make tensors and a graph of the edges."""
    import torch

    from sparsefmt import Graph, nn

    row, col, A = edges(xp)
    shapes = {"x": (N, FEAT), "weight": A.nnz, "edge_weight": ENTRIES, "attr": (ENTRIES, 3)}
    made = {name: torch.from_dlpack(xp.ones(shape, "float32")) for name, shape in shapes.items()}
    made["x"].requires_grad_()
    edge_index = torch.stack([torch.from_dlpack(col), torch.from_dlpack(row)])
    return nn, SimpleNamespace(graph=Graph(A), edge_index=edge_index, **made)


def of_arrays(xp: Any) -> Calls:
    """Return a product of arrays; ``sparsefmt.autograd``, which adds kernels, is not imported."""
    csr, X = edges(xp)[2], xp.ones((N, WIDE), "float32")
    return {"csr @ X": lambda: csr @ X}


def of_cpu(xp: Any) -> Calls:
    """Return layers of edges on the CPU."""
    nn, a = inputs(xp)
    gcn, gat = nn.GCNConv(FEAT, FEAT), nn.GATConv(FEAT, 8, heads=HEADS, edge_dim=3)
    return {
        "GCNConv of edges": lambda: gcn(a.x, a.edge_index, a.edge_weight),
        "GATConv, edge_attr": lambda: gat(a.x, a.edge_index, a.attr),
    }


def of_gpu(xp: Any) -> Calls:
    """Return functions and layers of a graph on a GPU."""
    from sparsefmt import autograd

    nn, a = inputs(xp)
    weight = a.weight.clone().requires_grad_()
    gcn, sage = nn.GCNConv(FEAT, FEAT).cuda(), nn.SAGEConv(FEAT, FEAT).cuda()
    gat, gatv2 = (one(FEAT, 8, heads=HEADS).cuda() for one in (nn.GATConv, nn.GATv2Conv))
    return {
        "spmm": lambda: autograd.spmm(a.graph, a.x),
        "spmm, edge_weight": lambda: autograd.spmm(a.graph, a.x, weight),
        "GCNConv": lambda: gcn(a.x, a.graph),
        "GCNConv, edge_weight": lambda: gcn(a.x, a.graph, a.weight),
        "GATConv": lambda: gat(a.x, a.graph),
        "GATv2Conv": lambda: gatv2(a.x, a.graph),
        "SAGEConv": lambda: sage(a.x, a.graph),
        "maxk_aggregate": lambda: autograd.maxk_aggregate(a.graph, a.x, 8),
        "sampled_aggregate": lambda: autograd.sampled_aggregate(a.graph, a.x, 8),
    }


def of_ranks(xp: Any) -> Calls:
    """Return a layer over two processes, of which the other one makes the same calls."""
    from torch import distributed

    from sparsefmt.distributed import DistGraph

    rank, half = int(os.environ["RANK"]), N // 2
    store = distributed.FileStore(os.environ["STORE"], 2)
    options = {"store": store, "world_size": 2, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", rank=rank, **options)
    nn, a = inputs(xp)
    graph = DistGraph(a.edge_index[:, a.edge_index[1] // half == rank], (0, half, N))
    sage, x = nn.SAGEConv(FEAT, FEAT), a.x[:half].detach().requires_grad_()
    return {"SAGEConv, DistGraph": lambda: sage(x, graph)}


GROUPS = {"arrays": of_arrays, "cpu": of_cpu, "ranks": of_ranks}


def counted(calls: Calls, finish: Callable[[], Any] = int) -> dict[str, list[str]]:
    """Return the frames of each call and of its backward, which runs in this thread."""
    result: dict[str, list[str]] = {}
    for name, call in calls.items():
        for _ in range(WARM):
            out = call()
            if hasattr(out, "backward"):
                out.backward(grad := out.new_ones(out.shape))
        finish()
        outs: list[Any] = []
        result[name] = frames(lambda call=call, outs=outs: outs.append(call()))
        if hasattr(outs[0], "backward"):
            with sys.modules["torch"].autograd.set_multithreading_enabled(False):
                back = frames(lambda out=outs[0], grad=grad: out.backward(grad))
            result[f"{name}, backward"] = back
    return result


def on_a_gpu() -> dict[str, list[str]]:
    """Count what runs on a GPU or its stand-in."""
    import cupy

    result = counted(of_arrays(cupy))
    calls = of_gpu(cupy)
    return result | counted(calls, sys.modules["torch"].cuda.synchronize)


def count(group: str) -> dict[str, list[str]]:
    """Return the frames of each call of a group."""
    if group == "ranks":
        folder = tempfile.TemporaryDirectory()
        os.environ["STORE"] = f"{folder.name}/store"
        other = os.fork()
        os.environ["RANK"] = str(int(other == 0))
    if group == "stand-in":
        import stand_in

        stand_in.install()
    result = on_a_gpu() if group in ("stand-in", "cuda") else counted(GROUPS[group](np))
    if group == "ranks":
        if other == 0:
            os._exit(0)
        os.waitpid(other, 0)
    return result


def main(*groups: str) -> None:
    """Run the calls of groups, each in a process of its own, and write their frames as JSON."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import_module("rare_loops").install_if_told()
    if "cuda" in groups:  # which does not survive a fork
        results = [*map(count, groups)]
    else:
        import_module("torch")  # once for all of them
        with get_context("fork").Pool(len(groups), maxtasksperchild=1) as pool:
            results = pool.map(count, groups, chunksize=1)
    for result in results:
        print(*(summary(*one) for one in result.items()), sep="\n", file=sys.stderr)
    json.dump(dict(zip(groups, results, strict=True)), sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
