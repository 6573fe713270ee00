"""Graphs whose rows are shared out among processes, on torch.distributed."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .graph import DistGraph as DistGraph
    from .job.checkpoint import load_checkpoint as load_checkpoint
    from .job.checkpoint import save_checkpoint as save_checkpoint
    from .loss import accuracy as accuracy
    from .loss import broadcast_parameters as broadcast_parameters
    from .loss import cross_entropy as cross_entropy
    from .loss import sum_gradients as sum_gradients
    from .parts.cutting import write_partition as write_partition
    from .parts.files import Part as Part
    from .parts.files import Partition as Partition
    from .parts.files import read_part as read_part
    from .parts.files import read_partition as read_partition
    from .parts.rows import Partitioner as Partitioner
    from .parts.rows import balanced as balanced
    from .parts.rows import metis as metis
    from .products import dist_spmm as dist_spmm

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "job.checkpoint": "load_checkpoint save_checkpoint",
    "parts.cutting": "write_partition",
    "parts.files": "Part Partition read_part read_partition",
    "graph": "DistGraph",
    "products": "dist_spmm",
    "parts.rows": "Partitioner balanced metis",
    "loss": "accuracy broadcast_parameters cross_entropy sum_gradients",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
