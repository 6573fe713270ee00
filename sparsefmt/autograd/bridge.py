"""The library ops ``torch.ops.sparsefmt.*``: schemas, CPU and CUDA kernels, fakes, autocast.

An op takes flat tensors and checks nothing: ``functions`` checks what users give.  A structure is
``indptr, indices, n_cols, plan``, where ``plan`` is empty on the CPU and holds the four arrays of
``CSR.chunks`` on a GPU.  Edge values are in the order of the graph's CSR; ``perm`` tells, for each
entry of a transposed structure, its number in that order, so that no permuted copy is made.
Every op is deterministic: each output is written by one thread group, in a fixed order of entries.
"""

from typing import Any

import torch
from torch import Tensor

from . import _cpu, _cuda

_library: Any = torch.library.Library("sparsefmt", "DEF")  # type: ignore[no-untyped-call]

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_SCALES = "Tensor? row_scale, Tensor? col_scale"
_SCHEMAS = (
    f"spmm({_STRUCTURE}, Tensor x, Tensor? values, Tensor? perm, {_SCALES}, str reduce) -> Tensor",
    f"spmm_arg({_STRUCTURE}, Tensor x, Tensor? values, {_SCALES}, str reduce) -> (Tensor, Tensor)",
    f"spmm_arg_dx({_STRUCTURE}, Tensor perm, Tensor grad, Tensor arg, Tensor? values, {_SCALES}) "
    "-> Tensor",
    f"spmm_arg_da({_STRUCTURE}, Tensor x, Tensor grad, Tensor arg, {_SCALES}) -> Tensor",
    f"sddmm({_STRUCTURE}, Tensor x, Tensor y, {_SCALES}) -> Tensor",
    f"edge_softmax({_STRUCTURE}, Tensor scores) -> Tensor",
    f"edge_softmax_backward({_STRUCTURE}, Tensor probabilities, Tensor grad) -> Tensor",
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


def _spmm_arg_da_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return x.new_empty(indices.shape)


def _sddmm_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], x: Tensor, *_: Any
) -> Any:
    return x.new_empty((indices.shape[0], *x.shape[1:-1]))


def _like_last(*args: Any) -> Any:
    return args[-1].new_empty(args[-1].shape)


_FAKES: dict[str, Any] = {
    "spmm": _spmm_fake,
    "spmm_arg": _spmm_arg_fake,
    "spmm_arg_dx": _spmm_arg_dx_fake,
    "spmm_arg_da": _spmm_arg_da_fake,
    "sddmm": _sddmm_fake,
    "edge_softmax": _like_last,
    "edge_softmax_backward": _like_last,
}

# Autocast: products in the autocast dtype, softmax in float32; float64 stays, as in torch

_TO_AUTOCAST_DTYPE = ("spmm", "spmm_arg", "sddmm")
_TO_FLOAT32 = ("edge_softmax", "edge_softmax_backward")


def autocast_dtype(kind: str, *, narrow: bool) -> torch.dtype:
    """What autocast on this kind of device casts to, for products or for softmax."""
    return torch.get_autocast_dtype(kind) if narrow else torch.float32


def cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    """``value`` as autocast would cast it: floating tensors of that kind of device, not float64."""
    if (
        not isinstance(value, Tensor)
        or value.dtype not in (torch.float16, torch.bfloat16, torch.float32)
        or value.device.type != kind
    ):
        return value
    return value.to(dtype)


def _autocast(op: Any, kind: str, *, narrow: bool) -> Any:
    def kernel(*args: Any) -> Any:
        dtype = autocast_dtype(kind, narrow=narrow)
        with torch.autocast(kind, enabled=False):
            return op(*(cast(value, kind, dtype) for value in args))

    return kernel


def _register() -> None:
    for schema in _SCHEMAS:
        name = _library.define(schema).split("::")[-1]
        _library.impl(name, getattr(_cpu, name), "CPU")
        _library.impl(name, getattr(_cuda, name), "CUDA")
        torch.library.register_fake(f"sparsefmt::{name}", _FAKES[name], lib=_library)
    for name in _TO_AUTOCAST_DTYPE + _TO_FLOAT32:
        op = getattr(torch.ops.sparsefmt, name).default
        for kind, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _library.impl(name, _autocast(op, kind, narrow=name in _TO_AUTOCAST_DTYPE), key)


_register()

SPMM = torch.ops.sparsefmt.spmm.default
SPMM_ARG = torch.ops.sparsefmt.spmm_arg.default
SPMM_ARG_DX = torch.ops.sparsefmt.spmm_arg_dx.default
SPMM_ARG_DA = torch.ops.sparsefmt.spmm_arg_da.default
SDDMM = torch.ops.sparsefmt.sddmm.default
EDGE_SOFTMAX = torch.ops.sparsefmt.edge_softmax.default
EDGE_SOFTMAX_BACKWARD = torch.ops.sparsefmt.edge_softmax_backward.default
