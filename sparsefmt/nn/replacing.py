"""Layers of a PyG model exchanged for those of this package, with the same parameters."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import expm1
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.parameter import is_lazy

from ..errors import DtypeError, SparseFmtError
from ..model.pyg_layers import TAKEN, against_pyg_layer, layer_of_pyg
from ._passing import REDUCTIONS
from .conv.edgewise import EdgeConv, FAConv, ResGatedGraphConv
from .conv.pna import PNAConv
from .conv.propagation import APPNP, GCN2Conv, LGConv, MixHopConv, SSGConv
from .conv.spectral import ARMAConv, ChebConv, ClusterGCNConv
from .conv.sums import GatedGraphConv, GraphConv, LEConv, SimpleConv
from .gat import GATConv, GATv2Conv
from .gcn import GCNConv
from .gin import GINConv, GINEConv
from .rgcn import FastRGCNConv, RGCNConv
from .sage import SAGEConv
from .sg import SGConv, TAGConv
from .transformer import AGNNConv, TransformerConv

#: By their names, which are PyG's.
_LAYERS: dict[str, type[Module]] = {
    layer.__name__: layer
    for layer in (
        *(AGNNConv, FastRGCNConv, GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, RGCNConv),
        *(SAGEConv, SGConv, TAGConv, TransformerConv, APPNP, ARMAConv, ChebConv, ClusterGCNConv),
        *(EdgeConv, FAConv, GatedGraphConv, GCN2Conv, GraphConv, LEConv, LGConv, MixHopConv),
        *(PNAConv, ResGatedGraphConv, SimpleConv, SSGConv),
    )
}


@dataclass(frozen=True, repr=False)
class Replacement:
    """A report of ``replace_layers``, which its ``repr`` prints.

    Attributes
    ----------
    model : Module
        The model, changed in place; of a model that is one layer, the new layer.
    replaced : dict
        The class of each layer that was exchanged, by its name in the model.
    left : dict
        The class of each layer that was left, and why.
    remarks : dict
        Of an exchanged layer, what it refuses that PyG's ignores: ``edge_attr`` where it has no
        ``edge_dim``.
    """

    model: Module
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        lines = [f"replaced {len(self.replaced)} layers, left {len(self.left)}"]
        for name, kind in self.replaced.items():
            remark = f", {self.remarks[name]}" if name in self.remarks else ""
            lines.append(f"  {name or 'the model'}: {kind}{remark}")
        lines += [f"  {name or 'the model'} left: {why}" for name, why in self.left.items()]
        return "\n".join(lines)


def replace_layers(model: Module) -> Replacement:
    """Exchange the layers of a PyG model for those of the same names here, in place.

    The new layers have the parameters of the old ones, the same tensors: states, optimizers and
    whatever else holds them stay right, and results are equal up to rounding.

    Parameters
    ----------
    model : Module
        Layers are found at any depth: in PyG's basic models, ``Sequential``, ``HeteroConv`` and
        what ``to_hetero`` has made.

    Returns
    -------
    Replacement
        ``model``, and what was ``replaced`` and ``left``; print it.

    Raises
    ------
    DtypeError
        If ``model`` is no module.

    Notes
    -----
    Left are layers that this package does not have or whose options it refuses, those of classes of
    your own, those with hooks, a step set on the layer itself, parametrised weights, other modules
    inside than PyG's or an explanation asked for, and those that have cached a graph.  Attention
    without ``edge_dim`` refuses ``edge_attr``, which PyG's ignores: the report says so.
    """
    if not isinstance(model, Module):
        raise DtypeError(f"model is a {type(model).__name__}: give a torch.nn.Module.")
    report, results = Replacement(model), dict[int, tuple[Module | None, str]]()
    top = Module()
    top._modules[""] = model  # so that a model that is one layer has a parent too
    for prefix, parent in [("", top), *model.named_modules()]:
        for key, child in [*parent._modules.items()]:
            kind = None if child is None else layer_of_pyg(child)
            if child is None or kind is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if id(child) not in results:  # in several places of the model it is one layer
                results[id(child)] = _exchanged(child)
            made, why = results[id(child)]
            if made is None:
                report.left[name] = f"{kind}: {why}"
                continue
            parent._modules[key] = made
            report.replaced[name] = kind
            report.remarks.update({name: why} if why else {})
    return replace(report, model=cast(Module, top._modules[""]))


def _exchanged(layer: Any) -> tuple[Module | None, str]:
    """Build the layer that replaces another, and a remark; or return None, and why not."""
    kind = _LAYERS.get(type(layer).__name__)
    if kind is None and type(layer).__module__.startswith("torch_geometric."):
        return None, "sparsefmt.nn has no such layer"
    why = against_pyg_layer(layer)
    if not why and any(
        value is not None for name, value in vars(layer).items() if name.startswith("_cached_")
    ):
        why = "it has cached its graph; replace layers before the first call, or call its "
        why += "reset_parameters, which draws new weights too"
    if kind is not PNAConv:
        why = why or _against_aggregation(layer)
    if why or kind is None:
        return None, why
    try:
        with torch.device("meta"):  # no memory, and no numbers of a generator
            made = kind(**_options(layer))
    except SparseFmtError as error:
        return None, str(error)
    made._modules.update({name: part for name, part in layer._modules.items() if name in TAKEN})
    if isinstance(made, GCN2Conv):
        made.beta = layer.beta
    if isinstance(made, PNAConv):
        module = layer.aggr_module
        made.degrees.means = {
            "avg_deg_lin": module.init_avg_deg_lin,
            "avg_deg_log": module.init_avg_deg_log,
        }
    why = _share(layer, made)
    if why:
        return None, why
    if isinstance(made, GATConv | GATv2Conv | TransformerConv) and made.edge_dim is None:
        why = "which refuses edge_attr as its edge_dim is None: call it without (PyG's ignores it)"
    return made.train(layer.training), why


def _against_aggregation(layer: Any) -> str:
    """Return why an aggregation is none of the reductions that its words name, or an empty text."""
    aggr, module = layer.aggr, layer.aggr_module
    several = isinstance(aggr, list)
    words = aggr if several else [aggr]
    if not all(word in REDUCTIONS for word in words):
        return (
            f"its aggregation is {aggr!r}, and only 'add', 'sum', 'mean', 'max' and 'min' are "
            "exchanged; take one of these, or leave it to PyG"
        )
    if several and getattr(module, "mode", "") != "cat":
        return f"its aggregations are put together by {getattr(module, 'mode', module)!r}"
    modules = [*module.aggrs] if several else [module]
    kinds = [type(module).__name__ for module in modules]
    if kinds != [f"{REDUCTIONS[word].capitalize()}Aggregation" for word in words]:
        return f"its aggregation is {aggr!r} but its aggr_module {module}"
    return ""


# The options of a layer of PyG


def _options(layer: Any) -> dict[str, Any]:
    """Return the arguments that build a layer like this one."""
    takes = inspect.signature(type(layer)).parameters.values()
    names = [arg.name for arg in takes if arg.kind is arg.POSITIONAL_OR_KEYWORD]
    names += ["flow", "node_dim", "decomposed_layers"]
    if "aggregators" not in names:
        names.append("aggr")
    return {name: _READ[name](layer) if name in _READ else getattr(layer, name) for name in names}


def _bias(layer: Any) -> bool:
    """Return True if the layer, or the map that has it, has a bias."""
    if hasattr(layer, "rnn"):
        return bool(layer.rnn.bias)
    names = "lin_l", "lin", "lin_key", "lin_rel", "lin_out", "lin1"
    maps = (getattr(layer, name, None) for name in names)
    owners = [layer, *(module for module in maps if module is not None)]
    owner = next(module for module in owners if "bias" in module._parameters)
    return owner.bias is not None


def _maps_of(network: Any) -> int:
    """Return the number of linear maps of a network of PyG's."""
    return sum(hasattr(part, "in_channels") for part in network)


