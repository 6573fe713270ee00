"""Decide between tensor cores and CUDA cores by costs: a user's, or those measured on a GPU."""

from dataclasses import dataclass

import numpy as np

from ...errors import DtypeError
from ..engine.table import Arg

#: How many blocks keep a GPU busy: more parts of windows would only have to be added up.
BUSY = 800
_MOST = 1e12


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of work, counted in entries on CUDA cores; those of windows are for 64 rows.

    Products take those that were measured of their kind.  The defaults are of SpMM in float32
    without values.  ``Costs(slab=0, window=0, piece=0, launch=0, again=1e9, gain=0)`` sends all
    entries but duplicates to matrix units, if windows have 16, 32, 64 or 128 rows, and
    ``Costs(slab=1e9)`` none.

    Parameters
    ----------
    slab : float
        A slab on tensor cores: 16 columns of a window, whatever they hold.
    window : float
        A window that has slabs.
    row : float
        A row on CUDA cores, whatever it has.
    left : float
        An entry that CUDA cores keep: those that share columns were the cheap ones.
    again : float
        A window whose sums come from both.
    piece : float
        A part of a window that several blocks share.
    launch : float
        Starting one kernel more.
    gain : float
        Not a cost: the least factor by which matrix units must pay.
    part : int
        Not a cost: most slabs of a block, where there are few.

    Raises
    ------
    DtypeError
        If a cost is no number from 0 to 1e12, or ``part`` no integer from 1 to 2**31 - 1.
    """

    slab: float = 43.0
    window: float = 130.0
    row: float = 4.0
    left: float = 1.12
    again: float = 300.0
    piece: float = 250.0
    launch: float = 2e5
    gain: float = 1.05
    part: int = 8

    def longest_part(self, n_slabs: float) -> int:
        """Return the most slabs that a block takes of a matrix with ``n_slabs``."""
        return max(self.part, -(-int(n_slabs) // BUSY))

    def __post_init__(self) -> None:
        for name in self.__slots__:
            cost = getattr(self, name)
            number = cost.item() if isinstance(cost, (np.integer, np.floating)) else cost
            kind, least, most = (int, 1, 2**31 - 1) if name == "part" else (float, 0, _MOST)
            if type(number) not in (int, kind) or not least <= number <= most:
                what = "an integer" if kind is int else "a number"
                raise DtypeError(f"{name} is {cost!r}: give {what} from {least} to {most:.10g}.")
            object.__setattr__(self, name, kind(number))


def checked(value: object, name: str = "costs") -> Costs | None:
    """Check for costs or None."""
    if value is None or isinstance(value, Costs):
        return value
    raise DtypeError(f"{name} is a {type(value).__name__}: give ops.Costs(...), or leave it out.")


COSTS = Arg("costs", optional=True, test=lambda name, value: checked(value, name))


def measured(op: str, itemsize: int, weighted: bool, feat: int) -> Costs | None:
    """Return the costs measured for such a product; None where CUDA cores do best.

    ``itemsize`` and ``feat`` are those of the features, of each head; weighted products have edge
    values or a scale of columns.
    """
    kinds = _MEASURED[op, itemsize, weighted]
    return next((costs for least, costs in kinds if feat >= least), None)


#: By operation, bytes of a value and whether weighted: features from which on they hold (H200).
#: An entry of narrow features costs CUDA cores less, and all else more in its times.
_MEASURED: dict[tuple[str, int, bool], tuple[tuple[int, Costs], ...]] = {
    ("spmm", 4, False): (
        (33, Costs()),
        (8, Costs(slab=100, window=400, piece=700, launch=6e5)),
    ),
    ("spmm", 4, True): (
        (33, Costs(slab=66, window=220, piece=1100, launch=1.5e6, gain=1.08)),
        (8, Costs(slab=150, window=400, piece=700, launch=3e5)),
    ),
    ("spmm", 2, False): (
        (16, Costs(slab=41, window=267, row=5.3, piece=500, launch=4e5)),
        (8, Costs(slab=100, window=400, piece=700, launch=6e5)),
    ),
    ("spmm", 2, True): (
        (33, Costs(slab=61, window=330, row=5.5, piece=1100, launch=2.5e6, gain=1.08)),
        (8, Costs(slab=120, window=400, piece=700, launch=3e5)),
    ),
    ("sddmm", 4, False): ((64, Costs(slab=85, window=80, row=4.5, again=0, piece=0, gain=1.08)),),
    ("sddmm", 2, False): (
        (64, Costs(slab=85, window=80, row=4.5, again=0, piece=0, launch=4e5, gain=1.08)),
    ),
}
