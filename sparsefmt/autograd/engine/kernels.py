"""Kernels of the torch layer alone: of torch's own operations, and of what graphs keep for ours."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats import primitives
from ...formats.arrays import Array, allocating, finish, on_device_of
from ...formats.compressed import CSR
from ...formats.primitives import expand
from ...interop.torch import from_tensor
from ...ops.attention.gat.small import rounded
from ...ops.edges.api import SDDMM
from ...ops.engine import small
from ...ops.engine.call import call
from ...ops.engine.small import wide
from ...ops.engine.structure import Sizes, Structure, all_tiles, built_at
from ...ops.engine.table import Kernel, Op, deferred, unchecked
from ...ops.matmul import cuda_aggregate
from ...ops.matmul.aggregation import AGGREGATE_BACKWARD
from ...ops.matmul.api import SPMM, against_heads
from ...ops.sampling import cuda as sampling_cuda
from ...ops.sampling.api import SCALES_AND_OPTIONS, sample_with_perm
from ...ops.sampling.options import SampleOptions
from ...ops.tiles.kernels import against_sddmm, against_spmm
from .memory import NAMES, sums_dtype

_product_on_cpu = deferred("sparsefmt.ops.matmul.cpu", "spmm")
#: Whether torch sums bags of float32 in vector registers, at any width: on x86 processors.
_HAS_BAGS = "fbgemm" in torch.backends.quantized.supported_engines
#: Multiply-adds that bags take: beyond it numba's loops compile in less than they gain.
_MOST_IN_BAGS = 1 << 26
#: Bytes of a result beyond which it is made in parts of so many a thread: torch's fresh memory
#: costs more than the sums, 34 ms of which 14 are theirs for 39 MB.
_MOST_OF_A_RESULT, _PART = 1 << 24, 1 << 20

# The gradient of features that a product with a sample of each row reads


def _spmm_sampled_dx_on_cuda(
    S: Structure,
    grad: Tensor,
    values: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    *options: Any,
    indptr: Tensor,
) -> Any:
    """Make the sample again, transpose it, and multiply."""
    sampling = SampleOptions(*options)
    if not S.nnz:
        return grad.new_zeros(S.n_cols, grad.shape[1])
    room = sampling_cuda.room_of_a_row(S.n_rows, S.nnz, sampling.width)
    cols, entries, rows = indptr.new_empty(3, S.n_rows * room or S.nnz)
    sample = sampling.seed, sampling.width, sampling.strategy
    call(sampling_cuda.sample_rows, S, cols, entries, rows, None, *sample, room)
    t_indptr, rows, perm = _transposed(cols, None if values is None else entries, rows, S.n_cols)
    places = t_indptr.data_ptr(), rows.data_ptr()
    T = Structure(S.n_cols, S.n_rows, rows.shape[0], S.index_dtype, *places, *[0] * 7)
    T._prepared = S.prepared(_of_transposes, room)
    factors = _row_factors(indptr, row_scale, sums_dtype(grad), sampling)
    return call(sampling_cuda.spmm_sampled, T, grad, values, col_scale, factors, perm=perm)


def _of_transposes(S: Structure, room: int) -> dict[Any, Any]:
    """Return a store for what is prepared for transposed samples with that room for a row."""
    return {}


def _spmm_sampled_dx_on_cpu(
    A: CSR,
    grad: Array,
    values: Array | None,
    row_scale: Array | None,
    col_scale: Array | None,
    *options: Any,
) -> Any:
    """Make the sample again, transpose it, and multiply; the rows of a column add up in order."""
    sampling = SampleOptions(*options)
    seed = 0 if sampling.seed is None else sampling.seed.item()
    B, entries = sample_with_perm(A, sampling.width, strategy=sampling.strategy, seed=seed)
    places = B.indices, entries, expand(B.indptr, B.nnz)
    cols, numbers, rows = map(torch.from_numpy, places)
    t_indptr, rows, perm = _transposed(cols, None if values is None else numbers, rows, A.n_cols)
    arrays = {"indptr": t_indptr.numpy(), "indices": rows.numpy()}
    T = CSR._trusted(**arrays, data=None, shape=A.shape[::-1])
    values = None if values is None or perm is None else values[perm.numpy()]
    scale = None if row_scale is None else torch.from_numpy(row_scale)
    dtype = torch.float64 if grad.dtype == "float64" else torch.float32
    factors = _row_factors(torch.from_numpy(A.indptr), scale, dtype, sampling)
    factors = None if factors is None else factors.numpy()
    return _product_on_cpu(T, grad, values, None, col_scale, factors, "sum")


def _transposed(
    cols: Tensor, entries: Tensor | None, rows: Tensor, n_cols: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort entries by column, stably; return ``indptr`` of the columns, rows and numbers.

    Places whose column is ``n_cols`` are free: they come last, and ``indptr`` ends before them.
    """
    sorted_cols, order = torch.sort(cols, stable=True)
    ends = torch.arange(n_cols + 1, dtype=cols.dtype, device=cols.device)
    indptr = torch.searchsorted(sorted_cols, ends, out_int32=cols.dtype is torch.int32)
    perm = None if entries is None else entries.index_select(0, order)
    return indptr, rows.index_select(0, order), perm


