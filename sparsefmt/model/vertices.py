"""A trace written anew for a graph whose vertices are in another order.

Products with the graph, and what computes each row from that row, run in the new order.  Rows are
brought there where they come in, and back where they leave, or where an operation needs them in
their places: dropout, samples and attention's dropout draw by place, a function of the user's may.
"""

import operator
from collections.abc import Sequence
from functools import partial
from inspect import Signature, signature
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import Module, Parameter, functional

from ..autograd.cbsr import maxk, maxk_aggregate
from ..autograd.matmul import spmm
from ..autograd.propagation import aggregate_with_own, propagate
from ..errors import UnsupportedError
from .layers import ADAPTERS, PlannedLayer, type_name
from .regions import attribute, writes
from .state import LAYERS, has_hooks, hooked

#: Modules of torch that compute each row from that row alone, or with sums over all rows.
_MODULES = frozenset(
    "Linear Identity BatchNorm1d LayerNorm RMSNorm PReLU ReLU ReLU6 ELU CELU SELU GELU SiLU Mish "
    "LeakyReLU Sigmoid Tanh Softplus Softsign Hardswish LogSigmoid Sequential ModuleList".split()
)
#: Rooms of PyG whose modules do.
_OF_PYG = frozenset({"torch_geometric.nn.dense.linear", "torch_geometric.nn.aggr.basic"})
_DROPOUTS = frozenset({"Dropout", "AlphaDropout", "FeatureAlphaDropout"})
#: Functions and methods of each element.
_ELEMENTWISE = frozenset(
    "add sub mul div truediv neg pow abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sin "
    "cos sigmoid tanh relu relu6 elu celu selu gelu silu mish leaky_relu softplus softsign "
    "hardswish logsigmoid clamp square maximum minimum where float double half bfloat16 to type_as "
    "detach contiguous clone".split()
)
#: Those whose result is as long as values decide.
_PICKING = frozenset("masked_select nonzero unique unique_consecutive argwhere".split())
#: Functions along an axis, and the place of that argument.
_ALONG = {"softmax": 1, "log_softmax": 1, "cat": 1, "concat": 1, "normalize": 2, "unsqueeze": 1}
#: Functions of rows and, behind them, of what all rows share.
_OF_FIRST = frozenset({"linear", "layer_norm", "rms_norm", "matmul", "mm"})
_NAMES = _ELEMENTWISE | _OF_FIRST | _ALONG.keys() | {"dropout", "getitem"}
_OF_TORCH = {
    getattr(module, name): name
    for module in (torch, functional, operator)
    for name in _NAMES
    if hasattr(module, name)
}
#: Products with a graph, and their arguments that have a row for each vertex.
_PRODUCTS: dict[Any, tuple[Signature, tuple[str, ...]]] = {
    function: (signature(function), ("x", "row_scale", "col_scale", "own", "scale", "without"))
    for function in (spmm, maxk_aggregate, aggregate_with_own, propagate)
}


