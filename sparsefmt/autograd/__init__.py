"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""

from .functions import edge_softmax as edge_softmax
from .functions import sddmm as sddmm
from .functions import spmm as spmm
from .structure import prepare as prepare

__all__ = ["edge_softmax", "prepare", "sddmm", "spmm"]
