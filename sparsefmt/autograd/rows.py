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

from ..errors import UnsupportedError
from .adapters import ADAPTERS, type_name
from .cbsr import maxk, maxk_aggregate
from .constants import LAYERS
from .matmul import spmm
from .propagation import aggregate_with_own, propagate
from .regions import attribute, writes

#: Modules of torch that compute each row from that row alone, or with sums over all rows.
_MODULES = frozenset(
    "Linear Identity BatchNorm1d LayerNorm RMSNorm PReLU ReLU ReLU6 ELU CELU SELU GELU SiLU Mish "
    "LeakyReLU Sigmoid Tanh Softplus Softsign Hardswish LogSigmoid".split()
)
_DROPOUTS = frozenset({"Dropout", "AlphaDropout", "FeatureAlphaDropout"})
#: Functions and methods of each element.
_ELEMENTWISE = frozenset(
    "add sub mul div truediv neg pow abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sin "
    "cos sigmoid tanh relu relu6 elu celu selu gelu silu mish leaky_relu softplus softsign "
    "hardswish logsigmoid clamp square maximum minimum where float double half bfloat16 to type_as "
    "detach contiguous clone".split()
)
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

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        found = super().run_node(n)
        if found is self.given:
            self.graphs.add(n)
        elif isinstance(found, Tensor):
            self.shapes[n] = tuple(found.shape)
        elif isinstance(found, bool | int | float | str | torch.dtype | torch.device | None):
            self.shapes[n] = None
        return found


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
        self.products = {
            node: rows for node in self.graph.nodes if (rows := self._product(node)) is not None
        }
        self.wanted = {row for rows in self.products.values() for row in rows}
        for node in reversed(self.graph.nodes):
            if node in self.wanted:
                self.wanted |= set(self._rows(node) or ())
        self.made = fx.Graph()
        self.as_given: dict[fx.Node, fx.Node] = {}
        self.moved: dict[fx.Node, fx.Node] = {}

    def written(self) -> fx.Graph:
        """Copy node by node, each in the order that it wants."""
        if not self.products:
            raise UnsupportedError("no product of the forward can run in another order")
        taken = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in taken:
            self.as_given[node] = self.made.node_copy(node)
        self.order = self.made.placeholder("vertex_order")
        for node in self.graph.nodes:
            if node in self.as_given:
                continue
            rows = self.products.get(node)
            if rows is None:
                rows = self._rows(node) or []
                if node not in self.wanted and not any(row in self.moved for row in rows):
                    rows = []
            if rows:
                self.moved[node] = self.made.node_copy(node, partial(self._place, rows))
            else:
                self.as_given[node] = self.made.node_copy(node, self._given)
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
        return shape is not None and shape[:1] == (self.n,) and axes in (None, len(shape))

    def _product(self, node: fx.Node) -> list[fx.Node] | None:
        """Give the arguments of a product with the graph that have a row for each vertex."""
        if not self._per_vertex(node):
            return None
        if node.op == "call_function" and node.target in _PRODUCTS:
            parameters, rows = _PRODUCTS[node.target]
            given = parameters.bind(*node.args, **node.kwargs).arguments
        elif node.op == "call_module" and self._is_layer(self._module(node)):
            parameters, rows = signature(type(self._module(node)).forward), ("x",)
            given = parameters.bind(None, *node.args, **node.kwargs).arguments
            known = {"self", "x", "graph", "edge_index", "edge_weight"}
            if any(value is not None for name, value in given.items() if name not in known):
                return None
        else:
            return None
        found = [given[name] for name in rows if isinstance(given.get(name), fx.Node)]
        found = [value for value in found if self._per_vertex(value)]
        of_it = given.get("graph", given.get("edge_index")) in self.seen.graphs
        return found if of_it and given["x"] in found else None

    def _module(self, node: fx.Node) -> Any:
        return self.model.get_submodule(str(node.target))

    def _is_layer(self, layer: Any) -> bool:
        """Tell whether a layer computes the same whatever the places of rows."""
        known = type_name(layer) in ADAPTERS or type(layer).__module__.startswith(LAYERS[1])
        if not known or _hooked(layer) or getattr(layer, "cached", False):
            return False
        if layer.training:
            return not (
                getattr(layer, "dropout", 0) or getattr(layer, "training_sample", None) is not None
            )
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
        if name in _ELEMENTWISE:
            return self._rows_of_each(node, axes)
        if node.op == "call_function" and name == "dropout":
            given = signature(functional.dropout).bind(*node.args, **node.kwargs).arguments
            draws = given.get("training", True) and given.get("p", 0.5)
            return None if draws else self._rows_of_each(node, axes)
        first = node.args[0] if node.args else None
        if name in ("cat", "concat") and isinstance(first, list | tuple):
            rows = list(first)
        else:
            rows = [first]
        if not all(self._per_vertex(row) for row in rows):
            return None
        if name in _ALONG:
            dim = _argument(node, _ALONG[name], "dim", 1 if name == "normalize" else None)
            return rows if isinstance(dim, int) and dim % axes else None
        if name == "getitem":
            index = node.args[1]
            begins = index[0] if isinstance(index, tuple) and index else index
            return rows if begins == slice(None) and not _nodes(index) else None
        if name not in _OF_FIRST:
            return None
        if name.endswith("norm") and len(_argument(node, 1, "normalized_shape", ())) >= axes:
            return None
        return None if first in _nodes(node.args[1:]) or axes < 2 else rows

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
        kind = type(module).__name__
        if _hooked(module) or node.kwargs or len(node.args) != 1:
            return None
        if type(module).__module__.startswith("torch.nn."):
            idle = kind in _DROPOUTS and not (module.training and module.p)
            if not idle and kind not in _MODULES:
                return None
        elif type_name(module) != "sparsefmt.nn.MaxK":
            return None
        if len(getattr(module, "normalized_shape", ())) >= axes:
            return None
        return [row] if self._per_vertex(row := cast(fx.Node, node.args[0])) else None


def _hooked(module: Any) -> bool:
    """Tell whether somebody sees what a module is given, or gives."""
    hooks = (value for name, value in vars(module).items() if name.endswith("_hooks"))
    return any(hooks)


def _argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg(value, note)
    return found
