"""PyG's ``edge_index`` on a GPU as the user gave it: sizes now, a COO when it is read."""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np

from .._caches import cache
from ..errors import IndexRangeError, SparseFmtError
from ..formats import checks
from ..formats.arrays import Array, has_tangent
from ..formats.compressed import COO
from ..interop.pyg import from_edge_index
from ..interop.torch import is_tensor


@cache
def _dtypes(*names: str) -> dict[Any, np.dtype[Any]]:
    """Return NumPy's dtype of each of torch's with these names."""
    return {getattr(sys.modules["torch"], name): np.dtype(name) for name in names}


#: What torch's sort takes, and what no memory holds: formats build the rest, or refuse it.
_MOST_EDGES, _MOST_VERTICES = 2**31 - 1, 2**40
_FITS_ALWAYS = 2**31 - 1  # ids of either dtype
_INDEX, _VALUES = ("int32", "int64"), ("float16", "float32", "float64")


class Edges:
    """Edges in CUDA tensors: what a graph knows of them before anything is built.

    Whether the ids exist is not known yet: whoever builds of them checks, and ``coo`` does.
    """

    __slots__ = ("__weakref__", "device_number", "index", "nnz", "shape", "weight")

    def __init__(self, index: Array, weight: Array | None, shape: tuple[int, int]) -> None:
        # An alias: a graph that is kept with the user's tensor must not keep that alive.
        self.index = index.detach().contiguous()
        self.weight, self.shape = weight, shape
        self.nnz: int = index.shape[1]  #: number of edges
        self.device_number: int = index.get_device()

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Return NumPy's dtype for the ids."""
        return _dtypes(*_INDEX)[self.index.dtype]

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Return NumPy's dtype for the weights, None without any."""
        return None if self.weight is None else _dtypes(*_VALUES)[self.weight.dtype]

    @property
    def device(self) -> str:
        """Return ``"cuda:<ordinal>"``."""
        return f"cuda:{self.device_number}"

    def coo(self) -> COO:
        """Return the edges as a COO over the same memory, checked; synchronises.

        Raises
        ------
        IndexRangeError
            If an id is negative or too large.
        """
        coo: COO = from_edge_index(self.index, self.weight, num_nodes=self.shape[::-1])
        return coo

    def fault_maker(self) -> Callable[[int], SparseFmtError]:
        """Return the function that makes the error for a wrong id; it does not hold the edges."""
        edges, shape = ref(self), self.shape
        return lambda fault: _fault(edges(), shape, fault)


def _fault(edges: Edges | None, shape: tuple[int, int], fault: int) -> SparseFmtError:
    """Make the error for a wrong id: number 2 e + 1 is the source of edge e, 2 e + 2 its target."""
    if edges is not None:
        try:
            edges.coo()
        except IndexRangeError as error:
            return IndexRangeError(
                f"{error} The graph of these edges was made before this call: on a GPU ids are "
                "checked while it is built."
            )
    entry, side = divmod(fault - 1, 2)
    kind, count = (("source", shape[1]), ("target", shape[0]))[side]
    return IndexRangeError(
        f"edge_index[{side}, {entry}] of a graph that is gone, or whose edge_index has changed "
        f"since, was negative, or not below the {count} {kind} vertices: give ids from 0 to "
        f"{count - 1}, or a larger num_nodes."
    )


def edges_of(edge_index: Any, edge_weight: Array | None, num_nodes: Any) -> Edges | None:
    """Return CUDA tensors of edges as they are; None for what needs more.

    Raises
    ------
    IndexRangeError
        If the sizes are beyond the dtype of the ids.
    """
    if not (is_tensor(edge_index) and edge_index.is_cuda and _is_strided(edge_index, 2, _INDEX)):
        return None
    ends, nnz = edge_index.shape
    if ends != 2 or not 0 < nnz <= _MOST_EDGES:
        return None
    if edge_weight is not None and not _goes_along(edge_weight, edge_index):
        return None
    if num_nodes is None:
        least, most = edge_index.aminmax()
        if least < 0:  # synchronize!
            return None  # refused by who reads it
        num_nodes = int(most) + 1
    if type(num_nodes) is int:
        n_source = n_target = num_nodes
    else:
        try:
            pair = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
            n_source, n_target = map(checks.as_index, pair)
        except (TypeError, ValueError):
            return None  # refused by who reads it with more words
    if n_source < 1 or n_target < 1 or n_source + n_target > _MOST_VERTICES:
        return None
    shape = n_target, n_source
    if max(n_source, n_target) > _FITS_ALWAYS:
        checks.sizes_fit(shape, nnz, _dtypes(*_INDEX)[edge_index.dtype])
    return Edges(edge_index, edge_weight, shape)


def joined_edges(
    parts: Sequence[Edges], rows: list[int], cols: list[int], begins: list[int]
) -> Edges:
    """Join edges of graphs on a diagonal: in a few launches, and nothing waits for the GPU.

    ``rows``, ``cols`` and ``begins`` tell where each begins, and the end.  An id that its own graph
    does not have becomes -1, for the build to report.
    """
    torch = sys.modules["torch"]
    index = torch.cat([part.index for part in parts], 1)
    counts = ([b - a for a, b in pairwise(ends)] for ends in (cols, rows, begins))
    n_cols, n_rows, entries = counts
    of_parts = [n_cols, n_rows, cols[:-1], rows[:-1], entries]
    limits = torch.tensor(of_parts, dtype=index.dtype).to(index.device)
    each = limits[:4].repeat_interleave(limits[4], 1, output_size=begins[-1])
    right = (index >= 0) & (index < each[:2])
    index = (index + each[2:]).where(right, -1)
    weight = None
    if parts[0].weight is not None:
        weight = torch.cat([part.weight for part in parts])
    return Edges(index, weight, (rows[-1], cols[-1]))


def _is_strided(tensor: Array, axes: int, dtypes: tuple[str, ...]) -> bool:
    """Return True for a strided tensor, no subclass, of one of these dtypes."""
    torch = sys.modules["torch"]
    strided = tensor.layout is torch.strided and tensor.dim() == axes
    return type(tensor) is torch.Tensor and strided and tensor.dtype in _dtypes(*dtypes)


def _goes_along(weight: Array, index: Array) -> bool:
    """Return True if weights can be read as they are: a constant for each edge."""
    return (
        is_tensor(weight)
        and weight.device == index.device
        and _is_strided(weight, 1, _VALUES)
        and weight.shape[0] == index.shape[1]
        and not weight.requires_grad
        and not has_tangent(weight)
        and not weight.is_neg()
    )
