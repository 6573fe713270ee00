"""Choose how rows of features are read where scores are of two rows, and the kernel for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ...._caches import lru_cache
from ....formats.arrays import VALUE_DTYPES
from ...engine import jit
from ...engine.jit import ITEMSIZE, row_bytes
from ..gat.launches import TEAM_BYTES

DOT, ADDITIVE = range(2)  # as in pairwise.cuh
FORWARD, SOURCES, TARGETS = range(3)
LANES = (4, 8, 16, 32)
#: Where nothing is tuned: float64, and indices of 64 bits.
FEW_LANES = (8, 32)
#: Lanes for rows that are not aligned to 16 bytes, a value a load; wider rows: pairwise_wide.cu.
SHORT_LANES = 8
FILES = {"attend": "attention/pairwise/pairwise.cu", "attend_wide": "attention/pairwise/wide.cu"}
#: ``Attention`` of pairwise.cuh, by the dtype of the features.
LAYOUTS = dict.fromkeys(VALUE_DTYPES, "16PQfffI6i") | {"float64": "16PQdddI6i"}


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a row of features is read: a slice has ``packs * lanes * vector`` values."""

    lanes: int
    vector: int
    mates: int = 1  #: heads side by side
    packs: int = 0  #: of a lane in pairwise_wide.cu; 0 where a sub-warp has the row
    slices: int = 1

    @property
    def values(self) -> int:
        """Values of a lane."""
        return self.vector * max(self.packs, 1)


class Variant(NamedTuple):
    """What a launch computes, as template arguments say it."""

    direction: int  #: FORWARD, SOURCES or TARGETS
    kind: int  #: of scores: DOT or ADDITIVE
    keys_are_values: bool


class LaunchShape(NamedTuple):
    """How rows are launched, whatever the addresses."""

    shape: RowShape
    file: str
    kernel: str
    layout: str
    constants: tuple[int, ...]
    teams: int  #: slices of all teams of heads
    row_bytes: int


@lru_cache(maxsize=4096)
def launch_shape(
    types: tuple[str, str], heads: int, feat: int, alignment: int, variant: Variant, extra: bool
) -> LaunchShape:
    """Look up the shape of such a launch; ``alignment`` has the lowest 4 bits of all addresses."""
    shape = row_shape(*types, heads, feat, alignment)
    name, constants = instantiation(types, shape, variant, extra=extra)
    before, behind = ("5P", "PqII") if shape.packs else ("7P", "P2qII")
    layout, teams = f"{before}{LAYOUTS[types[0]]}{behind}", heads // shape.mates * shape.slices
    stride = row_bytes(heads * feat, types[0])
    return LaunchShape(shape, FILES[name], f"{name}_rows", layout, constants, teams, stride)


def packs(dtype: str, vector: int) -> int:
    """Packs of a lane in pairwise_wide.cu: as many sums as its registers have room for."""
    return (8 if dtype == "float64" else 16) // vector


@lru_cache(maxsize=4096)
def row_shape(dtype: str, index_dtype: str, heads: int, feat: int, alignment: int) -> RowShape:
    """Choose the widest loads that ``alignment``, the lowest bits of all addresses, allows."""
    size = ITEMSIZE[dtype]
    alignment |= feat * size
    tuned = size < 8 and index_dtype == "int32"
    if alignment % 16 == 0:
        vector = 16 // size
        for lanes in LANES if tuned else FEW_LANES:
            if lanes * vector >= feat and heads % _mates(lanes) == 0:
                return RowShape(lanes, vector, _mates(lanes))
        return _wide(dtype, feat, vector)
    if tuned and feat <= SHORT_LANES:
        return RowShape(SHORT_LANES, 1)
    if tuned and alignment % 8 == 0 and feat * size <= 16 * 8:
        return RowShape(16, 8 // size)
    return RowShape(jit.WARP, 1) if tuned and feat <= jit.WARP else _wide(dtype, feat, 1)


def _mates(lanes: int) -> int:
    """Heads side by side, where loads are of 16 bytes."""
    return TEAM_BYTES // (16 * lanes) or 1


def _wide(dtype: str, feat: int, vector: int) -> RowShape:
    per_lane = packs(dtype, vector)
    slices = -(-feat // (jit.WARP * per_lane * vector))
    return RowShape(jit.WARP, vector, packs=per_lane, slices=slices)


def instantiation(
    types: tuple[str, str], shape: RowShape, variant: Variant, *, extra: bool
) -> tuple[str, tuple[int, ...]]:
    """Name kernel and template arguments; a shape that is not tuned has all ``extra`` always."""
    direction, kind, keys_are_values = variant
    if shape.packs:
        return "attend_wide", (shape.vector, shape.packs, direction)
    dtype, index_dtype = types
    tuned = index_dtype == "int32" and shape.vector * ITEMSIZE[dtype] == 16 and dtype != "float64"
    flags = direction, kind, int(keys_are_values), int(extra or not tuned)
    return "attend", (shape.lanes, shape.vector, shape.mates, *flags)


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel of attention between rows that may be launched: file and C++ name."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        for kernel, constants in _instantiations(types):
            yield FILES[kernel], jit.expression(f"{kernel}_rows", types, constants)
        yield FILES["attend"], jit.expression("attend_cut_rows", types, ())
    for dtype in VALUE_DTYPES:
        yield FILES["attend"], jit.expression("attend_stats", (dtype,), ())


def _instantiations(types: tuple[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    size, tuned = ITEMSIZE[types[0]], types[0] != "float64" and types[1] == "int32"
    vector = 16 // size
    shapes = [RowShape(n, vector, _mates(n)) for n in (LANES if tuned else FEW_LANES)]
    if tuned:
        shapes += [RowShape(SHORT_LANES, 1), RowShape(16, 8 // size), RowShape(jit.WARP, 1)]
    shapes += [RowShape(jit.WARP, v, packs=packs(types[0], v)) for v in (vector, 1)]
    scores = [(DOT, False), (DOT, True), (ADDITIVE, True)]
    variants = [Variant(d, *score) for d, score in product((FORWARD, SOURCES, TARGETS), scores)]
    every = product(shapes, variants, (False, True))
    return sorted({instantiation(types, shape, v, extra=e) for shape, v, e in every})
