"""Prepare graph attention and its gradients, for arrays of any library with a ``Memory``.

Shapes are as in ``score``.  With ``loops`` each row has a virtual loop, which is entry nnz + row,
and stored ones are left out.  Gradients are made of what each target's entries read, over the
transpose for what sources have; scores that vectors made take one launch before and one behind.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ....formats.arrays import Array
from ...edges.cuda import sddmm
from ...engine import jit
from ...engine.call import Launcher, Prepared, Result, call, launcher, with_options, zeroed
from ...engine.jit import ITEMSIZE, filling
from ...engine.memory import Memory, Scalar
from ...engine.structure import Structure
from ...matmul.cuda import LEAST_GATHERS, NARROW, rounded
from ..score import Dropping, GatArguments, VectorArguments, heads_and_feat, heads_of
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

#: An argument of a launch as ``Prepared`` has it: a name, a part of an array, or a number.
Argument: TypeAlias = str | tuple[str, int] | float
Launches: TypeAlias = list[tuple[Callable[..., None], tuple[Argument, ...]]]


def sizes(S: Structure) -> tuple[int, ...]:
    """Count the rows and columns, and compare the entries with the least that launches look for."""
    gathers = S.nnz // LEAST_GATHERS
    return S.n_rows, S.n_cols, S.nnz > 0, gathers >= S.n_rows, gathers >= S.n_cols


def dropping_of(share: float, seed: Array | Scalar | None) -> Dropping:
    """Drop that share, 0 to less than 1, by the argument ``seed``: a number, or on the device."""
    below = min(round(share * 2**32), 2**32 - 1)
    if not below:
        return Dropping()
    if hasattr(seed, "dtype"):
        return Dropping(0, below, 1 / (1 - share), "seed")
    assert seed is None or type(seed) is Scalar  # of another int kernels would see 0
    return Dropping("seed", below, 1 / (1 - share))


def result_like(x: Array | None, dtype: str, rows: str = "n_rows") -> Result:
    """Return a result of rows as an array has them; an empty one for None."""
    return Result((0,), dtype, "") if x is None else Result(tuple(x.shape[1:]), dtype, rows)


def padded(nbytes: int) -> int:
    """Round up bytes of a workspace, so that what follows them is aligned."""
    return -(-nbytes // 256) * 256


def adding_up(place: int, axis: int) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Make a function that adds up the parts of the result at that place."""
    return lambda results: (*results[:place], results[place].sum(axis), *results[place + 1 :])


