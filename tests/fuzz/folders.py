"""Mutated files that are read with others, which stay valid: partitions, checkpoints, Planetoid.

They are as earlier releases wrote them, without checksums: what they say is looked at.
"""

import io
import json
import pickle
import tempfile
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

from sparsefmt.distributed import load_checkpoint, read_part, read_partition, save_checkpoint
from sparsefmt.distributed.job.checkpoint import restore
from sparsefmt.distributed.parts.cutting import write_partition
from sparsefmt.io import read_planetoid
from sparsefmt.reorder import Order

#: What a mutated file is, and where it lies among the others.
PLACES = {
    "json": "partition.json",
    "source": "part0/source.npy",
    "labels": "part0/labels.npy",
    "pt": "c.pt",
    "pkl": "c.pt",
    "allx": "ind.a.allx",
    "ty": "ind.a.ty",
    "index": "ind.a.test.index",
}
VERTICES = 6


@cache
def valid(ending: str) -> dict[str, bytes]:
    """Return the files of a valid folder in which one of this kind lies."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "a"
        if ending in ("pt", "pkl"):
            folder.mkdir()
            module, optimizer = model()
            save_checkpoint(folder / "c.pt", module, optimizer, epoch=7, facts={"graph": "a"})
            state = torch.load(folder / "c.pt", weights_only=True)
            del state["checksum"]
            torch.save(state, folder / "c.pt")
        elif PLACES[ending].startswith("part"):
            partition(folder)
        else:
            planetoid(folder)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def seed(ending: str) -> bytes:
    """Return the valid file of this kind."""
    raw = valid(ending)[PLACES[ending]]
    if ending == "pkl":
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            return archive.read(archive.namelist()[0])
    return raw


def partition(folder: Path) -> None:
    """Write a graph in two parts, as format 1."""
    ends = np.arange(VERTICES)
    write_partition(
        [(ends, ends[::-1], ends + 0.5)],
        folder,
        2,
        partitioner=lambda graph, parts: (Order(ends[::-1].copy()), (0, 3, VERTICES)),
        features=np.ones((VERTICES, 2)),
        labels=ends % 2,
        masks={"train": ends < 3},
    )
    header = json.loads((folder / "partition.json").read_text())
    del header["checksum"]
    (folder / "partition.json").write_text(json.dumps(header | {"format": 1}))


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model and its optimizer after a step."""
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer)
    return module, optimizer


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train for a step."""
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def planetoid(folder: Path) -> None:
    """Write a set of seven vertices, one of which no file but the graph has."""
    folder.mkdir()
    x, y = scipy.sparse.csr_matrix(np.eye(4, 3, dtype=np.float32)), np.eye(4, 2, dtype=np.int32)
    parts = {"x": x[:2], "allx": x, "tx": x[2:], "y": y[:2], "ally": y, "ty": y[:2]}
    parts["graph"] = {0: [1, 2], 1: [0], 2: [0, 2, 3], 3: [6, 6], 4: [0], 5: [], 6: [3]}
    for name, part in parts.items():
        (folder / f"ind.a.{name}").write_bytes(pickle.dumps(part, 2))
    (folder / "ind.a.test.index").write_text("6\n4\n")


def put(folder: Path, ending: str, content: bytes) -> None:
    """Write a mutated file among the valid ones; what others say about its bytes is right."""
    files = valid(ending)
    path = folder / PLACES[ending]
    if not path.exists():
        for name, raw in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
    if ending in ("source", "labels"):
        header = json.loads(files["partition.json"])
        more = len(content) - header["files"][PLACES[ending]][0]
        header["files"][PLACES[ending]] = [len(content), zlib.crc32(content)]
        header["files"][f"part1/{ending}.npy"][0] -= more  # so that edges are as many in all
        (folder / "partition.json").write_text(json.dumps(header))
    if ending == "pkl":
        with zipfile.ZipFile(io.BytesIO(files["c.pt"])) as old, zipfile.ZipFile(path, "w") as new:
            for place, name in enumerate(old.namelist()):
                new.writestr(name, old.read(name) if place else content)
    else:
        path.write_bytes(content)


def read(folder: Path, ending: str, max_bytes: int) -> str:
    """Read the folder, and check that what it gives fits together."""
    if ending in ("pt", "pkl"):
        path = folder / "c.pt"
        state = load_checkpoint(path, facts={"graph": "a"})
        module, optimizer = model()
        done = restore(path, state, module, optimizer)
        step(module, optimizer)
        assert done >= 0
        assert module.weight.shape == (1, 2)
        return "a checkpoint"
    if not PLACES[ending].startswith("part"):
        data = read_planetoid(folder, max_bytes=max_bytes)
        n = data.graph.shape[0]
        data.graph.check()
        assert {len(data.y), data.x.shape[0], len(data.train_mask), len(data.test_mask)} == {n}
        return f"a data set, {data.x.dtype}"
    facts = read_partition(folder)
    for rank in range(facts.parts if ending == "json" else 1):
        part, n = read_part(facts, rank), facts.bounds[rank + 1] - facts.bounds[rank]
        sources, targets = part.edge_index
        assert ((0 <= sources) & (sources < facts.vertices)).all()
        assert ((facts.bounds[rank] <= targets) & (targets < facts.bounds[rank + 1])).all()
        assert part.edge_weight is None or len(part.edge_weight) == len(sources)
        assert part.features is None or part.features.shape == (n, facts.width)
        assert part.labels is None or part.labels.shape == (n,)
        assert part.labels is None or part.labels.max(initial=-1) < facts.classes
    return f"a partition, {sorted(facts.dtypes.items())}"
