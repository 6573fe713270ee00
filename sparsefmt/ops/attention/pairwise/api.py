"""Attention whose scores are of two rows: GATv2's, and those of dot products."""

from math import prod
from typing import Any

from ....formats.arrays import Array, allocating, on_device_of
from ....formats.base import Format
from ...engine import checks as engine_checks
from ...engine import choose
from ...engine.table import Kernel, Op, Price, deferred
from .. import checks
from ..checks import Arrays, shaped_as
from ..operands import Options, PairwiseArguments, heads_and_feat, shape_of, sums_dtype
from . import cuda


def gatv2(
    A: Format,
    left: Array,
    right: Array,
    att: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
    out: Array | None = None,
) -> Array:
    """Aggregate the features of each vertex's in-neighbours by GATv2's attention.

    ``O[i, h, :] = sum_e M[e, h] P[e, h] left[j, h, :]`` over the stored entries ``e = (i, j)`` of
    row ``i``, where ``P[e, h] = exp(s[e, h] - m) / sum_e' exp(s[e', h] - m)`` is the softmax over
    the row of ``s[e, h] = sum_f att[h, f] leaky(left[j, h, f] + right[i, h, f]) +
    edge_scores[e, h]``, and ``leaky(z)`` is ``z`` where positive, else ``negative_slope * z``.
    ``M`` is 0 with probability ``dropout``, else ``1 / (1 - dropout)``.

    Parameters
    ----------
    A, negative_slope, dropout, seed, self_loops, out
        As for ``gat``.
    left : array, shape (n_cols, heads, feat) or (n_cols, feat)
        Of the sources, whose values these are too; dtypes as of ``H`` in ``gat``.
    right : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of the targets, in the dtype of ``left``.
    att : array, shape (heads, feat) or (feat,)
        In the dtype of ``left``, or float32 beside 2-byte features.
    edge_scores : array, shape (nnz, heads) or (nnz,), optional
        Added to the scores of the entries, in the order of A's own data; dtype as of ``att``.

    Returns
    -------
    array, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``left``; 0 for a row without entries, NaN as of ``gat``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``gat``; ShapeError also if feature widths do not fit together.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made.  The mask is that of ``gat``.
    On a GPU whose L2 does not hold what entries gather, columns go in blocks, if they ascend in
    every row: the first call with ``A`` looks, synchronises and keeps up to 16 indices a row; a
    capture before it goes without.  GATv2 (ICLR'22), equation 7.
    """
    A, arrays = checks.additive(A, left, right, att, edge_scores)
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    return _forward(GATV2, A, arrays, out, 1.0, options)


