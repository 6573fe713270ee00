"""Launch what makes a CSR of edges: no launch here needs the host to know what the edges are.

Few edges take one launch, ``small``.  Of more, whoever calls sorts between launches, and adds up
words: see ``build.cu``.  The arrays lie in one block of memory, as a ``Layout`` says, for the most
blocks of chunks and the most long rows that there can be.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, NamedTuple

from ..._caches import lru_cache
from ...formats.chunks import (
    CHUNKS_PER_BLOCK,
    LONG_ROW,
    RESIDENT_BLOCKS,
    most_blocks,
    multiprocessors,
)
from . import jit
from .jit import ITEMSIZE
from .structure import Sizes, Structure

_FILE, _SMALL_FILE = "engine/build.cu", "engine/build_small.cu"
_BORDER_THREADS = 1024  # as in build.cu
_COUNTS = 16  # bytes
_ALIGNMENT = 16  # of a layout, so that two lie side by side
#: Parameters of each kernel as the module ``struct`` packs them: pointers, 8 and 4-byte integers.
_PARAMETERS = {
    "edge_keys": "6P3q",
    "edge_rows": "10P3q",
    "chunk_starts": "6P2qi",
    "chunk_borders": "7Pq3i",
    "reached": "P",
    "build_small": f"8P3q2i{2 * '11q4i'}2i",
}
#: Most edges and vertices of a graph that is built in one launch, and the fewest edges of a block.
SMALL_EDGES, SMALL_VERTICES, _SHARE = 2**19, 2**20, 1024
_KEYS = (("int32", "int32"), ("int64", "int32"), ("int64", "int64"))
#: Blocks of a small build at most, and more steps than any build takes, which waits at most 17
#: times: those of all builds are numbered.
SMALL_BLOCKS, STEPS = 1024, 64
_first_steps = count(STEPS, STEPS)


def instantiations() -> Iterator[tuple[str, str]]:
    """Yield file and C++ name of every kernel that this module may launch."""
    for types in _KEYS:
        yield _FILE, jit.expression("edge_keys", types, ())
        for transposed in (0, 1):
            yield _FILE, jit.expression("edge_rows", types, (transposed,))
    for index, name in product(("int32", "int64"), ("chunk_starts", "chunk_borders")):
        yield _FILE, jit.expression(name, (index,), ())
    for index in ("int32", "int64"):
        yield _SMALL_FILE, jit.expression("build_small", (index,), ())
    yield _FILE, jit.expression("reached", ("int32",), ())


def _load(kernel: str, types: tuple[str, ...], *constants: int, file: str = _FILE) -> jit.Kernel:
    return jit.load(file, kernel, _PARAMETERS[kernel], types, constants)


class Findings(NamedTuple):
    """What a build reports when it is done; as in build.cu."""

    done: int
    fault: int  #: 2 e + 1 for the id of edge e that is no column, 2 e + 2 for the row; 0 for none
    blocks: int
    cuts: int
    longs: int
    longest: int
    moved: int  #: whether an entry is not at the place of its edge
    loops: int  #: whether an entry lies on the diagonal


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the arrays of one CSR lie, in bytes from the beginning of their memory.

    There is room for ``n_rows``, ``n_cols`` and ``nnz`` entries: fewer may lie there.
    """

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    wave: int  #: blocks that the GPU has room for at once
    blocks: int  #: at most
    n_cuts: int  #: at most
    n_long: int  #: at most
    start: int
    indptr: int
    indices: int
    perm: int
    inverse: int  #: one over the entries of each row, in float32
    scale: int  #: GCN's factors of the rows, see ``degrees.cuh``, in float32; of the transpose 0
    square: int
    long: int
    slot: int
    cut: int
    size: int
    #: What was prepared for structures laid out so, without rows that blocks share, and with them.
    prepared: tuple[dict[Hashable, Any], dict[Hashable, Any]] = field(
        init=False, default_factory=lambda: ({}, {}), repr=False
    )

    @property
    def key_dtype(self) -> str:
        """Return the dtype of the sort's keys: the smaller, the fewer passes it makes."""
        return "int32" if self.n_rows < 2**31 else "int64"


