"""Graphs whose rows are shared out among processes, on torch.distributed."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .graph import DistGraph as DistGraph
    from .matmul import dist_spmm as dist_spmm
    from .rows import Partitioner as Partitioner
    from .rows import balanced as balanced

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "graph": "DistGraph",
    "matmul": "dist_spmm",
    "rows": "Partitioner balanced",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
