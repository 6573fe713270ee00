"""Execution of trees, by functions for each kind of primitive."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

from .. import ops
from .rules import Step, Tree, steps


def run(tree: Tree, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> Any:
    """Compute the matrix of a tree; equal steps run once.

    Parameters
    ----------
    tree : Tree
    values : dict
        Of each leaf, by its name; a diagonal is a vector.
    functions : dict
        Of each kind of primitive, called with its operands by their roles ("row", "A", "col", "X",
        "left", "right", "term0", ..., "argument0", ...).
    """
    results: dict[Tree, Any] = {}

    def value(part: Tree) -> Any:
        return results[part] if isinstance(part, Step) else values[part.name]

    for step in steps(tree):
        operands = {role: value(part) for role, part in step.by_role().items()}
        results[step] = functions[step.rule.kind](**operands)
    return value(tree)


#: Functions of arrays; the caller adds attention and other functions of an ``Apply``.
ARRAY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gemm": lambda left, right: left @ right,
    "spmm_unweighted": ops.spmm,
    "spmm_weighted": ops.spmm,
    "spmm_scaled": lambda A, X, row=None, col=None: ops.spmm(A, X, row_scale=row, col_scale=col),
    "broadcast": lambda X, row: row[:, None] * X,
    "broadcast_cols": lambda X, col: X * col,
    "scale_entries": lambda A, row=None, col=None: ops.scale(A, row=row, col=col),
    "scale_diagonal": lambda row, col: row * col,
    "add": lambda **terms: reduce(add, terms.values()),
}
