"""Rows of attention in the table of operations: arguments, results, prices and kernels."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ..engine.call import convert_to_csr
from ..engine.table import Kernel, Op, Price, deferred, unchecked
from ..matmul.api import ROUNDED, against_rounding
from .gat import cuda as gat
from .gat import small
from .pairwise import cuda as pairwise
from .score import GatArguments, PairwiseArguments, heads_and_feat, heads_of, shape_of, sums_dtype

_OPTIONS = "Tensor? edges, Tensor? loop_edges, Tensor? seed, float slope, float dropout, bool loops"
_GAT = f"Tensor h, Tensor el, Tensor er, {_OPTIONS}"
_SAVED = "Tensor grad, Tensor out, Tensor plus, Tensor statistics, bool of_edges"
_PAIRWISE = (
    "Tensor queries, Tensor keys, Tensor? values, Tensor? att, Tensor? edges, Tensor? seed, "
    "float slope, float scale, float dropout, bool loops"
)
_PAIRWISE_SAVED = "Tensor grad, Tensor out, Tensor statistics, bool of_edges"


def _row(
    name: str, arguments: str, results: Any, launcher: Callable[..., Any], module: str, *,
    small_loop: Any = None, refuses: Any = None, rounds: Any = None, converts: bool = True,
    **facts: Any,
) -> Op:  # fmt: skip
    """Make a row: its kernels are the launcher and the loops of that name in the module.

    Work on the CPU is done by ``small_loop`` unless that ``refuses``.  Where ``rounds`` lists what
    is against it, rows that entries gather are rounded.
    """
    loops = deferred(f"{__package__}.{module}", launcher.__name__)
    kernels = [
        Kernel(f"{name}_csr_balanced", launcher, ("csr",), "gpu"),
        Kernel(f"{name}_csr_numba", loops, ("csr",), "cpu"),
    ]
    if small_loop is not None:
        kernel = Kernel(f"{name}_csr_scipy", small_loop, ("csr",), "cpu", refuses=refuses)
        kernels.insert(1, kernel)
    if rounds is not None:
        run, title = partial(launcher, narrow=True), f"{name}_csr_rounded"
        kernels.insert(0, Kernel(title, run, ("csr",), "gpu", refuses=rounds, note=ROUNDED))
    kernels += [convert_to_csr(name)] * converts
    return Op(name, unchecked(arguments), results, tuple(kernels), **facts)


def _result(S: Any, _: Any, x: Any, *__: Any) -> tuple[Any, ...]:
    """Return shape and dtype of the result; second of the arguments are the sources' features."""
    return (((S.n_rows, *x.shape[1:]), x),)


# Scores that are sums of a number of each end


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
    h: Any, source: Any, target: Any, bias: Any, edges: Any, loop_edges: Any, *_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    vectors = (2 if bias is None else 3), *source.shape
    shapes = vectors, shape_of(loop_edges), shape_of(edges, of_edges)
    return (h.shape, h), *((shape, sums_dtype(h)) for shape in shapes)


def _gat_price(S: Any, bias: Any, h: Any, *_: Any) -> Price:
    """Price that every entry reads a row of the features and a score of each head."""
    heads, feat = heads_and_feat(h)
    row = heads * feat * h.itemsize
    scores = S.nnz * (4 + 4 * heads) + 8 * S.n_rows * heads
    return Price((S.nnz + S.n_rows) * row + scores, S.nnz * heads * (2 * feat + 8))


def _gat_price_of_gradients(S: Any, T: Any, perm: Any, grad: Any, *_: Any) -> Price:
    """Price as much again over the transpose, whose entries read four numbers of each head."""
    forward = _gat_price(S, None, grad)
    return Price(forward.bytes + 12 * S.nnz * heads_and_feat(grad)[0], forward.flops)


def _against_rounding(A: Any, bias: Any, h: Any, *_: Any, precision: Any = None, **__: Any) -> Any:
    """List the reasons against rounding the features."""
    return against_rounding(A.nnz, h, precision)


def _against_rounding_backward(
    A: Any, T: Any, perm: Any, grad: Any, *_: Any, precision: Any = None, **__: Any
) -> Any:
    """List the reasons against rounding the gradient of the result."""
    return against_rounding(A.nnz, grad, precision)


def _gat_row(name: str, arguments: str, results: Any, refuses: Any, **facts: Any) -> Op:
    launcher = getattr(gat, name)
    facts |= {"small_loop": getattr(small, name), "refuses": refuses}
    facts |= {"functions": (name,), "entries": ("edges",)} if facts.get("converts", True) else {}
    return _row(name, arguments, results, launcher, "gat.cpu", **facts)


