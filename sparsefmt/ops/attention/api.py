"""Graph attention: scores, softmax, dropout and aggregation in one pass over the entries."""

from functools import partial
from typing import Any

from ...formats.arrays import Array, allocating, namespace, on_device_of
from ...formats.base import Format
from ..engine import checks as engine_checks
from ..engine import choose
from ..engine.table import Kernel, Op, Price, deferred
from ..matmul.api import ROUNDED, against_rounding
from . import checks
from .checks import shaped_as
from .gat import backward, cuda, small
from .operands import GatArguments, heads_and_feat, shape_of, sums_dtype


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
        The entries' own part, in the order of A's own data.
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
    UnsupportedError
        If ``precision`` is unknown, or given for other features than float32.

    Notes
    -----
    Deterministic.  No array of the size of the entries is made, but for small graphs on the CPU.
    With bf16 a result is off by
    ``2**-8 * sum_e M[e, h] P[e, h] |H[j, h, :]|`` at most, beside float32's own rounding, and
    features beyond 3.39e38 become infinite.  The mask is by Philox4x32-10: an
    entry is dropped from head ``h`` where the first word of the counter ``(e, h)`` lies below
    ``dropout * 2**32``; loops of ``self_loops`` count from ``nnz`` on.  GAT (ICLR'18), equations 1
    to 4; fuseGNN (ICCAD'20), section 3.
    """
    A, arrays = _operands(A, H, el, er, edge_scores)
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    H = arrays[0]
    precision = engine_checks.precision(precision, "H", H)
    shape = A.shape[0], *H.shape[1:]
    out = engine_checks.output(out, shape=shape, like=H, inputs=arrays, A=A)
    given = None, *arrays, None, *options
    A = engine_checks.structure(A)
    found: Array = choose.run(GAT, A, *given, out=out, precision=precision)
    return found


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
    grad = checks.gradient(grad, A, "H", H)
    options = checks.options(A, negative_slope, dropout, seed, self_loops)
    precision = engine_checks.precision(precision, "H", H)
    forward = None, None, None  # made anew, as is the transpose
    given = None, None, grad, *forward, edges is not None, *arrays, None, *options
    A = engine_checks.structure(A)
    found: Any = choose.run(GAT_BACKWARD, A, *given, precision=precision)
    return found and _as_given(found, el, er, edges)  # explain runs nothing


def _as_given(
    found: tuple[Array, ...], el: Array, er: Array, edges: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """Give the gradients the shapes and dtypes of the arrays they belong to."""
    dH, d_el, d_er, _, d_edges = found
    with on_device_of(dH), allocating("gradients of scores"):
        left, right = shaped_as(d_el, el), shaped_as(d_er, er)
        return dH, left, right, None if edges is None else shaped_as(d_edges, edges)


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
    A = engine_checks.sparse("A", A)
    el = checks.of_sources(el, A=A)
    heads, like = el.shape[1:], ("el", el)
    er = checks.scores("er", er, A=A, each="target", heads=heads, like=like)
    edges = checks.of_entries(edge_scores, A=A, heads=heads, like=like)
    slope, loops = checks.number("negative_slope", negative_slope), checks.loops(A, self_loops)
    shape, dtype = (A.nnz, *heads), sums_dtype(el)
    with on_device_of(el), allocating(f"a result of shape {shape}"):
        out = namespace(el).empty(shape, dtype)
    given = el, er, edges, slope, loops
    found: Array = choose.run(GAT_ATTENTION, engine_checks.structure(A), *given, out=out)
    return found


def _operands(
    A: Format, H: Array, el: Array, er: Array, edge_scores: Array | None
) -> tuple[Format, tuple[Array, Array, Array, Array | None]]:
    """Check the matrix and the arrays of a call."""
    A = engine_checks.sparse("A", A)
    H = engine_checks.features("H", H, A=A, heads=True)
    heads, like = H.shape[1:-1], ("H", H)
    el = checks.scores("el", el, A=A, each="source", heads=heads, like=like)
    er = checks.scores("er", er, A=A, each="target", heads=heads, like=like)
    return A, (H, el, er, checks.of_entries(edge_scores, A=A, heads=heads, like=like))


# The rows of the table

_CPU = f"{__package__}.gat.cpu"
_GAT = (
    "Tensor h, Tensor el, Tensor er, Tensor? edges, Tensor? loop_edges, Tensor? seed, "
    "float slope, float dropout, bool loops"
)
_SAVED = "Tensor grad, Tensor out, Tensor plus, Tensor statistics, bool of_edges"


def _results(S: Any, bias: Any, h: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.n_rows, *h.shape[1:]), h),)


def _results_with_statistics(S: Any, bias: Any, h: Any, *_: Any) -> tuple[Any, ...]:
    (out,) = _results(S, bias, h)
    return out, out, ((S.n_rows, heads_and_feat(h)[0], 4), sums_dtype(h))


def _gradients(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, plus: Any, statistics: Any, of_edges: bool,
    *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    a = GatArguments(*arguments)
    shapes = a.el.shape, a.er.shape, shape_of(a.loop_edges), shape_of(a.edges, of_edges)
    return (a.h.shape, a.h), *((shape, sums_dtype(a.h)) for shape in shapes)


def _gradients_of_vectors(
    S: Any, T: Any, perm: Any, grad: Any, out: Any, plus: Any, statistics: Any, of_edges: bool,
    source: Any, target: Any, bias: Any, *arguments: Any,
) -> tuple[Any, ...]:  # fmt: skip
    a, vectors = GatArguments(*arguments), ((2 if bias is None else 3), *source.shape)
    shapes = vectors, shape_of(a.loop_edges), shape_of(a.edges, of_edges)
    return (a.h.shape, a.h), *((shape, sums_dtype(a.h)) for shape in shapes)


def _scores(S: None, h: Any, *_: Any) -> tuple[Any, ...]:
    return ((h.shape[:-1], sums_dtype(h)),) * 2


def _one_per_entry(S: Any, el: Any, *_: Any) -> tuple[Any, ...]:
    return (((S.nnz, *el.shape[1:]), sums_dtype(el)),)


def _price(S: Any, bias: Any, h: Any, *_: Any) -> Price:
    """Every entry reads a row of the features and a score of each head."""
    heads, feat = heads_and_feat(h)
    row = heads * feat * h.itemsize
    scores = S.nnz * (4 + 4 * heads) + 8 * S.n_rows * heads
    return Price((S.nnz + S.n_rows) * row + scores, S.nnz * heads * (2 * feat + 8))


def _price_of_gradients(S: Any, T: Any, perm: Any, *args: Any) -> Price:
    """As much again over the transpose, whose entries read four numbers of each head."""
    h: Any = args[0]  # the gradient, of the shape and dtype of the result
    forward = _price(S, None, h)
    more = 12 * S.nnz * heads_and_feat(h)[0]
    return Price(forward.bytes + more, forward.flops)


def _against_rounding(
    A: Any, bias: Any, h: Any, *_: Any, precision: str | None = None, **__: Any
) -> list[str]:
    """List the reasons against rounding the features."""
    return against_rounding(A.nnz, h, precision)


def _against_rounding_backward(
    A: Any, T: Any, perm: Any, grad: Any, *_: Any, precision: str | None = None, **__: Any
) -> list[str]:
    """List the reasons against rounding the gradient of the result."""
    return against_rounding(A.nnz, grad, precision)


_FORWARD: dict[str, Any] = {
    "price": _price,
    "narrowed": ("bias", "h"),
    "rounds": _against_rounding,
    "grows": small.refuses,
}
_BACKWARD: dict[str, Any] = {
    "price": _price_of_gradients,
    "structures": 2,
    "rounds": _against_rounding_backward,
    "grows": small.refuses_gradients,
}


def _row(op: str, arguments: str, results: Any, *more: Kernel, **facts: Any) -> Op:
    """Make the row of an op: its kernels are the functions of that name, and ``more``.

    Where ``rounds`` tells what is against it, the first one rounds what entries gather; ``grows``
    tells when work on the CPU is too much for one thread.
    """
    run = getattr(cuda, op, None) or getattr(backward, op)
    loop, refuses = getattr(small, op), facts.pop("grows")
    own = [
        Kernel(f"{op}_csr_balanced", run, ("csr",), "gpu"),
        Kernel(f"{op}_csr_scipy", loop, ("csr",), "cpu", refuses=refuses),
        Kernel(f"{op}_csr_numba", deferred(_CPU, op), ("csr",), "cpu"),
    ]
    against = facts.pop("rounds", None)
    if against is not None:
        name, narrow = f"{op}_csr_rounded", partial(run, narrow=True)
        own.insert(0, Kernel(name, narrow, ("csr",), "gpu", refuses=against, note=ROUNDED))
    return Op(op, arguments, results, (*own, *more), **facts)


def _public(op: str, arguments: str, results: Any, **facts: Any) -> Op:
    """Make the row of a public function, which takes any format."""
    facts |= {"functions": (op,), "entries": ("edges",)}
    return _row(op, arguments, results, choose.convert_to_csr(op), **facts)


GAT = _public("gat", f"Tensor? bias, {_GAT}", _results, **_FORWARD)
GAT_WITH_STATISTICS = _row(
    "gat_with_statistics", f"Tensor? bias, {_GAT}", _results_with_statistics, returns=3, **_FORWARD
)
GAT_BACKWARD = _public(
    "gat_backward", f"{_SAVED}, {_GAT}", _gradients, returns=5, entry_results=(4,), **_BACKWARD
)
GAT_OF_VECTORS_BACKWARD = _row(
    "gat_of_vectors_backward",
    f"{_SAVED}, Tensor source, Tensor target, Tensor? bias, {_GAT}",
    _gradients_of_vectors,
    returns=4,
    **_BACKWARD,
)
GAT_SCORES = _row(
    "gat_scores",
    "Tensor h, Tensor source, Tensor target",
    _scores,
    returns=2,
    narrowed=("h", "source", "target"),
    structures=0,
    grows=small.refuses_scores,
)
GAT_ATTENTION = _public(
    "gat_attention",
    "Tensor el, Tensor er, Tensor? edges, float slope, bool loops",
    _one_per_entry,
    entry_results=(0,),
    grows=small.refuses_attention,
    library=False,
)
