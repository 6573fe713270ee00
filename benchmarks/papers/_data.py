"""Labelled graphs: the published data sets from folders, and graphs planted at their sizes.

A planted graph has a class for each community, drawn at random, and features that are the centre of
the community under noise, so that neighbours help.  Some labels are wrong, which bounds what any
model reaches.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sparsefmt
from sparsefmt import CSR, Graph
from sparsefmt.generate import power_law_with_labels

from .. import _baselines, _graphs

#: Files with labels in ``--data``, in the format of this project's own real graphs.
REAL = (
    *("cora", "citeseer", "chameleon", "actor", "amazon_computers", "musae_facebook"),
    *("tolokers", "minesweeper"),
)
#: Folders of ``--data`` that torch-geometric reads, by the name of its class.
OF_PYG = {"reddit": "Reddit", "flickr": "Flickr", "yelp": "Yelp"}
#: Folders of OGB, and those of their splits.
OF_OGB = {
    "arxiv": ("ogbn_arxiv", "time"),
    "products": ("ogbn_products", "sales_ranking"),
    "proteins": ("ogbn_proteins", "species"),
}
#: Metrics of data sets that are not judged by accuracy.
METRICS = {"tolokers": "roc_auc", "minesweeper": "roc_auc", "proteins": "roc_auc", "yelp": "f1"}


@dataclass(frozen=True)
class Planted:
    """The classes of a planted graph, and how strongly communities show in features.

    With ``tasks`` each vertex has so many labels of two classes instead.
    """

    classes: int
    strength: float
    wrong: float  #: share of labels that say nothing
    tasks: int = 0


PLANTED = {
    "small": Planted(4, 0.5, 0.05),
    "cpu": Planted(10, 0.8, 0.05),
    "arxiv": Planted(40, 1.0, 0.25),
    "flickr": Planted(7, 0.6, 0.4),
    "reddit": Planted(41, 0.9, 0.03),  # features alone: 60 %, 58.5 published (GraphSAGE, table 1)
    "products": Planted(47, 0.9, 0.1),
    "proteins": Planted(2, 0.35, 0.15, tasks=112),
    "yelp": Planted(2, 0.8, 0.15, tasks=100),
}


@dataclass(frozen=True)
class Labelled:
    """A graph with features, labels and splits; ``origin`` is "file" or "planted".

    ``y`` holds the class of each vertex, -1 where it has none, or (n, tasks) zeros and ones.
    """

    name: str
    origin: str
    A: CSR
    x: Tensor
    y: Tensor
    splits: tuple[tuple[Tensor, ...], ...]  #: masks of training, validation and test
    metric: str

    @cached_property
    def graph(self) -> Graph:
        """The graph for layers."""
        return Graph(self.A)

    @property
    def outputs(self) -> int:
        """Numbers that a model returns for each vertex."""
        return self.y.shape[1] if self.y.dim() == 2 else int(self.y.max()) + 1


def labelled(
    options: argparse.Namespace, planted: tuple[str, ...], real: tuple[str, ...] = REAL
) -> Iterator[Labelled]:
    """Yield the data sets asked for, else these: of files where ``--data`` has them."""
    planted = planted if options.device == "cuda" else ("cpu",)
    names = options.graphs or (("small",) if options.quick else (*real, *planted))
    for name in names:
        found = of_files(name, options.data, options.device)
        if found is None and name in PLANTED:
            found = plant(name, options.device)
        if found is None:
            print(f"  {name} skipped: {options.data} has no such data set", flush=True)
        else:
            yield found


def of_files(name: str, folder: Path, device: str) -> Labelled | None:
    """Read a data set of that name from a folder; None if it is not there."""
    if (path := folder / f"{name}.npz").exists():
        with np.load(path) as arrays:
            if "y" not in arrays:
                return None
            return of_npz(name, path, dict(arrays), device)
    if name in OF_PYG and (folder / OF_PYG[name]).is_dir():
        return of_pyg(name, folder / OF_PYG[name], device)
    if name in OF_OGB and (folder / OF_OGB[name][0]).is_dir():
        return of_ogb(name, folder / OF_OGB[name][0], OF_OGB[name][1], device)
    return None


def of_npz(name: str, path: Path, arrays: dict[str, Any], device: str) -> Labelled:
    """Make a data set of the arrays of one file of ours."""
    A = sparsefmt.read(path).tocsr().with_data(None)
    if "x" in arrays:
        x = arrays["x"].astype(np.float32)
    else:
        ptr, columns, values = (arrays[f"x_{part}"] for part in ("indptr", "indices", "data"))
        X = CSR(ptr, columns, values.astype(np.float32), shape=tuple(arrays["x_shape"].tolist()))
        x = X.toarray()
    suffix = "masks" if "train_masks" in arrays else "mask"
    masks = [arrays[f"{part}_{suffix}"] for part in PARTS]
    splits = zip(*map(np.atleast_2d, masks), strict=True)
    return _made(name, A, scaled(x), arrays["y"], splits, device)


PARTS = ("train", "val", "test")


def of_pyg(name: str, folder: Path, device: str) -> Labelled:
    """Read a folder of torch-geometric's, with its raw files or what it has made of them."""
    from torch_geometric import datasets

    data = getattr(datasets, OF_PYG[name])(str(folder))[0]
    A = _square(data.edge_index.numpy(), data.num_nodes)
    split = [getattr(data, f"{part}_mask").numpy() for part in PARTS]
    return _made(name, A, scaled(data.x.numpy()), data.y.numpy(), [split], device)


