"""What a sample of rows is asked for by, checked in the same words for arrays and tensors."""

import operator
from typing import Any

from ...errors import DtypeError, ShapeError, UnsupportedError

STRATEGIES = {"bucket": 0, "fastrand": 1, "random": 2}  # as in sampling.cuh
#: A width that keeps every entry: rows have fewer than 2**31.
ALL = 2**31 - 1


def integer(name: str, value: Any) -> int:
    """An integer of any kind; bool is none."""
    try:
        if not isinstance(value, bool) and "bool" not in str(getattr(value, "dtype", "")):
            return operator.index(value)
    except TypeError:
        pass
    given = repr(value)
    given = given if len(given) < 80 else f"a {type(value).__name__}"
    raise DtypeError(f"{name} is {given}: give an integer.")


def width(name: str, value: Any) -> int:
    """How many entries of a row to sample; what is beyond any row is as much as any row has."""
    found = integer(name, value)
    if found < 1:
        given = found if found > -(2**63) else "less than any int64"  # Python writes few digits
        raise ShapeError(f"{name} is {given}: give the most entries of a row, 1 or more.")
    return min(found, ALL)


def strategy(value: object) -> str:
    """The name of a way to sample."""
    if not isinstance(value, str) or value not in STRATEGIES:
        *names, last = (f'"{name}"' for name in STRATEGIES)
        raise UnsupportedError(f"strategy is {value!r}: use {', '.join(names)} or {last}.")
    return value


def refuse_both(mean: object, rescale: object) -> None:
    """One of both at most."""
    if mean and rescale:
        raise UnsupportedError(
            "mean and rescale are both True: the mean of a sample estimates the mean of the row as "
            "it is, leave one out."
        )
