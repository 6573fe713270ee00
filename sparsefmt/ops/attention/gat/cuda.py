"""Launch graph attention: the product, its weights, and the scores that vectors make of features.

Every launch takes arrays of any library with a ``Memory``; shapes are as in ``operands``.  With
``loops`` each row has a virtual loop, which is entry nnz + row, and stored ones are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ...._caches import lru_cache
from ....formats.arrays import VALUE_DTYPES
from ....formats.compressed import CSR
from ...engine import jit
from ...engine.jit import Launch
from ...engine.launch import ITEMSIZE, fill, row_bytes
from ...engine.memory import Memory, memory_of
from ...engine.structure import Structure, structure_of
from ...matmul.cuda import NARROW, Shape, load_shape, rounded, rounded_width
from ..operands import Forward, GatArguments, heads_and_feat, sums_dtype

THREADS = 128  # of a block, as in rows.cuh
#: Bytes that the heads of a team gather side by side: a line of the L2. Two heads of 64 bytes took
#: 0.63x the time of each alone (H200, reddit, float16), 512 bytes 1.15x that of 128.
TEAM_BYTES = 128
NOTHING, ANYTHING, ONLY_BIAS = range(3)  # as in gat.cu
#: Lanes that have a row and head of the scores, and a row of their gradient.
SCORE_LANES, SCORE_GRADIENT_LANES = (2, 8), (8, 32)

#: Letter of the type in which sums run, by its name.
FLOATS = {"float32": "f", "float64": "d"}
_FORWARD, _BACKWARD = "4P2i", "4P3i"  # what follows the scores


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which entries are dropped: those whose random word is below ``below``; ``scale`` the others.

    ``seed_at`` is the address of an int64 on the device that replaces the seed, so that a CUDA
    graph can draw anew; 0 for none.
    """

    seed: int = 0
    below: int = 0
    scale: float = 1.0
    seed_at: int = 0


_NO_DROPOUT = Dropout()


def dropout(share: float, seed: int = 0, seed_at: int = 0) -> Dropout:
    """Drop that share of the entries, 0 to less than 1."""
    below = min(round(share * 2**32), 2**32 - 1)
    return Dropout(seed % 2**64, below, 1 / (1 - share), seed_at) if below else _NO_DROPOUT


def dropout_of(m: Memory, share: float, seed: Any) -> Dropout:
    """Drop that share, by an integer seed or by one that lies on the device."""
    if not share:
        return _NO_DROPOUT
    if isinstance(seed, int):
        return dropout(share, seed)
    return dropout(share, seed_at=m.pointer(seed))


def scores_layout(dtype: str) -> str:
    """Layout of the fields of ``Scores`` in gat.cu, where sums run in that dtype."""
    return f"5PQq{FLOATS[dtype] * 2}I"


