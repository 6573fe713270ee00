"""The gradients of a product in features and edge values on CUDA: one pass, but for tiles."""

import torch
from torch import Tensor

from ..formats import primitives
from ..formats.arrays import allocating, finish, on_device_of
from ..interop.torch import from_tensor
from ..ops.edges.api import SDDMM
from ..ops.engine import choose
from ..ops.engine.structure import Structure
from ..ops.matmul import cuda_aggregate as matmul_cuda_aggregate
from ..ops.tiles.kernels import against_sddmm, against_spmm
from ..ops.tiles.operands import prepared
from . import _cuda, _kept
from ._layout import rows_apart


def aggregate_backward(
    S: Structure,
    x: Tensor,
    grad: Tensor,
    values: Tensor | None,
    perm: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``S`` is the transposed structure, scales are those of the product itself."""
    # A product and an sddmm of the transpose, where one of them goes by tiles.
    product = grad, values, perm, col_scale, row_scale, "sum"
    if prepared and not (against_spmm(S, *product) and against_sddmm(S, x, grad)):
        dx = _cuda.spmm(S, *product)
        return dx, choose.run(SDDMM, S, x, grad, col_scale, row_scale, perm=perm)
    dx, da = x.new_empty(S.n_rows, x.shape[1]), x.new_empty(S.nnz)
    x, grad, values = rows_apart(x), rows_apart(grad), _cuda._vector(values)
    row_scale, col_scale = _cuda._factors(row_scale), _cuda._factors(col_scale)
    dtype, feat, size = _cuda._NAMES[x.dtype], x.shape[1], x.itemsize
    together = x.data_ptr() | grad.data_ptr() | dx.data_ptr()
    together |= x.stride(0) * size | grad.stride(0) * size
    inverse = 0
    if perm is not None and matmul_cuda_aggregate.goes_apart(S, dtype, feat, inverse=True):
        inverse = _inverse(S, perm)
    entries = {"data": _cuda._pointer(values), "perm": _cuda._pointer(perm), "inverse": inverse}
    nbytes = matmul_cuda_aggregate.aggregate_workspace(
        S, dtype, feat=feat, together=together, **entries
    )
    workspace = _cuda._memory(nbytes, x)
    with _cuda._on_device_of(x):
        matmul_cuda_aggregate.aggregate_backward(
            S,
            dtype,
            feat=feat,
            ldx=x.stride(0),
            ldg=grad.stride(0),
            X=x.data_ptr(),
            grad=grad.data_ptr(),
            row_scale=_cuda._pointer(row_scale),
            col_scale=_cuda._pointer(col_scale),
            dX=dx.data_ptr(),
            dA=da.data_ptr(),
            workspace=_cuda._pointer(workspace),
            stream=_cuda._stream(x),
            data=entries["data"],
            perm=entries["perm"],
            inverse=inverse,
        )
    return dx, da


def _inverse(S: Structure, perm: Tensor) -> int:
    """Where that of ``perm`` is, kept with the graph; 0 where there is none.

    The second gradient of a graph makes it, unless a capture runs: one is not worth it.  It is no
    memory of torch's, whose pools of CUDA graphs would miss it.
    """
    kept = _kept.find(_kept.place_of(S))
    if kept is None:
        return 0
    with kept.lock:
        held = kept.inverses.get(perm.data_ptr())
        if held is None:
            kept.inverses[perm.data_ptr()] = perm, None
            return 0
        if held[1] is None and not torch.cuda.is_current_stream_capturing():
            array = from_tensor("perm", perm)
            with on_device_of(array), allocating(f"the inverse of {len(array)} places"):
                held = perm, primitives.inverse(array)
            finish(array)  # synchronize!
            kept.inverses[perm.data_ptr()] = held
        return 0 if held[1] is None else int(held[1].data.ptr)
