"""Attention: scores, softmax, dropout and aggregation in one pass over the entries.

Scores are sums of a number of each end of an entry (``gat``), or of features of both ends: GATv2's,
and dot products.
"""

from typing import Any

import numpy as np

from ...formats.arrays import Array, allocating, on_device_of
from ...formats.base import Format
from ..engine.bind import bind, output, structure
from ..engine.bind import precision as check_precision
from ..engine.call import call
from ..engine.table import Op
from . import rows, score


def gat(
    A: Format,
    H: Array,
    el: Array,
    er: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
    precision: str | None = None,
    out: Array | None = None,
) -> Array:
    """Aggregate the features of each vertex's in-neighbours by additive attention.

    ``O[i, h, :] = sum_e M[e, h] P[e, h] H[j, h, :]`` over the stored entries ``e = (i, j)`` of row
    ``i``, where ``P[e, h] = exp(s[e, h] - m) / sum_e' exp(s[e', h] - m)`` is the softmax of
    ``s[e, h] = leaky(el[j, h] + er[i, h] + edge_scores[e, h])`` over the row, and ``leaky(z)`` is
    ``z`` where positive, else ``negative_slope * z``.  ``M`` is 0 with probability ``dropout``,
    else ``1 / (1 - dropout)``.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        Only the structure is read.  Other formats are converted to CSR, at each call.
    H : array, shape (n_cols, heads, feat) or (n_cols, feat)
        float16, bfloat16, float32 or float64; 2-byte features are computed in float32.
    el : array, shape (n_cols, heads) or (n_cols,)
        The sources' part of the scores: of H's dtype, or float32 beside 2-byte features.
    er : array, shape (n_rows, heads) or (n_rows,)
        The targets' part.
    edge_scores : array, shape (nnz, heads) or (nnz,), optional
        The entries' own part, of such a dtype, in the order of A's own data.
    negative_slope : float
    dropout : float
        From 0 to less than 1.
    seed : int
        Of ``M``, which depends on it, the entry's number in CSR order and the head alone.
    self_loops : bool
        As if each vertex of a square ``A`` had exactly one loop: stored entries with ``i == j`` are
        left out, and each row has one more entry ``(i, i)``, without a part of its own.
    precision : "tf32" or "bf16", optional
        "bf16" allows, on a GPU, to round a float32 ``H`` to bfloat16 once, which halves the bytes
        that entries gather; scores, weights and sums stay float32.  A permission, taken where it
        pays, as in ``spmm``.  "tf32" changes nothing.
    out : array, shape (n_rows, heads, feat) or (n_rows, feat), optional
        Takes the result; contiguous, of H's dtype and device, overlapping no input.

    Returns
    -------
    array, shape (n_rows, heads, feat) or (n_rows, feat)
        0 for a row without entries.  NaN in rows that have a score of NaN or +inf, or only -inf; an
        infinite feature may make NaN as well.

    Raises
    ------
    ShapeError
        If rows, columns, heads or widths do not fit together, ``dropout`` lies outside its range,
        or ``self_loops`` is asked of an ``A`` that is not square.
    DtypeError, DeviceError, FormatError
        If dtypes, kinds of arguments or devices do not fit, or ``out`` cannot take the result.
    UnsupportedError
        If ``precision`` is unknown, or given for other features than float32.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made, but for small graphs on the CPU.
    With bf16 a result is off by ``2**-8 * sum_e M[e, h] P[e, h] |H[j, h, :]|`` at most, beside
    float32's own rounding, and features beyond 3.39e38 become infinite.  The mask is by
    Philox4x32-10: an entry is dropped from head ``h`` where the first word of the counter
    ``(e, h)`` lies below ``dropout * 2**32``; loops of ``self_loops`` count from ``nnz`` on.
    GAT (ICLR'18), equations 1 to 4; fuseGNN (ICCAD'20), section 3.
    """
    arrays = {"H": H, "el": el, "er": er, "edge_scores": edge_scores}
    numbers = negative_slope, dropout, seed, self_loops
    return _forward(rows.GAT, A, arrays, numbers, out, precision=precision)