class Seen(fx.Interpreter):
    """A run of a trace that notes what each node gave."""

    def __init__(self, model: Module, graph: fx.Graph, given: Any) -> None:
        super().__init__(model, graph=graph)
        self.given = given
        self.shapes: dict[fx.Node, tuple[int, ...] | None] = {}  #: None for a number or a name
        self.graphs: set[fx.Node] = set()  #: those that gave the graph
        self.unknown: set[fx.Node] = set()  #: those behind hooks, which are not called

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        found = super().run_node(n)
        hidden = n.op == "call_module" and has_hooks(self.fetch_attr(str(n.target)))
        if hidden or not self.unknown.isdisjoint(n.all_input_nodes):
            self.unknown.add(n)  # a hook may give something else
        elif found is self.given:
            self.graphs.add(n)
        elif isinstance(found, Tensor):
            if found.layout is torch.strided:
                self.shapes[n] = tuple(found.shape)
        elif isinstance(found, bool | int | float | str | torch.dtype | torch.device | None):
            self.shapes[n] = None
        return found

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module without its hooks."""
        return self.fetch_attr(target).forward(*args, **kwargs)


def reordered(seen: Seen, n: int) -> fx.Graph:
    """Write a trace for another order of the ``n`` vertices of the graph that it was run with.

    The new trace takes a ``VertexOrder`` behind its arguments.

    Raises
    ------
    UnsupportedError
        If nothing of it can run in that order, or it writes in place.
    """
    if any(writes(node, seen.module) for node in seen.graph.nodes):
        raise UnsupportedError("the forward writes in place")
    return _Reordering(seen, n).written()


class _Reordering:
    def __init__(self, seen: Seen, n: int) -> None:
        self.seen, self.graph, self.model, self.n = seen, seen.graph, seen.module, n
        products = {node: rows for node in self.graph.nodes if (rows := self._product(node))}
        if not products:
            raise UnsupportedError("no product of the forward can run in another order")
        each = {node: rows for node in self.graph.nodes if (rows := self._rows(node))}
        wanted = {row for rows in products.values() for row in rows}
        for node in reversed(self.graph.nodes):
            if node in wanted:
                wanted |= set(each.get(node, ()))
        #: Nodes that run in the new order, with those arguments that have a row for each vertex.
        self.moving: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            rows = each.get(node, [])
            if node in products:
                self.moving[node] = products[node]
            elif rows and (node in wanted or any(row in self.moving for row in rows)):
                self.moving[node] = rows
        self.made = fx.Graph()
        self.as_given: dict[fx.Node, fx.Node] = {}
        self.moved: dict[fx.Node, fx.Node] = {}

    def written(self) -> fx.Graph:
        """Copy node by node, each in the order in which it runs."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.as_given[node] = self.made.node_copy(node)
        self.order = self.made.placeholder("vertex_order")
        for node in self.graph.nodes:
            rows = self.moving.get(node)
            if node.op == "placeholder":
                continue
            if rows is None:
                self.as_given[node] = self.made.node_copy(node, self._given)
                continue
            self.moved[node] = self.made.node_copy(node, partial(self._place, rows))
            if len(node.users) > 1 and any(
                node not in self.moving.get(user, ()) for user in node.users
            ):
                # Who else gets it may return it, and ask for the gradient there: all goes that way.
                self._given(node)
                del self.moved[node]
        return self.made

    def _place(self, rows: Sequence[fx.Node], node: fx.Node) -> fx.Node:
        """Give an argument of what runs in the new order."""
        if node in self.seen.graphs:
            return self.made.call_method("graph_of", (self.order, self._given(node)))
        if node not in rows:
            return self._given(node)
        if node not in self.moved:
            found = attribute(node, self.model)
            stays = isinstance(found, Tensor) and not isinstance(found, Parameter)
            way = "kept" if stays else "into"
            self.moved[node] = self.made.call_method(way, (self.order, self._given(node)))
        return self.moved[node]

    def _given(self, node: fx.Node) -> fx.Node:
        """Give what a node gave, in the user's order."""
        if node not in self.as_given:
            self.as_given[node] = self.made.call_method("back", (self.order, self.moved[node]))
        return self.as_given[node]

    # What has a row for each vertex

    def _per_vertex(self, node: Any, axes: int | None = None) -> bool:
        shape = self.seen.shapes.get(node) if isinstance(node, fx.Node) else None
        rows = shape is not None and shape[:1] == (self.n,) and axes in (None, len(shape))
        return rows and not _depends_on_values(node)

    def _product(self, node: fx.Node) -> list[fx.Node] | None:
        """Give the arguments of a product with the graph that have a row for each vertex."""
        if not self._per_vertex(node):
            return None
        if node.op == "call_function" and node.target in _PRODUCTS:
            parameters, names = _PRODUCTS[node.target]
            given = parameters.bind(*node.args, **node.kwargs).arguments
        elif node.op == "call_module" and self._is_layer(self._module(node)):
            parameters, names = signature(type(self._module(node)).forward), ("x",)
            given = parameters.bind(None, *node.args, **node.kwargs).arguments
            known = {"self", "x", "graph", "edge_index", "edge_weight"}
            if any(value is not None for name, value in given.items() if name not in known):
                return None
        else:
            return None
        rows = [given[name] for name in names if self._per_vertex(given.get(name))]
        others = [value for name, value in given.items() if name not in names]
        of_it = given.get("graph", given.get("edge_index")) in self.seen.graphs
        alone = not any(row in _nodes(others) for row in rows)
        plain = self._per_vertex(given.get("x"), 2)
        return rows if of_it and alone and plain else None

    def _module(self, node: fx.Node) -> Any:
        return self.model.get_submodule(str(node.target))

    def _is_layer(self, layer: Any) -> bool:
        """Tell whether a layer computes the same whatever the places of rows."""
        known = type_name(layer) in ADAPTERS or type(layer).__module__.startswith(LAYERS[1])
        inner = [one for one in layer.modules() if one is not layer]
        if not known or not all(map(_keeps_rows, inner)) or _is_watched(layer):
            return False
        if getattr(layer, "cached", False):
            return False
        if layer.training:
            width = getattr(layer, "training_sample", None)
            return width is None and not getattr(layer, "dropout", 0)
        return getattr(layer, "sample", None) is None

    def _rows(self, node: fx.Node) -> list[fx.Node] | None:
        """Give the arguments with a row for each vertex of what computes each from its own."""
        if not self._per_vertex(node):
            return None
        axes = len(self.seen.shapes[node] or ())
        if node.op == "call_module":
            return self._rows_of_module(node, axes)
        name = node.target if node.op == "call_method" else _OF_TORCH.get(node.target)
        if node.op == "call_function" and node.target is maxk:
            name = "linear"
        if node.target is functional.dropout:
            given = signature(functional.dropout).bind(*node.args, **node.kwargs).arguments
            name = None if given.get("training", True) and given.get("p", 0.5) else "clone"
        if name in _ELEMENTWISE:
            return self._rows_of_each(node, axes)
        first: Any = node.args[0] if node.args else None
        rows: list[Any] = list(first) if isinstance(first, list | tuple) else [first]
        if not rows or not all(self._per_vertex(row) for row in rows):
            return None
        others = _nodes((node.args[1:], node.kwargs))
        if any(row in others for row in rows):
            return None
        if name in _ALONG:
            dim = _argument(node, _ALONG[name], "dim", 1 if name == "normalize" else None)
            return rows if isinstance(dim, int) and dim % axes else None
        if name == "getitem":
            return rows if not others and _keeps_first(node.args[1]) else None
        if name not in _OF_FIRST or axes != 2 or not self._per_vertex(first, 2):
            return None
        if any(len(self.seen.shapes.get(other) or ()) > 2 for other in others):
            return None
        shape = _argument(node, 1, "normalized_shape", ())
        return rows if not str(name).endswith("norm") or len(shape) == 1 else None

    def _rows_of_each(self, node: fx.Node, axes: int) -> list[fx.Node] | None:
        """Give those of an elementwise operation; None if some may be neither rows nor shared."""
        rows = []
        for value in node.all_input_nodes:
            if value not in self.seen.shapes:
                return None
            shape = self.seen.shapes[value]
            if self._per_vertex(value, axes):
                rows.append(value)
            elif shape is not None and len(shape) == axes and shape[0] != 1:
                return None
        return rows

    def _rows_of_module(self, node: fx.Node, axes: int) -> list[fx.Node] | None:
        module = self._module(node)
        if node.kwargs or len(node.args) != 1 or axes < 2 or not _keeps_rows(module):
            return None
        return [row] if self._per_vertex(row := cast(fx.Node, node.args[0])) else None


