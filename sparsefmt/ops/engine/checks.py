"""Checks that attention still asks by hand."""

from typing import Any

from ...errors import ShapeError
from ...formats.arrays import Array
from ...formats.base import Format
from . import bind
from .bind import (  # noqa: F401
    count_of_features,
    flag,
    output,
    same_dtype,
    structure,
    word,
)
from .table import Arg


def sparse(name: str, A: object) -> Format:
    """Check for a sparse matrix."""
    return bind.sparse(A)


def features(name: str, X: Any, *, A: Format, axis: str = "columns", heads: bool = False) -> Any:
    """Check for dense features, one row per row or column of ``A``."""
    rows: Any = "rows" if axis == "rows" else "cols"
    arg = Arg(name, rows, (2, 3) if heads else (2,))
    size = A.shape[0] if axis == "rows" else A.shape[1]
    return bind.ARRAYS.check(name, X, arg, A, size, None)


def alike(name: str, array: Array, other_name: str, other: Array) -> None:
    """Check for the same heads, feature width and dtype."""
    wrong = bind._unlike(array, Arg(name, "rows", (2, 3), other_name), (other_name, other))
    if wrong:
        raise ShapeError(f"{name} {wrong}.")
    same_dtype(name, array, other_name, other)


def precision(value: Any, name: str, X: Array) -> Any:
    """Check for a precision."""
    if value is not None:
        bind.precision(value, name, X)
    return value


def beside(array: Any, A: Format) -> bool:
    """Return True for a plain array on the device of ``A``."""
    return False
