"""Check what attention takes: features, scores, vectors, and numbers that shape them.

``number``, ``share`` and ``scale`` are for the functions of tensors, too.
"""

import math
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, as_array
from ...formats.base import Format
from ..engine import checks as engine_checks
from .operands import Options

#: Queries, keys, values, ``att`` and the edges' scores.
Arrays: TypeAlias = tuple[Array, Array, Array | None, Array | None, Array | None]


def scores(
    name: str,
    value: Any,
    *,
    A: Format,
    each: str,
    heads: tuple[int, ...],
    like: tuple[str, Array],
) -> Array:
    """Check one score a head for ``each`` source, target or stored entry of ``A``.

    ``heads`` is () where features have no axis for them; one head may have an axis or none.
    ``like`` names an array and is it: of its dtype the scores must be, or float32 beside 2 bytes.
    """
    rows = A.shape[1] if each == "source" else A.shape[0] if each == "target" else A.nnz
    same = value is not like[1] and engine_checks.beside(value, A)
    if same and value.shape == (rows, *heads) and value.dtype == like[1].dtype:
        return value
    array = as_array(name, value, empty=np.float64, beside=A._indices)
    if array.shape not in ([(rows,), (rows, 1)] if heads in ((), (1,)) else [(rows, *heads)]):
        order = ", in the order of A's data" if each == "stored entry" else ""
        raise ShapeError(
            f"{name} has shape {array.shape}: give {(rows, *heads)}, one score per {each}"
            f"{' and head' if heads else ''}{order} (A.shape == {A.shape}, A.nnz == {A.nnz})."
        )
    checks.value_dtype(f"{name}.dtype", array.dtype)
    if not (like[1].dtype.itemsize == 2 and array.dtype == np.float32):
        engine_checks.same_dtype(name, array, *like)
    checks.same_device(name, array, "A", A._indices)
    return array


def of_sources(value: object, *, A: Format) -> Array:
    """Check ``el`` where no features say how many heads there are."""
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
    """Check ``edge_scores``, or None for none."""
    if value is None:
        return None
    return scores("edge_scores", value, A=A, each="stored entry", heads=heads, like=like)


def shaped_as(gradient: Array, given: Array) -> Array:
    """Give a gradient the shape and dtype of the array it belongs to."""
    with np.errstate(over="ignore", under="ignore"):
        return gradient.reshape(given.shape).astype(given.dtype, copy=False)


def options(
    A: Format, negative_slope: object, dropout: object, seed: object, self_loops: object
) -> Options:
    """Check the numbers that shape scores and masks."""
    slope = number("negative_slope", negative_slope)
    dropped = 0.0 if dropout == 0.0 and type(dropout) is float else share(dropout)
    drawn = seed if type(seed) is int else _seed(seed)
    looped = self_loops is not False and loops(A, self_loops)
    return Options(drawn % 2**64, slope, dropped, looped)


def number(name: str, value: object) -> float:
    """Check a number of Python or NumPy, infinite and NaN too."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DtypeError(f"{name} is {value!r}: give a number.")
    try:
        return float(value)
    except OverflowError as error:
        # Without its digits, of which Python may refuse to write so many.
        raise DtypeError(
            f"{name} is larger than any float64: give a number that a float holds."
        ) from error


def share(dropout: object) -> float:
    """Check the share of the entries that is dropped."""
    found = number("dropout", dropout)
    if not 0 <= found < 1:
        raise ShapeError(f"dropout is {dropout!r}: give a share from 0 to less than 1.")
    return found


def scale(value: object, feat: int) -> float:
    """Check what dot products are multiplied with: by default 1 over the root of their length."""
    if value is None:
        return 1 / math.sqrt(feat or 1)
    found = number("scale", value)
    if not math.isfinite(found):
        raise ShapeError(f"scale is {value!r}: give a finite number, or leave it out.")
    return found


def _seed(seed: object) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DtypeError(f"seed is {seed!r}: give an integer.")
    return int(seed)


def loops(A: Format, self_loops: object) -> bool:
    """Check whether each vertex has one loop, which only those of a square matrix can have."""
    if not isinstance(self_loops, bool | np.bool_):
        raise DtypeError(f"self_loops is {self_loops!r}: give True or False.")
    if self_loops and A.n_rows != A.n_cols:
        raise ShapeError(
            f"self_loops is True but A has shape {A.shape}: only a square matrix has loops, "
            "leave it out."
        )
    return bool(self_loops)


# Attention between rows


def additive(
    A: Format, left: Array, right: Array, att: Array, edge_scores: Array | None
) -> tuple[Format, Arrays]:
    """Check the arrays of GATv2, whose keys are the values."""
    A = engine_checks.sparse("A", A)
    left = engine_checks.features("left", left, A=A, heads=True)
    right = engine_checks.features("right", right, A=A, axis="rows", heads=True)
    engine_checks.alike("right", right, "left", left)
    att = _vectors(att, A, left)
    heads = left.shape[1:-1]
    edges = of_entries(edge_scores, A=A, heads=heads, like=("left", left))
    return A, (right, left, None, att, edges)


def products(
    A: Format, queries: Array, keys: Array, values: Array | None, edge_scores: Array | None
) -> tuple[Format, Arrays]:
    """Check the arrays of attention by dot products."""
    A = engine_checks.sparse("A", A)
    keys = engine_checks.features("keys", keys, A=A, heads=True)
    queries = engine_checks.features("queries", queries, A=A, axis="rows", heads=True)
    engine_checks.alike("queries", queries, "keys", keys)
    if values is not None:
        values = engine_checks.features("values", values, A=A, heads=True)
        engine_checks.alike("values", values, "keys", keys)
    heads = keys.shape[1:-1]
    edges = of_entries(edge_scores, A=A, heads=heads, like=("keys", keys))
    return A, (queries, keys, values, None, edges)


def _vectors(att: object, A: Format, left: Array) -> Array:
    """Check ``att``: one vector a head; one head may have an axis or none."""
    array = as_array("att", att, empty=np.float64, beside=A._indices)
    shape, feat = left.shape[1:], left.shape[-1]
    if array.shape not in ([(feat,), (1, feat)] if shape[:-1] in ((), (1,)) else [shape]):
        per_head = "one vector per head" if len(shape) == 2 else "one vector"
        raise ShapeError(
            f"att has shape {array.shape}: give {shape}, {per_head} (left.shape == {left.shape})."
        )
    checks.value_dtype("att.dtype", array.dtype)
    if not (left.dtype.itemsize == 2 and array.dtype == np.float32):
        engine_checks.same_dtype("att", array, "left", left)
    checks.same_device("att", array, "A", A._indices)
    return array


def gradient(grad: object, A: Format, name: str, like: Array) -> Array:
    """Check the gradient of the result, which has the heads, width and dtype of ``like``."""
    array: Array = engine_checks.features("grad", grad, A=A, axis="rows", heads=True)
    engine_checks.alike("grad", array, name, like)
    return array
