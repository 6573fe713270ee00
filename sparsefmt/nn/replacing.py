"""Layers of a PyG model exchanged for those of this package, with the same parameters."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch.nn.parameter import UninitializedParameter

from ..errors import DtypeError, SparseFmtError
from ..model.pyg_layers import against_pyg_layer, layer_of_pyg
from ._passing import REDUCTIONS
from .gat import GATConv, GATv2Conv
from .gcn import GCNConv
from .gin import GINConv, GINEConv
from .rgcn import FastRGCNConv, RGCNConv
from .sage import SAGEConv
from .sg import SGConv, TAGConv
from .transformer import AGNNConv, TransformerConv

#: By their names, which are PyG's.
_LAYERS: dict[str, type[Module]] = {
    one.__name__: one
    for one in (
        *(AGNNConv, FastRGCNConv, GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, RGCNConv),
        *(SAGEConv, SGConv, TAGConv, TransformerConv),
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
    if layer_of_pyg(model) is not None:
        new, why = _exchanged(model)
        name = type(model).__name__
        if new is None:
            return Replacement(model, left={"": f"{name}: {why}"})
        return Replacement(new, replaced={"": name}, remarks={"": why} if why else {})
    report, results = Replacement(model), dict[int, tuple[Module | None, str]]()
    for prefix, parent in [*model.named_modules()]:
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
            else:
                parent._modules[key] = made
                report.replaced[name] = kind
                report.remarks.update({name: why} if why else {})
    return report


def _exchanged(layer: Any) -> tuple[Module | None, str]:
    """Build the layer that replaces another, and a remark; or return None, and why not."""
    kind = _LAYERS.get(type(layer).__name__)
    if kind is None and type(layer).__module__.startswith("torch_geometric."):
        return None, "sparsefmt.nn has no such layer"
    why = against_pyg_layer(layer) or _against_cache(layer) or _against_aggregation(layer)
    if why or kind is None:
        return None, why
    try:
        with torch.device("meta"):  # no memory, and no numbers of a generator
            made = kind(**_options(layer))
    except SparseFmtError as error:
        return None, str(error)
    if hasattr(layer, "nn"):
        made.nn = layer.nn
    why = _share(layer, made)
    return (None, why) if why else (made.train(layer.training), _remark(made))


def _remark(made: Module) -> str:
    """Return what the new layer refuses that PyG's ignores."""
    if isinstance(made, GATConv | GATv2Conv | TransformerConv) and made.edge_dim is None:
        return "which refuses edge_attr as its edge_dim is None: call it without (PyG's ignores it)"
    return ""


def _against_cache(layer: Any) -> str:
    """Return why a layer that has cached its graph stays, or an empty text."""
    if all(one is None for name, one in vars(layer).items() if name.startswith("_cached_")):
        return ""
    return (
        "it has cached its graph; replace layers before the first call, or call its "
        "reset_parameters, which draws new weights too"
    )


def _against_aggregation(layer: Any) -> str:
    """Return why an aggregation is none of the reductions that its words name, or an empty text."""
    aggr, module = layer.aggr, layer.aggr_module
    several = isinstance(aggr, list)
    words = aggr if several else [aggr]
    if not all(one in REDUCTIONS for one in words):
        return (
            f"its aggregation is {aggr!r}, and only 'add', 'sum', 'mean', 'max' and 'min' are "
            "exchanged; take one of these, or leave it to PyG"
        )
    if several and getattr(module, "mode", "") != "cat":
        return f"its aggregations are put together by {getattr(module, 'mode', module)!r}"
    modules = [*module.aggrs] if several else [module]
    made = [type(one).__name__ for one in modules]
    if made != [f"{REDUCTIONS[one].capitalize()}Aggregation" for one in words]:
        return f"its aggregation is {aggr!r} but its aggr_module {module}"
    return ""


# The options of a layer of PyG


def _options(layer: Any) -> dict[str, Any]:
    """Return the arguments that build a layer like this one."""
    takes = inspect.signature(type(layer)).parameters.values()
    names = [one.name for one in takes if one.kind is one.POSITIONAL_OR_KEYWORD]
    names += ["aggr", "flow", "node_dim", "decomposed_layers"]
    return {name: _READ.get(name, _attribute(name))(layer) for name in names}


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda layer: getattr(layer, name)


def _bias(layer: Any) -> bool:
    """Return True if the layer, or the map that has it, has a bias."""
    maps = (getattr(layer, name, None) for name in ("lin_l", "lin", "lin_key"))
    owners = [layer, *(one for one in maps if one is not None)]
    owner = next(module for module in owners if "bias" in module._parameters)
    return owner.bias is not None


def _edge_dim(layer: Any) -> int | None:
    """Return the width of rows of edges; GINE keeps it with its map."""
    if hasattr(layer, "edge_dim"):
        return cast(int | None, layer.edge_dim)
    return None if layer.lin is None else int(layer.lin.in_channels)


def _network(layer: Any) -> Module:
    """Build a network in the place of the layer's, which a constructor would reset."""
    edges = getattr(layer, "lin", None)
    return Linear(1 if edges is None else edges.out_channels, 1)


def _root_weight(layer: Any) -> bool:
    option = getattr(layer, "root_weight", None)
    return layer.root is not None if option is None else bool(option)


_READ: dict[str, Callable[[Any], Any]] = {
    "bias": _bias,
    "edge_dim": _edge_dim,
    "eps": _attribute("initial_eps"),
    "nn": _network,
    "root_weight": _root_weight,
    "train_eps": lambda layer: isinstance(layer.eps, Parameter),
}

# Its parameters and buffers


def _share(layer: Module, made: Module) -> str:
    """Move the tensors of a layer to the places of another; return what has no place."""
    given: dict[str, Tensor] = dict(layer.named_parameters(remove_duplicate=False))
    given |= dict(layer.named_buffers(remove_duplicate=False))
    for name, tensor in given.items():
        owner, _, leaf = name.rpartition(".")
        try:
            places = _places(made.get_submodule(owner), leaf)
        except AttributeError:
            places = None
        if places is None or not _fits(places[leaf], tensor):
            return f"{name} has no place of its shape in the new layer"
        places[leaf] = tensor
    lost = [name for name, one in made.named_parameters() if one.is_meta]
    return f"the new layer has parameters of its own, {', '.join(lost)}" if lost else ""


def _places(owner: Module, leaf: str) -> dict[str, Any] | None:
    places: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
    return next((place for place in places if leaf in place), None)


def _fits(place: Tensor | None, tensor: Tensor) -> bool:
    """Return True if a tensor may take that place; one without a width yet may."""
    unknown = isinstance(tensor, UninitializedParameter) or isinstance(
        place, UninitializedParameter
    )
    return place is not None and (unknown or place.shape == tensor.shape)
