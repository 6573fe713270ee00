"""Slow and obvious: messages with features of their entries, in float64; see matmul's oracle."""

from collections.abc import Callable

import numpy as np

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.oracle import float64, stored_entries
from ..matmul.oracle import degrees, precision_of

_MESSAGES: dict[str, Callable[[Array, Array], Array]] = {
    "mul": lambda x, w: x * w,
    "add": lambda x, w: x + w,
    "relu_add": lambda x, w: np.maximum(x + w, 0),
    "copy_edge": lambda x, w: w,
}
#: Derivatives of a message in the vertex's features and in the edge's.
_DERIVATIVES: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "mul": lambda x, w: (w, x),
    "add": lambda x, w: (np.ones_like(w), np.ones_like(w)),
    "relu_add": lambda x, w: (np.where(x + w <= 0, 0.0, 1.0),) * 2,
    "copy_edge": lambda x, w: (np.zeros_like(w), np.ones_like(w)),
}
_OPS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}


def message_oracle(
    A: Format, X: Array, E: Array, *, message: str = "mul", reduce: str = "sum"
) -> Array:
    """Reduce the messages of each row of ``A``, one entry after the other; (n_rows, feat)."""
    X, E = float64(X), float64(E)
    result = np.zeros((A.n_rows, E.shape[1]))
    for e, (row, col, _) in enumerate(stored_entries(A)):
        result[row] += _MESSAGES[message](X[col], E[e])
    return result / _divisors(A, reduce)


def message_bound(
    A: Format, X: Array, E: Array, *, message: str = "mul", reduce: str = "sum", factor: float = 2.0
) -> Array:
    """Bound how far sums of messages, computed in their dtype, may lie from the oracle."""
    eps, least = precision_of(E.dtype)
    sizes = np.abs(float64(X)), np.abs(float64(E))
    size = message_oracle(A, *sizes, message=message, reduce=reduce)
    terms = degrees(A)[:, None]
    return factor * (terms + 2 * (terms > 0)) * (eps * size + least)


def message_gradients_oracle(
    A: Format, X: Array, E: Array, grad: Array, *, message: str = "mul", reduce: str = "sum"
) -> tuple[Array, Array]:
    """Compute the gradients of ``message_oracle`` in ``X`` and ``E``, entry by entry."""
    X, E = float64(X), float64(E)
    grad = float64(grad) / _divisors(A, reduce)
    dX, dE = np.zeros(X.shape), np.zeros(E.shape)
    for e, (row, col, _) in enumerate(stored_entries(A)):
        of_x, of_e = _DERIVATIVES[message](X[col], E[e])
        dX[col] += grad[row] * of_x
        dE[e] = grad[row] * of_e
    return dX, dE


def combine_oracle(A: Format, left: Array, right: Array, op: str) -> Array:
    """Compute ``left[i] op right[j]`` at each stored entry, in the order of ``A``."""
    left, right = float64(left), float64(right)
    result = np.zeros((A.nnz, left.shape[1]))
    for e, (row, col, _) in enumerate(stored_entries(A)):
        result[e] = _OPS[op](left[row], right[col])
    return result


def _divisors(A: Format, reduce: str) -> Array:
    return np.maximum(degrees(A), 1)[:, None] if reduce == "mean" else np.ones((A.n_rows, 1))