def _row_factors(
    indptr: Tensor, row_scale: Tensor | None, dtype: torch.dtype, sampling: SampleOptions
) -> Any:
    """Compute the factor of each row's sum, in that dtype; None if all are 1."""
    scale = None if row_scale is None else row_scale.to(dtype)
    if not sampling.mean and not sampling.rescale:
        return scale
    lengths = indptr.diff()
    sampled = lengths.clamp(1, sampling.width).to(dtype)
    shares = lengths.to(dtype) / sampled if sampling.rescale else sampled.reciprocal()
    return shares if scale is None else scale * shares


def _like_columns(S: Sizes, grad: Array, *_: Any) -> tuple[Any, ...]:
    return (((S.n_cols, grad.shape[1]), grad),)


SPMM_SAMPLED_DX = Op(
    "spmm_sampled_dx",
    (*unchecked("Tensor grad, Tensor? values"), *SCALES_AND_OPTIONS),
    kernels=(
        Kernel("spmm_sampled_dx_csr", _spmm_sampled_dx_on_cuda, ("csr",), "gpu"),
        Kernel("spmm_sampled_dx_numba", _spmm_sampled_dx_on_cpu, ("csr",), "cpu"),
    ),
    results=_like_columns,
    takes_indptr=True,
)

# Both gradients of a product, with what a graph keeps for them


def _aggregate_backward_of_graph(
    S: Structure, x: Tensor, grad: Tensor, values: Array, perm: Array, *scales: Array
) -> Any:
    """Run one pass over the transposed structure, or two products where one goes by tiles."""
    row_scale, col_scale = scales
    product = grad, values, perm, col_scale, row_scale, "sum"
    if all_tiles and not (against_spmm(S, *product) and against_sddmm(S, x, grad)):
        dx = call(SPMM, S, *product)
        return dx, call(SDDMM, S, x, grad, col_scale, row_scale, perm=perm)
    apart = cuda_aggregate.goes_apart(S, NAMES[x.dtype], x.shape[1], inverse=True)
    inverse = _inverse(S, perm) if apart and perm is not None else None
    arrays = values, perm, row_scale, col_scale
    return cuda_aggregate.aggregate_backward(S, x, grad, *arrays, inverse=inverse)


def _not_of_torch(S: Sizes | CSR, *_: Any, **__: Any) -> list[str]:
    return [] if isinstance(S, Structure) else ["A is no graph of torch"]


def _inverse(S: Structure, perm: Tensor) -> Array | None:
    """Return the inverse of ``perm``, built once with the graph, or None.

    The second gradient of a graph makes it, unless a capture runs: one is not worth it.  It is no
    memory of torch's, whose pools of CUDA graphs would miss it.
    """
    built, place = built_at(S), perm.data_ptr()
    if built is None:
        return None
    with built.lock:
        if ("perm", place) not in built.parts:  # while it is there, nothing else lies at its place
            built.parts["perm", place] = perm
            return None

    def build() -> Array:
        array = from_tensor("perm", perm)
        with on_device_of(array), allocating(f"the inverse of {len(array)} places"):
            result = primitives.inverse(array)
        finish(array)  # synchronize!
        return result

    cached: Array | None = built.parts.get(("inverse", place))
    if cached is None and not torch.cuda.is_current_stream_capturing():
        cached = built.ask(("inverse", place), build)
    return cached


# Products on the CPU, by torch's own loops


class OfTensors(CSR):
    """A CSR over CPU tensors, for which torch's kernels may be chosen."""


def _against_bags(
    A: CSR, x: Array, values: Array | None = None, perm: Array | None = None,
    row_scale: Array | None = None, col_scale: Array | None = None, reduce: str = "sum", *_: Any,
    **__: Any,
) -> list[str]:  # fmt: skip
    """List the reasons against ``torch.embedding_bag``."""
    if type(A) is not OfTensors:
        return ["A is no graph of torch"]
    reasons = against_heads(values, "bags take")
    if reduce not in ("sum", "mean"):
        reasons.append(f"bags do not take a {reduce}")
    # Loops for float64 add up one entry at a time: 3 to 8 times the time of numba's.
    most = _MOST_IN_BAGS if _HAS_BAGS and x.dtype.itemsize < 8 else small.MOST
    return reasons + small.reasons_against((len(A.indices) + A.shape[0]) * x.shape[1], most)


