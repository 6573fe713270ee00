"""Regions of a trace: trees of products and sums that the planner composes anew."""

import inspect
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from ..autograd.matmul import spmm
from ..autograd.tensors.prepare import graph_tensors
from ..graph.graph import Graph
from ..plan.expression import Expression, Kind, Leaf, Sum, product, total
from .composition import FUNCTIONS, Code, Composition, plannable, suits
from .state import hooked


@dataclass(frozen=True)
class Op:
    """A product or a sum in the trace; operands are nodes."""

    kind: str
    matrices: tuple[Any, ...]
    others: tuple[Any, ...] = ()  #: graph and scales, a vector, or the name of a linear layer
    options: Mapping[str, Any] = field(default_factory=dict)


_MATMUL = {operator.matmul, torch.matmul, torch.mm, "matmul", "mm"}
_MULTIPLY = {operator.mul, torch.mul, torch.multiply, "mul", "multiply"}
_ADD = {operator.add, torch.add, "add"}
_WIDE: dict[Any, list[Any]] = {
    operator.getitem: [(slice(None), None)],
    "view": [-1, 1],
    "reshape": [-1, 1],
}


_WRITING = {getattr(operator, name) for name in dir(operator) if re.fullmatch("i[a-z]+", name)}
_WRITING = (_WRITING - {operator.index, operator.invert, operator.inv}) | {operator.setitem}
#: Letters of the leaves' names, by what they are.
_LETTERS = {"dense": "X", "weight": "W", "vector": "D", "graph": "A", "mean": "M"}


