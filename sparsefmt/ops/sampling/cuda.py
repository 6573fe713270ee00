"""Launch products with a sample of each row; the kernels choose entries as they load them.

A block takes consecutive rows and shares their work among its threads, so that no chunks are
needed; where hardly a row is longer than its sample, the chunks of the structure are used.  Rows
have fewer than 2**31 entries.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from ...formats import chunks
from ...formats.arrays import VALUE_DTYPES, Array
from ...formats.compressed import CSR
from ..engine import jit
from ..engine.call import Prepared, Result, launcher, zeroed
from ..engine.jit import ITEMSIZE, filling, row_bytes
from ..engine.memory import Memory, Scalar
from ..engine.structure import Structure, exact, structure_of, without_chunks
from ..matmul.cuda import Shape, load_shape, spmm
from .options import ALL, STRATEGIES

UNWEIGHTED, DIRECT, SCALED = range(3)  # WEIGHTS in spmm.cu
BY_ROWS, STAGING, BY_CHUNKS = range(3)  # VARIANT in spmm.cu
MEAN, RESCALE = 1, 2  # flags
THREADS = 128  # of a block, as in engine/rows.cuh
BLOCK_ROWS = 2 * THREADS  # most rows of a block, as in spmm.cuh
_PIECE = 8  # entries that a sub-warp loads at a time, as in engine/common.cuh
#: About how many pieces a sub-warp goes through: where a slice of X stays in the L2 and samples
#: have 16 entries or more (1.09x over 12 at 16 of them); where they have fewer; where a slice is
#: larger than the L2 keeps.
_PIECES, _PIECES_FEW, _PIECES_FAR = 36, 12, 6
_MANY = 16  # entries
_RESIDENT = 48 * 2**20  # bytes of a slice of X
#: The same for a launch that gathers the sample: few rows at a time, so that the L2 keeps the lines
#: of their indices; fewer for small samples and where it reads values too (1.02x and 1.09x over 6).
_PIECES_STAGING, _PIECES_STAGING_FEW = 6, 3
#: From a width of so many mean degrees on, chunks share out rows better: 1.02x at 12, 0.94x at 6
#: (H200).
_BY_CHUNKS = 8
#: Up to a width of so many mean degrees it pays that the first slice gathers the sample for the
#: others: 1.22x at 0.13, 0.9x to 1.1x at 1 to 6.
_STAGING = {"fastrand": 1, "random": 8}
_WAVES = 16  # of blocks: fewer are made a whole number
_SAMPLE_LANES = 8  # threads that sample a row together, as in rows.cu

_FILE = {"spmm_sampled": "spmm", "sddmm_sampled": "sddmm", "sample_rows": "rows"}
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {"spmm_sampled": "12PQqII6i", "sddmm_sampled": "8PQq2I4i", "sample_rows": "7PQ2q2i"}


def _load(kernel: str, types: tuple[str, ...], constants: tuple[int, ...]) -> jit.Kernel:
    """Load a kernel of this room."""
    file = f"sampling/{_FILE[kernel]}.cu"
    return jit.load(file, kernel, _PARAMETERS[kernel], types, constants)


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that this room may launch: file and C++ name."""
    for dtype, index_dtype in product(VALUE_DTYPES, ("int32", "int64")):
        products = [("spmm_sampled", constants) for constants in _variants(dtype)]
        dots = product((16 // ITEMSIZE[dtype], 1), STRATEGIES.values())
        for kernel, constants in [*products, *(("sddmm_sampled", item) for item in dots)]:
            name = jit.expression(kernel, (dtype, index_dtype), constants)
            yield f"sampling/{_FILE[kernel]}.cu", name
    for index_dtype, strategy in product(("int32", "int64"), STRATEGIES.values()):
        yield "sampling/rows.cu", jit.expression("sample_rows", (index_dtype,), (strategy,))


def _variants(dtype: str) -> Iterator[tuple[int, ...]]:
    """List lanes, values of a load, strategy, WEIGHTS and VARIANT of every product."""
    wide = 16 // ITEMSIZE[dtype]
    bucket, fastrand, drawn = STRATEGIES.values()
    variants = [*product(STRATEGIES.values(), (BY_ROWS,)), (fastrand, STAGING), (drawn, STAGING)]
    variants += [(bucket, BY_CHUNKS), (fastrand, BY_CHUNKS)]
    rare = [(4, wide), (8, 1), (32, 1)] + [(16, wide // 2)] * (wide > 2)
    shapes = [*product([(8, wide)], (UNWEIGHTED, DIRECT, SCALED)), *product(rare, (SCALED,))]
    for (shape, weights), (strategy, variant) in product(shapes, variants):
        yield *shape, strategy, weights, variant


# Structures


def _structure(
    A: CSR | Structure, x: Array, values: Array | None = None, row_scale: Array | None = None,
    col_scale: Array | None = None, seed: Any = None, width: int = ALL, *_: Any, **__: Any,
) -> Structure:  # fmt: skip
    """Return the structure, with chunks if rows may be taken whole or chunks exist already."""
    if isinstance(A, Structure):
        return exact(A)  # whether rows are cut decides the kernel
    built = A._built()
    if width * A.n_rows < A.nnz and "chunks" not in built.parts:
        return without_chunks(A)
    # Torch traces calls without the longest row, and those of eager mode are to add up alike.
    return built.parts.get("structure of sampled rows") or built.ask(
        "structure of sampled rows", lambda: replace(structure_of(A), longest=A.chunks.longest)
    )


# The product


class _Case(NamedTuple):
    """Everything but addresses that decides how a product is launched."""

    n_rows: int
    n_cols: int
    nnz: int
    blocks: int  #: of chunks; 0 without chunks
    n_cuts: int  #: blocks of chunks that begin inside a row
    dtype: str
    feat: int
    stride: int  #: values from one row of x to the next
    alignment: int  #: lowest bits of the addresses of x and the result
    width: int
    strategy: str
    weighted: bool
    scaled: bool  #: whether values are permuted or columns scaled


class _Cut(NamedTuple):
    """One launch: the kernel, its slices of the features, and its grid."""

    constants: tuple[int, ...]  #: lanes, values of a load, strategy, WEIGHTS and VARIANT
    first: int  #: first slice
    slices: int
    rows: int  #: of a block
    blocks: int  #: of a slice


@launcher(in_place=("x",), structure=_structure)
def spmm_sampled(
    S: Structure, m: Memory, x: Array, values: Array | None = None, row_scale: Array | None = None,
    col_scale: Array | None = None, seed: Any = None, width: int = ALL, strategy: str = "bucket",
    mean: bool = False, rescale: bool = False, *, perm: Array | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Prepare ``out[i] = r[i] * factor(i) * sum of a[e] * c[j] * x[j]`` over the sample of row i.

    The value of entry e is ``values[perm[e]]``.  A seed in an array is read by the kernel, so that
    a captured CUDA graph takes another one at each replay.
    """
    dtype, feat = m.dtype(x), x.shape[1]
    results = (Result((feat,), dtype),)
    if not (S.n_rows and feat):
        return Prepared((), results)
    if 0 < S.longest <= width:
        return partial(_take_all, mean=mean)
    if not S.nnz:
        return zeroed(S, results)
    weighted, stride = values is not None, m.row_stride(x)
    case = _Case(
        S.n_rows, S.n_cols, S.nnz, S.blocks, S.n_cuts, dtype, feat, stride,
        (m.pointer(x) | m.pointer(options.get("out"))) % 16, width, strategy, weighted,
        perm is not None or col_scale is not None,
    )  # fmt: skip
    room, places, cuts = _cuts(case)
    gathered = ("workspace", "workspace_end" * weighted) if places else ("", "")
    # The first one gathers the sample, if any does; the next reads it as a CSR's entries.
    entries = [("indices", "start", "values", "perm"), (gathered[0], "start", gathered[1], "")]
    flags, nbytes = mean * MEAN | rescale * RESCALE, row_bytes(stride, dtype)
    launches = []
    for number, cut in enumerate(cuts):
        kernel = _load("spmm_sampled", (dtype, S.index_dtype), cut.constants)
        sizes = S.n_rows, nbytes, cut.blocks, cut.first, width, room, cut.rows, feat, flags
        launch = kernel.ready(cut.blocks * cut.slices, after=sizes, threads=THREADS)
        to = ("", "") if number else gathered
        features = "row_scale", "col_scale", "x", "out"
        launches.append((launch, ("indptr", *entries[number], *features, *to, *_seeds(seed))))
    columns = places * ITEMSIZE[S.index_dtype]
    workspace = columns, columns + weighted * places * ITEMSIZE[dtype]
    return Prepared(tuple(launches), results, workspace)


def _take_all(
    A: CSR | Structure, x: Array, values: Array | None = None, row_scale: Array | None = None,
    col_scale: Array | None = None, *_: Any, mean: bool, perm: Array | None = None,
    out: Array | None = None, **__: Any,
) -> Any:  # fmt: skip
    """Run ``spmm``: the sample of each row has all its entries."""
    reduce = "mean" if mean else "sum"
    return spmm(A, x, values, perm, row_scale, col_scale, reduce, out=out)


def _seeds(seed: Any) -> tuple[str, str]:
    """Name a seed as kernels take it: its address on the device, or null and the seed."""
    if hasattr(seed, "dtype"):
        return "seed", ""
    assert seed is None or type(seed) is Scalar  # of another int kernels would see 0
    return "", "seed"


# How the work is cut


def _cuts(case: _Case) -> tuple[int, int, tuple[_Cut, ...]]:
    """Plan a product: places of a row and of all rows in the workspace, and the launches."""
    shape = load_shape(case.dtype, feat=case.feat, stride=case.stride, alignment=case.alignment)
    slices = -(-case.feat // shape.width)
    if slices > 1 and case.strategy != "bucket":
        filled = case.n_rows * case.width
        if filled <= _STAGING[case.strategy] * case.nnz:
            room = room_of_a_row(case.n_rows, case.nnz, case.width)
            # A multiple of 4, so that values of any dtype are aligned behind the columns.
            places = -(-(case.n_rows * room or case.nnz) // 4) * 4
            first = _cut(case, shape, STAGING, case.strategy, 0, 1)
            return room, places, (first, _cut(case, shape, BY_ROWS, "bucket", 1, slices - 1))
    rare = case.blocks and not case.n_cuts and case.nnz * _BY_CHUNKS <= case.n_rows * case.width
    variant = BY_CHUNKS if rare and case.strategy != "random" else BY_ROWS
    return 0, 0, (_cut(case, shape, variant, case.strategy, 0, slices),)


def room_of_a_row(n_rows: int, nnz: int, width: int) -> int:
    """Count the places for the sample of each row, or 0: as many as the row has entries."""
    return width if n_rows * width <= nnz else 0


def _cut(case: _Case, shape: Shape, variant: int, strategy: str, first: int, slices: int) -> _Cut:
    pieces = _pieces(case, shape, variant)
    rows = _rows_of_block(case.n_rows, case.nnz, case.width, shape, slices, pieces)
    blocks = case.blocks if variant == BY_CHUNKS else -(-case.n_rows // rows)
    constants = shape.lanes, shape.vector, STRATEGIES[strategy], _weights(case, shape), variant
    return _Cut(constants, first, slices, rows, blocks)


def _weights(case: _Case, shape: Shape) -> int:
    """Choose the template argument WEIGHTS; rare shapes have the general kernel only."""
    rare = shape.lanes != 8 or shape.vector * ITEMSIZE[case.dtype] < 16
    return SCALED if case.scaled or rare else DIRECT if case.weighted else UNWEIGHTED


def _pieces(case: _Case, shape: Shape, variant: int) -> int:
    """Choose how many pieces a sub-warp goes through: measured, see the constants."""
    if variant == STAGING:
        few = case.weighted or case.width <= _MANY
        return _PIECES_STAGING_FEW if few else _PIECES_STAGING
    if case.n_cols * shape.lanes * 16 > _RESIDENT:
        return _PIECES_FAR
    return _PIECES if min(case.nnz / case.n_rows, case.width) >= _MANY else _PIECES_FEW


def _rows_of_block(
    n_rows: int, nnz: int, width: int, shape: Shape, slices: int, pieces: int
) -> int:
    """Choose how many rows keep the sub-warps of a block busy, by the mean degree.

    A last wave of few blocks takes as long as a full one: where waves are few, they are whole.
    """
    wave = chunks.RESIDENT_BLOCKS * chunks.multiprocessors(jit.current_device()) // slices or 1
    sampled = min(nnz / n_rows, width)
    rows = min(THREADS // shape.lanes * pieces / max(sampled / _PIECE, 1), BLOCK_ROWS)
    waves = n_rows / (rows * wave)
    if waves < _WAVES:
        rows = n_rows / (max(round(waves), 1) * wave)
    return max(min(math.ceil(rows), BLOCK_ROWS), 4)


# The gradient of values, and the sample itself


@launcher(in_place=("x", "grad"), structure=without_chunks)
def spmm_sampled_da(
    S: Structure, m: Memory, x: Array, grad: Array, row_scale: Array, col_scale: Array, seed: Any,
    width: int, strategy: str, mean: bool, rescale: bool, *, out: Array | None = None,
) -> Prepared:  # fmt: skip
    """Prepare ``out[e] = r[i] * factor(i) * c[j] * <grad[i], x[j]>`` at sampled entries, else 0."""
    dtype, feat = m.dtype(x), x.shape[1]
    size, results = ITEMSIZE[dtype], (Result((), dtype, "nnz"),)
    if not S.nnz:
        return Prepared((), results)
    launches: list[tuple[Any, tuple[str, ...]]] = [(filling(S.nnz * size), ("out",))]
    if feat:
        strides = row_bytes(m.row_stride(grad), dtype), row_bytes(m.row_stride(x), dtype)
        lowest = m.pointer(grad) | m.pointer(x) | strides[0] | strides[1] | feat * size
        shape = Shape(_PIECE, 16 // size if lowest % 16 == 0 else 1)
        rows = _rows_of_block(S.n_rows, S.nnz, width, shape, 1, _PIECES_FEW)
        constants = shape.vector, STRATEGIES[strategy]
        kernel = _load("sddmm_sampled", (dtype, S.index_dtype), constants)
        sizes = S.n_rows, *strides, width, rows, feat, mean * MEAN | rescale * RESCALE
        arrays = "indptr", "indices", "row_scale", "col_scale", "grad", "x", "out", *_seeds(seed)
        launches.append((kernel.ready(-(-S.n_rows // rows), after=sizes, threads=THREADS), arrays))
    return Prepared(tuple(launches), results)


@launcher(in_place=(), structure=without_chunks)
def sample_rows(
    S: Structure, m: Memory, cols: Array, entries: Array, rows: Array, to: Array, seed: Any,
    width: int, strategy: str, room: int,
) -> Prepared:  # fmt: skip
    """Prepare to write column, number and row of each sampled entry.

    The sample of row i begins at ``to[i]``; without ``to`` at ``i * room``, or at ``indptr[i]`` if
    room is 0, and places that stay free get the column n_cols.
    """
    if not S.n_rows:
        return Prepared((), ())
    kernel = _load("sample_rows", (S.index_dtype,), (STRATEGIES[strategy],))
    blocks = min(-(-S.n_rows * _SAMPLE_LANES // THREADS), jit.MAX_BLOCKS)
    sizes = S.n_rows, S.n_cols, width, room
    arrays = "indptr", "indices", "to", "cols", "entries", "rows", *_seeds(seed)
    return Prepared(((kernel.ready(blocks, after=sizes, threads=THREADS), arrays),), ())
