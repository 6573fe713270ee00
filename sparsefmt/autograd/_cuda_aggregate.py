"""The gradients of a product in features and edge values, with what a graph keeps for them."""

from typing import Any

import torch
from torch import Tensor

from ..formats import primitives
from ..formats.arrays import Array, allocating, finish, on_device_of
from ..interop.torch import from_tensor
from ..ops.edges import cuda as edges_cuda
from ..ops.engine import choose, table
from ..ops.engine.structure import Structure
from ..ops.matmul import cuda_aggregate as matmul_cuda_aggregate
from ..ops.matmul.aggregation import AGGREGATE_BACKWARD
from ..ops.matmul.api import SPMM
from . import _cuda, _kept, _tiles
from ._memory import NAMES


def aggregate_backward(
    S: Structure,
    x: Tensor,
    grad: Tensor,
    values: Tensor | None = None,
    perm: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """One pass over the transposed structure, or two products where one goes by tiles."""
    given = values, perm, row_scale, col_scale
    if _tiles.given:
        weighted = values is not None
        product = _tiles.find(S, "spmm", grad, weighted=weighted, col_scale=row_scale)
        if product or _tiles.find(S, "sddmm", x):
            return _apart(S, x, grad, *given)
    apart = matmul_cuda_aggregate.goes_apart(S, NAMES[x.dtype], x.shape[1], inverse=True)
    inverse = _inverse(S, perm) if apart and perm is not None else None
    found: tuple[Tensor, Tensor]
    found = matmul_cuda_aggregate.aggregate_backward(S, x, grad, *given, inverse=inverse)
    return found


def _not_of_torch(S: Any, *_: Any, **__: Any) -> list[str]:
    return [] if type(S) is Structure else ["A is no graph of torch"]


_cuda.prefer(
    AGGREGATE_BACKWARD,
    table.Kernel("aggregate_backward_of_graph", aggregate_backward, refuses=_not_of_torch),
)


def _inverse(S: Structure, perm: Tensor) -> Array | None:
    """The inverse of ``perm``, kept with the graph, or None.

    The second gradient of a graph makes it, unless a capture runs: one is not worth it.  It is no
    memory of torch's, whose pools of CUDA graphs would miss it.
    """
    kept = _kept.find(_kept.place_of(S))
    if kept is None:
        return None
    with kept.lock:
        held = kept.inverses.get(perm.data_ptr())
        if held is None:
            kept.inverses[perm.data_ptr()] = perm, None
            return None
        if held[1] is None and not torch.cuda.is_current_stream_capturing():
            array = from_tensor("perm", perm)
            with on_device_of(array), allocating(f"the inverse of {len(array)} places"):
                held = perm, primitives.inverse(array)
            finish(array)  # synchronize!
            kept.inverses[perm.data_ptr()] = held
        return held[1]


def _apart(
    S: Structure,
    x: Tensor,
    grad: Tensor,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """By a product and an sddmm of the transpose, each by the tiles that it goes by."""
    dx: Tensor = choose.run(SPMM, S, grad, values, perm, col_scale, row_scale, "sum")
    if tiled := _tiles.find(S, "sddmm", x):
        da = x.new_empty(S.nnz)
        _cuda._sddmm_tiles(tiled, x, grad, da, col_scale, row_scale, perm)
        return dx, da
    places = 0 if perm is None else perm.data_ptr()
    return dx, edges_cuda.sddmm(S, x, grad, col_scale, row_scale, perm=places)