def _depends_on_values(node: fx.Node) -> bool:
    """Tell whether the length of what an operation gave may be another one next time."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    picks = name == "getitem" and bool(_nodes(node.args[1:]))
    return node.op in ("call_function", "call_method") and (picks or name in _PICKING)


def _is_watched(layer: Any) -> bool:
    """Tell whether somebody sees calls of a layer, or of PyG's steps in it."""
    hooks = [v for name, v in vars(layer).items() if name.endswith("_hooks") and "dict" not in name]
    planned = isinstance(vars(layer).get("forward"), PlannedLayer)
    return any(hooks) or ("forward" in vars(layer) and not planned)


def _keeps_rows(module: Any) -> bool:
    """Tell whether a module computes each row of a matrix from that row, or from sums over all."""
    kind, room = type(module).__name__, type(module).__module__
    if hooked(module):
        return False
    if room.startswith("torch.nn."):
        idle = kind in _DROPOUTS and not (module.training and module.p)
        of_rows = len(getattr(module, "normalized_shape", (1,))) == 1
        return idle or (kind in _MODULES and of_rows)
    return type_name(module) == "sparsefmt.nn.MaxK" or room in _OF_PYG


def _keeps_first(index: Any) -> bool:
    """Tell whether an index takes the whole first axis, and leaves it there."""
    parts = index if isinstance(index, tuple) else (index,)
    lists = [part for part in parts if not isinstance(part, slice | int | None)]
    return parts[:1] == (slice(None),) and len(lists) <= 1 and (not lists or len(parts) == 2)


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(value, note)
    return found