class Region:
    """A tree of operations, called with its leaves' values in the place of its root."""

    __module__ = __name__  # torch.fx writes code that names it

    def __init__(self, root: fx.Node, ops: Mapping[fx.Node, Op], model: Module) -> None:
        self.root, self.ops, self.model = root, ops, model
        self.__name__ = f"region_{root.name}"
        self.names: dict[tuple[Any, str], str] = {}
        self.leaves: dict[str, Leaf] = {}
        self._same: dict[str, str] = {}  # a size -> a name for the same size
        self._shape(root)
        self.leaves = {
            name: replace(leaf, rows=self._size(leaf.rows), cols=self._size(leaf.cols))
            for name, leaf in self.leaves.items()
        }
        self.expression, self.written = self._expression(root)
        self.composition: Composition | None = None

    def replace_in(self, graph: fx.Graph) -> None:
        """Call the region where its root was."""
        root, op = self.root, self.ops[self.root]
        with graph.inserting_before(root):
            keys = [key for key in self.names if key[1] != "mean"]
            given = [
                graph.create_node("get_attr", f"{key}.weight") if role == "weight" else key
                for key, role in keys
            ]
            made = graph.call_function(self, tuple(given))
            if op.options.get("bias"):
                bias = graph.create_node("get_attr", f"{op.others[0]}.bias")
                made = graph.call_method("add_", (made, bias))  # to what nobody else has
        root.replace_all_uses_with(made)
        self._erase(graph, root)

    def _erase(self, graph: fx.Graph, node: fx.Node) -> None:
        op = self.ops.get(node)
        if op is None or node.users:
            return
        graph.erase_node(node)
        for matrix in op.matrices:
            self._erase(graph, matrix)
        widened = op.options.get("by")
        if widened is not None and not widened.users:
            graph.erase_node(widened)

    # Writing the expression

    def _size(self, name: str) -> str:
        while name in self._same:
            name = self._same[name]
        return name

    def _equal(self, one: str, two: str) -> None:
        one, two = self._size(one), self._size(two)
        if one != two:
            self._same[two] = one

    def _leaf(self, value: Any, role: str) -> Leaf:
        """Give the leaf of a node, or of a linear layer's weight, in a role."""
        key, number = (value, role), len(self.names)
        if key not in self.names:
            learned = role == "dense" and isinstance(attribute(value, self.model), Parameter)
            name = self.names[key] = f"{'W' if learned else _LETTERS[role]}{number}"
            kinds: dict[str, Kind] = {"graph": "weighted", "mean": "diagonal", "vector": "diagonal"}
            kind, rows = kinds.get(role, "dense"), f"r{number}"
            self.leaves[name] = Leaf(
                name,
                kind,
                rows,
                rows if kind == "diagonal" else f"c{number}",
                role in ("graph", "mean") or _stays(value, self.model),
                entries=f"nnz{number}" if role == "graph" else "",
            )
        return self.leaves[self.names[key]]

    def _shape(self, node: Any) -> tuple[str, str]:
        """Name rows and columns of a node, and make equal what its operation needs equal."""
        op = self.ops.get(node)
        if op is None:
            leaf = self._leaf(node, "dense")
            return leaf.rows, leaf.cols
        factors = [(leaf.rows, leaf.cols) for leaf in self._around(op)[0]]
        factors += [self._shape(matrix) for matrix in op.matrices]
        factors += [(leaf.rows, leaf.cols) for leaf in self._around(op)[1]]
        if op.kind == "add":
            for one, two in zip(*factors, strict=True):
                self._equal(one, two)
            return factors[0]
        for (_, left), (right, _) in pairwise(factors):
            self._equal(left, right)
        return factors[0][0], factors[-1][1]

    def _around(self, op: Op) -> tuple[list[Leaf], list[Leaf]]:
        """Give the leaves that multiply from the left, and from the right."""
        if op.kind == "linear":
            return [], [self._leaf(op.others[0], "weight")]
        if op.kind == "scale":
            return [self._leaf(op.others[0], "vector")], []
        if op.kind != "spmm":
            return [], []
        graph, row, col = op.others
        left = [] if row is None else [self._leaf(row, "vector")]
        left += [self._leaf(graph, "mean")] if op.options["reduce"] == "mean" else []
        left.append(self._leaf(graph, "graph"))
        return left + ([] if col is None else [self._leaf(col, "vector")]), []

    def _expression(self, node: Any) -> tuple[Expression, str]:
        """Write a node as an expression, and as the composition that the user wrote."""
        op = self.ops.get(node)
        if op is None:
            leaf = self._leaf(node, "dense")
            return leaf, leaf.name
        parts = [self._expression(matrix) for matrix in op.matrices]
        if op.kind == "add":
            flat = [text[1:-1] if isinstance(part, Sum) else text for part, text in parts]
            return total(*(part for part, _ in parts)), f"({' + '.join(flat)})"
        left, right = ([(leaf, leaf.name) for leaf in side] for side in self._around(op))
        factors = [*left, *parts, *right]
        return product(*(part for part, _ in factors)), f"({'·'.join(t for _, t in factors)})"

    # Running it

    def __call__(self, *given: Any) -> Any:
        """Compute the region as planned; as it is written where the values do not fit."""
        names = [name for (_, role), name in self.names.items() if role != "mean"]
        raw = dict(zip(names, given, strict=True))
        values, composition = self.values(raw), self.composition
        if values is None or composition is None:
            return self.as_written(self.root, raw)
        stay = [
            name
            for name, value in values.items()
            if isinstance(value, Tensor) and composition.settings.is_constant(value)
        ]
        planned = composition.planned(values, FUNCTIONS, Code("", self._own), stay)
        if planned.program is None:
            return self.as_written(self.root, raw)
        return planned.program(values, FUNCTIONS)

    def _own(self, values: Mapping[str, Any]) -> Any:
        weights = {name for (_, role), name in self.names.items() if role == "weight"}
        raw = {name: v.t() if name in weights else v for name, v in values.items()}
        return self.as_written(self.root, raw)

    def values(self, raw: Mapping[str, Any]) -> dict[str, Any] | None:
        """Give the value of each leaf; None unless they are matrices that fit together."""
        like = next((value for value in raw.values() if isinstance(value, Tensor)), None)
        if like is None or not plannable(like):
            return None
        found: dict[str, Any] = {}
        for (key, role), name in self.names.items():
            if role == "mean":
                graph = raw.get(self.names[key, "graph"])
                found[name] = _means(graph, like) if isinstance(graph, Graph) else None
            else:
                value = raw[name]
                two = isinstance(value, Tensor) and value.dim() == 2
                found[name] = value.t() if role == "weight" and two else value
        return found if self._fit(found, like) else None

    def _fit(self, values: Mapping[str, Any], like: Tensor) -> bool:
        sizes: dict[str, int] = {}
        for name, leaf in self.leaves.items():
            value = values[name]
            if leaf.kind in ("dense", "diagonal"):
                dims = 2 if leaf.kind == "dense" else 1
                if not isinstance(value, Tensor) or value.dim() != dims:
                    return False
                if (value.dtype, value.device) != (like.dtype, like.device):
                    return False
            elif not isinstance(value, Graph) or not suits(value, like):
                return False
            for size, number in zip((leaf.rows, leaf.cols), value.shape, strict=False):
                if sizes.setdefault(size, number) != number:
                    return False
        return True

    def as_written(self, node: Any, raw: Mapping[str, Any]) -> Any:
        """Compute a node as the user wrote it."""
        op = self.ops.get(node)
        if op is None:
            return raw[self.names[node, "dense"]]
        parts = [self.as_written(matrix, raw) for matrix in op.matrices]
        if op.kind == "matmul":
            return parts[0] @ parts[1]
        if op.kind == "add":
            return parts[0] + parts[1]
        if op.kind == "linear":
            return linear(parts[0], raw[self.names[op.others[0], "weight"]])
        if op.kind == "scale":
            by, vector = op.options["by"], raw[self.names[op.others[0], "vector"]]
            method = by.target if callable(by.target) else getattr(torch.Tensor, by.target)
            return method(vector, *by.args[1:]) * parts[0]
        graph, *scales = op.others
        r, c = (None if s is None else raw[self.names[s, "vector"]] for s in scales)
        graph = raw[self.names[graph, "graph"]]
        return spmm(graph, parts[0], reduce=op.options["reduce"], row_scale=r, col_scale=c)


