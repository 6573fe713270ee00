"""Prepare attention whose scores are of two rows: GATv2's, and those of dot products.

Shapes, dtypes and arguments are as in ``score``.  Scores are additive where ``att`` is given, and
the keys are the values then.  With ``loops`` stored entries (i, i) are left out and each row has
one such entry behind its own, whose edge score is 0.
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

from ...._caches import lru_cache
from ....formats.arrays import VALUE_DTYPES, Array
from ...engine import jit
from ...engine.call import Launcher, Prepared, Result, launcher, with_options, zeroed
from ...engine.jit import ITEMSIZE, Launch, row_bytes
from ...engine.memory import Memory
from ...engine.structure import Structure, exact
from ..gat.cuda import (
    Argument,
    Launches,
    adding_up,
    dropping_of,
    forward_first,
    padded,
    result_like,
)
from ..gat.launches import TEAM_BYTES
from ..score import Dropping, PairwiseArguments, heads_and_feat, shape_of, sums_dtype
from . import column_blocks
from .column_blocks import ColumnBlock, blocks_of, structure_with_columns

THREADS = 128  # of a block, as in rows.cuh
_STATS_LANES = 8  # as in pairwise.cu
DOT, ADDITIVE = range(2)  # as in pairwise.cuh
FORWARD, SOURCES, TARGETS = range(3)
LANES = (4, 8, 16, 32)
#: Where nothing is tuned: float64, and indices of 64 bits.
FEW_LANES = (8, 32)
#: Lanes for rows that are not aligned to 16 bytes, a value a load; wider rows: wide.cu.
SHORT_LANES = 8
FILES = {"attend": "attention/pairwise/pairwise.cu", "attend_wide": "attention/pairwise/wide.cu"}
#: ``Attention`` of pairwise.cuh, by the dtype of the features.
LAYOUTS = dict.fromkeys(VALUE_DTYPES, "16PQfffI6i") | {"float64": "16PQdddI6i"}


class RowShape(NamedTuple):
    """The reading of a row of features: a slice has ``packs * lanes * vector`` values."""

    lanes: int
    vector: int
    mates: int = 1  #: heads side by side
    packs: int = 0  #: of a lane in wide.cu; 0 where a sub-warp has the row
    slices: int = 1


class Variant(NamedTuple):
    """What a launch computes, as template arguments say it."""

    direction: int  #: FORWARD, SOURCES or TARGETS
    kind: int  #: of scores: DOT or ADDITIVE
    keys_are_values: bool


class Case(NamedTuple):
    """What all launches of a case read, and its numbers."""

    m: Memory
    device: int
    dtype: str
    sums: str  #: dtype in which sums run
    heads: int
    feat: int
    dropped: Dropping
    args: PairwiseArguments


class Pass(NamedTuple):
    """What one pass over the entries reads besides, and what it writes: names of arrays."""

    direction: int  #: FORWARD, SOURCES (over the transpose) or TARGETS
    out: str  #: the result; the gradient of values, or of keys and values; that of queries
    of_keys: str = ""  #: of SOURCES: the gradient of keys, where values are not the keys
    alignment: int = 0  #: the lowest bits of the addresses of features that are no arguments
    statistics: str = ""  #: of FORWARD: (n_rows, heads, 2)
    datt: str = ""  #: of TARGETS: (thread blocks, heads, feat), to be summed
    dedges: str = ""  #: of TARGETS

    @property
    def arrays(self) -> int:
        """Return how many feature arrays the pass writes: 2 with keys' own gradient, else 1."""
        return 1 + (self.of_keys != "")


def _case_of(m: Memory, args: PairwiseArguments) -> Case:
    """Read the arguments of a call."""
    keys, dropped = args.keys, dropping_of(args.dropout, args.seed)
    of_keys = m.device(keys), m.dtype(keys), sums_dtype(keys), *heads_and_feat(keys)
    return Case(m, *of_keys, dropped, args)


def _prepare(
    S: Structure, m: Memory, *arguments: Any, train: bool, out: Array | None = None
) -> Prepared:
    """Prepare ``O[i, h] = sum of M[e, h] P[e, h] V[j, h]``, of ``PairwiseArguments``.

    To ``train``, statistics too, (n_rows, heads, 2): the largest score, and 1 over the sum of
    exponentials relative to that; zeros if there are no entries or no features.
    """
    case = _case_of(m, PairwiseArguments(*arguments))
    results = [result_like(case.args.keys, case.dtype)]
    results += [Result((case.heads, 2), case.sums)] * train
    if not (S.n_rows and case.heads and case.feat and (S.nnz or case.args.loops)):
        return zeroed(S, results)
    work = Pass(FORWARD, "out", alignment=m.pointer(out), statistics="out_1" * train)
    launches, nbytes, lasts = _pass(S, case, work)
    return Prepared(tuple(launches), tuple(results), (0, nbytes), lasts=lasts)


