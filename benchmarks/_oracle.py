"""What results are held against: float64 sums over stored entries, for sampled rows or entries.

The kernels here are naive on purpose and share nothing with the library.  Each gives the relative
error of every sampled number, infinite where the exact result is zero and the given one is not;
half the distance of float16's subnormals is no error.
"""

from functools import cache
from typing import Any

import numpy as np

from sparsefmt import CBSR, CSR
from sparsefmt.formats.arrays import Array, is_cupy

from . import _baselines

#: Rounding of the stored result alone, relative.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Largest relative error; bfloat16's own rounding is more than a thousandth and comes on top.
LIMITS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3 + ROUNDING["bfloat16"]}
REDUCTIONS = ("sum", "mean", "max", "min")
SAMPLES = 200
#: Rows that are sorted at once.
CHUNK = 1 << 15
#: Half the distance of float16's subnormals.
SLACK = 2.0**-25

_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_INDICES = {"int32": "int", "int64": "long long"}

SOURCE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>

__device__ double wide(float x) { return x; }
__device__ double wide(__half x) { return __half2float(x); }
__device__ double wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// Half the distance of subnormals, where it can matter for products of numbers in [0, 1).
template <typename T> __device__ double slack() { return 0; }
template <> __device__ double slack<__half>() { return 1.0 / (1 << 25); }

template <typename T>
__device__ double relative(T given, double exact) {
    const double found = wide(given);
    if (found == exact) return 0;
    const double error = fabs(found - exact) - slack<T>();
    return error <= 0 ? 0 : error / fabs(exact);
}

// A block takes one sampled row, a thread one of its results: that of a column of X, all of them in
// order where columns is null. data, r and c may be null too.
template <typename T, typename Index>
__global__ void spmm_errors(const Index* indptr, const Index* indices, const T* data, const T* X,
                            const T* r, const T* c, const T* Y, const long long* rows,
                            const long long* columns, double* errors, int feat, int count,
                            int reduce) {
    const long long row = rows[blockIdx.x];
    const long long start = indptr[row], stop = indptr[row + 1];
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
        const long long f = columns ? columns[blockIdx.x * (long long)count + t] : t;
        double result = reduce < 2 ? 0 : reduce == 2 ? -1.0 / 0.0 : 1.0 / 0.0;
#pragma unroll 8
        for (long long e = start; e < stop; ++e) {
            const long long col = indices[e];
            double x = wide(X[col * feat + f]);
            if (data) x *= wide(data[e]);
            if (c) x *= wide(c[col]);
            if (reduce < 2) result += x;
            else result = reduce == 2 ? fmax(result, x) : fmin(result, x);
        }
        if (reduce == 1) result /= stop - start;
        if (r) result *= wide(r[row]);
        if (start == stop) result = 0;
        errors[blockIdx.x * (long long)count + t] = relative(Y[row * count + t], result);
    }
}

// A thread takes one sampled entry.
template <typename T, typename Index>
__global__ void sddmm_errors(const long long* rows, const Index* indices, const T* X, const T* Y,
                             const T* found, const long long* entries, double* errors, int feat,
                             int count) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= count) return;
    const long long e = entries[k], col = indices[e];
    double sum = 0;
    for (int f = 0; f < feat; ++f) sum += wide(X[rows[k] * feat + f]) * wide(Y[col * feat + f]);
    errors[k] = relative(found[e], sum);
}

