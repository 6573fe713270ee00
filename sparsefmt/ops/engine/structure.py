"""A CSR on a GPU as kernels see it: sizes and device pointers."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from ..._caches import lru_cache
from ...formats.arrays import Array
from ...formats.base import Built
from ...formats.chunks import Chunks
from ...formats.compressed import CSR
from .jit import view

#: Addresses of ``indptr`` and ``indices``, n_rows, n_cols, nnz: matrices of other shapes may lie on
#: the same arrays.
Place: TypeAlias = tuple[int, int, int, int, int]
Value = TypeVar("Value")

#: Names of the values of a structure that a launch may take; ``""`` is a null pointer.
VALUES = "", "indptr", "indices", "start", "slot", "cut", "long", "nnz"
#: Operations and sizes of which structures alike share what was prepared: graphs of many sizes
#: pass by.
MAX_SHARED = 1024
_lock = Lock()


class Sizes(NamedTuple):
    """Sizes of a matrix, or of a tracer's stand-in: what shapes of results depend on."""

    n_rows: int
    n_cols: int
    nnz: int
    index_dtype: str


class Preparing:
    """A structure of which launches are prepared, each case once."""

    __slots__ = ()

    _prepared: dict[Hashable, Any]

    def prepared(self, prepare: Callable[..., Value], *case: Hashable) -> Value:
        """Return ``prepare(self, *case)``, looked up from the second call on.

        For what does not depend on where the features of a call lie, such as its kernel and grid.
        """
        key = prepare, case
        result: Value | None = self._prepared.get(key)
        if result is None:
            result = self._prepared[key] = prepare(self, *case)
        return result


