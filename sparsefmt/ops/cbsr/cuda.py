"""Launch MaxK, its way to dense features and back, and the products with row-balanced features.

Row-balanced features are ``columns`` and ``data``, both (rows, k), as in a CBSR.
"""

from collections.abc import Callable, Iterator
from itertools import product
from operator import add
from typing import Any, NamedTuple

import numpy as np

from ...formats.arrays import VALUE_DTYPES, Array, is_cupy, namespace
from ...formats.cbsr import column_dtype
from ..engine import jit
from ..engine.call import Prepared, Result, launcher
from ..engine.jit import ITEMSIZE, Launch, filling, on_stream, row_bytes, view
from ..engine.memory import Memory, memory_of
from ..engine.structure import Structure
from ..matmul.cuda import DENSE_ROWS, SCALED_SUM
from ..matmul.cuda import load as load_matmul

#: Teams in maxk.cu: lanes, and columns that each holds.  A row goes to the first that holds it.
TEAMS = ((8, 8), (16, 8), (32, 8), (32, 16), (32, 32), (256, 16), (1024, 16), (1024, 64))
#: Columns that the widest team holds.
MAX_FEAT = 65536
#: What holds infinity, as integers of the size of the values.
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80 << 16, "float64": 0x7FF << 52}

#: Values and columns by their bytes, as dense.cu moves them.
VALUES = {2: "uint16", 4: "int32", 8: "int64"}
COLUMNS = {1: "uint8", 2: "uint16", 4: "int32"}

THREADS = 128  # of a block in spgemm.cu and sddmm.cu, and of small teams in maxk.cu
ALIGNED = 2  # as in cbsr.cuh
_MEAN = 1
_ROWS_ALIGNED, _FEW_CHOSEN = 1, 2  # as in maxk.cu
_GROUP = 8
_MOST_ROWS = 2**31 - THREADS  # of a launch of maxk: the last block counts a few more
_WARPS = THREADS // jit.WARP
_SHARED_BYTES = 47 * 2**10  # of a block, what every device gives without being asked

_FILE = {
    "maxk_rows": "cbsr/maxk.cu",
    "cbsr_to_dense": "cbsr/dense.cu",
    "dense_to_cbsr": "cbsr/dense.cu",
    "spgemm_csr_cbsr": "cbsr/spgemm.cu",
    "sddmm_csr_cbsr": "cbsr/sddmm.cu",
}
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "maxk_rows": "3PiI3i",
    "cbsr_to_dense": "3Pq3i",
    "dense_to_cbsr": "3P2q3i",
    "spgemm_csr_cbsr": "11PqI5i",
    "sddmm_csr_cbsr": "9Pq3i",
}


class Variant(NamedTuple):
    """How a warp reads rows of S: lanes of an entry, places side by side, groups together."""

    lanes: int
    places: int
    vector: int
    batch: int

    @property
    def streams(self) -> int:
        """Return how many rows of S a warp reads side by side."""
        return jit.WARP // self.lanes


#: Variants of spgemm by the largest k: for rows of many entries, whose ends are rare, and of few.
#: The other one: 0.7 to 0.9x on 12 entries a row, 0.7 to 0.8x on 490 (H200, float32, prototypes).
MANY = {
    8: Variant(4, 2, 1, 4),
    16: Variant(4, 4, 1, 4),
    32: Variant(8, 4, 1, 4),
    256: Variant(16, 4, 1, 4),
}
#: Of 2-byte values a lane reads twice as many.
MANY_HALVES = {
    8: Variant(4, 2, 1, 4),
    16: Variant(4, 4, 1, 4),
    32: Variant(4, 8, 1, 4),
    256: Variant(8, 8, 1, 4),
}
FEW = {
    8: Variant(8, 1, 1, 1),
    16: Variant(8, 2, 1, 1),
    32: Variant(8, 4, 1, 1),
    256: Variant(16, 4, 1, 1),
}
#: More than 256 features, and float64; ``SCALAR`` also where words do not fit.
GENERAL, SCALAR = Variant(8, 4, 1, 1), Variant(8, 4, 0, 1)
#: Variants of sddmm, of rows that fit words of four places and of others.
DOTS, DOTS_SCALAR = Variant(8, 4, 1, 4), Variant(32, 1, 0, 1)