def gatv2_backward(
    A: Format,
    left: Array,
    right: Array,
    att: Array,
    grad: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of ``gatv2`` in the features of both ends, ``att`` and the edges' scores.

    With ``z = left[j, h, f] + right[i, h, f]``, ``D[i, h] = <grad[i, h], O[i, h]>`` and
    ``ds[e, h] = P[e, h] (M[e, h] <grad[i, h], left[j, h]> - D[i, h])`` over the entries
    ``e = (i, j)``: ``dright[i, h, f] = sum_e ds[e, h] att[h, f] leaky'(z)`` over those of row
    ``i``, ``dleft[j, h, f] = sum_e (M[e, h] P[e, h] grad[i, h, f] + ds[e, h] att[h, f] leaky'(z))``
    over those of column ``j``, and ``datt[h, f] = sum_e ds[e, h] leaky(z)`` over all.

    Parameters
    ----------
    A, negative_slope, dropout, seed, self_loops
        As for ``gat``, and as given to ``gatv2``.
    left, right, att, edge_scores
        As given to ``gatv2``.
    grad : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of ``O``, in the dtype of ``left``.

    Returns
    -------
    dleft, dright, datt : array
        Of the shapes and dtypes of ``left``, ``right`` and ``att``.
    dedge_scores : array or None
        ``ds``, as that of ``gat_backward``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat``; also if feature widths do not fit together, or ``grad`` has not the shape of the
        result or another dtype than ``left``.

    Notes
    -----
    Deterministic: no atomics.  ``O`` and the sums of ``P`` are computed anew, and the transpose by
    ``A.tocsc_with_perm()``, at each call; ``autograd`` keeps both.  Scores are made again, and
    only two numbers of each row are kept: no other array of the size of the entries is made.
    """
    A, arrays = checks.additive(A, left, right, att, edge_scores)
    grad = checks.gradient(grad, A, "left", arrays[1])
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    dright, dleft, _, datt, dedges = _backward(GATV2_BACKWARD, A, arrays, grad, 1.0, options)
    return dleft, dright, datt, dedges


def dot_attention(
    A: Format,
    queries: Array,
    keys: Array,
    values: Array | None = None,
    *,
    edge_scores: Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
    out: Array | None = None,
) -> Array:
    """Aggregate values of each vertex's in-neighbours by the attention of queries to keys.

    ``O[i, h, :] = sum_e M[e, h] P[e, h] values[j, h, :]`` over the stored entries ``e = (i, j)`` of
    row ``i``, where ``P`` is the softmax over the row of
    ``s[e, h] = scale <queries[i, h], keys[j, h]> + edge_scores[e, h]``, and ``M`` is 0 with
    probability ``dropout``, else ``1 / (1 - dropout)``.

    Parameters
    ----------
    A, dropout, seed, self_loops, out
        As for ``gat``.
    queries : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of the targets, in the dtype of ``keys``.
    keys : array, shape (n_cols, heads, feat) or (n_cols, feat)
        Of the sources; dtypes as of ``H`` in ``gat``.
    values : array, shape of ``keys``, optional
        What is aggregated; the keys if left out.
    edge_scores : array, shape (nnz, heads) or (nnz,), optional
        Added to the entries' scores, in the order of A's own data: in the dtype of ``keys``, or
        float32 beside 2-byte features.
    scale : float, optional
        ``1 / sqrt(feat)`` if left out.

    Returns
    -------
    array, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``keys``; 0 for a row without entries, NaN as of ``gat``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``gat``; ShapeError also if feature widths do not fit together or ``scale`` is not
        finite.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made.  The mask is that of ``gat``, and
    columns go in blocks as those of ``gatv2``.
    Attention Is All You Need (NIPS'17), equation 1, on a graph; AGNN (2018), equation 3.
    """
    A, arrays = checks.products(A, queries, keys, values, edge_scores)
    factor = checks.scale(scale, arrays[1].shape[-1])
    options = checks.options(A, 0.0, dropout, seed, self_loops)
    return _forward(DOT_ATTENTION, A, arrays, out, factor, options)


def dot_attention_backward(
    A: Format,
    queries: Array,
    keys: Array,
    values: Array | None,
    grad: Array,
    *,
    edge_scores: Array | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Gradients of ``dot_attention`` in queries, keys, values and the edges' scores.

    With ``D[i, h] = <grad[i, h], O[i, h]>`` and
    ``ds[e, h] = P[e, h] (M[e, h] <grad[i, h], values[j, h]> - D[i, h])`` over the entries
    ``e = (i, j)``: ``dqueries[i, h, :] = scale sum_e ds[e, h] keys[j, h, :]`` over those of row
    ``i``; ``dkeys[j, h, :] = scale sum_e ds[e, h] queries[i, h, :]`` and
    ``dvalues[j, h, :] = sum_e M[e, h] P[e, h] grad[i, h, :]`` over those of column ``j``.

    Parameters
    ----------
    A, dropout, seed, self_loops
        As for ``gat``, and as given to ``dot_attention``.
    queries, keys, values, edge_scores, scale
        As given to ``dot_attention``; ``values`` is None where the keys are the values.
    grad : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of ``O``, in the dtype of ``keys``.

    Returns
    -------
    dqueries, dkeys : array
        Of the shapes and dtypes of ``queries`` and ``keys``.
    dvalues : array or None
        Of those of ``values``; None where the keys are the values: ``dkeys`` has both then.
    dedge_scores : array or None
        ``ds``, as that of ``gat_backward``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat``; also if feature widths do not fit together, ``scale`` is not finite, or ``grad``
        has not the shape of the result or another dtype than ``keys``.

    Notes
    -----
    Deterministic: no atomics.  ``O``, the sums of ``P`` and the transpose are computed anew at each
    call; ``autograd`` keeps them.
    """
    A, arrays = checks.products(A, queries, keys, values, edge_scores)
    grad = checks.gradient(grad, A, "keys", arrays[1])
    factor = checks.scale(scale, arrays[1].shape[-1])
    options = checks.options(A, 0.0, dropout, seed, self_loops)
    found = _backward(DOT_ATTENTION_BACKWARD, A, arrays, grad, factor, options)
    dqueries, dkeys, dvalues, _, dedges = found
    return dqueries, dkeys, dvalues, dedges


def _forward(
    op: Op, A: Format, arrays: Arrays, out: Array | None, scale: float, options: Options
) -> Array:
    keys = arrays[1]
    shape = A.n_rows, *keys.shape[1:]
    out = engine_checks.output(out, shape=shape, like=keys, inputs=arrays, A=A)
    found: Array = choose.run(
        op, engine_checks.structure(A), *arrays, *options.with_scale(scale), out=out
    )
    return found


def _backward(
    op: Op, A: Format, arrays: Arrays, grad: Array, scale: float, options: Options
) -> tuple[Any, ...]:
    """Run the gradients of ``arrays``: None for one that is None."""
    # Forward and the transpose are made anew.
    given = None, None, grad, None, None, True, *arrays, *options.with_scale(scale)
    found = choose.run(op, engine_checks.structure(A), *given)
    if found is None:  # ``explain`` runs nothing
        return arrays
    keys = arrays[1]
    with on_device_of(keys), allocating(f"gradients of {keys.size} features and their scores"):
        pairs = zip(found, arrays, strict=True)
        return tuple(None if a is None else shaped_as(gradient, a) for gradient, a in pairs)


# The rows of the table


def _result(S: Any, queries: Any, keys: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, *keys.shape[1:]), keys),)


def _result_and_statistics(S: Any, queries: Any, keys: Any, *_: Any) -> tuple[Any, ...]:
    return (*_result(S, queries, keys), ((S.n_rows, heads_and_feat(keys)[0], 2), sums_dtype(keys)))


def _gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, statistics: Any, of_edges: bool,
    *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Shape and dtype of each gradient; empty for a tensor that is not given."""
    a = PairwiseArguments(*arguments)
    shapes = shape_of(a.att), shape_of(a.edges, of_edges)
    features = ((shape_of(x), a.keys) for x in (a.queries, a.keys, a.values))
    return *features, *((shape, sums_dtype(a.keys)) for shape in shapes)


def _price(S: Any, queries: Any, keys: Any, values: Any, *_: Any) -> Price:
    """Every entry reads a row of keys and one of values; rows of queries and results go once."""
    row = prod(keys.shape[1:])
    gathered = 1 if values is None else 2
    moved = (S.nnz * gathered + 2 * S.n_rows) * row * keys.itemsize
    return Price(moved + 4 * S.nnz + 8 * S.n_rows, 4 * S.nnz * row)


def _price_of_gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, statistics: Any, of_edges: bool,
    queries: Any, keys: Any, values: Any, *_: Any,
) -> Price:  # fmt: skip
    """Every entry is read from both its ends, and its score made again at each."""
    row = prod(keys.shape[1:])
    gathered = 3 if values is None else 4
    moved = (S.nnz * gathered + 4 * S.n_rows) * row * keys.itemsize
    return Price(moved + 12 * S.nnz + 16 * S.n_rows, 12 * S.nnz * row)


_FEATURES = ("queries", "keys", "values")
_OPERANDS = (
    "Tensor queries, Tensor keys, Tensor? values, Tensor? att, Tensor? edges, Tensor? seed, "
    "float slope, float scale, float dropout, bool loops"
)


def _row(op: str, run: str, arguments: str = _OPERANDS, **facts: Any) -> Op:
    """A row whose kernels are the functions of that name for CUDA and for the CPU."""
    own = (
        Kernel(f"{op}_csr_balanced", getattr(cuda, run), ("csr",), "gpu"),
        Kernel(f"{op}_csr_numba", deferred(f"{__package__}.loops", run), ("csr",), "cpu"),
    )
    kernels = *own, choose.convert_to_csr(op)
    return Op(op, arguments, kernels=kernels, entries=("edges",), **facts)


def _forward_row(op: str, **facts: Any) -> Op:
    return _row(op, "pairwise", results=_result, price=_price, **facts)


def _backward_row(op: str, **facts: Any) -> Op:
    arguments = f"Tensor grad, Tensor out, Tensor statistics, bool of_edges, {_OPERANDS}"
    facts |= {"results": _gradients, "price": _price_of_gradients, "returns": 5, "structures": 2}
    facts["entry_results"] = (4,)
    return _row(op, "pairwise_backward", arguments, **facts)


def _public(op: str) -> dict[str, Any]:
    """Facts of a row with a public function; torch's op for all of them is ``attend``."""
    return {"op": op, "functions": (op,), "library": False}


GATV2 = _forward_row(**_public("gatv2"))
GATV2_BACKWARD = _backward_row(**_public("gatv2_backward"))
DOT_ATTENTION = _forward_row(**_public("dot_attention"))
DOT_ATTENTION_BACKWARD = _backward_row(**_public("dot_attention_backward"))
ATTEND = _forward_row("attend", narrowed=_FEATURES)
ATTEND_WITH_STATISTICS = _row(
    "attend_with_statistics",
    "pairwise_with_statistics",
    results=_result_and_statistics,
    price=_price,
    returns=2,
    narrowed=_FEATURES,
)
ATTEND_BACKWARD = _backward_row("attend_backward")
