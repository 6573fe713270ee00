"""Slow and obvious: what SDDMM and edge softmax compute, and how exactly; see matmul's oracle."""

import numpy as np

from ...formats.arrays import Array
from ...formats.base import Format
from ...formats.oracle import float64, stored_entries
from ..matmul.oracle import precision_of


def sddmm_oracle(A: Format, X: Array, Y: Array) -> Array:
    """Compute ``<X[i], Y[j]>`` at each stored entry ``(i, j)``, in the order of ``A``.

    Parameters
    ----------
    A : CSR, shape (n, m)
        Or another format; mind its order.
    X, Y : array, shape (n, feat) and (m, feat), or (n, heads, feat) and (m, heads, feat)

    Returns
    -------
    numpy.ndarray of float64, shape (nnz,) or (nnz, heads)

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 1, 2], [1, 0], shape=(2, 2))
    >>> X = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> sddmm_oracle(A, X, X).tolist()
    [11.0, 11.0]
    """
    X, Y = float64(X), float64(Y)
    result = np.zeros((A.nnz, *X.shape[1:-1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for e, (row, col, _) in enumerate(stored_entries(A)):
            result[e] = (X[row] * Y[col]).sum(axis=-1)
    return result


def sddmm_bound(A: Format, X: Array, Y: Array, *, factor: float = 2.0) -> Array:
    """Bound how far products of ``X`` and ``Y``, computed in their dtype, may lie from the oracle.

    ``factor * feat * (eps * sum |x| |y| + least normal number)``; shape as ``sddmm_oracle``.
    """
    eps, least = precision_of(X.dtype)
    size = sddmm_oracle(A, np.abs(float64(X)), np.abs(float64(Y)))
    return factor * X.shape[-1] * (eps * size + least)


def edge_softmax_oracle(A: Format, scores: Array) -> Array:
    """Compute the softmax of each row's scores in float64, head by head.

    Parameters
    ----------
    A : CSR, shape (n, m)
    scores : array, shape (nnz,) or (nnz, heads)
        In the order of the entries of ``A``.

    Returns
    -------
    numpy.ndarray of float64, shape of ``scores``
        NaN in rows whose largest score is infinite, and where a score is NaN.

    Examples
    --------
    >>> import numpy as np, sparsefmt
    >>> A = sparsefmt.CSR([0, 2, 3], [0, 1, 0], shape=(2, 2))
    >>> edge_softmax_oracle(A, np.array([5.0, 5.0, -1e4])).tolist()
    [0.5, 0.5, 1.0]
    """
    scores = float64(scores)
    result = np.zeros(scores.shape)
    with np.errstate(invalid="ignore"):
        for places in _places_by_row(A):
            powers = np.exp(scores[places] - scores[places].max(axis=0))
            result[places] = powers / powers.sum(axis=0)
    return result


def edge_softmax_bound(A: Format, scores: Array, *, factor: float = 2.0) -> Array:
    """Bound how far a softmax, computed in the scores' dtype, may lie from the oracle.

    ``factor * p * eps * (deg + 4 + d + D)`` with ``d`` the score's distance from the row's largest
    and ``D`` its mean under ``p``: an argument of exp that is off by ``d * eps`` makes its power
    off by that part.  And ``factor`` times the least normal number.
    """
    eps, least = precision_of(scores.dtype)
    scores, p = float64(scores), edge_softmax_oracle(A, scores)
    bound = np.zeros(p.shape)
    with np.errstate(invalid="ignore"):
        for places in _places_by_row(A):
            far = scores[places].max(axis=0) - scores[places]
            mean = np.where(p[places] > 0, p[places] * far, 0).sum(axis=0)
            share = np.where(p[places] > 0, p[places] * (len(places) + 4 + far + mean), 0)
            bound[places] = factor * (eps * share + least)
    return bound


def edge_softmax_backward_oracle(A: Format, probabilities: Array, grad: Array) -> Array:
    """Compute ``p * (grad - sum of p * grad over the row)`` in float64, head by head."""
    p, grad = float64(probabilities), float64(grad)
    result = np.zeros(p.shape)
    for places in _places_by_row(A):
        mean = (p[places] * grad[places]).sum(axis=0)
        result[places] = p[places] * (grad[places] - mean)
    return result


def edge_softmax_backward_bound(
    A: Format, probabilities: Array, grad: Array, *, factor: float = 2.0
) -> Array:
    """Bound how far that gradient, computed in the dtype of ``grad``, may lie from the oracle.

    ``factor * (deg + 2) * (eps * |p| * (|grad| + sum |p| |grad|) + least normal number)``.
    """
    eps, least = precision_of(grad.dtype)
    p, grad = np.abs(float64(probabilities)), np.abs(float64(grad))
    bound = np.zeros(p.shape)
    for places in _places_by_row(A):
        size = p[places] * (grad[places] + (p[places] * grad[places]).sum(axis=0))
        bound[places] = factor * (len(places) + 2) * (eps * size + least)
    return bound


def _places_by_row(A: Format) -> list[list[int]]:
    """Number the entries of each row that has some."""
    result: dict[int, list[int]] = {}
    for e, (row, _, _) in enumerate(stored_entries(A)):
        result.setdefault(row, []).append(e)
    return list(result.values())
