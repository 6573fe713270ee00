"""Graphs in an order of their vertices, whole on one device and shared out among ranks.

Each process generates the same graph on its own device, of one seed, and keeps its rows: quicker
than to hand it over.  That all have the same is checked.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsefmt import CSR, Graph, reorder
from sparsefmt.distributed import DistGraph, balanced
from sparsefmt.formats.arrays import namespace
from sparsefmt.interop.torch import to_tensor

from .. import _graphs, _harness
from .ranks import Ranks

#: Features and classes of the papers' graphs; of others as of products.
SIZES = {"reddit": (602, 41), "products": (100, 47)}
#: "shuffled" are ids as generated; "community" those of ``reorder.community_order``.
ORDERS = ("community", "shuffled")


@dataclass(frozen=True)
class Data:
    """A graph, or the rows of a rank, with features and labels of its vertices."""

    graph: Any  #: ``Graph`` or ``DistGraph``
    x: Tensor  #: (n_local, feat)
    labels: Tensor  #: (n_local,)
    total: int  #: vertices of the whole graph
    classes: int

    @property
    def group(self) -> Any:
        """Return the group of the ranks that share the graph; None for a whole one."""
        return self.graph.group if isinstance(self.graph, DistGraph) else None


@lru_cache(maxsize=1)
def csr_of(name: str, order: str, device: str) -> CSR:
    """Generate the graph, its vertices in that order, ascending columns in every row."""
    A = _graphs.load(name, device=device)
    if order == "community":
        A = reorder.community_order(A).apply(A).sorted_indices()
    _harness.free()
    return A


def check_alike(A: CSR, ranks: Ranks) -> None:
    """Raise SystemExit if not all processes have the same graph."""
    places = namespace(A.indices).arange(A.nnz) % 1_000_003
    sums = {(A.shape, A.nnz, int((A.indices * places).sum()))}
    if len(sums.union(ranks.gather(*sums))) > 1:
        raise SystemExit("the graphs that the processes generated differ")


def whole(name: str, order: str, device: str) -> Data:
    """Return all of it on one device."""
    A = csr_of(name, order, device)
    return _data(name, Graph(A), A, slice(0, A.n_rows))


@lru_cache(maxsize=4)
def share(name: str, order: str, count: int, ranks: Ranks) -> Data:
    """Return the rows of this rank, of so many ranks."""
    A = csr_of(name, order, ranks.device)
    graph = Graph(A)
    bounds = balanced(graph, count)
    rows = slice(*bounds[ranks.rank : ranks.rank + 2])
    return _data(name, DistGraph.of(graph, bounds, ranks.groups[count]), A, rows)


def _data(name: str, graph: Any, A: CSR, rows: slice) -> Data:
    feat, classes = SIZES.get(name, SIZES["products"])
    x = to_tensor(_graphs.normal(A.indptr, (A.n_rows, feat)))[rows].clone()
    _harness.free()
    labels = torch.arange(A.n_rows, device=x.device)[rows] % classes
    return Data(graph, x, labels, A.n_rows, classes)


def forget(*, generated: bool) -> None:
    """Remove the graphs in an order, and of those as generated too."""
    csr_of.cache_clear()
    share.cache_clear()
    if generated:
        _graphs.load.cache_clear()
    _harness.free()
