"""The rows of GAT on NumPy arrays, around whatever loops sum over the entries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ....formats.arrays import Array
from ....formats.compressed import CSR
from ...engine.cpu_arrays import wide
from ..score import Forward, GatArguments, heads_and_feat, sums_dtype


class Dropping(NamedTuple):
    """Which entries are dropped: those whose random word is below ``below``."""

    seed: Any
    below: Any
    scale: Any  #: of the others


class Twin(NamedTuple):
    """Kernels of GAT made of three functions.

    ``forward(A, bias, arguments, out=None, train=True)`` gives a ``Forward`` as sums run, without
    what only backward needs unless ``train``.  ``gradients(A, (T, perm), grad, forward, of_edges,
    arguments)`` gives those of ``h, el, er, loop_edges, edges``; T and perm may be None.
    ``through_scores(h, dh, d_el, d_er, source, target)`` gives ``dh`` with what scores add to it,
    and the gradients of both vectors.
    """

    forward: Callable[..., Forward]
    gradients: Callable[..., tuple[Array, ...]]
    through_scores: Callable[..., tuple[Array, Array]]

    def gat(
        self, A: CSR, bias: Array | None, *arguments: Any, out: Array | None = None, **_: Any
    ) -> Array:
        """``out[i, k] = sum of M[e, k] P[e, k] h[j, k] + bias[k]``, as ``ops.gat``.

        The others are ``GatArguments``, here and in the gradients.
        """
        given = GatArguments(*arguments)
        out = np.empty((A.n_rows, *given.h.shape[1:]), given.h.dtype) if out is None else out
        found: Array = self.forward(A, bias, given, out=out, train=False).out
        return found

    def gat_with_statistics(self, A: CSR, bias: Array | None, *arguments: Any) -> Forward:
        """``gat``, and what its gradient needs."""
        given = GatArguments(*arguments)
        out, plus, statistics = self.forward(A, bias, given)
        return Forward(rounded(out, given.h), rounded(plus, given.h), statistics)

    def gat_backward(
        self, A: CSR, T: CSR | None, perm: Array | None, grad: Array, out: Array | None,
        plus: Array | None, statistics: Array | None, of_edges: bool, *arguments: Any, **_: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Gradients of ``h, el, er, loop_edges, edges``, empty where not given or not wanted.

        What is not given of the forward pass and of the transpose is made anew.
        """
        given, found = GatArguments(*arguments), Forward(out, plus, statistics)
        if statistics is None:
            found = self.forward(A, None, given)
        return self.gradients(A, (T, perm), grad, found, of_edges, given)

    def gat_of_vectors_backward(
        self, A: CSR, T: CSR, perm: Array, grad: Array, out: Array, plus: Array,
        statistics: Array, of_edges: bool, source: Array, target: Array, bias: Array | None,
        *arguments: Any,
    ) -> tuple[Array, ...]:  # fmt: skip
        """Gradients of ``h``, of ``source, target, bias`` in one array, ``loop_edges``, ``edges``.

        Vectors and bias are as ``gat_scores`` and ``gat`` had them.
        """
        given = GatArguments(*arguments)
        if bias is not None:
            out = wide(out) - wide(bias).reshape(given.h.shape[1:])
        found = Forward(out, plus, statistics)
        dh, d_el, d_er, *others = self.gradients(A, (T, perm), grad, found, of_edges, given)
        dh, d_vectors = self.through_scores(given.h, dh, d_el, d_er, source, target)
        if bias is not None:
            d_bias = np.ones(len(grad), d_el.dtype) @ wide(grad).reshape(len(grad), source.size)
            d_vectors = np.concatenate([d_vectors, d_bias.reshape(1, *source.shape)])
        return dh, d_vectors, *others


def by_head(h: Array) -> Array:
    """(heads, n, feat), as sums run."""
    return wide(h).reshape(len(h), *heads_and_feat(h)).transpose(1, 0, 2)


def type_of_sums(x: Array) -> Any:
    """The type in which sums of such features run."""
    return np.dtype(sums_dtype(x)).type


def rounded(values: Array, like: Array) -> Array:
    """Round to the dtype of an array."""
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(like.dtype, copy=False)


def dropping_of(share: float, seed: Any, kind: Any) -> Dropping:
    """Drop that share by a seed, None for none; ``kind`` is the type that sums run in."""
    below = min(round(share * 2**32), 2**32 - 1)
    number = 0 if seed is None else int(np.asarray(seed).item())
    scale = kind(1 / (1 - share) if below else 1)
    return Dropping(np.uint64(number % 2**64), np.uint64(below), scale)


def narrow(kind: Any, value: float) -> Any:
    """Convert to the type that sums run in, to infinity where it holds no such number."""
    with np.errstate(over="ignore"):
        return kind(value)