def forward_first(
    forward: Launcher, backward: Launcher, count: int, S: Structure, T: Any, perm: Array,
    grad: Array, *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """Run gradients on the ``count`` results of forward that are made anew."""
    saved = call(forward, S, *args[count + 1 :], **options)
    return call(backward, S, T, perm, grad, *saved, *args[count:], **options)


def _round_first(launcher: Launcher, place: int, S: Structure, *args: Any, **options: Any) -> Any:
    """Round the argument at that place, and run the launcher, whose entries gather the result."""
    return call(launcher, S, *args, **options | {"narrow": rounded(args[place])})


class Case(NamedTuple):
    """What all launches of a case depend on, beside the structure."""

    device: int
    dtype: str
    heads: int
    feat: int
    bias: str  #: the name of the array, or "" for none
    edges: str  #: likewise
    loop_edges: str
    drop: Dropping
    slope: float
    loops: bool
    narrow: bool  #: whether rows that entries gather are rounded

    @property
    def sums(self) -> str:
        """Return the dtype in which sums run."""
        return "float64" if self.dtype == "float64" else "float32"

    def scores(self, el: Argument, er: Argument, edges: str) -> tuple[Argument, ...]:
        """Return the fields of ``Scores`` in gat.cu."""
        drop, first_loop = self.drop, "nnz" if self.loops else -1
        seeds = drop.seed_at, drop.seed, first_loop, self.slope
        return el, er, edges, self.loop_edges, *seeds, drop.scale, drop.below


def _case_of(
    m: Memory, args: GatArguments | VectorArguments, shape: tuple[int, int], narrow: bool = False
) -> Case:
    """Read the case of a call from its arguments; ``shape`` are heads and features."""
    bias = getattr(args, "bias", None) if shape[1] else None
    arrays = {"bias": bias, "edges": args.edges, "loop_edges": args.loop_edges}
    names: Any = ["" if array is None else name for name, array in arrays.items()]
    numbers: Any = dropping_of(args.dropout, args.seed), args.slope, args.loops, narrow is not False
    return Case(m.device(args.h), m.dtype(args.h), *shape, *names, *numbers)


# The product


def _prepare(
    S: Structure, m: Memory, *arguments: Any, kind: type[GatArguments | VectorArguments],
    train: bool, out: Array | None = None, narrow: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Prepare ``out[i, k] = sum of M[e, k] P[e, k] h[j, k]``, of arguments of that kind.

    To ``train``, what its gradient needs too, even without features: ``Forward.plus``, and 4
    statistics of each row and head; where vectors make the scores, in one array with those of
    sources and of targets.  ``narrow`` rounds the rows that entries gather, of float32, to bfloat16
    once, and is an array of them then: all else stays float32, here and in the gradients.
    """
    args: Any = kind(*arguments)
    of_vectors, h = kind is VectorArguments, args.h
    shape = heads_of(args.source) if of_vectors else heads_and_feat(h)
    case = _case_of(m, args, shape, narrow)
    items, size = S.n_rows * case.heads, ITEMSIZE[case.sums]
    results, plus, statistics = [result_like(h, case.dtype)], "", ""
    if train:
        saved = ((6 * items,), case.sums, "") if of_vectors else ((case.heads, 4), case.sums)
        results += result_like(h, case.dtype), Result(*saved)
        plus, statistics = "out_1", "out_2"
    some = case.feat or (train and not of_vectors)
    if not (items and some and (S.nnz or case.loops or case.bias)):
        return zeroed(S, results)
    if narrow is True:
        return partial(_round_first, _FORWARD[kind, train], 0)
    room, scores = 0, Launches()
    el: Argument = "el"
    er: Argument = "er"
    if of_vectors:
        array, begin, room = (
            ("out_2", 4, 0) if train else ("workspace", 0, padded(2 * items * size))
        )
        el, er = ((array, (begin + end) * items * size) for end in (0, 1))
        vector = _vector(m, case, h, args.source, args.target)
        launch = scores_launch(case.device, case.dtype, S.n_rows, *shape, vector)
        scores.append((launch, ("h", "source", "target", el, er)))
    arrays = h, out, getattr(args, "bias", None), narrow
    launches, nbytes = _product(S, m, case, *arrays, el, er, plus, statistics, room)
    return Prepared((*scores, *launches), tuple(results), (0, room + nbytes))


_OF_ENDS: Any = {"sizes": sizes, "in_place": (), "names": GatArguments._fields}
_OF_VECTORS: Any = _OF_ENDS | {"names": VectorArguments._fields}
_KINDS = (("gat", GatArguments, _OF_ENDS), ("gat_of_vectors", VectorArguments, _OF_VECTORS))
_FORWARD = {
    (kind, train): Launcher(
        with_options(f"{name}{'_with_statistics' * train}", _prepare, kind=kind, train=train),
        **facts,
    )
    for name, kind, facts in _KINDS
    for train in (False, True)
}
gat, gat_with_statistics, gat_of_vectors, gat_of_vectors_with_statistics = _FORWARD.values()


def _product(
    S: Structure, m: Memory, case: Case, h: Array | None, out: Array | None, bias: Array | None,
    narrow: Any, el: Argument, er: Argument, plus: str, statistics: Argument, at: int = 0,
) -> tuple[Launches, int]:  # fmt: skip
    """Prepare the product; ``at`` are bytes before its workspace, whose own are counted.

    Entries gather rows of ``h`` or, if rounded, of ``narrow``; of None nothing but scores.
    """
    gathered, edges = (narrow if case.narrow else h), case.edges if S.nnz else ""
    alignment = (m.pointer(gathered) | (m.pointer(out) | m.pointer(bias)) >> case.narrow) % 16
    extra = ANYTHING if case.loops or edges else ONLY_BIAS if case.bias else NOTHING
    X = el if not case.feat else "narrow" if case.narrow else "h"
    params = *case.scores(el, er, edges), "out" * (h is not None), plus, case.bias, statistics
    params = *params, case.heads, case.feat
    return _rows(S, "", case, alignment * (case.feat > 0), extra, "", X, params, at)


def _rows(
    S: Structure, side: str, case: Case, alignment: int, extra: int, perm: str, X: Argument,
    params: tuple[Argument, ...], at: int,
) -> tuple[Launches, int]:  # fmt: skip
    """Prepare ``gat_balanced``, and ``gat_cut_rows`` where blocks share rows.

    ``side`` is "t_" for gradients over the transpose, whose entries have the numbers ``perm``.
    Entries gather rows of ``X``.  Returns the bytes of the workspace, too, which begins ``at``.
    """
    names = "indptr", "indices", "start", "slot", "cut"
    indptr, indices, start, slot, cut = (f"{side}{name}" for name in names)
    nnz: Argument = "nnz"
    if not S.nnz:  # one entry, of a column that exists, whose weight is 0
        indices, perm, nnz = indptr, "", 1
    sizes_of = case.device, S.index_dtype, S.blocks, S.n_cuts, case.dtype, case.heads, case.feat
    flags = int(case.drop.below > 0), extra
    nbytes, launch, add_up = row_launches(*sizes_of, alignment, side != "", case.narrow, flags)
    sums: Argument = ("workspace", at) if nbytes else ""
    launches: Launches = [(launch, (indptr, indices, start, slot, perm, X, *params, sums, nnz))]
    if add_up is not None:
        launches.append((add_up, (start, cut, *params, sums)))
    return launches, nbytes


@launcher(sizes=sizes, in_place=())
def gat_attention(
    S: Structure, m: Memory, el: Array, er: Array, edges: Array | None, slope: float, loops: bool,
    *, out: Array | None = None,
) -> Prepared:  # fmt: skip
    """Prepare ``P[e, k]`` before dropout, 0 at loops that are left out."""
    args = GatArguments(el, el, er, edges, slope=slope, loops=loops)
    case = _case_of(m, args, (el.shape[1] if el.ndim == 2 else 1, 0))
    results = (result_like(el, case.dtype, "nnz"),)
    if not (S.nnz and case.heads):
        return Prepared((), results)
    # The statistics come with a product, here of no features.
    statistics = ("workspace", 0)
    room = padded(4 * S.n_rows * case.heads * ITEMSIZE[case.sums])
    ends = "el", "er", "", statistics, room
    launches, nbytes = _product(S, m, case, None, None, None, False, *ends)
    layout, types = f"8Pqii{FLOATS[case.dtype]}", (case.dtype, S.index_dtype)
    kernel = jit.load(ENTRIES, "gat_attention", layout, types)
    launch = kernel.ready(S.blocks, after=(case.heads, int(loops), slope), threads=THREADS)  # type: ignore[arg-type]
    arrays = "indptr", "indices", "start", "el", "er", "edges", statistics, "out", "nnz"
    return Prepared((*launches, (launch, arrays)), results, (0, room + nbytes))


def _vector(m: Memory, case: Case, *arrays: Array | None) -> int:
    """Count the values of a load, of rows that begin and end as those of the arrays."""
    size = ITEMSIZE[case.dtype]
    places = *m.pointers(*arrays), case.feat * size
    return 1 if any(place % 16 for place in places) else 16 // size


# Gradients


def _prepare_gradients(
    S: Structure, m: Memory, T: Structure, grad: Array, result: Array | None, plus: Array | None,
    statistics: Array | None, of_edges: bool, *arguments: Any,
    kind: type[GatArguments | VectorArguments], narrow: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Prepare gradients of ``h, el, er, loop_edges, edges``: empty if not given or not wanted.

    Where vectors make the scores, that of ``source, target, bias``, in one, is in the place of
    those of ``el, er``.  What is not given of the forward pass is made anew.
    """
    if statistics is None:
        return partial(forward_first, gat_with_statistics, gat_backward, 3)
    args: Any = kind(*arguments)
    of_vectors, h = kind is VectorArguments, args.h
    case = _case_of(m, args, heads_of(args.source) if of_vectors else heads_and_feat(h), narrow)
    if run := _unprepared(_BACKWARD[kind], S, case, of_edges, narrow):
        return run
    gathered, dtype = (narrow, NARROW) if case.narrow else (grad, case.dtype)
    alignment = (m.pointer(gathered) | m.pointer(h) >> case.narrow) % 16
    slices = row_shape(dtype, case.heads, case.feat, alignment)[2]
    items, sums = S.n_rows * case.heads, case.sums
    edges, of_h = args.edges if of_edges else None, result_like(h, case.dtype, "n_cols")
    results = [of_h, result_like(args.loop_edges, sums), result_like(edges, sums, "nnz")]
    gradients, size = (S, T, m, case, grad, h, slices, alignment), ITEMSIZE[sums]
    if not of_vectors:
        of_sources = Result((*args.el.shape[1:], *(slices,) * (slices > 1)), sums, "n_cols")
        results[1:1] = of_sources, result_like(args.er, sums)
        written: Any = "out_1", "out_2", "out_3", "out_4" * of_edges
        ends = ("el", "er", "statistics"), written, padded(4 * items * size)
        launches, nbytes = _gradients(*gradients, *ends)
        finish = adding_up(1, -1) if slices > 1 else tuple
        return Prepared(tuple(launches), tuple(results), (0, nbytes), finish)
    vectors = 2 if args.bias is None else 3, *args.source.shape
    results.insert(1, Result(vectors, sums, ""))
    if not items * case.feat:  # no score changes anything
        return zeroed(S, results)
    d_el, d_er = ("workspace", 4 * items * size), ("workspace", (4 + slices) * items * size)
    el, er = (("statistics", (4 + end) * items * size) for end in (0, 1))
    written, room = (d_el, d_er, "out_2", "out_3" * of_edges), padded((5 + slices) * items * size)
    launches, nbytes = _gradients(*gradients, (el, er, "statistics"), written, room)
    of_bias, of_result = (grad, "grad") if case.bias else (None, "")
    vector = _vector(m, case, h, args.source, args.target, of_bias)
    of_case = case.device, case.dtype, S.n_rows, case.heads, case.feat, slices, vector
    blocks, launch = through_launch(*of_case)
    arrays = "h", "out", d_el, d_er, "source", "target", of_result, "out", "out_1"
    results[1] = Result((blocks, *vectors), sums, "")  # added up over the blocks
    return Prepared((*launches, (launch, arrays)), tuple(results), (0, nbytes), adding_up(1, 0))


_BACKWARD = {
    kind: Launcher(
        with_options(f"{name}_backward", _prepare_gradients, kind=kind), structures=2, **facts
    )
    for name, kind, facts in _KINDS
}
gat_backward, gat_of_vectors_backward = _BACKWARD.values()


def _unprepared(
    launcher: Launcher, S: Structure, case: Case, of_edges: bool, narrow: Any
) -> Callable[..., Any] | None:
    """Return what runs a case whose launches cannot be prepared for all of its calls, or None."""
    if narrow is True:
        return partial(_round_first, launcher, 2)
    if case.edges and of_edges and S.shared is not None:  # products depend on the number of entries
        return lambda S, *args, **options: call(launcher, S.prepared(replace), *args, **options)
    return None


def _gradients(
    S: Structure, T: Structure, m: Memory, case: Case, grad: Array, h: Array, slices: int,
    alignment: int, read: tuple[Argument, ...], written: tuple[Any, ...], at: int,
) -> tuple[Launches, int]:  # fmt: skip
    """Prepare gradients of the features, "out", and of all scores.

    Those of scores are ``written``: of sources, targets, loops and entries, "" for none of these.
    ``read`` are scores of both ends and forward's statistics.  The workspace begins with 4 values
    of each row and head; ``at`` are the bytes that are taken of it, and all are returned, too.
    """
    (el, er, statistics), (d_el, d_er, d_loops, d_edges) = read, written
    heads, feat, stats = case.heads, case.feat, ("workspace", 0)
    size, launches = ITEMSIZE[case.sums], Launches()
    n_targets, n_sources = S.n_rows * heads, T.n_rows * heads
    if n_targets:
        if case.loop_edges and not case.loops:
            launches.append((filling(n_targets * size), (d_loops,)))
        launch = stats_launch(case.device, case.dtype, n_targets, heads, feat)
        arrays = "result", "plus", case.bias, "grad", "h", *case.scores(el, er, "")
        own = d_loops if case.loops and case.loop_edges else ""
        launches.append((launch, (*arrays, statistics, stats, d_er, own)))
    nbytes = 0
    if not feat or not (T.nnz or case.loops):
        of_h = n_sources * feat * ITEMSIZE[case.dtype], "out"
        fillings = of_h, (n_sources * slices * size, d_el)
        launches += [(filling(n), (array,)) for n, array in fillings if n]
    elif n_sources:
        edges = case.edges if T.nnz else ""
        params = *case.scores(el, "", edges), stats, "h", "out", d_el, heads, feat, slices
        perm = "perm" if case.drop.below or edges else ""
        extra = ANYTHING if case.loops or edges else NOTHING
        X = "narrow" if case.narrow else "grad"
        more, nbytes = _rows(T, "t_", case, alignment, extra, perm, X, params, at)
        launches += more
    if case.edges and d_edges and S.nnz and heads:
        at = padded(at + nbytes)
        launches += _of_edges(S, m, case, grad, h, el, d_edges, ("workspace", at))
        nbytes = S.nnz * heads * ITEMSIZE[case.dtype]
    return launches, at + nbytes


def _of_edges(
    S: Structure, m: Memory, case: Case, grad: Array, h: Array, el: Argument, d_edges: str,
    dots: Argument,
) -> Launches:  # fmt: skip
    """Prepare the gradient of ``edges``, from products rounded to the dtype of the features."""
    of_products = {"indptr": "indptr", "indices": "indices", "start": "start"}
    names: dict[str, Argument] = {**of_products, "x": "grad", "y": "h", "out": dots}
    products = sddmm.prepare(S, m, grad, h).launches
    launches = [(launch, tuple(names.get(arg, "") for arg in args)) for launch, args in products]
    layout, types = f"9PQqii2{FLOATS[case.sums]}I", (case.dtype, S.index_dtype)
    kernel, drop = jit.load(ENTRIES, "gat_edge_gradient", layout, types), case.drop
    after = case.heads, int(case.loops), case.slope, drop.scale, drop.below
    launch = kernel.ready(S.blocks, after=after, threads=THREADS)  # type: ignore[arg-type]
    read = "indptr", "indices", "start", el, "edges", ("workspace", 0), dots
    return [*launches, (launch, (*read, d_edges, drop.seed_at, drop.seed, "nnz"))]