def _sums_of_bags(X: Tensor, indices: Tensor, indptr: Array, weights: Tensor | None) -> Array:
    """Sum the rows of ``X`` that each bag names, by ``embedding_bag``; large results in parts."""
    starts, n = torch.from_numpy(indptr), len(indptr) - 1
    row_bytes = X.shape[1] * X.element_size()
    if n * row_bytes <= _MOST_OF_A_RESULT:
        bags = torch.embedding_bag(X, indices, starts, False, 0, False, weights, True)
        result: Array = bags[0].numpy()
        return result
    out = np.empty((n, X.shape[1]), X.numpy().dtype)
    rows = max(_PART * torch.get_num_threads() // row_bytes, 1)
    for row in range(0, n, rows):
        ends = starts[row : row + rows + 1]
        first, last = int(ends[0]), int(ends[-1])
        shares = None if weights is None else weights[first:last]
        inputs = X, indices[first:last], ends - first if first else ends
        out[row : row + rows] = torch.embedding_bag(*inputs, False, 0, False, shares, True)[0]
    return out


def _bags(
    A: CSR,
    x: Array,
    values: Array | None = None,
    perm: Array | None = None,
    row_scale: Array | None = None,
    col_scale: Array | None = None,
    reduce: str = "sum",
    **_: Any,
) -> Array:
    """Compute ``r[i] * reduce of a[e] c[j] x[j]`` with rows as bags, on torch's threads."""
    n = A.shape[0]
    if not (len(A.indices) and x.size):
        return np.zeros((n, x.shape[1]), x.dtype)
    values = values if values is None or perm is None else values[perm]
    weights = None
    if values is not None or col_scale is not None:
        weights = torch.from_numpy(small.weights(A, x, values, col_scale))
    X = torch.from_numpy(x if x.dtype.itemsize > 2 else wide(x))
    indices, starts = torch.from_numpy(A.indices), A.indptr
    for begins, ends in primitives.blocks_of(A.indptr) if len(A.indices) > primitives.SHORT else ():
        X = torch.from_numpy(_sums_of_bags(X, indices, begins, weights))
        indices, starts, weights = torch.arange(len(X), dtype=indices.dtype), ends, None
    out = _sums_of_bags(X, indices, starts, weights)
    if row_scale is not None or reduce == "mean":
        small.scale_rows(A, out, row_scale, reduce)
    return out if out.dtype == x.dtype else rounded(out, x)


# A product to whose rows a part of their own is added


def add_own(
    y: Tensor, own: Tensor, scale: Tensor | None = None, one_more: bool = False,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Add own parts and a bias to a product in place, as a kernel on a GPU does as it ends."""
    if scale is None:
        y += own
    elif one_more:
        y.addcmul_((1 + scale).to(y.dtype), own)
    else:
        scale = scale[:, None].to(y.dtype)
        y.addcmul_(scale, own.masked_fill(scale == 0, 0))
    return y if bias is None else y.add_(bias)


def _spmm_then_own(S: Structure, *args: Any) -> Any:
    return add_own(call(SPMM, S, *args[:6]), *args[6:])


def _spmm_with_own_on_cpu(A: CSR, x: Array, *args: Any) -> Any:
    """Add up in float32 at least, and round once."""
    inputs: Any = x, *args
    if x.dtype.itemsize == 2:
        inputs = [wide(a) if isinstance(a, np.ndarray) else a for a in inputs]
    y = torch.from_numpy(call(SPMM, A, *inputs[:6]))
    own: Any = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in inputs[6:]]
    with np.errstate(over="ignore", under="ignore"):
        return add_own(y, *own).numpy().astype(x.dtype, copy=False)


def _against_own(A: CSR, *args: Any, **_: Any) -> list[str]:
    """List the reasons against a product that adds an own part."""
    return _NO_OWN if len(args) < 7 or args[6] is None else []


def _against_own_behind(S: Structure, *args: Any, **_: Any) -> list[str]:
    """List the reasons against a product first, and its own part behind it."""
    if len(args) < 7 or args[6] is None:
        return _NO_OWN
    if not S.nnz:
        return []
    return ["A is no tiles"] if not all_tiles else against_spmm(S, *args[:6])


_NO_OWN = ["no part of each row's own is added"]

# The slots of the rows

_CSR, _OF_GRAPH = ("csr",), "aggregate_backward_of_graph"
SPMM.fill_slots(
    (
        Kernel("spmm_with_own_numba", _spmm_with_own_on_cpu, _CSR, "cpu", _against_own, again=True),
        Kernel("spmm_then_own", _spmm_then_own, _CSR, "gpu", _against_own_behind, again=True),
        Kernel("spmm_csr_embedding_bag", _bags, _CSR, "cpu", _against_bags),
    )
)
AGGREGATE_BACKWARD.fill_slots(
    (Kernel(_OF_GRAPH, _aggregate_backward_of_graph, _CSR, "gpu", _not_of_torch),)
)
