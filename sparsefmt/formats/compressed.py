"""COO, and CSR and CSC: one implementation, the axis swapped."""

from dataclasses import InitVar, dataclass, field
from typing import ClassVar, Self, TypeVar

from . import checks
from . import chunks as formats_chunks
from .arrays import Array, on_device_of
from .base import Format, FormatName, Level

Other = TypeVar("Other", bound="Compressed")


@dataclass(frozen=True, eq=False, repr=False)
class COO(Format):
    """Coordinates: any order, duplicates allowed (they add up wherever values are combined).

    Parameters
    ----------
    row, col : array, shape (nnz,)
        Target and source vertex of each entry; both int32 or both int64.
    data : array, shape (nnz,), optional
        float16, bfloat16, float32 or float64; None for an unweighted structure.
    shape : (n_rows, n_cols)
    validate : "full" or "cheap"
        How much to check, see ``check``.

    Raises
    ------
    ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arrays do not form such a matrix.
    """

    row: Array  #: (nnz,) target vertices
    col: Array  #: (nnz,) source vertices
    data: Array | None = None  #: (nnz,) values
    shape: tuple[int, int] = field(kw_only=True)
    validate: InitVar[Level] = field(default="full", kw_only=True)

    format: ClassVar[FormatName] = "coo"
    _array_fields: ClassVar[tuple[str, ...]] = ("row", "col", "data")

    @property
    def nnz(self) -> int:
        """Return the number of stored entries, explicit zeros and duplicates counted."""
        return len(self.row)

    @property
    def coords(self) -> tuple[Array, Array]:
        """Return ``(row, col)``, as SciPy does."""
        return self.row, self.col

    @property
    def T(self) -> "COO":
        """Return the transpose; a view, nothing is copied."""
        return self._replace(row=self.col, col=self.row, shape=self.shape[::-1])

    def _check_cheap(self) -> None:
        checks.indices(row=self.row, col=self.col)
        checks.pointers("col", self.col, len(self.row), "row and col describe the same entries")
        checks.sizes_fit(self.shape, self.nnz, self.index_dtype)
        checks.values(self.data, (self.nnz,), like=self.row)

    def _check_full(self) -> None:
        checks.coordinates(self.row, self.col, self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Compressed(Format):
    """The base of CSR and CSC: pointers along the major axis, indices along the minor."""

    indptr: Array  #: (n_major + 1,) where each row (CSR) or column (CSC) begins
    indices: Array  #: (nnz,) column (CSR) or row (CSC) of each entry
    data: Array | None = None  #: (nnz,) values
    shape: tuple[int, int] = field(kw_only=True)
    validate: InitVar[Level] = field(default="full", kw_only=True)

    _array_fields: ClassVar[tuple[str, ...]] = ("indptr", "indices", "data")
    _major: ClassVar[int]
    _axis_names: ClassVar[tuple[str, str]] = ("rows", "columns")

    @property
    def nnz(self) -> int:
        """Return the number of stored entries, explicit zeros and duplicates counted."""
        return len(self.indices)

    @property
    def n_major(self) -> int:
        """Return the number of rows (CSR) or columns (CSC)."""
        return self.shape[self._major]

    @property
    def n_minor(self) -> int:
        """Return the number of columns (CSR) or rows (CSC)."""
        return self.shape[1 - self._major]

    @property
    def lengths(self) -> Array:
        """Return the number of stored entries of each row (CSR) or column (CSC)."""
        with on_device_of(self.indptr):
            return self.indptr[1:] - self.indptr[:-1]

    @property
    def has_sorted_indices(self) -> bool:
        """Return True if indices never decrease within a row (CSR) or column (CSC)."""
        from . import convert

        return convert.is_sorted(self)

    @property
    def chunks(self) -> formats_chunks.Chunks:
        """Return equal shares of the rows (CSR) or columns (CSC), built once, for kernels on a GPU.

        Shared with results of ``with_data`` and ``T``; synchronises with a GPU when it builds them.
        Like all that is built, it holds for the ``indptr`` that was given: do not write to it.
        """
        return self._built().ask("chunks", lambda: formats_chunks.chunks(self.indptr, self.nnz))

    def sorted_indices(self) -> Self:
        """Sort the indices in every row (CSR) or column (CSC), stably; itself if sorted."""
        flipped: FormatName = "csc" if self.format == "csr" else "csr"
        return self if self.has_sorted_indices else self.asformat(flipped).asformat(self.format)

    def _flipped(self, kind: type[Other]) -> Other:
        """Return the transpose in the other format, a view of the same arrays."""
        self._built()
        return kind._trusted(**{**self.__dict__, "shape": self.shape[::-1]})

    def _check_cheap(self) -> None:
        major = self._axis_names[self._major]
        checks.indices(indptr=self.indptr, indices=self.indices)
        why = f"one per {major[:-1]} and an end"
        checks.pointers("indptr", self.indptr, self.n_major + 1, why)
        checks.sizes_fit(self.shape, self.nnz, self.index_dtype)
        checks.values(self.data, (self.nnz,), like=self.indptr)

    def _check_full(self) -> None:
        minor = self._axis_names[1 - self._major]
        checks.compressed(self.indptr, self.indices, self.n_minor, minor)


@dataclass(frozen=True, eq=False, repr=False)
class CSR(Compressed):
    """Compressed sparse rows: one row after another.

    Row ``i`` (target vertex) stores columns ``indices[indptr[i]:indptr[i + 1]]`` (its
    in-neighbours) and their values in ``data``, in any order, duplicates allowed.

    Parameters
    ----------
    indptr : array, shape (n_rows + 1,)
    indices : array, shape (nnz,)
        Both int32 or both int64.
    data : array, shape (nnz,), optional
        float16, bfloat16, float32 or float64; None for an unweighted structure.
    shape : (n_rows, n_cols)
    validate : "full" or "cheap"
        How much to check, see ``check``.

    Raises
    ------
    FormatError, ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arrays do not form such a matrix.
    """

    format: ClassVar[FormatName] = "csr"
    _major: ClassVar[int] = 0

    @property
    def T(self) -> "CSC":
        """Return the transpose as CSC; a view, nothing is copied."""
        return self._flipped(CSC)


@dataclass(frozen=True, eq=False, repr=False)
class CSC(Compressed):
    """Compressed sparse columns: column ``j`` stores rows ``indices[indptr[j]:indptr[j + 1]]``.

    Parameters
    ----------
    indptr : array, shape (n_cols + 1,)
    indices, data, shape
        As for ``CSR``.
    validate : "full" or "cheap"
        How much to check, see ``check``.

    Raises
    ------
    FormatError, ShapeError, DtypeError, DeviceError, IndexRangeError
        If the arrays do not form such a matrix.
    """

    format: ClassVar[FormatName] = "csc"
    _major: ClassVar[int] = 1

    @property
    def T(self) -> "CSR":
        """Return the transpose as CSR; a view, nothing is copied."""
        return self._flipped(CSR)
