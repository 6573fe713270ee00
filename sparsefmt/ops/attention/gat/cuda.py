"""Launch graph attention and its gradients, for arrays of any library with a ``Memory``.

Shapes are as in ``score``.  With ``loops`` each row has a virtual loop, which is entry nnz + row,
and stored ones are left out.  Gradients are made of what each target's entries read, over the
transpose for what sources have; scores that vectors made take one launch before and one behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ...edges import cuda as edges_cuda
from ...engine import jit
from ...engine.call import launcher
from ...engine.jit import ITEMSIZE, fill
from ...engine.memory import Memory, memory_of
from ...engine.structure import Structure, structure_of, transposed
from ...matmul.cuda import NARROW, rounded, sizes
from ..score import Dropping, Forward, GatArguments, heads_and_feat, heads_of, sums_dtype
from .launches import (
    ANYTHING,
    ENTRIES,
    FLOATS,
    NOTHING,
    ONLY_BIAS,
    THREADS,
    row_launches,
    row_shape,
    scores_launch,
    stats_launch,
    through_launch,
)

_NOTHING_DROPPED = Dropping()


def dropping_of(m: Memory, share: float, seed: Array | int | None) -> Dropping:
    """Drop that share, 0 to less than 1, by an integer seed or by one that lies on the device."""
    below = min(round(share * 2**32), 2**32 - 1) if share else 0
    if not below:
        return _NOTHING_DROPPED
    number, seed_at = (seed, 0) if isinstance(seed, int) else (0, m.pointer(seed))
    return Dropping(number % 2**64, below, 1 / (1 - share), seed_at)


# The product


def gat(
    A: CSR | Structure, bias: Array | None, *arguments: Any, out: Array | None = None,
    narrow: bool = False, **_: Any,
) -> Array:  # fmt: skip
    """Launch ``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, of ``GatArguments``.

    ``narrow`` rounds the rows that entries gather, of float32, to bfloat16 once: all else stays
    float32, here and in the gradients.
    """
    return _forward(A, bias, arguments, out=out, narrow=narrow).out


def gat_with_statistics(
    A: CSR | Structure, bias: Array | None, *arguments: Any, narrow: bool = False
) -> Forward:
    """Launch ``gat``, and what its gradient needs."""
    return _forward(A, bias, arguments, train=True, narrow=narrow)


def _in_memory(m: Memory, arguments: tuple[Any, ...]) -> GatArguments:
    """Return arrays as kernels read them: contiguous, scores in the dtype of sums."""
    h, *scores = arguments[:5]
    return GatArguments(m.contiguous(h), *map(m.factors, scores), *arguments[5:])


def _forward(
    A: CSR | Structure, bias: Array | None, arguments: tuple[Any, ...], *, out: Array | None = None,
    train: bool = False, narrow: bool = False,
) -> Forward:  # fmt: skip
    """Launch the product; with ``train`` also what backward needs, even without features."""
    S, m = structure_of(A), memory_of(arguments[0])
    args, bias = _in_memory(m, arguments), m.contiguous(bias)
    h, dtype, (heads, feat) = args.h, m.dtype(args.h), heads_and_feat(args.h)
    plus = statistics = None
    if out is None:
        out = m.empty((S.n_rows, *h.shape[1:]), dtype, h)
    if train:
        plus = m.empty(out.shape, dtype, h)
        statistics = m.empty((S.n_rows, heads, 4), sums_dtype(h), h)
    result = Forward(out, plus, statistics)
    if S.n_rows and heads and (feat or train):
        with m.on_device(h):
            if S.nnz or args.loops or m.pointer(bias):
                gathered = rounded(h) if narrow and feat else h
                places = m.pointers(*args[1:5], gathered, out, plus, bias, statistics)
                sizes = m.device(h), dtype, heads, feat, m.stream(h)
                drop = dropping_of(m, args.dropout, args.seed)
                _product(S, m, h, sizes, places, drop, args.slope, args.loops, narrow and feat > 0)
            else:
                for array in result:
                    zero(m, array)
    return result


def zero(m: Memory, array: Array | None) -> None:
    """Fill an array with zeros on its stream; None takes none."""
    if array is not None and (size := prod(array.shape) * array.itemsize):
        fill(m.pointer(array), size, 0, m.stream(array))


def _product(
    S: Structure, m: Memory, h: Array, sizes: tuple[Any, ...], places: Sequence[int],
    drop: Dropping, slope: float, loops: bool, narrow: bool,
) -> None:  # fmt: skip
    """Launch the product.

    ``sizes`` are device, dtype, heads, features of each and stream.  ``places`` are addresses, 0
    for none: of the four terms of scores, gathered features, ``out``, ``plus``, bias, statistics.
    """
    el, er, edges, loop_edges, X, out, plus, added, statistics = places
    device, dtype, heads, feat, stream = sizes
    edges = edges if S.nnz else 0
    alignment = (X | (out | plus | added) >> narrow) % 16 if feat else 0
    extra = ANYTHING if loops or edges else ONLY_BIAS if added else NOTHING
    case = device, dtype, heads, feat, alignment, False, narrow, (int(drop.below > 0), extra)
    first_loop = S.nnz if loops else -1
    scores = el, er, edges, loop_edges, drop.seed_at, drop.seed, first_loop, slope, drop.scale
    params = *scores, drop.below, out, plus, added, statistics, heads, feat
    _launch(S, m, h, case, X if feat else el, 0, params, stream)


def _launch(
    S: Structure, m: Memory, h: Array, case: tuple[Any, ...], X: int, perm: int,
    params: tuple[Any, ...], stream: int,
) -> None:  # fmt: skip
    """Launch ``gat_balanced``, and ``gat_cut_rows`` where blocks share rows.

    Entries gather rows from the address ``X``, of the shape and dtype of ``h`` or, if narrow,
    ``rounded``, and have the numbers at ``perm``.
    """
    if not S.nnz:
        S, perm = S.once(_of_one_entry), 0
    device, *of_kernel = case
    sizes_of = S.index_dtype, S.blocks, S.n_cuts
    nbytes, launch, add_up = row_launches(device, *sizes_of, *of_kernel)
    sums = 0
    if nbytes:
        workspace = m.empty((nbytes,), "uint8", h)
        sums = m.pointer(workspace)
    arrays = S.indptr, S.indices, S.start, S.slot  # ``S.arrays`` is a call more
    launch(stream, *arrays, perm, X, *params, sums, S.nnz)
    if add_up is not None:
        add_up(stream, S.start, S.cut, *params, sums)


def _of_one_entry(S: Structure) -> Structure:
    """Return a structure without entries with one, of a column that exists, whose weight is 0."""
    return replace(S, indices=S.indptr, nnz=1)


def gat_attention(
    A: CSR | Structure, el: Array, er: Array, edges: Array | None, slope: float, loops: bool, *,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """Launch ``P[e, k]`` before dropout, 0 at loops that are left out."""
    S, m = structure_of(A), memory_of(el)
    el, er, edges = map(m.factors, (el, er, edges))
    dtype, heads = m.dtype(el), el.shape[1] if el.ndim == 2 else 1
    if out is None:
        out = m.empty((S.nnz, *el.shape[1:]), dtype, el)
    h = m.empty((S.n_cols, heads, 0), dtype, el)  # the statistics come with a product, here of none
    numbers = None, slope, 0.0, loops
    statistics = _forward(S, None, (h, el, er, edges, None, *numbers), train=True).statistics
    if S.nnz and heads:
        layout, types = f"8Pqii{FLOATS[dtype]}", (dtype, S.index_dtype)
        with m.on_device(el):
            kernel = jit.load(ENTRIES, "gat_attention", layout, types)
            arrays = S.indptr, S.indices, S.start, *m.pointers(el, er, edges, statistics, out)
            args = *arrays, S.nnz, heads, int(loops), slope
            kernel(S.blocks, args, threads=THREADS, stream=m.stream(el))  # type: ignore[arg-type]
    return out


# The product of scores that vectors make


@launcher(sizes=sizes)
def gat_of_vectors(
    S: Structure, m: Memory, h: Array, source: Array, target: Array, bias: Array | None,
    edges: Array | None, loop_edges: Array | None, *_: Any, train: bool = False,
    narrow: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Prepare ``gat`` of the scores ``<h, source>`` and ``<h, target>`` of each row and head.

    Features are (n, heads, feat) or (n, heads * feat), as vectors say, of the same dtype.  If to
    ``train`` it returns what the gradient needs, too: ``Forward.plus``, and in one array the
    statistics, which are 4 of each row and head, and the scores of sources and of targets.
    """
    (heads, feat), device, dtype, sums = heads_of(source), m.device(h), m.dtype(h), sums_dtype(h)
    size, width = ITEMSIZE[dtype], 4 * heads * ITEMSIZE[sums] * train
    copies = any(m.contiguous(a) is not a for a in (h, source, target, bias))
    copies = copies or edges is not None or loop_edges is not None

    def run(
        S: Structure, h: Array, source: Array, target: Array, bias: Array | None,
        edges: Array | None, loop_edges: Array | None, seed: Array | int | None, slope: float,
        share: float, loops: bool, **_: Any,
    ) -> Any:  # fmt: skip
        if copies:
            h, source, target, bias = map(m.contiguous, (h, source, target, bias))
            edges, loop_edges = m.factors(edges), m.factors(loop_edges)
        n, plus = h.shape[0], None
        some = n * heads * feat and (S.nnz or loops or bias is not None)
        make = m.empty if some else m.zeros
        out = make(h.shape, dtype, h)
        if train:
            plus = make(h.shape, dtype, h)
        of_rows = make((n * heads * (6 if train else 2),), sums, h)
        if some:
            gathered = rounded(h) if narrow else h
            written = gathered, out, plus, bias, of_rows, h
            left, right, *addresses, begin, X = m.pointers(
                source, target, edges, loop_edges, *written
            )
            stream, el = m.stream(h), begin + n * width
            er = el + n * heads * ITEMSIZE[sums]
            vector = 1 if (X | left | right | feat * size) % 16 else 16 // size
            launch = scores_launch(device, dtype, n, heads, feat, vector)
            launch(stream, X, left, right, el, er)
            drop = dropping_of(m, share, seed) if share else _NOTHING_DROPPED
            places = el, er, *addresses, begin if train else 0
            numbers = drop, slope, loops, narrow
            _product(S, m, h, (device, dtype, heads, feat, stream), places, *numbers)
        return (out, plus, of_rows) if train else out

    return run


