"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .functions import edge_softmax as edge_softmax
    from .functions import edge_values as edge_values
    from .functions import maxk as maxk
    from .functions import maxk_aggregate as maxk_aggregate
    from .functions import sddmm as sddmm
    from .functions import spmm as spmm
    from .structure import prepare as prepare

#: Public name -> the module that defines it; resolved on first use (PEP 562), which imports torch.
_PUBLIC = {
    "edge_softmax": "functions",
    "edge_values": "functions",
    "maxk": "functions",
    "maxk_aggregate": "functions",
    "prepare": "structure",
    "sddmm": "functions",
    "spmm": "functions",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
