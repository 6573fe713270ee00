"""The library ops of products with a sample of each row: schemas, kernels, fakes and autocast.

As in ``bridge``; the structure is always that of the graph's rows.  ``seed`` is a tensor, so that a
captured CUDA graph reads another one at each replay; only the strategy "random" reads it.
``spmm_sampled_dx`` is the gradient of the features, ``spmm_sampled_da`` that of the edge values, 0
for what was not sampled.  All three are deterministic.
"""

from functools import partial
from typing import Any

from torch import Tensor

from . import _cpu_sampling, _cuda, _cuda_sampling, _library, bridge, bridge_norm
from .bridge import Op
from .bridge_norm import NormOp

_STRUCTURE = "Tensor indptr, Tensor indices, SymInt n_cols, Tensor[] plan"
_OTHERS = (
    "Tensor? row_scale, Tensor? col_scale, Tensor? seed, SymInt width, str strategy, bool mean, "
    "bool rescale"
)
_SCHEMAS = (
    f"spmm_sampled({_STRUCTURE}, Tensor x, Tensor? values, {_OTHERS}) -> Tensor",
    f"spmm_sampled_dx({_STRUCTURE}, Tensor grad, Tensor? values, {_OTHERS}) -> Tensor",
    f"spmm_sampled_da({_STRUCTURE}, Tensor x, Tensor grad, {_OTHERS}) -> Tensor",
)


def _dx_fake(
    indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], grad: Tensor, *_: Any
) -> Any:
    return grad.new_empty((n_cols, grad.shape[1]))


_FAKES: dict[str, Any] = {
    "spmm_sampled": bridge._spmm_fake,
    "spmm_sampled_dx": _dx_fake,
    "spmm_sampled_da": bridge._one_per_entry,
}


def _register() -> None:
    for schema in _SCHEMAS:
        name = schema.split("(")[0]
        of_tensors = bridge_norm._of_tensors if name == "spmm_sampled_dx" else _cuda.of_tensors
        on_cuda = of_tensors(getattr(_cuda_sampling, name))
        _library.define(schema, getattr(_cpu_sampling, name), on_cuda, _FAKES[name])
    _library.define_autocast("spmm_sampled", partial(bridge._autocast, narrow=True))


_register()

# The ops as ``sampling`` calls them

SPMM_SAMPLED = Op("spmm_sampled", vars(_cuda_sampling))
SPMM_SAMPLED_DX = NormOp("spmm_sampled_dx", vars(_cuda_sampling))
SPMM_SAMPLED_DA = Op("spmm_sampled_da", vars(_cuda_sampling))
