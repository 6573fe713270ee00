"""Layers of graph neural networks, written with the functions of ``sparsefmt.autograd``."""

from typing import TYPE_CHECKING

from .._lazy import resolver

if TYPE_CHECKING:
    from .agnn import AGNNConv as AGNNConv
    from .gat import GATConv as GATConv
    from .gatv2 import GATv2Conv as GATv2Conv
    from .gcn import GCNConv as GCNConv
    from .gin import GINConv as GINConv
    from .maxk import MaxK as MaxK
    from .sage import SAGEConv as SAGEConv

#: Public name -> the module that defines it; resolved on first use (PEP 562), which imports torch.
_PUBLIC = {
    "AGNNConv": "agnn",
    "GATConv": "gat",
    "GATv2Conv": "gatv2",
    "GCNConv": "gcn",
    "GINConv": "gin",
    "MaxK": "maxk",
    "SAGEConv": "sage",
}

__all__ = [*_PUBLIC]


__getattr__ = resolver(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted(__all__)
