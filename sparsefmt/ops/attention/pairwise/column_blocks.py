"""Cut the columns of a CSR in blocks, for kernels that gather from more memory than the L2 holds.

A kernel that goes through all rows within one block of columns after another gathers from that
block alone.  Nothing of the size of the entries is copied: where columns ascend in every row, those
of a block are one segment of it.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ....formats import chunks as formats_chunks
from ....formats import primitives
from ....formats.arrays import Array, allocating, elementwise, finish, namespace, on_device_of
from ....formats.compressed import CSR
from ...engine.jit import capturing
from ...engine.structure import (
    Structure,
    built_for,
    chunk_pointers,
    csr_of,
    structure_of,
)

#: Bytes that are gathered from in a block, half of what the L2 holds.  By 24, 48, 64, 100 and all
#: of 238 MB: 43.3, 43.2, 44.1, 47.3, 62.7 ms (dot products, a head of 128 float32, reddit, H200);
#: by 24, 48 and all of 60 MB: 42.4, 43.5, 51.9 (4 heads of 32).
BLOCK_BYTES, MOST_BLOCKS = 24 << 20, 8
#: Mean entries of a row in a block from which it pays to go through all rows once more.
BLOCK_ENTRIES = 32


class ColumnBlock(NamedTuple):
    """The entries in some columns: entry e of row i is entry ``e + moves[i]`` of the CSR."""

    structure: Structure  #: whose ``indptr`` and ``nnz`` count these entries, and whose columns all
    moves: int = 0  #: a pointer; 0 where all columns are one block
    arrays: tuple[Array, ...] = ()  #: what it points to


def count(S: Structure, nbytes: int) -> int:
    """Choose how many blocks pay where ``nbytes`` are gathered from."""
    blocks = min(-(-nbytes // BLOCK_BYTES), MOST_BLOCKS)
    return blocks if S.nnz >= blocks * BLOCK_ENTRIES * max(S.n_rows, 1) else 1


def structure_with_columns(A: Any, *_: Any, **__: Any) -> Structure:
    """Return the structure, by whose place ``blocks_of`` finds what is built of its CSR."""
    if isinstance(A, Structure):
        return A
    S, built = structure_of(A), A._built()
    if "columns" not in built.parts:
        own = {"indptr": A.indptr, "indices": A.indices, "data": None, "shape": A.shape}
        built.ask("columns", lambda: built_for(S, lambda: CSR._trusted(**own)))
    return S


def blocks_of(A: CSR | Structure, blocks: int, stream: int) -> tuple[ColumnBlock, ...]:
    """Return the columns of ``A`` in ``blocks`` blocks, built once of its CSR.

    Empty where the CSR is unknown or has no entries, columns do not ascend in every row, or a
    capture of that stream cannot look.
    """
    csr = csr_of(A) if blocks > 1 and A.nnz else None
    if csr is None:
        return ()
    built, key = csr._built(), ("column blocks", blocks)
    if key not in built.parts and capturing(stream):
        return ()
    return built.ask(key, lambda: _build(csr, blocks) if csr.has_sorted_indices else ())


def _build(A: CSR, blocks: int) -> tuple[ColumnBlock, ...]:
    """Build the blocks of columns."""
    xp, size = namespace(A.indptr), -(-A.n_cols // blocks)
    with on_device_of(A.indptr), allocating(f"{A!r} in {blocks} blocks of columns"):
        begins = xp.empty((blocks + 1, A.n_rows), A.index_dtype)
        _begins_kernel()(A.indptr, A.indices, A.n_rows, size, blocks, begins, size=begins.size)
        result = tuple(_block(A, first, last) for first, last in pairwise(begins))
    finish(A.indptr)  # synchronize!
    return result


def _block(A: CSR, first: Array, last: Array) -> ColumnBlock:
    """Build a block of the entries between the first and the last of each row."""
    indptr = primitives.offsets(last - first, A.index_dtype)
    nnz = int(indptr[-1])  # synchronize!
    chunks, moves = formats_chunks.chunks(indptr, nnz), first - indptr[:-1]
    own: dict[str, Any] = {"nnz": nnz, "indptr": indptr.data.ptr, **chunk_pointers(chunks)}
    structure = replace(structure_of(A), **own)
    return ColumnBlock(structure, moves.data.ptr, (indptr, moves, *chunks.arrays()))


#: Find the first entry of each row whose column is in block p or behind, a thread for each.
_begins_kernel = elementwise(
    "raw I indptr, raw I indices, int64 n_rows, int64 block_size, int64 blocks",
    "raw I begins",
    """
    const long long row = i % n_rows, column = i / n_rows * block_size;
    I low = indptr[row], high = indptr[row + 1];
    if (i / n_rows == blocks) low = high;
    while (low < high) {
        const I middle = low + (high - low) / 2;
        if (indices[middle] < column) low = middle + 1; else high = middle;
    }
    begins[i] = low;
    """,
    "sparsefmt_block_begins",
)