// A thread takes one head of one sampled row and gives the worst of its entries.
template <typename T, typename Index>
__global__ void softmax_errors(const Index* indptr, const T* scores, const T* found,
                               const long long* rows, double* errors, int heads) {
    const long long start = indptr[rows[blockIdx.x]], stop = indptr[rows[blockIdx.x] + 1];
    for (int h = threadIdx.x; h < heads; h += blockDim.x) {
        double top = -1.0 / 0.0, sum = 0, worst = 0;
        for (long long e = start; e < stop; ++e) top = fmax(top, wide(scores[e * heads + h]));
        for (long long e = start; e < stop; ++e) sum += exp(wide(scores[e * heads + h]) - top);
        for (long long e = start; e < stop; ++e) {
            const double exact = exp(wide(scores[e * heads + h]) - top) / sum;
            const double error = relative(found[e * heads + h], exact);
            if (!(error <= worst)) worst = error;  // a NaN stays
        }
        errors[blockIdx.x * heads + h] = worst;
    }
}
"""


def expression(kernel: str, value: Any, index: Any) -> str:
    """The name of an instantiation."""
    return f"{kernel}<{_TYPES[np.dtype(value).name]}, {_INDICES[np.dtype(index).name]}>"


@cache
def _kernel(name: str) -> Any:
    import cupy

    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",), name_expressions=(name,))
    return module.get_function(name)


def sampled_rows(A: CSR, count: int = SAMPLES) -> Array:
    """The first, the last and the longest row and others at random, as int64 where ``A`` is."""
    some = np.random.default_rng(0).integers(A.n_rows, size=max(count - 3, 0))
    longest = int(A.lengths.argmax())
    rows = np.unique(np.concatenate([some, [0, A.n_rows - 1, longest]]))
    return _like(A.indptr, rows)


def spmm_error(
    A: CSR,
    X: Array,
    Y: Array,
    *,
    reduce: str = "sum",
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    columns: Array | None = None,
) -> float:
    """The largest relative error of ``Y`` in sampled rows; NaN if any is NaN.

    ``Y`` is the whole product, or has in each row what ``columns``, of its shape, says.
    """
    rows = sampled_rows(A)
    places = None if columns is None else columns[rows].astype(np.int64)
    if not is_cupy(Y):
        return _spmm_error_host(A, X, Y, rows, places)
    import cupy

    count = Y.shape[1]
    errors = cupy.full((len(rows), count), np.nan)
    kernel = _kernel(expression("spmm_errors", X.dtype, A.index_dtype))
    scales = (pointer(row_scale), pointer(col_scale))
    operands = (A.indptr, A.indices, pointer(A.data), X.data.ptr, *scales, Y.data.ptr)
    arrays = (*operands, rows, pointer(places), errors)
    sizes = (np.int32(X.shape[1]), np.int32(count), np.int32(REDUCTIONS.index(reduce)))
    kernel((len(rows),), (min(count, 256),), (*arrays, *sizes))
    return float(errors.max())


def _spmm_error_host(A: CSR, X: Array, Y: Array, rows: Array, places: Array | None) -> float:
    worst = 0.0
    for at, row in enumerate(rows.tolist()):
        span = slice(A.indptr[row], A.indptr[row + 1])
        values = 1.0 if A.data is None else A.data[span, None].astype(np.float64)
        exact = (values * X[A.indices[span]].astype(np.float64)).sum(0)
        worst = _worst(worst, Y[row], exact if places is None else exact[places[at]])
    return worst


def sddmm_error(A: CSR, X: Array, Y: Array, found: Array) -> float:
    """The largest relative error of ``found`` at sampled entries."""
    if A.nnz == 0:
        return 0.0
    some = np.random.default_rng(0).integers(A.nnz, size=50 * SAMPLES)
    entries = _like(A.indptr, np.unique(np.concatenate([some, [0, A.nnz - 1]])))
    if not is_cupy(found):
        rows = np.searchsorted(A.indptr, entries, side="right") - 1
        pairs = zip(X[rows].astype(np.float64), Y[A.indices[entries]].astype(np.float64))  # noqa: B905
        return _worst(0.0, found[entries], np.array([x @ y for x, y in pairs]))
    import cupy

    rows = cupy.searchsorted(A.indptr, entries.astype(A.index_dtype), side="right") - 1
    errors = cupy.full(len(entries), np.nan)
    kernel = _kernel(expression("sddmm_errors", X.dtype, A.index_dtype))
    pointers = (X.data.ptr, Y.data.ptr, found.data.ptr)
    arrays = (rows.astype(np.int64), A.indices, *pointers, entries, errors)
    sizes = (np.int32(X.shape[1]), np.int32(len(entries)))
    kernel((-(-len(entries) // 128),), (128,), (*arrays, *sizes))
    return float(errors.max())


def softmax_error(A: CSR, scores: Array, found: Array) -> float:
    """The largest relative error of the probabilities in sampled rows; scores (nnz, heads)."""
    rows = sampled_rows(A)
    heads = scores.shape[1]
    if not is_cupy(found):
        worst = 0.0
        for row in rows.tolist():
            span = slice(A.indptr[row], A.indptr[row + 1])
            if span.start < span.stop:
                powers = np.exp(scores[span].astype(np.float64) - scores[span].max(0))
                worst = _worst(worst, found[span], powers / powers.sum(0))
        return worst
    import cupy

    errors = cupy.full((len(rows), heads), np.nan)
    kernel = _kernel(expression("softmax_errors", scores.dtype, A.index_dtype))
    arrays = (A.indptr, scores.data.ptr, found.data.ptr, rows, errors)
    kernel((len(rows),), (32,), (*arrays, np.int32(heads)))
    return float(errors.max())


def wrong_maxk_rows(X: Array, S: CBSR) -> int:
    """Rows of ``S`` that are not the first ``k`` of ``X`` by torch's stable sort, NaN first.

    All are compared, bit by bit.
    """
    import torch

    wrong = 0
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[X.itemsize]
    chunks = (_baselines.tensor(array).split(CHUNK) for array in (X, S.indices, S.data))
    for x, columns, values in zip(*chunks, strict=True):
        ordered = torch.sort(x + 0, dim=1, descending=True, stable=True).indices  # -0 + 0 is 0
        exact = ordered[:, : S.k].sort(dim=1).values
        same = (columns == exact) & (values.view(bits) == x.gather(1, exact).view(bits))
        wrong += len(x) - int(same.all(1).sum())
    return wrong


def complaint(error: float, dtype: Any, *, in_turn: int = 0) -> str | None:
    """Why a result of this error is refused; None if it is right.

    Of so many terms that atomics add to a float32 one after the other, each addition rounds: the
    error grows like the root of their number.
    """
    rounding = np.finfo(np.float32).eps * in_turn**0.5
    limit = max(LIMITS[np.dtype(dtype).name], rounding)
    return None if error <= limit else f"relative error {error:.3g}, at most {limit:.3g} is right"


def _worst(so_far: float, found: Array, exact: Array) -> float:
    difference = np.abs(found.astype(np.float64) - exact)
    if found.dtype == np.float16:
        difference = np.maximum(difference - SLACK, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(difference == 0, 0.0, difference / np.abs(exact))
    return float(np.max(errors, initial=so_far))


def pointer(array: Array | None) -> Any:
    """Where an array begins, as a kernel takes it; 0 for none."""
    return np.intp(0 if array is None else array.data.ptr)


def _like(array: Array, rows: Any) -> Array:
    if not is_cupy(array):
        return rows.astype(np.int64)
    import cupy

    return cupy.asarray(rows.astype(np.int64))