@launcher(sizes=sizes)
def gat_of_vectors_with_statistics(
    S: Structure, m: Memory, *args: Any, **options: Any
) -> Callable[..., Any]:
    """Prepare the product, and the statistics that its gradient reads."""
    run: Callable[..., Any] = gat_of_vectors.prepare(S, m, *args, train=True, **options)
    return run


# Gradients


def gat_backward(
    A: CSR | Structure, T: CSR | Structure | None, perm: Array | None, grad: Array,
    out: Array | None, plus: Array | None, statistics: Array | None, of_edges: bool,
    *arguments: Any, narrow: bool = False, **_: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Launch gradients of ``h, el, er, loop_edges, edges``: empty if not given or not wanted.

    What is not given of the forward pass and of the transpose is made anew.
    """
    S, m = structure_of(A), memory_of(arguments[0])
    args, saved = _in_memory(m, arguments), Forward(out, plus, statistics)
    if statistics is None:
        saved = _forward(A, None, args, train=True, narrow=narrow)
    if T is None:
        T, perm = transposed(A)  # type: ignore[arg-type]
    h, grad = args.h, m.contiguous(grad)
    d_er = m.empty(args.er.shape, sums_dtype(h), h)
    with m.on_device(h):
        places = m.pointers(args.el, args.er, *saved, None, d_er)
        sizes, sides = (m.device(h), m.dtype(h), *heads_and_feat(h)), (S, structure_of(T), perm)
        dh, room, slices, d_loops, d_edges, *__ = _gradients(
            m, sides, h, sizes, grad, places, args[3:], of_edges, narrow
        )
        d_el = room.reshape(*args.el.shape, slices)
        d_el = d_el.squeeze(-1) if slices == 1 else d_el.sum(-1)
    return dh, d_el, d_er, d_loops, d_edges


@launcher(sizes=sizes, structures=2)
def gat_of_vectors_backward(
    S: Structure, m: Memory, grad: Array, out: Array, plus: Array, of_rows: Array, of_edges: bool,
    *args: Any, narrow: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Prepare gradients of ``h``, ``source, target, bias`` in one, ``loop_edges``, ``edges``.

    They take what ``gat_of_vectors_with_statistics`` has saved.
    """
    h, source, target, bias, edges, loop_edges, *_ = args
    (heads, feat), dtype, sums, device = heads_of(source), m.dtype(h), sums_dtype(h), m.device(h)
    arrays = h, source, target, bias, grad
    copies = any(m.contiguous(a) is not a for a in arrays)
    copies = copies or edges is not None or loop_edges is not None
    size, of_sums, count = ITEMSIZE[dtype], ITEMSIZE[sums], 2 if bias is None else 3
    sizes = device, dtype, heads, feat

    def run(
        S: Structure, T: Structure, perm: Array | None, grad: Array, out: Array, plus: Array,
        of_rows: Array, of_edges: bool, *args: Any, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        h, source, target, bias, edges, loop_edges, *options = args
        if copies:
            h, source, target, bias, grad = map(m.contiguous, (h, source, target, bias, grad))
            edges, loop_edges = m.factors(edges), m.factors(loop_edges)
        left, right, result, with_plus, begin = map(m.address, (source, target, out, plus, of_rows))
        added = 0 if bias is None else m.address(bias)
        items = h.shape[0] * heads
        el = begin + 4 * items * of_sums
        places = el, el + items * of_sums, result, with_plus, begin, added, 0
        more = edges, loop_edges, *options
        dh, _room, slices, d_loops, d_edges, stream, addresses = _gradients(
            m, (S, T, perm), h, sizes, grad, places, more, of_edges, narrow
        )
        if not items * feat:
            return dh, m.zeros((count, *source.shape), sums, h), d_loops, d_edges
        features, into, of_result, stats = addresses
        of_result = of_result if added else 0
        d_el = stats + 4 * items * of_sums
        alignment = features | into | left | right | of_result | feat * size
        vector = 1 if alignment % 16 else 16 // size
        case = device, dtype, h.shape[0], heads, feat, slices, vector
        blocks, launch = through_launch(*case)
        partial = m.empty((blocks, count, *source.shape), sums, h)
        read = features, into, d_el, d_el + items * slices * of_sums, left, right, of_result
        launch(stream, *read, into, m.address(partial))
        return dh, partial.sum(0), d_loops, d_edges

    return run


def _gradients(
    m: Memory, sides: tuple[Structure, Structure, Array | None], h: Array, sizes: tuple[Any, ...],
    grad: Array, places: Sequence[int], more: tuple[Any, ...], of_edges: bool, narrow: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Launch gradients of the features and of all scores.

    ``sizes`` are device, dtype, heads and features of each.  ``places`` are addresses: of scores of
    both ends, the fields of ``Forward``, the bias and the gradient of targets' scores; ``more`` are
    ``GatArguments`` behind the scores of both ends.  Gradients of these lie in one array, behind 4
    values of each row and head: of sources by slice, how many is returned too, and those of
    targets; if these have an address, those of sources in an own array.
    """
    (S, T, perm), (device, dtype, heads, feat) = sides, sizes
    sums = dtype if dtype == "float64" else "float32"
    el, er, out, plus, statistics, bias, d_er = places
    edges, loop_edges, seed, slope, share, loops = more
    d_loops = m.empty((0,) if loop_edges is None else loop_edges.shape, sums, h)
    d_edges = m.empty((0,) if edges is None or not of_edges else edges.shape, sums, h)
    dh, n_targets, n_sources = m.empty(h.shape, dtype, h), S.n_rows * heads, T.n_rows * heads
    gathered, stream, size = rounded(grad) if narrow else grad, m.stream(h), ITEMSIZE[sums]
    X, of_result, features, into, scores, of_loops, d_of_loops = m.pointers(
        gathered, grad, h, dh, edges, loop_edges, d_loops
    )
    alignment = (X | (features | into) >> narrow) % 16
    slices = row_shape(NARROW if narrow else dtype, heads, feat, alignment)[2]
    of_sources = n_sources * slices
    apart = m.empty((of_sources,), sums, h) if d_er else None
    room = m.empty((4 * n_targets + (0 if d_er else of_sources + n_targets),), sums, h)
    stats = m.address(room)
    d_el = m.address(apart) if d_er else stats + 4 * n_targets * size
    d_er = d_er or d_el + of_sources * size
    drop = dropping_of(m, share, seed) if share else _NOTHING_DROPPED
    numbers_of = drop.seed_at, drop.seed, S.nnz if loops else -1, slope, drop.scale, drop.below
    if n_targets:
        if not loops:
            zero(m, None if loop_edges is None else d_loops)
        launch = stats_launch(device, dtype, n_targets, heads, feat)
        read = out, plus, bias, of_result, features, el, er, 0, of_loops, *numbers_of
        own = d_of_loops if loops and loop_edges is not None else 0
        launch(stream, *read, statistics, stats, d_er, own)
    if not feat or not (T.nnz or loops):
        zero(m, dh)
        if of_sources:
            fill(d_el, of_sources * size, 0, stream)
    elif n_sources:
        scores = scores if T.nnz else 0
        case = dtype, heads, feat, alignment, True, narrow
        flags = int(drop.below > 0), ANYTHING if loops or scores else NOTHING
        written = stats, features, into, d_el, heads, feat, slices
        params = el, 0, scores, of_loops, *numbers_of, *written
        at = m.pointer(perm) if drop.below or scores else 0
        _launch(T, m, h, (device, *case, flags), X, at, params, stream)
    if edges is not None and of_edges and S.nnz and heads:
        _of_edges(S, m, grad, h, heads, (el, edges, stats), drop, (slope, loops), d_edges)
    addresses = features, into, of_result, stats
    return dh, room if apart is None else apart, slices, d_loops, d_edges, stream, addresses


def _of_edges(
    S: Structure, m: Memory, grad: Array, h: Array, heads: int, scores: tuple[Any, ...],
    drop: Dropping, options: tuple[float, bool], d_edges: Array,
) -> None:  # fmt: skip
    """Launch the gradient of ``edges``, from products rounded to the dtype of the features."""
    dots, (slope, loops), (el, edges, stats) = edges_cuda.sddmm(S, grad, h), options, scores
    layout, types = f"9PQqii2{FLOATS[sums_dtype(h)]}I", (m.dtype(h), S.index_dtype)
    kernel = jit.load(ENTRIES, "gat_edge_gradient", layout, types)
    arrays = S.indptr, S.indices, S.start, el, m.pointer(edges), stats, *m.pointers(dots, d_edges)
    numbers = drop.seed_at, drop.seed, S.nnz, heads, int(loops), slope, drop.scale, drop.below
    args: tuple[Any, ...] = *arrays, *numbers
    kernel(S.blocks, args, threads=THREADS, stream=m.stream(h))