def instantiations() -> Iterator[tuple[str, str]]:
    """List every kernel that graph attention may launch: file and C++ name."""
    for dtype, index in product(VALUE_DTYPES, ("int32", "int64")):
        for name in _row_kernels(dtype, index):
            yield "attention/gat/gat.cu", name
        entries = ["gat_edge_gradient"] + ["gat_attention"] * (ITEMSIZE[dtype] > 2)
        for name in entries:
            yield "attention/gat/entries.cu", jit.expression(name, (dtype, index), ())
    for dtype in VALUE_DTYPES:
        yield "attention/gat/gat.cu", jit.expression("gat_stats", (dtype,), ())
        kernels = ("gat_scores", SCORE_LANES), ("gat_scores_backward", SCORE_GRADIENT_LANES)
        for name, lanes in kernels:
            for constants in product(lanes, (16 // ITEMSIZE[dtype], 1)):
                yield "attention/gat/scores.cu", jit.expression(name, (dtype,), constants)


def _row_kernels(dtype: str, index_dtype: str) -> list[str]:
    """List the C++ names of the kernels over rows."""
    found: set[str] = set()
    for gathered in (dtype, NARROW) if dtype == "float32" else (dtype,):
        sizes = product((1, 2, 4), (0, 1, 2, 4, 8, 16, 32, 64), (0, ITEMSIZE[gathered], 8))
        shapes = {row_shape(gathered, *size)[:2] for size in sizes}
        types = dtype, index_dtype, gathered
        for (shape, mates), backward in product(shapes, (0, 1)):
            base = shape.lanes, shape.vector
            found.add(jit.expression("gat_cut_rows", types[:2], (*base, backward)))
            general = _general(gathered, index_dtype, shape.vector)
            extras = (NOTHING, ANYTHING) if backward else (NOTHING, ANYTHING, ONLY_BIAS)
            for flags in [(1, ANYTHING)] if general else product((0, 1), extras):
                constants = (*base, mates, backward, *flags)
                found.add(jit.expression("gat_balanced", types, constants))
    return sorted(found)


def _general(gathered: str, index_dtype: str, vector: int) -> bool:
    """Tell whether the general variant serves all: rare indices, loads of less than 16 bytes."""
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


class _LaunchShape(NamedTuple):
    """How ``gat_balanced`` and ``gat_cut_rows`` are launched, whatever the addresses."""

    layout: str  #: parameters of ``Scores`` and behind
    constants: tuple[int, ...]
    constants_of_cut_rows: tuple[int, ...]
    slices: int
    teams: int  #: slices of all teams of heads
    lanes: int  #: of all heads and slices
    row_bytes: int


def _launch_shape(
    types: tuple[str, str, str], heads: int, feat: int, alignment: int, backward: bool,
    flags: tuple[int, int],
) -> _LaunchShape:  # fmt: skip
    """Choose the shape of such a launch."""
    dtype, index_dtype, gathered = types
    shape, mates, slices = row_shape(gathered, heads, feat, alignment)
    if _general(gathered, index_dtype, shape.vector):
        flags = 1, ANYTHING
    stride = heads * feat if gathered == dtype else rounded_width(heads * feat)
    sums, base = "float64" if dtype == "float64" else "float32", (shape.lanes, shape.vector)
    return _LaunchShape(
        layout=scores_layout(sums) + (_BACKWARD if backward else _FORWARD),
        constants=(*base, mates, int(backward), *flags),
        constants_of_cut_rows=(*base, int(backward)),
        slices=slices,
        teams=(heads // mates) * slices,
        lanes=heads * slices * shape.lanes,
        row_bytes=row_bytes(stride, gathered),
    )


# The product


def gat(
    A: CSR | Structure, bias: Any, *arguments: Any, out: Any = None, narrow: bool = False, **_: Any
) -> Any:
    """``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, as ``ops.gat``.

    The others are ``GatArguments``, here and in the gradients.  ``narrow`` rounds the rows that
    entries gather, of float32, to bfloat16 once: all else stays float32.
    """
    return forward(A, bias, arguments, out=out, narrow=narrow).out


def gat_with_statistics(
    A: CSR | Structure, bias: Any, *arguments: Any, narrow: bool = False
) -> Forward:
    """``gat``, and what its gradient needs."""
    return forward(A, bias, arguments, train=True, narrow=narrow)


def in_memory(m: Memory, given: tuple[Any, ...]) -> GatArguments:
    """Give arrays as kernels read them: contiguous, scores in the dtype of sums."""
    h, el, er, edges, loop_edges, *numbers = given
    if edges is not None or loop_edges is not None:
        edges, loop_edges = m.factors(edges), m.factors(loop_edges)
    ends = m.factors(el), m.factors(er)
    return GatArguments(m.contiguous(h), *ends, edges, loop_edges, *numbers)


def forward(
    A: CSR | Structure, bias: Any, arguments: tuple[Any, ...], *, out: Any = None,
    train: bool = False, narrow: bool = False,
) -> Forward:  # fmt: skip
    """Launch the product; with ``train`` also what backward needs, even if there are no features.

    With loops or a bias the structure is square; the bias has the dtype of the features.
    """
    S, m = structure_of(A), memory_of(arguments[0])
    given, bias = in_memory(m, arguments), m.contiguous(bias)
    h, dtype, (heads, feat) = given.h, m.dtype(given.h), heads_and_feat(given.h)
    plus = statistics = None
    if out is None:
        out = m.empty((S.n_rows, *h.shape[1:]), dtype, h)
    if train:
        plus = m.empty(out.shape, dtype, h)
        statistics = m.empty((S.n_rows, heads, 4), sums_dtype(h), h)
    found = Forward(out, plus, statistics)
    if not (S.n_rows and heads and (feat or train)):
        return found
    with m.on_device(h):
        if S.nnz or given.loops or m.pointer(bias):
            _product(S, m, bias, given, found, narrow=narrow and feat > 0)
        else:
            for array in found:
                zero(m, array)
    return found


def zero(m: Memory, array: Any) -> None:
    """Fill an array with zeros on its stream; None takes none."""
    if array is not None and (size := prod(array.shape) * array.itemsize):
        fill(m.pointer(array), size, 0, m.stream(array))


def _product(
    S: Structure, m: Memory, bias: Any, given: GatArguments, found: Forward, *, narrow: bool
) -> None:
    h, (heads, feat) = given.h, heads_and_feat(given.h)
    gathered = rounded(h) if narrow else h
    if not S.nnz:
        given = given._replace(edges=None)
    drop = dropout_of(m, given.dropout, given.seed)
    scores = score_parameters(m, drop, given, S.nnz)
    arrays = found.out, found.plus, bias, found.statistics, gathered
    out, plus, added, statistics, X = m.pointers(*arrays)
    params = (*scores, out, plus, added, statistics, heads, feat)
    anything = given.loops or given.edges is not None
    launch_rows(
        *(S, m, h, X if feat else m.pointer(given.el), 0, params),
        alignment=X | (out | plus | added) >> narrow,
        backward=False,
        narrow=narrow,
        flags=(int(drop.below > 0), ANYTHING if anything else ONLY_BIAS if added else NOTHING),
    )


def score_parameters(m: Memory, drop: Dropout, given: GatArguments, nnz: int) -> tuple[Any, ...]:
    """Fill the fields of ``Scores`` in gat.cu."""
    scores = given.el, given.er, given.edges, given.loop_edges
    first_loop = nnz if given.loops else -1
    numbers = drop.seed, first_loop, given.slope, drop.scale, drop.below
    return (*m.pointers(*scores), drop.seed_at, *numbers)


def launch_rows(
    S: Structure, m: Memory, h: Any, X: int, perm: int, params: tuple[Any, ...], *, alignment: int,
    backward: bool, narrow: bool, flags: tuple[int, int],
) -> None:  # fmt: skip
    """Launch ``gat_balanced``, and ``gat_cut_rows`` where blocks share rows.

    Entries gather rows of ``X``, of the shape and dtype of ``h`` or, if ``narrow``, ``rounded``,
    and have the numbers ``perm``.  ``flags`` tell whether entries are dropped, and what else there
    is.
    """
    if not S.nnz:
        S, perm = S.once(_of_one_entry), 0
    case = m.dtype(h), *heads_and_feat(h), alignment % 16, backward, narrow, flags
    launch_case(S, m, h, m.stream(h), case, X, perm, params)


def launch_case(
    S: Structure, m: Memory, h: Any, stream: int, case: tuple[Any, ...], X: int, perm: int,
    params: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch ``row_launches`` of a case, with a workspace beside ``h`` if blocks share rows.

    ``stream`` is the current one on the device of ``h``.  ``X`` and ``perm`` are addresses, as
    ``launch_rows`` takes them.
    """
    nbytes, launch, add_up = S.once_alike(row_launches, *case)
    sums, arrays = 0, (S.indptr, S.indices, S.start, S.slot)  # ``S.arrays`` is a call more
    if nbytes:
        workspace = m.empty((nbytes,), "uint8", h)
        sums = m.pointer(workspace)
    launch(stream, *arrays, perm, X, *params, sums, S.nnz)
    if add_up is not None:
        add_up(stream, S.start, S.cut, *params, sums)


def _of_one_entry(S: Structure) -> Structure:
    """Give a structure without entries one of a column that exists, whose weight is 0."""
    return replace(S, indices=S.indptr, nnz=1)


def row_launches(
    S: Structure, dtype: str, heads: int, feat: int, alignment: int, backward: bool, narrow: bool,
    flags: tuple[int, int],
) -> tuple[int, Launch, Launch | None]:  # fmt: skip
    """Decide a pass: bytes of the workspace, its launch, and that for rows that blocks share.

    A call gives both launches the addresses of the structure's arrays, and the first one the number
    of entries, so that graphs of about one size share them.
    """
    gathered = NARROW if narrow else dtype
    types = dtype, S.index_dtype, gathered
    shape = _launch_shape(types, heads, feat, alignment, backward, flags)
    layout = f"6P{shape.layout}PqIIi"
    launch = jit.load("attention/gat/gat.cu", "gat_balanced", layout, types, shape.constants).ready(
        S.blocks * shape.teams,
        after=(shape.row_bytes, S.blocks, shape.slices),
        threads=THREADS,
    )
    if not S.n_cuts:
        return 0, launch, None
    layout, constants = f"2P{shape.layout}Pii", shape.constants_of_cut_rows
    add_up = jit.load("attention/gat/gat.cu", "gat_cut_rows", layout, types[:2], constants).ready(
        -(-S.n_cuts * shape.lanes // THREADS),
        after=(S.n_cuts, shape.slices),
        threads=THREADS,
    )
    return _shared_sums(S, gathered, heads, feat), launch, add_up


def _shared_sums(S: Structure, gathered: str, heads: int, feat: int) -> int:
    """Count the bytes for sums of rows that blocks share, whatever the alignment."""
    size = ITEMSIZE[gathered]
    shapes = [row_shape(gathered, heads, feat, alignment) for alignment in (0, 8, size)]
    values = max(slices * shape.lanes * (2 * shape.vector + 3) for shape, _, slices in shapes)
    return 2 * S.n_cuts * heads * values * max(size, 4)


# Its weights


def gat_attention(
    A: CSR | Structure, el: Any, er: Any, edges: Any, slope: float, loops: bool, *, out: Any = None
) -> Any:
    """``P[e, k]`` before dropout, 0 at loops that are left out."""
    S, m = structure_of(A), memory_of(el)
    el, er, edges = m.factors(el), m.factors(er), m.factors(edges)
    dtype, heads = m.dtype(el), el.shape[1] if el.ndim == 2 else 1
    if out is None:
        out = m.empty((S.nnz, *el.shape[1:]), dtype, el)
    h = m.empty((S.n_cols, heads, 0), dtype, el)  # the statistics come with a product, here of none
    given = GatArguments(h, el, er, edges, slope=slope, loops=loops)
    statistics = forward(S, None, given, train=True).statistics
    if S.nnz and heads:
        layout, types = f"8Pqii{FLOATS[dtype]}", (dtype, S.index_dtype)
        with m.on_device(el):
            kernel = jit.load("attention/gat/entries.cu", "gat_attention", layout, types)
            arrays = map(m.pointer, (el, er, edges, statistics, out))
            rows = S.indptr, S.indices, S.start
            args: tuple[Any, ...] = (*rows, *arrays, S.nnz, heads, int(loops), slope)
            kernel(S.blocks, args, threads=THREADS, stream=m.stream(el))
    return out


# Scores of vectors


def gat_scores(A: None, h: Any, source: Any, target: Any) -> tuple[Any, Any]:
    """``el = <h, source>`` and ``er = <h, target>`` of each row and head.

    The vectors have heads * feat values in the dtype of the features.
    """
    m, shape, dtype = memory_of(h), h.shape[:-1], sums_dtype(h)
    if not all(h.shape):
        return m.zeros(shape, dtype, h), m.zeros(shape, dtype, h)
    h, source, target = m.contiguous(h), m.contiguous(source), m.contiguous(target)
    el, er = m.empty(shape, dtype, h), m.empty(shape, dtype, h)
    (heads, feat), dtype = heads_and_feat(h), m.dtype(h)
    arrays = m.pointers(h, source, target, el, er)
    vector = score_vector(dtype, feat, arrays[0] | arrays[1] | arrays[2])
    with m.on_device(h):
        launch = scores_launch(m.device(h), dtype, h.shape[0], heads, feat, vector)
        launch(m.stream(h), *arrays)
    return el, er


@lru_cache(maxsize=256)
def scores_launch(device: int, dtype: str, n: int, heads: int, feat: int, vector: int) -> Launch:
    """Decide how scores are launched; ``device`` is the number of the current one."""
    lanes, items = SCORE_LANES[feat > SCORE_LANES[0] * vector], n * heads
    constants = lanes, vector
    kernel = jit.load("attention/gat/scores.cu", "gat_scores", "5Pq2i", (dtype,), constants)
    blocks = -(-items * lanes // THREADS)
    return kernel.ready(blocks, after=(items, heads, feat), threads=THREADS)


def score_vector(dtype: str, feat: int, alignment: int) -> int:
    """Choose how many values a load has: 16 bytes where all rows are aligned to that."""
    size = ITEMSIZE[dtype]
    return 16 // size if (alignment | feat * size) % 16 == 0 else 1
