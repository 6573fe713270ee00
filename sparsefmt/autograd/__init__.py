"""The operations as functions of torch: checks, autograd, compilation and autocast around ops."""

import warnings
from importlib import import_module
from importlib.util import resolve_name
from typing import TYPE_CHECKING, Any

from .._lazy import facade
from ..ops.engine.explain import explain_functions

if TYPE_CHECKING:
    from .attention import dot_aggregate as dot_aggregate
    from .attention import gat_aggregate as gat_aggregate
    from .attention import gat_of_vectors as gat_of_vectors
    from .attention import gatv2_aggregate as gatv2_aggregate
    from .cbsr import maxk as maxk
    from .cbsr import maxk_aggregate as maxk_aggregate
    from .edges import edge_softmax as edge_softmax
    from .edges import sddmm as sddmm
    from .gcn import gcn_norm as gcn_norm
    from .matmul import spmm as spmm
    from .messages import edge_combine as edge_combine
    from .messages import message_aggregate as message_aggregate
    from .own_parts import aggregate_with_own as aggregate_with_own
    from .own_parts import propagate as propagate
    from .relations import relational_aggregate as relational_aggregate
    from .sampling import sampled_aggregate as sampled_aggregate
    from .tensors.edge_index import as_graph as as_graph
    from .tensors.prepare import prepare as prepare

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    "cbsr": "maxk maxk_aggregate",
    "edges": "edge_softmax sddmm",
    "attention": "dot_aggregate gat_aggregate gat_of_vectors gatv2_aggregate",
    "gcn": "gcn_norm",
    "matmul": "spmm",
    "messages": "edge_combine message_aggregate",
    "own_parts": "aggregate_with_own propagate",
    "relations": "relational_aggregate",
    "sampling": "sampled_aggregate",
    "tensors.edge_index": "as_graph",
    "tensors.prepare": "prepare",
}
#: What was public and in no page: it is to be imported from its module, and goes from here.
_LEAVING = {
    "cbsr": "features_to_keep",
    "gcn": "unit_scales",
    "matmul": "operands",
    "tensors.edge_index": "turned",
    "tensors.lifetimes": "noting",
    "tensors.order": "own_values",
    "tensors.prepare": "GraphLike graph_tensors has_tiles",
    "tensors.shared": "Shared local_of shared",
    "tensors.types": "check_ids",
    ".model.pyg_layers": "against_pyg_layer layer_of_pyg",
    ".model.state": "holdings is_graph",
}
__all__, _resolve, __dir__ = facade(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    for module, names in _LEAVING.items():
        if name in names.split():
            place = resolve_name(f".{module}", __name__)
            text = f"{__name__}.{name} leaves in the next release: import it from {place}."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(import_module(place), name)
    return _resolve(name)


#: The functions of a graph that choose among kernels, which ``ops.explain`` calls by their names.
_EXPLAINED = (
    *("aggregate_with_own", "dot_aggregate", "edge_softmax", "gat_aggregate", "gatv2_aggregate"),
    *("edge_combine", "gcn_norm", "maxk_aggregate", "message_aggregate", "propagate"),
    *("sampled_aggregate", "sddmm", "spmm"),
)
explain_functions(__name__, _EXPLAINED)
