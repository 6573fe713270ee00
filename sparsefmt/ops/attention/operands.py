"""What attention takes: features, the parts of their scores, and options.

Features are (n, heads, feat) or (n, feat), and scores follow them without the last axis.  Scores,
statistics and their gradients are float32 beside 2-byte features, else of the features' dtype.
"""

from typing import Any, NamedTuple


class Options(NamedTuple):
    """Numbers that shape scores and masks, in the order of the ops' arguments."""

    seed: Any  #: an integer, an array of one int64, or None where nothing is dropped
    slope: float
    dropout: float
    loops: bool

    def with_scale(self, scale: float) -> tuple[Any, float, float, float, bool]:
        """The numbers of attention between rows, in the order of its arguments."""
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


def sums_dtype(x: Any) -> str:
    """Name the dtype in which sums of such features run."""
    return "float64" if x.itemsize == 8 else "float32"


def shape_of(x: Any, wanted: bool = True) -> tuple[int, ...]:
    """Shape of the gradient of an optional array: empty where it is not given or not wanted."""
    return (0,) if x is None or not wanted else tuple(x.shape)
