"""What you do with a graph: operations on NumPy arrays (numba) and CuPy arrays (CUDA)."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .._costs import Costs as Costs
    from ._jit import compile_all as compile_all
    from ._registry import explain as explain
    from .aggregation import aggregate as aggregate
    from .aggregation import scale as scale
    from .attention import edge_softmax as edge_softmax
    from .attention import edge_softmax_backward as edge_softmax_backward
    from .cbsr_gradients import sspmm as sspmm
    from .cbsr_products import spgemm as spgemm
    from .extrema import spmm_arg as spmm_arg
    from .extrema import spmm_arg_backward as spmm_arg_backward
    from .features import maxk as maxk
    from .matmul import spmm as spmm
    from .sampled_product import sddmm as sddmm

#: Public name -> the module that defines it; resolved on first use (PEP 562).
_PUBLIC = {
    "Costs": "._costs",
    "aggregate": "aggregation",
    "compile_all": "_jit",
    "edge_softmax": "attention",
    "edge_softmax_backward": "attention",
    "explain": "_registry",
    "maxk": "features",
    "scale": "aggregation",
    "sddmm": "sampled_product",
    "spgemm": "cbsr_products",
    "spmm": "matmul",
    "spmm_arg": "extrema",
    "spmm_arg_backward": "extrema",
    "sspmm": "cbsr_gradients",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
