"""Rows of attention in the table of operations: arguments, results, prices and kernels."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ..engine.call import convert_to_csr
from ..engine.table import Arg, Kernel, Op, Price, deferred, unchecked
from ..matmul.api import ROUNDED, against_rounding
from .gat import cuda as gat
from .gat import small
from .pairwise import cuda as pairwise
from .score import GatArguments, PairwiseArguments, heads_and_feat, heads_of, shape_of, sums_dtype


def _row(
    name: str, arguments: tuple[Arg, ...], results: Any, launcher: Callable[..., Any],
    module: str, *, kernels: tuple[Kernel, ...] = (), rounds: Any = None, converts: bool = True,
    **facts: Any,
) -> Op:  # fmt: skip
    """Make a row: its kernels are the launcher, those given, and the module's loops of that name.

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
    return Arg(name, rows, (1, 2), like, "heads", score=True, also=(also,) * bool(also), **facts)


def _vectors(name: str, like: str, **facts: Any) -> Arg:
    return Arg(name, "heads", (3,), like, **facts)


def _gradient(like: str, saved: str) -> tuple[Arg, ...]:
    """Return the arguments that rows of gradients begin with."""
    return Arg("grad", "rows", (2, 3), like), *unchecked(f"{saved}, bool of_edges")


def _result(S: Any, _: Any, x: Any, *__: Any) -> tuple[Any, ...]:
    """Return shape and dtype of the result; second of the arguments are the sources' features."""
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


def _gat_results(S: Any, bias: Any, h: Any, *_: Any) -> tuple[Any, ...]:
    (out,) = _result(S, bias, h)
    return out, out, ((S.n_rows, heads_and_feat(h)[0], 4), sums_dtype(h))


def _gat_gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, plus: Any, statistics: Any, of_edges: bool,
    *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    a = GatArguments(*arguments)
    shapes = a.el.shape, a.er.shape, shape_of(a.loop_edges), shape_of(a.edges, of_edges)
    return (a.h.shape, a.h), *((shape, sums_dtype(a.h)) for shape in shapes)


def _results_of_vectors(S: Any, h: Any, source: Any, *_: Any) -> tuple[Any, ...]:
    return (h.shape, h), (h.shape, h), ((6 * h.shape[0] * heads_of(source)[0],), sums_dtype(h))


def _gradients_of_vectors(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, plus: Any, kept: Any, of_edges: bool,
    *args: Any,
) -> tuple[Any, ...]:  # fmt: skip
    h, source, _, bias, edges, loop_edges, *_ = args
    vectors = (2 if bias is None else 3), *source.shape
    shapes = vectors, shape_of(loop_edges), shape_of(edges, of_edges)
    return (h.shape, h), *((shape, sums_dtype(h)) for shape in shapes)


def _gat_price(S: Any, h: Any) -> Price:
    """Price that every entry reads a row of the features and a score of each head."""
    heads, feat = heads_and_feat(h)
    row = heads * feat * h.itemsize
    scores = S.nnz * (4 + 4 * heads) + 8 * S.n_rows * heads
    return Price((S.nnz + S.n_rows) * row + scores, S.nnz * heads * (2 * feat + 8))


def _gat_price_of_gradients(S: Any, T: Any, perm: Any, grad: Any, *_: Any) -> Price:
    """Price as much again over the transpose, whose entries read four numbers of each head."""
    forward = _gat_price(S, grad)
    return Price(forward.bytes + 12 * S.nnz * heads_and_feat(grad)[0], forward.flops)


def _against_rounding(A: Any, bias: Any, h: Any, *_: Any, precision: Any = None, **__: Any) -> Any:
    """List the reasons against rounding the features."""
    return against_rounding(A.nnz, h, precision)


def _against_rounding_backward(
    A: Any, T: Any, perm: Any, grad: Any, *_: Any, precision: Any = None, **__: Any
) -> Any:
    """List the reasons against rounding the gradient of the result."""
    return against_rounding(A.nnz, grad, precision)


def _gat_row(
    name: str, arguments: tuple[Arg, ...], results: Any, sizes: Callable[..., Any], **facts: Any
) -> Op:
    """Make a row; ``sizes`` are heads and features of a call, of which small ones need no numba."""

    def refuses(A: Any, *args: Any, **_: Any) -> list[str]:
        return small.reasons_against(A, *sizes(*args))

    kernel = Kernel(f"{name}_csr_scipy", getattr(small, name), ("csr",), "cpu", refuses)
    facts |= {"functions": (name,), "entries": ("edges",)} if facts.get("converts", True) else {}
    launcher = getattr(gat, name)
    return _row(name, arguments, results, launcher, "gat.cpu", kernels=(kernel,), **facts)