@lru_cache(maxsize=256)
def layout(
    n_rows: int, n_cols: int, nnz: int, index_dtype: str, device: int, *, transposed: bool = False
) -> Layout:
    """Lay out a CSR of ``n_rows`` and ``nnz`` entries for a GPU, or the transpose of one."""
    wave, item = RESIDENT_BLOCKS * multiprocessors(device), ITEMSIZE[index_dtype]
    blocks = most_blocks(n_rows, nnz, wave)
    # A row is cut where a block ends, and only a long one.
    n_cuts, n_long = blocks - 1 if nnz > LONG_ROW else 0, nnz // (LONG_ROW + 1)
    # One more block, for ``cut`` to name behind the last border.
    n_starts = (blocks + 1) * CHUNKS_PER_BLOCK + 1
    start = _COUNTS
    indptr = start + 2 * item * n_starts
    indices = indptr + item * (n_rows + 1)
    perm = indices + item * nnz
    long = perm + item * nnz
    inverse = long + item * n_long
    scale = square = 0
    slot = inverse + 4 * n_rows
    if not transposed:
        scale, square, slot = slot, slot + 4 * n_rows, slot + 8 * n_rows
    cut = slot + 4 * (blocks + 1)
    size = -(-(cut + 4 * n_cuts) // _ALIGNMENT) * _ALIGNMENT
    places = {"start": start, "indptr": indptr, "indices": indices, "perm": perm, "long": long}
    return Layout(
        n_rows, n_cols, nnz, index_dtype, wave, blocks, n_cuts, n_long,
        **places, inverse=inverse, scale=scale, square=square, slot=slot, cut=cut, size=size,
    )  # fmt: skip


def structure_in(
    at: Layout, begin: int, sizes: Sizes, report: object, half: int = 0, *, cuts: bool = True
) -> Structure:
    """Make the structure of a CSR that is being built: see ``Structure.report``.

    ``cuts`` tells whether rows may be cut between blocks.
    """
    places = begin + at.indptr, begin + at.indices, begin + at.start
    borders = begin + at.slot, begin + at.cut, begin + at.long
    counts = at.blocks, at.n_cuts if cuts else 0, 0, 0
    result = Structure(*sizes, *places, *borders, *counts, begin + at.perm, report, half)
    result.shared = at.prepared[cuts]
    return result


def keys(at: Layout, begin: int, ids: tuple[int, int], keys: int, report: int, stream: int) -> None:
    """Write the key of each edge to sort by; ``ids`` are those of rows, and of columns or 0."""
    kernel = _load("edge_keys", (at.index_dtype, at.key_dtype))
    places = keys, _at(begin, at.square), begin, report
    args = (*ids, *places, at.nnz, at.n_rows, at.n_cols)
    kernel(_blocks(max(at.nnz, at.n_rows)), args, stream=stream)


def rows(
    at: Layout, begin: int, keys: int, order: int, minor: int, words: int, stream: int,
    *, transposed: bool,
) -> None:  # fmt: skip
    """Write rows, columns and places from sorted keys, and a word of each row.

    ``minor`` are the ids of columns or, ``transposed``, the indptr of the CSR whose transpose it
    is, of which the edges are the entries.
    """
    kernel = _load("edge_rows", (at.index_dtype, at.key_dtype), int(transposed))
    places = at.indptr, at.indices, at.perm, at.inverse, at.square
    results = (_at(begin, place) for place in places)
    args = (keys, order, minor, *results, words, begin, at.nnz, at.n_rows, at.n_cols)
    kernel(_blocks(max(at.nnz, at.n_rows + 1)), args, stream=stream)


def chunks(at: Layout, begin: int, words: int, report: int, stream: int) -> None:
    """Cut the rows, by words that have been added up, and end the report."""
    types = (at.index_dtype,)
    n_starts = (at.blocks + 1) * CHUNKS_PER_BLOCK + 1
    places = at.indptr, at.start, at.long, at.slot, at.cut, at.scale, at.square
    indptr, start, long, slot, cut, *factors = (_at(begin, place) for place in places)
    args: tuple[int, ...] = indptr, words, start, long, *factors, at.n_rows, n_starts, at.wave
    _load("chunk_starts", types)(_blocks(max(n_starts, at.n_rows)), args, stream=stream)
    sizes = at.n_rows, at.blocks + 1, at.n_cuts, at.wave
    args = indptr, words, start, slot, cut, begin, report, *sizes
    _load("chunk_borders", types)(1, args, threads=_BORDER_THREADS, stream=stream)


def is_small(n_rows: int, n_cols: int, nnz: int) -> bool:
    """Return True if one launch of few blocks builds it sooner than several of many."""
    return nnz <= SMALL_EDGES and n_rows <= SMALL_VERTICES and n_cols <= SMALL_VERTICES


def room_for(count: int) -> int:
    """Round up to four binary digits: graphs of about one size are built and launched alike."""
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


class Small(NamedTuple):
    """A prepared build in one launch; sizes are in bytes."""

    rows: Layout
    columns: Layout | None  #: None where they are not wanted
    size: int  #: memory of both, the columns behind the rows
    scratch: int  #: what it needs while it runs
    share: int  #: edges of a block
    launch: jit.Launch

    def __call__(
        self,
        ids: tuple[int, int],
        sizes: tuple[int, int, int],
        begin: int,
        reports: tuple[int, int],
        scratch: int,
        progress: int,
        stream: int,
    ) -> None:
        """Launch it.

        ``ids`` are those of rows and columns, and ``sizes`` the numbers of rows, columns and edges.
        ``progress`` is a word for each block, 0 or with a step of an earlier launch, and used by no
        two launches at a time.
        """
        of_rows, of_columns = reports
        halves = begin, of_rows, begin + self.rows.size, of_columns
        step = next(_first_steps)
        self.launch(stream, *ids, *halves, scratch, progress, step, *sizes, self.share)


@lru_cache(maxsize=256)
def small(
    n_rows: int, n_cols: int, nnz: int, index_dtype: str, device: int, *, both: bool
) -> Small:
    """Prepare the build of few edges, on the current device: of rows, and of columns if ``both``.

    These are the most rows, columns and edges, see ``room_for``.  It has at most one block a
    multiprocessor, so that all run at once.
    """
    rows = layout(n_rows, n_cols, nnz, index_dtype, device)
    sizes = n_cols, n_rows, nnz, index_dtype, device
    columns = layout(*sizes, transposed=True) if both else None
    blocks = min(-(-nnz // _SHARE), rows.wave // RESIDENT_BLOCKS, SMALL_BLOCKS)
    words = 2 * blocks + n_rows + n_cols + 2
    scratch = 8 * words + 4 * (5 * nnz + jit.THREADS * blocks)
    share = -(-nnz // (blocks * jit.THREADS)) * jit.THREADS
    unwanted = (0,) * 15
    places = *_places(rows), *(unwanted if columns is None else _places(columns))
    kernel = _load("build_small", (index_dtype,), file=_SMALL_FILE)
    launch = kernel.ready(blocks, after=(*places, rows.wave, 1 + both), cooperative=True)
    size = rows.size + (0 if columns is None else columns.size)
    return Small(rows, columns, size, scratch, share, launch)


def _places(at: Layout) -> tuple[int, ...]:
    """Fill the fields of ``Layout`` in build_small.cu."""
    n_starts = (at.blocks + 1) * CHUNKS_PER_BLOCK + 1
    rows = at.start, at.indptr, at.indices, at.perm, at.inverse, at.scale, at.square
    sizes = n_starts, at.blocks + 1, at.n_cuts, (at.n_rows - 1).bit_length(), 0
    return (*rows, at.long, at.slot, at.cut, *sizes)


def reached(report: int, stream: int) -> None:
    """Report that the stream has come so far."""
    _load("reached", ("int32",))(1, (report,), threads=1, stream=stream)


def _at(begin: int, place: int) -> int:
    """Return the address of an array of a layout, 0 for one that it does not have."""
    return begin + place if place else 0


def _blocks(threads: int) -> int:
    return -(-threads // jit.THREADS)
