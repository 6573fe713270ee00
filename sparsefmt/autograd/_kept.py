"""What belongs to a structure besides its tensors, found by where its arrays lie in memory.

So a library op takes the structure alone, and a tracer sees nothing of what is kept for it.
"""

from threading import Lock, RLock
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from torch import Tensor

from ..formats.arrays import Array
from ..formats.compressed import CSR
from ..formats.windows import Cut
from ..ops.cbsr.cuda_sspmm import Windowed
from ..ops.engine.structure import Structure, let_find
from ..reorder import Order

if TYPE_CHECKING:
    from ._tiles import Given

#: Addresses of ``indptr`` and ``indices``, n_rows, n_cols, nnz: matrices of other shapes may lie on
#: the same arrays.
Place: TypeAlias = tuple[int, int, int, int, int]


class Kept:
    """The windows and tiles of one structure on a GPU, and inverses of its permutations.

    All sides over the same arrays hold the same one, and it goes with the last of them.  It holds
    the arrays: while it can be found, nothing else lies at their place.
    """

    def __init__(self, place: Place, csr: CSR) -> None:
        self.place, self.csr = place, csr._replace(data=None)
        self.lock = RLock()
        self.order: Order | None = None
        self.windowed: dict[Cut, Windowed] = {}
        self.given: Given | None = None
        #: By the place of a permutation: itself and, from its second use on, its inverse.
        self.inverses: dict[int, tuple[Tensor, Array | None]] = {}


_lock = Lock()
_kept: WeakValueDictionary[Place, Kept] = WeakValueDictionary()


def place_of(S: Structure) -> Place:
    """Where that structure lies."""
    # As torch tells it: a tensor without entries has no address.
    return S.indptr, S.indices if S.nnz else 0, S.n_rows, S.n_cols, S.nnz


def keep(S: Structure, csr: CSR) -> Kept:
    """What is kept for the structure of that CSR: for a side to hold."""
    place = place_of(S)
    with _lock:
        found = _kept.setdefault(place, Kept(place, csr))
        let_find(found.csr, S)
        return found


def find(place: Place) -> Kept | None:
    """What is kept for the structure at that place; None if no graph's side lies there."""
    return _kept.get(place)
