"""Calls of the public API, and the functions of the package that each enters once it is warm.

``python tests/golden/counted.py cpu|arrays|ranks|stand-in|cuda [NAME]`` runs those of one group, or
one of them, and writes JSON: of each the list of ``file:function``, in the order of the calls.  A
line for each goes to stderr: how many calls, files and changes from file to file.
``frames(call)`` lists those of any call.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
N, ENTRIES, FEAT, HEADS = 2000, 20000, 32, 4
WIDE = 256  #: features of so many multiply-adds that numba's loops take them
WARM = 3
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


def sizes(entered: list[str]) -> tuple[int, int, int]:
    """Count calls, files, and changes from file to file."""
    files = [one.partition(":")[0] for one in entered]
    changes = sum(a != b for a, b in pairwise(files))
    return len(files), len(set(files)), changes


class Inputs:
    """One random graph on the CPU or a GPU, and what calls take beside it."""

    def __init__(self, xp: Any) -> None:
        import torch

        from sparsefmt import Graph
        from sparsefmt.interop.torch import to_tensor

        row, col, A = random_csr(xp)
        self.graph, self.edge_index = Graph(A), torch.stack([to_tensor(col), to_tensor(row)])
        self.x = numbers(xp, N, FEAT).requires_grad_()
        self.weight = numbers(xp, A.nnz)
        self.edge_weight, self.edge_attr = numbers(xp, ENTRIES), numbers(xp, ENTRIES, 3)


def random_csr(xp: Any) -> Any:
    """Make random edges, and the matrix of them."""
    import numpy as np

    from sparsefmt import COO

    make = np.random.default_rng(0)
    row, col = (xp.asarray(make.integers(0, N, ENTRIES, dtype=np.int64)) for _ in range(2))
    return row, col, COO(row, col, shape=(N, N)).tocsr()


def numbers(xp: Any, *shape: int) -> Any:
    """Make a tensor of random numbers."""
    import numpy as np

    from sparsefmt.interop.torch import to_tensor

    return to_tensor(xp.asarray(np.random.default_rng(1).random(shape, np.float32))).clone()


def of_arrays(xp: Any) -> Calls:
    """Return a product of arrays; ``sparsefmt.autograd``, which adds kernels, is not imported."""
    csr, X = random_csr(xp)[2], xp.asarray(xp.ones((N, WIDE), "float32"))
    return {"csr @ X": lambda: csr @ X}


def of_cpu(xp: Any) -> Calls:
    """Return layers of edges on the CPU."""
    from sparsefmt import nn

    a = Inputs(xp)
    gcn, gat = nn.GCNConv(FEAT, FEAT), nn.GATConv(FEAT, 8, heads=HEADS, edge_dim=3)
    return {
        "GCNConv of edges": lambda: gcn(a.x, a.edge_index, a.edge_weight),
        "GATConv, edge_attr": lambda: gat(a.x, a.edge_index, a.edge_attr),
    }


def of_gpu(xp: Any) -> Calls:
    """Return functions and layers of a graph on a GPU."""
    from sparsefmt import autograd, nn

    a = Inputs(xp)
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
    """Return a layer over two processes: the other one makes the same calls."""
    import torch
    from torch import distributed

    from sparsefmt import nn
    from sparsefmt.distributed import DistGraph

    rank, half = int(os.environ["RANK"]), N // 2
    store = distributed.FileStore(os.environ["STORE"], 2)
    options = {"store": store, "world_size": 2, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", rank=rank, **options)
    edge_index = Inputs(xp).edge_index
    mine = edge_index[:, edge_index[1] // half == rank]
    graph, sage = DistGraph(mine, (0, half, N)), nn.SAGEConv(FEAT, FEAT)
    x = torch.ones(half, FEAT, requires_grad=True)
    return {"SAGEConv, DistGraph": lambda: sage(x, graph)}


GROUPS = {"cpu": of_cpu, "arrays": of_arrays, "ranks": of_ranks}


def counted(calls: Calls, finish: Callable[[], Any]) -> dict[str, list[str]]:
    """Return the frames of each call and of its backward."""
    result: dict[str, list[str]] = {}
    for name, call in calls.items():
        for _ in range(WARM):
            out = call()
            if hasattr(out, "backward"):
                out.backward(out.new_ones(out.shape))
        finish()
        outs: list[Any] = []
        result[name] = frames(lambda call=call, outs=outs: outs.append(call()))
        if hasattr(outs[0], "backward"):
            result[f"{name}, backward"] = frames_of_backward(outs[0])
    return result


def frames_of_backward(out: Any) -> list[str]:
    """Return the frames of a backward, which runs in this thread."""
    import torch

    grad = torch.ones_like(out)
    with torch.autograd.set_multithreading_enabled(False):
        return frames(lambda: out.backward(grad))


def main(group: str, only: str = "") -> None:
    """Run the calls of a group and write their frames as JSON."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    folder, finish = tempfile.TemporaryDirectory(), lambda: None
    other = None
    if group == "ranks":
        os.environ["STORE"] = f"{folder.name}/store"
        other = os.fork()
        os.environ["RANK"] = str(int(other == 0))
    if group == "stand-in":
        import stand_in

        stand_in.install()
    if group in ("stand-in", "cuda"):
        import cupy as xp

        result = counted(of_arrays(xp), finish)
        import torch

        result |= counted(of_gpu(xp), torch.cuda.synchronize)
    else:
        import numpy as xp

        result = counted(GROUPS[group](xp), finish)
    if other == 0:
        os._exit(0)
    if other is not None:
        os.waitpid(other, 0)
    result = {name: entered for name, entered in result.items() if only in ("", name)}
    for name, entered in result.items():
        text = "{}: {} calls, {} files, {} changes".format(name, *sizes(entered))
        print(text, file=sys.stderr)
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
