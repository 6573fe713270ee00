"""Launch attention whose scores are of two rows: GATv2's, and those of dot products.

Queries are the targets' and keys the sources', (n, heads, feat) or (n, feat).  Scores are additive
where ``att`` is given; without ``values`` the keys are the values, as they always are then.  What
belongs to scores (``att``, ``edges``, statistics and their gradients) is float32 for 2-byte
features.  ``seed`` is an integer, or an int64 on the device that a captured graph reads at each
replay.  With ``loops`` stored entries (i, i) are left out and each row has one such entry behind
its own, whose edge score is 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

from ...._caches import lru_cache
from ....formats.arrays import VALUE_DTYPES, Array
from ....formats.compressed import CSR
from ...engine import jit
from ...engine.jit import ITEMSIZE, Launch, row_bytes
from ...engine.memory import Memory, memory_of
from ...engine.structure import Structure, exact, structure_of, transposed
from ..gat.cuda import dropping_of, zero
from ..gat.launches import TEAM_BYTES
from ..score import Dropping, PairwiseArguments, heads_and_feat, sums_dtype
from . import column_blocks
from .column_blocks import ColumnBlock, blocks_of

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


@dataclass(frozen=True, slots=True)
class RowShape:
    """The reading of a row of features: a slice has ``packs * lanes * vector`` values."""

    lanes: int
    vector: int
    mates: int = 1  #: heads side by side
    packs: int = 0  #: of a lane in wide.cu; 0 where a sub-warp has the row
    slices: int = 1

    @property
    def values(self) -> int:
        """Count the values of a lane."""
        return self.vector * max(self.packs, 1)


class Variant(NamedTuple):
    """What a launch computes, as template arguments say it."""

    direction: int  #: FORWARD, SOURCES or TARGETS
    kind: int  #: of scores: DOT or ADDITIVE
    keys_are_values: bool


class Call(NamedTuple):
    """What all launches of a call read: arrays as kernels take them, and numbers."""

    m: Memory
    dtype: str
    sums: str  #: dtype in which sums run
    heads: int
    feat: int
    queries: Any
    keys: Any
    values: Any  #: None where the keys are the values
    att: Any  #: None where scores are dot products
    edges: Any
    dropped: Dropping
    slope: float
    scale: float
    loops: bool


class Work(NamedTuple):
    """What one pass over the entries reads besides, and what it writes."""

    direction: int  #: FORWARD, SOURCES (over the transpose) or TARGETS
    out: Any  #: the result; the gradient of values, or of keys and values; that of queries
    other: Any = None  #: of SOURCES: the gradient of keys, where values are not the keys
    grad: Any = None  #: of the result
    stats: Any = None  #: (n_rows, heads, 4), as ``attend_stats`` writes it
    perm: Any = None  #: of SOURCES: the number in CSR order of each entry of the transpose
    statistics: Any = None  #: of FORWARD: (n_rows, heads, 2)
    datt: Any = None  #: of TARGETS: (thread blocks, heads, feat), to be summed
    dedges: Any = None  #: of TARGETS

    @property
    def arrays(self) -> int:
        """Count the arrays of features that it writes."""
        return 1 + (self.other is not None)


def _call_of(arguments: tuple[Any, ...]) -> Call:
    """Read ``PairwiseArguments`` as kernels take them."""
    args = PairwiseArguments(*arguments)
    keys, m = args.keys, memory_of(args.keys)
    features = m.contiguous(args.queries), m.contiguous(keys), m.contiguous(args.values)
    scores = m.factors(args.att), m.factors(args.edges)
    sizes = m.dtype(keys), sums_dtype(keys), *heads_and_feat(keys)
    dropped = dropping_of(m, args.dropout, args.seed)
    return Call(m, *sizes, *features, *scores, dropped, args.slope, args.scale, args.loops)


def pairwise(A: CSR | Structure, *arguments: Any, out: Array | None = None) -> Array:
    """Launch ``O[i, h] = sum of M[e, h] P[e, h] V[j, h]``, of ``PairwiseArguments``."""
    return _forward(A, _call_of(arguments), out, train=False)[0]


def pairwise_with_statistics(A: CSR | Structure, *arguments: Any) -> tuple[Array, Array]:
    """Launch ``pairwise``, and what backward reads of each row and head.

    (n_rows, heads, 2): the largest score, and 1 over the sum of exponentials relative to that;
    zeros if there are no entries or no features.
    """
    return _forward(A, _call_of(arguments))


def _forward(
    A: CSR | Structure, call: Call, out: Array | None = None, *, train: bool = True
) -> tuple[Array, Array]:
    """Launch the product, and with ``train`` the statistics."""
    m, keys, statistics = call.m, call.keys, None
    if train:
        statistics = m.empty((A.n_rows, call.heads, 2), call.sums, keys)
    if out is None:
        out = m.empty((A.n_rows, *keys.shape[1:]), call.dtype, keys)
    if A.n_rows and call.heads:
        with m.on_device(keys):
            if call.feat and (A.nnz or call.loops):
                _run(A, call, Work(FORWARD, out, statistics=statistics))
            else:
                zero(m, out)
                zero(m, statistics)
    return out, statistics


def pairwise_backward(
    A: CSR | Structure, T: Any, perm: Array | None, grad: Array, out: Array | None,
    statistics: Array | None, of_edges: bool, *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launch gradients of queries, keys, values, ``att`` and edges, from that of the result.

    What is None of the transpose ``T``, the numbers ``perm`` of its entries in CSR order, and
    forward's results is made anew.  Without ``values`` the keys have both gradients.  Those of
    what is not given are empty, also those of the edges unless ``of_edges``.
    """
    call = _call_of(arguments)
    m, keys, edges = call.m, call.keys, call.edges if of_edges else None
    some = prod(grad.shape) and (A.nnz or call.loops)
    make, values, att = m.empty if some else m.zeros, call.values, call.att
    features, scores = (call.queries, keys, values), (att, edges)
    dtypes = *(call.dtype,) * 3, *(call.sums,) * 2
    pairs = zip((*features, *scores), dtypes, strict=True)
    made = [make((0,) if a is None else a.shape, dtype, keys) for a, dtype in pairs]
    dqueries, dkeys, dvalues, datt, dedges = made
    if some:
        if statistics is None:
            out, statistics = _forward(A, call)
        if T is None and isinstance(A, CSR):
            T, perm = transposed(A)
        with m.on_device(keys):
            grad = m.contiguous(grad)
            read = {"grad": grad, "stats": _stats(call, out, grad, statistics)}
            both = {"out": dkeys} if values is None else {"out": dvalues, "other": dkeys}
            _run(T, call, Work(SOURCES, **both, **read, perm=perm))
            of_blocks = None
            if att is not None:
                A = exact(A)  # each block has a part of the gradient
                of_blocks = m.empty((A.blocks, *datt.shape), call.sums, keys)
            own = {"datt": of_blocks, "dedges": None if edges is None else dedges}
            _run(A, call, Work(TARGETS, dqueries, **own, **read))
            datt = datt if of_blocks is None else of_blocks.sum(0)
    return dqueries, dkeys, dvalues, datt, dedges


