"""Calls of each public function of ``autograd``: its arguments, and what they come to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import SEED, naive_attend, naive_gat
from autograd_cases import entries, naive_sddmm, naive_softmax, naive_spmm
from torch.utils._python_dispatch import TorchDispatchMode

from sparsefmt import COO, Graph, autograd, ops
from sparsefmt.interop.torch import to_tensor

#: Public functions that compute nothing.
NO_OPERATIONS = {"as_graph", "prepare"}
SHAPES = ((0, 5), (5, 0), (0, 0), (4, 3))


@dataclass(frozen=True)
class Call:
    """A function of a graph; shapes are of ``rows, cols, entries, feat`` and numbers."""

    name: str
    function: Callable[..., Any]
    shapes: dict[str, tuple[Any, ...]]  #: by the names of the function's parameters
    oracle: Callable[..., torch.Tensor]  #: of a graph in CSR order and the same, differentiable
    options: dict[str, Any] = field(default_factory=dict)
    constants: tuple[str, ...] = ()  #: arguments without a gradient
    makes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    square: bool = False
    graph: bool = True  #: whether there is one
    twice: bool = True  #: whether gradients may be differentiated again
    of_entries: bool = False  #: whether the result has a row for each
    absolute: bool = False  #: whether its value at absolute arguments sums the sizes of products
    linear: tuple[str, ...] = ()  #: arguments, each with a gradient, in which it is linear
    chooses: bool = False  #: whether gradients depend on which of nearly equal values is largest
    numbered: bool = False  #: whether it depends on the number of an entry, by a mask or a sample
    narrow: bool = True  #: whether its result is narrow under autocast
    atomics: bool = False  #: whether its gradient adds up by them on a GPU

    def __str__(self):
        return self.name

    def arguments(self, graph, *, dtype=torch.float64, device="cpu", feat=3, seed=0, grad=True):
        """Make arguments of this graph, leaves that require a gradient but for constants."""
        generator = torch.Generator().manual_seed(seed)
        sizes = {"rows": graph.n_rows, "cols": graph.n_cols, "entries": graph.nnz, "feat": feat}
        args = {}
        for name, shape in self.shapes.items():
            shape = [sizes.get(size, size) for size in shape]
            value = torch.randn(shape, dtype=torch.float64, generator=generator)
            value = self.makes.get(name, torch.clone)(value).to(device)
            args[name] = value.to(dtype) if value.is_floating_point() else value
        return self.leaves(args, grad=grad)

    def leaves(self, args, *, grad=True):
        """Return the same arguments as leaves."""
        return {
            name: value.detach().clone().requires_grad_(grad and name not in self.constants)
            for name, value in args.items()
        }

    def wanted(self, args):
        """Return the arguments with a gradient."""
        return [value for value in args.values() if value.requires_grad]

    def run(self, graph, args):
        result = self.function(*[graph] * self.graph, **args, **self.options)
        return result[1] if isinstance(result, tuple) else result

    def of_values(self, graph):
        """Return the function of the values of all arguments, in their order."""
        return lambda *values: self.run(graph, dict(zip(self.shapes, values, strict=True)))

    def step(self, graph, args, grad=None):
        """Return the result and the gradients."""
        y = self.run(graph, args)
        return [y, *torch.autograd.grad(y, self.wanted(args), ramp(y) if grad is None else grad)]

    def expected(self, graph, args, **options):
        """Compute the result by the oracle, whose entries are in CSR order."""
        graph = graph.to("cpu")
        order = to_tensor(graph.csr_perm).long()
        in_order = {
            name: value[order] if self.shapes[name][0] == "entries" else value
            for name, value in args.items()
        }
        y = self.oracle(Graph(graph.csr), **in_order, **options)
        if not self.of_entries:
            return y
        return y[order.argsort()]


def ramp(y):
    """Return numbers from -1 to 1 of the shape, dtype and device of a result."""
    return torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y)


def graph_of(call, *sizes, kind="shuffled", device="cpu", index_dtype=np.int32) -> Graph:
    """Make a graph of ``n_rows, n_cols, nnz``: a hub, empty rows, loops, duplicates."""
    n_rows, n_cols, nnz = sizes
    n_cols = n_rows if call.square else n_cols
    rng = np.random.default_rng(0)
    row, col = rng.integers(0, max(n_rows, 1), nnz), rng.integers(0, max(n_cols, 1), nnz)
    row[: nnz // 4], row[nnz // 4 : nnz // 2] = n_rows - 1, col[nnz // 4 : nnz // 2] % (n_rows or 1)
    stays = (row % 3 != 1) & (n_cols > 0)
    row, col = row[stays].astype(index_dtype), col[stays].astype(index_dtype)
    if kind == "transposed":
        return Graph(COO(col, row, shape=(n_cols, n_rows))).to(device).transposed
    graph = Graph(COO(row, col, shape=(n_rows, n_cols))).to(device)
    return Graph(graph.csr) if kind == "sorted" else graph


class Ops(TorchDispatchMode):
    """Library ops that the dispatcher sees, and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparsefmt":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [op.name().split("::")[1] for op, _ in self.calls]


