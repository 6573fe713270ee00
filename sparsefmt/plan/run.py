"""Run a tree: on NumPy and CuPy arrays here, on tensors with the torch layer's functions."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

from .. import ops
from .rules import Step, Tree, steps


def run(tree: Tree, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Compute a tree; equal steps run once.

    Parameters
    ----------
    tree : Tree
    values : dict
        Of each leaf, by its name; a diagonal is a vector.
    functions : dict
        Of each kind of primitive, called with its operands by their roles ("row", "A", "col", "X",
        "left", "right", "term0", ..., "argument0", ...).
    """
    found: dict[Tree, Any] = {}

    def value(part: Tree) -> Any:
        return found[part] if isinstance(part, Step) else values[part.name]

    for step in steps(tree):
        operands = {role: value(part) for role, part in step.by_role().items()}
        found[step] = functions[step.rule.kind](**operands)
    return value(tree)


def _broadcast(X: Any, row: Any) -> Any:
    return row[:, None] * X


def _broadcast_cols(X: Any, col: Any) -> Any:
    return X * col


def _spmm_scaled(A: Any, X: Any, row: Any = None, col: Any = None) -> Any:
    return ops.spmm(A, X, row_scale=row, col_scale=col)


def _scale_entries(A: Any, row: Any = None, col: Any = None) -> Any:
    return ops.scale(A, row=row, col=col)


#: For arrays; attention and what else a function computes is the caller's to add.
ARRAY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm": lambda left, right: left @ right,
    "spmm_unweighted": ops.spmm,
    "spmm_weighted": ops.spmm,
    "spmm_scaled": _spmm_scaled,
    "broadcast": _broadcast,
    "broadcast_cols": _broadcast_cols,
    "scale_entries": _scale_entries,
    "scale_diagonal": lambda row, col: row * col,
    "add": lambda **terms: reduce(add, terms.values()),
}
