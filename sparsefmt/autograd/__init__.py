"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .attention_functions import gat_aggregate as gat_aggregate
    from .functions import edge_softmax as edge_softmax
    from .functions import edge_values as edge_values
    from .functions import maxk as maxk
    from .functions import maxk_aggregate as maxk_aggregate
    from .functions import sddmm as sddmm
    from .functions import spmm as spmm
    from .normalisation import gcn_norm as gcn_norm
    from .pairwise import dot_aggregate as dot_aggregate
    from .pairwise import gatv2_aggregate as gatv2_aggregate
    from .sampling import sampled_aggregate as sampled_aggregate
    from .structure import prepare as prepare

#: Public name -> the module that defines it; resolved on first use (PEP 562), which imports torch.
_PUBLIC = {
    "dot_aggregate": "pairwise",
    "edge_softmax": "functions",
    "edge_values": "functions",
    "gat_aggregate": "attention_functions",
    "gatv2_aggregate": "pairwise",
    "gcn_norm": "normalisation",
    "maxk": "functions",
    "maxk_aggregate": "functions",
    "prepare": "structure",
    "sampled_aggregate": "sampling",
    "sddmm": "functions",
    "spmm": "functions",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