def assert_same(results, expected, **tolerances):
    torch.testing.assert_close([*results], [*expected], **tolerances)


def of_heads(graph, x, edge_weight, row_scale=None, col_scale=None, reduce="sum"):
    """One head after another."""
    features = [x] * edge_weight.shape[1] if x.dim() == 2 else x.unbind(1)
    pairs = zip(features, edge_weight.unbind(1), strict=True)
    return torch.stack([naive_spmm(graph, *p, row_scale, col_scale, reduce) for p in pairs], 1)


def largest(x, k):
    """Keep the ``k`` largest of each row, of equal ones the first."""
    chosen = x.detach().sort(dim=1, descending=True, stable=True).indices[:, :k]
    return x * torch.zeros_like(x).scatter(1, chosen, 1)


def product(graph, x, edge_weight=None, row_scale=None, col_scale=None, reduce="sum"):
    return naive_spmm(graph, x, edge_weight, row_scale, col_scale, reduce)


def product_of_largest(graph, x, *, k, **args):
    return product(graph, largest(x, k), **args)


def shares(graph, width, strategy="bucket", seed=0, *, mean=False, rescale=False):
    """Return what multiplies at each entry of a graph: 0 where it is not in the sample."""
    rows, _ = entries(graph)
    _, perm = ops.sample_with_perm(graph.to("cpu").csr, width, strategy=strategy, seed=seed)
    sampled = torch.zeros(graph.nnz, dtype=torch.float64)
    sampled[torch.from_numpy(perm).long()] = 1
    count = torch.bincount(rows, sampled, minlength=graph.n_rows)
    length = torch.bincount(rows, minlength=graph.n_rows)
    return sampled * (1 / count if mean else length / count if rescale else count**0)[rows]


def product_of_sample(graph, x, edge_weight, row_scale, col_scale, **options):
    return naive_spmm(graph, x, edge_weight * shares(graph, **options), row_scale, col_scale)


def with_own(graph, x, own, edge_weight=None, row_scale=None, col_scale=None, without=None,
             k=None):  # fmt: skip
    x = x if k is None else largest(x, k)
    own_part = x if without is None else x.masked_fill(without, 0)
    return product(graph, x, edge_weight, row_scale, col_scale) + own * own_part


def propagated(graph, x, scale, own, edge_weight, without, bias):
    return with_own(graph, x, own, edge_weight, scale, scale, without) + bias


def gat_of_vectors(graph, h, source, target, edge_scores, loop_scores=None, bias=0, **options):
    scores = [(h * vector).sum(-1) for vector in (source, target)]
    return bias + naive_gat(graph, h, *scores, edge_scores, loop_scores, **options)


def messages(graph, edge_features, x=None, *, message, reduce):
    rows, cols = entries(graph)
    both = {
        "mul": lambda: x[cols] * edge_features,
        "add": lambda: x[cols] + edge_features,
        "relu_add": lambda: torch.relu(x[cols] + edge_features),
        "copy_edge": lambda: edge_features,
    }[message]()
    y = both.new_zeros(graph.n_rows, both.shape[1]).index_add(0, rows, both)
    degree = torch.bincount(rows, minlength=graph.n_rows).clamp(min=1)
    return y / degree[:, None] if reduce == "mean" else y


def combination(graph, left, right, *, op):
    rows, cols = entries(graph)
    x, y = left[rows], right[cols]
    return {"add": x + y, "sub": x - y, "mul": x * y, "dot": (x * y).sum(1)}[op]


def softmax(graph, scores):
    return naive_softmax(graph, scores) + 0 * scores  # recorded without entries too


def normalised(graph, edge_weight, own=0):
    """Normalised values, and the factors of vertices that have ``own`` besides."""
    rows, cols = entries(graph)
    degree = own + edge_weight.new_zeros(graph.n_rows).index_add(0, rows, edge_weight)
    scale = torch.where(degree > 0, degree, 1) ** -0.5 * (degree > 0)
    return scale[rows] * edge_weight * scale[cols], scale


