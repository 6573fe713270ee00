"""Reuse times of a structure's gathers, and the share that a cache of some rows answers.

The reuse time of a gather is the number of gathers since the last one of the same row.  Where the
share ``p(t)`` of gathers has longer ones than ``t``, a run of ``w`` gathers names ``f(w)``
distinct rows, the sum of ``p(t)`` over ``t < w``, and a cache of ``f(w)`` rows leaves the
share ``p(w)`` unanswered: Xiang, Ding, Luo and Bao, "HOTL: a higher order theory of locality",
ASPLOS 2013.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ..formats.arrays import Array, allocating, namespace, on_device_of
from ..formats.compressed import CSR
from ..formats.primitives import bits_for

#: Parts of a structure to measure, and the entries of each at most.
PARTS, MOST = 4, 1 << 22
#: Reuse times: steps of a half octave.
TIMES = tuple(dict.fromkeys(round(2 ** (step / 2)) for step in range(2 * 40)))


@dataclass(frozen=True)
class Locality:
    """The share of gathers with longer reuse times than each of ``TIMES``, as far as known."""

    shares: tuple[float, ...]

    @property
    def footprints(self) -> tuple[float, ...]:
        """Return the number of distinct rows that runs of ``TIMES`` gathers read."""
        steps = zip(pairwise((0, *TIMES)), pairwise((1.0, *self.shares)), strict=False)
        return tuple(accumulate((b - a) * (p + q) / 2 for (a, b), (p, q) in steps))

    def misses(self, capacity: float) -> float:
        """Return the share of gathers that a cache of ``capacity`` rows does not answer."""
        footprints = self.footprints
        at = bisect_left(footprints, capacity)
        if at == len(footprints):
            return self.shares[-1] if self.shares else 0.0
        below, before = (footprints[at - 1], self.shares[at - 1]) if at else (0.0, 1.0)
        fraction = (capacity - below) / (footprints[at] - below) if footprints[at] > below else 0.0
        return before + fraction * (self.shares[at] - before)


def locality(A: CSR) -> Locality:
    """Measure the reuse times of a structure's columns, in CSR order.

    Parameters
    ----------
    A : CSR

    Returns
    -------
    Locality
        Of ``PARTS`` parts spread over the entries; of all entries where they are few.

    Notes
    -----
    A sort of each part.
    """
    nnz = A.nnz
    with on_device_of(A.indices), allocating(f"reuse times of {A!r}"):
        if nnz <= MOST:
            return Locality(_shares(A.indices, 0, nnz))
        starts = [(nnz - MOST) * part // (PARTS - 1) for part in range(PARTS)]
        shares = [_shares(A.indices[start : start + MOST], MOST // 2, nnz) for start in starts]
        return Locality(tuple(sum(part) / PARTS for part in zip(*shares, strict=True)))


def _shares(columns: Array, known: int, nnz: int) -> tuple[float, ...]:
    """Compute the share of gathers with longer reuse times than each, behind the first ``known``.

    Times longer than ``known`` are left out, unless the columns are all that there are.
    """
    xp: Any = namespace(columns)
    times = [t for t in TIMES if t <= (known or 2 * nnz)]
    if not len(columns):
        return ()
    shift = bits_for(len(columns))
    words = columns.astype(xp.int64) << shift
    words |= xp.arange(len(columns), dtype=xp.int64)
    words.sort()
    again = words[1:] >> shift == words[:-1] >> shift
    again &= words[1:] & ((1 << shift) - 1) >= known
    passed = xp.diff(words)[again]  # synchronize!
    bins = xp.searchsorted(xp.asarray(times, dtype=xp.int64), passed, side="left")
    within = xp.cumsum(xp.bincount(bins, minlength=len(times) + 1))[:-1]  # synchronize!
    shares: list[float] = (1 - within / (len(columns) - known)).tolist()  # synchronize!
    return tuple(shares)
