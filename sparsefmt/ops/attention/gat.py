"""Graph attention: scores, softmax, dropout and aggregation in one pass over the entries."""

from typing import Any

import numpy as np

from ...formats.arrays import Array, allocating, contiguous, namespace, on_device_of
from ...formats.base import Format
from ...formats.compressed import CSR
from ..engine import checks as engine_checks
from ..engine import choose
from . import checks
from .checks import headed, shaped_as


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
        The entries' own part, in CSR order (that of ``A.tocsr()``).
    negative_slope : float
    dropout : float
        From 0 to less than 1.
    seed : int
        Of ``M``, which depends on it, the entry's number in CSR order and the head alone.
    self_loops : bool
        As if each vertex of a square ``A`` had exactly one loop: stored entries with ``i == j`` are
        left out, and each row has one more entry ``(i, i)``, without a part of its own.
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
        If rows, columns or heads do not fit together, ``dropout`` lies outside its range,
        ``self_loops`` is asked of an ``A`` that is not square, or ``out`` has not the result's
        shape.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, dtypes do not fit, ``negative_slope`` or ``dropout`` is no
        number, ``seed`` no integer or ``self_loops`` no truth value.
    DeviceError
        If the arguments are on different devices.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made.  The mask is by Philox4x32-10: an
    entry is dropped from head ``h`` where the first word of the counter ``(e, h)`` lies below
    ``dropout * 2**32``; loops of ``self_loops`` count from ``nnz`` on.  GAT (ICLR'18), equations 1
    to 4; fuseGNN (ICCAD'20), section 3.
    """
    A, arrays = _operands(A, H, el, er, edge_scores)
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    H = arrays[0]
    inputs = [*arrays, *engine_checks.arrays_of(A)]
    out = engine_checks.output(out, shape=(A.n_rows, *H.shape[1:]), like=H, inputs=inputs)
    choose.run("gat", engine_checks.structure(A), *_packed(*arrays), out=headed(out), **options)
    return out


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
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of ``gat`` in the features and in all parts of the scores.

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

    Returns
    -------
    dH, del, der : array
        Of the shapes and dtypes of ``H``, ``el`` and ``er``.
    dedge_scores : array or None
        ``dz``, of the shape and dtype of ``edge_scores``, 0 at stored loops that ``self_loops``
        leaves out; None if none were given.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat``; also if ``grad`` has not the shape of the result or another dtype than ``H``.

    Notes
    -----
    Deterministic: no atomics.  ``O`` and the statistics of ``P`` are computed anew, and the
    transpose by ``A.tocsc_with_perm()``, at each call; ``autograd`` keeps both.  Other arrays of
    the size of the entries are made only where ``edge_scores`` are given.  ``dz`` is linear in sums
    of the positive and the negative scores of a row, which are made apart: no entry needs the
    product ``<grad, H>`` but for ``dedge_scores``.
    """
    A, arrays = _operands(A, H, el, er, edge_scores)
    H, el, er, edges = arrays
    grad = engine_checks.features("grad", grad, A=A, axis="rows", heads=True)
    engine_checks.alike("grad", grad, "H", H)
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    packed = _packed(*arrays)
    with on_device_of(H), allocating(f"gradients of {H.size} features and their scores"):
        empty = namespace(H).empty
        dH = empty(H.shape, H.dtype)
        dell, der, dedges = (None if a is None else empty(a.shape, a.dtype) for a in packed[1:])
        choose.run(
            *("gat_backward", engine_checks.structure(A), *packed, headed(contiguous(grad))),
            **{"out": headed(dH), "dell": dell, "der": der, "dedges": dedges, **options},
        )
        left, right = shaped_as(dell, el), shaped_as(der, er)
        return dH, left, right, None if edges is None else shaped_as(dedges, edges)


def gat_attention(
    A: Format,
    el: Array,
    er: Array,
    *,
    edge_scores: Array | None = None,
    negative_slope: float = 0.2,
    self_loops: bool = False,
) -> Array:
    """The attention ``P`` of ``gat`` at each stored entry, before any dropout.

    Parameters
    ----------
    A, el, er, edge_scores, negative_slope, self_loops
        As for ``gat``; ``er`` and ``edge_scores`` have the dtype of ``el``, or
        float32 beside 2 bytes.

    Returns
    -------
    array, shape (nnz, heads), or (nnz,) where ``el`` has no heads
        In CSR order; float32, or float64 for such scores.  Of sum 1 in each row that has entries;
        with ``self_loops`` stored loops have 0, and what a row lacks is its one loop's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``gat``.

    Notes
    -----
    Deterministic.  GAT (ICLR'18), equation 3.
    """
    A = engine_checks.sparse("A", A)
    el = checks.of_sources(el, A=A)
    heads, like = el.shape[1:], ("el", el)
    er = checks.scores("er", er, A=A, each="target", heads=heads, like=like)
    edges = checks.of_entries(edge_scores, A=A, heads=heads, like=like)
    slope, loops = checks.number("negative_slope", negative_slope), checks.loops(A, self_loops)
    count = heads[0] if heads else 1
    left, right, own = (checks.packed(a, count) for a in (el, er, edges))
    out = engine_checks.output(None, shape=(A.nnz, *heads), like=left, inputs=[])
    probabilities = out.reshape(A.nnz, count)
    arrays = engine_checks.structure(A), left, right, own
    choose.run("gat_attention", *arrays, out=probabilities, slope=slope, loops=loops)
    return out


def _operands(
    A: Format, H: Array, el: Array, er: Array, edge_scores: Array | None
) -> tuple[Format, tuple[Array, Array, Array, Array | None]]:
    """The checked matrix, and the arrays as they were given."""
    A = engine_checks.sparse("A", A)
    H = engine_checks.features("H", H, A=A, heads=True)
    heads, like = H.shape[1:-1], ("H", H)
    el = checks.scores("el", el, A=A, each="source", heads=heads, like=like)
    er = checks.scores("er", er, A=A, each="target", heads=heads, like=like)
    return A, (H, el, er, checks.of_entries(edge_scores, A=A, heads=heads, like=like))


def _packed(
    H: Array, el: Array, er: Array, edges: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """The arrays as kernels take them, with an axis for heads."""
    H = headed(contiguous(H))
    left, right, own = (checks.packed(a, H.shape[1]) for a in (el, er, edges))
    return H, left, right, own


# Launchers


def _gat_gpu(A: CSR, *arrays: Array | None, **options: Any) -> None:
    from . import cuda_gat_backward

    cuda_gat_backward.gat(A, *arrays, **options)


def _backward_gpu(A: CSR, *arrays: Array | None, **options: Any) -> None:
    from . import cuda_gat_backward

    cuda_gat_backward.gat_backward(A, *arrays, **options)


def _attention_gpu(A: CSR, *arrays: Array | None, **options: Any) -> None:
    from . import cuda_gat_backward

    cuda_gat_backward.gat_attention(A, *arrays, **options)


def _gat_numba(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, *, out: Array, **options: Any
) -> None:
    from . import cpu

    cpu.gat(A.indptr, A.indices, H, el, er, out, edges=edges, **options)


def _backward_numba(
    A: CSR, H: Array, el: Array, er: Array, edges: Array | None, grad: Array, *, out: Array,
    dell: Array, der: Array, dedges: Array | None, **options: Any,
) -> None:  # fmt: skip
    from . import cpu

    structure, options = (A.indptr, A.indices), {**options, "edges": edges}
    result, plus = (np.empty(grad.shape, el.dtype) for _ in range(2))
    stats = np.empty((*er.shape, 4), el.dtype)
    cpu.gat(*structure, H, el, er, result, plus=plus, stats=stats, **options)
    columns, perm = A.with_data(None).tocsc_with_perm()
    arrays = *structure, columns.indptr, columns.indices, perm, grad, H, el, er, result, plus, stats
    options = {**options, "dH": out, "dell": dell, "der": der, "dedges": dedges}
    cpu.gat_backward(*arrays, **options)


def _attention_numba(
    A: CSR, el: Array, er: Array, edges: Array | None, *, out: Array, slope: float, loops: bool
) -> None:
    from . import cpu

    cpu.gat_attention(A.indptr, A.indices, el, er, out, edges=edges, slope=slope, loops=loops)


choose.register(*choose.over_rows("gat", _gat_gpu, _gat_numba))
choose.register(*choose.over_rows("gat_backward", _backward_gpu, _backward_numba))
choose.register(*choose.over_rows("gat_attention", _attention_gpu, _attention_numba))
