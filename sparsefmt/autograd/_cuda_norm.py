"""The normalisation of GCN on CUDA: values alone, since a graph keeps the structure of its result.

The kernels take ``indptr`` as a tensor beside the structure: memory is allocated where it lies.
"""

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..ops.engine.structure import Structure
from ..ops.gcn import cuda as gcn_cuda
from . import _cuda


def gcn_norm(S: Structure, indptr: Tensor, values: Tensor | None, loops: bool) -> Tensor:
    values = _cuda._vector(values)
    dtype = torch.float32 if values is None else values.dtype
    out = indptr.new_empty(S.nnz + S.n_rows * loops, dtype=dtype)
    workspace = _cuda._memory(gcn_cuda.BYTES * S.n_rows, indptr)
    with _cuda._on_device_of(indptr):
        gcn_cuda.gcn_norm_csr(
            S,
            _cuda._NAMES[dtype],
            loops=loops,
            data=_cuda._pointer(values),
            out_indptr=0,
            out_indices=0,
            out=out.data_ptr(),
            workspace=_cuda._pointer(workspace),
            stream=_cuda._stream(indptr),
        )
    return out


def gcn_norm_backward(
    S: Structure, indptr: Tensor, values: Tensor, grad: Tensor, loops: bool
) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "gcn_norm_backward adds up by atomics, in no fixed order: in deterministic mode "
            "compose spmm, for the degrees, and sddmm, for the products of their inverse roots."
        )
    values, grad = values.contiguous(), grad.contiguous()
    out = values.new_empty(S.nnz)
    # Its size given, nothing waits for the GPU.
    row = torch.repeat_interleave(indptr.diff(), output_size=S.nnz)
    workspace = _cuda._memory(gcn_cuda.BYTES_BACKWARD * S.n_rows, indptr)
    with _cuda._on_device_of(indptr):
        gcn_cuda.gcn_norm_backward(
            _cuda._NAMES[values.dtype],
            S.index_dtype,
            nnz=S.nnz,
            n=S.n_rows,
            loops=loops,
            row=row.data_ptr(),
            col=S.indices,
            indptr=S.indptr,
            data=values.data_ptr(),
            grad=grad.data_ptr(),
            out=out.data_ptr(),
            workspace=_cuda._pointer(workspace),
            stream=_cuda._stream(indptr),
        )
    return out
