"""The library ops ``torch.ops.sparsefmt.*``: schemas, CPU and CUDA kernels, fakes, autocast.

An op takes flat tensors and checks nothing: ``functions`` checks what users give.  A structure is
``indptr, indices, n_cols, plan``, where ``plan`` is empty on the CPU and holds the four arrays of
``CSR.chunks`` on a GPU.  Edge values are in the order of the graph's CSR; ``perm`` tells, for each
entry of a transposed structure, its number in that order, so that no permuted copy is made.
``aggregate_backward`` takes the structure of the transpose, and the scales of the graph.
Tiles are no arguments: kernels find them by the place of the structure (``_kept``).  Every op is
deterministic: each output is written by one thread group, in a fixed order of entries.  The ops of
attention are in ``bridge_attention``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _cpu, _cuda, _cuda_aggregate
from ._library import autocast_dtype, cast, define, define_autocast, needs_no_dispatcher, unwatched
from .structure import Side

_ON_CUDA = vars(_cuda) | vars(_cuda_aggregate)

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_SCALES = "Tensor? row_scale, Tensor? col_scale"
_SCHEMAS = (
    f"spmm({_STRUCTURE}, Tensor x, Tensor? values, Tensor? perm, {_SCALES}, str reduce) -> Tensor",
    f"spmm_arg({_STRUCTURE}, Tensor x, Tensor? values, {_SCALES}, str reduce) -> (Tensor, Tensor)",
    f"spmm_arg_dx({_STRUCTURE}, Tensor perm, Tensor grad, Tensor arg, Tensor? values, {_SCALES}) "
    "-> Tensor",
    f"spmm_arg_da({_STRUCTURE}, Tensor x, Tensor grad, Tensor arg, {_SCALES}) -> Tensor",
    f"aggregate_backward({_STRUCTURE}, Tensor x, Tensor grad, Tensor? values, Tensor? perm, "
    f"{_SCALES}) -> (Tensor, Tensor)",
)

# The shapes of results, for torch.compile


def _rows_of(indptr: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((indptr.shape[0] - 1, x.shape[1]))


def _spmm_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return _rows_of(indptr, x)


def _spmm_arg_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    out = _rows_of(indptr, x)
    return out, torch.empty_like(out, dtype=indices.dtype)


def _spmm_arg_dx_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    perm: Tensor,
    grad: Tensor,
    *_: Any,
) -> Any:
    return _rows_of(indptr, grad)


def _one_per_entry(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return x.new_empty(indices.shape)


def _sddmm_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return x.new_empty((indices.shape[0], *x.shape[1:-1]))


def _aggregate_backward_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return _rows_of(indptr, x), x.new_empty(indices.shape)


_FAKES: dict[str, Any] = {
    "spmm": _spmm_fake,
    "spmm_arg": _spmm_arg_fake,
    "spmm_arg_dx": _spmm_arg_dx_fake,
    "spmm_arg_da": _one_per_entry,
    "aggregate_backward": _aggregate_backward_fake,
}

# Autocast: products in the autocast dtype, softmax in float32; float64 stays, as in torch

_TO_AUTOCAST_DTYPE = ("spmm", "spmm_arg")


def _autocast(op: Any, kind: str, *, narrow: bool) -> Any:
    def kernel(*args: Any) -> Any:
        dtype = autocast_dtype(kind, narrow=narrow)
        with torch.autocast(kind, enabled=False):
            return op(*(cast(value, kind, dtype) for value in args))

    return kernel


def _register() -> None:
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        define(schema, getattr(_cpu, name), _cuda.of_tensors(_ON_CUDA[name]), _FAKES[name])
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


class FeatureOp(_Ways):
    """A library op of features alone."""

    def __call__(self, x: Tensor, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if not torch.compiler.is_compiling() and x.is_cuda and unwatched((x, *args)):
            return self.kernel(x, *args)
        return self.library(x, *args)


SPMM = Op("spmm")
SPMM_ARG = Op("spmm_arg")
SPMM_ARG_DX = Op("spmm_arg_dx")
SPMM_ARG_DA = Op("spmm_arg_da")
AGGREGATE_BACKWARD = Op("aggregate_backward")
