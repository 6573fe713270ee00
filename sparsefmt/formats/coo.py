"""COO: one (row, column, value) triple per stored entry."""

from dataclasses import InitVar, dataclass, field
from typing import ClassVar

from . import checks
from .arrays import Array
from .base import Format, FormatName, Level


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
