"""What you do with a graph: operations on NumPy arrays (numba) and CuPy arrays (CUDA)."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .attention.gat import gat as gat
    from .attention.gat import gat_attention as gat_attention
    from .attention.gat import gat_backward as gat_backward
    from .attention.pairwise import dot_attention as dot_attention
    from .attention.pairwise import dot_attention_backward as dot_attention_backward
    from .attention.pairwise import gatv2 as gatv2
    from .attention.pairwise import gatv2_backward as gatv2_backward
    from .cbsr.api import spgemm as spgemm
    from .cbsr.gradients import sspmm as sspmm
    from .cbsr.maxk import maxk as maxk
    from .edges.api import edge_softmax as edge_softmax
    from .edges.api import edge_softmax_backward as edge_softmax_backward
    from .edges.api import sddmm as sddmm
    from .engine.choose import explain as explain
    from .engine.jit import compile_all as compile_all
    from .gcn.api import gcn_norm as gcn_norm
    from .gcn.api import gcn_norm_backward as gcn_norm_backward
    from .matmul.aggregation import aggregate as aggregate
    from .matmul.aggregation import aggregate_backward as aggregate_backward
    from .matmul.aggregation import scale as scale
    from .matmul.api import spmm as spmm
    from .matmul.extrema import spmm_arg as spmm_arg
    from .matmul.extrema import spmm_arg_backward as spmm_arg_backward
    from .sampling.api import sample as sample
    from .sampling.api import sample_with_perm as sample_with_perm
    from .sampling.api import sampling_rate as sampling_rate
    from .sampling.api import spmm_sampled as spmm_sampled
    from .tiles.costs import Costs as Costs

#: Public name -> the module that defines it; resolved on first use (PEP 562).
_PUBLIC = {
    "Costs": "tiles.costs",
    "aggregate": "matmul.aggregation",
    "aggregate_backward": "matmul.aggregation",
    "compile_all": "engine.jit",
    "dot_attention": "attention.pairwise",
    "dot_attention_backward": "attention.pairwise",
    "edge_softmax": "edges.api",
    "edge_softmax_backward": "edges.api",
    "explain": "engine.choose",
    "gat": "attention.gat",
    "gat_attention": "attention.gat",
    "gat_backward": "attention.gat",
    "gatv2": "attention.pairwise",
    "gatv2_backward": "attention.pairwise",
    "gcn_norm": "gcn.api",
    "gcn_norm_backward": "gcn.api",
    "maxk": "cbsr.maxk",
    "sample": "sampling.api",
    "sample_with_perm": "sampling.api",
    "sampling_rate": "sampling.api",
    "scale": "matmul.aggregation",
    "sddmm": "edges.api",
    "spgemm": "cbsr.api",
    "spmm": "matmul.api",
    "spmm_arg": "matmul.extrema",
    "spmm_arg_backward": "matmul.extrema",
    "spmm_sampled": "sampling.api",
    "sspmm": "cbsr.gradients",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
