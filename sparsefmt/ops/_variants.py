"""Every instantiation that the launchers may ask for: what ``compile_all`` compiles."""

from itertools import product

from .._arrays import VALUE_DTYPES
from . import _jit
from ._launch import (
    DIRECT,
    EXTREME,
    EXTREME_ARG,
    INDIRECT,
    ITEMSIZE,
    SCALED_SUM,
    SUM,
    TEAMS,
    UNWEIGHTED,
)

_INDEX = ("int32", "int64")
_TYPES = list(product(VALUE_DTYPES, _INDEX))


def _spmm_variants(dtype: str) -> list[tuple[int, ...]]:
    wide = 16 // ITEMSIZE[dtype]
    full = [(r, w) for r in (SUM, SCALED_SUM) for w in (UNWEIGHTED, DIRECT, INDIRECT)]
    general = [(SCALED_SUM, UNWEIGHTED), (SCALED_SUM, INDIRECT)]
    extremes = [(EXTREME, INDIRECT), (EXTREME_ARG, INDIRECT)]
    rare = [(8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    return [
        *((lanes, wide, *rest) for lanes in (4, 8) for rest in full + extremes),
        *((16, wide, *rest) for rest in full),
        *((*shape, *rest) for shape in rare for rest in general + extremes),
    ]


def _declare() -> None:
    for types in _TYPES:
        wide = 16 // ITEMSIZE[types[0]]
        names = [("spmm_csr_balanced", variant) for variant in _spmm_variants(types[0])]
        names += [("spmm_csr_cut_rows", (r,)) for r in (SCALED_SUM, EXTREME, EXTREME_ARG)]
        _jit.declare("spmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        _jit.declare("spmm.cu", _jit.expression("spmm_coo_atomic", types, ()))
        names = [("sddmm_csr_balanced", (vector,)) for vector in {wide, wide // 2, 1}]
        names += [("spmm_arg_da", ()), ("spmm_arg_dx", ())]
        _jit.declare("sddmm.cu", *(_jit.expression(name, types, rest) for name, rest in names))
        teams = [*((lanes, 1) for lanes in TEAMS), (32, 0)]
        variants = [(*team, backward) for team in teams for backward in (0, 1)]
        expressions = (_jit.expression("edge_softmax_rows", types, rest) for rest in variants)
        _jit.declare("attention.cu", *expressions)


_declare()
