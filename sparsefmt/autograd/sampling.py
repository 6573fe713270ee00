"""Aggregate a sample of each row: the public function and its ``torch.autograd.Function``."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..ops.engine.bind import flag
from ..ops.sampling.options import SampleOptions, refuse_both
from ..ops.sampling.options import strategy as checked
from ..ops.sampling.options import width as width_of
from .engine import checks as _check
from .engine.library import LibraryOp
from .engine.memory import sums_dtype
from .engine.recording import once_differentiable, recorded, taped
from .matmul import csr_operands
from .tensors.prepare import GraphLike, tensors_of
from .tensors.shared import Shared
from .tensors.tensors import GraphTensors

SPMM_SAMPLED = LibraryOp("spmm_sampled")
SPMM_SAMPLED_DX = LibraryOp("spmm_sampled_dx")
SPMM_SAMPLED_DA = LibraryOp("spmm_sampled_da")
checked_strategy, sample_width = checked, width_of  #: for layers, which have no graph yet

_INSTEAD = (
    "give the sample as a graph of its own, which sparsefmt.ops.sample makes, to spmm, whose "
    "gradients can be"
)


def sampled_aggregate(
    graph: GraphLike,
    x: Tensor,
    width: int,
    edge_weight: Tensor | None = None,
    *,
    strategy: str = "bucket",
    seed: int | Tensor | None = None,
    mean: bool = False,
    rescale: bool = False,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """Aggregate the features of at most ``width`` in-neighbours of each vertex, differentiably.

    ``y[i, f] = r[i] * s[i] * sum_e a[e] * c[j] * x[j, f]`` over the sampled entries ``e = (i, j)``
    of row ``i``, ``min(width, nnz_i)`` of its ``nnz_i``; 0 for a row without any.  ``s[i]`` is 1,
    with ``mean`` 1 over the number of the sampled ones, with ``rescale`` ``nnz_i`` over it.

    Parameters
    ----------
    graph, x, edge_weight, row_scale, col_scale
        As for ``spmm``.
    width : int
        Most entries of a row, 1 or more; a row that has no more is taken whole.
    strategy : "bucket", "fastrand" or "random"
        Which entries of a longer row: its first ones; those at ``k * 577 mod nnz_i`` (by the next
        prime where 577 divides ``nnz_i``); or a random sample without replacement.
    seed : int or Tensor of one int64, optional
        For "random", whose sample depends on the seed, the row and ``nnz_i`` alone.  By default a
        new seed is drawn from torch's generator of the device at each call, and at each replay of a
        CUDA graph.  The other strategies draw nothing.
    mean, rescale : bool
        At most one of them.  With "random" and ``rescale`` the expected sum is that of all entries.

    Returns
    -------
    Tensor, shape (n_rows, feat)
        In the dtype of ``x``, or autocast's.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        As ``spmm``; also if ``width`` is less than 1, or ``seed`` is not one integer.
    UnsupportedError
        If there is no such ``strategy``, ``mean`` and ``rescale`` are both asked for, or in
        backward a gradient is differentiated again; also as ``spmm``.

    Notes
    -----
    All four tensors have gradients, over the sample of forward, which backward makes again from the
    seed; that of ``edge_weight`` is 0 for what was not sampled.  Deterministic, backward too, which
    sorts the columns of the sample and reads no transpose of the graph: its memory is a few indices
    for each place of the sample, of which there are at most ``nnz``.  A scale that has a gradient
    multiplies outside the kernel.  ``ops.sample`` gives the sample as a graph.  ES-SpMM (arXiv
    2104.10716), equation 2 and section VI.
    """
    width, strategy = sample_width("width", width), checked_strategy(strategy)
    flag("mean", mean)
    flag("rescale", rescale)
    refuse_both(mean, rescale)
    if isinstance(graph, Shared) and graph.complete is None:
        drawing = {"strategy": strategy, "seed": seed, "mean": mean, "rescale": rescale}
        scales = {"row_scale": row_scale, "col_scale": col_scale}
        return graph.sampled_aggregate(x, width, edge_weight, **drawing, **scales)
    tensors = tensors_of(graph, x)
    x, values, r, c = csr_operands(tensors, x, edge_weight, row_scale, col_scale)
    _check.seed(seed, tensors)
    drawn = _check.seed_on_device(seed, tensors) if strategy == "random" else None
    options = SampleOptions(drawn, width, strategy, mean, rescale)
    if recorded(r, c):
        with torch.autocast(tensors.kind, enabled=False):
            return _scaled(tensors, options, x, values, r, c)
    return _aggregate(tensors, options, x, values, r, c)


def _scaled(
    tensors: GraphTensors, options: SampleOptions, x: Tensor, *factors: Tensor | None
) -> Tensor:
    """Aggregate, and multiply by scales with a gradient outside the kernel; round only once."""
    wide = sums_dtype(x)
    a, r, c = (None if factor is None else factor.to(wide) for factor in factors)
    h, after = x.to(wide), None
    if c is not None and c.requires_grad:
        h, c = _ByColumns.apply(h, c), None  # type: ignore[no-untyped-call]
    if r is not None and r.requires_grad:
        # A row without entries stays 0, whatever its scale.
        empty = tensors.rows.indptr.diff() == 0
        after, r = r.masked_fill(empty, 0), None
    y = _aggregate(tensors, options, h, a, r, c)
    return (y if after is None else y * after[:, None]).to(x.dtype)


def _aggregate(tensors: GraphTensors, options: SampleOptions, *inputs: Tensor | None) -> Tensor:
    """Aggregate, differentiably in features and edge values; nothing is checked.

    ``inputs`` are those, and the scales of rows and columns.
    """
    return taped(_Sampled, _sampled, inputs, tensors, options)


def _sampled(*args: Any) -> Tensor:
    *inputs, tensors, options = args
    out: Tensor = SPMM_SAMPLED(tensors.rows, *inputs, *options)
    return out


class _ByColumns(Function):
    """Compute ``x * c[:, None]``; rows that nobody sampled add 0 to gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale[:, None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        idle = grad == 0
        dx = (grad * scale[:, None]).masked_fill(idle, 0) if ctx.needs_input_grad[0] else None
        return dx, (grad * x).masked_fill(idle, 0).sum(1)


class _Sampled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        *factors, ctx.tensors, (seed, *ctx.options) = args
        saved = x if ctx.needs_input_grad[1] else None  # only the gradient of values reads x
        ctx.save_for_backward(saved, *factors, seed)
        return _sampled(x, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, *scales = ctx.saved_tensors
        side, options = ctx.tensors.current().rows, (*scales, *ctx.options)
        gradient = partial(once_differentiable, "sampled_aggregate", instead=_INSTEAD)
        dx = dv = None
        if ctx.needs_input_grad[0]:
            dx = gradient(SPMM_SAMPLED_DX, side, grad, values, *options)
        if ctx.needs_input_grad[1]:
            dv = gradient(SPMM_SAMPLED_DA, side, x, grad, *options)
        return dx, dv, *(None,) * 4
