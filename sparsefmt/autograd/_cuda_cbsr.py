"""The ops of row-balanced features on CUDA, in the manner of ``_cuda``."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..formats.arrays import finish
from ..formats.compressed import CSR
from ..interop.torch import from_tensor, to_tensor
from ..ops.cbsr import cuda as cbsr_cuda
from ..ops.cbsr import cuda_dense as cbsr_cuda_dense
from ..ops.cbsr import cuda_maxk as cbsr_cuda_maxk
from ..ops.cbsr import cuda_sspmm as cbsr_cuda_sspmm
from ..ops.engine.structure import Structure
from ..ops.matmul import cuda as matmul_cuda
from ._cuda import _NAMES, _factors, _memory, _on_device_of, _pointer, _stream, _vector
from ._layout import balanced, rows_apart
from ._windows import windowed


def maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if x.shape[1] > cbsr_cuda_maxk.MAX_FEAT:
        return _maxk_by_sorting(x, k)
    columns, kept = balanced(x, k)
    x = rows_apart(x)
    with _on_device_of(x):
        cbsr_cuda_maxk.maxk(
            _NAMES[x.dtype],
            n_rows=x.shape[0],
            feat=x.shape[1],
            k=k,
            ldx=x.stride(0),
            X=x.data_ptr(),
            columns=columns.data_ptr(),
            values=kept.data_ptr(),
            stream=_stream(x),
        )
    return columns, kept


def _maxk_by_sorting(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    ordered = torch.where(x.isnan(), torch.nan, x + 0)  # -0 ties with 0, and all NaN are alike
    order = ordered.sort(dim=1, descending=True, stable=True).indices  # NaN first
    columns = order[:, :k].sort(dim=1).values
    return columns.int(), x.gather(1, columns)


def cbsr_to_dense(columns: Tensor, kept: Tensor, feat: int) -> Tensor:
    out = kept.new_empty(kept.shape[0], feat)
    columns, kept = columns.contiguous(), kept.contiguous()
    with _on_device_of(kept):
        cbsr_cuda_dense.cbsr_to_dense(
            _NAMES[kept.dtype],
            n_rows=kept.shape[0],
            feat=feat,
            k=kept.shape[1],
            index_bytes=columns.element_size(),
            indices=columns.data_ptr(),
            values=kept.data_ptr(),
            out=out.data_ptr(),
            stream=_stream(kept),
        )
    return out


def dense_to_cbsr(x: Tensor, columns: Tensor) -> Tensor:
    out = x.new_empty(columns.shape)
    x, columns = rows_apart(x), columns.contiguous()
    with _on_device_of(x):
        cbsr_cuda_dense.dense_to_cbsr(
            _NAMES[x.dtype],
            n_rows=x.shape[0],
            k=columns.shape[1],
            ldx=x.stride(0),
            index_bytes=columns.element_size(),
            X=x.data_ptr(),
            indices=columns.data_ptr(),
            out=out.data_ptr(),
            stream=_stream(x),
        )
    return out


def spgemm(
    S: Structure,
    columns: Tensor,
    kept: Tensor,
    feat: int,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: str,
) -> Tensor:
    name = _NAMES[kept.dtype]
    out = kept.new_empty(S.n_rows, feat)
    columns, kept, values = columns.contiguous(), kept.contiguous(), _vector(values)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    workspace = _memory(cbsr_cuda.spgemm_workspace(S, name, feat), kept)
    with _on_device_of(kept):
        cbsr_cuda.spgemm(
            S,
            name,
            feat=feat,
            k=columns.shape[1],
            index_bytes=columns.element_size(),
            indices=columns.data_ptr(),
            values=kept.data_ptr(),
            data=_pointer(values),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            mean=reduce == "mean",
            out=out.data_ptr(),
            workspace=_pointer(workspace),
            stream=_stream(kept),
        )
    return out


def sspmm(
    T: Structure,
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    perm: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    launch = partial(cbsr_cuda_sspmm.sspmm_panels, T, perm=perm.data_ptr())
    size = cbsr_cuda_sspmm.panels_workspace(T, _NAMES[grad.dtype], grad.shape[1])
    return _sspmm(launch, size, columns, grad, values, row_scale, col_scale)


def sspmm_outer(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    if torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "sspmm_outer adds up by atomics, in no fixed order: call sspmm in deterministic mode."
        )
    dtype, feat, k = _NAMES[grad.dtype], grad.shape[1], columns.shape[1]
    with _on_device_of(grad):
        found = windowed(indptr, indices, n_cols, dtype, feat=feat, k=k)
    if found is None:
        return _by_panels(indptr, indices, n_cols, columns, grad, values, row_scale, col_scale)
    launch = partial(cbsr_cuda_sspmm.sspmm_windows, found)
    size = cbsr_cuda_sspmm.sums_workspace(found, dtype, k)
    return _sspmm(launch, size, columns, grad, values, row_scale, col_scale)


def _by_panels(
    indptr: Tensor,
    indices: Tensor,
    n_cols: int,
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    *scales: Tensor | None,
) -> Tensor:
    """Of rows that no chip holds, or tensors of no graph: with a transpose for this call alone."""
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a capture cannot transpose a graph, which rows need that are too wide for the chip: "
            "torch.use_deterministic_algorithms(True) takes the transpose that the graph keeps."
        )
    arrays = {"indptr": from_tensor("indptr", indptr), "indices": from_tensor("indices", indices)}
    A = CSR._trusted(**arrays, data=None, shape=(indptr.shape[0] - 1, n_cols))
    T, perm = A.tocsc_with_perm()
    rows = T.T  # which holds the cut of the work that the kernels read
    finish(perm)  # synchronize!
    out = sspmm(matmul_cuda.structure(rows), columns, grad, values, to_tensor(perm), *scales)
    torch.cuda.current_stream(grad.device).synchronize()  # synchronize! T goes back to CuPy
    return out


def without_plan(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a library op takes it: with the chunks of the structure, which it ignores."""

    def run(indptr: Tensor, indices: Tensor, n_cols: int, plan: list[Tensor], *args: Any) -> Any:
        return kernel(indptr, indices, n_cols, *args)

    return run


def _sspmm(
    launch: Callable[..., None],
    size: int,
    columns: Tensor,
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = grad.new_empty(columns.shape)
    columns, grad, values = columns.contiguous(), rows_apart(grad), _vector(values)
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    workspace = _memory(size, grad)
    with _on_device_of(grad):
        launch(
            _NAMES[grad.dtype],
            feat=grad.shape[1],
            k=columns.shape[1],
            index_bytes=columns.element_size(),
            indices=columns.data_ptr(),
            data=_pointer(values),
            grad=grad.data_ptr(),
            ldg=grad.stride(0),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            workspace=_pointer(workspace),
            stream=_stream(grad),
        )
    return out


def sddmm_cbsr(
    S: Structure,
    x: Tensor,
    columns: Tensor,
    kept: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    out = x.new_empty(S.nnz)
    x, columns, kept = rows_apart(x), columns.contiguous(), kept.contiguous()
    row_scale, col_scale = _factors(row_scale), _factors(col_scale)
    with _on_device_of(x):
        cbsr_cuda.sddmm(
            S,
            _NAMES[x.dtype],
            feat=x.shape[1],
            k=columns.shape[1],
            index_bytes=columns.element_size(),
            X=x.data_ptr(),
            ldx=x.stride(0),
            indices=columns.data_ptr(),
            values=kept.data_ptr(),
            row_scale=_pointer(row_scale),
            col_scale=_pointer(col_scale),
            out=out.data_ptr(),
            stream=_stream(x),
        )
    return out
