"""The options of a sample of rows, checked in the same words for arrays and tensors."""

from typing import Any, NamedTuple

from ...errors import DtypeError, ShapeError, UnsupportedError
from ...formats import checks
from ..engine.bind import word

STRATEGIES = {"bucket": 0, "fastrand": 1, "random": 2}  # as in rows.cuh
#: A width that takes every entry: rows have fewer than 2**31.
ALL = 2**31 - 1


class SampleOptions(NamedTuple):
    """Which entries of each row count, and the factor of their sum, in the order of torch's ops."""

    seed: Any = None  #: of "random": an int, or an array of one int64 where the kernel runs
    width: int = ALL  #: most entries of a row
    strategy: str = "bucket"
    mean: bool = False  #: divide by the number of sampled entries
    rescale: bool = False  #: multiply by entries of the row over sampled ones


def integer(name: str, value: Any) -> int:
    """Check that a value is an integer of any kind, but no bool, and return it as an int."""
    if type(value) is int:
        return value
    try:
        return checks.as_index(value)
    except TypeError:
        text = repr(value)
        text = text if len(text) < 80 else f"a {type(value).__name__}"
    raise DtypeError(f"{name} is {text}: give an integer.")


def width(name: str, value: Any) -> int:
    """Check how many entries of a row to sample; ``ALL`` stands for every larger number."""
    most = integer(name, value)
    if most < 1:
        text = most if most > -(2**63) else "less than any int64"  # Python writes few digits
        raise ShapeError(f"{name} is {text}: give the most entries of a row, 1 or more.")
    return min(most, ALL)


def strategy(value: object) -> str:
    """Check the name of a strategy."""
    return word("strategy", value, STRATEGIES)


def refuse_both(mean: object, rescale: object) -> None:
    """Refuse ``mean`` and ``rescale`` together."""
    if mean and rescale:
        raise UnsupportedError(
            "mean and rescale are both True: the mean of a sample estimates the mean of the row as "
            "it is, leave one out."
        )
