"""Every instantiation that the launchers may ask for: what ``compile_all`` compiles."""

from importlib import import_module
from itertools import product

from ...formats.arrays import VALUE_DTYPES
from ..attention import cuda_gat as attention_cuda_gat
from ..cbsr.cuda import DOTS, DOTS_SCALAR, FEW, GENERAL, MANY, MANY_HALVES, SCALAR
from ..cbsr.cuda_dense import COLUMNS, VALUES
from ..cbsr.cuda_maxk import SHAPES, instantiation
from ..cbsr.cuda_sspmm import GENERAL_LANES, LANES, SCALAR_LANES
from ..engine.launch import ITEMSIZE
from ..matmul import cuda_aggregate as matmul_cuda_aggregate
from ..matmul.cuda import (
    CHOSEN_SUM,
    DIRECT,
    EXTREME,
    EXTREME_ARG,
    INDIRECT,
    SCALED,
    SCALED_SUM,
    SUM,
    UNWEIGHTED,
)
from ..sampling import cuda as sampling_cuda
from ..sampling.options import STRATEGIES
from ..tiles import cuda as tiles_cuda
from ..tiles import cuda_edges as tiles_cuda_edges
from . import jit

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
        jit.declare("matmul/spmm.cu", *(jit.expression(name, types, rest) for name, rest in names))
        scattering = [(4, wide), (8, wide), (8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
        names = [("spmm_coo_atomic", shape) for shape in scattering]
        jit.declare("matmul/spmm.cu", *(jit.expression(name, types, rest) for name, rest in names))
    maxk = (instantiation(dtype, *shape) for dtype in VALUE_DTYPES for shape in SHAPES)
    jit.declare("cbsr/maxk.cu", *(jit.expression("maxk_rows", *one) for one in maxk))
    _declare_cbsr()
    _declare_aggregate()
    _declare_norm()
    _declare_gat()
    _declare_sampled()
    _declare_tiles()
    moved = list(product(VALUES.values(), COLUMNS.values()))
    for name in ("cbsr_to_dense", "dense_to_cbsr"):
        jit.declare("cbsr/dense.cu", *(jit.expression(name, types, ()) for types in moved))


def _declare_cbsr() -> None:
    for dtype, index, column in product(VALUE_DTYPES, _INDEX, COLUMNS.values()):
        types, narrow = (dtype, index, column), column == "uint8"
        tuned = narrow and dtype != "float64"
        many = MANY if dtype == "float32" else MANY_HALVES
        ways = {*many.values(), *FEW.values(), SCALAR} if tuned else {GENERAL, SCALAR}
        gathers = {(one.lanes, one.places, one.vector, one.batch) for one in ways}
        names = (jit.expression("spgemm_csr_cbsr", types, rest) for rest in gathers)
        jit.declare("cbsr/spgemm.cu", *names)
        room = {"uint8": (1,), "uint16": (0, 1), "int32": (0,)}[column]
        dots = [(w.lanes, w.places, w.batch, on) for w, on in product((DOTS, DOTS_SCALAR), room)]
        names = (jit.expression("sddmm_csr_cbsr", types, rest) for rest in dots)
        jit.declare("cbsr/sddmm.cu", *names)
        if column != "int32" or ITEMSIZE[dtype] == 2:  # else no row fits on chip
            fours = {GENERAL_LANES} | ({*LANES.values()} if tuned else set())
            shapes = [(SCALAR_LANES, 1), *((lanes, 4) for lanes in sorted(fours))]
            names = (jit.expression("sspmm_csr_windows", types, rest) for rest in shapes)
            jit.declare("cbsr/sspmm.cu", *names)
    short = (jit.expression("narrowed", (dtype,), ()) for dtype in ("float16", "bfloat16"))
    jit.declare("cbsr/sspmm.cu", *short)


def _declare_norm() -> None:
    both = [*((types, 1) for types in _TYPES), *((("float32", index), 0) for index in _INDEX)]
    for name in ("gcn_degrees", "gcn_scaled", "gcn_slopes", "gcn_gradient"):
        names = (jit.expression(name, types, (weighted,)) for types, weighted in both)
        jit.declare("gcn/gcn_norm.cu", *names)
    for name in ("gcn_rows", "gcn_rows_scaled"):
        jit.declare("gcn/gcn_norm.cu", *(jit.expression(name, types, ()) for types in _TYPES))


def _declare_aggregate() -> None:
    for types in _TYPES:
        names = [("aggregate_backward", one) for one in matmul_cuda_aggregate.variants(types[0])]
        jit.declare(
            "matmul/aggregate.cu", *(jit.expression(name, types, rest) for name, rest in names)
        )
        jit.declare("matmul/aggregate.cu", jit.expression("aggregate_cut_rows", types, ()))
        wide = "float64" if types[0] == "float64" else "float32"
        for first, back in sorted({(types[0], 0), (wide, 0), (wide, 1)}):
            jit.declare("matmul/aggregate.cu", jit.expression("permuted", (first, *types), (back,)))
    alone = (jit.expression("aggregate_self", (dtype,), ()) for dtype in VALUE_DTYPES)
    jit.declare("matmul/aggregate.cu", *alone)


def _declare_gat() -> None:
    for types in _TYPES:
        names = (
            jit.expression(name, types, rest) for name, rest in attention_cuda_gat.variants(*types)
        )
        jit.declare("attention/gat.cu", *names)
        jit.declare("attention/gat_entries.cu", jit.expression("gat_edge_gradient", types, ()))
        if ITEMSIZE[types[0]] > 2:  # scores are no narrower
            jit.declare("attention/gat_entries.cu", jit.expression("gat_attention", types, ()))
    for dtype in VALUE_DTYPES:
        jit.declare("attention/gat.cu", jit.expression("gat_stats", (dtype,), ()))
        vectors = (16 // ITEMSIZE[dtype], 1)
        shapes = [
            *(("gat_scores", one) for one in product(attention_cuda_gat.SCORE_LANES, vectors)),
            *(
                ("gat_scores_backward", one)
                for one in product(attention_cuda_gat.SCORE_GRADIENT_LANES, vectors)
            ),
        ]
        names = (jit.expression(name, (dtype,), rest) for name, rest in shapes)
        jit.declare("attention/gat_scores.cu", *names)


def _declare_sampled() -> None:
    ways = STRATEGIES.values()
    for types in _TYPES:
        products = sampling_cuda.variants(types[0])
        names = (jit.expression("spmm_sampled", types, rest) for rest in products)
        jit.declare("sampling/spmm.cu", *names)
        both = product((16 // ITEMSIZE[types[0]], 1), ways)
        names = (jit.expression("sddmm_sampled", types, rest) for rest in both)
        jit.declare("sampling/sddmm.cu", *names)
    for one in product(_INDEX, ways):
        jit.declare("sampling/rows.cu", jit.expression("sample_rows", one[:1], one[1:]))


def _declare_tiles() -> None:
    shapes = [(h, one) for h, slices in tiles_cuda.SLICES.items() for one in slices]
    for types in product(tiles_cuda.DTYPES, _INDEX):
        weights = tiles_cuda.WEIGHTS[types[0]]
        constants = ((*shape, one) for shape, one in product(shapes, weights))
        names = (jit.expression("spmm_sgt_mma", types, rest) for rest in constants)
        jit.declare("tiles/spmm.cu", *names, jit.expression("spmm_sgt_parts", types, ()))
        blocks = product(tiles_cuda.SLICES, tiles_cuda_edges.ROWS, (0, 1))
        names = (jit.expression("sddmm_sgt_mma", types, one) for one in blocks)
        jit.declare("tiles/sddmm.cu", *names)


#: Modules below ``ops`` that say themselves what they may launch.
MODULES = ("edges.cuda", "attention.cuda_pairwise")

_declare()
for _module in MODULES:
    for _file, _name in import_module(f"sparsefmt.ops.{_module}").instantiations():
        jit.declare(_file, _name)
