"""Layers of graph neural networks, written with the functions of ``sparsefmt.autograd``.

Parameters and options have the names, shapes and meanings of PyG's layers, so that a ``state_dict``
loads across, and results agree with theirs.
"""

from typing import TYPE_CHECKING

from .._lazy import facade

if TYPE_CHECKING:
    from ..model.capturing import capture as capture
    from .conv.edgewise import EdgeConv as EdgeConv
    from .conv.edgewise import FAConv as FAConv
    from .conv.edgewise import ResGatedGraphConv as ResGatedGraphConv
    from .conv.pna import PNAConv as PNAConv
    from .conv.propagation import APPNP as APPNP
    from .conv.propagation import GCN2Conv as GCN2Conv
    from .conv.propagation import LGConv as LGConv
    from .conv.propagation import MixHopConv as MixHopConv
    from .conv.propagation import SSGConv as SSGConv
    from .conv.spectral import ARMAConv as ARMAConv
    from .conv.spectral import ChebConv as ChebConv
    from .conv.spectral import ClusterGCNConv as ClusterGCNConv
    from .conv.sums import GatedGraphConv as GatedGraphConv
    from .conv.sums import GraphConv as GraphConv
    from .conv.sums import LEConv as LEConv
    from .conv.sums import SimpleConv as SimpleConv
    from .gat import GATConv as GATConv
    from .gat import GATv2Conv as GATv2Conv
    from .gcn import GCNConv as GCNConv
    from .gcn import MaxK as MaxK
    from .gin import GINConv as GINConv
    from .gin import GINEConv as GINEConv
    from .replacing import replace_layers as replace_layers
    from .rgcn import FastRGCNConv as FastRGCNConv
    from .rgcn import RGCNConv as RGCNConv
    from .sage import SAGEConv as SAGEConv
    from .sg import SGConv as SGConv
    from .sg import TAGConv as TAGConv
    from .transformer import AGNNConv as AGNNConv
    from .transformer import TransformerConv as TransformerConv

#: Module -> the public names that it defines; resolved on first use (PEP 562), which imports torch.
_MODULES = {
    ".model.capturing": "capture",
    "conv.edgewise": "EdgeConv FAConv ResGatedGraphConv",
    "conv.pna": "PNAConv",
    "conv.propagation": "APPNP GCN2Conv LGConv MixHopConv SSGConv",
    "conv.spectral": "ARMAConv ChebConv ClusterGCNConv",
    "conv.sums": "GatedGraphConv GraphConv LEConv SimpleConv",
    "gat": "GATConv GATv2Conv",
    "gcn": "GCNConv MaxK",
    "gin": "GINConv GINEConv",
    "replacing": "replace_layers",
    "rgcn": "FastRGCNConv RGCNConv",
    "sage": "SAGEConv",
    "sg": "SGConv TAGConv",
    "transformer": "AGNNConv TransformerConv",
}
__all__, __getattr__, __dir__ = facade(__name__, _MODULES)
