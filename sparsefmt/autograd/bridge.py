"""The library ops ``torch.ops.sparsefmt.*``: schemas, CPU and CUDA kernels, fakes, autocast.

An op takes flat tensors and checks nothing: ``functions`` checks what users give.  A structure is
``indptr, indices, n_cols, plan``, where ``plan`` is empty on the CPU and holds the four arrays of
``CSR.chunks`` on a GPU.  Edge values are in the order of the graph's CSR; ``perm`` tells, for each
entry of a transposed structure, its number in that order, so that no permuted copy is made.
Row-balanced features are ``columns`` and ``kept``, both (n_rows, k); ``sspmm`` takes the structure
of the transpose and the scales of the graph, ``sspmm_outer`` the structure of the graph itself.
Tiles and windows are no arguments: kernels find them by the place of the structure (``_kept``).
Every op but ``sspmm_outer``, whose CUDA kernel adds up by atomics, is deterministic: each output is
written by one thread group, in a fixed order of entries.  The ops of attention are in
``bridge_attention``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _cpu, _cuda, _cuda_cbsr
from ._layout import balanced
from ._library import autocast_dtype, cast, define, define_autocast, needs_no_dispatcher, unwatched
from .structure import Side

_ON_CUDA = vars(_cuda) | vars(_cuda_cbsr)

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_SCALES = "Tensor? row_scale, Tensor? col_scale"
_SCHEMAS = (
    f"spgemm({_STRUCTURE}, Tensor columns, Tensor kept, SymInt feat, Tensor? values, {_SCALES}, "
    "str reduce) -> Tensor",
    f"sspmm({_STRUCTURE}, Tensor columns, Tensor grad, Tensor? values, Tensor perm, {_SCALES}) "
    "-> Tensor",
    f"sspmm_outer({_STRUCTURE}, Tensor columns, Tensor grad, Tensor? values, {_SCALES}) -> Tensor",
    f"sddmm_cbsr({_STRUCTURE}, Tensor x, Tensor columns, Tensor kept, {_SCALES}) -> Tensor",
)
#: Of features alone, without a structure.
_FEATURE_SCHEMAS = (
    "maxk(Tensor x, SymInt k) -> (Tensor, Tensor)",
    "cbsr_to_dense(Tensor columns, Tensor kept, SymInt feat) -> Tensor",
    "dense_to_cbsr(Tensor x, Tensor columns) -> Tensor",
)

# The shapes of results, for torch.compile


def _rows_of(indptr: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, x.shape[1]))


def _spmm_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return _rows_of(indptr, x)


def _one_per_entry(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return x.new_empty(indices.shape)


def _like_last(*args: Any) -> Any:
    return args[-1].new_empty(args[-1].shape)


def _spgemm_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    columns: Tensor,
    kept: Tensor,
    feat: int,
    *_: Any,
) -> Any:
    return kept.new_empty((indptr.shape[0] - 1, feat))


def _sspmm_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    columns: Tensor,
    grad: Tensor,
    *_: Any,
) -> Any:
    return grad.new_empty(columns.shape)


def _cbsr_to_dense_fake(columns: Tensor, kept: Tensor, feat: int) -> Any:
    return kept.new_empty((kept.shape[0], feat))


def _dense_to_cbsr_fake(x: Tensor, columns: Tensor) -> Any:
    return x.new_empty(columns.shape)


_FAKES: dict[str, Any] = {
    "spgemm": _spgemm_fake,
    "sspmm": _sspmm_fake,
    "sspmm_outer": _sspmm_fake,
    "sddmm_cbsr": _one_per_entry,
    "maxk": balanced,
    "cbsr_to_dense": _cbsr_to_dense_fake,
    "dense_to_cbsr": _dense_to_cbsr_fake,
}

# Autocast: products in the autocast dtype, softmax in float32; float64 stays, as in torch

_TO_AUTOCAST_DTYPE = (*("spgemm", "sspmm", "sspmm_outer", "sddmm_cbsr"),)


def _autocast(op: Any, kind: str, *, narrow: bool) -> Any:
    def kernel(*args: Any) -> Any:
        dtype = autocast_dtype(kind, narrow=narrow)
        with torch.autocast(kind, enabled=False):
            return op(*(cast(value, kind, dtype) for value in args))

    return kernel


def _register() -> None:
    for schema in _SCHEMAS + _FEATURE_SCHEMAS:
        name = schema.split("(")[0]
        kernel = _ON_CUDA[name]
        if name == "sspmm_outer":
            kernel = _cuda_cbsr.without_plan(kernel)
        elif schema in _SCHEMAS:
            kernel = _cuda.of_tensors(kernel)
        define(schema, getattr(_cpu, name), kernel, _FAKES[name])
    for name in _TO_AUTOCAST_DTYPE:
        define_autocast(name, partial(_autocast, narrow=True))


_register()

# The ops as ``gradients`` calls them


class _Ways:
    """The two ways to a library op's kernels.

    The dispatcher takes 12 to 15 µs to reach a kernel written in Python: where it would do nothing
    else, the CUDA kernel is called at once.
    """

    def __init__(self, name: str, kernels: Mapping[str, Any] = _ON_CUDA) -> None:
        self.library: Any = getattr(torch.ops.sparsefmt, name).default
        self.kernel: Any = kernels[name]


class Op(_Ways):
    """A library op, called with a ``Side`` in the place of its structure."""

    def __call__(self, side: Side, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if needs_no_dispatcher(side, args):
            return self.kernel(side.structure, *args)
        return self.library(side.indptr, side.indices, side.n_cols, side.plan, *args)


class OuterOp(Op):
    """``sspmm_outer``, whose kernel asks for windows by the tensors of its structure."""

    def __call__(self, side: Side, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        structure = side.indptr, side.indices, side.n_cols
        if needs_no_dispatcher(side, args):
            return self.kernel(*structure, *args)
        return self.library(*structure, side.plan, *args)


class FeatureOp(_Ways):
    """A library op of features alone."""

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if not torch.compiler.is_compiling() and x.is_cuda and unwatched((x, *args)):
            return self.kernel(x, *args)
        return self.library(x, *args)


SPGEMM = Op("spgemm")
SSPMM = Op("sspmm")
SSPMM_OUTER = OuterOp("sspmm_outer")
SDDMM_CBSR = Op("sddmm_cbsr")
MAXK = FeatureOp("maxk")
CBSR_TO_DENSE = FeatureOp("cbsr_to_dense")
DENSE_TO_CBSR = FeatureOp("dense_to_cbsr")
