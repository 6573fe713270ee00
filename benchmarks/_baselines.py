"""What other libraries offer for the same work, as functions without arguments, inputs prepared.

Tensors are views of our arrays, on the device where those are.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from sparsefmt import CSR
from sparsefmt.formats.arrays import Array, is_cupy
from sparsefmt.interop.torch import to_tensor

Call = Callable[[], Any]


class Missing(RuntimeError):
    """A library, or memory for it, that is not here."""


def use_threads(count: int) -> int:
    """Set the threads of numba and torch, no more than numba has; return their number."""
    import numba
    import torch

    count = min(count, numba.config.NUMBA_NUM_THREADS)
    numba.set_num_threads(count)
    torch.set_num_threads(count)
    return count


def guarded(make: Callable[[], Call]) -> Call:
    """Return the call that ``make`` makes, after one run; ``Missing`` if it cannot run here.

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


def add(calls: dict[str, Call], name: str, make: Callable[[], Call]) -> dict[str, str]:
    """Add another library's call by that name; where it cannot run, return why it is skipped."""
    try:
        calls[name] = guarded(make)
    except Missing as reason:
        return {"skipped": str(reason)}
    return {}


def tensor(array: Array) -> Any:
    """Return a torch view."""
    return to_tensor(array)


def as_cupy(array: Any) -> Any:
    """Return a tensor, or a CuPy array, as a contiguous CuPy array."""
    import cupy

    array = array.detach() if hasattr(array, "detach") else array
    return cupy.ascontiguousarray(cupy.from_dlpack(array))


def torch_csr(A: CSR) -> Any:
    """Return a torch.sparse CSR tensor with A's own index dtype."""
    import torch

    parts = [tensor(array) for array in (A.indptr, A.indices, A.data)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR support is in beta
        return torch.sparse_csr_tensor(*parts, size=A.shape, check_invariants=False)


def torch_spmm(A: CSR, X: Array) -> Call:
    """Return ``A @ x`` of torch.sparse."""
    left, right = torch_csr(A), tensor(X)
    return lambda: left @ right


def torch_product(B: CSR) -> Callable[[Any], Any]:
    """Return ``B @ x`` of torch.sparse, with gradient: both its products by a CSR."""
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


def scipy_sparse(array: Array) -> Any:
    """Return the module of an array's sparse matrices: of SciPy, or of cupyx on a GPU."""
    return import_module("cupyx.scipy.sparse" if is_cupy(array) else "scipy.sparse")


def scipy_spmm(A: CSR, X: Array) -> Call:
    """Return ``A @ X`` of SciPy, or of cupyx.scipy.sparse on a GPU."""
    left = scipy_sparse(X).csr_matrix((A.data, A.indices, A.indptr), shape=A.shape)
    left.has_canonical_format = True  # as it is: nothing to sort or sum
    return lambda: left @ X


def ends_of(A: CSR) -> tuple[Any, Any]:
    """Return row and column of every entry in CSR order, int64."""
    coo = A.tocoo()
    return tensor(coo.row).long(), tensor(coo.col).long()


def edge_index(A: CSR) -> Any:
    """Return PyG's ``edge_index`` in CSR order, int64 as its gather and scatter need it."""
    import torch

    return torch.stack(ends_of(A)[::-1])


def best_spmm(A: CSR, X: Array) -> tuple[str, Call]:
    """Return the fastest product of cuSPARSE and its algorithm, on the CPU torch.sparse's."""
    if not is_cupy(X):
        return "torch.sparse", torch_spmm(A, X)
    import cupy

    from . import _cusparse

    operands = A, X, cupy.empty((A.n_rows, X.shape[1]), X.dtype)
    ways = _cusparse.SPMM_ALGORITHMS
    return _cusparse.best({name: partial(_cusparse.spmm, *operands, name) for name in ways})


def best_sddmm(A: CSR, X: Array, Y: Array) -> tuple[str, Call]:
    """Return the faster product of cuSPARSE and its layout, on the CPU PyG's gather."""
    if not is_cupy(X):
        return "PyG", pyg_sddmm(A, X, Y)
    import cupy

    from . import _cusparse

    operands, ways = (A, X, Y, cupy.empty(A.nnz, X.dtype)), _cusparse.SDDMM_LAYOUTS
    return _cusparse.best({name: partial(_cusparse.sddmm, *operands, name) for name in ways})


def pyg_spmm(A: CSR, X: Array) -> Call:
    """Return PyG's ``EdgeIndex.matmul``, its CSR form cached."""
    from torch_geometric import EdgeIndex

    # An EdgeIndex multiplies as (row, column): the other way round than (source, target).
    pairs = edge_index(A).flip(0)
    edges = EdgeIndex(pairs, sparse_size=A.shape, sort_order="row").fill_cache_()
    x, weight = tensor(X), tensor(A.data)
    return lambda: edges.matmul(x, weight)


def pyg_scatter(A: CSR, X: Array) -> Call:
    """Return PyG's gather and scatter, as message passing over an ``edge_index`` runs them."""
    from torch_geometric.utils import scatter

    sources, targets = edge_index(A)
    x, weight, n_rows = tensor(X), tensor(A.data), A.n_rows
    return lambda: scatter(x[sources] * weight[:, None], targets, 0, n_rows, "sum")


def pyg_sddmm(A: CSR, X: Array, Y: Array) -> Call:
    """Return PyG's gather: ``(x[row] * y[col]).sum(-1)``."""
    cols, rows = edge_index(A)
    x, y = tensor(X), tensor(Y)
    return lambda: (x[rows] * y[cols]).sum(-1)


def pyg_softmax(A: CSR, scores: Array) -> Call:
    """Return ``torch_geometric.utils.softmax`` by index."""
    from torch_geometric.utils import softmax

    _, rows = edge_index(A)
    s, n_rows = tensor(scores), A.n_rows
    return lambda: softmax(s, rows, num_nodes=n_rows)


def _on_gpu() -> bool:
    cupy = sys.modules.get("cupy")
    torch = sys.modules.get("torch")
    return cupy is not None and torch is not None and bool(torch.cuda.is_available())