def instantiations() -> Iterator[tuple[str, str]]:
    """Yield file and C++ name of every kernel that this file may launch."""
    names: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    for dtype, team in product(VALUE_DTYPES, TEAMS):
        names.append(("maxk_rows", (dtype, column_dtype(team[0] * team[1]).name), team))
    for moved in product(VALUES.values(), COLUMNS.values()):
        names += [("cbsr_to_dense", moved, ()), ("dense_to_cbsr", moved, ())]
    for dtype, index, column in product(VALUE_DTYPES, ("int32", "int64"), COLUMNS.values()):
        types = dtype, index, column
        many = MANY if dtype == "float32" else MANY_HALVES
        tuned = column == "uint8" and dtype != "float64"
        variants = {*many.values(), *FEW.values(), SCALAR} if tuned else {GENERAL, SCALAR}
        names += [("spgemm_csr_cbsr", types, (*one,)) for one in variants]
        on_chip = {"uint8": (1,), "uint16": (0, 1), "int32": (0,)}[column]
        for one, room in product((DOTS, DOTS_SCALAR), on_chip):
            names.append(("sddmm_csr_cbsr", types, (one.lanes, one.places, one.batch, room)))
    for kernel, dtypes, constants in names:
        yield _FILE[kernel], jit.expression(kernel, dtypes, constants)


def _load(kernel: str, types: tuple[str, ...], constants: tuple[int, ...] = ()) -> jit.Kernel:
    return jit.load(_FILE[kernel], kernel, _PARAMETERS[kernel], types, constants)


# MaxK