_OF_PAIRS: Any = {"in_place": (), "names": PairwiseArguments._fields}
pairwise, pairwise_with_statistics = (
    Launcher(
        with_options(name, _prepare, train=train), structure=structure_with_columns, **_OF_PAIRS
    )
    for name, train in (("pairwise", False), ("pairwise_with_statistics", True))
)


def _of_targets(A: Any, *args: Any, **_: Any) -> Structure:
    """Return the structure, its blocks counted if each has a part of the gradient of ``att``."""
    S = structure_with_columns(A)
    return exact(S) if args[9:] and args[9] is not None else S


@launcher(structure=_of_targets, structures=2, **_OF_PAIRS)
def pairwise_backward(
    S: Structure, m: Memory, T: Structure, grad: Array, result: Array | None,
    statistics: Array | None, of_edges: bool, *arguments: Any,
) -> Any:  # fmt: skip
    """Prepare gradients of queries, keys, values, ``att`` and edges, from that of the result.

    Forward's results are made anew if there are none.  Without ``values`` the keys have both
    gradients.  Those of what is not given are empty, also those of the edges unless ``of_edges``.
    """
    case = _case_of(m, PairwiseArguments(*arguments))
    queries, keys, values, att, edges, *_ = args = case.args
    some = prod(grad.shape) and (S.nnz or args.loops)
    additive, wanted = att is not None, edges if of_edges else None
    blocks = (S.blocks,) * bool(additive and some)
    results = (
        result_like(queries, case.dtype),
        result_like(keys, case.dtype, "n_cols"),
        result_like(values, case.dtype, "n_cols"),
        Result((*blocks, *shape_of(att)), case.sums, ""),
        result_like(wanted, case.sums, "nnz"),
    )
    if not some:
        return zeroed(S, results)
    if statistics is None:
        return partial(forward_first, pairwise_with_statistics, pairwise_backward, 2)
    at = padded(4 * S.n_rows * case.heads * ITEMSIZE[case.sums])
    launch = _stats_launch(case.device, case.dtype, S.n_rows * case.heads, case.feat)
    stats: Any = launch, ("result", "grad", "statistics", ("workspace", 0))
    both = ("out_1", "") if values is None else ("out_2", "out_1")
    sources = Pass(SOURCES, *both, m.pointer(grad))
    datt, dedges = "out_3" * additive, "out_4" * (wanted is not None)
    targets = Pass(TARGETS, "out", "", m.pointer(grad), datt=datt, dedges=dedges)
    of_sources, nbytes, lasts = _pass(T, case, sources, at)
    of_targets, more_bytes, last = _pass(S, case, targets, at)
    launches, workspace = (stats, *of_sources, *of_targets), (0, max(nbytes, more_bytes))
    finish = adding_up(3, 0) if additive else tuple
    return Prepared(launches, results, workspace, finish, lasts and last)


