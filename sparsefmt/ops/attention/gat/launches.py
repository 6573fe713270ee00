"""Choose and prepare the launches of graph attention, whatever the addresses."""

from collections.abc import Iterator
from itertools import product

from ...._caches import lru_cache
from ....formats.arrays import VALUE_DTYPES
from ...engine import jit
from ...engine.jit import ITEMSIZE, Launch, row_bytes
from ...matmul.cuda import NARROW, Shape, load_shape, rounded_width

THREADS = 128  # of a block, as in rows.cuh
#: Bytes that the heads of a team gather side by side: a line of the L2. Two heads of 64 bytes took
#: 0.63x the time of each alone (H200, reddit, float16), 512 bytes 1.15x that of 128.
TEAM_BYTES = 128
NOTHING, ANYTHING, ONLY_BIAS = range(3)  # as in gat.cu
#: Lanes that have a row and head of the scores, and a row of their gradient; of ``gat_stats``.
SCORE_LANES, SCORE_GRADIENT_LANES, _STATS_LANES = (2, 8), (8, 32), 8
#: Rows that a block of the scores' gradient has at least; blocks at most, and where rows are wide.
_SHARE_ROWS, _MOST_SHARES, _FEWEST_SHARES = 64, 1024, 64
#: Letter of the type in which sums run, by its name.
FLOATS = {"float32": "f", "float64": "d"}
GAT, ENTRIES, SCORES = (f"attention/gat/{name}.cu" for name in ("gat", "entries", "scores"))


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that graph attention may launch: file and C++ name."""
    for dtype, index in product(VALUE_DTYPES, ("int32", "int64")):
        for name in _row_kernels(dtype, index):
            yield GAT, name
        entries = ["gat_edge_gradient"] + ["gat_attention"] * (ITEMSIZE[dtype] > 2)
        for name in entries:
            yield ENTRIES, jit.expression(name, (dtype, index), ())
    for dtype in VALUE_DTYPES:
        yield GAT, jit.expression("gat_stats", (dtype,), ())
        kernels = ("gat_scores", SCORE_LANES), ("gat_scores_backward", SCORE_GRADIENT_LANES)
        for name, lanes in kernels:
            for constants in product(lanes, (16 // ITEMSIZE[dtype], 1)):
                yield SCORES, jit.expression(name, (dtype,), constants)


def _row_kernels(dtype: str, index_dtype: str) -> list[str]:
    """List the C++ names of the kernels over rows."""
    names: set[str] = set()
    for gathered in (dtype, NARROW) if dtype == "float32" else (dtype,):
        sizes = product((1, 2, 4), (0, 1, 2, 4, 8, 16, 32, 64), (0, ITEMSIZE[gathered], 8))
        shapes = {row_shape(gathered, *size)[:2] for size in sizes}
        types = dtype, index_dtype, gathered
        for (shape, mates), backward in product(shapes, (0, 1)):
            base = shape.lanes, shape.vector
            names.add(jit.expression("gat_cut_rows", types[:2], (*base, backward)))
            general = _general(gathered, index_dtype, shape.vector)
            extras = (NOTHING, ANYTHING) if backward else (NOTHING, ANYTHING, ONLY_BIAS)
            for flags in [(1, ANYTHING)] if general else product((0, 1), extras):
                constants = (*base, mates, backward, *flags)
                names.add(jit.expression("gat_balanced", types, constants))
    return sorted(names)


def _general(gathered: str, index_dtype: str, vector: int) -> bool:
    """Return True if one variant serves all: rare indices, loads of less than 16 bytes."""
    return index_dtype == "int64" or vector * ITEMSIZE[gathered] < 16


@lru_cache(maxsize=4096)
def row_shape(gathered: str, heads: int, feat: int, alignment: int) -> tuple[Shape, int, int]:
    """Choose how rows are read, the heads of a team, and the slices of a head, at least one.

    ``gathered`` is the dtype in which they are read.  ``alignment`` has the lowest 4 bits of all
    addresses, those of values with twice the bytes halved.
    """
    alignment = alignment if feat else 1
    shape = load_shape(gathered, feat=feat, stride=heads * feat, alignment=alignment)
    mates = 1
    while (
        heads % (2 * mates) == 0
        and 2 * mates * shape.lanes * shape.vector * ITEMSIZE[gathered] <= TEAM_BYTES
        and 2 * mates * shape.lanes <= jit.WARP
    ):
        mates *= 2
    return shape, mates, max(-(-feat // (shape.lanes * shape.vector)), 1)


@lru_cache(maxsize=4096)
def row_launches(
    device: int, index_dtype: str, blocks: int, n_cuts: int, dtype: str, heads: int, feat: int,
    alignment: int, backward: bool, narrow: bool, flags: tuple[int, int],
) -> tuple[int, Launch, Launch | None]:  # fmt: skip
    """Prepare a pass: bytes of the workspace, its launch, and that for rows that blocks share.

    A call passes both launches the addresses of the structure's arrays, and the first one the
    number of entries, so that graphs of about one size share them.  ``device`` is the current one.
    """
    gathered = NARROW if narrow else dtype
    types = dtype, index_dtype, gathered
    shape, mates, slices = row_shape(gathered, heads, feat, alignment)
    if _general(gathered, index_dtype, shape.vector):
        flags = 1, ANYTHING
    stride = rounded_width(heads * feat) if narrow else heads * feat
    layout = f"{_scores_layout(dtype)}{'4P3i' if backward else '4P2i'}P"
    base = shape.lanes, shape.vector
    constants = (*base, mates, int(backward), *flags)
    launch = jit.load(GAT, "gat_balanced", f"6P{layout}qIIi", types, constants).ready(
        blocks * (heads // mates) * slices,
        after=(row_bytes(stride, gathered), blocks, slices),
        threads=THREADS,
    )
    if not n_cuts:
        return 0, launch, None
    of_cuts, lanes = (*base, int(backward)), heads * slices * shape.lanes
    add_up = jit.load(GAT, "gat_cut_rows", f"2P{layout}ii", types[:2], of_cuts).ready(
        -(-n_cuts * lanes // THREADS), after=(n_cuts, slices), threads=THREADS
    )
    # Sums of rows that blocks share, whatever the alignment.
    size = ITEMSIZE[gathered]
    shapes = [row_shape(gathered, heads, feat, alignment) for alignment in (0, 8, size)]
    values = max(slices * shape.lanes * (2 * shape.vector + 3) for shape, _, slices in shapes)
    return 2 * n_cuts * heads * values * max(size, 4), launch, add_up


def _scores_layout(dtype: str) -> str:
    """Return the layout of the fields of ``Scores`` in gat.cu."""
    return f"5PQq{FLOATS['float64' if dtype == 'float64' else 'float32'] * 2}I"


@lru_cache(maxsize=256)
def stats_launch(device: int, dtype: str, items: int, heads: int, feat: int) -> Launch:
    """Prepare the launch over rows and heads of targets."""
    layout = f"5P{_scores_layout(dtype)}4Pq2i"
    kernel = jit.load(GAT, "gat_stats", layout, (dtype,))
    blocks = -(-items * _STATS_LANES // THREADS)
    return kernel.ready(blocks, after=(items, heads, feat), threads=THREADS)


@lru_cache(maxsize=256)
def scores_launch(device: int, dtype: str, n: int, heads: int, feat: int, vector: int) -> Launch:
    """Prepare the launch for scores; ``device`` is the number of the current one."""
    lanes, items = SCORE_LANES[feat > SCORE_LANES[0] * vector], n * heads
    kernel = jit.load(SCORES, "gat_scores", "5Pq2i", (dtype,), (lanes, vector))
    return kernel.ready(-(-items * lanes // THREADS), after=(items, heads, feat), threads=THREADS)


@lru_cache(maxsize=256)
def through_launch(
    device: int, dtype: str, n: int, heads: int, feat: int, slices: int, vector: int
) -> tuple[int, Launch]:
    """Prepare the launch for gradients through scores, and how many partial sums it makes."""
    wide = max(_MOST_SHARES * THREADS // max(heads * feat, THREADS), _FEWEST_SHARES)
    blocks = max(min(-(-n // _SHARE_ROWS), wide), 1)
    lanes = SCORE_GRADIENT_LANES[heads * feat > SCORE_GRADIENT_LANES[0] * vector]
    kernel = jit.load(SCORES, "gat_scores_backward", "9Pq4i", (dtype,), (lanes, vector))
    grid = blocks * -(-heads * feat // (lanes * vector))
    return blocks, kernel.ready(grid, after=(n, blocks, heads, feat, slices), threads=THREADS)