_FORWARD: dict[str, Any] = {"price": _gat_price, "rounds": _against_rounding}
_BACKWARD: dict[str, Any] = {
    "price": _gat_price_of_gradients,
    "structures": 2,
    "rounds": _against_rounding_backward,
}


def _refuses(A: Any, bias: Any, h: Any, *_: Any, **__: Any) -> list[str]:
    return small.reasons_against(A, *heads_and_feat(h))


def _refuses_gradients(A: Any, T: Any, perm: Any, grad: Any, *_: Any, **__: Any) -> list[str]:
    return small.reasons_against(A, *heads_and_feat(grad))


GAT = _gat_row(
    "gat", f"Tensor? bias, {_GAT}", _result, _refuses, narrowed=("bias", "h"), **_FORWARD
)
GAT_WITH_STATISTICS = _gat_row(
    *("gat_with_statistics", f"Tensor? bias, {_GAT}", _gat_results, _refuses),
    **_FORWARD,
    narrowed=("bias", "h"),
    converts=False,
    returns=3,
)
GAT_BACKWARD = _gat_row(
    *("gat_backward", f"{_SAVED}, {_GAT}", _gat_gradients, _refuses_gradients),
    **_BACKWARD,
    returns=5,
    entry_results=(4,),
)
_OF_VECTORS = f"Tensor h, Tensor source, Tensor target, Tensor? bias, {_OPTIONS}"
_VECTORS: dict[str, Any] = {
    "refuses": lambda A, h, source, *_: small.reasons_against(A, *heads_of(source)),
    "price": lambda S, h, *_: _gat_price(S, None, h),
    "rounds": lambda A, h, *_: against_rounding(A.nnz, h, None),
    "narrowed": ("h", "source", "target", "bias"),
    "converts": False,
}
GAT_OF_VECTORS = _gat_row(
    "gat_of_vectors", _OF_VECTORS, lambda S, h, *_: ((h.shape, h),), **_VECTORS
)
GAT_OF_VECTORS_WITH_STATISTICS = _gat_row(
    *("gat_of_vectors_with_statistics", _OF_VECTORS, _results_of_vectors), returns=3, **_VECTORS
)
GAT_OF_VECTORS_BACKWARD = _gat_row(
    "gat_of_vectors_backward",
    f"{_SAVED}, {_OF_VECTORS}",
    _gradients_of_vectors,
    lambda A, *args: small.reasons_against(A, *heads_of(args[8])),
    **_BACKWARD,
    converts=False,
    returns=4,
)
GAT_ATTENTION = _gat_row(
    "gat_attention",
    "Tensor el, Tensor er, Tensor? edges, float slope, bool loops",
    lambda S, el, *_: (((S.nnz, *el.shape[1:]), sums_dtype(el)),),
    lambda A, el, *_, **__: small.reasons_against(A, *heads_and_feat(el[..., None])),
    entry_results=(0,),
    library=False,
)

# Scores of features of both ends


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


def _pairwise_row(name: str, launcher: Callable[..., Any], **facts: Any) -> Op:
    facts = {"results": _result, "price": _pairwise_price, "entries": ("edges",)} | facts
    arguments, results = facts.pop("arguments", _PAIRWISE), facts.pop("results")
    return _row(name, arguments, results, launcher, "pairwise.loops", **facts)


_GRADIENTS: dict[str, Any] = {
    "launcher": pairwise.pairwise_backward,
    "arguments": f"{_PAIRWISE_SAVED}, {_PAIRWISE}",
    "results": _pairwise_gradients,
    "price": _pairwise_price_of_gradients,
    "returns": 5,
    "structures": 2,
    "entry_results": (4,),
}
_FEATURES = ("queries", "keys", "values")

GATV2 = _pairwise_row("gatv2", pairwise.pairwise, functions=("gatv2",), library=False)
GATV2_BACKWARD = _pairwise_row(
    "gatv2_backward", functions=("gatv2_backward",), library=False, **_GRADIENTS
)
DOT_ATTENTION = _pairwise_row(
    "dot_attention", pairwise.pairwise, functions=("dot_attention",), library=False
)
DOT_ATTENTION_BACKWARD = _pairwise_row(
    "dot_attention_backward", functions=("dot_attention_backward",), library=False, **_GRADIENTS
)
ATTEND = _pairwise_row("attend", pairwise.pairwise, narrowed=_FEATURES)
ATTEND_WITH_STATISTICS = _pairwise_row(
    *("attend_with_statistics", pairwise.pairwise_with_statistics),
    results=_pairwise_results,
    returns=2,
    narrowed=_FEATURES,
)
ATTEND_BACKWARD = _pairwise_row("attend_backward", **_GRADIENTS)
