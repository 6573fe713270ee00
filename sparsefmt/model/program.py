"""Trees of an expression as calls on tensors; what is made of constants runs when these change."""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from ..autograd.attention import gat_aggregate
from ..autograd.matmul import multiply, scaled, spmm
from ..autograd.tensors.edge_index import state_of
from ..autograd.tensors.lifetimes import note
from ..autograd.tensors.prepare import GraphLike, tensors_of
from ..autograd.tensors.shared import Shared, shared
from ..plan.expression import Leaf
from ..plan.rules import Step, Tree, steps

Values = Mapping[str, Any]
Functions = Mapping[str, Callable[..., Any]]
Stamp = tuple["ref[Tensor]", Any]


class Weighted(NamedTuple):
    """A graph and values: in CSR order, or for a ``Shared`` graph in the order of its edges."""

    graph: Any
    values: Tensor


class Attention(NamedTuple):
    """The attention of one head, which multiplies without being written down."""

    graph: Any
    sources: Tensor
    targets: Tensor
    options: Mapping[str, Any]


Factor: TypeAlias = "GraphLike | Weighted | Attention"


def _spmm(A: Factor, X: Tensor, row: Tensor | None = None, col: Tensor | None = None) -> Tensor:
    dist = shared(A.graph if isinstance(A, Weighted | Attention) else A)
    if isinstance(A, Attention):
        function = partial(gat_aggregate, A.graph) if dist is None else dist.gat_aggregate
        return function(X, A.sources, A.targets, **A.options)
    if dist is not None:
        values = A.values if isinstance(A, Weighted) else None
        y: Tensor = dist.spmm(X, values, row_scale=row, col_scale=col)
        return y
    if isinstance(A, Weighted):
        return multiply(tensors_of(A.graph), False, X, A.values, row, col)
    return spmm(A, X, row_scale=row, col_scale=col)


def _scale_entries(
    A: "GraphLike | Weighted", row: Tensor | None = None, col: Tensor | None = None
) -> Weighted:
    if isinstance(A, Shared):
        return Weighted(A, shared(A).scaled_entries(row, col))
    graph, values = A if isinstance(A, Weighted) else (A, tensors_of(A).csr_values)
    like = col if row is None else row
    assert like is not None  # a rule gives one of them
    if values is None:
        values = like.new_ones(tensors_of(graph).nnz)
    return Weighted(graph, scaled(tensors_of(graph), False, values.to(like.dtype), row, col))


#: What computes each kind of primitive, called with operands by their roles.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm": lambda left, right: left @ right,
    "spmm_unweighted": _spmm,
    "spmm_weighted": _spmm,
    "spmm_scaled": _spmm,
    "broadcast": lambda X, row: row[:, None] * X,
    "broadcast_cols": lambda X, col: X * col,
    "scale_entries": _scale_entries,
    "scale_diagonal": lambda row, col: row * col,
    "add": lambda **terms: reduce(add, terms.values()),
}


class Program:
    """The calls of a tree, in order; those of constants alone run when constants change."""

    def __init__(self, tree: Tree) -> None:
        order = steps(tree)
        numbers: dict[Tree, Any] = {step: number for number, step in enumerate(order)}

        def key(part: Tree) -> Any:
            return numbers[part] if isinstance(part, Step) else part.name

        calls = [
            (step, (key(step), step.rule.kind, [(r, key(p)) for r, p in step.by_role().items()]))
            for step in order
        ]
        self._of_constants = [call for step, call in calls if step.constant]
        self._of_inputs = [call for step, call in calls if not step.constant]
        self._result = key(tree)
        leaves = {leaf: None for step in order if step.constant for leaf in _leaves(step)}
        self._constants = [leaf.name for leaf in leaves if leaf.kind in ("dense", "diagonal")]
        #: Stamps of its constants, the graph's count of clearings, and what was made of them.
        self._cache: tuple[list[Stamp], int, dict[Any, Any]] | None = None

    def __call__(self, values: Values, functions: Functions) -> Any:
        """Compute the tree: values by leaf's name, functions by kind of step."""
        results = dict(values)
        if not self._of_constants:
            _run(self._of_inputs, results, functions)
            return results[self._result]
        if capturing(first_tensor(values)) and not self._is_fresh(values):
            # Memory of a captured CUDA graph is that graph's: nothing of it is cached.
            _run([*self._of_constants, *self._of_inputs], results, functions)
            return results[self._result]
        cached = self._cached(values, functions)
        results.update(cached)
        _run(self._of_inputs, results, functions)
        result = results[self._result]
        # What is cached stays ours, whatever the caller writes to the result.
        return result.clone() if self._result in cached else result

    def _cached(self, values: Values, functions: Functions) -> dict[Any, Any]:
        """Return the results of the constant steps, computed anew if a constant has changed."""
        if self._cache is None or not self._is_fresh(values):
            stamps, results = [stamp(values[name]) for name in self._constants], dict(values)
            with torch.inference_mode(False), torch.no_grad():
                _run(self._of_constants, results, functions)
            made = {key: results[key] for key, *_ in self._of_constants}
            self._cache = stamps, times_forgotten(values), made
        note(self._cache[2])  # a CUDA graph that is being recorded keeps it for its replays
        return self._cache[2]

    def _is_fresh(self, values: Values) -> bool:
        """Return True if the cache was made of these very constants."""
        if self._cache is None:
            return False
        stamps, forgotten, _ = self._cache
        return forgotten == times_forgotten(values) and all(
            is_stamped(values[name], made)
            for name, made in zip(self._constants, stamps, strict=True)
        )


def _run(calls: list[Any], results: dict[Any, Any], functions: Functions) -> None:
    for key, kind, operands in calls:
        results[key] = functions[kind](**{role: results[name] for role, name in operands})


def _leaves(tree: Tree) -> list[Leaf]:
    if isinstance(tree, Step):
        return [leaf for part in tree.operands for leaf in _leaves(part)]
    return [tree]


def times_forgotten(values: Values) -> int:
    """Return how often processes that share a graph were told to forget features that stay."""
    dist = shared_of(values)
    return 0 if dist is None else int(dist.times_forgotten)


def shared_of(values: Values) -> Any:
    """Return the graph that processes share, None if there is none."""
    return next((value for value in values.values() if isinstance(value, Shared)), None)


def first_tensor(values: Values) -> Tensor:
    """Return the first tensor among the values."""
    return next(value for value in values.values() if isinstance(value, Tensor))


def stamp(value: Tensor) -> Stamp:
    """Return what tells a tensor, unchanged, from every other."""
    return ref(value), None if value.is_inference() else state_of(value)


def is_stamped(value: Tensor, made: Stamp) -> bool:
    """Return True if it is that tensor, seen unchanged; never of inference's tensors."""
    return made[0]() is value and not value.is_inference() and state_of(value) == made[1]


def capturing(like: Tensor) -> bool:
    """Return True while a CUDA graph is captured, whose memory is its own."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()
