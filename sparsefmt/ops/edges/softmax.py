"""Attention over edges: softmax of each row's scores, and the way back."""

from typing import Any

from ...errors import ShapeError
from ...formats.arrays import Array, contiguous
from ...formats.base import Format
from ...formats.compressed import CSR
from ..engine import checks, choose
from ..engine.choose import pointer


def edge_softmax(A: Format, scores: Array, *, out: Array | None = None) -> Array:
    """Softmax of the scores of each row's entries, head by head.

    ``p[e] = exp(s[e] - m) / sum_e' exp(s[e'] - m)`` over the entries of a row, ``m`` the largest of
    their scores: nothing overflows, whatever the scores.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        Only the structure is read; ``A.data`` is ignored.  Other formats are converted to CSR, at
        each call.
    scores : array, shape (nnz,) or (nnz, heads)
        In CSR order (that of ``A.tocsr()``); float16, bfloat16, float32 or float64.  2-byte scores
        are computed in float32.
    out : array, shape of ``scores``, optional
        Takes the result; contiguous, of the scores' dtype and device, overlapping no input.

    Returns
    -------
    array, shape of ``scores``
        Positive, and of sum 1 in each row that has entries.  A row whose scores are all -inf, or
        which has a NaN or +inf, gives NaN, as in PyTorch.

    Raises
    ------
    ShapeError
        If ``scores`` has not one row per stored entry, or ``out`` not the shape of ``scores``.
    FormatError
        If ``out`` is not contiguous, is read-only, or overlaps an input.
    DtypeError
        If ``A`` is no sparse format, or dtypes do not fit.
    DeviceError
        If the arguments are on different devices.

    Notes
    -----
    Deterministic.  The relative error is at most ``2 eps (deg + 4 + d + D)``, where ``d`` is the
    score's distance from the row's largest and ``D`` its mean under ``p``.  A probability below the
    least normal number of float32 (of float64 for such scores) may become 0.  The attention of GAT
    as fuseGNN (ICCAD'20), section 3, aggregates it.
    """
    A = checks.sparse("A", A)
    scores = checks.entries("scores", scores, A=A)
    inputs = [scores, *A._arrays().values()]
    out = checks.output(out, shape=scores.shape, like=scores, inputs=inputs)
    return choose.run("edge_softmax", checks.structure(A), contiguous(scores), out=out)


def edge_softmax_backward(
    A: Format, probabilities: Array, grad: Array, *, out: Array | None = None
) -> Array:
    """Gradient of ``edge_softmax`` in its scores.

    ``ds[e] = p[e] * (grad[e] - sum_e' p[e'] grad[e'])`` over the entries of a row, head by head.

    Parameters
    ----------
    A : CSR, shape (n_rows, n_cols)
        As given to ``edge_softmax``.
    probabilities : array, shape (nnz,) or (nnz, heads)
        What ``edge_softmax`` returned.
    grad : array, shape of ``probabilities``
        Of the probabilities, in their dtype.
    out : array, shape of ``probabilities``, optional
        Takes the result; contiguous, of their dtype and device, overlapping no input.

    Returns
    -------
    array, shape of ``probabilities``

    Raises
    ------
    ShapeError, FormatError, DtypeError, DeviceError
        As ``edge_softmax``; also if ``grad`` has another shape or dtype than ``probabilities``.

    Notes
    -----
    Deterministic.
    """
    A = checks.sparse("A", A)
    p = checks.entries("probabilities", probabilities, A=A)
    grad = checks.entries("grad", grad, A=A)
    if grad.shape != p.shape:
        raise ShapeError(f"grad has shape {grad.shape} but probabilities {p.shape}: give the same.")
    checks.same_dtype("grad", grad, "probabilities", p)
    inputs = [p, grad, *A._arrays().values()]
    out = checks.output(out, shape=p.shape, like=p, inputs=inputs)
    arrays = contiguous(p), contiguous(grad)
    return choose.run("edge_softmax_backward", checks.structure(A), *arrays, out=out)


def _softmax_gpu(A: CSR, scores: Array, *, out: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    cuda.edge_softmax(
        matmul_cuda.structure(A),
        str(scores.dtype),
        heads=_heads(scores),
        scores=pointer(scores),
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )


def _backward_gpu(A: CSR, p: Array, grad: Array, *, out: Array) -> None:
    from ..matmul import cuda as matmul_cuda
    from . import cuda

    cuda.edge_softmax_backward(
        matmul_cuda.structure(A),
        str(p.dtype),
        heads=_heads(p),
        probabilities=pointer(p),
        grad=pointer(grad),
        out=pointer(out),
        stream=matmul_cuda.stream(),
    )


def _softmax_numba(A: CSR, scores: Array, *, out: Array) -> None:
    from ..engine import cpu

    shape = A.nnz, _heads(scores)
    cpu.edge_softmax(A.indptr, scores.reshape(shape), out.reshape(shape))


def _backward_numba(A: CSR, p: Array, grad: Array, *, out: Array) -> None:
    from ..engine import cpu

    p, grad, result = (a.reshape(A.nnz, _heads(p)) for a in (p, grad, out))
    cpu.edge_softmax_backward(A.indptr, p, grad, result)


def _heads(entries: Array) -> int:
    return entries.shape[1] if entries.ndim == 2 else 1


def _rows(op: str, on_gpu: Any, on_cpu: Any) -> tuple[choose.Kernel, ...]:
    csr = choose.is_format("csr")
    return (
        choose.Kernel(op, f"{op}_csr", choose.all_of(choose.on_gpu, csr), on_gpu),
        choose.Kernel(op, f"{op}_numba", choose.all_of(choose.on_cpu, csr), on_cpu),
        choose.through_csr(op),
    )


choose.register(*_rows("edge_softmax", _softmax_gpu, _softmax_numba))
choose.register(*_rows("edge_softmax_backward", _backward_gpu, _backward_numba))