def product_with_loops(graph, x, edge_weight):
    """Multiply by the normalised matrix, whose values are in the order of its own graph."""
    normalised, values = autograd.gcn_norm(graph, edge_weight)
    return autograd.spmm(normalised, x, values)


def normalised_product(graph, x, edge_weight):
    rows, cols = entries(graph)
    own = torch.ones(graph.n_rows, dtype=torch.float64).index_fill(0, rows[rows == cols], 0)
    values, scale = normalised(graph, edge_weight, own)
    return naive_spmm(graph, x, values) + (own * scale**2)[:, None] * x


def relations(graph, x, weight, edge_type, own=0, *, reduce):
    rows, _ = entries(graph)
    y = x.new_zeros(graph.n_rows, weight.shape[2]) + own
    for number, maps in enumerate(weight):
        of_type = (edge_type == number).double()
        sums = naive_spmm(graph, x, of_type)
        degree = torch.bincount(rows, of_type, minlength=graph.n_rows).clamp(min=1)
        y = y + (sums / degree[:, None] if reduce == "mean" else sums) @ maps
    return y


X, Y, WEIGHT = ("cols", "feat"), ("rows", "feat"), ("entries",)
SCALES = {"row_scale": ("rows",), "col_scale": ("cols",)}
HEADED, TARGETS = ("cols", 2, "feat"), ("rows", 2, "feat")
SCORES, ROWS, VECTOR = ("entries", 2), ("entries", "feat"), (2, "feat")
LOOPS = {"dropout": 0.4, "seed": SEED, "self_loops": True}
MASKED = {"dropout": 0.4, "seed": SEED, "loops": True}
MARK = {"without": lambda value: value > 0}


def positive(value):
    return value.abs() + 0.1


def call(function, name, shapes, oracle, options=None, of_oracle=None, **traits):
    """Make the call of a public function; an oracle has its options, or those of its own."""
    options = options or {}
    oracle = partial(oracle, **(options if of_oracle is None else of_oracle))
    name = f"{function} {name}".strip()
    return Call(name, getattr(autograd, function), shapes, oracle, options, **traits)


def attention(function, shapes, oracle, options):
    """Make a call without options, and one of a square graph with loops, dropout and a seed."""
    traits = {"twice": False}
    return (
        call(function, "", shapes, oracle, {}, options, **traits),
        call(function, "of edges", {**shapes, "edge_scores": SCORES}, oracle, LOOPS,
             {**options, **MASKED}, square=True, numbered=True, **traits),
    )  # fmt: skip


def gatv2(graph, left, right, att, edge_scores=None, **options):
    return naive_attend(graph, right, left, None, att, edge_scores, **options)


def dot(graph, queries, keys, values=None, edge_scores=None, **options):
    scale = 1 / keys.shape[-1] ** 0.5 if keys.shape[-1] else 1.0
    return naive_attend(graph, queries, keys, values, None, edge_scores, scale=scale, **options)


def gat(graph, h, el, er, edge_scores=None, **options):
    return naive_gat(graph, h, el, er, edge_scores, **options)


