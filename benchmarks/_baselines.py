"""What other libraries offer for the same work, as functions without arguments, inputs prepared.

Tensors are views of our arrays, on the device where those are.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array, is_cupy
from sparsefmt.ops import scale

Call = Callable[[], Any]


class Missing(RuntimeError):
    """A library, or memory for it, that is not here."""


def use_threads(count: int) -> int:
    """As many threads for numba and torch, no more than numba has; their number."""
    import numba
    import torch

    count = min(count, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(count)
    torch.set_num_threads(count)
    return count


def guarded(make: Callable[[], Call]) -> Call:
    """What ``make`` returns, after one call; ``Missing`` with the reason if it cannot run here.

    Compilers and allocators of other libraries fail in their own ways, all below RuntimeError,
    MemoryError, ImportError and OSError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            call = make()
            call()
        if _on_gpu():
            import cupy

            cupy.cuda.Device().synchronize()
    except (RuntimeError, MemoryError, ImportError, OSError) as error:
        lines = str(error).splitlines() or [""]
        raise Missing(f"{type(error).__name__}: {lines[0][:100]}") from error
    return call


def tensor(array: Array) -> Any:
    """A torch view."""
    import torch

    return torch.from_dlpack(array) if is_cupy(array) else torch.from_numpy(array)


def as_cupy(array: Any) -> Any:
    """A tensor, or a CuPy array, as a contiguous CuPy array."""
    import cupy

    array = array.detach() if hasattr(array, "detach") else array
    return cupy.ascontiguousarray(cupy.from_dlpack(array))


def torch_csr(A: CSR) -> Any:
    """A torch.sparse CSR tensor with A's own index dtype."""
    import torch

    parts = [tensor(array) for array in (A.indptr, A.indices, A.data)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR support is in beta
        return torch.sparse_csr_tensor(*parts, size=A.shape, check_invariants=False)


def torch_spmm(A: CSR, X: Array) -> Call:
    """``A @ x`` of torch.sparse."""
    left, right = torch_csr(A), tensor(X)
    return lambda: left @ right


def torch_mean(A: CSR) -> Callable[[Any], Any]:
    """The mean over in-neighbours by torch.sparse, with gradient."""
    return torch_product(scale(A.with_data(None), row=(1 / A.lengths.clip(1)).astype(np.float32)))


def torch_product(B: CSR) -> Callable[[Any], Any]:
    """``B @ x`` by torch.sparse, with gradient: both its products by a CSR."""
    import torch

    there, back = torch_csr(B), torch_csr(B.T.tocsr())

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return there @ x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return back @ grad

    return Times.apply


def scipy_spmm(A: CSR, X: Array) -> Call:
    """``A @ X`` of SciPy, or of cupyx.scipy.sparse on a GPU."""
    if is_cupy(X):
        import cupyx.scipy.sparse as library
    else:
        import scipy.sparse as library
    left = library.csr_matrix((A.data, A.indices, A.indptr), shape=A.shape)
    left.has_canonical_format = True  # as it is: nothing to sort or sum
    return lambda: left @ X


def edge_index(A: CSR) -> Any:
    """PyG's ``edge_index`` in CSR order, int64 as its gather and scatter need it."""
    import torch

    coo = A.tocoo()
    return torch.stack([tensor(coo.col).long(), tensor(coo.row).long()])


def pyg_spmm(A: CSR, X: Array) -> Call:
    """PyG's ``EdgeIndex.matmul``, its CSR form cached."""
    from torch_geometric import EdgeIndex

    # An EdgeIndex multiplies as (row, column): the other way round than (source, target).
    pairs = edge_index(A).flip(0)
    edges = EdgeIndex(pairs, sparse_size=A.shape, sort_order="row").fill_cache_()
    x, weight = tensor(X), tensor(A.data)
    return lambda: edges.matmul(x, weight)


def pyg_scatter(A: CSR, X: Array) -> Call:
    """PyG's gather and scatter, as message passing over an ``edge_index`` runs them."""
    from torch_geometric.utils import scatter

    sources, targets = edge_index(A)
    x, weight, n_rows = tensor(X), tensor(A.data), A.n_rows
    return lambda: scatter(x[sources] * weight[:, None], targets, 0, n_rows, "sum")


def compiled_gather_add(A: CSR, X: Array) -> Call:
    """``torch.compile`` of gather, multiply and ``index_add``."""
    import torch

    sources, targets = edge_index(A)
    x, weight = tensor(X), tensor(A.data)
    n_rows = A.n_rows

    def aggregate(x: Any, weight: Any, sources: Any, targets: Any) -> Any:
        zeros = torch.zeros(n_rows, x.shape[1], dtype=x.dtype, device=x.device)
        return zeros.index_add(0, targets, x[sources] * weight[:, None])

    compiled = torch.compile(aggregate)
    return lambda: compiled(x, weight, sources, targets)


def pyg_sddmm(A: CSR, X: Array, Y: Array) -> Call:
    """PyG's gather way: ``(x[row] * y[col]).sum(-1)``."""
    cols, rows = edge_index(A)
    x, y = tensor(X), tensor(Y)
    return lambda: (x[rows] * y[cols]).sum(-1)


def pyg_softmax(A: CSR, scores: Array) -> Call:
    """``torch_geometric.utils.softmax`` by index."""
    from torch_geometric.utils import softmax

    _, rows = edge_index(A)
    s, n_rows = tensor(scores), A.n_rows
    return lambda: softmax(s, rows, num_nodes=n_rows)


def _on_gpu() -> bool:
    cupy = sys.modules.get("cupy")
    torch = sys.modules.get("torch")
    return cupy is not None and torch is not None and bool(torch.cuda.is_available())