#: Options that a layer of PyG keeps under another name, or with a map.
_READ: dict[str, Callable[[Any], Any]] = {
    "K": lambda layer: layer.K if hasattr(layer, "K") else len(layer.lins),
    "act": lambda layer: getattr(layer, "act", None),
    "act_kwargs": lambda layer: None,
    "aggregators": lambda layer: [
        type(part).__name__.removesuffix("Aggregation").lower()
        for part in getattr(layer.aggr_module.aggr, "aggrs", [layer.aggr_module.aggr])
    ],
    "bias": _bias,
    "deg": lambda layer: torch.ones(2, device="cpu"),  # any: ``_exchanged`` copies the means
    "edge_dim": lambda layer: (
        layer.edge_dim
        if hasattr(layer, "edge_dim")
        else layer.lin and int(layer.lin.in_channels)  # GINE keeps it with its map
    ),
    "eps": lambda layer: getattr(layer, "initial_eps", layer.eps),
    "layer": lambda layer: 1,
    # In the place of the layer's network, which a constructor would reset.
    "nn": lambda layer: Linear(getattr(getattr(layer, "lin", None), "out_channels", 1), 1),
    "post_layers": lambda layer: _maps_of(layer.post_nns[0]),
    "pre_layers": lambda layer: _maps_of(layer.pre_nns[0]),
    "root_weight": lambda layer: (
        layer.root_weight if hasattr(layer, "root_weight") else layer.root is not None
    ),
    "scalers": lambda layer: layer.aggr_module.scaler,
    "shared_weights": lambda layer: (
        layer.shared_weights if hasattr(layer, "shared_weights") else layer.weight2 is None
    ),
    "theta": lambda layer: expm1(layer.beta),
    "train_eps": lambda layer: isinstance(layer.eps, Parameter),
    "train_norm": lambda layer: isinstance(layer.aggr_module.avg_deg_lin, Parameter),
}

# Its parameters and buffers


def _share(layer: Module, made: Module) -> str:
    """Move the tensors of a layer to the places of another; return what has no place."""
    tensors: dict[str, Tensor] = dict(layer.named_parameters(remove_duplicate=False))
    tensors |= dict(layer.named_buffers(remove_duplicate=False))
    owners = dict(made.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = owners.get(owner, Module())
        stores: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        places = [store for store in stores if store.get(leaf) is not None]
        if not places or not (
            is_lazy(tensor) or is_lazy(places[0][leaf]) or places[0][leaf].shape == tensor.shape
        ):
            return f"{name} has no place of its shape in the new layer"
        places[0][leaf] = tensor
    lost = [name for name, p in made.named_parameters() if p.is_meta]
    return f"the new layer has parameters of its own, {', '.join(lost)}" if lost else ""
