"""Products with a sample of each row on CUDA: kernels choose entries as they load them.

The gradient of features gathers: it goes by the transpose of the sample, which is made anew, with
``indptr`` as a tensor beside the structure.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ops.engine.structure import Structure
from ..ops.sampling import cuda as sampling_cuda
from ..ops.sampling.cuda import MEAN, RESCALE, Sampling
from ..ops.sampling.options import ALL
from . import _cuda
from ._layout import rows_apart
from ._sample import row_factors, transposed

#: Of a transposed sample every entry counts.
_WHOLE = Sampling(ALL, "bucket")


@lru_cache(maxsize=256)
def _unmeasured(S: Structure) -> Structure:
    """Without its longest row, which a traced call does not know: both are to add up alike."""
    return replace(S, longest=0)


def _sampling(width: int, strategy: str, seed: Tensor | None) -> Sampling:
    return Sampling(width, strategy, seed_at=_cuda._pointer(seed))


def _flags(mean: bool, rescale: bool) -> int:
    return MEAN * mean + RESCALE * rescale


def spmm_sampled(
    S: Structure,
    x: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    seed: Tensor | None,
    width: int,
    strategy: str,
    mean: bool,
    rescale: bool,
) -> Tensor:
    S, out = _unmeasured(S), x.new_empty(S.n_rows, x.shape[1])
    x, values = rows_apart(x), _cuda._vector(values)
    row_scale, col_scale = _cuda._factors(row_scale), _cuda._factors(col_scale)
    sampling, dtype = _sampling(width, strategy, seed), _cuda._NAMES[x.dtype]
    feat, ldx, together = x.shape[1], x.stride(0), (x.data_ptr() | out.data_ptr()) % 16
    weighted = values is not None
    size = sampling_cuda.workspace(
        *(S, dtype, sampling), feat=feat, ldx=ldx, together=together, weighted=weighted
    )
    workspace = _cuda._memory(size, x)
    with _cuda._on_device_of(x):
        sampling_cuda.spmm_sampled(
            *(S, dtype, sampling),
            feat=feat,
            ldx=ldx,
            data=_cuda._pointer(values),
            X=x.data_ptr(),
            row_scale=_cuda._pointer(row_scale),
            col_scale=_cuda._pointer(col_scale),
            flags=_flags(mean, rescale),
            out=out.data_ptr(),
            workspace=_cuda._pointer(workspace),
            stream=_cuda._stream(x),
        )
    return out


def spmm_sampled_dx(
    S: Structure,
    indptr: Tensor,
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    seed: Tensor | None,
    width: int,
    strategy: str,
    mean: bool,
    rescale: bool,
) -> Tensor:
    if not S.nnz:
        return grad.new_zeros(S.n_cols, grad.shape[1])
    out = grad.new_empty(S.n_cols, grad.shape[1])
    cols, entries, rows = _sample(S, indptr, _sampling(width, strategy, seed))
    numbers = None if values is None else entries
    t_indptr, rows, perm = transposed(cols, numbers, rows, S.n_cols)
    T = _transposed(S, t_indptr, rows)
    grad, values, col_scale = rows_apart(grad), _cuda._vector(values), _cuda._factors(col_scale)
    factors = row_factors(indptr, row_scale, grad, width, mean, rescale)
    with _cuda._on_device_of(grad):
        sampling_cuda.spmm_sampled(
            *(T, _cuda._NAMES[grad.dtype], _WHOLE),
            feat=grad.shape[1],
            ldx=grad.stride(0),
            data=_cuda._pointer(values),
            perm=_cuda._pointer(perm),
            X=grad.data_ptr(),
            row_scale=_cuda._pointer(col_scale),
            col_scale=_cuda._pointer(factors),
            out=out.data_ptr(),
            stream=_cuda._stream(grad),
        )
    return out


def _sample(S: Structure, indptr: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Columns, entries and rows of the sample, n_cols for a column where a place stays free."""
    narrow = S.n_rows * sampling.width <= S.nnz
    room = sampling.width if narrow else 0
    cols, entries, rows = indptr.new_empty(3, S.n_rows * room or S.nnz)
    with _cuda._on_device_of(indptr):
        sampling_cuda.sample_rows(
            *(S, sampling),
            room=room,
            cols=cols.data_ptr(),
            entries=entries.data_ptr(),
            rows=rows.data_ptr(),
            stream=_cuda._stream(indptr),
        )
    return cols, entries, rows


def _transposed(S: Structure, indptr: Tensor, rows: Tensor) -> Structure:
    """The transpose of a sample of ``S``, which has a place for each of ``rows`` at most."""
    arrays = {"indptr": indptr.data_ptr(), "indices": rows.data_ptr()}
    no_plan: Any = dict.fromkeys(("start", "slot", "cut", "long", "blocks", "n_cuts", "n_long"), 0)
    return Structure(
        n_rows=S.n_cols,
        n_cols=S.n_rows,
        nnz=rows.shape[0],
        index_dtype=S.index_dtype,
        **arrays,
        **no_plan,
    )


def spmm_sampled_da(
    S: Structure,
    x: Tensor,
    grad: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    seed: Tensor | None,
    width: int,
    strategy: str,
    mean: bool,
    rescale: bool,
) -> Tensor:
    out = x.new_empty(S.nnz)
    x, grad = rows_apart(x), rows_apart(grad)
    row_scale, col_scale = _cuda._factors(row_scale), _cuda._factors(col_scale)
    with _cuda._on_device_of(x):
        sampling_cuda.sddmm_sampled(
            *(S, _cuda._NAMES[x.dtype], _sampling(width, strategy, seed)),
            feat=x.shape[1],
            ldx=grad.stride(0),
            ldy=x.stride(0),
            X=grad.data_ptr(),
            Y=x.data_ptr(),
            row_scale=_cuda._pointer(row_scale),
            col_scale=_cuda._pointer(col_scale),
            flags=_flags(mean, rescale),
            out=out.data_ptr(),
            stream=_cuda._stream(x),
        )
    return out
