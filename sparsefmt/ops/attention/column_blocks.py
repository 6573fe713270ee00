"""The columns of a CSR in parts: for kernels that gather from more memory than the L2 holds.

A kernel that goes through all rows within one part of the columns after another gathers from that
part alone.  Nothing of the size of the entries is copied: where columns ascend in every row, those
of a part are one segment of it.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from ...formats import chunks as formats_chunks
from ...formats import primitives
from ...formats.arrays import Array, allocating, finish, import_cupy, namespace, on_device_of
from ...formats.compressed import CSR
from ..engine.structure import Structure
from ..matmul import cuda as matmul_cuda

#: Bytes that are gathered from in a part, half of what the L2 holds.  By 24, 48, 64, 100 and all of
#: 238 MB: 43.3, 43.2, 44.1, 47.3, 62.7 ms (dot products, a head of 128 float32, reddit, H200); by
#: 24, 48 and all of 60 MB: 42.4, 43.5, 51.9 (4 heads of 32).
PART_BYTES, MOST_PARTS = 24 << 20, 8
#: Mean entries of a row in a part from which it pays to go through all rows once more.
PART_ENTRIES = 32


@dataclass(frozen=True, slots=True)
class Part:
    """The entries in some columns: entry e of row i is entry ``e + moves[i]`` of the CSR."""

    structure: Structure  #: whose ``indptr`` and ``nnz`` count these entries, and whose columns all
    moves: int = 0  #: none where all columns are one part
    arrays: tuple[Array, ...] = ()  #: what it points to


def count(S: Structure, nbytes: int) -> int:
    """How many parts pay where ``nbytes`` are gathered from."""
    parts = min(-(-nbytes // PART_BYTES), MOST_PARTS)
    return parts if S.nnz >= parts * PART_ENTRIES * max(S.n_rows, 1) else 1


def parts_of(A: CSR, parts: int) -> tuple[Part, ...]:
    """The columns of ``A`` in so many parts, kept with it once made.

    Empty where columns do not ascend in every row, or while a capture cannot look.
    """
    if parts < 2:
        return ()
    made: dict[int, tuple[Part, ...]] = A.__dict__.setdefault("_column_parts", {})
    if parts not in made:
        if import_cupy().cuda.get_current_stream().is_capturing():
            return ()
        made[parts] = _made(A, parts) if A.has_sorted_indices else ()
    return made[parts]


def _made(A: CSR, parts: int) -> tuple[Part, ...]:
    xp, size = namespace(A.indptr), -(-A.n_cols // parts)
    with on_device_of(A.indptr), allocating(f"{A!r} in {parts} parts"):
        begins = xp.empty((parts + 1, A.n_rows), A.index_dtype)
        _begins_kernel()(A.indptr, A.indices, A.n_rows, size, parts, begins, size=begins.size)
        found = tuple(_part(A, first, last) for first, last in pairwise(begins))
    finish(A.indptr)  # synchronize!
    return found


def _part(A: CSR, first: Array, last: Array) -> Part:
    indptr = primitives.offsets(last - first, A.index_dtype)
    nnz = int(indptr[-1])  # synchronize!
    chunks, moves = formats_chunks.chunks(indptr, nnz), first - indptr[:-1]
    own = {"nnz": nnz, "indptr": indptr.data.ptr, **matmul_cuda.plan(chunks)}
    structure = replace(matmul_cuda.structure(A), **own)
    return Part(structure, moves.data.ptr, (indptr, moves, *chunks.arrays()))


@cache
def _begins_kernel() -> Any:
    """The first entry of each row whose column is in part p or behind; a thread owns one."""
    return import_cupy().ElementwiseKernel(
        "raw I indptr, raw I indices, int64 n_rows, int64 part_size, int64 parts",
        "raw I begins",
        """
        const long long row = i % n_rows, column = i / n_rows * part_size;
        I low = indptr[row], high = indptr[row + 1];
        if (i / n_rows == parts) low = high;
        while (low < high) {
            const I middle = low + (high - low) / 2;
            if (indices[middle] < column) low = middle + 1; else high = middle;
        }
        begins[i] = low;
        """,
        "sparsefmt_part_begins",
    )
