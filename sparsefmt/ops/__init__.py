"""What you do with a graph: operations on NumPy arrays (numba) and CuPy arrays (CUDA)."""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from .attention.api import dot_attention as dot_attention
    from .attention.api import dot_attention_backward as dot_attention_backward
    from .attention.api import gat as gat
    from .attention.api import gat_attention as gat_attention
    from .attention.api import gat_backward as gat_backward
    from .attention.api import gatv2 as gatv2
    from .attention.api import gatv2_backward as gatv2_backward
    from .cbsr.api import maxk as maxk
    from .cbsr.api import spgemm as spgemm
    from .cbsr.api import sspmm as sspmm
    from .edges.api import edge_softmax as edge_softmax
    from .edges.api import edge_softmax_backward as edge_softmax_backward
    from .edges.api import sddmm as sddmm
    from .engine.explain import explain as explain
    from .engine.jit import compile_all as compile_all
    from .engine.transpose import Transpose as Transpose
    from .engine.transpose import transpose as transpose
    from .gcn.api import gcn_norm as gcn_norm
    from .gcn.api import gcn_norm_backward as gcn_norm_backward
    from .matmul.aggregation import aggregate as aggregate
    from .matmul.aggregation import aggregate_backward as aggregate_backward
    from .matmul.aggregation import scale as scale
    from .matmul.api import spmm as spmm
    from .matmul.api import spmm_arg as spmm_arg
    from .matmul.api import spmm_arg_backward as spmm_arg_backward
    from .messages.api import edge_combine as edge_combine
    from .messages.api import message_aggregate as message_aggregate
    from .messages.api import message_aggregate_backward as message_aggregate_backward
    from .sampling.api import sample as sample
    from .sampling.api import sample_with_perm as sample_with_perm
    from .sampling.api import sampling_rate as sampling_rate
    from .sampling.api import spmm_sampled as spmm_sampled
    from .tiles.costs import Costs as Costs

#: Module -> the public names that it defines; resolved on first use (PEP 562).
_MODULES = {
    "attention.api": "dot_attention dot_attention_backward gat gat_attention gat_backward "
    "gatv2 gatv2_backward",
    "cbsr.api": "maxk spgemm sspmm",
    "edges.api": "edge_softmax edge_softmax_backward sddmm",
    "engine.explain": "explain",
    "engine.jit": "compile_all",
    "engine.transpose": "Transpose transpose",
    "gcn.api": "gcn_norm gcn_norm_backward",
    "matmul.aggregation": "aggregate aggregate_backward scale",
    "matmul.api": "spmm spmm_arg spmm_arg_backward",
    "messages.api": "edge_combine message_aggregate message_aggregate_backward",
    "sampling.api": "sample sample_with_perm sampling_rate spmm_sampled",
    "tiles.costs": "Costs",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
