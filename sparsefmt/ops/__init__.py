"""What you do with a graph: operations on NumPy arrays (numba) and CuPy arrays (CUDA)."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .._costs import Costs as Costs
    from ._jit import compile_all as compile_all
    from ._registry import explain as explain
    from .aggregation import aggregate as aggregate
    from .aggregation import aggregate_backward as aggregate_backward
    from .aggregation import scale as scale
    from .attention import edge_softmax as edge_softmax
    from .attention import edge_softmax_backward as edge_softmax_backward
    from .cbsr_gradients import sspmm as sspmm
    from .cbsr_products import spgemm as spgemm
    from .extrema import spmm_arg as spmm_arg
    from .extrema import spmm_arg_backward as spmm_arg_backward
    from .features import maxk as maxk
    from .graph_attention import gat as gat
    from .graph_attention import gat_attention as gat_attention
    from .graph_attention import gat_backward as gat_backward
    from .matmul import spmm as spmm
    from .normalisation import gcn_norm as gcn_norm
    from .normalisation import gcn_norm_backward as gcn_norm_backward
    from .row_attention import dot_attention as dot_attention
    from .row_attention import dot_attention_backward as dot_attention_backward
    from .row_attention import gatv2 as gatv2
    from .row_attention import gatv2_backward as gatv2_backward
    from .sampled_product import sddmm as sddmm
    from .sampling import sample as sample
    from .sampling import sample_with_perm as sample_with_perm
    from .sampling import sampling_rate as sampling_rate
    from .sampling import spmm_sampled as spmm_sampled

#: Public name -> the module that defines it; resolved on first use (PEP 562).
_PUBLIC = {
    "Costs": "._costs",
    "aggregate": "aggregation",
    "aggregate_backward": "aggregation",
    "compile_all": "_jit",
    "dot_attention": "row_attention",
    "dot_attention_backward": "row_attention",
    "edge_softmax": "attention",
    "edge_softmax_backward": "attention",
    "explain": "_registry",
    "gat": "graph_attention",
    "gat_attention": "graph_attention",
    "gat_backward": "graph_attention",
    "gatv2": "row_attention",
    "gatv2_backward": "row_attention",
    "gcn_norm": "normalisation",
    "gcn_norm_backward": "normalisation",
    "maxk": "features",
    "sample": "sampling",
    "sample_with_perm": "sampling",
    "sampling_rate": "sampling",
    "scale": "aggregation",
    "sddmm": "sampled_product",
    "spgemm": "cbsr_products",
    "spmm": "matmul",
    "spmm_arg": "extrema",
    "spmm_arg_backward": "extrema",
    "spmm_sampled": "sampling",
    "sspmm": "cbsr_gradients",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