@dataclass(slots=True, unsafe_hash=True)
class Structure(Preparing):
    """A CSR and its ``Chunks``: sizes and device pointers; whoever makes it keeps the arrays.

    Not frozen: it would take three times as long to make those of each new graph.  Only
    ``build.structure_in`` assigns to one.
    """

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
    longest: int = 0  #: entries of the longest row, of a CSR whose rows may be sampled; else 0
    perm: int = 0  #: of columns that a stream builds, the places of entries among those of the rows
    #: Of a CSR that a stream is building, what it will find; until then ``blocks`` and ``n_cuts``
    #: are the most there can be, which only costs: kernels find nothing to do in those beyond.
    report: Any = field(default=None, repr=False, compare=False)
    half: int = field(default=0, repr=False, compare=False)  #: its place in ``report.findings``
    _prepared: dict[Hashable, Any] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    #: What was prepared for all structures in memory laid out as this one's, by a build from edges;
    #: None for that of a CSR, which shares nothing.
    shared: dict[Hashable, Any] | None = field(init=False, default=None, repr=False, compare=False)
    #: What ``call`` has prepared, by the name of what chooses, and by case.
    cases: dict[str, dict[Hashable, Any]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    #: What launches may take of it, in the order of ``VALUES``.
    values: tuple[int, ...] = field(init=False, default=(), repr=False, compare=False)

    def cases_of(self, name: str, sizes: Callable[["Structure"], Hashable]) -> dict[Hashable, Any]:
        """Return what is prepared for ``name``, shared by structures alike in ``sizes``.

        It depends on no other number of rows or entries, and on no address.  Structures share
        nothing where their sizes are None.
        """
        key = sizes(self)
        shared = self._prepared if key is None or self.shared is None else self.shared
        if len(shared) >= MAX_SHARED:
            shared.clear()
        cases: dict[Hashable, Any] = shared.setdefault((name, key), {})
        arrays = self.indptr, self.indices, self.start, self.slot, self.cut, self.long
        self.values = 0, *arrays, self.nnz  # first: another thread may launch what it finds below
        self.cases[name] = cases
        return cases


def structure_of(A: CSR | Structure) -> Structure:
    """Return the structure of a CSR on a GPU, which is built once and kept with the CSR."""
    if isinstance(A, Structure):
        return A
    built = A._built()
    return built.parts.get("structure") or built.ask(
        "structure", lambda: _structure(A, chunk_pointers(A.chunks).values())
    )


def exact(A: CSR | Structure, *_: Any, **__: Any) -> Structure:
    """Return the structure, its build waited for, for what the number of blocks or rows decides."""
    S = A if type(A) is Structure else structure_of(A)
    if S.report is None:
        return S
    result = S.report.wait()[S.half]
    arrays = S.indptr, S.indices, S.start, S.slot, S.cut, S.long
    sizes = S.n_rows, S.n_cols, S.nnz, S.index_dtype
    return structure_at(*sizes, *arrays, result.blocks, result.cuts, result.longs)


#: Another graph of the same sizes often lies where the one before it lay, and has its structure.
structure_at = lru_cache(maxsize=256)(Structure)


@lru_cache(maxsize=256)
def rows_alone(n_rows: int) -> Structure:
    """Return a structure of ``n_rows`` rows without entries, for operations on features alone."""
    return Structure(n_rows, 0, 0, "", *[0] * 9)


def _structure(A: CSR, of_chunks: Iterable[int]) -> Structure:
    """Make the structure of a CSR, whose last fields are those of ``chunk_pointers``."""
    arrays = A.indptr.data.ptr, A.indices.data.ptr
    return Structure(*A.shape, A.nnz, A.index_dtype.name, *arrays, *of_chunks)


def without_chunks(A: CSR | Structure, *_: Any, **__: Any) -> Structure:
    """Return the structure of a CSR without chunks, made once: they cost time and a wait."""
    if isinstance(A, Structure):
        return A
    built = A._built()
    return built.parts.get("without chunks") or built.ask(
        "without chunks", lambda: _structure(A, [0] * 7)
    )


def transposed(A: CSR) -> tuple[CSR, Array]:
    """Transpose the structure of ``A``: as CSR, and each entry's number in the order of ``A``."""
    columns, perm = A.with_data(None).tocsc_with_perm()
    return columns.T, perm


def chunk_pointers(chunks: Chunks) -> dict[str, int]:
    """Return the last fields of a new ``Structure``, which tell how its rows are shared out."""
    return {
        "start": chunks.start.data.ptr,
        "slot": chunks.slot.data.ptr,
        "cut": chunks.cut.data.ptr,
        "long": chunks.long.data.ptr,
        "blocks": chunks.blocks,
        "n_cuts": len(chunks.cut),
        "n_long": len(chunks.long),
    }


# From a structure back to its CSR


def place_of(S: Structure) -> Place:
    """Return where the arrays of a structure lie."""
    # As torch tells it: a tensor without entries has no address.
    return S.indptr, S.indices if S.nnz else 0, S.n_rows, S.n_cols, S.nnz


class BuiltThere(Built):
    """What is built where a structure lies, and the CSR over its arrays, made when asked for."""

    def __init__(self, make_csr: Callable[[], CSR]) -> None:
        super().__init__()
        self._make_csr = make_csr

    def csr(self) -> CSR:
        """Return the CSR."""
        return self.ask("csr", self._make_csr)


_at: WeakValueDictionary[Place, BuiltThere] = WeakValueDictionary()
#: References to all tiles prepared for structures on a GPU; each goes with its tiles.
all_tiles: set[Any] = set()


def built_for(S: Structure, make_csr: Callable[[], CSR]) -> BuiltThere:
    """Return what is built where this structure lies; found there while anybody holds it.

    ``make_csr`` holds the arrays, so that nothing else can lie there, and makes the CSR over them.
    It goes with the last who asked: what is found by ``"tiles"`` holds a CSR in its turn, and must
    not be held by what that one shares.
    """
    with _lock:
        return _at.setdefault(place_of(S), BuiltThere(make_csr))


def built_at(S: Structure) -> BuiltThere | None:
    """Return what ``built_for`` has made for a structure at this place, or None."""
    return _at.get(place_of(S))


def has_tiles(S: Structure) -> bool:
    """Return True if tiles were prepared for the structure."""
    built = built_at(S)
    return built is not None and "tiles" in built.parts


def csr_of(A: CSR | Structure) -> CSR | None:
    """Return the CSR of a structure, with what was built of it, or None."""
    if not isinstance(A, Structure):
        return A
    built = built_at(A)
    return None if built is None else built.csr()


def csr_over(S: Structure) -> CSR:
    """Make a CSR over the arrays of a structure, which others hold."""
    return CSR._trusted(
        indptr=view(S.indptr, (S.n_rows + 1,), S.index_dtype),
        indices=view(S.indices, (S.nnz,), S.index_dtype),
        data=None,
        shape=(S.n_rows, S.n_cols),
    )
