"""Graphs whose rows are shared out among processes, on torch.distributed."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .graph import DistGraph as DistGraph
    from .labels import accuracy as accuracy
    from .labels import cross_entropy as cross_entropy
    from .matmul import dist_spmm as dist_spmm
    from .rows import Partitioner as Partitioner
    from .rows import balanced as balanced
    from .weights import broadcast_parameters as broadcast_parameters
    from .weights import sum_gradients as sum_gradients

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "graph": "DistGraph",
    "labels": "accuracy cross_entropy",
    "matmul": "dist_spmm",
    "rows": "Partitioner balanced",
    "weights": "broadcast_parameters sum_gradients",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