@lru_cache(maxsize=256)
def _stats_launch(device: int, dtype: str, items: int, feat: int) -> Launch:
    """Prepare ``statistics``, ``D = <dO, O>`` and 0 of each row and head, which backward reads."""
    kernel = jit.load(FILES["attend"], "attend_stats", "4Pqi", (dtype,))
    return kernel.ready(-(-items * _STATS_LANES // THREADS), after=(items, feat), threads=THREADS)


def _pass(S: Structure, case: Case, work: Pass, at: int = 0) -> tuple[Launches, int, bool]:
    """Prepare a pass over all columns or, where they are in blocks, over one after another.

    Returns the bytes of the workspace, too, of which the pass takes those behind ``at``, and
    whether other calls may launch the same: blocks are of one matrix alone.
    """
    m, args, dropped, direction = case.m, case.args, case.dropped, work.direction
    types, sizes = (case.dtype, S.index_dtype), (case.heads, case.feat)
    queries, keys, values = m.pointers(args.queries, args.keys, args.values)
    shape = row_shape(*types, *sizes, (queries | keys | values | work.alignment) % 16)
    kind = DOT if args.att is None else ADDITIVE
    variant = Variant(direction, kind, args.values is None)
    numbered = args.edges is not None or work.dedges != "" or dropped.below > 0
    name, constants = instantiation(types, shape, variant, extra=numbered or args.loops)
    before, behind = ("5P", "PqII") if shape.packs else ("7P", "P2qII")
    layout = f"{before}{LAYOUTS[case.dtype]}{behind}"
    kernel = jit.load(FILES[name], f"{name}_rows", layout, types, constants)
    teams = case.heads // shape.mates * shape.slices
    stride = row_bytes(case.heads * case.feat, case.dtype)
    count = 1 if shape.packs else _count_blocks(S, case.dtype, *sizes, variant)
    several = blocks_of(S, count, m.stream(args.keys)) if count > 1 else ()
    blocks = several or (ColumnBlock(S),)
    # Two to pass on, two parts of results, and the borders'.
    between = _between(S, case, work.arrays) if several else (0, 0, 0, 0)
    of_cuts = _bytes_of_cut_rows(blocks, case, work, shape)
    nbytes = sum(between) + of_cuts
    places: list[Argument] = [""] * 5
    if nbytes:
        places = [("workspace", place) for place in accumulate(between, initial=at)]
    *passed, part, other_part, carry = places
    if ITEMSIZE[case.dtype] != 2:  # results take sums as they are
        part, other_part = work.out, work.of_keys
    side = "t_" if direction == SOURCES else ""
    summed = args.values is None and direction == SOURCES and shape.packs > 0
    # Where there are loops alone, nothing is read that has a value an entry.
    edges, dedges = ("edges", work.dedges) if S.nnz else ("", "")
    indptr, indices = f"{side}indptr", f"{side}indices" if S.nnz else f"{side}indptr"
    perm = "perm" if side and numbered and S.nnz else ""
    read = "queries", "keys", "keys" if args.values is None else "values"
    grad, stats = ("", "") if direction == FORWARD else ("grad", ("workspace", 0))
    launches: Launches = []
    for step, (B, moves, _) in enumerate(blocks):
        last = step == len(blocks) - 1
        of_block = passed[step % 2] if direction == FORWARD and not last else work.statistics
        results = work.out, work.of_keys, part, other_part, of_block, work.datt, dedges
        attention = (
            *(*read, grad, "att", stats, edges, *results, dropped.seed_at),
            *(passed[step % 2 - 1] if step else "", dropped.seed, args.slope, args.scale),
            *(dropped.scale, dropped.below, *sizes),
            *(int(args.loops), int(summed), int(step > 0), int(not last)),
        )
        own: tuple[Argument, ...] = indptr, f"{side}start", f"{side}slot", f"{side}cut"
        if B is not S:
            own = B.indptr, B.start, B.slot, B.cut
        begins, start, slot, cut = own
        counts = *((S.nnz,) if shape.packs else (B.nnz, S.nnz)), stride, B.blocks
        launch = kernel.ready(B.blocks * teams, after=counts, threads=THREADS)
        entries = begins, indices, start, slot, perm, *(() if shape.packs else (indptr, moves))
        launches.append((launch, (*entries, *attention, carry)))
        if B.n_cuts:
            add_up = _cut_rows(B, case, work, shape)
            launches.append((add_up, (start, cut, *attention, carry)))
    return launches, at + nbytes, count == 1


def _count_blocks(S: Structure, dtype: str, heads: int, feat: int, variant: Variant) -> int:
    """Choose in how many blocks to go through the columns, as if all addresses were aligned."""
    shape = row_shape(dtype, S.index_dtype, heads, feat, 0)
    of_att = variant.kind == ADDITIVE and variant.direction == TARGETS
    if dtype == "float64" or shape.packs or of_att:  # of which each block would have a part
        return 1
    arrays = 2 if variant.direction == SOURCES or not variant.keys_are_values else 1
    row = shape.mates * shape.lanes * shape.vector * ITEMSIZE[dtype]
    return column_blocks.count(S, S.n_cols * arrays * row)


def _between(S: Structure, case: Case, arrays: int) -> tuple[int, int, int, int]:
    """Count the bytes that a block of columns leaves: statistics twice, sums of 2-byte features."""
    size, narrow = ITEMSIZE[case.sums], ITEMSIZE[case.dtype] == 2
    scores, sums = (padded(S.n_rows * case.heads * n * size) for n in (2, case.feat))
    return scores, scores, sums * narrow, sums * (narrow and arrays == 2)


def _bytes_of_cut_rows(
    blocks: tuple[ColumnBlock, ...], case: Case, work: Pass, shape: RowShape
) -> int:
    """Count the bytes for sums of rows that thread blocks share; 0 unless a row is very long."""
    n_cuts = max(block.structure.n_cuts for block in blocks)
    of_lane = (2 * shape.packs or work.arrays) * shape.vector + 2
    values = case.heads * shape.slices * shape.lanes * of_lane
    return 2 * n_cuts * values * ITEMSIZE[case.sums]


def _cut_rows(S: Structure, case: Case, work: Pass, shape: RowShape) -> Launch:
    """Prepare the sums of rows that thread blocks share, from what each has left."""
    layout, types = f"2P{LAYOUTS[case.dtype]}P6i", (case.dtype, S.index_dtype)
    kernel = jit.load(FILES["attend"], "attend_cut_rows", layout, types)
    direction = work.direction
    sums = 2 if direction == SOURCES and shape.packs else work.arrays
    cut = (shape.lanes, shape.vector, max(shape.packs, 1), sums, int(direction == FORWARD))
    blocks = -(-S.n_cuts * case.heads * case.feat // THREADS)
    return kernel.ready(blocks, after=(S.n_cuts, *cut), threads=THREADS)


# How rows are read


@lru_cache(maxsize=4096)
def row_shape(dtype: str, index_dtype: str, heads: int, feat: int, alignment: int) -> RowShape:
    """Choose the widest loads that ``alignment``, the lowest bits of all addresses, allows."""
    size = ITEMSIZE[dtype]
    alignment |= feat * size
    tuned = size < 8 and index_dtype == "int32"
    if alignment % 16 == 0:
        vector = 16 // size
        for lanes in LANES if tuned else FEW_LANES:
            mates = TEAM_BYTES // (16 * lanes) or 1
            if lanes * vector >= feat and heads % mates == 0:
                return RowShape(lanes, vector, mates)
        return _wide(dtype, feat, vector)
    if tuned and feat <= SHORT_LANES:
        return RowShape(SHORT_LANES, 1)
    if tuned and alignment % 8 == 0 and feat * size <= 16 * 8:
        return RowShape(16, 8 // size)
    return RowShape(jit.WARP, 1) if tuned and feat <= jit.WARP else _wide(dtype, feat, 1)


def _wide(dtype: str, feat: int, vector: int) -> RowShape:
    """Return the shape of rows that go through a warp slice by slice."""
    # As many sums as its registers have room for.
    per_lane = (8 if dtype == "float64" else 16) // vector
    slices = -(-feat // (jit.WARP * per_lane * vector))
    return RowShape(jit.WARP, vector, packs=per_lane, slices=slices)


def instantiation(
    types: tuple[str, str], shape: RowShape, variant: Variant, *, extra: bool
) -> tuple[str, tuple[int, ...]]:
    """Return kernel and template arguments; a shape that is not tuned has all ``extra`` always."""
    direction, kind, keys_are_values = variant
    if shape.packs:
        return "attend_wide", (shape.vector, shape.packs, direction)
    dtype, index_dtype = types
    tuned = index_dtype == "int32" and shape.vector * ITEMSIZE[dtype] == 16 and dtype != "float64"
    flags = direction, kind, int(keys_are_values), int(extra or not tuned)
    return "attend", (shape.lanes, shape.vector, shape.mates, *flags)


def instantiations() -> Iterator[tuple[str, str]]:
    """Yield file and C++ name of every kernel of attention between rows that may be launched."""
    scores = (DOT, False), (DOT, True), (ADDITIVE, True)
    variants = [Variant(d, *score) for d, score in product((FORWARD, SOURCES, TARGETS), scores)]
    widths = [2**power for power in range(11)]
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        sizes = product((1, 2, 4, 8), widths, (0, ITEMSIZE[types[0]], 8))
        every = product({row_shape(*types, *size) for size in sizes}, variants, (False, True))
        for kernel, constants in sorted({instantiation(types, s, v, extra=e) for s, v, e in every}):
            yield FILES[kernel], jit.expression(f"{kernel}_rows", types, constants)
        yield FILES["attend"], jit.expression("attend_cut_rows", types, ())
    for dtype in VALUE_DTYPES:
        yield FILES["attend"], jit.expression("attend_stats", (dtype,), ())
