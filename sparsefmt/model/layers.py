"""Known layers as expressions: their matrices, and what they do with the product."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.utils.weak import WeakIdKeyDictionary

from ..autograd.maps import read_map
from ..autograd.matmul import spmm
from ..autograd.tensors.edge_index import as_graph
from ..autograd.tensors.order import own_values
from ..autograd.tensors.prepare import graph_tensors
from ..autograd.tensors.shared import Shared, is_square, local_of, n_sources, shared
from ..graph.graph import Graph
from ..plan import models
from ..plan.expression import Expression
from .composition import (
    FUNCTIONS,
    MAX_PLANS,
    Attention,
    Code,
    Composition,
    Planned,
    Settings,
    is_stamped,
    number_of,
    plannable,
    stamp,
    suits,
    ways,
)
from .pyg_layers import PYG_LAYERS, has_message_hooks, step_set_by_hand
from .state import hooked

Values = dict[str, Any]
#: What layers call their graph.
GRAPH_NAMES = ("graph", "edge_index")


@dataclass(frozen=True)
class Adapter:
    """What the planner knows of a kind of layer."""

    expression: Callable[[Any], Expression]
    #: What the expression's names of graphs and diagonals stand for, of a layer, a graph and a
    #: dtype; None where this graph cannot stand for them.
    matrices: Callable[[Any, Any, torch.dtype], Values | None]
    parameters: Callable[[Any], Values]
    finish: Callable[[Any, Tensor], Tensor]
    suits: Callable[[Any], bool]  #: whether the layer's options are those of the expression
    default: str = ""  #: the composition that the layer has by itself
    narrowing: str = ""  #: and where it maps features before it aggregates them
    over_processes: tuple[str, str] = ("", "")  #: as of a ``Composition``
    #: Whether over processes its own way alone serves features without a gradient: they travel
    #: once, and no scores do.
    sends_once: bool = False
    edge_index: bool = False  #: whether it takes PyG's arrays, not a graph
    of_sparse: Callable[[Any, Any, torch.dtype], Values] | None = None  #: of torch's, if others
    functions: Callable[[Any, Graph | Shared], Mapping[str, Any]] = field(default=lambda *_: {})


class PlannedLayer:
    """The forward of a layer that runs its planned composition where there is one."""

    def __init__(self, layer: Module, adapter: Adapter, settings: Settings) -> None:
        self.layer, self.adapter = layer, adapter
        own = adapter.default, settings, adapter.narrowing, adapter.over_processes
        self.composition = Composition(adapter.expression(layer), *own)
        self.kinds_of_own: set[Any] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was made for graphs and tensors that a copy will not meet."""
        composition = self.composition
        own = composition.default, composition.settings, composition.narrowing
        again = Composition(composition.expression, *own, composition.over_processes)
        return {"layer": self.layer, "adapter": type_name(self.layer), "composition": again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore without plans, which the next call makes."""
        self.layer, self.composition = state["layer"], state["composition"]
        self.kinds_of_own = set()
        self.adapter = ADAPTERS[state["adapter"]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        kind = None
        if len(args) == 2 and not kwargs and not torch.compiler.is_compiling():
            kind = self._kind(*args)
            if kind is not None and kind in self.kinds_of_own:
                return self.own(*args)
        both = taken(args, kwargs)
        others = [*args[2:], *(v for k, v in kwargs.items() if k not in GRAPH_NAMES)]
        if len(both) < 2 or any(one is not None for one in others) or not self._suits(both[0]):
            return self.own(*args, **kwargs)
        x, given = both[:2]
        graph = self.graph_of(x, given)
        values = None if graph is None else self.values(x, graph, given)
        if graph is None or values is None:
            return self.own(x, given)
        functions = self.functions(graph)
        planned = self.planned(values, functions, given)
        if planned.program is None:
            if kind is not None and planned.plan is not None:
                self._remember(kind)
            return self.own(x, given)
        return self.adapter.finish(self.layer, planned.program(values, functions))

    def _kind(self, x: Any, graph: Any) -> Any:
        """Tell quickly of what kind a call is: the layer's own way is right for any parameters."""
        if not isinstance(graph, Graph | Shared) or not isinstance(x, Tensor):
            return None
        stays = self.composition.settings.is_constant(x)
        return number_of(graph), x.shape, x.dtype, x.device, x.requires_grad, *ways(x), stays

    def _remember(self, kind: Any) -> None:
        if len(self.kinds_of_own) >= MAX_PLANS:
            self.kinds_of_own.clear()
        self.kinds_of_own.add(kind)

    def _suits(self, x: Any) -> bool:
        return isinstance(x, Tensor) and plannable(x) and self.adapter.suits(self.layer)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer as its class does."""
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def planned(self, values: Values, functions: Mapping[str, Any], graph: Any) -> Planned:
        """Give the plan for these values."""
        constant = ("H",) if self.composition.settings.is_constant(values["H"]) else ()
        code = Code(
            name=type_name(self.layer),
            own=lambda given: self.own(given["H"], graph),
            finish=lambda made: self.adapter.finish(self.layer, made),
        )
        return self.composition.planned(values, functions, code, constant)

    def functions(self, graph: Graph | Shared) -> Mapping[str, Any]:
        """Give the functions of primitives."""
        return {**FUNCTIONS, **self.adapter.functions(self.layer, graph)}

    def values(self, x: Tensor, graph: Graph | Shared, given: Any) -> Values | None:
        """Give the value of each leaf; None where they do not fit, and the layer will say why.

        ``given`` is what the graph was made of.
        """
        parameters = self.adapter.parameters(self.layer)
        weight = next(iter(parameters.values()))
        alike = x.dim() == 2 and x.shape == (n_sources(graph), weight.shape[0])
        alike = alike and x.dtype == weight.dtype and x.device == weight.device
        if not alike or not is_square(graph) or not suits(graph, x):
            return None
        if self.adapter.sends_once and shared(graph) is not None and not x.requires_grad:
            return None
        sparse = isinstance(given, Tensor) and given.layout is not torch.strided
        make = (self.adapter.of_sparse if sparse else None) or self.adapter.matrices
        matrices = make(self.layer, graph, x.dtype)
        return None if matrices is None else {"H": x, **matrices, **parameters}

    def graph_of(self, x: Tensor, given: Any) -> Graph | Shared | None:
        """Give the graph behind what the layer takes; None for what it takes and we do not."""
        if self.adapter.edge_index and (not isinstance(given, Tensor) or given.is_inference()):
            return None
        found = as_graph(given, x)
        if isinstance(found, Shared) and self.composition.settings.agreed is None:
            return None  # processes might choose apart
        return found if isinstance(found, Graph | Shared) else None


def taken(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Give features and graph as a layer is called with them, by position or the graph by name."""
    return *args, *(kwargs[name] for name in GRAPH_NAMES if name in kwargs)


# Graphs and diagonals, kept with the graph that they are made of


_KEPT: Any = WeakIdKeyDictionary()


def _kept(graph: Graph | Shared, key: Any, make: Callable[[], Any]) -> Any:
    """Give what was made of a graph, which may not hold it."""
    found = _KEPT.setdefault(graph, {})
    if key not in found:
        with torch.inference_mode(False), torch.no_grad():
            found[key] = make()
    return found[key]


def with_loops(graph: Graph, which: str, weight: Tensor | None = None) -> Graph:
    """Add a loop to each vertex: "all", those "without" one, or so that each has "one".

    Of those that a vertex has the last stays, and with "all" each.
    """
    tensors = graph_tensors(graph)
    indptr, columns = tensors.rows.indptr, tensors.rows.indices.long()
    at = torch.arange(tensors.n_rows, device=columns.device)
    rows = at.repeat_interleave((indptr[1:] - indptr[:-1]).long())
    edges, kept, n_added = edges_with_loops(columns, rows, tensors.n_rows, which)
    values = tensors.csr_values
    if weight is not None and values is None:
        values = weight.new_ones(tensors.nnz)
    if values is not None:
        own = values.new_ones(1) if weight is None else weight.to(values.dtype)
        values = torch.cat([values[kept], own.expand(n_added)])
    return Graph.from_edge_index(edges, values, num_nodes=tensors.n_rows)


def edges_with_loops(
    columns: Tensor, rows: Tensor, n: int, which: str
) -> tuple[Tensor, Tensor, int]:
    """Give columns and rows with loops behind those that stay, which these are, and how many loops.

    Of the first ``n`` vertices, as ``with_loops`` says.
    """
    at = torch.arange(n, device=columns.device)
    loops, missing = rows == columns, torch.ones_like(at, dtype=torch.bool)
    kept = ~loops if which == "one" else torch.ones_like(loops)
    if which == "without":
        missing[rows[loops]] = False
        place = torch.arange(1, len(rows) + 1, device=rows.device)
        last = torch.zeros_like(at).scatter_reduce(0, rows, place * loops, "amax")
        kept = ~loops | (place == last[rows])
    added = at[missing]  # synchronize!
    ends = [torch.cat([end[kept], added]) for end in (columns, rows)]
    return torch.stack(ends), kept, len(added)


def _looped(graph: Any, which: str) -> Any:
    """Give the graph with loops, made once."""
    away = shared(graph)
    make = partial(with_loops, graph, which) if away is None else partial(away.looped, which)
    return _kept(graph, which, make)


def _normalised(graph: Any, dtype: torch.dtype) -> Values:
    """Give the graph and the diagonal of its degrees to the power -1/2; 0 where there is none."""
    local = local_of(graph)
    tensors = graph_tensors(local)

    def make() -> Tensor:
        values = own_values(local)
        values = None if values is None else values.double()
        ones = torch.ones(tensors.n_cols, 1, dtype=torch.float64, device=tensors.device)
        degree = spmm(local, ones, values)[:, 0]
        return degree.masked_fill(degree <= 0, torch.inf).rsqrt().to(dtype)

    return {"D": tensors.kept(("normalised", dtype), make), "A": graph}


def _with_missing_loops(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    return _normalised(_looped(graph, "without"), dtype)


def _with_one_loop(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    if not getattr(layer, "add_self_loops", True):
        return _normalised(graph, dtype)
    return _normalised(_looped(graph, "one"), dtype)


def _with_loops_of(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    """Give the graph of a layer that may do without loops."""
    given = _with_missing_loops if layer.add_self_loops else _as_it_is
    return given(layer, graph, dtype)


def _with_loops_to_all(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    """Give the graph as PyG normalises torch's sparse tensors: each vertex gets one more loop."""
    if not layer.add_self_loops:
        return _normalised(graph, dtype)
    return _normalised(_looped(graph, "all"), dtype)


def _as_it_is(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    return _normalised(graph, dtype)


def _means(layer: Any, graph: Any, dtype: torch.dtype) -> Values:
    return {"D": graph_tensors(local_of(graph)).rows.inverse_degree(dtype), "A": graph}


def _with_own(layer: Any, graph: Any, dtype: torch.dtype) -> Values | None:
    """Give the graph with ``1 + eps`` on its diagonal, made anew when ``eps`` changes.

    None of one that processes share, which has no values, unless ``eps`` is 0.
    """
    eps: Tensor = layer.eps
    made = _kept(graph, ("own", dtype), WeakIdKeyDictionary)
    found = made.get(layer)
    if found is None or not is_stamped(eps, found[0]):
        if float(eps) == 0:  # synchronize!
            looped = _looped(graph, "all")
        elif shared(graph) is not None:
            looped = None
        else:
            looped = with_loops(graph, "all", (1 + eps.detach()).to(dtype))
        found = made[layer] = stamp(eps), looped
    return None if found[1] is None else {"B": found[1]}


# Parameters, and what comes behind the product


def _transposed(linear: Any) -> Tensor:
    weight: Tensor = linear.weight.t()
    return weight


def _biased(layer: Any, y: Tensor) -> Tensor:
    """Add the bias to a product, which nobody else has and no backward reads."""
    return y if layer.bias is None else y.add_(layer.bias)


def _biased_attention(layer: Any, y: Tensor) -> Tensor:
    return y if layer.bias is None else y + layer.bias


def _first(nn: Any) -> Any:
    return nn[0] if isinstance(nn, Sequential) and len(nn) else nn


def _rest(layer: Any, y: Tensor) -> Tensor:
    y = _biased(_first(layer.nn), y)
    if isinstance(layer.nn, Sequential):
        for module in list(layer.nn)[1:]:
            y = module(y)
    return y


def _attention(layer: Any, graph: Graph | Shared) -> Mapping[str, Any]:
    options = {
        "negative_slope": layer.negative_slope,
        "dropout": layer.dropout if layer.training else 0.0,
        "self_loops": layer.add_self_loops,
    }

    def attention(argument0: Tensor, argument1: Tensor) -> Attention:
        return Attention(graph, argument0[:, 0], argument1[:, 0], options)

    return {"attention": attention}


def _of_gat(layer: Any) -> Values:
    vectors = {"a": layer.att_src.view(-1, 1), "b": layer.att_dst.view(-1, 1)}
    return {"W": _transposed(layer.lin), **vectors}


# When the layer is what the expression says


def _is_product(linear: Any) -> bool:
    """Return True if a call of the map is a product with its weight and nothing else."""
    args = read_map(linear)
    return args is not None and args[1] is None


def _of_one_width(one: Any, other: Any) -> bool:
    """Return True if both are linear, the second without a bias, and take the same features."""
    args = read_map(one)
    return args is not None and _is_product(other) and args[0].shape[1] == other.weight.shape[1]


def _gin_whole(layer: Any) -> bool:
    first = _first(layer.nn)
    plain = type(first) is Linear and read_map(first) is not None and not hooked(layer.nn)
    return plain and type(layer.nn) in (Linear, Sequential) and not layer.eps.requires_grad


def _one_head(layer: Any) -> bool:
    plain = layer.heads == 1 and layer.edge_dim is None and layer.lin is not None
    return plain and _is_product(layer.lin) and getattr(layer, "residual", False) is False


def _sums(layer: Any) -> bool:
    """Tell whether one of our layers sums up what flows from sources to targets."""
    return bool(layer._reductions == ("sum",) and layer.flow == "source_to_target")


def _plain(layer: Any, aggr: str = "add") -> bool:
    """Tell whether a layer of PyG passes messages as its class says."""
    known = layer.aggr == aggr and layer.flow == "source_to_target"
    known = known and not has_message_hooks(layer) and step_set_by_hand(layer) is None
    return known and not layer.explain and layer.decomposed_layers == 1


def _gcn_of_pyg(layer: Any) -> bool:
    usual = layer.normalize and layer.add_self_loops and not layer.improved and not layer.cached
    return usual and _plain(layer) and _is_product(layer.lin)


def _gat_of_pyg(layer: Any) -> bool:
    draws = layer.training and layer.dropout  # from torch's generator, which ours does not follow
    return not draws and _plain(layer) and _one_head(layer)


def _sage_of_pyg(layer: Any) -> bool:
    usual = layer.root_weight and not layer.normalize and not layer.project
    return usual and _plain(layer, "mean") and _of_one_width(layer.lin_l, layer.lin_r)


def _sgc(layer: Any) -> bool:
    return _sums(layer) and not layer.cached and read_map(layer.lin) is not None


def _tagcn(layer: Any) -> bool:
    return bool(layer.normalize) and _sums(layer) and all(map(_is_product, layer.lins))


_GCN = Adapter(
    expression=lambda layer: models.gcn(models.features()),
    matrices=_with_missing_loops,
    parameters=lambda layer: {"W": _transposed(layer.lin)},
    finish=_biased,
    suits=lambda layer: layer._is_usual() and not layer.cached and _is_product(layer.lin),
    default="D·A·D·(H·W)",
    over_processes=("D·A·D·(H·W)", "(D·A·D·H)·W"),
    of_sparse=_with_loops_to_all,
)
_SAGE = Adapter(
    expression=lambda layer: models.sage(models.features()),
    matrices=_means,
    parameters=lambda layer: {"W": _transposed(layer.lin_l), "V": _transposed(layer.lin_r)},
    finish=lambda layer, y: _biased(layer.lin_l, y),
    suits=lambda layer: (
        layer._is_usual() and not layer.normalize and _of_one_width(layer.lin_l, layer.lin_r)
    ),
    default="((D·A·H)·W) + (H·V)",
    narrowing="(D·A·(H·W)) + (H·V)",
    over_processes=("(D·A·(H·W)) + (H·V)", "((D·A·H)·W) + (H·V)"),
)
_GIN = Adapter(
    expression=lambda layer: models.gin(models.features()),
    matrices=_with_own,
    parameters=lambda layer: {"W": _transposed(_first(layer.nn))},
    finish=_rest,
    suits=lambda layer: layer._is_usual() and _gin_whole(layer),
    default="(B·H)·W",
    narrowing="B·(H·W)",
    over_processes=("(B·H)·W", "(B·H)·W"),
)
_GAT = Adapter(
    expression=lambda layer: models.gat(models.features(), opened=True),
    matrices=lambda layer, graph, dtype: {"A": graph},
    parameters=_of_gat,
    finish=_biased_attention,
    suits=lambda layer: _sums(layer) and _one_head(layer),
    default="attention((H·W)·a, (H·W)·b)·(H·W)",
    over_processes=("attention((H·W)·a, (H·W)·b)·(H·W)", "attention((H·W)·a, (H·W)·b)·(H·W)"),
    sends_once=True,
    functions=_attention,
)
_SGC = Adapter(
    expression=lambda layer: models.sgc(models.features(), layer.K),
    matrices=_with_one_loop,
    parameters=lambda layer: {"W": _transposed(layer.lin)},
    finish=lambda layer, y: _biased(layer.lin, y),
    suits=lambda g: _plain(g) and not g.cached and read_map(g.lin) is not None,
    edge_index=True,
    of_sparse=_with_loops_to_all,
)
_TAGCN = Adapter(
    expression=lambda layer: models.tagcn(models.features(), layer.K),
    matrices=_as_it_is,
    parameters=lambda layer: {f"W{k}": _transposed(lin) for k, lin in enumerate(layer.lins)},
    finish=_biased,
    suits=lambda layer: layer.normalize and _plain(layer) and all(map(_is_product, layer.lins)),
    edge_index=True,
)
_OF_PYG = partial(replace, default="", narrowing="", edge_index=True)
#: Layers by their classes' names, so that nothing is imported that the user has not.
ADAPTERS = {
    "sparsefmt.nn.GCNConv": _GCN,
    "sparsefmt.nn.SAGEConv": _SAGE,
    "sparsefmt.nn.GINConv": _GIN,
    "sparsefmt.nn.GATConv": _GAT,
    "sparsefmt.nn.SGConv": replace(_SGC, matrices=_with_loops_of, suits=_sgc, edge_index=False),
    "sparsefmt.nn.TAGConv": replace(_TAGCN, suits=_tagcn, edge_index=False),
    f"{PYG_LAYERS}.gcn_conv.GCNConv": _OF_PYG(_GCN, matrices=_with_one_loop, suits=_gcn_of_pyg),
    f"{PYG_LAYERS}.sage_conv.SAGEConv": _OF_PYG(_SAGE, suits=_sage_of_pyg),
    f"{PYG_LAYERS}.gin_conv.GINConv": _OF_PYG(_GIN, suits=lambda g: _plain(g) and _gin_whole(g)),
    f"{PYG_LAYERS}.gat_conv.GATConv": _OF_PYG(_GAT, suits=_gat_of_pyg),
    f"{PYG_LAYERS}.sg_conv.SGConv": _SGC,
    f"{PYG_LAYERS}.tag_conv.TAGConv": _TAGCN,
}


def type_name(layer: Module) -> str:
    """Name the layer's class with its module."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