@launcher(sizes=lambda S: S.n_rows, in_place=("x",))
def maxk(S: Structure, m: Memory, x: Array, k: int) -> Prepared:
    """Prepare columns and values of the ``k`` largest of each row, of at most ``MAX_FEAT``."""
    n_rows, feat, dtype = S.n_rows, x.shape[1], m.dtype(x)
    columns, size = column_dtype(feat).name, ITEMSIZE[dtype]
    lanes, width = team = next(team for team in TEAMS if team[0] * team[1] >= feat)
    nbytes, threads = row_bytes(m.row_stride(x), dtype), max(lanes, THREADS)
    aligned = (m.pointer(x) | nbytes | feat * size) % 16 == 0
    few = k <= 2 * min(lanes, -(-feat // _GROUP))
    kernel = _load("maxk_rows", (dtype, column_dtype(lanes * width).name), team)
    launches = []
    for begin in range(0, n_rows, _MOST_ROWS):
        rows = min(n_rows - begin, _MOST_ROWS)
        sizes = rows, nbytes, feat, k, _ROWS_ALIGNED * aligned | _FEW_CHOSEN * few
        launch = kernel.ready(-(-rows * lanes // threads), after=sizes, threads=threads)
        steps = nbytes, k * size, k * np.dtype(columns).itemsize
        launches.append((_further(launch, *(begin * step for step in steps)), _MAXK))
    return Prepared(tuple(launches), (Result((k,), columns), Result((k,), dtype)))


_MAXK = "x", "out_1", "out"  # features, values and columns


def _further(launch: Launch, *steps: int) -> Callable[..., None]:
    """Return a launch on addresses that lie ``steps`` bytes further, one step for each."""
    if not any(steps):
        return launch
    return lambda stream, *args: launch(stream, *map(add, args, steps))


def maxk_too_wide(_: None, x: Array, *__: Any, **___: Any) -> list[str]:
    """List the reason against rows that no team of threads holds."""
    feat = x.shape[1]
    return [f"a team of threads holds {MAX_FEAT} features, not {feat}"] if feat > MAX_FEAT else []


def maxk_by_sorting(_: None, x: Array, k: int) -> tuple[Any, Any]:
    """As ``maxk``, for rows of any width: by a stable sort."""
    m, shape = memory_of(x), (x.shape[0], k)
    x, dtype = m.contiguous(x), m.dtype(x)
    columns, data = m.empty(shape, column_dtype(x.shape[1]).name, x), m.empty(shape, dtype, x)
    with m.on_device(x), on_stream(m.stream(x)):
        bits = _bits(m, x)
        chosen = columns_by_sorting(bits, INFINITY[dtype], k)
        _bits(m, columns)[...] = chosen
        _bits(m, data)[...] = namespace(bits).take_along_axis(bits, chosen, axis=1)
    return columns, data


def _bits(m: Memory, a: Array) -> Array:
    """Return the integers that hold the values of a contiguous array, as a CuPy array."""
    name = f"int{8 * a.itemsize}"
    return a.view(name) if is_cupy(a) else view(m.pointer(a), tuple(a.shape), name)


def columns_by_sorting(bits: Array, infinity: int, k: int) -> Array:
    """Columns of the ``k`` largest of each row, of the integers that hold the values.

    They are sorted by integers in the order of the values: -0 is 0, and every NaN the largest.
    """
    xp, limits = namespace(bits), np.iinfo(bits.dtype)
    keys = xp.where(bits < 0, limits.min - bits, bits)
    keys = xp.where(bits & limits.max > infinity, limits.max, keys)
    return xp.sort(xp.argsort(~keys, axis=1, kind="stable")[:, :k], axis=1)


# Row-balanced features to dense ones, and back


@launcher(sizes=lambda S: S.n_rows, in_place=())
def cbsr_to_dense(S: Structure, m: Memory, columns: Array, data: Array, feat: int) -> Prepared:
    """Prepare ``out[i, columns[i, t]] = data[i, t]``, and 0 elsewhere."""
    dtype, k = m.dtype(data), data.shape[1]
    results, size = (Result((feat,), dtype),), ITEMSIZE[dtype]
    if not S.n_rows:
        return Prepared((), results)
    kernel = _load("cbsr_to_dense", (VALUES[size], COLUMNS[columns.itemsize]))
    sizes = S.n_rows, feat, k, feat * size % 16 == 0  # new memory is aligned
    launch = kernel.ready(jit.warps_to_blocks(S.n_rows), after=sizes)
    return Prepared(((launch, ("data", "columns", "out")),), results)


@launcher(sizes=lambda S: S.n_rows, in_place=("x",))
def dense_to_cbsr(
    S: Structure, m: Memory, x: Array, columns: Array,
    *, out: Array | None = None, first: int = 0, width: int = 2**31 - 1,
) -> Prepared:  # fmt: skip
    """Prepare ``out[i, t] = x[i, columns[i, t] - first]``, where x has that column of ``width``."""
    dtype, k = m.dtype(x), columns.shape[1]
    results = (Result((k,), dtype),)
    if not S.n_rows:
        return Prepared((), results)
    kernel = _load("dense_to_cbsr", (VALUES[ITEMSIZE[dtype]], COLUMNS[columns.itemsize]))
    sizes = S.n_rows * k, m.row_stride(x), k, first, width
    launch = kernel.ready(jit.warps_to_blocks(-(-S.n_rows * k // jit.WARP)), after=sizes)
    return Prepared(((launch, ("x", "columns", "out")),), results)


# SpGEMM


@launcher(in_place=())
def spgemm(
    S: Structure, m: Memory, columns: Array, data: Array, feat: int, values: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *,
    out: Array | None = None,
) -> Prepared:  # fmt: skip
    """Prepare ``out = diag(r) A diag(c) S``, divided by a row's number of entries for a mean."""
    dtype, index_bytes, k = m.dtype(data), columns.itemsize, columns.shape[1]
    results = (Result((feat,), dtype),)
    if not S.n_rows:
        return Prepared((), results)
    if not S.nnz:
        fill = filling(S.n_rows * feat * ITEMSIZE[dtype])
        return Prepared(((fill, ("out",)),), results)
    size, flags = max(ITEMSIZE[dtype], 4), _MEAN * (reduce == "mean")
    many, alignment = S.nnz >= DENSE_ROWS * S.n_rows, (m.pointer(columns) | m.pointer(data)) % 16
    variant = spgemm_variant(dtype, index_bytes, k, many=many, alignment=alignment)
    log_window = _log_window(feat, variant, size)
    lanes = variant.lanes.bit_length() - 1 if many else 0
    types = dtype, S.index_dtype, COLUMNS[index_bytes]
    launch = _load("spgemm_csr_cbsr", types, variant).ready(
        S.blocks * -(-feat >> log_window),
        after=(S.nnz, S.blocks, k, feat, log_window, lanes, flags),
        threads=THREADS,
        shared=(_WARPS * (variant.streams + 1) << log_window) * size,
    )
    launches: list[tuple[Launch, tuple[str, ...]]] = [(launch, _SPGEMM)]
    if S.n_cuts:  # partial results of rows that blocks share
        of_sums = dtype, S.index_dtype
        kernel = load_matmul("matmul/spmm.cu", "spmm_csr_cut_rows", of_sums, (SCALED_SUM,))
        blocks = jit.warps_to_blocks(S.n_cuts * -(-feat // jit.WARP))
        launches.append((kernel.ready(blocks, after=(S.n_cuts, feat, flags, 0)), _OF_CUTS))
    return Prepared(tuple(launches), results, (0, 2 * S.n_cuts * feat * size))


_SPGEMM = (
    *("indptr", "indices", "start", "slot", "values", "col_scale", "row_scale"),
    *("columns", "data", "out", "workspace"),
)
_OF_CUTS = ("indptr", "start", "cut", "row_scale", "out", "", "workspace", *[""] * 4)


def spgemm_variant(dtype: str, index_bytes: int, k: int, *, many: bool, alignment: int) -> Variant:
    """Choose how warps read S; ``alignment`` has the lowest bits of its arrays' addresses."""
    variants = {k: GENERAL}
    if index_bytes == 1 and dtype != "float64":
        variants = FEW if not many else MANY if dtype == "float32" else MANY_HALVES
    variant = variants[min(largest for largest in variants if largest >= k)]
    alignment |= k * ITEMSIZE[dtype]
    word, columns = min(variant.places * ITEMSIZE[dtype], 16), variant.places * index_bytes
    fits = k % variant.places == 0 and alignment % word == 0 and alignment % columns == 0
    return variant if fits else SCALAR


def _log_window(feat: int, variant: Variant, size: int) -> int:
    """log2 of the features whose sums shared memory holds: all, if it can, rounded up."""
    room = _SHARED_BYTES // (_WARPS * (variant.streams + 1) * size)
    return min(max((feat - 1).bit_length(), 5), room.bit_length() - 1)


# SDDMM


@launcher(in_place=("x",))
def sddmm_cbsr(
    S: Structure, m: Memory, x: Array, columns: Array, data: Array, row_scale: Array | None = None,
    col_scale: Array | None = None, *, out: Array | None = None,
) -> Prepared:  # fmt: skip
    """Prepare ``out[e] = r[i] c[j] sum_t x[i, columns[j, t]] data[j, t]``."""
    dtype, feat, k = m.dtype(x), x.shape[1], columns.shape[1]
    results = (Result((), dtype, "nnz"),)
    if not S.nnz:
        return Prepared((), results)
    size, index_bytes, stride = ITEMSIZE[dtype], columns.itemsize, m.row_stride(x)
    places, values, rows = m.pointers(columns, data, x)
    variant = DOTS_SCALAR if k % 4 or (values | places * (4 // index_bytes)) % 16 else DOTS
    shared = 2 * _WARPS * feat * size
    on_chip = shared <= _SHARED_BYTES
    flags = ALIGNED * ((rows | stride * size | feat * size) % 16 == 0)
    types = dtype, S.index_dtype, COLUMNS[index_bytes]
    constants = variant.lanes, variant.places, variant.batch, int(on_chip)
    launch = _load("sddmm_csr_cbsr", types, constants).ready(
        S.blocks,
        after=(stride, k, feat, flags),
        threads=THREADS,
        shared=shared if on_chip else 0,
    )
    arrays = "indptr", "indices", "start", "col_scale", "row_scale", "columns", "data", "x", "out"
    return Prepared(((launch, arrays),), results)
