"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""

from typing import TYPE_CHECKING

from .._lazy import facade
from ..ops.engine.choose import explain_functions

if TYPE_CHECKING:
    from .attention import gat_aggregate as gat_aggregate
    from .attention import gat_of_vectors as gat_of_vectors
    from .cbsr import features_to_keep as features_to_keep
    from .cbsr import maxk as maxk
    from .cbsr import maxk_aggregate as maxk_aggregate
    from .edges import edge_softmax as edge_softmax
    from .edges import sddmm as sddmm
    from .gat_layer import gat_convolution as gat_convolution
    from .gcn import gcn_norm as gcn_norm
    from .gcn import unit_scales as unit_scales
    from .layers import gcn_convolution as gcn_convolution
    from .layers import gin_convolution as gin_convolution
    from .layers import propagated as propagated
    from .layers import sage_convolution as sage_convolution
    from .matmul import operands as operands
    from .matmul import spmm as spmm
    from .messages import edge_combine as edge_combine
    from .messages import message_aggregate as message_aggregate
    from .pairwise import dot_aggregate as dot_aggregate
    from .pairwise import gatv2_aggregate as gatv2_aggregate
    from .plain import bare_map as bare_map
    from .plain import is_bare as is_bare
    from .plain import is_plain as is_plain
    from .propagation import aggregate_with_own as aggregate_with_own
    from .propagation import propagate as propagate
    from .relations import relational_aggregate as relational_aggregate
    from .sampling import checked_strategy as checked_strategy
    from .sampling import sample_width as sample_width
    from .sampling import sampled_aggregate as sampled_aggregate
    from .tensors.edge_index import as_graph as as_graph
    from .tensors.edge_index import turned as turned
    from .tensors.lifetimes import noting as noting
    from .tensors.order import own_values as own_values
    from .tensors.prepare import GraphLike as GraphLike
    from .tensors.prepare import graph_tensors as graph_tensors
    from .tensors.prepare import has_tiles as has_tiles
    from .tensors.prepare import prepare as prepare
    from .tensors.shared import Shared as Shared
    from .tensors.shared import local_of as local_of
    from .tensors.shared import shared as shared
    from .tensors.types import check_ids as check_ids

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "tensors.order": "own_values",
    "cbsr": "features_to_keep maxk maxk_aggregate",
    "layers": "gcn_convolution gin_convolution propagated sage_convolution",
    "tensors.edge_index": "as_graph turned",
    "edges": "edge_softmax sddmm",
    "attention": "gat_aggregate gat_of_vectors",
    "gat_layer": "gat_convolution",
    "gcn": "gcn_norm unit_scales",
    "tensors.lifetimes": "noting",
    "matmul": "operands spmm",
    "messages": "edge_combine message_aggregate",
    "pairwise": "dot_aggregate gatv2_aggregate",
    "plain": "bare_map is_bare is_plain",
    "propagation": "aggregate_with_own propagate",
    "relations": "relational_aggregate",
    "sampling": "checked_strategy sample_width sampled_aggregate",
    "tensors.shared": "Shared local_of shared",
    "tensors.prepare": "graph_tensors GraphLike has_tiles prepare",
    "tensors.types": "check_ids",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)

#: The functions of a graph that choose among kernels, which ``ops.explain`` calls by their names.
_EXPLAINED = (
    *("aggregate_with_own", "dot_aggregate", "edge_softmax", "gat_aggregate", "gatv2_aggregate"),
    *("edge_combine", "gcn_norm", "maxk_aggregate", "message_aggregate", "propagate"),
    *("sampled_aggregate", "sddmm", "spmm"),
)
explain_functions(__name__, _EXPLAINED)
