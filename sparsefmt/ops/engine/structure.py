"""A CSR on a GPU as kernels see it: sizes and device pointers."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from ...formats.chunks import Chunks
from ...formats.compressed import CSR


class Sizes(NamedTuple):
    """What the shapes of results depend on: of a matrix, or of a tracer's stand-in for one."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str


@dataclass(frozen=True, slots=True)
class Structure:
    """A CSR and its ``Chunks``: sizes and device pointers; whoever makes it keeps the arrays."""

    format: ClassVar[str] = "csr"

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str
    indptr: int
    indices: int
    start: int
    slot: int
    cut: int
    long: int
    blocks: int
    n_cuts: int
    n_long: int
    longest: int = 0  #: entries of the longest row; 0 where that is not known


#: Addresses of ``indptr`` and ``indices``, n_rows, n_cols, nnz: matrices of other shapes may lie on
#: the same arrays.
Place: TypeAlias = tuple[int, int, int, int, int]


def place_of(S: Structure) -> Place:
    """Where that structure lies in memory."""
    # As torch tells it: a tensor without entries has no address.
    return S.indptr, S.indices if S.nnz else 0, S.n_rows, S.n_cols, S.nnz


def structure_of(A: CSR | Structure) -> Structure:
    """The structure of a CSR on a GPU, made once of its arrays; itself for a structure."""
    if isinstance(A, Structure):
        return A
    found: Structure | None = A.__dict__.get("_pointers")
    if found is None:
        found = _structure(A)
        object.__setattr__(A, "_pointers", found)
    return found


def _structure(A: CSR) -> Structure:
    return Structure(
        n_rows=A.n_rows,
        n_cols=A.n_cols,
        nnz=A.nnz,
        index_dtype=A.index_dtype.name,
        indptr=A.indptr.data.ptr,
        indices=A.indices.data.ptr,
        **chunk_pointers(A.chunks),
    )


def chunk_pointers(chunks: Chunks) -> dict[str, int]:
    """The fields of a ``Structure`` that tell how its rows are cut."""
    return {
        "start": chunks.start.data.ptr,
        "slot": chunks.slot.data.ptr,
        "cut": chunks.cut.data.ptr,
        "long": chunks.long.data.ptr,
        "blocks": chunks.blocks,
        "n_cuts": len(chunks.cut),
        "n_long": len(chunks.long),
        "longest": chunks.longest,
    }
