"""Edge groups: bounded pieces of rows, so that every piece of work is about the same size."""

import operator
from dataclasses import dataclass, replace
from functools import cached_property

from .errors import ShapeError, UnsupportedError
from .formats import primitives
from .formats.arrays import Array, allocating, device_of, namespace, on_device_of, to_device
from .formats.compressed import CSR


@dataclass(frozen=True, eq=False)
class EdgeGroups:
    """Consecutive stored entries of one row each, at most ``width`` of them.

    Group ``g`` holds the entries ``ptr[g] .. ptr[g + 1]`` (in CSR order) of row ``row[g]``.  Every
    entry lies in exactly one group; empty rows have none.  A row of more than ``width`` entries is
    split: its groups are ``first[i] .. first[i + 1]``, full but for the last.

    Build them with ``edge_groups(A, width)``.  Source: MaxK-GNN (ASPLOS'24), section 4.
    """

    row: Array  #: (count,) row of each group, ascending; dtype of the CSR's indices
    ptr: Array  #: (count + 1,) first entry of each group, and nnz
    first: Array  #: (n_rows + 1,) first group of each row, and count
    width: int  #: most entries that a group has

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.row)

    @property
    def n_rows(self) -> int:
        """Number of rows that were cut, empty ones counted."""
        return len(self.first) - 1

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<ordinal>"``."""
        return device_of(self.row)

    @property
    def nbytes(self) -> int:
        """Bytes of ``row``, ``ptr`` and ``first`` together."""
        return int(self.row.nbytes + self.ptr.nbytes + self.first.nbytes)

    @cached_property
    def split_rows(self) -> Array:
        """Rows with more than one group, ascending: their partial results must be combined."""
        with on_device_of(self.first), allocating(f"split rows of {self!r}"):
            counts = self.first[1:] - self.first[:-1]
            rows = namespace(counts).flatnonzero(counts > 1)  # synchronize!
            return rows.astype(self.first.dtype)

    @cached_property
    def split_ptr(self) -> Array:
        """(len(split_rows) + 1,) where each split row's partial results begin, and their number.

        Group ``first[i] + j`` of the s-th split row ``i`` stores its partial result at place
        ``split_ptr[s] + j``: adding those up in order is deterministic.
        """
        with on_device_of(self.first), allocating(f"split rows of {self!r}"):
            rows = self.split_rows
            return primitives.offsets(self.first[rows + 1] - self.first[rows], self.first.dtype)

    def to(self, device: str) -> "EdgeGroups":
        """The same groups on another device; itself if there."""
        row, ptr, first = (to_device(array, device) for array in (self.row, self.ptr, self.first))
        return self if row is self.row else replace(self, row=row, ptr=ptr, first=first)

    def __repr__(self) -> str:
        return f"EdgeGroups({self.count} of {self.n_rows} rows, width={self.width}, {self.device})"


def check_width(width: object) -> int:
    """The width of edge groups as a positive Python integer."""
    try:
        found = operator.index(width)  # type: ignore[arg-type]
    except TypeError as error:
        raise ShapeError(f"width is {width!r}: give an integer.") from error
    if found < 1:
        raise ShapeError(f"width is {found}: a group holds at least one entry, give 1 or more.")
    return found


def edge_groups(A: CSR, width: int) -> EdgeGroups:
    """Cut the rows of ``A`` into groups of at most ``width`` consecutive entries.

    Row ``i`` with ``d`` entries gives ``ceil(d / width)`` groups, all full but the last.

    Parameters
    ----------
    A : CSR
        Only ``indptr`` is read.
    width : int
        At least 1.

    Returns
    -------
    EdgeGroups
        On the device of ``A``, with its index dtype.

    Raises
    ------
    ShapeError
        If ``width`` is no positive integer.
    UnsupportedError
        If ``A`` is no CSR.

    Notes
    -----
    A scan and a search; one synchronisation on a GPU.  MaxK-GNN (ASPLOS'24), section 4.
    """
    if not isinstance(A, CSR):
        raise UnsupportedError(
            f"A is a {type(A).__name__}: edge groups cut the rows of a CSR, give A.tocsr()."
        )
    width = check_width(width)
    step = min(width, max(A.nnz, 1))  # fits the index dtype
    xp = namespace(A.indptr)
    with on_device_of(A.indptr), allocating(f"edge groups of {A.nnz} entries"):
        first = primitives.offsets(-(-A.lengths // step), A.index_dtype)
        count = int(first[-1])  # synchronize!
        row = primitives.expand(first, count)
        ptr = xp.empty(count + 1, A.index_dtype)
        ptr[:-1] = A.indptr[row] + (xp.arange(count, dtype=A.index_dtype) - first[row]) * step
        ptr[-1] = A.nnz
        return EdgeGroups(row=row, ptr=ptr, first=first, width=width)