NORM = {"makes": {"edge_weight": positive}, "square": True, "twice": False, "atomics": True}
BOTH = ("left", "right")
VECTORS = {"h": HEADED, "source": VECTOR, "target": VECTOR, "edge_scores": SCORES}
CALLS = [
    *(
        call("spmm", f"{reduce} scaled", {"x": X, "edge_weight": WEIGHT, **SCALES}, product,
             {"reduce": reduce}, absolute=True, linear=("x", "edge_weight"))
        for reduce in ("sum", "mean")
    ),
    *(
        call("spmm", f"{reduce} scaled", {"x": X, "edge_weight": WEIGHT, **SCALES}, product,
             {"reduce": reduce}, absolute=True, chooses=True, twice=False)
        for reduce in ("max", "min")
    ),
    *(
        call("spmm", reduce, {"x": X, "edge_weight": WEIGHT}, product, {"reduce": reduce},
             absolute=True, linear=("x", "edge_weight"))
        for reduce in ("sum", "mean")
    ),
    call("spmm", "unweighted", {"x": X}, product, absolute=True, linear=("x",)),
    *(
        call("spmm", f"of heads {reduce}",
             {"x": shape, "edge_weight": SCORES, **SCALES}, of_heads, {"reduce": reduce},
             absolute=True, linear=("x", "edge_weight"))
        for reduce, shape in (("sum", HEADED), ("mean", X))
    ),
    call("sddmm", "", {"x": Y, "y": X}, lambda graph, x, y: naive_sddmm(graph, x, y),
         of_entries=True, absolute=True, linear=("x", "y")),
    call("sddmm", "of heads", {"x": TARGETS, "y": HEADED}, naive_sddmm, of_entries=True,
         absolute=True, linear=("x", "y")),
    *(
        call("edge_softmax", f"of {len(shape)} axes", {"scores": shape}, softmax,
             of_entries=True, narrow=False)
        for shape in (WEIGHT, SCORES)
    ),
    *attention("gat_aggregate", {"h": HEADED, "el": ("cols", 2), "er": ("rows", 2)}, gat, {}),
    *attention("gatv2_aggregate", {"left": HEADED, "right": TARGETS, "att": VECTOR}, gatv2, {}),
    *attention("dot_aggregate", {"queries": TARGETS, "keys": HEADED, "values": HEADED}, dot, {}),
    call("dot_aggregate", "of keys", {"queries": TARGETS, "keys": HEADED}, dot, twice=False),
    call("gat_of_vectors", "", VECTORS, gat_of_vectors, square=True, twice=False),
    call("gat_of_vectors", "and a bias", {**VECTORS, "loop_scores": ("rows", 2), "bias": VECTOR},
         gat_of_vectors, LOOPS, MASKED, square=True, twice=False, numbered=True),
    call("maxk", "", {"x": X}, lambda graph, x, k: largest(x, k), {"k": 2}, graph=False,
         chooses=True, narrow=False),
    *(
        call("maxk_aggregate", reduce, {"x": X, "edge_weight": WEIGHT, **SCALES},
             product_of_largest, {"k": 2, "reduce": reduce}, linear=("edge_weight",), chooses=True)
        for reduce in ("sum", "mean")
    ),
    call("maxk_aggregate", "unweighted", {"x": X}, product_of_largest, {"k": 2}, chooses=True),
    *(
        call("sampled_aggregate", strategy, {"x": X, "edge_weight": WEIGHT, **SCALES},
             product_of_sample, {"width": width, "strategy": strategy, "seed": SEED, **factors},
             absolute=True, linear=("x", "edge_weight"), numbered=True, twice=False)
        for strategy, width, factors in (
            ("bucket", 3, {}), ("fastrand", 2, {"mean": True}), ("random", 5, {"rescale": True})
        )
    ),
    call("aggregate_with_own", "", {"x": X, "own": ("rows", 1), "edge_weight": WEIGHT, **SCALES},
         with_own, square=True, absolute=True, narrow=False),
    call("aggregate_with_own", "of the largest", {"x": X, "own": (1,), "without": ("rows", 1)},
         with_own, {"k": 2}, square=True, constants=("without",), makes=MARK, chooses=True),
    call("propagate", "", {"x": X, "scale": ("rows",), "own": ("rows", 1), "edge_weight": WEIGHT,
                           "without": ("rows", 1), "bias": ("feat",)}, propagated,
         square=True, constants=("scale", "own", "edge_weight", "without"), makes=MARK),
    call("gcn_norm", "", {"edge_weight": WEIGHT}, lambda *a, **o: normalised(*a, **o)[0],
         {"self_loops": False}, {}, **NORM, of_entries=True, narrow=False),
    Call("gcn_norm with loops", product_with_loops, {"x": X, "edge_weight": WEIGHT},
         normalised_product, constants=("x",), **NORM),
    *(
        call("message_aggregate", f"{message} {reduce}", {"x": X, "edge_features": ROWS}, messages,
             {"message": message, "reduce": reduce}, absolute=True,
             linear=("x", "edge_features") if message == "mul" else ())
        for message, reduce in (("mul", "sum"), ("add", "mean"), ("relu_add", "sum"),
                                ("mul", "mean"), ("relu_add", "mean"))
    ),
    *(
        call("message_aggregate", f"copy_edge {reduce}", {"edge_features": ROWS},
             messages, {"x": None, "message": "copy_edge", "reduce": reduce}, absolute=True)
        for reduce in ("sum", "mean")
    ),
    *(
        call("edge_combine", op, {"left": Y, "right": X}, combination, {"op": op}, of_entries=True,
             absolute=op != "sub", linear=linear)
        for op, linear in (("add", ()), ("sub", ()), ("mul", BOTH), ("dot", BOTH))
    ),
    *(
        call("relational_aggregate", reduce, {"x": X, "weight": (3, "feat", 4), "own": ("rows", 4),
                                              "edge_type": WEIGHT}, relations, {"reduce": reduce},
             constants=("edge_type",), makes={"edge_type": lambda v: (v.abs() * 2).long() % 3})
        for reduce in ("mean", "sum")
    ),
]  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS, ids=str)
