"""Scores of attention: what each kind is made of, the checks of that, and arguments of the rows.

Features are (n, heads, feat) or (n, feat), and scores follow them without the last axis.  Scores,
statistics and their gradients are float32 beside 2-byte features, else of the features' dtype.
The checks of numbers and the kinds of scores serve functions of tensors, too.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats import checks
from ...formats.arrays import Array, as_array
from ...formats.base import Format
from ..engine import checks as engine_checks


class Operand(NamedTuple):
    """An array that scores are made of."""

    name: str
    kind: Literal["features", "scores", "vectors"]
    end: Literal["source", "target"] = "source"


#: The operands of one kind of scores, in the order of their checks.  The first are the sources'
#: features: the others have their heads, width and dtype, scores and vectors may be float32 beside
#: 2 bytes.
Score: TypeAlias = tuple[Operand, ...]
ADDITIVE: Score = (
    Operand("H", "features"),
    Operand("el", "scores"),
    Operand("er", "scores", "target"),
)
GATV2: Score = (
    Operand("left", "features"),
    Operand("right", "features", "target"),
    Operand("att", "vectors"),
)
DOT: Score = (
    Operand("keys", "features"),
    Operand("queries", "features", "target"),
    Operand("values", "features"),  # None where the keys are the values
)
#: Of tensors alone: scores of both ends are products of the features and two vectors.
OF_VECTORS: Score = (
    Operand("h", "features"),
    Operand("source", "vectors"),
    Operand("target", "vectors"),
    Operand("bias", "vectors"),  # or None
)


class Options(NamedTuple):
    """Numbers that shape scores and masks, in the order of the ops' arguments."""

    seed: Any  #: an integer, an array of one int64, or None where nothing is dropped
    slope: float
    dropout: float
    loops: bool

    def with_scale(self, scale: float) -> tuple[Any, float, float, float, bool]:
        """Return the numbers of attention between rows, in the order of its arguments."""
        return self.seed, self.slope, scale, self.dropout, self.loops


class GatArguments(NamedTuple):
    """Arguments that all rows of ``gat`` end with, in their order."""

    h: Any  #: features of the sources
    el: Any  #: scores of the sources
    er: Any  #: scores of the targets
    edges: Any = None  #: scores of the entries
    loop_edges: Any = None  #: scores of the loops that ``loops`` asks for
    seed: Any = None  #: as in ``Options``
    slope: float = 0.0
    dropout: float = 0.0
    loops: bool = False


class PairwiseArguments(NamedTuple):
    """Arguments that all rows of ``pairwise`` end with, in their order."""

    queries: Any  #: rows of the targets
    keys: Any  #: rows of the sources
    values: Any  #: what is aggregated; None where the keys are the values
    att: Any  #: a vector a head; None where scores are dot products
    edges: Any  #: scores of the entries
    seed: Any  #: as in ``Options``
    slope: float
    scale: float
    dropout: float
    loops: bool


class Forward(NamedTuple):
    """What backward needs of forward."""

    out: Any
    plus: Any = None  #: the part of ``out`` whose scores are positive, without a bias
    #: (n_rows, heads, 4): the largest score, sum of exponentials, share of positive scores, and 0.
    statistics: Any = None


def heads_and_feat(x: Any) -> tuple[int, int]:
    """Count the heads, and the features of each."""
    shape = x.shape
    return (shape[1] if len(shape) == 3 else 1), shape[-1]


def heads_of(vectors: Any) -> tuple[int, int]:
    """Count the heads of vectors, (heads, feat), (1, heads, feat) or (feat,), and their length."""
    shape = vectors.shape
    return (shape[-2] if len(shape) > 1 else 1), shape[-1]


def sums_dtype(x: Any) -> str:
    """Return the name of the dtype in which sums of such features run."""
    return "float64" if x.itemsize == 8 else "float32"


def shape_of(x: Any, wanted: bool = True) -> tuple[int, ...]:
    """Return the shape of the gradient of an optional array: empty for None, or if not wanted."""
    return (0,) if x is None or not wanted else tuple(x.shape)


# Checks of arrays


def check_operands(
    score: Score, A: Format, values: Sequence[Any], edge_scores: Any
) -> tuple[Format, list[Any]]:
    """Check the matrix, the operands and, last, the scores of the entries, or None for none."""
    A = engine_checks.sparse("A", A)
    first = score[0].name
    x = engine_checks.features(first, values[0], A=A, heads=True)
    heads, like, checked = x.shape[1:-1], (first, x), [x]
    for (name, kind, end), value in zip(score[1:], values[1:], strict=True):
        if kind == "scores":
            value = scores(name, value, A=A, each=end, heads=heads, like=like)
        elif kind == "vectors":
            value = _vectors(name, value, A, like)
        elif value is not None:
            axis = "rows" if end == "target" else "columns"
            value = features(name, value, A, axis, like)
        checked.append(value)
    return A, [*checked, of_entries(edge_scores, A=A, heads=heads, like=like)]


