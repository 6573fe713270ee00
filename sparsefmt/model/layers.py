"""Layers as expressions: their options, maps and matrices, and the plan that a layer asks for."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, Sequential
from torch.utils.weak import WeakIdKeyDictionary

from ..autograd import as_graph, spmm
from ..autograd.tensors.order import own_values
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..autograd.tensors.shared import Shared, is_square, local_of, n_sources, shared
from ..graph.graph import Graph
from ..plan import models
from ..plan.expression import Expression
from .composition import MAX_PLANS, Code, Composition, Own, Planned, Settings, modes, number_of
from .maps import calls_forward_alone, read_map
from .program import FUNCTIONS, Attention, Functions, Values, is_stamped, stamp

GraphOrShared = Graph | Shared
#: Of a layer, a graph, a dtype, and whether vertices with a loop get another one too.
Matrices = Callable[[Any, Any, torch.dtype, bool], Values | None]
_NO_COMPOSITION = Own()


@dataclass(frozen=True)
class Adapter:
    """A kind of layer as the planner knows it."""

    expression: Callable[[Any], Expression]
    #: What the expression's graphs and diagonals stand for; None where this graph cannot.
    matrices: Matrices
    maps: Callable[[Any], dict[str, Any]]  #: linear maps by their weights' names, of one shape
    suits: Callable[[Any], bool]  #: whether the layer's options are those of the expression
    bias_of: str = ""  #: the map whose bias is added to the product; the layer's own without
    own: Own = _NO_COMPOSITION
    #: Whether on a DistGraph the layer's own code must run if x has no gradient: such features
    #: travel once, and no scores do.
    unplanned_constants: bool = False
    graph: Callable[[Any, Tensor, Any], Any] = lambda layer, x, edge_index: as_graph(
        edge_index, x, name="edge_index"
    )
    vectors: Callable[[Any], Values] = lambda layer: {}  #: parameters that are no maps
    options: Callable[[Any], tuple[int, ...]] = lambda layer: ()  #: that the expression depends on
    rest: Callable[[Any], list[Module]] = lambda layer: []  #: modules behind the product
    functions: Callable[[Any, GraphOrShared], Functions] | None = None


class LayerPlan:
    """The compositions of a kind of layer, for which the layer's ``forward`` asks.

    It has no layer: copies and replicas that share it compute with their own parameters.
    """

    def __init__(self, layer: Module, settings: Settings) -> None:
        self.kind, self.adapter = type(layer), ADAPTERS[type_name(type(layer))]
        self.options = self.adapter.options(layer)
        expression = self.adapter.expression(layer)
        self.composition = Composition(expression, self.adapter.own, settings)
        self.left: set[Any] = set()  #: kinds of calls for which the layer's own code is chosen

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the plans: it will meet other graphs and tensors."""
        return {
            "kind": self.kind,
            "options": self.options,
            "composition": replace(self.composition, plans={}, chosen={}),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read the state, without plans, which the next call makes."""
        vars(self).update(state, left=set())
        self.adapter = ADAPTERS[type_name(self.kind)]
        self.composition.own = self.adapter.own  # which earlier pickles lack

    def __call__(self, layer: Module, x: Any, edge_index: GraphLike) -> Tensor | None:
        """Compute a layer by its composition; return None where its own code is to run."""
        if torch.compiler.is_compiling() or type(layer) is not self.kind:
            return None
        call = self._call(x, edge_index)
        if call is not None and call in self.left:
            return None
        prepared = self.prepared(layer, x, edge_index)
        if prepared is None:
            return None
        planned, values, code = prepared
        if planned.program is not None:
            result: Tensor = code.finish(planned.program(values, code.functions))
            return result
        if call is not None and planned.plan is not None:
            if len(self.left) >= MAX_PLANS:
                self.left.clear()
            self.left.add(call)
        return None

    def _call(self, x: object, graph: GraphLike) -> Any:
        """Return the key by which ``left`` has calls that the layer's own code runs, or None."""
        if not isinstance(graph, Graph | Shared) or not isinstance(x, Tensor):
            return None
        stays = self.composition.settings.is_constant(x)
        return number_of(graph), x.shape, x.dtype, x.device, x.requires_grad, *modes(x), stays

    def prepared(
        self, layer: Module, x: Any, edge_index: GraphLike
    ) -> tuple[Planned, Values, Code] | None:
        """Return the plan for a call, the value of each leaf, and the layer's code.

        None where the layer is not as it was planned, the call is not eager, or arguments cannot be
        planned.
        """
        if (
            type(x) not in (Tensor, Parameter)
            or x.dim() != 2
            or x.layout is not torch.strided
            or not x.is_floating_point()
            or torch.is_autocast_enabled(x.device.type)
            or self.adapter.options(layer) != self.options
            or against(layer)
        ):
            return None
        graph = self.adapter.graph(layer, x, edge_index)
        settings = self.composition.settings
        if not isinstance(graph, Graph | Shared):
            return None
        if isinstance(graph, Shared) and settings.agreed is None:
            return None  # processes might choose apart
        values = self.values(layer, x, graph, edge_index)
        if values is None:
            return None
        made = self.adapter.functions
        code = Code(
            name=type_name(self.kind),
            run=lambda leaves: self.kind.forward(layer, leaves["H"], edge_index),
            functions=FUNCTIONS if made is None else {**FUNCTIONS, **made(layer, graph)},
            finish=partial(self.finish, layer),
        )
        constant = ("H",) if settings.is_constant(x) else ()
        return self.composition.planned(values, code, constant), values, code

    def values(
        self, layer: Module, x: Tensor, graph: GraphOrShared, edge_index: GraphLike
    ) -> Values | None:
        """Return the value of each leaf; None where they do not fit, which the layer reports."""
        weights = {key: lin.weight.t() for key, lin in self.adapter.maps(layer).items()}
        parameters = {**weights, **self.adapter.vectors(layer)}
        width, out = next(iter(weights.values())).shape
        bias, tensors = self._bias(layer), tensors_of(local_of(graph))
        local = x, *parameters.values(), tensors.csr_values, bias
        if not all(value is None or value.dtype == x.dtype for value in local):
            return None
        if not all(value is None or value.device == tensors.device for value in local):
            return None
        if x.shape != (n_sources(graph), width) or not is_square(graph):
            return None
        if not all(weight.shape == (width, out) for weight in weights.values()):
            return None
        if bias is not None and bias.shape != (out,):
            return None
        if self.adapter.unplanned_constants and shared(graph) is not None and not x.requires_grad:
            return None
        to_all = isinstance(edge_index, Tensor) and edge_index.layout is not torch.strided
        matrices = self.adapter.matrices(layer, graph, x.dtype, to_all)
        return None if matrices is None else {"H": x, **matrices, **parameters}

    def _bias(self, layer: Any) -> Tensor | None:
        """Return the bias that is added to the product."""
        bias: Tensor | None = (
            self.adapter.maps(layer)[self.adapter.bias_of] if self.adapter.bias_of else layer
        ).bias
        return bias

    def finish(self, layer: Module, y: Tensor) -> Tensor:
        """Add the bias to a product, and call what the layer has behind it."""
        bias = self._bias(layer)
        if bias is not None:  # nobody else has the product, which only attention reads again
            y = y.add_(bias) if self.adapter.functions is None else y + bias
        for module in self.adapter.rest(layer):
            y = module(y)
        return y


class PlannedLayer:
    """The forward of a planned layer in earlier pickles, whose place a plan takes at the call."""

    layer: Any
    composition: Composition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Put a ``LayerPlan`` in the place of this forward, and compute the layer."""
        del self.layer.forward
        if type_name(type(self.layer)) in ADAPTERS:
            self.layer._plan = LayerPlan(self.layer, self.composition.settings)
        return self.layer.forward(*args, **kwargs)


def against(layer: Module) -> str:
    """Return why a layer's own code has to run, or an empty text."""
    adapter = ADAPTERS[type_name(type(layer))]
    if not adapter.suits(layer):
        return "its options are computed by its own code alone"
    for key, module in adapter.maps(layer).items():
        read = read_map(module)
        if read is None or (read[1] is not None and key != adapter.bias_of):
            name = next((name for name, inner in layer.named_modules() if inner is module), key)
            why = "no plain Linear without hooks" if read is None else "it has a bias of its own"
            return f"its {name}, a {type(module).__name__}, has to be called: {why}"
    return ""


def type_name(kind: type) -> str:
    """Return a class's name with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


# Graphs and diagonals, cached with the graph that they are made of


_RESULTS: Any = WeakIdKeyDictionary()


def _cached(graph: GraphOrShared, key: Hashable, make: Callable[[], Any]) -> Any:
    """Return ``make()``, cached until the graph goes; its result must not refer to the graph."""
    results = _RESULTS.setdefault(graph, {})
    if key not in results:
        with torch.inference_mode(False), torch.no_grad():
            results[key] = make()
    return results[key]


def with_loops(graph: Graph, which: str, weight: Tensor | None = None) -> Graph:
    """Add a loop to each vertex ("all"), or to those "without" one.

    Of loops that a vertex has already "without" keeps the last, and "all" keeps each.
    """
    tensors = tensors_of(graph)
    indptr, columns = tensors.rows.indptr, tensors.rows.indices.long()
    vertices = torch.arange(tensors.n_rows, device=columns.device)
    rows = vertices.repeat_interleave((indptr[1:] - indptr[:-1]).long())
    edges, stays, n_added = edges_with_loops(columns, rows, tensors.n_rows, which)
    values = tensors.csr_values
    if weight is not None and values is None:
        values = weight.new_ones(tensors.nnz)
    if values is not None:
        loop = values.new_ones(1) if weight is None else weight.to(values.dtype)
        values = torch.cat([values[stays], loop.expand(n_added)])
    return Graph.from_edge_index(edges, values, num_nodes=tensors.n_rows)


def edges_with_loops(
    columns: Tensor, rows: Tensor, n: int, which: str
) -> tuple[Tensor, Tensor, int]:
    """Return edges with loops added behind them, a mask of those that stay, and the number added.

    Of the first ``n`` vertices, as ``with_loops`` does.
    """
    vertices = torch.arange(n, device=columns.device)
    loops, missing = rows == columns, torch.ones_like(vertices, dtype=torch.bool)
    stays = torch.ones_like(loops)
    if which == "without":
        missing[rows[loops]] = False
        place = torch.arange(1, len(rows) + 1, device=rows.device)
        last = torch.zeros_like(vertices).scatter_reduce(0, rows, place * loops, "amax")
        stays = ~loops | (place == last[rows])
    added = vertices[missing]  # synchronize!
    ends = [torch.cat([end[stays], added]) for end in (columns, rows)]
    return torch.stack(ends), stays, len(added)


def _looped(graph: GraphOrShared, which: str) -> GraphOrShared:
    """Return the graph with loops from the cache, or build it."""
    build: Any = graph.looped if isinstance(graph, Shared) else partial(with_loops, graph)
    looped: GraphOrShared = _cached(graph, which, partial(build, which))
    return looped


def _normalised(graph: GraphOrShared, dtype: torch.dtype) -> Values:
    """Return the graph and its degrees to the power -1/2, 0 where one is not positive."""
    local = local_of(graph)
    tensors = tensors_of(local)

    def make() -> Tensor:
        values = own_values(local)
        values = None if values is None else values.double()
        ones = torch.ones(tensors.n_cols, 1, dtype=torch.float64, device=tensors.device)
        degree = spmm(local, ones, values)[:, 0]
        return degree.masked_fill(degree <= 0, torch.inf).rsqrt().to(dtype)

    return {"D": tensors.cached(("normalised", dtype), make), "A": graph}


def _with_loops(layer: Any, graph: GraphOrShared, dtype: torch.dtype, to_all: bool) -> Values:
    """Return the normalised graph with its loops: missing ones, or one more for each vertex."""
    if layer.add_self_loops:
        graph = _looped(graph, "all" if to_all else "without")
    return _normalised(graph, dtype)


def _with_own(layer: Any, graph: GraphOrShared, dtype: torch.dtype, _: bool) -> Values | None:
    """Add ``1 + eps`` to the diagonal of the graph; build the result again when ``eps`` changes.

    None of one that processes share, which has no values, unless ``eps`` is 0.
    """
    eps: Tensor = layer.eps
    made = _cached(graph, ("own", dtype), WeakIdKeyDictionary)
    result = made.get(layer)
    # On a GPU a look at the number would wait at each call.
    number = float(eps) if eps.device.type == "cpu" else None
    if result is None or not is_stamped(eps, result[0]) or number != result[2]:
        if float(eps) == 0:  # synchronize!
            looped: Any = _looped(graph, "all")
        elif isinstance(graph, Shared):
            looped = None
        else:
            looped = with_loops(graph, "all", (1 + eps.detach()).to(dtype))
        result = made[layer] = stamp(eps), looped, number
    return None if result[1] is None else {"B": result[1]}


# Kinds of layers


def _attention(layer: Any, graph: GraphOrShared) -> Functions:
    """Return the function that builds a layer's attention of the scores of both ends."""
    options = {
        "negative_slope": layer.negative_slope,
        "dropout": layer.dropout if layer.training else 0.0,
        "self_loops": layer.add_self_loops,
    }

    def attention(argument0: Tensor, argument1: Tensor) -> Attention:
        return Attention(graph, argument0[:, 0], argument1[:, 0], options)

    return {"attention": attention}


def _sums(layer: Any) -> bool:
    """Return True if a layer sums up what flows from sources to targets."""
    return bool(layer._reductions == ("sum",) and layer.flow == "source_to_target")


_SAGE = "(D·A·(H·W)) + (H·V)", "((D·A·H)·W) + (H·V)"
_GAT = "attention((H·W)·a, (H·W)·b)·(H·W)"
#: Layers by their classes' names: they are above, in ``nn``, and ask for their plans.
ADAPTERS: dict[str, Adapter] = {
    "sparsefmt.nn.GCNConv": Adapter(
        expression=lambda layer: models.gcn(models.features()),
        matrices=_with_loops,
        maps=lambda layer: {"W": layer.lin},
        suits=lambda layer: layer._has_defaults() and not layer.cached,
        own=Own("D·A·D·(H·W)", over_processes=("D·A·D·(H·W)", "(D·A·D·H)·W")),
    ),
    "sparsefmt.nn.SAGEConv": Adapter(
        expression=lambda layer: models.sage(models.features()),
        matrices=lambda layer, graph, dtype, _: {
            "D": tensors_of(local_of(graph)).rows.inverse_degree(dtype),
            "A": graph,
        },
        maps=lambda layer: {"W": layer.lin_l, "V": layer.lin_r},
        graph=lambda layer, x, edge_index: layer._graph(x, edge_index),
        bias_of="W",
        suits=lambda layer: layer._has_defaults() and not layer.normalize,
        own=Own(*_SAGE[::-1], over_processes=_SAGE),
    ),
    "sparsefmt.nn.GINConv": Adapter(
        expression=lambda layer: models.gin(models.features()),
        matrices=_with_own,
        maps=lambda layer: {
            "W": layer.nn[0]
            if calls_forward_alone(layer.nn, Sequential) and len(layer.nn)
            else layer.nn
        },
        graph=lambda layer, x, edge_index: layer._graph(x, edge_index),
        bias_of="W",
        rest=lambda layer: list(layer.nn)[1:] if type(layer.nn) is Sequential else [],
        suits=lambda layer: layer._has_defaults(),
        own=Own("(B·H)·W", "B·(H·W)", ("(B·H)·W",) * 2),
    ),
    "sparsefmt.nn.GATConv": Adapter(
        expression=lambda layer: models.gat(models.features(), opened=True),
        matrices=lambda layer, graph, dtype, _: {"A": graph},
        maps=lambda layer: {"W": layer.lin},
        vectors=lambda layer: {"a": layer.att_src.view(-1, 1), "b": layer.att_dst.view(-1, 1)},
        suits=lambda layer: (
            _sums(layer)
            and (layer.heads, layer.edge_dim, layer.res) == (1, None, None)
            and layer.lin is not None
        ),
        own=Own(_GAT, over_processes=(_GAT, _GAT)),
        unplanned_constants=True,
        functions=_attention,
    ),
    "sparsefmt.nn.SGConv": Adapter(
        expression=lambda layer: models.sgc(models.features(), layer.K),
        options=lambda layer: (layer.K,),
        matrices=_with_loops,
        maps=lambda layer: {"W": layer.lin},
        bias_of="W",
        suits=lambda layer: _sums(layer) and not layer.cached,
    ),
    "sparsefmt.nn.TAGConv": Adapter(
        expression=lambda layer: models.tagcn(models.features(), layer.K),
        options=lambda layer: (layer.K, len(layer.lins)),
        matrices=lambda layer, graph, dtype, _: _normalised(graph, dtype),
        maps=lambda layer: {f"W{k}": module for k, module in enumerate(layer.lins)},
        suits=lambda layer: layer.normalize and _sums(layer) and len(layer.lins) == layer.K + 1,
    ),
}