def of_ogb(name: str, folder: Path, split: str, device: str) -> Labelled:
    """Read a folder of OGB's node-property data sets, in its CSV files."""
    raw, read = folder / "raw", partial(np.loadtxt, delimiter=",", ndmin=2)
    y = read(raw / "node-label.csv.gz")
    n, edges = len(y), read(raw / "edge.csv.gz", dtype=np.int64).T
    edges = np.concatenate([edges, edges[::-1]], 1)  # files have one direction of each
    if (raw / "node-feat.csv.gz").exists():
        x = read(raw / "node-feat.csv.gz", dtype=np.float32)
    else:  # proteins have features of edges: their mean
        features = read(raw / "edge-feat.csv.gz", dtype=np.float32)
        x = np.stack([np.bincount(edges[1], np.tile(column, 2), n) for column in features.T], 1)
        x = (x / np.bincount(edges[1], minlength=n).clip(1)[:, None]).astype(np.float32)
    masks = [np.zeros(n, bool) for _ in PARTS]
    for mask, part in zip(masks, ("train", "valid", "test"), strict=True):
        mask[read(folder / "split" / split / f"{part}.csv.gz", dtype=np.int64)[:, 0]] = True
    return _made(name, _square(edges, n), x, y if y.shape[1] > 1 else y[:, 0], [masks], device)


def plant(name: str, device: str, *, seed: int = 0) -> Labelled:
    """Draw a graph of a paper's size, with labels that its communities have."""
    recipe, planted = _graphs.RECIPES[name], PLANTED[name]
    law = recipe.exponent, recipe.inside, recipe.community, seed, device
    A, community = power_law_with_labels(recipe.nodes, recipe.edges, *law)
    community = _baselines.tensor(community).long()
    torch.manual_seed(seed)
    draw = partial(torch.randn, device=community.device)
    count, feat = int(community.max()) + 1, _graphs.FEATURES.get(name, _graphs.OTHER_FEATURES)
    x = draw(count, feat)[community] * (planted.strength / feat**0.5 * 4) + draw(recipe.nodes, feat)
    shape = (count, planted.tasks) if planted.tasks else (count,)
    y = torch.randint(planted.classes, shape, device=x.device)[community]
    other = torch.randint(planted.classes, y.shape, device=x.device)
    y = torch.where(torch.rand(y.shape, device=x.device) < planted.wrong, other, y)
    part = torch.rand(recipe.nodes, device=x.device)
    split = part < 0.6, (part >= 0.6) & (part < 0.8), part >= 0.8
    metric = METRICS.get(name, "accuracy")
    return Labelled(name, "planted", A.tocsr().sorted_indices(), x, y, (split,), metric)


def scaled(x: Any) -> Any:
    """Center features and divide them by their spread; many of words, by that of all of them."""
    if x.shape[1] > 100 and (x >= 0).all():
        return x / np.sqrt(np.mean(np.square(x), dtype=np.float64))
    return (x - x.mean(0)) / (x.std(0) + 1e-9)


def _square(edges: Any, n: int) -> CSR:
    """Build the graph whose rows are targets."""
    row, col = edges[1].astype(np.int32), edges[0].astype(np.int32)
    return sparsefmt.COO(row, col, shape=(n, n)).tocsr().sorted_indices()


def _made(name: str, A: CSR, x: Any, y: Any, splits: Any, device: str) -> Labelled:
    """Bring what was read onto the device."""
    target = torch.from_numpy(y).to(device, torch.long)
    masks = tuple(tuple(torch.from_numpy(mask).to(device) for mask in split) for split in splits)
    features = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(device)
    metric = METRICS.get(name, "accuracy")
    return Labelled(name, "file", A.to(device), features, target, masks, metric)
