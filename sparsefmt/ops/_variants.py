"""Every instantiation that the launchers may ask for: what ``compile_all`` compiles."""

from itertools import product

from .._arrays import VALUE_DTYPES
from . import _jit
from ._launch import (
    CHOSEN_SUM,
    DIRECT,
    EXTREME,
    EXTREME_ARG,
    INDIRECT,
    ITEMSIZE,
    SCALED,
    SCALED_SUM,
    SUM,
    UNWEIGHTED,
)
from ._launch_edges import TEAMS, TILE_HEADS

_INDEX = ("int32", "int64")
_TYPES = list(product(VALUE_DTYPES, _INDEX))


def _spmm_variants(dtype: str) -> list[tuple[int, ...]]:
    wide = 16 // ITEMSIZE[dtype]
    sums = product((SUM, SCALED_SUM), (UNWEIGHTED, DIRECT, SCALED, INDIRECT))
    extremes = product((EXTREME, EXTREME_ARG), (DIRECT, INDIRECT))
    full = [*sums, *extremes, (CHOSEN_SUM, INDIRECT)]
    rarely = [(SCALED_SUM, UNWEIGHTED)]
    rarely += [(r, INDIRECT) for r in (SCALED_SUM, CHOSEN_SUM, EXTREME, EXTREME_ARG)]
    rare = [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    return [
        *((lanes, wide, *rest) for lanes in (4, 8) for rest in full),
        *((16, wide, *rest) for rest in full if rest[0] <= SCALED_SUM),
        *((*shape, *rest) for shape in rare for rest in rarely),
    ]


def _declare() -> None:
    for types in _TYPES:
        wide = 16 // ITEMSIZE[types[0]]
        names = [("spmm_csr_balanced", variant) for variant in _spmm_variants(types[0])]
        reductions = SCALED_SUM, CHOSEN_SUM, EXTREME, EXTREME_ARG
        names += [("spmm_csr_cut_rows", (one,)) for one in reductions]
        _jit.declare("spmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        _jit.declare("spmm.cu", _jit.expression("spmm_coo_atomic", types, ()))
        names = [("sddmm_csr_balanced", (vector,)) for vector in {wide, wide // 2, 1}]
        names += [("spmm_arg_da", ())]
        _jit.declare("sddmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        teams = [*((lanes, 1) for lanes in TEAMS), (32, 0)]
        names = [("edge_softmax_rows", team) for team in teams]
        names += [("edge_softmax_tiles", (heads,)) for heads in (*TILE_HEADS, 0)]
        variants = [(name, (*rest, backward)) for name, rest in names for backward in (0, 1)]
        expressions = (_jit.expression(name, types, rest) for name, rest in variants)
        _jit.declare("attention.cu", *expressions)


_declare()
