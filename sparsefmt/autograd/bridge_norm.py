"""The library ops of GCN's normalisation: schemas, kernels, fakes and autocast, as in ``bridge``.

The result is in the order of the graph that stores the loops, each behind its row.  Without
``values`` it is float32, of ones.  ``gcn_norm_backward`` adds up by atomics on CUDA.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _cpu_norm, _cuda, _cuda_norm, _library, bridge
from .bridge import Op
from .structure import Side

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_SCHEMAS = (
    f"gcn_norm({_STRUCTURE}, Tensor? values, bool loops) -> Tensor",
    f"gcn_norm_backward({_STRUCTURE}, Tensor values, Tensor grad, bool loops) -> Tensor",
)


def _gcn_norm_fake(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    plan: list[Tensor],
    values: Tensor | None,
    loops: bool,
) -> Any:
    size = indices.shape[0] + (indptr.shape[0] - 1 if loops else 0)
    return indices.new_empty(size, dtype=torch.float32 if values is None else values.dtype)


def _gcn_norm_backward_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], values: Tensor, *_: Any
) -> Any:
    return values.new_empty(indices.shape)


_FAKES: dict[str, Any] = {
    "gcn_norm": _gcn_norm_fake,
    "gcn_norm_backward": _gcn_norm_backward_fake,
}

_structure: Any = _cuda.of_tensors(lambda structure: structure)


def _of_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a library op takes it: with the structure in tensors, one of which it reads."""

    def run(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any) -> Any:
        return kernel(_structure(indptr, indices, n_cols, plan), indptr, *args)

    return run


def _register() -> None:
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        on_cuda = _of_tensors(getattr(_cuda_norm, name))
        _library.define(schema, getattr(_cpu_norm, name), on_cuda, _FAKES[name])
        _library.define_autocast(name, partial(bridge._autocast, narrow=False))


_register()

# The ops as ``normalisation`` calls them


class NormOp(Op):
    """A library op whose kernel takes ``indptr`` as a tensor beside the structure."""

    def __call__(self, side: Side, *args: Any) -> Any:
        """By the short way where nothing can tell."""
        if _library.needs_no_dispatcher(side, args):
            return self.kernel(side.structure, side.indptr, *args)
        return self.library(side.indptr, side.indices, side.n_cols, side.plan, *args)


GCN_NORM = NormOp("gcn_norm", vars(_cuda_norm))
GCN_NORM_BACKWARD = NormOp("gcn_norm_backward", vars(_cuda_norm))