def _means(graph: Graph, like: Tensor) -> Tensor:
    return graph_tensors(graph).rows.inverse_degree(like.dtype)


def _stays(value: Any, model: Module) -> bool:
    """Tell whether a node is a tensor of the model's that is no parameter."""
    found = None if isinstance(value, str) else attribute(value, model)
    return isinstance(found, Tensor) and not isinstance(found, Parameter)


def attribute(node: fx.Node, model: Module) -> Any:
    """Give the attribute that a node reads; None for other nodes."""
    if node.op != "get_attr":
        return None
    found: Any = model
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


# Finding them


def regions(graph: fx.Graph, model: Module) -> Iterator[Region]:
    """Give the largest trees of operations that multiply with a graph, the first ones first."""
    ops = {node: op for node in graph.nodes if (op := _op(node, model)) is not None}
    inner = {
        matrix
        for node, op in ops.items()
        for matrix in op.matrices
        if matrix in ops and len(matrix.users) == 1 == op.matrices.count(matrix)
        if not ops[matrix].options.get("bias")
    }
    for root in ops:
        if root not in inner:
            within = {root: ops[root]}
            for node in reversed(graph.nodes):  # users before what they use
                if node in inner and next(iter(node.users)) in within:
                    within[node] = ops[node]
            multiplies = any(op.kind == "spmm" for op in within.values())
            if multiplies and not _written_between(graph, within, model):
                yield Region(root, within, model)


def _written_between(graph: fx.Graph, within: Mapping[fx.Node, Op], model: Module) -> bool:
    """Tell whether anything is written in place while the region is computed as written."""
    nodes = list(graph.nodes)
    places = [place for place, node in enumerate(nodes) if node in within]
    return any(writes(node, model) for node in nodes[min(places) : max(places)])


def writes(node: fx.Node, model: Module) -> bool:
    """Tell whether a node writes to what it is given."""
    target, inplace = node.target, node.kwargs.get("inplace", False)
    if node.op == "call_module":
        inplace = getattr(model.get_submodule(str(target)), "inplace", False)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    called = node.op in ("call_function", "call_method")
    written = name.endswith("_") and not name.endswith("__")
    written = (written or target in _WRITING) and called
    return bool(inplace) or node.kwargs.get("out") is not None or written


def _op(node: fx.Node, model: Module) -> Op | None:
    """Tell which product or sum a node is."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        plain = type(module) is Linear and not hooked(module) and len(node.args) == 1
        bias = {"bias": getattr(module, "bias", None) is not None}
        return Op("linear", (node.args[0],), (node.target,), bias) if plain else None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target is spmm:
        return _op_of_spmm(node)
    if len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    left, right = node.all_input_nodes * (2 if node.args[0] is node.args[1] else 1)
    if node.target in _MATMUL:
        return Op("matmul", (left, right))
    if node.target in _ADD:
        flat = any(_is_flat(side, model) for side in (left, right))
        return None if flat else Op("add", (left, right))
    if node.target in _MULTIPLY:
        for factor, matrix in ((left, right), (right, left)):
            widened = _widened(factor)
            if widened is not None:
                return Op("scale", (matrix,), (widened,), {"by": factor})
    return None


def _op_of_spmm(node: fx.Node) -> Op | None:
    try:
        given = inspect.signature(spmm).bind(*node.args, **node.kwargs).arguments
    except TypeError:
        return None
    reduce = given.get("reduce", "sum")
    if given.get("edge_weight") is not None or reduce not in ("sum", "mean"):
        return None
    scales = given.get("row_scale"), given.get("col_scale")
    return Op("spmm", (given["x"],), (given["graph"], *scales), {"reduce": reduce})


def _widened(node: Any) -> Any:
    """Give the vector ``d`` of ``d[:, None]``, ``d.unsqueeze(-1)`` or ``d.view(-1, 1)``."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    vector, *rest = node.args
    if node.kwargs:
        return None
    last = node.target in ("unsqueeze", torch.unsqueeze) and rest in ([-1], [1])
    return vector if last or _WIDE.get(node.target) == rest else None


def _is_flat(node: fx.Node, model: Module) -> bool:
    """Tell whether a node is known to be no matrix, such as a bias."""
    found = attribute(node, model)
    return isinstance(found, Tensor) and found.dim() != 2
