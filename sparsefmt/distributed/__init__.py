"""Graphs whose rows are shared out among processes, on torch.distributed."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint import save_checkpoint as save_checkpoint
    from .cutting import write_partition as write_partition
    from .files import Part as Part
    from .files import Partition as Partition
    from .files import read_part as read_part
    from .files import read_partition as read_partition
    from .graph import DistGraph as DistGraph
    from .labels import accuracy as accuracy
    from .labels import cross_entropy as cross_entropy
    from .matmul import dist_spmm as dist_spmm
    from .rows import Partitioner as Partitioner
    from .rows import balanced as balanced
    from .rows import metis as metis
    from .weights import broadcast_parameters as broadcast_parameters
    from .weights import sum_gradients as sum_gradients

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "checkpoint": "load_checkpoint save_checkpoint",
    "cutting": "write_partition",
    "files": "Part Partition read_part read_partition",
    "graph": "DistGraph",
    "labels": "accuracy cross_entropy",
    "matmul": "dist_spmm",
    "rows": "Partitioner balanced metis",
    "weights": "broadcast_parameters sum_gradients",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
