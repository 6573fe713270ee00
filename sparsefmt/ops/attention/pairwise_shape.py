"""How rows of features are read where scores are of whole rows, and the kernels for it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ..engine import jit
from ..engine.launch import ITEMSIZE
from .cuda_gat import TEAM_BYTES

DOT, ADDITIVE = range(2)  # as in attend.cuh
FORWARD, SOURCES, TARGETS = range(3)
LANES = (4, 8, 16, 32)
#: Where nothing is tuned: float64, and indices of 64 bits.
FEW_LANES = (8, 32)
#: Lanes and values of a load, for rows that are not aligned to 16 bytes; beyond, attend_wide.cu.
SHORT_LANES = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """How a row of features is read: ``packs`` times ``lanes`` times ``vector`` values a slice."""

    lanes: int
    vector: int
    mates: int = 1  #: heads side by side
    packs: int = 0  #: of a lane in attend_wide.cu; 0 where a sub-warp has the row
    slices: int = 1

    @property
    def values(self) -> int:
        """Of a lane."""
        return self.vector * max(self.packs, 1)


def packs(dtype: str, vector: int) -> int:
    """Packs of a lane in attend_wide.cu: of sums all its registers have room for."""
    return (8 if dtype == "float64" else 16) // vector


def _mates(lanes: int) -> int:
    """Heads side by side, where loads are of 16 bytes."""
    return TEAM_BYTES // (16 * lanes) or 1


def _wide(dtype: str, feat: int, vector: int) -> Cut:
    per_lane = packs(dtype, vector)
    slices = -(-feat // (jit.WARP * per_lane * vector))
    return Cut(jit.WARP, vector, packs=per_lane, slices=slices)


@lru_cache(maxsize=4096)
def cut_of(dtype: str, index_dtype: str, heads: int, feat: int, together: int) -> Cut:
    """The widest loads that alignment allows; ``together`` has the addresses' lowest bits."""
    size = ITEMSIZE[dtype]
    together |= feat * size
    tuned = size < 8 and index_dtype == "int32"
    if together % 16 == 0:
        vector = 16 // size
        for lanes in LANES if tuned else FEW_LANES:
            if lanes * vector >= feat and heads % _mates(lanes) == 0:
                return Cut(lanes, vector, _mates(lanes))
        return _wide(dtype, feat, vector)
    if tuned and feat <= SHORT_LANES:
        return Cut(SHORT_LANES, 1)
    if tuned and together % 8 == 0 and feat * size <= 16 * 8:
        return Cut(16, 8 // size)
    return Cut(jit.WARP, 1) if tuned and feat <= jit.WARP else _wide(dtype, feat, 1)


def instantiation(
    types: tuple[str, str], cut: Cut, which: tuple[int, int, bool], *, extra: bool
) -> tuple[str, tuple[int, ...]]:
    """Kernel and template arguments; what is not tuned is always ready for all ``extra``."""
    way, kind, one = which
    if cut.packs:
        return "attend_wide", (cut.vector, cut.packs, way)
    tuned = types[1] == "int32" and cut.vector * ITEMSIZE[types[0]] == 16 and types[0] != "float64"
    extra = extra or not tuned
    return "attend", (cut.lanes, cut.vector, cut.mates, way, kind, int(one), int(extra))


def instantiations(types: tuple[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """All that the launchers may ask for, of these types."""
    size, tuned = ITEMSIZE[types[0]], types[0] != "float64" and types[1] == "int32"
    vector = 16 // size
    cuts = [Cut(n, vector, _mates(n)) for n in (LANES if tuned else FEW_LANES)]
    if tuned:
        cuts += [Cut(SHORT_LANES, 1), Cut(16, 8 // size), Cut(jit.WARP, 1)]
    cuts += [Cut(jit.WARP, v, packs=packs(types[0], v)) for v in (vector, 1)]
    kinds = [(DOT, False), (DOT, True), (ADDITIVE, True)]
    ways = [(way, *one) for way, one in product((FORWARD, SOURCES, TARGETS), kinds)]
    every = product(cuts, ways, (False, True))
    return sorted({instantiation(types, cut, way, extra=e) for cut, way, e in every})
