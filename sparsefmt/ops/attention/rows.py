"""Rows of attention in the table of operations: arguments, results, prices and kernels."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ...formats.arrays import Array
from ...formats.compressed import CSR
from ..engine.call import convert_to_csr
from ..engine.structure import Structure
from ..engine.table import Arg, Kernel, Op, Price, deferred, unchecked
from ..matmul.api import ROUNDED, against_rounding
from .gat import cuda as gat
from .gat import small
from .pairwise import cuda as pairwise
from .score import GatArguments, PairwiseArguments, heads_and_feat, heads_of, shape_of, sums_dtype

#: Shape and dtype of each result, as ``Op.results`` returns them.
Shapes = tuple[tuple[tuple[int, ...], Any], ...]


def _row(
    name: str, arguments: tuple[Arg, ...], results: Callable[..., Any],
    launcher: Callable[..., Any], module: str, *, kernels: tuple[Kernel, ...] = (),
    rounds: Callable[..., list[str]] | None = None, converts: bool = True, **facts: Any,
) -> Op:  # fmt: skip
    """Make a row: its kernels are the launcher, those listed, and the module's loops of that name.

    Where ``rounds`` lists what is against it, rows that entries gather are rounded.
    """
    rounded = partial(launcher, narrow=True)
    loops = deferred(f"{__package__}.{module}", getattr(launcher, "__name__", name))
    of_row = (
        *(Kernel(f"{name}_csr_rounded", rounded, ("csr",), "gpu", rounds, note=ROUNDED),)
        * (rounds is not None),
        Kernel(f"{name}_csr_balanced", launcher, ("csr",), "gpu"),
        *kernels,
        Kernel(f"{name}_csr_numba", loops, ("csr",), "cpu"),
        *(convert_to_csr(name),) * converts,
    )
    return Op(name, arguments, results, of_row, **facts)


def _scores(name: str, rows: Any, like: str, also: str = "", **facts: Any) -> Arg:
    """Make an argument that has a score of each head."""
    return Arg(name, rows, (1, 2), like, "heads", score=True, also=(also,) * bool(also), **facts)


def _vectors(name: str, like: str, **facts: Any) -> Arg:
    """Make an argument that has a vector of each head."""
    return Arg(name, "heads", (3,), like, **facts)


def _gradient(like: str, saved: str) -> tuple[Arg, ...]:
    """Return the arguments that rows of gradients begin with."""
    return Arg("grad", "rows", (2, 3), like), *unchecked(f"{saved}, bool of_edges")


def _result(S: Structure, x: Array, *_: Any) -> Shapes:
    """Return shape and dtype of a result with a row of ``x`` for each row of the structure."""
    return (((S.n_rows, *x.shape[1:]), x),)


# Scores that are sums of a number of each end

_H, _BIAS = Arg("h", "cols", (2, 3), also=("H",)), _vectors("bias", "h", optional=True)
_OPTIONS = (
    _scores("edges", "entries", "h", "edge_scores", optional=True),
    _scores("loop_edges", "vertices", "h", "loop_scores", optional=True),
    *unchecked("Tensor? seed, float slope, float dropout, bool loops"),
)
_GAT = _H, _scores("el", "cols", "h"), _scores("er", "rows", "h"), *_OPTIONS
_OF_VECTORS = _H, _vectors("source", "h"), _vectors("target", "h"), _BIAS, *_OPTIONS
_SAVED = _gradient("h", "Tensor out, Tensor plus, Tensor statistics")


def _gat_results(S: Structure, h: Array, *_: Any) -> Shapes:
    """Return shapes and dtypes of result, its positive part, and statistics of rows and heads."""
    (out,) = _result(S, h)
    return out, out, ((S.n_rows, heads_and_feat(h)[0], 4), sums_dtype(h))


def _gat_gradients(S: Structure, *args: Any) -> Shapes:
    """Return shapes and dtypes of the gradients of features and of all scores."""
    of_edges, a = args[6], GatArguments(*args[7:])
    terms = (a.el, True), (a.er, True), (a.loop_edges, True), (a.edges, of_edges)
    return (a.h.shape, a.h), *((shape_of(*term), sums_dtype(a.h)) for term in terms)


def _results_of_vectors(S: Structure, h: Array, source: Array, *_: Any) -> Shapes:
    """Return shapes and dtypes of result, its positive part, and what is saved for backward."""
    return (h.shape, h), (h.shape, h), ((6 * h.shape[0] * heads_of(source)[0],), sums_dtype(h))


def _gradients_of_vectors(S: Structure, *args: Any) -> Shapes:
    """Return shapes and dtypes of gradients: of features, of vectors and bias, of scores."""
    of_edges, h, source, _, bias, edges, loop_edges, *_ = args[6:]
    vectors = (2 if bias is None else 3), *source.shape
    shapes = vectors, shape_of(loop_edges), shape_of(edges, of_edges)
    return (h.shape, h), *((shape, sums_dtype(h)) for shape in shapes)


def _gat_row(
    name: str, arguments: tuple[Arg, ...], results: Callable[..., Any], sizes: Callable[..., Any],
    gathered: int | None = None, **facts: Any,
) -> Op:  # fmt: skip
    """Make a row of GAT: entries gather rows of ``args[gathered]``, and scores of each head.

    ``sizes`` are heads and features of a call, of which small ones need no numba.  Gradients go
    over the transpose too, where entries read three numbers more of each head.
    """

    def refuses(A: CSR, *args: Any, **_: Any) -> list[str]:
        return small.reasons_against(A, *sizes(*args))

    def rounds(A: Structure, *args: Any, precision: str | None = None, **_: Any) -> list[str]:
        return against_rounding(A.nnz, args[gathered or 0], precision)

    def price(S: Structure, *args: Any) -> Price:
        x = args[gathered or 0]
        heads, feat = heads_and_feat(x)
        each = 4 + 4 * heads + 12 * heads * ("structures" in facts)
        moved = (S.nnz + S.n_rows) * heads * feat * x.itemsize + S.nnz * each + 8 * S.n_rows * heads
        return Price(moved, S.nnz * heads * (2 * feat + 8))

    of_numpy = Kernel(f"{name}_csr_scipy", getattr(small, name), ("csr",), "cpu", refuses)
    facts |= {"functions": (name,), "entries": ("edges",)} if facts.get("converts", True) else {}
    facts |= {} if gathered is None else {"rounds": rounds, "price": price}
    launcher = getattr(gat, name)
    return _row(name, arguments, results, launcher, "gat.loops", kernels=(of_numpy,), **facts)


_OWN: dict[str, Any] = {"converts": False}
_FORWARD: dict[str, Any] = {
    "sizes": lambda h, *_: heads_and_feat(h),
    "gathered": 0,
    "narrowed": ("h",),
}
_OF_GRADIENTS: dict[str, Any] = {"gathered": 2, "structures": 2}
_VECTORS: dict[str, Any] = {
    "sizes": lambda h, source, *_: heads_of(source),
    "gathered": 0,
    "narrowed": ("h", "source", "target", "bias"),
    **_OWN,
}
GAT = _gat_row("gat", _GAT, _result, **_FORWARD)
GAT_WITH_STATISTICS = _gat_row(
    *("gat_with_statistics", _GAT, _gat_results), returns=3, **(_FORWARD | _OWN)
)
GAT_BACKWARD = _gat_row(
    *("gat_backward", (*_SAVED, *_GAT), _gat_gradients),
    sizes=lambda T, perm, grad, *_: heads_and_feat(grad),
    returns=5,
    entry_results=(4,),
    **_OF_GRADIENTS,
)
GAT_OF_VECTORS = _gat_row(
    *("gat_of_vectors", _OF_VECTORS, lambda S, h, *_: ((h.shape, h),)), **_VECTORS
)
GAT_OF_VECTORS_WITH_STATISTICS = _gat_row(
    *("gat_of_vectors_with_statistics", _OF_VECTORS, _results_of_vectors), returns=3, **_VECTORS
)
GAT_OF_VECTORS_BACKWARD = _gat_row(
    *("gat_of_vectors_backward", (*_SAVED, *_OF_VECTORS), _gradients_of_vectors),
    sizes=lambda *args: heads_of(args[8]),
    returns=4,
    **(_OF_GRADIENTS | _OWN),
)
GAT_ATTENTION = _gat_row(
    "gat_attention",
    (
        Arg("el", "cols", (1, 2), score=True),
        Arg("er", "rows", (1, 2), "el", score=True),
        Arg("edges", "entries", (1, 2), "el", score=True, optional=True, also=("edge_scores",)),
        *unchecked("float slope, bool loops"),
    ),
    lambda S, el, *_: (((S.nnz, *el.shape[1:]), sums_dtype(el)),),
    sizes=lambda el, *_: heads_and_feat(el[..., None]),
    entry_results=(0,),
    library=False,
)

# Scores of features of both ends


def _pairs(*, additive: bool = False) -> tuple[Arg, ...]:
    """Return the arguments of pairwise attention, with ``att`` where scores must be additive."""
    return (
        Arg("queries", "rows", (2, 3), "keys", also=("right",)),
        Arg("keys", "cols", (2, 3), also=("left",)),
        Arg("values", "cols", (2, 3), "keys", optional=True),
        _vectors("att", "keys", optional=not additive),
        _scores("edges", "entries", "keys", "edge_scores", optional=True),
        *unchecked("Tensor? seed, float slope, float scale, float dropout, bool loops"),
    )


def _pairwise_results(S: Structure, queries: Array, keys: Array, *_: Any) -> Shapes:
    """Return shapes and dtypes of the result, and of the statistics of each row and head."""
    statistics = (S.n_rows, heads_and_feat(keys)[0], 2), sums_dtype(keys)
    return *_result(S, keys), statistics


def _pairwise_gradients(S: Structure, *args: Any) -> Shapes:
    """Return shape and dtype of each gradient; empty for an argument that is None."""
    of_edges, a = args[5], PairwiseArguments(*args[6:])
    shapes = shape_of(a.att), shape_of(a.edges, of_edges)
    features = ((shape_of(x), a.keys) for x in (a.queries, a.keys, a.values))
    return *features, *((shape, sums_dtype(a.keys)) for shape in shapes)


def _pairwise_price(S: Structure, *args: Any, passes: int = 1) -> Price:
    """Price a call: every entry reads a row of keys and of values; queries and results go once.

    In the other two passes, of the gradients, its score is made again at both its ends.
    """
    keys, values = args[1:3]
    row, gathered = prod(keys.shape[1:]), passes - (values is None)
    moved = (S.nnz * (gathered + 1) + (passes + 1) * S.n_rows) * row * keys.itemsize
    of_scores = 4 * passes * S.nnz + 4 * (passes + 1) * S.n_rows
    return Price(moved + of_scores, 4 * passes * S.nnz * row)


def _pairwise_row(
    name: str, results: Callable[..., Any] = lambda S, queries, keys, *_: _result(S, keys),
    launcher: Callable[..., Any] = pairwise.pairwise, *, saved: tuple[Arg, ...] = (),
    additive: bool = False, **facts: Any,
) -> Op:  # fmt: skip
    """Make a row; its arguments begin with what is saved for gradients."""
    facts.setdefault("narrowed", ("queries", "keys", "values"))
    facts.setdefault("price", _pairwise_price)
    args = *saved, *_pairs(additive=additive)
    return _row(name, args, results, launcher, "pairwise.loops", entries=("edges",), **facts)


def _pairwise_gradients_row(name: str, **facts: Any) -> Op:
    """Make the row of the gradients."""
    facts |= {"returns": 5, "structures": 2, "entry_results": (4,), "narrowed": None}
    facts["saved"] = _gradient("keys", "Tensor out, Tensor statistics")
    facts["price"] = lambda S, *args: _pairwise_price(S, *args[6:], passes=3)
    return _pairwise_row(name, _pairwise_gradients, pairwise.pairwise_backward, **facts)


def _public(name: str, **facts: Any) -> tuple[Op, Op]:
    """Make the rows of a function and its gradient; torch has one op of all, ``attend``."""
    facts["library"], backward = False, f"{name}_backward"
    forward = _pairwise_row(name, functions=(name,), **facts)
    return forward, _pairwise_gradients_row(backward, functions=(backward,), **facts)


GATV2, GATV2_BACKWARD = _public("gatv2", additive=True)
DOT_ATTENTION, DOT_ATTENTION_BACKWARD = _public("dot_attention")
ATTEND = _pairwise_row("attend")
ATTEND_WITH_STATISTICS = _pairwise_row(
    *("attend_with_statistics", _pairwise_results, pairwise.pairwise_with_statistics), returns=2
)
ATTEND_BACKWARD = _pairwise_gradients_row("attend_backward")
