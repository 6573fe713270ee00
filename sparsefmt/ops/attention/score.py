"""Arguments of the rows of attention, and checks of the numbers that shape scores.

Features are (n, heads, feat) or (n, feat), and scores follow them without the last axis.  Scores,
statistics and their gradients are float32 beside 2-byte features, else of the features' dtype.
The checks serve functions of tensors, too.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ...errors import DtypeError, ShapeError
from ...formats.arrays import Array
from ...formats.base import Format
from ..engine.bind import flag
from ..engine.memory import Scalar


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


class VectorArguments(NamedTuple):
    """Arguments that rows of ``gat_of_vectors`` end with, in their order."""

    h: Any  #: features, (n, heads, feat) or (n, heads * feat) as the vectors say
    source: Any  #: the vectors, of which scores of sources are made
    target: Any
    bias: Any  #: likewise; None for none
    edges: Any  #: as in ``GatArguments``, like what follows
    loop_edges: Any
    seed: Any
    slope: float
    dropout: float
    loops: bool


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


class Dropping(NamedTuple):
    """Which entries are dropped: those whose random word is below ``below``."""

    seed: Any = 0  #: on a GPU the name of an argument, or 0
    below: Any = 0
    scale: Any = 1.0  #: of the others
    #: The name of an int64 on a GPU that replaces the seed, so that a CUDA graph can draw anew.
    seed_at: str = ""


class Forward(NamedTuple):
    """What backward needs of forward."""

    out: Any
    plus: Any = None  #: the part of ``out`` whose scores are positive, without a bias
    #: (n_rows, heads, 4): the largest score, sum of exponentials, share of positive scores, and 0.
    statistics: Any = None


def heads_and_feat(x: Array) -> tuple[int, int]:
    """Count the heads, and the features of each."""
    shape = x.shape
    return (shape[1] if len(shape) == 3 else 1), shape[-1]


def heads_of(vectors: Array) -> tuple[int, int]:
    """Count the heads of vectors, (heads, feat), (1, heads, feat) or (feat,), and their length."""
    shape = vectors.shape
    return (shape[-2] if len(shape) > 1 else 1), shape[-1]


def sums_dtype(x: Array) -> str:
    """Return the name of the dtype in which sums of such features run."""
    return "float64" if x.itemsize == 8 else "float32"


def shape_of(x: Array | None, wanted: bool = True) -> tuple[int, ...]:
    """Return the shape of the gradient of an optional array: empty for None, or if not wanted."""
    return (0,) if x is None or not wanted else tuple(x.shape)


# Checks of numbers


def options(
    A: Format, negative_slope: object, dropout: object, seed: object, self_loops: object
) -> Options:
    """Check the numbers that shape scores and masks."""
    slope = number("negative_slope", negative_slope)
    dropped = 0.0 if type(dropout) is float and dropout == 0.0 else share(dropout)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DtypeError(f"seed is {seed!r}: give an integer.")
    looped = self_loops is not False and loops(A, self_loops)
    return Options(Scalar(int(seed) % 2**64), slope, dropped, looped)


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
    looped = flag("self_loops", self_loops, bool | np.bool_)
    if looped and A.n_rows != A.n_cols:
        raise ShapeError(
            f"self_loops is True but A has shape {A.shape}: only a square matrix has loops, "
            "leave it out."
        )
    return looped
