"""A graph to train on, and what ranks of the pool train."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dist_cases import here, said_of

from sparsefmt import COO
from sparsefmt.distributed.graph import DistGraph
from sparsefmt.distributed.job.options import Options
from sparsefmt.distributed.job.training import Training
from sparsefmt.distributed.parts.cutting import write_partition
from sparsefmt.distributed.parts.files import read_partition

N, CLASSES = 80, 4
#: Python's arguments for a training that is the same on any number of ranks.
COMMAND = [
    *("-m", "sparsefmt.distributed.train"),
    *"--hidden 8 --layers 2 --dropout 0 --dtype float64 --every 1 --device cpu".split(),
]


def write_parts(folder: Path, parts: int, *, weighted: bool = False, by: Any = "balanced") -> Path:
    """A small graph with labels that the features tell, and a rank without labelled vertices."""
    draw = np.random.default_rng(0)
    ends = draw.integers(0, N, (2, 500))
    labels = draw.integers(0, CLASSES, N)
    labels[::5] = -1
    weight = draw.random(500) if weighted else None
    features = np.eye(CLASSES + 1)[labels] + draw.normal(size=(N, CLASSES + 1))
    train = draw.random(N) < 0.5
    train[-30:] = False
    graph = COO(ends[1], ends[0], weight, shape=(N, N))
    masks = {"train": train, "test": ~train}
    write_partition(
        graph, folder, parts, partitioner=by, features=features, labels=labels, masks=masks
    )
    return folder


def options_of(**changed: Any) -> Options:
    """Options of a training that is the same on any number of ranks."""
    given = {"hidden": 8, "layers": 2, "k": 4, "heads": 2, "epochs": 6, "every": 2}
    return Options(**{**given, "dropout": 0.0, "dtype": "float64", **changed})


def loaded(group: Any, folder: Path) -> tuple[list[list[int]], tuple[int, ...], int]:
    """Edges that a rank has in its graph, the bounds of ranks, and its rank."""
    graph = DistGraph.load(folder, group, device=here(), weights=False)
    coo = graph.local.structure.tocoo().to("cpu")
    own = torch.arange(*graph.bounds[graph.rank :][:2])
    numbers = torch.cat([own, graph.halo.vertices.cpu()]).numpy()
    return [numbers[coo.col].tolist(), coo.row.tolist()], graph.bounds, graph.rank


def loaded_to_no_device(group: Any, folder: Path) -> tuple[str, str]:
    """What is said where the second rank loads its part to a device that there is not."""
    device = "nowhere" if dist.get_rank(group) == 1 else here()
    return said_of(lambda: DistGraph.load(folder, group, device=device, weights=False))


def sent(group: Any, folder: Path, changed: dict[str, Any]) -> list[tuple[int, int]]:
    """Exchanges and bytes of each of three steps of a training."""
    training = Training(read_partition(folder), options_of(**changed), group, here())
    traffic, found = training.graph.halo.traffic, []
    for epoch in range(3):
        before = traffic.exchanges, traffic.nbytes
        training.step(epoch)
        found.append((traffic.exchanges - before[0], traffic.nbytes - before[1]))
    return found


def losses(group: Any, folder: Path, changed: dict[str, Any]) -> list[float]:
    """Losses of the epochs that are trained."""
    training = Training(read_partition(folder), options_of(**changed), group, here())
    return training.run()
