"""Checks of what the operations of graph attention take: scores, and numbers that shape them."""

from typing import Any

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, as_array
from ...formats.base import Format
from ..engine import checks as engine_checks
from .operands import Options

_REAL = int | float | np.integer | np.floating


def scores(
    name: str,
    value: Any,
    *,
    A: Format,
    each: str,
    heads: tuple[int, ...],
    like: tuple[str, Array],
) -> Array:
    """One score a head for ``each`` source, target or stored entry of ``A``.

    ``heads`` is () where features have no axis for them; one head may have an axis or none.
    ``like`` names an array and is it: of its dtype the scores must be, or float32 beside 2 bytes.
    """
    rows = A.shape[1] if each == "source" else A.shape[0] if each == "target" else A.nnz
    if _is_as_most(value, (rows, *heads), like[1]):
        return value
    array = as_array(name, value, empty=np.float64, beside=A._indices)
    if array.shape not in ([(rows,), (rows, 1)] if heads in ((), (1,)) else [(rows, *heads)]):
        order = ", in CSR order" if each == "stored entry" else ""
        raise ShapeError(
            f"{name} has shape {array.shape}: give {(rows, *heads)}, one score per {each}"
            f"{' and head' if heads else ''}{order} (A.shape == {A.shape}, A.nnz == {A.nnz})."
        )
    checks.value_dtype(f"{name}.dtype", array.dtype)
    if not (like[1].dtype.itemsize == 2 and array.dtype == np.float32):
        engine_checks.same_dtype(name, array, *like)
    checks.same_device(name, array, "A", A._indices)
    return array


def _is_as_most(value: Any, shape: tuple[int, ...], like: Array) -> bool:
    """Whether scores have that shape and are beside other, checked features, in their dtype."""
    return (
        value is not like
        and type(value) is type(like)
        and value.shape == shape
        and value.dtype == like.dtype
        and engine_checks.device_number(value) == engine_checks.device_number(like)
    )


def of_sources(value: object, *, A: Format) -> Array:
    """``el`` where no features say how many heads there are."""
    array = as_array("el", value, empty=np.float64, beside=A._indices)
    if array.ndim not in (1, 2):
        raise ShapeError(
            f"el has shape {array.shape}: give ({A.n_cols},) or ({A.n_cols}, heads), one score per "
            "source."
        )
    return scores("el", array, A=A, each="source", heads=array.shape[1:], like=("el", array))


def of_entries(
    value: object, *, A: Format, heads: tuple[int, ...], like: tuple[str, Array]
) -> Array | None:
    """``edge_scores``, or None for none."""
    if value is None:
        return None
    return scores("edge_scores", value, A=A, each="stored entry", heads=heads, like=like)


def shaped_as(gradient: Array, given: Array) -> Array:
    """In the shape and dtype of what it is the gradient of."""
    with np.errstate(over="ignore", under="ignore"):
        return gradient.reshape(given.shape).astype(given.dtype, copy=False)


def options(
    A: Format, negative_slope: object, dropout: object, seed: object, self_loops: object
) -> Options:
    """Check the numbers that shape scores and masks."""
    slope, dropping_ = number("negative_slope", negative_slope), dropping(dropout, seed)
    return Options(slope=slope, **dropping_, loops=loops(A, self_loops))


def number(name: str, value: object) -> float:
    """Any number, infinite and NaN too."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, _REAL):
        raise DtypeError(f"{name} is {value!r}: give a number.")
    try:
        return float(value)
    except OverflowError as error:
        # Without its digits, of which Python may refuse to write so many.
        raise DtypeError(
            f"{name} is larger than any float64: give a number that a float holds."
        ) from error


def dropping(dropout: object, seed: object) -> dict[str, Any]:
    """The share of the entries that is dropped, and of what: 64 bits of the seed."""
    share = number("dropout", dropout)
    if not 0 <= share < 1:
        raise ShapeError(f"dropout is {dropout!r}: give a share from 0 to less than 1.")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DtypeError(f"seed is {seed!r}: give an integer.")
    return {"dropout": share, "seed": int(seed) % 2**64}


def loops(A: Format, self_loops: object) -> bool:
    """Whether each vertex is its own neighbour, which only vertices of square graphs can be."""
    if not isinstance(self_loops, bool | np.bool_):
        raise DtypeError(f"self_loops is {self_loops!r}: give True or False.")
    if self_loops and A.n_rows != A.n_cols:
        raise ShapeError(
            f"self_loops is True but A has shape {A.shape}: only a square matrix has loops, "
            "leave it out."
        )
    return bool(self_loops)