def features(name: str, value: Any, A: Format, axis: str, like: tuple[str, Array]) -> Array:
    """Check features that have the heads, width and dtype of others."""
    array: Array = engine_checks.features(name, value, A=A, axis=axis, heads=True)
    engine_checks.alike(name, array, *like)
    return array


def scores(
    name: str, value: Any, *, A: Format, each: str, heads: tuple[int, ...], like: tuple[str, Array]
) -> Array:
    """Check one score a head for ``each`` source, target or stored entry of ``A``.

    ``heads`` is () where features have no axis for them; one head may have an axis or none.
    ``like`` names an array and is it: of its dtype the scores must be, or float32 beside 2 bytes.
    """
    rows = A.shape[1] if each == "source" else A.shape[0] if each == "target" else A.nnz
    same = value is not like[1] and engine_checks.beside(value, A)
    if same and value.shape == (rows, *heads) and value.dtype == like[1].dtype:
        return value  # type: ignore[no-any-return]
    array = as_array(name, value, empty=np.float64, beside=A._indices)
    if array.shape not in ([(rows,), (rows, 1)] if heads in ((), (1,)) else [(rows, *heads)]):
        order = ", in the order of A's data" if each == "stored entry" else ""
        raise ShapeError(
            f"{name} has shape {array.shape}: give {(rows, *heads)}, one score per {each}"
            f"{' and head' if heads else ''}{order} (A.shape == {A.shape}, A.nnz == {A.nnz})."
        )
    return _values_like(name, array, A, like)


def of_sources(value: Any, *, A: Format) -> Array:
    """Check ``el`` where no features say how many heads there are."""
    array = as_array("el", value, empty=np.float64, beside=A._indices)
    if array.ndim not in (1, 2):
        raise ShapeError(
            f"el has shape {array.shape}: give ({A.n_cols},) or ({A.n_cols}, heads), one score per "
            "source."
        )
    return scores("el", array, A=A, each="source", heads=array.shape[1:], like=("el", array))


def of_entries(
    value: Any, *, A: Format, heads: tuple[int, ...], like: tuple[str, Array]
) -> Array | None:
    """Check ``edge_scores``, or None for none."""
    if value is None:
        return None
    return scores("edge_scores", value, A=A, each="stored entry", heads=heads, like=like)


def _vectors(name: str, value: Any, A: Format, like: tuple[str, Array]) -> Array:
    """Check one vector a head; one head may have an axis or none."""
    array = as_array(name, value, empty=np.float64, beside=A._indices)
    shape = like[1].shape[1:]
    if array.shape not in ([shape[-1:], (1, shape[-1])] if shape[:-1] in ((), (1,)) else [shape]):
        per_head = "one vector per head" if len(shape) == 2 else "one vector"
        raise ShapeError(
            f"{name} has shape {array.shape}: give {shape}, {per_head} ({like[0]}.shape == "
            f"{like[1].shape})."
        )
    return _values_like(name, array, A, like)


def _values_like(name: str, array: Array, A: Format, like: tuple[str, Array]) -> Array:
    """Check floats on the device of ``A``: of the dtype of others, or float32 beside 2 bytes."""
    checks.value_dtype(f"{name}.dtype", array.dtype)
    if not (like[1].dtype.itemsize == 2 and array.dtype == np.float32):
        engine_checks.same_dtype(name, array, *like)
    checks.same_device(name, array, "A", A._indices)
    return array


def shaped_as(gradient: Array, like: Array) -> Array:
    """Convert a gradient to the shape and dtype of the array it belongs to."""
    with np.errstate(over="ignore", under="ignore"):
        return gradient.reshape(like.shape).astype(like.dtype, copy=False)


# Checks of numbers


def options(
    A: Format, negative_slope: object, dropout: object, seed: object, self_loops: object
) -> Options:
    """Check the numbers that shape scores and masks."""
    slope = number("negative_slope", negative_slope)
    dropped = 0.0 if dropout == 0.0 and type(dropout) is float else share(dropout)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DtypeError(f"seed is {seed!r}: give an integer.")
    looped = self_loops is not False and loops(A, self_loops)
    return Options(int(seed) % 2**64, slope, dropped, looped)


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
    part = number("dropout", dropout)
    if not 0 <= part < 1:
        raise ShapeError(f"dropout is {dropout!r}: give a share from 0 to less than 1.")
    return part


def scale(value: object, feat: int) -> float:
    """Check what dot products are multiplied with: by default 1 over the root of their length."""
    if value is None:
        return 1 / math.sqrt(feat or 1)
    factor = number("scale", value)
    if not math.isfinite(factor):
        raise ShapeError(f"scale is {value!r}: give a finite number, or leave it out.")
    return factor


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