def _stats(call: Call, out: Array, grad: Array, statistics: Array) -> Any:
    """Launch what backward reads of each row and head: ``statistics``, ``D = <dO, O>``, and 0."""
    m, (rows, heads, _) = call.m, statistics.shape
    out, statistics = m.contiguous(out), m.contiguous(statistics)
    stats = m.empty((rows, heads, 4), call.sums, call.keys)
    launch = _stats_launch(m.device(call.keys), call.dtype, rows * heads, call.feat)
    launch(m.stream(call.keys), *m.pointers(out, grad, statistics, stats))
    return stats


@lru_cache(maxsize=256)
def _stats_launch(device: int, dtype: str, items: int, feat: int) -> Launch:
    """Prepare the launch of ``statistics``; ``device`` is the number of the current one."""
    kernel = jit.load(FILES["attend"], "attend_stats", "4Pqi", (dtype,))
    return kernel.ready(-(-items * _STATS_LANES // THREADS), after=(items, feat), threads=THREADS)


def _run(A: CSR | Structure, call: Call, work: Work) -> None:
    """Launch a pass over all columns or, where they are in blocks, over one after another."""
    S, m, dropped, direction = structure_of(A), call.m, call.dropped, work.direction
    keys_are_values, kind = call.values is None, DOT if call.att is None else ADDITIVE
    features = call.queries, call.keys, call.values, work.grad, work.out, work.other
    of_rows = call.att, work.stats, work.statistics, work.datt
    at = m.pointers(*features, *of_rows)
    queries, keys, values, grad, out, other, att, stats, statistics, datt = at
    values = keys if keys_are_values else values
    alignment = (queries | keys | values | grad | out | other) % 16
    numbered = call.edges is not None or work.dedges is not None or dropped.below > 0
    # Where there are loops alone, nothing is read that has a value an entry.
    of_entries = (work.perm, call.edges, work.dedges) if S.nnz else (None, None, None)
    perm, edges, dedges = m.pointers(*of_entries)
    sizes = call.dtype, call.heads, call.feat, alignment
    variant, stream = Variant(direction, kind, keys_are_values), m.stream(call.keys)
    shape, count, ready, launch_all = S.once(_pass, *sizes, variant, numbered or call.loops)
    blocks = blocks_of(A, count, stream) if count > 1 else ()
    workspace, places = None, [0] * 5  # two to pass on, two parts of results, and the borders'
    if blocks or S.n_cuts:
        between = _between(S, call, work.arrays) if blocks else (0, 0, 0, 0)
        nbytes = sum(between) + _bytes_of_cut_rows(blocks or (ColumnBlock(S),), call, work, shape)
        workspace = m.empty((nbytes,), "uint8", call.keys) if nbytes else None
        places = [*accumulate(between, initial=m.pointer(workspace))]
    blocks = blocks or (ColumnBlock(S),)
    *passed, part, other_part, carry = places
    if ITEMSIZE[call.dtype] != 2:  # results take sums as they are
        part, other_part = out, other
    summed = keys_are_values and direction == SOURCES and shape.packs > 0
    for step, block in enumerate(blocks):
        last = step == len(blocks) - 1
        of_block = passed[step % 2] if direction == FORWARD and not last else statistics
        results = out, other, part, other_part, of_block, datt, dedges
        before = passed[step % 2 - 1] if step else 0
        numbers = dropped.seed, call.slope, call.scale, dropped.scale, dropped.below
        attention = (
            *(queries, keys, values, grad, att, stats, edges, *results, dropped.seed_at, before),
            *(*numbers, call.heads, call.feat),
            *(int(call.loops), int(summed), int(step > 0), int(not last)),
        )
        launch = launch_all if block.structure is S else ready(S, block)
        moves = () if shape.packs else (S.indptr, block.moves)
        launch(stream, perm if numbered else 0, *moves, *attention, carry)
        if block.structure.n_cuts:
            _cut_rows(block.structure, call, work, shape, attention, carry)


def _pass(
    S: Structure, dtype: str, heads: int, feat: int, alignment: int, variant: Variant, extra: bool
) -> tuple[RowShape, int, Callable[[Structure, ColumnBlock], Launch], Launch]:
    """Choose a pass: its shape, how many blocks of columns, what readies one, and all at once."""
    types = dtype, S.index_dtype
    shape = row_shape(*types, heads, feat, alignment)
    name, constants = instantiation(types, shape, variant, extra=extra)
    before, behind = ("5P", "PqII") if shape.packs else ("7P", "P2qII")
    layout, teams = f"{before}{LAYOUTS[dtype]}{behind}", heads // shape.mates * shape.slices
    kernel = jit.load(FILES[name], f"{name}_rows", layout, types, constants)
    stride = row_bytes(heads * feat, dtype)

    def ready(S: Structure, block: ColumnBlock) -> Launch:
        B, indices = block.structure, S.indices if S.nnz else S.indptr  # it has to exist
        arrays = B.indptr, indices, B.start, B.slot
        counts = *((S.nnz,) if shape.packs else (B.nnz, S.nnz)), stride, B.blocks
        return kernel.ready(B.blocks * teams, arrays, counts, threads=THREADS)

    count = 1 if shape.packs else _count_blocks(S, dtype, heads, feat, variant)
    return shape, count, ready, ready(S, ColumnBlock(S))


def _count_blocks(S: Structure, dtype: str, heads: int, feat: int, variant: Variant) -> int:
    """Choose in how many blocks to go through the columns, as if all addresses were aligned."""
    shape = row_shape(dtype, S.index_dtype, heads, feat, 0)
    of_att = variant.kind == ADDITIVE and variant.direction == TARGETS
    if dtype == "float64" or shape.packs or of_att:  # of which each block would have a part
        return 1
    arrays = 2 if variant.direction == SOURCES or not variant.keys_are_values else 1
    row = shape.mates * shape.lanes * shape.vector * ITEMSIZE[dtype]
    return column_blocks.count(S, S.n_cols * arrays * row)


def _between(S: Structure, call: Call, arrays: int) -> tuple[int, int, int, int]:
    """Count the bytes that a block of columns leaves: statistics twice, and sums of 2 bytes."""
    size, narrow = ITEMSIZE[call.sums], ITEMSIZE[call.dtype] == 2
    scores, sums = (-(-S.n_rows * call.heads * n * size // 256) * 256 for n in (2, call.feat))
    return scores, scores, sums * narrow, sums * (narrow and arrays == 2)


def _bytes_of_cut_rows(
    blocks: tuple[ColumnBlock, ...], call: Call, work: Work, shape: RowShape
) -> int:
    """Count the bytes for sums of rows that thread blocks share; 0 unless a row is very long."""
    n_cuts = max([block.structure.n_cuts for block in blocks])
    of_lane = (2 if shape.packs else work.arrays) * shape.values + 2
    values = call.heads * shape.slices * shape.lanes * of_lane
    return 2 * n_cuts * values * ITEMSIZE[call.sums]


def _cut_rows(
    S: Structure, call: Call, work: Work, shape: RowShape, attention: tuple[Any, ...], carry: int
) -> None:
    """Launch the sums of rows that thread blocks share, from what each has left in ``carry``."""
    layout, types = f"2P{LAYOUTS[call.dtype]}P6i", (call.dtype, S.index_dtype)
    kernel = jit.load(FILES["attend"], "attend_cut_rows", layout, types)
    direction = work.direction
    sums = 2 if direction == SOURCES and shape.packs else work.arrays
    cut = (shape.lanes, shape.vector, max(shape.packs, 1), sums, int(direction == FORWARD))
    args = (S.start, S.cut, *attention, carry, S.n_cuts, *cut)
    blocks = -(-S.n_cuts * call.heads * call.feat // THREADS)
    kernel(blocks, args, threads=THREADS, stream=call.m.stream(call.keys))


# How rows are read


def packs(dtype: str, vector: int) -> int:
    """Count the packs of a lane in wide.cu: as many sums as its registers have room for."""
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
    """Count the heads side by side, where loads are of 16 bytes."""
    return TEAM_BYTES // (16 * lanes) or 1


def _wide(dtype: str, feat: int, vector: int) -> RowShape:
    """Return the shape of rows that go through a warp slice by slice."""
    per_lane = packs(dtype, vector)
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
    """List every kernel of attention between rows that may be launched: file and C++ name."""
    for types in product(VALUE_DTYPES, ("int32", "int64")):
        for kernel, constants in _instantiations(types):
            yield FILES[kernel], jit.expression(f"{kernel}_rows", types, constants)
        yield FILES["attend"], jit.expression("attend_cut_rows", types, ())
    for dtype in VALUE_DTYPES:
        yield FILES["attend"], jit.expression("attend_stats", (dtype,), ())


def _instantiations(types: tuple[str, str]) -> list[tuple[str, tuple[int, ...]]]:
    """List kernels and template arguments for these types."""
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