_FORWARD: dict[str, Any] = {
    "sizes": lambda bias, h, *_: heads_and_feat(h),
    "price": lambda S, bias, h, *_: _gat_price(S, h),
    "rounds": _against_rounding,
    "narrowed": ("bias", "h"),
}
_BACKWARD: dict[str, Any] = {
    "price": _gat_price_of_gradients,
    "rounds": _against_rounding_backward,
    "structures": 2,
}
_VECTORS: dict[str, Any] = {
    "sizes": lambda h, source, *_: heads_of(source),
    "price": lambda S, h, *_: _gat_price(S, h),
    "rounds": lambda A, h, *_: against_rounding(A.nnz, h, None),
    "narrowed": ("h", "source", "target", "bias"),
    "converts": False,
}
GAT = _gat_row("gat", (_BIAS, *_GAT), _result, **_FORWARD)
GAT_WITH_STATISTICS = _gat_row(
    *("gat_with_statistics", (_BIAS, *_GAT), _gat_results), returns=3, converts=False, **_FORWARD
)
GAT_BACKWARD = _gat_row(
    *("gat_backward", (*_SAVED, *_GAT), _gat_gradients),
    sizes=lambda T, perm, grad, *_: heads_and_feat(grad),
    returns=5,
    entry_results=(4,),
    **_BACKWARD,
)
GAT_OF_VECTORS = _gat_row(
    "gat_of_vectors", _OF_VECTORS, lambda S, h, *_: ((h.shape, h),), **_VECTORS
)
GAT_OF_VECTORS_WITH_STATISTICS = _gat_row(
    *("gat_of_vectors_with_statistics", _OF_VECTORS, _results_of_vectors), returns=3, **_VECTORS
)
GAT_OF_VECTORS_BACKWARD = _gat_row(
    *("gat_of_vectors_backward", (*_SAVED, *_OF_VECTORS), _gradients_of_vectors),
    sizes=lambda *args: heads_of(args[8]),
    returns=4,
    converts=False,
    **_BACKWARD,
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


def _pairwise_results(S: Any, queries: Any, keys: Any, *_: Any) -> tuple[Any, ...]:
    statistics = (S.n_rows, heads_and_feat(keys)[0], 2), sums_dtype(keys)
    return *_result(S, queries, keys), statistics


def _pairwise_gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, statistics: Any, of_edges: bool,
    *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return shape and dtype of each gradient; empty for a tensor that is not given."""
    a = PairwiseArguments(*arguments)
    shapes = shape_of(a.att), shape_of(a.edges, of_edges)
    features = ((shape_of(x), a.keys) for x in (a.queries, a.keys, a.values))
    return *features, *((shape, sums_dtype(a.keys)) for shape in shapes)


def _pairwise_price(S: Any, queries: Any, keys: Any, values: Any, *_: Any) -> Price:
    """Price that every entry reads a row of keys and of values; queries and results go once."""
    row = prod(keys.shape[1:])
    gathered = 1 if values is None else 2
    moved = (S.nnz * gathered + 2 * S.n_rows) * row * keys.itemsize
    return Price(moved + 4 * S.nnz + 8 * S.n_rows, 4 * S.nnz * row)


def _pairwise_price_of_gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, statistics: Any, of_edges: bool,
    queries: Any, keys: Any, values: Any, *_: Any,
) -> Price:  # fmt: skip
    """Price that every entry is read from both its ends, and its score made again at each."""
    row = prod(keys.shape[1:])
    gathered = 3 if values is None else 4
    moved = (S.nnz * gathered + 4 * S.n_rows) * row * keys.itemsize
    return Price(moved + 12 * S.nnz + 16 * S.n_rows, 12 * S.nnz * row)


def _pairwise_row(
    name: str, results: Any = _result, *, launcher: Any = pairwise.pairwise,
    additive: bool = False, price: Any = _pairwise_price, **facts: Any,
) -> Op:  # fmt: skip
    facts = {"narrowed": ("queries", "keys", "values"), "entries": ("edges",)} | facts
    args = *facts.pop("saved", ()), *_pairs(additive=additive)
    return _row(name, args, results, launcher, "pairwise.loops", price=price, **facts)


def _pairwise_gradients_row(name: str, **facts: Any) -> Op:
    facts |= {"returns": 5, "structures": 2, "entry_results": (4,), "narrowed": None}
    facts["saved"] = _gradient("keys", "Tensor out, Tensor statistics")
    facts |= {"launcher": pairwise.pairwise_backward, "price": _pairwise_price_of_gradients}
    return _pairwise_row(name, _pairwise_gradients, **facts)


def _public(name: str, **facts: Any) -> tuple[Op, Op]:
    """Make the rows of a function and its gradient; torch has one op of all, ``attend``."""
    facts["library"], backward = False, f"{name}_backward"
    forward = _pairwise_row(name, functions=(name,), **facts)
    return forward, _pairwise_gradients_row(backward, functions=(backward,), **facts)


GATV2, GATV2_BACKWARD = _public("gatv2", additive=True)
DOT_ATTENTION, DOT_ATTENTION_BACKWARD = _public("dot_attention")
ATTEND = _pairwise_row("attend")
ATTEND_WITH_STATISTICS = _pairwise_row(
    *("attend_with_statistics", _pairwise_results),
    launcher=pairwise.pairwise_with_statistics,
    returns=2,
)
ATTEND_BACKWARD = _pairwise_gradients_row("attend_backward")
