"""Products with several heads: features of each, and a value of each for every stored entry."""

from typing import Any

from ...errors import UnsupportedError
from ...formats.arrays import Array


def side_by_side(X: Array) -> Array:
    """Lay the features of heads that share their values side by side."""
    return X.reshape(X.shape[0], X.shape[1] * X.shape[2])


def summed(reduce: str) -> None:
    """Refuse maxima and minima of heads by name."""
    if reduce not in ("sum", "mean"):
        raise UnsupportedError(
            f'reduce is "{reduce}" with a value of each head: call it for one head at a time, with '
            "its features and its values, or reduce by sum or mean."
        )


def against(values: Any, who: str) -> list[str]:
    """Return the reason against a kernel that takes one value an entry."""
    if values is None or values.ndim == 1:
        return []
    return [f"{who} one value an entry"]