def gat_backward(
    A: Format,
    H: Array,
    el: Array,
    er: Array,
    grad: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    seed: int = 0,
    self_loops: bool = False,
    precision: str | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Compute the gradients of ``gat`` in the features and in all parts of the scores.

    With ``D[i, h] = <grad[i, h], O[i, h]>`` and
    ``dz[e, h] = leaky'(z) P[e, h] (M[e, h] <grad[i, h], H[j, h]> - D[i, h])``:
    ``dH[j, h, :] = sum_e M[e, h] P[e, h] grad[i, h, :]`` and ``del[j, h] = sum_e dz[e, h]`` over
    the entries ``e = (i, j)`` of column ``j``, ``der[i, h] = sum_e dz[e, h]`` over those of row
    ``i``.

    Parameters
    ----------
    A, H, el, er, edge_scores, negative_slope, dropout, seed, self_loops
        As given to ``gat``.
    grad : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of ``O``, in H's dtype.
    precision : "tf32" or "bf16", optional
        "bf16" allows to round ``H`` where ``O`` is computed anew, as in ``gat``, and ``grad`` where
        the sums over columns gather it.  Sums over rows and ``dedge_scores`` read both as they are,
        and the ``O`` that was made of rounded ``H``: gradients of scores are off by up to ``2**-7``
        of ``sum_f |grad| |H|``, and no longer add up to 0 over a row.

    Returns
    -------
    dH, del, der : array
        Of the shapes and dtypes of ``H``, ``el`` and ``er``.
    dedge_scores : array or None
        ``dz``, of the shape and dtype of ``edge_scores``, 0 at stored loops that ``self_loops``
        leaves out; None if none were given.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, UnsupportedError
        As ``gat``, of ``grad`` too.

    Notes
    -----
    Deterministic: no atomics.  ``O`` and the statistics of ``P`` are computed anew, and the
    transpose by ``A.tocsc_with_perm()``, at each call; ``autograd`` keeps both.  Other arrays of
    the size of the entries are made only for ``dedge_scores``: all else is linear in sums of the
    positive and of the negative scores of a row.
    """
    arrays = {"H": H, "el": el, "er": er, "edge_scores": edge_scores, "grad": grad}
    numbers = negative_slope, dropout, seed, self_loops
    gradients = _backward(rows.GAT_BACKWARD, A, arrays, numbers, precision=precision)
    dH, d_el, d_er, _, d_edges = gradients
    return dH, d_el, d_er, d_edges


def gat_attention(
    A: Format,
    el: Array,
    er: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    self_loops: bool = False,
) -> Array:
    """Compute the attention ``P`` of ``gat`` at each stored entry, before any dropout.

    Parameters
    ----------
    A, el, er, edge_scores, negative_slope, self_loops
        As for ``gat``; ``er`` and ``edge_scores`` have el's dtype, or float32 beside 2 bytes.

    Returns
    -------
    array, shape (nnz, heads), or (nnz,) where ``el`` has no heads
        In the order of A's own data; float32, or float64 for such scores.  Of sum 1 in each row
        that has entries; with ``self_loops`` stored loops have 0, and what a row lacks is its one
        loop's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat``.

    Notes
    -----
    Deterministic.  GAT (ICLR'18), equation 3.
    """
    A, el, er, edges = bind(rows.GAT_ATTENTION, A, el=el, er=er, edge_scores=edge_scores)
    numbers = score.number("negative_slope", negative_slope), score.loops(A, self_loops)
    result: Array = call(rows.GAT_ATTENTION, structure(A), el, er, edges, *numbers)
    return result


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
    row ``i``, where ``P`` is the softmax over the row of
    ``s[e, h] = sum_f att[h, f] leaky(left[j, h, f] + right[i, h, f]) + edge_scores[e, h]``, and
    ``leaky`` and ``M`` are those of ``gat``.

    Parameters
    ----------
    A, edge_scores, negative_slope, dropout, seed, self_loops, out
        As for ``gat``; ``edge_scores`` have the dtype of ``att``.
    left : array, shape (n_cols, heads, feat) or (n_cols, feat)
        Of the sources, whose values these are too; dtypes as of ``H`` in ``gat``.
    right : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of the targets, in the dtype of ``left``.
    att : array, shape (heads, feat) or (feat,)
        In the dtype of ``left``, or float32 beside 2-byte features.

    Returns
    -------
    array, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``left``; 0 for a row without entries, NaN as of ``gat``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``gat``.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made.  The mask is that of ``gat``.
    On a GPU whose L2 does not hold what entries gather, columns go in blocks, if they ascend in
    every row: the first call with ``A`` looks, synchronises and keeps up to 16 indices a row; a
    capture before it goes without.  GATv2 (ICLR'22), equation 7.
    """
    arrays = {"left": left, "right": right, "att": att, "edge_scores": edge_scores}
    return _forward(rows.GATV2, A, arrays, (negative_slope, dropout, seed, self_loops), out)


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
    """Compute the gradients of ``gatv2`` in both ends' features, ``att`` and the edges' scores.

    With ``z = left[j, h, f] + right[i, h, f]``, ``D[i, h] = <grad[i, h], O[i, h]>`` and
    ``ds[e, h] = P[e, h] (M[e, h] <grad[i, h], left[j, h]> - D[i, h])`` over the entries
    ``e = (i, j)``: ``dright[i, h, f] = sum_e ds[e, h] att[h, f] leaky'(z)`` over those of row
    ``i``, ``dleft[j, h, f] = sum_e (M[e, h] P[e, h] grad[i, h, f] + ds[e, h] att[h, f] leaky'(z))``
    over those of column ``j``, and ``datt[h, f] = sum_e ds[e, h] leaky(z)`` over all.

    Parameters
    ----------
    A, left, right, att, edge_scores, negative_slope, dropout, seed, self_loops
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
        As ``gat``, of ``grad`` too.

    Notes
    -----
    Deterministic: no atomics.  What is computed anew is that of ``gat_backward``; no other array of
    the size of the entries is made.
    """
    arrays = {"left": left, "right": right, "att": att, "edge_scores": edge_scores, "grad": grad}
    numbers = negative_slope, dropout, seed, self_loops
    dright, dleft, _, datt, d_edges = _backward(rows.GATV2_BACKWARD, A, arrays, numbers)
    return dleft, dright, datt, d_edges


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
    ``s[e, h] = scale <queries[i, h], keys[j, h]> + edge_scores[e, h]``, and ``M`` that of ``gat``.

    Parameters
    ----------
    A, edge_scores, dropout, seed, self_loops, out
        As for ``gat``, whose ``H`` are the keys.
    queries : array, shape (n_rows, heads, feat) or (n_rows, feat)
        Of the targets, in the dtype of ``keys``.
    keys : array, shape (n_cols, heads, feat) or (n_cols, feat)
        Of the sources; dtypes as of ``H`` in ``gat``.
    values : array, shape of ``keys``, optional
        What is aggregated; the keys if left out.
    scale : float, optional
        ``1 / sqrt(feat)`` if left out.

    Returns
    -------
    array, shape (n_rows, heads, feat) or (n_rows, feat)
        In the dtype of ``keys``; 0 for a row without entries, NaN as of ``gat``.

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``gat``; ShapeError also if ``scale`` is not finite.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made.  The mask is that of ``gat``, and
    columns go in blocks as those of ``gatv2``.
    Attention Is All You Need (NIPS'17), equation 1, on a graph; AGNN (2018), equation 3.
    """
    arrays = {"keys": keys, "queries": queries, "values": values, "edge_scores": edge_scores}
    return _forward(rows.DOT_ATTENTION, A, arrays, (0.0, dropout, seed, self_loops), out, scale)


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
    """Compute the gradients of ``dot_attention`` in queries, keys, values and the edges' scores.

    With ``D[i, h] = <grad[i, h], O[i, h]>`` and
    ``ds[e, h] = P[e, h] (M[e, h] <grad[i, h], values[j, h]> - D[i, h])`` over the entries
    ``e = (i, j)``: ``dqueries[i, h, :] = scale sum_e ds[e, h] keys[j, h, :]`` over those of row
    ``i``; ``dkeys[j, h, :] = scale sum_e ds[e, h] queries[i, h, :]`` and
    ``dvalues[j, h, :] = sum_e M[e, h] P[e, h] grad[i, h, :]`` over those of column ``j``.

    Parameters
    ----------
    A, queries, keys, values, edge_scores, scale, dropout, seed, self_loops
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
        As ``dot_attention``, of ``grad`` too.

    Notes
    -----
    As ``gatv2_backward``.
    """
    arrays = {"keys": keys, "queries": queries, "values": values, "edge_scores": edge_scores}
    arrays, numbers = arrays | {"grad": grad}, (0.0, dropout, seed, self_loops)
    gradients = _backward(rows.DOT_ATTENTION_BACKWARD, A, arrays, numbers, scale)
    dqueries, dkeys, dvalues, _, d_edges = gradients
    return dqueries, dkeys, dvalues, d_edges


def _forward(
    op: Op, A: Format, arrays: dict[str, Array | None], numbers: tuple[Any, ...], out: Array | None,
    scale: float | None = None, precision: str | None = None,
) -> Array:  # fmt: skip
    """Check the arguments of a call, and run the row."""
    A, x, args, options = _checked(op, A, arrays, numbers, scale, precision)
    inputs, shape = [a for a in args if hasattr(a, "dtype")], (A.n_rows, *x.shape[1:])
    out = output(out, shape=shape, like=x, inputs=inputs, A=A)
    result: Array = call(op, structure(A), *args, out=out, **options)
    return result


def _backward(
    op: Op, A: Format, arrays: dict[str, Array | None], numbers: tuple[Any, ...],
    scale: float | None = None, precision: str | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Check the arguments of a call, and run the row: gradients as it orders them.

    They have shapes and dtypes of the arrays that they belong to, None for None.
    """
    A, x, (grad, *args), options = _checked(op, A, arrays, numbers, scale, precision)
    likes = *args[:3], *((None, args[3]) if options else args[3:5])
    saved = *(None,) * (3 if options else 2), likes[4] is not None  # made anew, as the transpose
    gradients = call(op, structure(A), None, None, grad, *saved, *args, **options)
    if gradients is None:  # ``explain`` runs nothing
        return (None,) * 5
    with on_device_of(x), allocating(f"gradients of {x.size} features and their scores"):
        with np.errstate(over="ignore", under="ignore"):
            return tuple(
                None if like is None else a.reshape(like.shape).astype(like.dtype, copy=False)
                for a, like in zip(gradients, likes, strict=True)
            )


def _checked(
    op: Op, A: Format, arrays: dict[str, Array | None], numbers: tuple[Any, ...],
    scale: float | None, precision: str | None,
) -> tuple[Format, Array, tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Check a call: its matrix, the sources' features, the row's arguments, and its options."""
    A, x, second, third, edges, *grad = bind(op, A, **arrays)
    factor = score.scale(scale, x.shape[-1]) if "keys" in arrays else 1.0
    options = score.options(A, *numbers)
    if "H" in arrays:
        if precision is not None:
            check_precision(precision, "H", x)
        return A, x, (*grad, x, second, third, edges, None, *options), {"precision": precision}
    values, att = (None, third) if "left" in arrays else (third, None)
    return A, x, (*grad, second, x, values, att, edges, *options.with_scale(factor)), {}
