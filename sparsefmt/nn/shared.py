"""Graphs whose rows several processes share, as layers know them."""

from torch import Tensor

from ..autograd import aggregate_with_own as aggregate_with_own
from ..autograd import maxk_aggregate as maxk_aggregate
from ..autograd import propagate as propagate
from ..autograd import sampled_aggregate as sampled_aggregate
from ..autograd import spmm as spmm
from ..autograd.matmul import operands as operands
from ..autograd.tensors.prepare import GraphLike
from ..autograd.tensors.shared import Shared as Shared
from ..autograd.tensors.shared import local_of as local_of
from ..autograd.tensors.shared import shared as shared


def maps_first(graph: GraphLike, x: Tensor, width: int, *, otherwise: bool) -> bool:
    """Return True if a layer maps features to that width before it aggregates them."""
    return graph.maps_first(x, width) if isinstance(graph, Shared) else otherwise
